"""Memory on CUDA: meters and rows, growth, snapshot, fragmentation, the allocator's summary."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from safetrain import Callback, RunState, Trainer
from safetrain.callbacks import MemoryMonitor
from safetrain.cli import EXIT_OK, main
from safetrain.memory import meter_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MB = 1 << 20


class Regression(Trainer):
    """`keep` sees the output of each step, without its graph."""

    def training_step(self, batch: Tensor) -> Tensor:
        out = self.model(batch)
        self.keep(out.detach())
        return out.square().mean()

    def keep(self, out: Tensor) -> None:
        """What a leak overrides."""


def make(kind: type[Regression], **options: Any) -> Regression:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512)).to("cuda")
    return kind(model, torch.optim.AdamW(model.parameters(), fused=True), **options)


def batches(count: int) -> list[Tensor]:
    return [torch.randn(128, 256) for _ in range(count)]


def test_the_meter_reads_what_torch_counts(cuda: torch.device) -> None:
    meter = meter_for(cuda)
    block = torch.empty(10 * MB, device=cuda)
    assert meter.read() == torch.cuda.memory_allocated()
    assert meter.reserved() == torch.cuda.memory_reserved()
    assert meter.peak() == torch.cuda.max_memory_allocated() >= block.nbytes


def test_a_leak_on_the_device_is_named(cuda: torch.device) -> None:
    kept: list[Tensor] = []

    class Leaky(Regression):
        def keep(self, out: Tensor) -> None:
            kept.append(out)

    trainer = make(Leaky, max_steps=60)
    trainer.fit(batches(60))
    (finding,) = [f for f in trainer.report.findings if f.code == "M401"]
    assert "kept" in (finding.holder or "")
    assert finding.source is not None and "kept.append(out)" in finding.source.text
    assert finding.growth_bytes_per_step == pytest.approx(128 * 512 * 4, rel=0.1)


def test_batches_of_varying_length_are_no_growth(cuda: torch.device) -> None:
    trainer = make(Regression, max_steps=400)
    trainer.fit([torch.randn(1 + (i * 37) % 300, 256) for i in range(400)])
    assert [f for f in trainer.report.findings if f.code.startswith("M") and f.severity != "note"] == []


def test_rows_tell_owners_and_what_the_allocator_holds(cuda: torch.device) -> None:
    rows: list[dict[str, float]] = []

    class Last(Callback):
        def on_log(self, state: RunState) -> None:
            rows.append(dict(state.row))

    trainer = make(Regression, max_steps=20, log_every=1, callbacks=[MemoryMonitor(), Last()], guards="off")
    trainer.fit(batches(20))
    row = rows[-1]
    weights_mb = sum(p.nbytes for p in trainer.model.parameters()) / 1e6
    assert row["memory/by_owner/parameters_mb"] == pytest.approx(weights_mb)
    assert row["memory/by_owner/optimizer_state_mb"] == pytest.approx(2 * weights_mb, rel=0.01)
    # Inputs, tanh's output and the output that is squared.
    assert row["memory/by_owner/activations_mb"] == pytest.approx(128 * (256 + 512 + 512) * 4 / 1e6, rel=0.35)
    assert row["memory/reserved_mb"] >= row["memory/after_forward_mb"]
    assert 0 <= row["memory/fragmentation"] < 1 and row["memory/alloc_retries"] >= 0


def test_the_snapshot_can_be_read_and_recording_is_off_afterwards(cuda: torch.device, tmp_path: Path) -> None:
    target = tmp_path / "snapshot.pickle"
    config, page = str(EXAMPLES / "configs" / "digits.yaml"), str(tmp_path / "memory.html")
    assert main(["memory", config, "--snapshot", str(target), "--html", page, "device=cuda"]) == EXIT_OK
    snapshot = pickle.loads(target.read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    assert any("digits.py" in frame["filename"] for event in events for frame in event.get("frames", ()))
    seen = sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))
    torch.empty(MB, device=cuda)
    assert sum(map(len, torch.cuda.memory._snapshot()["device_traces"])) == seen


@pytest.fixture
def little_memory(cuda: torch.device) -> Iterator[None]:
    """Room for some 1.5 GB in all."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.5e9) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("little_memory")
def test_a_fragmented_cache_is_told_with_shapes_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever longer batches fit none of the blocks before them, until the cache must be flushed."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    class Longer(Regression):
        def keep(self, out: Tensor) -> None:
            torch.empty(40 * MB + self.state.step * 2 * MB, dtype=torch.uint8, device="cuda")

    trainer = make(Longer, max_steps=64)
    trainer.fit([torch.randn(64 + i, 256) for i in range(64)])
    (finding,) = [f for f in trainer.report.findings if f.code == "M403"]
    assert "64 shapes: [64..127, 256]" in finding.message
    assert "expandable_segments:True" in (finding.fix or "")


def test_the_allocators_summary_is_written(cuda: torch.device, tmp_path: Path) -> None:
    monitor = MemoryMonitor(summary_every=4)
    make(Regression, max_steps=9, callbacks=[monitor], guards="off", run_dir=tmp_path).fit(batches(9))
    text = (tmp_path / "memory_summary.txt").read_text(encoding="utf-8")
    assert text.startswith("after step 4\n") and "after step 8\n" in text and "after step 9" not in text
    assert "PyTorch CUDA memory summary" in text
