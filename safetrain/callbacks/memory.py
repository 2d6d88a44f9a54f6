"""Memory at each phase of a step, in the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetrain.callbacks.base import Callback
from safetrain.memory import Meter, PhaseMemory, RssMeter, meter_for

if TYPE_CHECKING:
    from safetrain.state import RunState

MB = 1e6


class MemoryMonitor(Callback):
    """Adds bytes in use, in units of 10^6 bytes, at each phase of a logging step.

    - `memory/start_mb`: before gradients are dropped; `memory/after_forward_mb`: before backward, the graph alive;
      `memory/after_backward_mb`: gradients complete; `memory/after_step_mb`: after the optimizer.
    - `memory/peak_mb`: highest so far. On CUDA the allocator's own record; on the CPU the highest reading, which
      cannot see what came and went inside forward or backward.
    - `memory/reserved_mb`: what the allocator holds, where it tells.
    - `memory/resident_mb`: the whole process on the host.
    - rows of an evaluation carry `memory/evaluation_mb`: what is in use after it, its peak included in `peak_mb`.

    On the CPU the readings count the whole heap of the process, not tensors alone. Non-logging steps are not read.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._given = meter
        self._phases: PhaseMemory | None = None
        self._resident = RssMeter()

    @property
    def phases(self) -> PhaseMemory | None:
        """The timeline of the last logging step, from fit start on."""
        return self._phases

    def on_fit_start(self, state: RunState) -> None:
        """Choose the meter of the run's device."""
        self._phases = PhaseMemory(self._given or meter_for(state.device))

    def on_step_start(self, state: RunState) -> None:
        """Begin the timeline."""
        if state.is_logging_step and self._phases is not None:
            self._phases.restart()
            self._phases.record("start")

    def on_backward_start(self, state: RunState) -> None:
        """The graph is at its largest."""
        if state.is_logging_step and self._phases is not None:
            self._phases.record("after_forward")

    def on_backward_end(self, state: RunState) -> None:
        """Gradients are complete."""
        if state.is_logging_step and self._phases is not None:
            self._phases.record("after_backward")

    def on_step_end(self, state: RunState) -> None:
        """The optimizer is done."""
        if state.is_logging_step and self._phases is not None:
            self._phases.record("after_step")

    def on_eval_end(self, state: RunState) -> None:
        """What an evaluation left."""
        if self._phases is not None:
            self._phases.restart()
            self._phases.record("evaluation")

    def on_log(self, state: RunState) -> None:
        """Add the timeline to the row."""
        if self._phases is None or not self._phases.readings:
            return
        for phase, used in self._phases.readings.items():
            state.row[f"memory/{phase}_mb"] = used / MB
        state.row["memory/peak_mb"] = self._phases.peak() / MB
        reserved = self._phases.meter.reserved()
        if reserved is not None:
            state.row["memory/reserved_mb"] = reserved / MB
        state.row["memory/resident_mb"] = self._resident.read() / MB
