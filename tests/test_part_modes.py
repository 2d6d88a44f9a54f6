"""L501 for parts: an evaluation that leaves one part in eval mode, beside the many ways to freeze one on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safetrain
from safetrain import Trainer
from safetrain.callbacks import Callback
from safetrain.findings import Finding
from safetrain.state import RunState

STEPS = 60


class Net(nn.Module):
    """A part with Dropout and BatchNorm under two names, so that each program can call one of its own."""

    def __init__(self, kind: str = "norms", name: str = "encoder") -> None:
        super().__init__()
        layers: dict[str, nn.Module] = {
            "norms": nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 16)),
            "dropout": nn.Sequential(nn.Linear(6, 16), nn.Sequential(nn.ReLU(), nn.Dropout(0.1)), nn.Linear(16, 16)),
            "conv": nn.Sequential(
                nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 16)
            ),
            "attention": nn.Sequential(
                nn.Linear(6, 16),
                nn.Unflatten(1, (1, 16)),
                nn.TransformerEncoderLayer(16, 2, 16, batch_first=True),
                nn.Flatten(),
            ),
            "plain": nn.Sequential(nn.Linear(6, 16), nn.Tanh()),
        }
        self.name = name
        self.add_module(name, layers[kind])
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    @property
    def part(self) -> nn.Module:
        return self.get_submodule(self.name)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6), torch.randint(3, (8,))


def bare_loop(
    model: nn.Module,
    before: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
    steps: int = STEPS,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[Finding]:
    """Every finding of L501 and L512 in a plain loop that calls `before` and `after` each step, counted from 1."""
    with safetrain.watch(stream=None) as watched:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model.train()
        for step in range(1, steps + 1):
            before(step)
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy((forward or model)(x), y).backward()
            optimizer.step()
            after(step)
    assert watched.trouble == []
    return [f for f in watched.findings if f.severity != "note"]


# ---------------------------------------------------------------------- the faults


@torch.no_grad()
def features_of(net: nn.Module, x: Tensor) -> Tensor:
    net.eval()  # LEFT by the decorated helper
    return net(x)


def bank_of(model: Net, x: Tensor) -> Tensor:
    model.encoder.eval()  # LEFT by the helper with a block
    with torch.no_grad():
        return model.encoder(x)


def evaluate(model: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.encoder.eval()  # LEFT inside the block
        return model.head(model.encoder(x))


def unless_small(model: Net, x: Tensor) -> Tensor:
    model.encoder.train(False)  # LEFT by the early return
    with torch.no_grad():
        z = model.encoder(x)
    if len(x) < 10:
        return z
    model.encoder.train()
    return z


FAULTS: dict[str, Callable[[Net, Tensor], Any]] = {
    "by the decorated helper": lambda model, x: features_of(model.encoder, x),
    "by the helper with a block": bank_of,
    "inside the block": evaluate,
    "by the early return": unless_small,
}


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["norms", "dropout", "conv", "attention"])
def test_a_part_that_an_evaluation_left_in_eval_mode(kind: str, fault: str) -> None:
    model = Net(kind)
    (finding,) = bare_loop(model, after=lambda step: FAULTS[fault](model, torch.randn(4, 6)) if step == 20 else None)
    assert (finding.code, finding.module, finding.first_step) == ("L501", "encoder", 21)
    assert finding.source is not None and f"LEFT {fault}" in finding.source.text
    assert finding.last_step == 26
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_it_is_told_again_and_again_put_there() -> None:
    model = Net()
    (finding,) = bare_loop(
        model, before=lambda step: bank_of(model, torch.randn(4, 6)) if step > 10 and step % 2 else None
    )
    assert finding.module == "encoder"


def test_models_that_are_called_one_after_another() -> None:
    encoder, head = Net().encoder, nn.Linear(16, 3)
    both = nn.ModuleList([encoder, head])
    (finding,) = bare_loop(
        both,
        after=lambda step: features_of(encoder, torch.randn(4, 6)) if step == 20 else None,
        forward=lambda x: head(encoder(x)),
    )
    assert finding.code == "L501" and finding.source is not None and "LEFT by the decorated" in finding.source.text


class Mining(Trainer):
    """Looks for hard samples every ten steps, with the part in eval mode."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, y = given
        if self.state.step and self.state.step % 10 == 0:
            x = x[self.hardest(x)]
        return F.cross_entropy(self.model(x), y)

    def hardest(self, x: Tensor) -> Tensor:
        self.model.miner.eval()
        with torch.no_grad():
            return self.model.miner(x).norm(dim=1).argsort()


class Banking(Callback):
    def on_epoch_end(self, state: RunState) -> None:
        state.model.banked.eval()
        with torch.no_grad():
            self.bank = state.model.banked(torch.randn(8, 6))


class Plain(Trainer):
    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(given[0]), given[1])


def fit(kind: type[Trainer], model: nn.Module, **options: Any) -> list[Finding]:
    trainer = kind(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=STEPS, **options)
    data = [batch() for _ in range(20)]
    trainer.fit(data, data[:2])
    return [f for f in trainer.report.findings if f.severity != "note"]


def test_a_helper_of_the_trainer_leaves_it() -> None:
    (finding,) = fit(Mining, Net(name="miner"), eval_every=15)
    assert (finding.code, finding.module, finding.first_step) == ("L501", "miner", 11)
    assert finding.source is not None and finding.source.text == "self.model.miner.eval()"


def test_a_callback_of_the_trainer_leaves_it() -> None:
    (finding,) = fit(Plain, Net(name="banked"), callbacks=[Banking()])
    assert (finding.code, finding.module, finding.first_step) == ("L501", "banked", 21)
    assert finding.source is not None and finding.source.text == "state.model.banked.eval()"


# ---------------------------------------------------------------------- innocent


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]


def frozen_norms_from_the_start(model: Net) -> list[Finding]:
    return bare_loop(model, before=lambda step: [m.eval() for m in norms(model)])


def frozen_norms_from_a_step_on(model: Net) -> list[Finding]:
    return bare_loop(model, before=lambda step: [m.eval() for m in norms(model)] if step > 20 else None)


def a_part_in_eval_mode_from_the_start(model: Net) -> list[Finding]:
    def each_epoch(step: int) -> None:
        if step % 10 == 1:
            model.train()
            model.encoder.eval()

    return bare_loop(model, before=each_epoch)


def frozen_altogether_at_an_epoch(model: Net) -> list[Finding]:
    def freeze(step: int) -> None:
        if step == 20:
            model.encoder.eval()
            model.encoder.requires_grad_(False)

    return bare_loop(model, before=freeze)


def without_dropout_in_the_last_epochs(model: Net) -> list[Finding]:
    """A schedule, beside evaluations in the same function that restore what they found."""

    def each_epoch(step: int) -> None:
        if step % 10 == 1:
            model.train()
            if step > 20:
                model.encoder.eval()
            with torch.no_grad():
                model(torch.randn(4, 6))

    return bare_loop(model, before=each_epoch)


class KeepsEncoder(Net):
    def train(self, mode: bool = True) -> KeepsEncoder:
        super().train(mode)
        self.encoder.eval()
        return self


def an_overridden_train(model: Net) -> list[Finding]:
    return bare_loop(KeepsEncoder(), before=lambda step: None)


def helpers_that_restore(model: Net) -> list[Finding]:
    def bank(step: int) -> None:
        was = model.encoder.training
        model.encoder.eval()
        with torch.no_grad():
            model.encoder(torch.randn(4, 6))
        model.encoder.train(was)

    return bare_loop(model, before=bank)


def evaluated_after_each_step_and_switched_back_before_the_next(model: Net) -> list[Finding]:
    return bare_loop(
        model, before=lambda step: model.train(), after=lambda step: bank_of(model, torch.randn(4, 6)), steps=90
    )


def a_part_that_cares_for_no_mode(model: Net) -> list[Finding]:
    plain = Net("plain")
    return bare_loop(plain, after=lambda step: bank_of(plain, torch.randn(4, 6)) if step == 20 else None)


def a_critic_in_the_generators_turn(model: Net) -> list[Finding]:
    generator, critic = nn.Linear(3, 6), Net()
    with safetrain.watch(stream=None) as watched:
        of_generator, of_critic = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
        for _ in range(STEPS):
            critic.train()
            of_critic.zero_grad()
            F.cross_entropy(critic(generator(torch.randn(8, 3)).detach()), batch()[1]).backward()
            of_critic.step()
            critic.encoder.eval()
            for _ in range(6):
                of_generator.zero_grad()
                F.cross_entropy(critic(generator(torch.randn(8, 3))), batch()[1]).backward()
                of_generator.step()
    return [f for f in watched.findings if f.code == "L501"]


def second_phase_in_a_function(model: Net) -> list[Finding]:
    """Fixed statistics from the second phase on, which is another call; its end looks at the features."""
    with safetrain.watch(stream=None) as watched:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def train(net: nn.Module, steps: int) -> None:
            for _ in range(steps):
                x, y = batch()
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()

        train(model, 20)
        model.encoder.eval()
        train(model, 40)
        with torch.no_grad():
            model.encoder(torch.randn(4, 6))
    return [f for f in watched.findings if f.severity != "note"]


INNOCENT = [
    second_phase_in_a_function,
    frozen_norms_from_the_start,
    frozen_norms_from_a_step_on,
    a_part_in_eval_mode_from_the_start,
    frozen_altogether_at_an_epoch,
    without_dropout_in_the_last_epochs,
    an_overridden_train,
    helpers_that_restore,
    evaluated_after_each_step_and_switched_back_before_the_next,
    a_part_that_cares_for_no_mode,
    a_critic_in_the_generators_turn,
]


@pytest.mark.parametrize("program", INNOCENT, ids=lambda f: f.__name__)
def test_parts_in_eval_mode_on_purpose(program: Callable[[Net], list[Finding]]) -> None:
    assert program(Net()) == []


class Scheduled(Trainer):
    """Puts a part into eval mode at an epoch, by name; its evaluation helper restores what it found."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        if self.state.epoch >= 1:
            self.model.scheduled.eval()
        return F.cross_entropy(self.model(given[0]), given[1])

    def features(self, x: Tensor) -> Tensor:
        self.model.scheduled.eval()
        with torch.no_grad():
            return self.model.scheduled(x)


def test_a_schedule_of_the_trainer_is_not_taken_for_its_helper() -> None:
    assert fit(Scheduled, Net(name="scheduled")) == []


class LooksAfterwards(Trainer):
    """Switches back at the start of each step what it left at the end of the last."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        self.model.train()
        loss = F.cross_entropy(self.model(given[0]), given[1])
        if self.state.step > 5:
            self.model.afterwards.eval()
            with torch.no_grad():
                self.log("norm", self.model.afterwards(given[0]).norm())
        return loss


def test_a_look_after_each_forward_is_switched_back_before_the_next() -> None:
    model = Net(name="afterwards")
    assert [f.code for f in fit(LooksAfterwards, model)] == ["L512"]  # an evaluation step is a training step here
    assert not any(module._forward_pre_hooks for module in model.modules())
