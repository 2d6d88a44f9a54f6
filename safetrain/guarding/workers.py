"""The guard over loader workers: memory that each of them makes its own while the epoch goes on.

A forked worker shares the data set with its parent until somebody writes to the pages. Python writes to every object
that it looks at (its reference count), so a list of a million small objects is copied bit by bit into every worker.
"""

from __future__ import annotations

import multiprocessing.process
import os
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from safetrain.accounting.inventory import running_loaders
from safetrain.callbacks.base import Callback
from safetrain.findings import Report
from safetrain.rules.workers import WorkerReading, find_worker_growth

if TYPE_CHECKING:
    from safetrain.state import RunState

_FIRST_GAP = 8
_WIDEST_GAP = 512
_SHARE, _FIRST_SHARE, _FIRST_READINGS = 0.02, 0.2, 5
"""Of the time that passes, what readings may take (the first few more): each costs tens of milliseconds a worker."""
_MAX_SETS = 4
"""Sets of workers (a new one each epoch, unless they persist) that are looked at."""


class WorkerGuard(Callback):
    """M402 for worker processes. Linux only; a loop without workers pays one comparison in sampled steps."""

    sampled_hooks = frozenset({"on_step_end"})

    def __init__(self, report: Report) -> None:
        self.report = report
        self._children: set[Any] = getattr(multiprocessing.process, "_children", set())
        self._can_read = os.path.exists("/proc/self/smaps_rollup")
        self._sets = 0
        self._pids: tuple[int, ...] = ()
        self._iterator: weakref.ref[Any] | None = None
        self._readings: list[WorkerReading] = []
        self._gap = _FIRST_GAP
        self._next_step = 0
        self._next_time = 0.0
        self._told = False

    def on_step_end(self, state: RunState) -> None:
        """Read the workers now and then."""
        if not self._children or state.step < self._next_step or self._told or not self._can_read:
            return
        if time.perf_counter() < self._next_time:
            return
        if self._iterator is None or self._iterator() is None or not all(map(_is_alive, self._pids)):
            self._find_workers(state)
        if self._pids:
            self._read(state)

    def _find_workers(self, state: RunState) -> None:
        """The loader that runs now. Reads the heap once for each set of workers."""
        self._pids, self._readings, self._gap = (), [], _FIRST_GAP
        self._next_step = state.step + _FIRST_GAP
        if self._sets >= _MAX_SETS:
            self._told = True
            return
        self._sets += 1
        for iterator in running_loaders():
            workers = [w.pid for w in getattr(iterator, "_workers", ()) if w.pid is not None and w.is_alive()]
            if workers:
                self._pids, self._iterator = tuple(workers), weakref.ref(iterator)

    def _read(self, state: RunState) -> None:
        started = time.perf_counter()
        sizes = [size for pid in self._pids if (size := private_bytes(pid)) is not None]
        cost = time.perf_counter() - started
        share = _FIRST_SHARE if len(self._readings) < _FIRST_READINGS else _SHARE
        self._next_time = started + cost / share
        self._next_step = state.step + self._gap
        self._gap = min(2 * self._gap, _WIDEST_GAP)
        iterator = self._iterator() if self._iterator is not None else None
        if len(sizes) < len(self._pids) or iterator is None:
            return
        self._readings.append(WorkerReading(state.step, sum(sizes) / len(sizes)))
        found = find_worker_growth(self._readings, len(sizes), getattr(iterator, "_dataset", None))
        self._told = bool(found)
        self.report.extend(found, step=state.current_step)


def private_bytes(pid: int) -> int | None:
    """Bytes that a process shares with no other; None when it is gone. Tens of milliseconds for a big one."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = file.readlines()[1:]
    except OSError:
        return None
    return sum(_kilobytes(lines, key) for key in ("Private_Dirty:", "Private_Clean:")) * 1024


def _kilobytes(lines: Iterable[str], key: str) -> int:
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
