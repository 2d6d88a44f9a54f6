"""The guard of L507: times the recomputation of checkpointed regions in two early steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetrain.accounting.tracks import host_meter
from safetrain.activation_checkpoint import applied
from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Finding, Report
from safetrain.memory import meter_for
from safetrain.recording.regions import Clock, RegionCall, RegionWatch
from safetrain.rules.loop.granularity import find_checkpoint_granularity, region_costs

if TYPE_CHECKING:
    from safetrain.state import RunState

_AT = (3, 4)
"""Steps that are watched: earlier ones warm up and are looked at by others. A fault shows in each of them."""


class GranularityGuard(Callback):
    """L507. Free in other steps than `_AT`; no host sync. Put it first: it would time the others too."""

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._watch: RegionWatch | None = None
        self._again: list[RegionCall] = []
        self._start: Any = None
        self._end: Any = None
        self._num_first: int | None = None
        """Regions before the first backward."""
        self._used = 0
        self._is_complete = False
        self._found: list[dict[Any, Finding]] = []

    def on_step_start(self, state: RunState) -> None:
        """Watch, where it is time."""
        if self._is_complete:
            self._judge(state)  # a step later: by now a device has done the work, and times can be read
        if state.step + 1 not in _AT or len(self._found) != _AT.index(state.step + 1):
            return
        on_host = state.device is None or state.device.type == "cpu"
        # A heap that is slow to read is resident memory from the start: no warning in the middle of somebody's run.
        self._clock, self._meter = Clock(state.device), host_meter() if on_host else meter_for(state.device)
        self._again, self._num_first, self._end = [], None, None
        self._watch = RegionWatch(state.model, self._meter, self._clock, self._note)
        self._watch.start()
        self._start = self._clock.now()

    def on_backward_start(self, state: RunState) -> None:
        """The first forward is complete."""
        if self._watch is not None and self._num_first is None:
            self._num_first, self._used = len(self._watch.calls), self._meter.read()

    def on_backward_end(self, state: RunState) -> None:
        """All is computed."""
        if self._watch is not None and self._end is None:
            self._end = self._clock.now()

    def on_step_end(self, state: RunState) -> None:
        """Watch no more."""
        if self._watch is not None and self._end is not None:
            self._watch.stop()
            self._is_complete = True

    def on_fit_end(self, state: RunState) -> None:
        """Judge what is left."""
        if self._is_complete:
            self._judge(state)
        self.on_exception(state)

    def on_exception(self, state: RunState) -> None:
        """Torch's own class is put back."""
        if self._watch is not None:
            self._watch.stop()
            self._watch, self._is_complete = None, False

    def _note(self, call: RegionCall, moment: str) -> None:
        if moment == "recomputed":
            self._again.append(call)

    def _judge(self, state: RunState) -> None:
        watch, self._watch, self._is_complete = self._watch, None, False
        assert watch is not None
        if not self._num_first:
            return  # nothing is checkpointed
        costs = region_costs(
            watch.calls[: self._num_first],
            self._again,
            names={id(module): name or type(module).__name__ for name, module in state.model.named_modules()},
            clock=self._clock,
            # Of several micro-batches in the step the first is looked at.
            seconds=self._clock.seconds(self._start, self._end) * self._num_first / len(watch.calls),
            used_at_backward=None if self._meter.name.startswith("resident") else self._used,
            switched=applied(state.model),
        )
        self._found.append({finding.key(): finding for finding in find_checkpoint_granularity(costs)})
        if len(self._found) == len(_AT):
            for key, finding in self._found[-1].items():
                if all(key in found for found in self._found):
                    finding.first_step = _AT[0]
                    self._report.add(finding, step=max(1, state.step))
