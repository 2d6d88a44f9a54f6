"""Memory at each phase of a step, in the row."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from safetrain.accounting.growth import WARM_UP, theil_sen
from safetrain.callbacks.base import Callback
from safetrain.callbacks.run_dir import unwritable, writable_run_dir
from safetrain.errors import ConfigError
from safetrain.memory import Meter, PhaseMemory, RssMeter, meter_for
from safetrain.rules.out_of_memory import owned_bytes

if TYPE_CHECKING:
    from safetrain.state import RunState

MB, KB = 1e6, 1e3
SUMMARY = "memory_summary.txt"
OWNERS = ("parameters", "buffers", "optimizer_state", "gradients", "activations")
"""The owners in a row, as `memory/by_owner/<owner>_mb`, from what stays to what comes and goes."""
_SLOPE_READINGS = (8, 64)
"""Logging steps before there is a slope, and how many of the last it is taken over."""


class MemoryMonitor(Callback):
    """Adds bytes in use, in units of 10^6 bytes, at each phase of a logging step.

    - `memory/start_mb`: before gradients are dropped; `memory/after_forward_mb`: before backward, the graph alive;
      `memory/after_backward_mb`: gradients complete; `memory/after_step_mb`: after the optimizer.
    - `memory/by_owner/…_mb`: whose bytes they are after forward: parameters, buffers, optimizer state, gradients (of
      earlier micro-batches), and activations: what forward added, inputs included.
    - `memory/peak_mb`: highest so far. On CUDA the allocator's own record; on the CPU the highest reading, which
      cannot see what came and went inside forward or backward.
    - `memory/reserved_mb` and `memory/fragmentation`: what the allocator holds, and the share of it that is not in use,
      where it tells; `memory/alloc_retries`: how often CUDA's had to flush its cache and try again.
    - `memory/growth_kb_per_step`: the median slope of the readings after a step over the last 64 logging steps, in
      10^3 bytes, noise included: the guards judge, this shows.
    - `memory/resident_mb`: the whole process on the host.
    - rows of an evaluation carry `memory/evaluation_mb`: what is in use after it, its peak included in `peak_mb`.

    On the CPU the readings count the whole heap of the process, not tensors alone. Non-logging steps are not read.

    Args:
        meter: what to read; default: the best one for the run's device.
        summary_every: on CUDA, append `torch.cuda.memory_summary()` to `memory_summary.txt` in the run directory after
            every so many steps. Does not wait for the device.

    Raises:
        ConfigError: at fit start, when a summary is asked for and the run is not on CUDA or has no run directory.
    """

    def __init__(self, meter: Meter | None = None, *, summary_every: int | None = None) -> None:
        if summary_every is not None and summary_every < 1:
            raise ConfigError(f"MemoryMonitor: summary_every={summary_every} must be at least 1; None writes none")
        self._given = meter
        self._summary_every = summary_every
        self._summary: Path | None = None
        self._phases: PhaseMemory | None = None
        self._resident = RssMeter()
        self._owners: dict[str, int] = {}
        self._gradients_at_start = 0
        self._after_step: deque[tuple[int, int]] = deque(maxlen=_SLOPE_READINGS[1])

    @property
    def phases(self) -> PhaseMemory | None:
        """The timeline of the last logging step, from fit start on."""
        return self._phases

    def on_fit_start(self, state: RunState) -> None:
        """Choose the meter of the run's device, and check that a summary can be written."""
        self._phases = PhaseMemory(self._given or meter_for(state.device))
        self._after_step.clear()
        if self._summary_every is not None:
            if state.device is None or state.device.type != "cuda":
                raise ConfigError(
                    f"memory.summary_every is what CUDA's allocator says, and this run is on {state.device or 'cpu'}; "
                    "remove it, or train on a GPU (device=cuda)"
                )
            self._summary = writable_run_dir(state, "MemoryMonitor", None) / SUMMARY

    def on_step_start(self, state: RunState) -> None:
        """Begin the timeline."""
        if state.is_logging_step and self._phases is not None:
            self._phases.restart()
            self._gradients_at_start = sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None)
            self._phases.record("start")

    def on_backward_start(self, state: RunState) -> None:
        """The graph is at its largest."""
        if state.is_logging_step and self._phases is not None:
            before = self._phases.readings.get("after_forward", 0)
            used = self._phases.record("after_forward")
            start = self._phases.readings.get("start")
            if used > before and start is not None:  # no start: a slow heap's meter was exchanged since
                self._note_owners(state, used, start)

    def on_backward_end(self, state: RunState) -> None:
        """Gradients are complete."""
        if state.is_logging_step and self._phases is not None:
            self._phases.record("after_backward")

    def on_step_end(self, state: RunState) -> None:
        """The optimizer is done."""
        if state.is_logging_step and self._phases is not None:
            used = self._phases.record("after_step")
            if state.step > WARM_UP:
                self._after_step.append((state.step, used))
        if self._summary_every is not None and state.step % self._summary_every == 0:
            self._write_summary(state)

    def on_eval_end(self, state: RunState) -> None:
        """What an evaluation left."""
        if self._phases is not None:
            self._phases.restart()
            self._owners.clear()
            self._phases.record("evaluation")

    def on_log(self, state: RunState) -> None:
        """Add the timeline to the row."""
        if self._phases is None or not self._phases.readings:
            return
        row = state.row
        for phase, used in self._phases.readings.items():
            row[f"memory/{phase}_mb"] = used / MB
        for owner, used in self._owners.items():
            row[f"memory/by_owner/{owner}_mb"] = used / MB
        row["memory/peak_mb"] = self._phases.peak() / MB
        reserved = self._phases.meter.reserved()
        if reserved:
            row["memory/reserved_mb"] = reserved / MB
            row["memory/fragmentation"] = max(0.0, 1 - self._phases.meter.read() / reserved)
        if state.device is not None and state.device.type == "cuda":
            row["memory/alloc_retries"] = float(torch.cuda.memory_stats(state.device).get("num_alloc_retries", 0))
        if len(self._after_step) >= _SLOPE_READINGS[0] and "after_step" in self._phases.readings:
            steps, used_bytes = np.array(self._after_step, dtype=np.float64).T
            row["memory/growth_kb_per_step"] = theil_sen(steps, used_bytes) / KB
        row["memory/resident_mb"] = self._resident.read() / MB

    def _note_owners(self, state: RunState, used: int, start: int) -> None:
        """Whose the bytes after a forward are, when so many were in use at the start of the step."""
        owned = owned_bytes(state.model, state.optimizers)
        before = start - self._gradients_at_start
        self._owners = {
            "parameters": owned["parameters"],
            "buffers": owned["buffers"],
            "optimizer_state": owned["optimizer state"],
            "gradients": owned["gradients"],
            "activations": max(0, used - before - owned["gradients"]),
        }

    def _write_summary(self, state: RunState) -> None:
        assert self._summary is not None
        try:
            with self._summary.open("a", encoding="utf-8") as file:
                file.write(f"after step {state.step}\n{torch.cuda.memory_summary(state.device)}\n\n")
        except OSError as error:
            raise unwritable(self._summary.parent, "MemoryMonitor", error) from error
