"""The loop on CUDA: no syncs, skips decided on the device, the same weights as a loop by hand, exact resuming."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain import Callback, RunState, StepOutput, Trainer
from safetrain.callbacks import EmptyCache
from safetrain.memory import meter_for
from safetrain.stepping.averages import Averages


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 10))


def make_loader(batches: int = 24, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * 16, 64, generator=generator)
    y = torch.randint(10, (batches * 16,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=16, **options)


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.model(x)
        return F.cross_entropy(logits.float(), y), {"accuracy": (logits.argmax(1) == y).float().mean()}


class Tokens(Trainer):
    def training_step(self, batch: Any) -> StepOutput:
        x, y = batch
        loss = F.cross_entropy(self.model(x).float(), y, reduction="none")
        keep = y != 0
        return StepOutput((loss * keep).sum(), keep.sum())


class RefusesSyncs(Callback):
    """Any synchronisation inside a step that is not logged raises, after a warm-up."""

    def on_step_start(self, state: RunState) -> None:
        if state.step >= 4 and not state.is_logging_step:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, state: RunState) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, state: RunState) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("trainer_type", [Classifier, Tokens])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("oom", ["raise", "split"])
def test_a_step_never_waits_for_the_device(
    cuda: torch.device, precision: Any, trainer_type: type[Trainer], accumulate: int, oom: Any
) -> None:
    """Default guards on, fused optimizer, pinned loader; the schedule and the clip included."""
    model = make_model().to(cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_type(
        model,
        optimizer,
        schedule,
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
        max_epochs=1,
        oom=oom,
        log_every=1000,
        callbacks=[RefusesSyncs()],
    )
    trainer.fit(make_loader(24 * accumulate, pin_memory=True))
    assert trainer.state.step == 24


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_must_be_skipped_are_skipped_on_the_device(cuda: torch.device, precision: Any, fused: bool) -> None:
    model = make_model().to(cuda)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    data = [(x * (float("inf") if i in (3, 7) else 1.0), y) for i, (x, y) in enumerate(make_loader(12))]
    trainer = Classifier(model, optimizer, schedule, precision=precision, max_epochs=1, guards="off", log_every=1000)
    with pytest.warns(RuntimeWarning, match="skipped") if precision == "fp32" else nullcontext():
        trainer.fit(data)
    assert all(p.isfinite().all() for p in model.parameters())
    assert trainer.state.skipped_steps >= 2
    assert schedule.last_epoch == trainer.state.step - trainer.state.skipped_steps


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_equal_a_loop_by_hand(cuda: torch.device, precision: Any) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    loader = make_loader(20)
    ours, hand = make_model(0.1).to(cuda), make_model(0.1).to(cuda)
    trainer = Classifier(
        ours,
        torch.optim.AdamW(ours.parameters(), fused=True),
        precision=precision,
        clip_norm=0.5,
        max_epochs=1,
        guards="off",
    )
    torch.manual_seed(5)
    trainer.fit(loader)
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(hand.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(hand(x.to(cuda)).float(), y.to(cuda))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    for mine, theirs in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("at", [1, 7, 13])
def test_a_resumed_run_ends_in_the_same_bits(cuda: torch.device, tmp_path: Path, at: int) -> None:
    def make(max_steps: int) -> Trainer:
        model = make_model(0.3).to(cuda)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return Classifier(model, optimizer, schedule, precision="fp16", max_steps=max_steps, seed=3, guards="off")

    whole, first, rest = make(20), make(at), make(20)
    whole.fit(make_loader(8, shuffle=True))
    first.fit(make_loader(8, shuffle=True))
    rest.fit(make_loader(8, shuffle=True), resume=first.save(tmp_path))
    for mine, theirs in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_evaluation_reads_once_and_leaves_no_gradients_under_its_peak(cuda: torch.device) -> None:
    model = make_model().to(cuda)
    trainer = Classifier(model, torch.optim.SGD(model.parameters(), 0.1), max_epochs=1, guards="off")
    trainer.fit(make_loader(4))
    loader = [(x.to(cuda), y.to(cuda)) for x, y in make_loader(8)]
    trainer.evaluate(loader)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer._evaluation_loop(loader, Averages(cuda))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_retained_graphs_are_found_on_the_device(cuda: torch.device) -> None:
    history: list[Any] = []

    class Keeps(Classifier):
        def training_step(self, batch: Any) -> Any:
            loss, metrics = super().training_step(batch)
            history.append(loss)
            return loss, metrics

    model = make_model().to(cuda)
    trainer = Keeps(model, torch.optim.SGD(model.parameters(), 0.1), max_epochs=1)
    trainer.fit(make_loader(12))
    assert [f.code for f in trainer.report.findings] == ["G101"]
    assert "history" in (trainer.report.findings[0].holder or "")


def test_a_healthy_run_is_not_accused(cuda: torch.device) -> None:
    model = make_model(0.1).to(cuda)
    trainer = Classifier(
        model, torch.optim.AdamW(model.parameters(), fused=True), precision="bf16", max_epochs=4, clip_norm=1.0
    )
    trainer.fit(make_loader(24), make_loader(4))
    assert [f for f in trainer.report.findings if f.severity != "note"] == []


def test_memory_phases_are_cudas_own_numbers(cuda: torch.device) -> None:
    meter = meter_for(cuda)
    before = meter.read()
    block = torch.empty(8 << 20, dtype=torch.uint8, device=cuda)
    assert meter.read() - before == block.numel()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_does_not_fit_is_repeated_in_smaller_micro_batches(cuda: torch.device, precision: Any) -> None:
    """A cap on the process's share of the device, so that 16384 samples do not fit and fewer do."""

    def make(**settings: Any) -> Trainer:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64 if i == 0 else 4096, 4096), nn.Dropout(0.2), nn.GELU()) for i in range(6)]
        model = nn.Sequential(*layers, nn.Linear(4096, 10)).to(cuda)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return Classifier(model, optimizer, precision=precision, seed=3, max_steps=3, guards="off", **settings)

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(16384, 64, generator=generator), torch.randint(10, (16384,), generator=generator))] * 3
    split = make(oom="split")
    torch.cuda.empty_cache()
    room = 3_000_000_000 + torch.cuda.memory_reserved()  # weights, their gradients and state are 1.6 GB of it
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.get_device_properties(cuda).total_memory))
    try:
        with pytest.warns(RuntimeWarning, match="out of memory with micro-batches of 16384"):
            split.fit(data)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    size = split.state.micro_batch_size
    assert size is not None and split.state.oom_splits >= 1
    assert torch.cuda.max_memory_reserved() <= room
    started = make(micro_batch_size=size)
    started.fit(data)
    for mine, theirs in zip(split.model.parameters(), started.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_emptied_cache_is_logged(cuda: torch.device) -> None:
    rows: list[dict[str, float]] = []

    class Rows(Callback):
        def on_log(self, state: RunState) -> None:
            rows.append(dict(state.row))

    model = make_model().to(cuda)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Classifier(model, optimizer, max_steps=2, log_every=1, callbacks=[EmptyCache(every_steps=1), Rows()])
    trainer.fit(make_loader(2))
    assert all(row["memory/cache_freed_mb"] >= 0 and row["memory/cache_ms"] > 0 for row in rows)
