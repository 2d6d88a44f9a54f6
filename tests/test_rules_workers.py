"""Loader workers that copy their parent's memory, or remember every sample, are noticed from outside."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from safetrain import Trainer
from safetrain.findings import Finding
from safetrain.guarding.workers import private_bytes
from safetrain.rules.workers import WorkerReading, find_worker_growth

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
MB = 1e6


class Records(Dataset[Tensor]):
    """Every sample is a dict of its own: pages full of reference counts."""

    def __init__(self, count: int) -> None:
        self.records = [{"text": f"sample number {i} " * 4, "value": float(i % 7)} for i in range(count)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Tensor:
        record = self.records[i]
        return torch.tensor([record["value"], float(len(record["text"]))])


class Rows(Dataset[Tensor]):
    """The same in one tensor, which workers share."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(2.0 * count).reshape(count, 2) % 7

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i].clone()


class Clips(Dataset[Tensor]):
    """Remembers every decoded clip."""

    def __len__(self) -> int:
        return 4_000

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 (the fault under test)
    def decode(self, i: int) -> Tensor:
        return torch.full((50_000,), i % 7.0)

    def __getitem__(self, i: int) -> Tensor:
        return self.decode(i)[:2].clone()


class Regression(Trainer):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).pow(2).mean()


def train(dataset: Dataset[Tensor], *, batch_size: int, max_steps: int) -> list[Finding]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    trainer = Regression(model, torch.optim.SGD(model.parameters(), 1e-4), max_steps=max_steps)
    trainer.fit(DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=2))
    return [f for f in trainer.report.findings if f.code == "M402"]


@needs_proc
@pytest.mark.slow
def test_a_list_of_dicts_is_copied_by_every_worker_and_named() -> None:
    (finding,) = train(Records(150_000), batch_size=512, max_steps=150)
    assert "data set Records → .records → list of 150000" in finding.holder
    assert finding.source.text.startswith("self.records = ")
    assert "NumPy arrays or tensors" in finding.fix


@needs_proc
@pytest.mark.slow
def test_the_same_data_in_a_tensor_is_shared() -> None:
    assert not train(Rows(150_000), batch_size=512, max_steps=150)


@needs_proc
@pytest.mark.slow
def test_a_cache_inside_the_workers_is_named_at_its_decorator() -> None:
    (finding,) = train(Clips(), batch_size=8, max_steps=400)
    assert "Clips" in finding.holder
    assert finding.source.text.startswith("@functools.lru_cache")


# ---------------------------------------------------------------- the judge


def readings(*megabytes: float) -> list[WorkerReading]:
    return [WorkerReading(step, value * MB) for step, value in zip((1, 9, 25, 57, 121, 249), megabytes, strict=False)]


@pytest.mark.parametrize(
    ("sizes", "dataset"),
    [
        ((14, 34), Records(30_000)),
        ((14, 15, 16, 16.5), Records(30_000)),
        ((14, 44, 44, 44, 44), Records(30_000)),
        ((14, 44, 60, 61, 61.5), Rows(100)),
        ((14, 40, 30, 70, 100), Rows(100)),
    ],
    ids=["too early", "starting up", "at rest", "coming to rest", "up and down"],
)
def test_workers_that_only_start_up_are_left_alone(sizes: tuple[float, ...], dataset: Any) -> None:
    assert not find_worker_growth(readings(*sizes), 2, dataset)


def test_growth_without_a_known_place_is_told_of_the_data_set() -> None:
    (finding,) = find_worker_growth(readings(14, 22, 40, 74, 141), 4, Rows(100))
    assert "4 loader workers rises by 1.1 MB a step" in finding.message
    assert finding.source.text == "def __getitem__(self, i: int) -> Tensor:"


@needs_proc
def test_private_bytes_are_those_that_were_written() -> None:
    before = private_bytes(os.getpid())
    block = bytearray(os.urandom(1 << 20)) * 30
    assert 25 * MB < private_bytes(os.getpid()) - before < 60 * MB
    assert len(block) == 30 << 20
    assert private_bytes(2**30) is None
