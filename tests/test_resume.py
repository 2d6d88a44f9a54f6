"""A resumed run ends in the same bits as one that was never stopped: weights, moments, scale, averages, generators."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from safetrain import checkpoint
from safetrain.callbacks import EMA, Callback, EarlyStopping, Saving
from safetrain.checkpoint.plain import entries, same
from safetrain.loop import Trainer
from safetrain.state import RunState


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Thirty-eight samples with random augmentation from every kind of generator."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(38, 6, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.own = np.random.default_rng(2)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = 0.1 * (torch.rand(()) + random.random() + np.random.rand() + self.own.random())
        return (self.x[index] + shift).float(), self.y[index]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))


class Unfreeze(Callback):
    """Lets the last layer train from step 12 on, once."""

    def on_fit_start(self, state: RunState) -> None:
        if state.step == 0:
            state.model[4].requires_grad_(False)

    def on_step_end(self, state: RunState) -> None:
        if state.step == 12:
            state.model[4].requires_grad_(True)


class Regression(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.model(x).float(), y)


def build(
    run_dir: Path, *, precision: str = "fp32", fused: bool = False, extra: tuple[Callback, ...] = (), **settings: Any
) -> Trainer:
    torch.manual_seed(4)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3) if precision == "fp16" else None
    return Regression(
        model,
        optimizer,
        schedule,
        precision=precision,  # type: ignore[arg-type]
        scaler=scaler,
        seed=7,
        log_every=7,
        guards="off",
        run_dir=run_dir,
        callbacks=[EMA(0.9), EarlyStopping(patience=50), *extra],
        **{"max_steps": 30, "accumulate": 2, "clip_norm": 1.0, **settings},
    )


def loaders(num_workers: int = 0, batch_size: int = 2) -> tuple[Any, Any]:
    data = Noisy()
    train = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers)
    return train, [(data.x[:4], data.y[:4])]


def final(trainer: Trainer) -> dict[str, Any]:
    payload = checkpoint.capture(trainer)
    return {name: value for name, value in entries(payload) if not name.startswith("callbacks.Saving")}


def assert_same_end(trainer: Trainer, expected: dict[str, Any], note: str) -> None:
    got = final(trainer)
    assert list(got) == list(expected)
    differing = [name for name in expected if not same(expected[name], got[name])]
    assert not differing, f"{note}: {differing[:5]} of {len(differing)}"


def reference_and_checkpoints(
    tmp_path: Path, num_workers: int = 0, **settings: Any
) -> tuple[dict[str, Any], list[Path]]:
    """The end of a run that nothing interrupts, and the checkpoints of one that saves after every step."""
    plain = build(tmp_path / "plain", **settings)
    plain.fit(*loaders(num_workers))
    expected = final(plain)
    saving = build(tmp_path / "saving", extra=(Saving(every_steps=1, every_epoch=False, keep_last=99),), **settings)
    saving.fit(*loaders(num_workers))
    assert_same_end(saving, expected, "saving changed the run")
    return expected, checkpoint.checkpoints(tmp_path / "saving")


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16 with overflows": {"precision": "fp16"},
    "fp16 with overflows, fused": {"precision": "fp16", "fused": True},
    "evaluated every 4 steps, short windows": {"accumulate": 3, "eval_every": 4},
    "epochs cut short": {"limit_batches": 7},
    "few batches again and again": {"overfit_batches": 5},
    "two loader workers": {"num_workers": 2, "precision": "fp16"},
}


def resume_from_each(tmp_path: Path, every: int, num_workers: int = 0, **settings: Any) -> None:
    expected, saved = reference_and_checkpoints(tmp_path, num_workers, **settings)
    assert len(saved) == 30
    if settings.get("precision") == "fp16":
        assert expected["counters.skipped_steps"] >= 3, "the scale never overflowed: the test tests nothing"
    for path in saved[every - 1 :: every]:
        resumed = build(tmp_path / "resumed", **settings)
        resumed.fit(*loaders(num_workers), resume=path)
        assert_same_end(resumed, expected, f"resumed from {path.name}")


def test_resuming_after_any_step_ends_in_identical_bits(tmp_path: Path) -> None:
    resume_from_each(tmp_path, every=1, precision="fp16")


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_ends_in_identical_bits(kind: str, tmp_path: Path) -> None:
    resume_from_each(tmp_path, every=7, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_after_any_step_ends_in_identical_bits_in_every_setting(kind: str, tmp_path: Path) -> None:
    resume_from_each(tmp_path, every=1, **KINDS[kind])


def test_a_resumed_run_can_be_stopped_and_resumed_again(tmp_path: Path) -> None:
    expected, _ = reference_and_checkpoints(tmp_path)
    path: Path | None = None
    for stop in (4, 5, 11, 23, 30):
        part = build(tmp_path / "parts", extra=(Saving(every_steps=1),), max_steps=stop)
        part.fit(*loaders(), resume=path)
        path = checkpoint.latest(tmp_path / "parts")
        assert path.name == f"step_{stop:08d}"
    assert_same_end(part, expected, "resumed four times")


class Carried(Regression):
    """Keeps a running state of its own beside the model, as truncated backpropagation through time does."""

    carried = torch.zeros(1)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.model(x).float() + 0.1 * self.carried
        self.carried = out.detach().mean(0)
        return nn.functional.mse_loss(out, y)

    def state_dict(self) -> dict[str, Any]:
        return {"carried": self.carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carried = state["carried"]


def test_state_of_the_trainer_itself_is_carried_over(tmp_path: Path) -> None:
    def make(max_steps: int, run_dir: str) -> Carried:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        callbacks = [Saving(every_epoch=False)]
        run = tmp_path / run_dir
        return Carried(model, optimizer, seed=3, max_steps=max_steps, callbacks=callbacks, run_dir=run, guards="off")

    torch.manual_seed(0)
    whole = make(20, "whole")
    whole.fit(loaders()[0])
    torch.manual_seed(0)
    make(9, "part").fit(loaders()[0])
    resumed = make(20, "resumed")
    resumed.fit(loaders()[0], resume=tmp_path / "part")
    assert_same_end(resumed, final(whole), "carried state")


def test_what_was_thawed_stays_thawed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"extra": (Unfreeze(),)}
    whole = build(tmp_path / "whole", **settings)
    whole.fit(*loaders())
    part = build(tmp_path / "part", extra=(Unfreeze(), Saving(every_epoch=False)), max_steps=17)
    part.fit(*loaders())
    resumed = build(tmp_path / "resumed", **settings)
    resumed.fit(*loaders(), resume=tmp_path / "part")
    assert torch.equal(whole.model[4].weight, resumed.model[4].weight)


def test_load_before_fit_also_finds_the_place_in_the_data(tmp_path: Path) -> None:
    expected, saved = reference_and_checkpoints(tmp_path)
    trainer = build(tmp_path / "loaded")
    trainer.load(saved[13])
    trainer.fit(*loaders())
    assert_same_end(trainer, expected, "load, then fit")


class KillAt(Callback):
    """Sends SIGTERM to the run itself in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_backward_end(self, state: RunState) -> None:
        if state.current_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [1, 10, 17])
def test_a_run_saved_at_a_signal_resumes_to_identical_bits(step: int, tmp_path: Path) -> None:
    expected, _ = reference_and_checkpoints(tmp_path, precision="fp16")
    killed = build(
        tmp_path / "killed", precision="fp16", extra=(Saving(every_epoch=False, monitor="loss"), KillAt(step))
    )
    killed.fit(*loaders())
    assert killed.state.step == step and "SIGTERM" in (killed.state.stop_reason or "")
    assert killed.state.eval_metrics == {} or killed.state.evaluated_step < step, "a run that must end evaluated first"
    resumed = build(tmp_path / "resumed", precision="fp16", extra=(Saving(every_epoch=False, monitor="loss"),))
    resumed.fit(*loaders(), resume=tmp_path / "killed")
    assert_same_end(resumed, expected, f"killed in step {step}")
