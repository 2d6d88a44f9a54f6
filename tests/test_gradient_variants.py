"""Ways to lose a gradient that hide from a first look, each with a twin that only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import Mlp, batch, make, only, train, watched
from torch import Tensor, nn

import safetrain
from safetrain import Trainer
from safetrain.rules.functions import find_function_faults


class Side(Mlp):
    """A classifier with a side path through `cut`."""

    def __init__(self, cut: Callable[[Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.side = nn.Linear(6, width)
        self.cut = cut

    def features(self, x: Tensor) -> Tensor:
        return self.body(x) + self.cut(self.side(x))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def codes(report: Any) -> list[str]:
    return sorted({f.code for f in report.findings})


# ---------------------------------------------------------------------- optimizers kept in a list


def test_optimizers_kept_in_a_list_are_told_apart() -> None:
    model = make("mlp")
    opts = [sgd(model.body), sgd(model.head)]
    with safetrain.watch(model, opts, stream=None) as w:
        for _ in range(8):
            for optimizer in opts:
                optimizer.zero_grad()
            x, y = batch(model)
            F.cross_entropy(model(x), y).backward()
            for optimizer in opts:
                optimizer.step()
            w.step()
    assert w.findings == []


def test_a_forgotten_zero_grad_of_an_optimizer_in_a_list() -> None:
    model = make("mlp")
    opts = [sgd(model, 1e-3)]
    with safetrain.watch(model, opts, stream=None) as w:
        for _ in range(8):
            x, y = batch(model)
            F.cross_entropy(model(x), y).backward()
            opts[0].step()
            w.step()
    assert [f.code for f in w.findings] == ["P209"]


# ---------------------------------------------------------------------- P201


def wrap_in_parameter(s: Tensor) -> Tensor:
    return nn.Parameter(s) * 2  # CUT


def convert_by_type(s: Tensor) -> Tensor:
    return s.type(torch.LongTensor).float()  # CUT


class NoGradForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    @torch.no_grad()  # DECORATOR
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * weight, None  # GIVES NONE


def line_marked(marker: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        found = [n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# {marker}")]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("cut", [wrap_in_parameter, convert_by_type], ids=lambda f: f.__name__)
def test_a_new_parameter_and_a_conversion_by_type_are_named_as_cuts(cut: Callable[[Tensor], Tensor]) -> None:
    model = Side(cut)
    with watched() as report:
        train(model, steps=6)
    finding = only(report, "P201")
    assert set(finding.params) == {"side.weight", "side.bias"}
    assert finding.source is not None and finding.source.line == cut.__code__.co_firstlineno + 1


class CallsItInForward(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.cut = NoGradForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + self.cut(h))


def test_a_decorator_is_named_though_the_caller_has_the_same_name() -> None:
    with watched() as report:
        train(CallsItInForward(), steps=25)
    [finding] = [f for f in report.findings if "cut.inner.weight" in f.params]
    assert finding.code == "P201"
    assert finding.source is not None and finding.source.line == line_marked("DECORATOR")


def test_a_function_that_gives_a_parameter_no_gradient_is_named() -> None:
    model = make("mlp")
    model.scale = nn.Parameter(torch.ones(3))
    with watched() as report:
        train(model, steps=12, loss_fn=lambda m, x, y: F.cross_entropy(GivesNone.apply(m(x), m.scale), y))
    finding = only(report, "P201")
    assert finding.params == ["scale"] and "`GivesNone`" in (finding.cause or "")
    assert finding.source is not None and finding.source.line == line_marked("GIVES NONE")


# ---------------------------------------------------------------------- P202, P203, P204


def test_a_new_head_of_another_width_is_one_fault() -> None:
    model = make("mlp")
    optimizer = sgd(model)
    model.head = nn.Linear(16, 5)
    with watched() as report:
        train(model, optimizer, steps=6)
    assert set(only(report, "P204").params) == {"head.weight", "head.bias"}


def test_a_layer_inside_a_closure_is_not_registered() -> None:
    hidden = nn.Linear(16, 16)
    with watched() as report:
        train(Side(lambda s: hidden(s)), steps=6)
    finding = only(report, "P202")
    assert set(finding.params) == {"cut.hidden.weight", "cut.hidden.bias"}


class Weighted(Trainer):
    """Loss weights and a criterion that the trainer keeps for itself."""

    def __init__(self, *args: Any, fixed: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log_var = nn.Parameter(torch.zeros(()), requires_grad=not fixed)
        self.projection = nn.Linear(3, 3).train(not fixed)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.projection(self.model(x)), y) * torch.exp(-self.log_var) + self.log_var


@pytest.mark.parametrize("fixed", [False, True])
def test_parameters_that_a_trainer_keeps_beside_the_model(fixed: bool) -> None:
    model = make("mlp")
    trainer = Weighted(model, sgd(model), fixed=fixed, max_steps=6)
    trainer.fit([batch(model) for _ in range(6)])
    found = {name for f in trainer.report.findings for name in f.params if f.code == "P202"}
    hidden = {"Weighted.log_var", "Weighted.projection.weight", "Weighted.projection.bias"}
    assert found == (set() if fixed else hidden)


def test_a_critic_frozen_for_the_generators_turn_is_no_note() -> None:
    critic, generator = make("mlp"), nn.Linear(4, 6)
    opts = [sgd(critic), sgd(generator)]
    with safetrain.watch(nn.ModuleList([critic, generator]), opts, stream=None) as w:
        for _ in range(10):
            x, y = batch(critic)
            opts[0].zero_grad()
            F.cross_entropy(critic(x), y).backward()
            opts[0].step()
            critic.requires_grad_(False)
            opts[1].zero_grad()
            F.cross_entropy(critic(generator(torch.randn(8, 4))), y).backward()
            opts[1].step()
            critic.requires_grad_(True)
            w.step()
    assert "P203" not in {f.code for f in w.findings}


# ---------------------------------------------------------------------- P207


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda s: torch.sigmoid(s + 500),
    "hardtanh": lambda s: F.hardtanh(s + 40),
    "hardsigmoid": lambda s: F.hardsigmoid(s + 40),
    "relu": lambda s: torch.relu(s - 50),
    "clamp": lambda s: (s + 5000).clamp(0, 1),
    "div": lambda s: torch.div(s, 0.5, rounding_mode="floor"),
}


@pytest.mark.parametrize("op", FLAT)
def test_an_operation_that_lets_nothing_through_is_proved_and_named(op: str) -> None:
    with watched() as report:
        train(Side(FLAT[op]), steps=16)
    finding = only(report, "P207")
    assert finding.op == op and set(finding.params) == {"side.weight", "side.bias"}
    assert finding.source is not None and finding.source.line == FLAT[op].__code__.co_firstlineno


@pytest.mark.parametrize("hinge", ["relu", "clamp", "squared", "zero loss"])
def test_a_margin_that_is_met_is_not_dead(hinge: str) -> None:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        slack = -10 - m.side(x).abs()
        met = {
            "relu": torch.relu(slack).mean(),
            "clamp": slack.clamp(min=0).sum(1).mean(),
            "squared": (torch.relu(slack) ** 2).mean(),
            "zero loss": torch.relu(slack).mean(),
        }[hinge]
        return met if hinge == "zero loss" else met + F.cross_entropy(m.head(m.body(x)), y)

    model = Side(nn.Identity())
    with watched() as report:
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=140, loss_fn=loss)
    assert "P207" not in codes(report)


def test_asking_why_a_gradient_is_zero_recomputes_nothing() -> None:
    calls = 0

    class Block(nn.Module):
        def forward(self, s: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.relu(s - 50)

    model = make("mlp")
    model.body.append(nn.Linear(16, 16)).append(Block())
    trainer_type = type("Plain", (Trainer,), {"training_step": lambda self, b: F.cross_entropy(self.model(b[0]), b[1])})
    trainer = trainer_type(model, sgd(model), max_steps=16, activation_checkpoint="body.5")
    trainer.fit([batch(model) for _ in range(16)])
    assert calls == 2 * 16  # once forward and once in backward


# ---------------------------------------------------------------------- P208


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.GroupNorm(4, 4), nn.GroupNorm(2, 4)])
def test_a_bias_that_a_normalisation_takes_off_again_need_not_move(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model: Any = make("conv").to(torch.bfloat16)
    model.body[1] = norm.to(torch.bfloat16)
    with watched() as report:
        train(model, sgd(model, 1e-6), steps=20, loss_fn=lambda m, x, y: F.cross_entropy(m(x.bfloat16()).float(), y))
    stuck = {name for f in report.findings if f.code == "P208" for name in f.params}
    assert "body.0.weight" in stuck
    assert ("body.0.bias" in stuck) == (getattr(norm, "num_groups", 4) == 2)


# ---------------------------------------------------------------------- G111, G112


class PicksSecond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1]


class PicksBoth(PicksSecond):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[1] + 0 * ctx.saved_tensors[0]


class KeepsInADict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = {"inputs": [x]}
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.kept["inputs"][0] > 0)


@pytest.mark.parametrize(
    ("function", "expected"), [(PicksSecond, ["G111"]), (PicksBoth, []), (KeepsInADict, ["G112"])], ids=str
)
def test_functions_that_save_too_much_or_elsewhere(function: Any, expected: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    assert [f.code for f in find_function_faults(function.apply(x * 1).sum())] == expected
