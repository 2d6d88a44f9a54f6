"""The guard over memory: does it rise from step to step, and who keeps what was added?

Each step costs one reading of a meter, soon only every few steps. When readings rise for good, what the user's names
reach is looked through three times, some steps apart: what got longer each time, and explains the bytes, is reported.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import time
import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from safetrain.accounting.failed_attempt import in_evaluation
from safetrain.accounting.growth import FAST_RATE, WARM_UP, Slope, steps_needed
from safetrain.accounting.inventory import Inventory, Suspect, find_growing, length_of, names_of, running_loaders
from safetrain.accounting.investigation import Investigation
from safetrain.accounting.keeping import Reading, is_bounded_by_type
from safetrain.accounting.survivors import SurvivorHunt
from safetrain.accounting.tracks import Evaluations, Track, host_meters
from safetrain.autopsy import attach
from safetrain.callbacks.base import Callback
from safetrain.data.batch import batch_size
from safetrain.findings import Finding, Report, Rule, SourceLine
from safetrain.graph import Holder, Survey
from safetrain.guarding.fragmentation import FragmentationGuard
from safetrain.guarding.workers import WorkerGuard
from safetrain.memory import PythonMeter, meter_for
from safetrain.rules import memory
from safetrain.rules.out_of_memory import find_out_of_memory, is_out_of_memory, owned_bytes

if TYPE_CHECKING:
    from safetrain.state import RunState

_PATIENT_EPOCHS = 2
"""A place that the source empties must have survived so many ends of an epoch before it is called a leak."""
_PATIENT_STEPS = 3_000
_STEADY = 0.85
"""A store of results by key that slows down by more than this fills up."""
_TELLING = 20
"""New results that such a store must be due at its pace: with fewer, chance would decide."""
_MAX_SEARCHES = 12
"""Searches after evaluations in one run."""
_MAX_HUNTS = 2
"""Times in a run that allocations are recorded."""
_LONGEST_WAIT = 4096
"""Steps to wait after many searches in vain."""
_RESERVE_BYTES = 16 << 20
"""Address space kept for explaining an error under a limit on it. It is never touched, so it costs no memory."""
_log = logging.getLogger("safetrain")


def memory_guards(report: Report) -> list[Callback]:
    """Those that watch memory."""
    return [FragmentationGuard(report), WorkerGuard(report), MemoryGuard(report)]


class MemoryGuard(Callback):
    """M401, M402, M404 and M405.

    On the CPU the heap is host and device memory at once, so growth there is M402. Findings that the graph rules have
    made explain growth already and are not repeated.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self._tracks: list[Track] = []
        self._used_before = 0
        self._next = 0
        self._case: Investigation | None = None
        self._hunt: SurvivorHunt | None = None
        self._hunts_left = _MAX_HUNTS
        self._told: set[tuple[str, ...]] = set()
        self._waiting: dict[tuple[str, ...], tuple[int, int, int]] = {}
        self._searches = 0
        self._reserve: mmap.mmap | None = None
        self._last_look = (0, 0)
        self._wait_for: int | None = None
        self._loaders: list[weakref.ref[Any]] = []
        self._evaluation = Evaluations()
        self._has_risen = False

    def noticeable_rate(self) -> float | None:
        """Memory rose by less than so many bytes a step; None when it rose by more, or when it is too early to say."""
        rates = [track.series.noticeable_rate() for track in self._tracks]
        known = [rate for rate in rates if rate is not None]
        return max(known) if known and len(known) == len(rates) and not self._has_risen else None

    # ------------------------------------------------------------------ events

    def on_fit_start(self, state: RunState) -> None:
        """Choose the meters."""
        self._tracks = [Track(memory.HOST, meter) for meter in host_meters()]
        if state.device is not None and state.device.type not in ("cpu", "meta"):
            self._tracks.append(Track(memory.DEVICE, meter_for(state.device)))
        owned = sum(owned_bytes(state.model, state.optimizers).values())
        failed = state.exception is not None  # before the first step: what it used is in the reading already
        self._used_before = 0 if failed else max(0, self._tracks[-1].meter.read() - owned)
        self._reserve = mmap.mmap(-1, _RESERVE_BYTES)
        self._next = state.step + WARM_UP
        self._last_look = (state.step, time.perf_counter_ns())
        self._case = None
        self._evaluation = Evaluations()

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
        """Explain an out-of-memory error. A trace must not outlive the step."""
        self._drop_case()
        error = state.exception
        if error is None or not is_out_of_memory(error) or not self._tracks:
            return
        evaluating = state.phase == "eval" or in_evaluation(error)
        for finding in self._explain(state, error, evaluating=evaluating, forecasts=state.in_step and not evaluating):
            self.report.add(finding, step=state.current_step, phase="eval" if evaluating else state.phase)
            attach(error, finding)

    def on_split(self, state: RunState) -> None:
        """The same for one that the run survives: a note."""
        self._drop_case()
        if state.exception is None or not self._tracks:
            return
        for finding in self._explain(state, state.exception):
            finding.severity = "note"
            finding.fix = f"nothing: the step is repeated in micro-batches of {state.micro_batch_size} (oom='split')"
            self.report.add(finding, step=state.current_step, phase=state.phase)

    def _explain(
        self,
        state: RunState,
        error: BaseException,
        *,
        evaluating: bool = False,
        forecasts: bool = False,
    ) -> list[Finding]:
        self._give_reserve_back()
        meter = self._tracks[-1].meter
        try:
            return find_out_of_memory(
                error,
                state.model,
                state.optimizers,
                used_bytes=meter.read(),
                meter=meter.name,
                used_before=self._used_before,
                batch=state.batch,
                samples=batch_size(state.batch) if state.batch is not None else None,
                evaluating=evaluating,
                forecast_peak=state.forecast_peak if forecasts else None,
                replay=state.replay if forecasts else None,
                findings=self.report.findings,
            )
        except Exception:  # the run has failed of something else, which must reach the user: not ours
            _log.warning("safetrain could not explain that memory ran out", exc_info=True)
            return []

    def _give_reserve_back(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def on_fit_end(self, state: RunState) -> None:
        """A trace must not outlive the run."""
        self._drop_case()
        self._give_reserve_back()

    # ------------------------------------------------------------------ steps

    def _look(self, state: RunState) -> None:
        if self._hunt is not None:
            self._next = state.step + 1
            return self._follow(self._hunt, state)
        if self._case is not None:
            self._next = state.step + 1
            return self._investigate(self._case, state)
        last_step, last_ns = self._last_look
        self._last_look = state.step, time.perf_counter_ns()
        step_ns = (self._last_look[1] - last_ns) / max(1, state.step - last_step)
        rising: list[tuple[Track, Slope]] = []
        for track in self._tracks:
            if state.step >= track.due:
                slope = track.read(state.step)
                track.due = state.step + track.spacing(step_ns)
                if slope is not None:
                    rising.append((track, slope))
        self._next = min(track.due for track in self._tracks)
        if rising:
            self._has_risen = True
            self._loaders = [weakref.ref(iterator) for iterator in running_loaders()]
            track, slope = max(rising, key=lambda pair: pair[1].bytes_per_step)
            self._case = Investigation(track, slope, Inventory(self._survey(state), state.step))
            self._next = self._case.due

    def _investigate(self, case: Investigation, state: RunState) -> None:
        case.end_trace()
        if state.step < case.due:
            return
        survey = self._survey(state)
        suspects = case.look(survey, state.step)
        suspect = memory.blame(suspects, case.slope.bytes_per_step)
        if suspect is None and case.go_on(survey):
            self._next = state.step + 1 if case.trace is not None else case.due
            return
        finding = None
        if suspect is not None:
            finding = self._judge(suspect, suspects, case.slope, case.track, state, stored_at=case.stored_at)
        elif self._may_hunt(case, suspects, state):
            self._hunt = SurvivorHunt(state.step, case.track.meter)
            self._next = state.step + 1
            return
        self._close(case, finding, state)

    def _may_hunt(self, case: Investigation, suspects: list[Suspect], state: RunState) -> bool:
        """Whether to record allocations: rarely, when nothing else explains, not for garbage that will be collected."""
        if isinstance(case.track.meter, PythonMeter):
            return False  # tensors are what would be recorded
        if self._hunts_left <= 0 or not case.still_rises(state.step):
            return False
        if any(f.code.startswith("G") for f in self.report.findings):
            return False
        if any(s.bytes_per_step > case.slope.bytes_per_step / 10 or is_bounded_by_type(s.holder) for s in suspects):
            return False
        self._hunts_left -= 1
        if not gc.isenabled():
            return True
        before = case.track.meter.read()
        gc.collect()
        return before - case.track.meter.read() < case.slope.bytes_per_step * case.slope.span / 2

    def _follow(self, hunt: SurvivorHunt, state: RunState) -> None:
        case = self._case
        survivors = hunt.advance(state.step)
        if not hunt.over or case is None:
            return
        self._hunt = None
        finding = None
        explained = memory.EXPLAINS * case.slope.bytes_per_step
        if survivors is not None and not survivors.attached and survivors.bytes_per_step >= explained:
            track = case.track
            finding = memory.unnamed_growth(survivors, case.slope, entry=track.entry, meter=track.meter.name)
        self._close(case, finding, state)

    def _close(self, case: Investigation, finding: Finding | None, state: RunState) -> None:
        if finding is not None:
            self.report.add(finding, step=state.current_step)
        self._case, self._loaders = None, []
        if self._wait_for is not None:  # too early to tell: go on with the same readings
            self._next, self._wait_for = max(state.step + 1, self._wait_for), None
            return
        case.track.series.restart()
        self._searches += finding is None
        # A search costs more than a step: after one in vain, wait longer each time.
        self._next = state.step + min(2**self._searches, _LONGEST_WAIT)

    def _survey(self, state: RunState) -> Survey:
        loaders = [iterator for ref in self._loaders if (iterator := ref()) is not None]
        return Survey(names_of(state.model, state.optimizers, loaders))

    def _judge(
        self,
        suspect: Suspect,
        suspects: list[Suspect],
        slope: Slope,
        track: Track,
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
        reading = Reading(holder, memory.files_around(holder, state.model))
        purpose = reading.purpose()
        if purpose == "bounded" and not suspect.weight.pins_views:
            return None
        if purpose == "emptied" and not self._was_never_emptied(suspect, state):
            return None
        if purpose == "remembered" and not self._goes_on(suspect, slope, entry or track.entry, state):
            return None
        self._told.add(way)
        source = memory.cache_line(holder.path) or stored_at or reading.storing_line()
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

    def _was_never_emptied(self, suspect: Suspect, state: RunState) -> bool:
        """Whether it kept everything since it was first met, over more than an epoch."""
        way = suspect.holder.way
        epoch, step, length = self._waiting.setdefault(way, (state.epoch, state.step, suspect.length))
        if suspect.length - length < 0.7 * suspect.count_per_step * (state.step - step):
            self._waiting[way] = (state.epoch, state.step, suspect.length)  # emptied in between
            return False
        return state.epoch - epoch >= _PATIENT_EPOCHS or state.step - step >= _PATIENT_STEPS

    def _goes_on(self, suspect: Suspect, slope: Slope, entry: Rule, state: RunState) -> bool:
        """Whether a store of results by key shows no sign of knowing all its keys soon: that takes a second look."""
        if entry is memory.EVAL:
            return True
        if length_of(suspect.holder.path[-1]) is None:
            return False  # one of its results, not the store
        if any(isinstance(obj, Dataset) and suspect.length < _num_samples(obj) for obj in suspect.holder.path):
            return False  # full when it has every sample
        if slope.bytes_per_step >= FAST_RATE:
            return suspect.count_per_step >= _STEADY * suspect.length / state.step
        way, pace = suspect.holder.way, suspect.length / state.step
        later = max(steps_needed(slope.bytes_per_step) / 3, _TELLING / pace)
        _, step, length = self._waiting.setdefault(way, (state.epoch, state.step, suspect.length))
        if state.step - step < later:
            self._wait_for = step + math.ceil(later)
            return False
        self._waiting[way] = state.epoch, state.step, suspect.length
        return (suspect.length - length) / (state.step - step) >= _STEADY * length / step

    def _is_told_by_graph_rules(self, holder: Holder) -> bool:
        return any(
            f.code.startswith("G") and f.holder is not None and holder.root.name in f.holder and holder.name in f.holder
            for f in self.report.findings
        )

    def _drop_case(self) -> None:
        if self._hunt is not None:
            self._hunt.stop()
            self._hunt = None
        if self._case is not None:
            self._case.end_trace()
            self._case = None

    # ------------------------------------------------------------------ evaluations

    def _judge_evaluation(self, state: RunState) -> None:
        evaluation, track = self._evaluation, self._tracks[-1]
        growth = evaluation.end(track.meter)
        if growth is None or evaluation.searches >= _MAX_SEARCHES:
            return
        survey = self._survey(state)
        seen = evaluation.inventories
        seen.append(Inventory(survey, evaluation.count, before=seen[-1] if seen else None))
        if len(seen) < 3:
            return
        suspects = find_growing(survey, seen[0], seen[1], seen[2])
        del seen[0]
        evaluation.searches += 1
        suspect = memory.blame(suspects, growth.bytes_per_step)
        finding = None
        if suspect is not None:
            finding = self._judge(suspect, suspects, growth, track, state, entry=memory.EVAL)
        if finding is not None:
            self.report.add(finding, step=state.current_step, phase="eval")


def _num_samples(dataset: Any) -> int:
    """0 where it does not know."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0
