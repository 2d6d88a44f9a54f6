"""Readings of a meter over a run: from step to step, and from one evaluation to the next."""

from __future__ import annotations

import statistics
import time
from collections import deque

from safetrain.accounting.growth import MIN_RATE, GrowthSeries, Slope
from safetrain.accounting.inventory import Inventory
from safetrain.findings import Rule
from safetrain.memory import HeapMeter, Meter, PythonMeter, RssMeter, heap_is_readable

_CHECK_EVERY = 2
"""Readings between two tests of the slope."""
_SLOW_READING_NS = 300_000
"""A heap that takes so long to tell its size (a hundred thousand small tensors do that) is asked no more."""
_RESIDENT_RATE = 8_000.0
"""The least growth that counts, in bytes a step, where only resident memory can be read."""
_PYTHON_STRIDE = 4
"""Steps between two counts of Python's objects at first: a count takes longer than reading the heap."""
_BUDGET_NS = 500
_FIRST_BUDGET_NS = 300_000
_BUDGET_SHARE = 0.001
"""What readings may cost a step: nanoseconds (more in the first ones), or a share of its time if that is more."""
_FIRST_READINGS, _FIRST_TOTAL_NS = 128, 10_000_000
"""The first ones: so many (to step 256), or what they took together, if that is reached before."""
_WIDEST = 1024
"""Steps between two readings, at most."""
_EVAL_BYTES = 16_000
"""Growth of one evaluation below which nobody asks."""
_FIRST_EVAL = 1
"""Evaluations that do not count: the first one makes kernels and caches."""


def host_meter() -> Meter:
    """The heap, unless that takes too long already, else resident memory."""
    if not heap_is_readable():
        return RssMeter()
    heap = HeapMeter(slow_ns=10**12)  # it must not switch by itself: what is read then is another series
    costs = []
    for _ in range(3):
        started = time.perf_counter_ns()
        heap.read()
        costs.append(time.perf_counter_ns() - started)
    return heap if min(costs) <= _SLOW_READING_NS else RssMeter()


def host_meters() -> list[Meter]:
    """What there is to watch on the host; `host_meter` is the last."""
    heap, python = host_meter(), PythonMeter()
    return [python, heap] if isinstance(heap, HeapMeter) and python.read() else [heap]


def series_for(meter: Meter) -> GrowthSeries:
    """Readings of `meter`, with the least growth that it can tell."""
    if isinstance(meter, PythonMeter):
        return GrowthSeries(first_stride=_PYTHON_STRIDE)
    return GrowthSeries(_RESIDENT_RATE if isinstance(meter, RssMeter) else MIN_RATE)


class Track:
    """One meter over the steps."""

    def __init__(self, entry: Rule, meter: Meter) -> None:
        self.entry = entry
        self.meter = meter
        self.series = series_for(meter)
        self.evaluated = False
        self.due = 0
        """The step of the next reading."""
        self._shift = 0
        self._last: int | None = None
        self._count = 0
        self._costs: deque[int] = deque(maxlen=4)
        self._spent_ns = 0

    def read(self, step: int) -> Slope | None:
        """Take a reading; the slope when it is time for a test and it rises."""
        started = time.perf_counter_ns()
        used = self.meter.read()
        self._costs.append(time.perf_counter_ns() - started)
        self._spent_ns += self._costs[-1]
        if isinstance(self.meter, HeapMeter) and len(self._costs) == 4 and min(self._costs) > _SLOW_READING_NS:
            self.meter = RssMeter()
            self._last, self._shift, self.series = None, 0, series_for(self.meter)
            self._costs.clear()
            return self.read(step)
        if self.evaluated:
            # What an evaluation left is another rule's business.
            self.evaluated = False
            self._shift += used - self._last if self._last is not None else 0
        self._last = used
        self.series.add(step, used - self._shift)
        self._count += 1
        return self.series.slope() if self._count % _CHECK_EVERY == 0 else None

    def spacing(self, step_ns: float) -> int:
        """Steps to the next reading. On a badly fragmented heap they are slow, and come rarely enough to be borne."""
        is_first = self._count < _FIRST_READINGS and self._spent_ns < _FIRST_TOTAL_NS
        bearable = max(_FIRST_BUDGET_NS if is_first else _BUDGET_NS, _BUDGET_SHARE * step_ns)
        # The cheapest of the last few: the others were interrupted.
        return max(self.series.stride, min(_WIDEST, int(min(self._costs) / bearable)))


class Evaluations:
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
