"""A step without logging reads nothing from the device, or one scalar where the optimizer cannot skip by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain import Callback, RunState, StepOutput, Trainer
from safetrain.stepping.deferred import DeferredFlag
from tests.hand_loops import assert_same_bits, loss_of, make_data, make_model, train_by_hand


class CountsReads(TorchDispatchMode):
    """Counts `.item()` and its kin: they all end in this one operator."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Any:
        loss = loss_of(self.model, batch)
        self.log("twice", loss * 2)
        return loss, {"plain": loss.detach()}


class Ragged(Trainer):
    def training_step(self, batch: Any) -> StepOutput:
        return StepOutput(loss_of(self.model, batch) * 6, (batch[1] >= 0).sum())


class MeasuresReads(Callback):
    """Reads of each step, listeners included."""

    def __init__(self) -> None:
        self.per_step: list[int] = []
        self.mode = CountsReads()

    def on_step_start(self, state: RunState) -> None:
        self.mode = CountsReads()
        self.mode.__enter__()

    def on_step_end(self, state: RunState) -> None:
        self.mode.__exit__(None, None, None)
        self.per_step.append(self.mode.reads)


def reads_per_step(
    optimizer: Any, trainer_type: type[Trainer] = Classifier, steps: int = 12, **options: Any
) -> list[int]:
    model = make_model()
    meter = MeasuresReads()
    trainer = trainer_type(
        model,
        optimizer(model),
        max_epochs=1,
        log_every=100,
        callbacks=[meter, *options.pop("callbacks", [])],
        **options,
    )
    trainer.fit(make_data(options.get("accumulate", 1) * steps))
    return meter.per_step[4:]  # the first steps are logged, screened and warmed up


def fused(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def plain(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 1.0}, {"accumulate": 3}, {"clip_value": 0.1}, {"precision": "bf16"}]
)
@pytest.mark.parametrize("trainer_type", [Classifier, Ragged])
def test_a_fused_optimizer_needs_no_read(options: dict[str, Any], trainer_type: type[Trainer]) -> None:
    assert set(reads_per_step(fused, trainer_type, **options)) == {0}


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 3}, {"precision": "fp16"}])
def test_other_optimizers_need_the_gate_and_nothing_else(options: dict[str, Any]) -> None:
    assert set(reads_per_step(plain, **options)) == {1}


def test_guards_that_look_now_and_then_do_not_read_either() -> None:
    assert set(reads_per_step(fused, steps=150)) == {0}


def test_fp16_with_a_fused_optimizer_needs_no_read() -> None:
    assert set(reads_per_step(fused, precision="fp16")) == {0}


def test_the_gate_can_be_switched_off() -> None:
    assert set(reads_per_step(plain, check_finite=False)) == {0}


@pytest.mark.parametrize("late", [False, True])
def test_a_verdict_read_a_step_late_changes_nothing(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where the flag of a step is read when the next one is about to step."""
    monkeypatch.setattr(DeferredFlag, "waits", late)
    data = make_data(9)
    for index in (1, 4, 8):
        data[index] = (data[index][0] * float("inf"), data[index][1])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = Classifier(model, optimizer, schedule, max_epochs=1, guards="off", log_every=100)
    with pytest.warns(RuntimeWarning, match="step 2: the gradients .* skipped"):
        trainer.fit(data)
    hand = make_model()
    by_hand = torch.optim.SGD(hand.parameters(), lr=0.1, fused=True)
    healthy = [batch for index, batch in enumerate(data) if index not in (1, 4, 8)]
    train_by_hand(hand, by_hand, healthy, scheduler=torch.optim.lr_scheduler.StepLR(by_hand, 1, 0.5))
    assert_same_bits(model, hand)
    assert (trainer.state.skipped_steps, schedule.last_epoch) == (3, 6)


def test_a_fused_optimizer_skips_without_being_read() -> None:
    """Non-finite gradients leave weights and schedule alone, decided on the device."""
    data = make_data(6)
    data[2] = (data[2][0] * float("nan"), data[2][1])
    model = make_model()
    optimizer = fused(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = Classifier(model, optimizer, schedule, max_epochs=1, guards="off")
    with pytest.warns(RuntimeWarning, match="step 3: the gradients"):
        trainer.fit(data)
    assert trainer.state.skipped_steps == 1
    assert trainer.state.step == 6
    assert schedule.last_epoch == 5
    assert all(p.isfinite().all() for p in model.parameters())
    assert {int(s["step"]) for s in optimizer.state.values()} == {5}
