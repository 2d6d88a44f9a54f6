"""Unused memory goes back to the device when asked, and the row says what that took and gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_training import make_data, make_trainer

from safetrain.callbacks import Callback, EmptyCache
from safetrain.errors import ConfigError
from safetrain.state import RunState


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_log(self, state: RunState) -> None:
        self.rows.append((state.step, dict(state.row)))


class Allocator:
    """A device's: 5 MB of cache come together between two calls."""

    def __init__(self) -> None:
        self.name, self.calls, self.cached = "pretend", 0, 5_000_000

    def read(self) -> int:
        return 0

    def peak(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return self.cached

    def empty_cache(self) -> None:
        self.calls += 1
        self.cached = 0


class Fills(Callback):
    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator

    def on_step_start(self, state: RunState) -> None:
        self.allocator.cached = 5_000_000


def run(monkeypatch: pytest.MonkeyPatch, evaluates: bool, **settings: Any) -> tuple[Allocator, Rows]:
    allocator, rows = Allocator(), Rows()
    monkeypatch.setattr(torch.cpu, "empty_cache", allocator.empty_cache, raising=False)
    monkeypatch.setattr("safetrain.callbacks.empty_cache.meter_for", lambda device: allocator)
    trainer = make_trainer(Fills(allocator), EmptyCache(**settings), rows, max_steps=4, log_every=2)
    trainer.fit(make_data(), make_data() if evaluates else None)
    return allocator, rows


def test_after_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, rows = run(monkeypatch, False, every_steps=1, around_evaluation=False)
    assert allocator.calls == 4
    assert [row["memory/cache_freed_mb"] for _, row in rows.rows] == [5.0, 5.0, 10.0]
    assert all(row["memory/cache_ms"] >= 0 for _, row in rows.rows)


def test_around_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, rows = run(monkeypatch, True)
    assert allocator.calls == 2
    assert [("memory/cache_ms" in row) for _, row in rows.rows] == [False, False, False, True]


def test_a_device_without_a_cache_is_told() -> None:
    with pytest.warns(UserWarning, match="EmptyCache does nothing on cpu"):
        make_trainer(EmptyCache(), max_steps=1).fit(make_data())


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_steps=0 must be at least 1"):
        EmptyCache(every_steps=0)
    with pytest.raises(ConfigError, match="it would do nothing"):
        EmptyCache(around_evaluation=False)
