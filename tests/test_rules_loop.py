"""The loop's own order and bookkeeping: each fault planted in a hand-written loop, next to its look-alikes."""

from __future__ import annotations

import copy
import random
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import KINDS, batch, loud, make, only, train, watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from safetrain import StepOutput, Trainer
from safetrain.findings import Report
from safetrain.foreign.watching import Watch
from safetrain.guarding.loop import SnapshotGuard, loop_guards
from safetrain.rules import loop as rules


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loader(model: Any, n: int = 40, size: int = 4, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*batch(model, n)), batch_size=size, shuffle=True, **options)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# ---------------------------------------------------------------------- L503, L504


def accumulate(model: nn.Module, data: DataLoader[Any], every: int, how: str, epochs: int = 3) -> Report:
    optimizer = sgd(model)
    with watched() as report:
        optimizer.zero_grad()
        for _ in range(epochs):
            if how == "dropped":
                optimizer.zero_grad()
            for i, (x, y) in enumerate(data):
                window = min(every, len(data) - i // every * every)
                divisor = {"bare": 1, "right": window}.get(how, every)
                (mean_loss(model, x, y) / divisor).backward()
                last = i + 1 == len(data) and how in ("right", "short", "bare")
                if (i + 1) % every == 0 or last:
                    optimizer.step()
                    optimizer.zero_grad()
    return report


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("kind", ["mlp", "transformer", "rnn"])
@pytest.mark.parametrize(
    ("how", "code"), [("bare", "L503"), ("dropped", "L504"), ("carried", "L504"), ("short", "L504"), ("right", None)]
)
def test_windows_of_micro_batches(kind: str, how: str, code: str | None) -> None:
    model = make(kind)
    report = accumulate(model, loader(model), 4, how)
    if code is None:
        assert loud(report) == []
    else:
        finding = only(report, code)
        assert finding.source is not None and finding.first_step <= 5


def tokens(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6)
    y = torch.randint(0, 3, (n,))
    y[torch.randint(1, n, ()) :] = -100
    return x, y


@pytest.mark.parametrize("right", [False, True])
def test_a_mean_of_means_over_unequal_token_counts(right: bool) -> None:
    model = make("mlp")
    optimizer = sgd(model)
    torch.manual_seed(3)
    with watched() as report:
        for _ in range(6):
            window = [tokens(16) for _ in range(4)]
            count = sum(int((y != -100).sum()) for _, y in window)
            optimizer.zero_grad()
            for x, y in window:
                if right:
                    loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / count
                else:
                    loss = F.cross_entropy(model(x), y, ignore_index=-100) / len(window)
                loss.backward()
            optimizer.step()
    if right:
        assert loud(report) == []
    else:
        assert "ignore_index" in only(report, "L503").message


def test_a_masked_mean_is_read_too() -> None:
    model = make("mlp")
    x, y = tokens(16)
    mask = (y != -100).float()
    loss = (F.cross_entropy(model(x), y.clamp(min=0), reduction="none") * mask).sum() / mask.sum() / 4
    weight = rules.loss_weight(loss)
    assert weight is not None and weight.per_element == pytest.approx(1 / (4 * float(mask.sum())))


@pytest.mark.parametrize("divide_by", ["own count", "window's count"])
def test_sums_divided_by_counts_of_tokens(divide_by: str) -> None:
    model = make("mlp")
    optimizer = sgd(model)
    torch.manual_seed(3)
    with watched() as report:
        for _ in range(6):
            window = [tokens(16) for _ in range(4)]
            total = sum((y != -100).sum() for _, y in window)
            optimizer.zero_grad()
            for x, y in window:
                mask = (y != -100).float()
                summed = (F.cross_entropy(model(x), y.clamp(min=0), reduction="none") * mask).sum()
                (summed / total if divide_by == "window's count" else summed / mask.sum() / 4).backward()
            optimizer.step()
    if divide_by == "own count":
        assert "a sum divided by its own count" in only(report, "L503").message
    else:
        assert loud(report) == []


@pytest.mark.parametrize("divisor", [1, 4])
def test_accumulation_under_label_smoothing(divisor: int) -> None:
    model = make("mlp")
    optimizer = sgd(model)
    with watched() as report:
        for _ in range(3):
            for i, (x, y) in enumerate(loader(model, 64)):
                (F.cross_entropy(model(x), y, label_smoothing=0.1) / divisor).backward()
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    if divisor == 1:
        assert "4 backwards add up" in only(report, "L503").message
    else:
        assert loud(report) == []


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda o: F.mse_loss(o, torch.zeros(8, 3)), (1.0, 24)),
        (lambda o: 0.5 * o.pow(2).mean() / 2, (0.25, 24)),
        (lambda o: F.cross_entropy(o, torch.zeros(8).long()) + o.norm(), (1.0, 8)),
        (lambda o: F.mse_loss(o, torch.zeros(8, 3), reduction="sum") / 24, (1.0, 24)),
        (lambda o: F.mse_loss(o, torch.zeros(8, 3), reduction="sum") / 2.5, (0.4, None)),
        (lambda o: F.cross_entropy(o, torch.zeros(8).long(), label_smoothing=0.1) / 2, (0.5, 8)),
        (lambda o: o.exp().max(), None),
    ],
)
def test_how_a_loss_weighs_its_elements(loss: Any, expected: tuple[float, float | None] | None) -> None:
    model = make("mlp")
    found = rules.loss_weight(loss(model(model.inputs(8))))
    assert (None if found is None else (found.factor, found.count)) == expected


def test_several_terms_losses_and_tasks_are_no_accumulation() -> None:
    model = make("mlp")
    model.other = nn.Linear(16, 3)
    optimizer = sgd(model)
    data = loader(model)
    with watched() as report:
        for x, y in data:  # two losses of one batch, one after the other
            optimizer.zero_grad()
            h = model.features(x)
            F.cross_entropy(model.head(h), y).backward(retain_graph=True)
            F.cross_entropy(model.other(h), y).backward()
            optimizer.step()
        for (xa, ya), (xb, yb) in zip(data, loader(model), strict=True):  # two tasks, each its own loader and line
            optimizer.zero_grad()
            for x, y, head in ((xa, ya, model.head), (xb, yb, model.other)):
                F.cross_entropy(head(model.features(x)), y).backward()
            optimizer.step()
        for x, y in data:  # an attack, whose gradients are thrown away on purpose
            x.requires_grad_()
            mean_loss(model, x, y).backward()
            adversarial = (x + 0.1 * x.grad.sign()).detach()
            optimizer.zero_grad()
            (mean_loss(model, adversarial, y) + model.other(model.features(x)).pow(2).mean()).backward()
            optimizer.step()
    assert loud(report) == []


def test_the_trainer_weighs_by_samples_and_says_when_tokens_need_a_StepOutput() -> None:
    class Tokens(Trainer):
        exact = False

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
            x, y = batch
            if self.exact:
                return StepOutput(
                    F.cross_entropy(self.model(x), y, ignore_index=-100, reduction="sum"), int((y != -100).sum())
                )
            return F.cross_entropy(self.model(x), y, ignore_index=-100)

    for exact in (False, True):
        model, report = make("mlp"), Report()
        torch.manual_seed(3)
        trainer = Tokens(model, sgd(model), max_steps=6, accumulate=4, guards="off", callbacks=loop_guards(report))
        trainer.exact = exact
        trainer.fit([tokens(16) for _ in range(24)])
        if exact:
            assert loud(report) == []
        else:
            assert "StepOutput" in (only(report, "L503").fix or "")

    class Plain(Trainer):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return mean_loss(self.model, *batch)

    model, report = make("mlp"), Report()
    sizes = [8, 8, 5, 8, 3, 8]
    Plain(model, sgd(model), max_epochs=4, accumulate=4, guards="off", callbacks=loop_guards(report)).fit(
        [batch(model, n) for n in sizes]
    )
    assert loud(report) == []


@pytest.mark.parametrize("how", ["terms", "heads", "loop", "micro-batches"])
def test_backwards_of_several_terms_are_no_micro_batches(how: str) -> None:
    class Terms(Trainer):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            hidden, (_, y) = self.model[0](window[0][0]).tanh(), window[0]
            if how == "terms":
                self.backward(F.cross_entropy(hidden, y), retain_graph=True)
                self.backward(hidden.pow(2).mean())
            elif how == "heads":
                self.backward(F.cross_entropy(hidden, y), retain_graph=True)
                self.backward(F.cross_entropy(hidden[:, :, None].expand(-1, -1, 5), y[:, None].expand(-1, 5)))
            elif how == "loop":
                for term in (F.cross_entropy(hidden, y), hidden.pow(2).mean()):
                    self.backward(term, retain_graph=True)
            else:
                for part in (slice(12), slice(12, None)):
                    self.backward(F.cross_entropy(self.model(window[0][0][part]), y[part]) / 2)
            self.optimizer_step()

    report = Report()
    model = nn.Sequential(nn.Linear(8, 3))
    data = [(torch.randn(16, 8), torch.randint(0, 3, (16,))) for _ in range(6)]
    Terms(model, sgd(model), max_steps=6, guards="off", callbacks=loop_guards(report)).fit(data)
    assert loud(report) == (["L503"] if how == "micro-batches" else [])


# ---------------------------------------------------------------------- P209, P213


def test_an_evaluation_that_runs_backward() -> None:
    for wrong in (True, False):
        model = make("conv")
        optimizer = sgd(model)
        data = loader(model)
        with watched() as report:
            for _ in range(2):
                for training in (True, False):
                    model.train(training)
                    for x, y in data:
                        with torch.set_grad_enabled(training or wrong):
                            loss = mean_loss(model, x, y)
                        if training or wrong:
                            loss.backward()
                        if training:
                            optimizer.step()
                            optimizer.zero_grad()
        if wrong:
            assert "eval mode" in only(report, "P209").message
        else:
            assert loud(report) == []


def test_clearing_before_the_step_and_inside_a_window() -> None:
    for place in ("before step", "in window", "right"):
        model = make("rnn")
        optimizer = sgd(model)
        with watched() as report:
            for i, (x, y) in enumerate(loader(model, n=48)):
                if place == "in window":
                    optimizer.zero_grad()
                (mean_loss(model, x, y) / 3).backward()
                if i % 3 == 2:
                    if place == "before step":
                        optimizer.zero_grad()
                    optimizer.step()
                    if place == "right":
                        optimizer.zero_grad()
        if place == "right":
            assert loud(report) == []
        else:
            assert only(report, "P213").op == "zero_grad"


@pytest.mark.parametrize("fill", ["assigned", "written", "no"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_the_loop_puts_together_itself_are_not_dropped(fill: str, set_to_none: bool) -> None:
    """Gradient surgery: gradients of several losses are taken apart, cleared, and a combination is stepped on."""
    model = make("mlp")
    optimizer = sgd(model)
    params = list(model.parameters())
    with watched() as report:
        for _ in range(8):
            x, y = batch(model, 8)
            optimizer.zero_grad(set_to_none=set_to_none)
            mean_loss(model, x, y).backward()
            combined = [p.grad.clamp(-1, 1) for p in params]
            optimizer.zero_grad(set_to_none=set_to_none)
            for p, g in zip(params, combined, strict=True):
                if fill == "assigned" or (fill == "written" and p.grad is None):
                    p.grad = g
                elif fill == "written":
                    p.grad.copy_(g)
            optimizer.step()
    if fill == "no":
        assert only(report, "P213").op == "zero_grad"
    else:
        assert loud(report) == []


# ---------------------------------------------------------------------- L501, L512


def evaluate(model: nn.Module, data: Any) -> float:
    with torch.no_grad():
        return sum(float(mean_loss(model, x, y)) for x, y in data)


@pytest.mark.parametrize("how", ["left", "restored", "on purpose", "part"])
def test_eval_mode_that_stays_on(how: str) -> None:
    model = make("conv")
    optimizer = sgd(model)
    data, val = loader(model), loader(model, n=8)
    if how == "on purpose":
        model.eval()  # fine-tuning with fixed statistics
    with watched() as report:
        for _ in range(3):
            if how == "part":
                model.train()
                model.body[1].eval()
            for x, y in data:
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                optimizer.step()
            if how in ("left", "restored"):
                model.eval()
            evaluate(model, val)
            if how == "restored":
                model.train()
    if how == "left":
        finding = only(report, "L501")
        assert finding.source is not None and "model.eval()" in finding.source.text
    elif how != "part":
        assert [c for c in loud(report) if c != "L512"] == []


@pytest.mark.parametrize("mode", ["train", "eval", "monte carlo"])
def test_evaluating_in_train_mode(mode: str) -> None:
    model = make("conv")
    model.drop = nn.Dropout(0.5)
    model.head = nn.Sequential(model.drop, model.head)
    optimizer = sgd(model)
    data, val = loader(model), loader(model, n=12)
    with watched() as report:
        for _ in range(2):
            model.train()
            for x, y in data:
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                optimizer.step()
            if mode != "train":
                model.eval()
            if mode == "monte carlo":
                model.drop.train()
            evaluate(model, val)
    if mode == "train":
        finding = only(report, "L512")
        assert finding.phase == "eval" and "BatchNorm" in finding.message
    else:
        assert loud(report) == []


def test_statistics_renewed_over_the_training_data_are_no_evaluation() -> None:
    model = make("conv")
    optimizer = sgd(model)
    data = loader(model)
    with watched() as report:
        for x, y in data:
            optimizer.zero_grad()
            mean_loss(model, x, y).backward()
            optimizer.step()
        torch.optim.swa_utils.update_bn(((x,) for x, _ in data), model)
        evaluate(model.train(), data)
    assert loud(report) == []


class Modes(Trainer):
    fault = ""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.fault == "eval in step":
            self.model.eval()
        return mean_loss(self.model, *batch)

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.fault == "train in eval":
            self.model.train()
        return mean_loss(self.model, *batch)


@pytest.mark.parametrize(("fault", "code"), [("", None), ("eval in step", "L501"), ("train in eval", "L512")])
def test_modes_in_the_trainer(fault: str, code: str | None) -> None:
    model, report = make("conv"), Report()
    trainer = Modes(model, sgd(model), max_steps=8, eval_every=3, guards="off", callbacks=loop_guards(report))
    trainer.fault = fault
    data = [batch(model) for _ in range(4)]
    trainer.fit(data, data[:2])
    if code is None:
        assert loud(report) == []
    else:
        finding = only(report, code)
        assert finding.source is None  # this file calls eval() in many places: none of them is proved
    assert not model._forward_pre_hooks


# ---------------------------------------------------------------------- L502, L511, L513


@pytest.mark.parametrize(("size", "every", "wrong"), [(4, 8, True), (32, 4, False), (8, 1, False), (1, 1, True)])
def test_batch_norm_and_small_micro_batches(size: int, every: int, wrong: bool) -> None:
    model = make("conv")
    with watched() as report:
        train(model, sgd(model), steps=5, accumulate=every, n=size)
    if wrong:
        assert only(report, "L502").module == "body.1"
    else:
        assert loud(report) == []


def test_batch_norm_with_accumulation_in_the_trainer() -> None:
    for kind in ("conv", "mlp"):
        model, report = make(kind), Report()
        Modes(model, sgd(model), max_steps=5, accumulate=4, guards="off", callbacks=loop_guards(report)).fit(
            [batch(model, 4) for _ in range(8)]
        )
        assert loud(report) == (["L502"] if kind == "conv" else [])


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = make("conv"), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            return self.inner.head(checkpoint(self.inner.body, x.requires_grad_(), use_reentrant=True))
        if self.how == "whole":
            return self.inner.head(checkpoint(self.inner.body, x, use_reentrant=False))  # HERE
        if self.how == "apart":
            h = self.inner.body[1](self.inner.body[0](x))
            return self.inner.head(checkpoint(self.inner.body[2:], h, use_reentrant=False))
        if self.how == "held":
            return self.inner.head(checkpoint(self.inner.body, x, use_reentrant=False, context_fn=self.hold))
        return self.inner.head(self.inner.body(x) + self.inner.body(x.flip(0)))  # a siamese network: two forwards

    def hold(self) -> tuple[Any, Any]:
        return HeldStatistics(None), HeldStatistics(self.inner.body[1])

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 1, 4, 4)


class HeldStatistics:
    """The well-known remedy: a momentum of 0 while recomputing."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __enter__(self) -> None:
        if self.norm is not None:
            self.norm.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        if self.norm is not None:
            self.norm.momentum = 0.1


@pytest.mark.parametrize(
    ("how", "wrong"), [("whole", True), ("reentrant", True), ("apart", False), ("held", False), ("siamese", False)]
)
def test_checkpointing_batch_norm(how: str, wrong: bool) -> None:
    model = Checkpointed(how)
    with watched() as report:
        train(model, sgd(model), steps=6, n=32)
    if wrong:
        finding = only(report, "L511")
        assert finding.module == "inner.body.1" and finding.first_step <= 4
        assert finding.source is not None and "checkpoint(self.inner.body" in finding.source.text
    else:
        assert loud(report) == []


class Distiller(nn.Module):
    def __init__(self, teacher: str) -> None:
        super().__init__()
        self.student = make("conv")
        self.teacher = make("conv", 1)
        if teacher != "joint":
            self.teacher.requires_grad_(False)
        self.how = teacher

    def train(self, mode: bool = True) -> Distiller:
        super().train(mode)
        if self.how == "eval":
            self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.how.startswith("average"):
            with torch.no_grad():
                for t, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.how == "average":
                        t.lerp_(p, 0.1)
                    elif self.how == "average .data":
                        t.data.mul_(0.9).add_(0.1 * p.data)
                    else:
                        t.data = 0.9 * t.data + 0.1 * p.data
        with torch.no_grad():
            soft = self.teacher(x)
        return self.student(x) + 0.1 * soft

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 1, 4, 4)


@pytest.mark.parametrize(
    ("teacher", "wrong"),
    [("train", True), ("eval", False), ("average", False), ("average .data", False), ("average anew", False)],
)
def test_a_frozen_teacher_in_train_mode(teacher: str, wrong: bool) -> None:
    model = Distiller(teacher)
    with watched() as report:
        for _ in range(2):
            model.train()
            train(model, torch.optim.SGD(model.student.parameters(), lr=0.01), steps=4, n=32)
    if wrong:
        assert only(report, "L513").module == "teacher"
    else:
        assert loud(report) == []


def test_a_critic_frozen_for_the_generators_turn_is_not_frozen() -> None:
    gen, critic = nn.Linear(3, 16), make("conv")
    opt_g, opt_c = sgd(gen), sgd(critic)
    with watched() as report:
        for _ in range(6):
            fake = gen(torch.randn(32, 3)).view(32, 1, 4, 4)
            critic.requires_grad_(True)
            opt_c.zero_grad()
            critic(fake.detach()).pow(2).mean().backward()
            opt_c.step()
            critic.requires_grad_(False)
            opt_g.zero_grad()
            (-critic(fake).pow(2).mean()).backward()
            opt_g.step()
    assert loud(report) == []


# ---------------------------------------------------------------------- L508


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.graph_break_reasons.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Reporting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = make("mlp"), how, 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.how == "item":
            self.seen = out.mean().item()  # HERE
        elif self.how == "branch":
            if out.mean() > 0:  # HERE
                out = out * 2
        elif self.how == "recompiles":
            out = out * self.scales[self.calls]
        return out

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["item", "branch", "plain", "recompiles"])
def test_compiled_code_that_breaks_or_compiles_again_and_again(how: str, fresh_dynamo: None) -> None:
    model = Reporting(how)
    model.scales = {i: str(i) and float(i + 1) for i in range(99)}

    def count(step: int) -> None:
        model.calls = step % 90 + 1 if how == "recompiles" else 0

    with watched() as report:
        compiled = torch.compile(model, backend="eager", dynamic=False)
        compiled.inputs = model.inputs
        train(compiled, sgd(model), steps=12, each=count)
    if how == "plain":
        assert loud(report) == []
    else:
        finding = only(report, "L508")
        if how in ("item", "branch"):
            assert finding.source is not None and "# HERE" in finding.source.text


# ---------------------------------------------------------------------- L509


class EpochSampler(RandomSampler):
    """Like a distributed sampler: its order is a function of the epoch that it was told."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.data_source), generator=torch.Generator().manual_seed(self.epoch))  # type: ignore[arg-type]
        return iter(order.tolist())


@pytest.mark.parametrize("how", ["forgotten", "told", "reseeded", "shuffled", "sequential"])
def test_epochs_in_one_order(how: str) -> None:
    model = make("mlp")
    data = TensorDataset(*batch(model, 32))
    optimizer = sgd(model)
    sampler = EpochSampler(data) if how in ("forgotten", "told") else None
    loading = DataLoader(data, 8, sampler=sampler, shuffle=how in ("reseeded", "shuffled"))
    with watched() as report:
        for epoch in range(4):
            if how == "told":
                assert sampler is not None
                sampler.set_epoch(epoch)
            if how == "reseeded":
                torch.manual_seed(0)
            for x, y in loading:
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                optimizer.step()
    if how in ("forgotten", "reseeded"):
        assert "same order" in only(report, "L509").message
    else:
        assert loud(report) == []


def test_trials_that_each_start_from_one_seed_replay_no_epoch() -> None:
    data = TensorDataset(*batch(make("mlp"), 32))
    with watched() as report:
        for _ in range(6):
            torch.manual_seed(0)
            model = make("mlp")
            optimizer = sgd(model)
            for x, y in DataLoader(data, 8, shuffle=True):
                optimizer.zero_grad()
                mean_loss(model, x, y).backward()
                optimizer.step()
    assert loud(report) == []


# ---------------------------------------------------------------------- L510


def sitting(path: Path, missing: set[str], first: int) -> None:
    torch.manual_seed(first)
    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    amp = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": schedule, "scaler": amp}
    if path.exists():
        state = torch.load(path)
        for name, part in parts.items():
            if name not in missing and name in state:
                part.load_state_dict(state[name])
        if "rng" not in missing and "rng" in state:
            torch.set_rng_state(state["rng"])
    for _ in range(3):
        x, y = batch(model)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        optimizer.zero_grad()
        amp.scale(F.cross_entropy(out.float(), y)).backward()
        amp.step(optimizer)
        amp.update()
        schedule.step()
    saved = {name: part.state_dict() for name, part in parts.items() if f"{name} in file" not in missing}
    if "rng in file" not in missing:
        saved["rng"] = torch.get_rng_state()
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        (set(), []),
        ({"scheduler"}, ["scheduler"]),
        ({"scheduler in file"}, ["scheduler"]),
        ({"scaler"}, ["scaler"]),
        ({"optimizer"}, ["optimizer"]),
        ({"rng"}, ["rng"]),
        ({"rng in file"}, []),  # most scripts do not save it at all, and say so by that
        ({"optimizer", "scheduler", "scaler", "rng"}, []),  # weights to start from
    ],
    ids=str,
)
def test_resuming_with_parts_of_the_state(missing: set[str], found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with watched() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sitting(path, missing, 0)
        assert loud(report) == []
        sitting(path, missing, 1)
    assert [f.code for f in report.findings if f.severity != "note"] == ["L510"] * len(found)
    for finding, part in zip(report.findings, found, strict=False):
        assert part in finding.message and finding.source is not None


# ---------------------------------------------------------------------- L514


def test_a_snapshot_that_is_the_live_model() -> None:
    class Keeper:
        best: Any = None

    for copied in (False, True):
        model, report, keeper = make("mlp"), Report(), Keeper()

        class Best(Trainer):
            def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
                if self.state.step == 2:
                    state = self.model.state_dict()
                    keeper.best = copy.deepcopy(state) if copied else state  # noqa: B023
                return mean_loss(self.model, *batch)

        guard = SnapshotGuard(report, lambda: [("keeper", keeper)])  # noqa: B023
        trainer = Best(model, sgd(model), max_steps=9, eval_every=3, guards="off", callbacks=[guard])
        data = [batch(model) for _ in range(3)]
        trainer.fit(data, data)
        if copied:
            assert loud(report) == []
        else:
            assert only(report, "L514").holder == "keeper.best"


class OnlyKeeper:
    """The one statement of this file that binds `the_best_ones` to a state dict has its line told."""

    def __init__(self) -> None:
        self.the_best_ones: Any = None

    def keep(self, model: nn.Module, copied: bool) -> None:
        weights = copy.deepcopy(model.state_dict()) if copied else model.state_dict()
        self.the_best_ones = weights if copied else model.state_dict()


def test_the_line_that_kept_the_live_weights() -> None:
    class Keeps(Trainer):
        keeper = OnlyKeeper()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            if self.state.step == 2:
                self.keeper.keep(self.model, copied=False)
            return mean_loss(self.model, *batch)

    model, report = make("mlp"), Report()
    guard = SnapshotGuard(report, lambda: [("keeper", Keeps.keeper)])
    data = [batch(model) for _ in range(3)]
    Keeps(model, sgd(model), max_steps=9, eval_every=3, guards="off", callbacks=[guard]).fit(data, data)
    source = only(report, "L514").source
    assert source is not None and source.text.startswith("self.the_best_ones = ")


class Best:
    """What people keep, in ways that do and do not copy."""

    def __init__(self) -> None:
        self.score = -1.0
        self.best_params: Any = None
        self.best_model: Any = None
        self.named_best: Any = None
        self.groups: Any = None
        self.shadow: Any = None

    def keep(self, model: nn.Module, what: str) -> None:
        if self.score < 0:
            self.score = 1.0
            if what == "data":
                self.best_params = [p.data for p in model.parameters()]
            elif what == "copied data":
                self.best_params = [p.data.clone() for p in model.parameters()]
            elif what == "names":
                self.named_best = dict(model.named_parameters())
            elif what == "shadow":
                self.shadow = {name: p.data for name, p in model.named_parameters()}
            elif what == "groups":
                self.groups = [p.data for p in model.parameters()]
        if what == "model" and self.score > 0:
            self.best_model = model
        if what == "copied model" and self.score > 0:
            self.best_model = copy.deepcopy(model)


class Starts:
    """The best so far is the first one, until there is a better one: nothing says that it is meant as a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.first_best = model


def kept(what: str) -> Report:
    model, report = make("mlp"), Report()
    best, starts = Best(), Starts(model)

    class Keeps(Trainer):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            best.keep(self.model, what)
            return mean_loss(self.model, *batch)

    guard = SnapshotGuard(report, lambda: [("best", best), ("starts", starts)])
    data = [batch(model) for _ in range(3)]
    Keeps(model, sgd(model), max_steps=9, eval_every=3, guards="off", callbacks=[guard]).fit(data, data)
    return report


@pytest.mark.parametrize(
    ("what", "holder", "line"),
    [
        ("data", "best.best_params", None),  # two statements bind that name here
        ("names", "best.named_best", "self.named_best = dict("),
        ("model", "best.best_model", "self.best_model = model"),
        ("shadow", "best.shadow", "self.shadow = {"),
    ],
)
def test_the_best_weights_or_model_without_a_copy(what: str, holder: str, line: str | None) -> None:
    finding = only(kept(what), "L514")
    assert finding.holder == holder
    assert (finding.source and finding.source.text.startswith(line)) if line else finding.source is None


@pytest.mark.parametrize("what", ["copied data", "copied model", "groups"])
def test_copies_and_working_lists_are_innocent(what: str) -> None:
    assert kept(what).findings == []


# ---------------------------------------------------------------------- P213


STEPLESS = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(10):
    owner.zero_grad()
    model(torch.randn(4, 6)).pow(2).mean().backward()
    LAST
"""


@pytest.mark.parametrize(
    ("owner", "last", "line"),
    [
        ("optimizer", "optimizer.step", 9),
        ("optimizer", "pass", 7),
        ("optimizer", "optimizer.step()", None),
        ("model", "pass", None),
        ("optimizer", "norm = model[0].weight.grad.norm()", None),
    ],
)
def test_a_run_without_a_step(
    owner: str, last: str, line: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that only looks at gradients takes none either."""
    script = tmp_path / "train.py"
    script.write_text(STEPLESS.replace("owner", owner).replace("LAST", last), encoding="utf-8")
    monkeypatch.setattr("safetrain.source.reading.user_files", lambda: [str(script)])  # not those of all other tests
    watch = Watch(("P213",))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        watch.finish()
    found = [f.source.line for f in watch.report.findings if f.source is not None]
    assert found == ([line] if line else [])


# ---------------------------------------------------------------------- L516, L517


@pytest.mark.parametrize("how", ["again", "shuffled", "once", "iterator", "looked at"])
def test_a_first_batch_in_every_step(how: str) -> None:
    model = make("mlp")
    optimizer = sgd(model)
    data = DataLoader(TensorDataset(*batch(model, 40)), batch_size=4, shuffle=how == "shuffled")
    fixed = next(iter(data))
    batches = iter(data)
    with watched() as report:
        for _ in range(8):
            if how in ("again", "shuffled"):
                drawn = next(iter(data))
                loss = mean_loss(model, *drawn)
            else:
                drawn = next(batches) if how == "iterator" else fixed
                loss = mean_loss(model, *drawn)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if how == "looked at":
                shown = next(iter(data))
                with torch.no_grad():
                    model(shown[0])
    if how == "again":
        finding = only(report, "L516")
        assert finding.source is not None and finding.source.text == "drawn = next(iter(data))"
        assert "other 9 batches" in finding.message
    else:
        assert loud(report) == []


@pytest.mark.parametrize("how", ["anew", "kept", "plain", "copies", "loaded", "each epoch"])
def test_an_optimizer_in_every_step(how: str) -> None:
    model = make("mlp")
    start = copy.deepcopy(model.state_dict())
    kept = torch.optim.Adam(model.parameters(), 1e-3)
    with watched() as report:
        for _ in range(8):
            net = copy.deepcopy(model) if how == "copies" else model
            if how == "loaded":
                net.load_state_dict(start)
            kind = torch.optim.SGD if how == "plain" else torch.optim.Adam
            optimizer = kept if how == "kept" else kind(net.parameters(), 1e-3)
            for _ in range(3 if how == "each epoch" else 1):
                loss = mean_loss(net, *batch(net))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    if how == "anew":
        finding = only(report, "L517")
        assert (
            finding.op == "Adam"
            and finding.source is not None
            and "kind(net.parameters(), 1e-3)" in finding.source.text
        )
    else:
        assert [f for f in loud(report) if f.code == "L517"] == []


# ---------------------------------------------------------------------- healthy loops of every kind


class Lengths(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6), torch.tensor(random.Random(i).randrange(3))


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["plain", "amp", "accumulate", "checkpoint"])
def test_healthy_loops_are_not_accused(kind: str, style: str) -> None:
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data, val = loader(model, n=64, size=16), loader(model, n=16, size=8)
    with watched() as report:
        for _ in range(3):
            model.train()
            for i, (x, y) in enumerate(data):
                with torch.autocast("cpu", torch.bfloat16, enabled=style == "amp"):
                    if style == "checkpoint" and kind != "conv":
                        out = model.head(checkpoint(model.features, x, use_reentrant=False))
                    else:
                        out = model(x)
                    loss = F.cross_entropy(out.float(), y)
                every = 2 if style == "accumulate" else 1
                (loss / every).backward()
                if i % every == every - 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            model.eval()
            evaluate(model, val)
    assert loud(report) == []
