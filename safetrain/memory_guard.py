"""The guard over memory: does it rise from step to step, and who keeps what was added?

Each step costs one reading of a meter, soon only every few steps. When readings rise for good, what the user's names
reach is looked through three times, some steps apart: what got longer each time, and explains the bytes, is reported.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from safetrain.callbacks.base import Callback
from safetrain.findings import Finding, Report, Rule, SourceLine
from safetrain.graph import Holder, StoreTrace, Survey
from safetrain.growth import FAST_RATE, WARM_UP, GrowthSeries, Slope
from safetrain.inventory import Inventory, Suspect, find_growing, names_of, newest, weigh
from safetrain.keeping import purpose_of
from safetrain.memory import Meter, meter_for
from safetrain.rules import memory
from safetrain.rules.graph import start_trace, visible_values

if TYPE_CHECKING:
    from safetrain.state import RunState

_CHECK_EVERY = 2
"""Readings between two tests of the slope."""
_PATIENT_EPOCHS = 2
"""A place that the source empties must have survived so many ends of an epoch before it is called a leak."""
_PATIENT_STEPS = 3_000
_MAX_SEARCHES = 12
"""Searches in a run that ended without a finding; each later one waits twice as long."""
_EVAL_BYTES = 16_000
"""Growth of one evaluation below which nobody asks."""
_FIRST_EVAL = 1
"""Evaluations that do not count: the first one makes kernels and caches."""


class MemoryGuard(Callback):
    """M401, M402 and M405.

    On the CPU the heap is host and device memory at once, so growth there is M402. Findings that the graph rules have
    made explain growth already and are not repeated.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self._tracks: list[_Track] = []
        self._next = 0
        self._case: _Investigation | None = None
        self._told: set[tuple[str, ...]] = set()
        self._waiting: dict[tuple[str, ...], tuple[int, int]] = {}
        self._searches = 0
        self._evaluation = _Evaluations()

    # ------------------------------------------------------------------ events

    def on_fit_start(self, state: RunState) -> None:
        """Choose the meters."""
        self._tracks = [_Track(memory.HOST, meter_for("cpu"))]
        if state.device is not None and state.device.type not in ("cpu", "meta"):
            self._tracks.append(_Track(memory.DEVICE, meter_for(state.device)))
        self._next = state.step + WARM_UP
        self._case = None
        self._evaluation = _Evaluations()

    def on_step_end(self, state: RunState) -> None:
        """One comparison on most steps."""
        if state.step >= self._next:
            self._look(state)

    def on_eval_start(self, state: RunState) -> None:
        """What an evaluation begins with."""
        if self._tracks:
            self._evaluation.begin(self._tracks[-1].meter)

    def on_eval_end(self, state: RunState) -> None:
        """What it leaves."""
        if not self._tracks:
            return
        for track in self._tracks:
            track.evaluated = True
        self._judge_evaluation(state)

    def on_exception(self, state: RunState) -> None:
        """A trace must not outlive the step."""
        self._drop_case()

    def on_fit_end(self, state: RunState) -> None:
        """A trace must not outlive the run."""
        self._drop_case()

    # ------------------------------------------------------------------ steps

    def _look(self, state: RunState) -> None:
        if self._case is not None:
            self._next = state.step + 1
            return self._investigate(self._case, state)
        self._next = state.step + max(track.series.stride for track in self._tracks)
        for track in self._tracks:
            slope = track.read(state.step)
            if slope is not None:
                self._case = _Investigation(track, slope, _take(state))
                self._next = self._case.due
                return

    def _investigate(self, case: _Investigation, state: RunState) -> None:
        case.end_trace()
        if state.step < case.due:
            return
        survey = _survey(state)
        if case.second is None:
            case.second = Inventory(survey, state.step, before=case.first)
            case.due = 2 * state.step - case.first.step
            growing = case.growing_so_far(survey)
            if growing is None and case.widen(state.step):
                self._next = case.due
            elif growing is not None:
                case.trace = start_trace(growing)
            return
        now = Inventory(survey, state.step, before=case.second)
        self._conclude(case, find_growing(survey, case.first, case.second, now), state)

    def _conclude(self, case: _Investigation, suspects: list[Suspect], state: RunState) -> None:
        self._case = None
        suspect = memory.blame(suspects, case.slope.bytes_per_step)
        finding = None
        if suspect is not None:
            finding = self._judge(suspect, suspects, case.slope, case.track, state, stored_at=case.stored_at)
        if finding is not None:
            self.report.add(finding, step=state.current_step)
        else:
            self._searches += 1
        case.track.series.restart()
        # A search costs more than a step: after one in vain, wait longer each time.
        self._next = state.step + min(2 ** min(self._searches, _MAX_SEARCHES), 4096)

    def _judge(
        self,
        suspect: Suspect,
        suspects: list[Suspect],
        slope: Slope,
        track: _Track,
        state: RunState,
        *,
        entry: Rule | None = None,
        stored_at: SourceLine | None = None,
    ) -> Finding | None:
        """The finding, unless the place may grow, or was told before by this rule or another."""
        holder = suspect.holder
        way = holder.way
        if way in self._told or self._is_told_by_graph_rules(holder):
            return None
        purpose = purpose_of(holder, memory.files_around(holder, state.model), visible_values())
        if purpose == "bounded" and not suspect.weight.pins_views:
            return None
        if purpose == "emptied" and not self._has_waited(way, state):
            return None
        self._told.add(way)
        source = memory.cache_line(holder) or stored_at or memory.growth_source(holder, state.model)
        enough = suspect.bytes_per_step / 10
        return memory.memory_growth(
            suspect,
            slope,
            entry=entry or track.entry,
            meter=track.meter.name,
            purpose=purpose,
            source=source,
            also=[s.holder.name for s in suspects if s is not suspect and s.bytes_per_step > enough][:3],
        )

    def _has_waited(self, way: tuple[str, ...], state: RunState) -> bool:
        epoch, step = self._waiting.setdefault(way, (state.epoch, state.step))
        return state.epoch - epoch >= _PATIENT_EPOCHS or state.step - step >= _PATIENT_STEPS

    def _is_told_by_graph_rules(self, holder: Holder) -> bool:
        return any(
            f.code.startswith("G") and f.holder is not None and holder.root.name in f.holder and holder.name in f.holder
            for f in self.report.findings
        )

    def _drop_case(self) -> None:
        if self._case is not None:
            self._case.end_trace()
            self._case = None

    # ------------------------------------------------------------------ evaluations

    def _judge_evaluation(self, state: RunState) -> None:
        evaluation, track = self._evaluation, self._tracks[-1]
        growth = evaluation.end(track.meter)
        if growth is None or evaluation.searches >= _MAX_SEARCHES:
            return
        survey = _survey(state)
        seen = evaluation.inventories
        seen.append(Inventory(survey, evaluation.count, before=seen[-1] if seen else None))
        if len(seen) < 3:
            return
        suspects = find_growing(survey, *seen)
        del seen[0]
        evaluation.searches += 1
        suspect = memory.blame(suspects, growth.bytes_per_step)
        finding = None
        if suspect is not None:
            finding = self._judge(suspect, suspects, growth, track, state, entry=memory.EVAL)
        if finding is not None:
            self.report.add(finding, step=state.current_step, phase="eval")


class _Track:
    """One meter over the steps."""

    def __init__(self, entry: Rule, meter: Meter) -> None:
        self.entry = entry
        self.meter = meter
        self.series = GrowthSeries()
        self.evaluated = False
        self._shift = 0
        self._last: int | None = None
        self._name = meter.name
        self._count = 0

    def read(self, step: int) -> Slope | None:
        """Take a reading; the slope when it is time for a test and it rises."""
        used = self.meter.read()
        if self.meter.name != self._name:  # fallen back: other bytes
            self._name, self._last, self._shift = self.meter.name, None, 0
            self.series.restart()
        if self.evaluated:
            # What an evaluation left is another rule's business.
            self.evaluated = False
            self._shift += used - self._last if self._last is not None else 0
        self._last = used
        self.series.add(step, used - self._shift)
        self._count += 1
        return self.series.slope() if self._count % _CHECK_EVERY == 0 else None


class _Investigation:
    """Who made the readings rise? Two further looks, as far apart as the growth is slow."""

    def __init__(self, track: _Track, slope: Slope, first: Inventory) -> None:
        self.track, self.slope, self.first = track, slope, first
        self.second: Inventory | None = None
        self.trace: StoreTrace | None = None
        self.stored_at: SourceLine | None = None
        self._gap = 1 if slope.bytes_per_step >= FAST_RATE else 2 if slope.bytes_per_step >= FAST_RATE / 8 else 6
        self._widened = False
        self.due = first.step + self._gap

    def growing_so_far(self, survey: Survey) -> Holder | None:
        """The container that gained most since the first look."""
        assert self.second is not None
        gained = {
            key: length - self.first.lengths[key][1]
            for key, (kind, length) in self.second.lengths.items()
            if key in self.first.lengths and self.first.lengths[key][0] is kind and length > self.first.lengths[key][1]
        }
        objects = [obj for obj in survey.objects() if id(obj) in gained]
        best = max(((_gain(obj, gained[id(obj)], self.first), i) for i, obj in enumerate(objects)), default=None)
        return survey.holder(objects[best[1]]) if best is not None else None

    def widen(self, step: int) -> bool:
        """Nothing yet: it may grow every few steps only. Once, look again later."""
        if self._widened:
            return False
        self._widened = True
        self.second = None
        self.due = step + 4 * self._gap
        return True

    def end_trace(self) -> None:
        """Let go of the trace, but keep the line that it saw."""
        if self.trace is not None:
            self.trace.stop()
            self.stored_at = self.stored_at or self.trace.stored_at
            self.trace = None


class _Evaluations:
    """Bytes at the start and the end of each evaluation."""

    def __init__(self) -> None:
        self.count = 0
        self.inventories: list[Inventory] = []
        self.searches = 0
        self._start: int | None = None
        self._last_end: int | None = None
        self._rises: list[int] = []

    def begin(self, meter: Meter) -> None:
        """Read at the start."""
        self._start = meter.read()

    def end(self, meter: Meter) -> Slope | None:
        """Read at the end; the growth per evaluation, when this one left bytes that were not there after the last one.

        Both count: what an evaluation adds may be dropped before the next one, and training may have added it.
        """
        used = meter.read()
        start, last_end = self._start, self._last_end
        self._start, self._last_end = None, used
        self.count += 1
        if start is None or last_end is None or self.count <= _FIRST_EVAL:
            return None
        added, rise = used - start, used - last_end
        if added < _EVAL_BYTES or rise < added / 2:
            self._rises.clear()
            self.inventories.clear()
            return None
        self._rises.append(min(added, rise))
        return Slope(statistics.median(self._rises), self.count - len(self._rises), self.count)


def _survey(state: RunState) -> Survey:
    return Survey(names_of(state.model, state.optimizers))


def _take(state: RunState) -> Inventory:
    return Inventory(_survey(state), state.step)


def _gain(container: object, count: int, apart_from: Inventory) -> int:
    return weigh(newest(container, count), apart_from).held_bytes
