"""Does it keep rising? A robust test on readings taken at one point of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MIN_RATE = 600.0
"""Bytes a step below which growth is nobody's business: a number kept in a history costs as much."""
FAST_RATE = 256_000.0
"""Bytes a step from which a few steps are enough to speak up."""
FAST_STEPS = 8
WARM_UP = 3
"""Steps before readings count: first calls make kernels, gradients and optimizer state."""
_MIN_POINTS = 8
_MAX_POINTS = 64
_MAX_STRIDE = 64
_SIGNIFICANT = 3.2
"""Standard deviations of the Mann-Kendall statistic."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth that is more than noise."""

    bytes_per_step: float
    first_step: int
    last_step: int

    @property
    def span(self) -> int:
        """Steps over which it was seen."""
        return self.last_step - self.first_step


class GrowthSeries:
    """Readings by step, thinned as they become many: at most 64 points, each the lowest of its neighbours.

    The lowest, because batches of varying length lift a reading now and then, while a leak lifts the floor.
    """

    def __init__(self, min_rate: float = MIN_RATE, first_stride: int = 1) -> None:
        self._min_rate = min_rate
        self._first_stride = first_stride
        self.stride = first_stride
        """Steps from one wanted reading to the next."""
        self._steps: list[int] = []
        self._floors: list[int] = []

    def restart(self) -> None:
        """Forget all readings."""
        self.stride = self._first_stride
        self._steps, self._floors = [], []

    def add(self, step: int, used: int) -> None:
        """Take the reading of a step. About 0.2 µs."""
        if self._floors and used < self._floors[0]:
            self._steps, self._floors = [], []  # whatever had grown is gone: something large was let go
        self._steps.append(step)
        self._floors.append(used)
        if len(self._steps) >= _MAX_POINTS:
            self._thin()

    def _thin(self) -> None:
        if self.stride >= _MAX_STRIDE:
            del self._steps[: _MAX_POINTS // 2], self._floors[: _MAX_POINTS // 2]
            return
        self.stride *= 2
        kept = [i if self._floors[i] <= self._floors[i + 1] else i + 1 for i in range(0, len(self._steps) - 1, 2)]
        self._steps, self._floors = [self._steps[i] for i in kept], [self._floors[i] for i in kept]

    def slope(self) -> Slope | None:
        """The growth, where it is significant, lasted long enough for its size, and has not slowed down.

        Small growth needs more steps before it counts: 8 at 256 kB a step, 130 at 1 kB.
        """
        steps, floors = self._steps, self._floors
        half = len(steps) // 2
        if len(steps) < _MIN_POINTS or floors[-1] - floors[0] < self._min_rate * (steps[-1] - steps[0]):
            return None
        if floors[-1] - floors[half] < 0.5 * self._min_rate * (steps[-1] - steps[half]):
            return None  # one jump, long ago: not worth the arithmetic below
        x, y = np.array(steps, dtype=np.float64), np.array(floors, dtype=np.float64)
        rate = theil_sen(x, y)
        span = steps[-1] - steps[0]
        if rate < self._min_rate or span < steps_needed(rate) or mann_kendall(y) < _SIGNIFICANT:
            return None
        early, late = theil_sen(x[: half + 1], y[: half + 1]), theil_sen(x[half:], y[half:])
        if late < max(0.5 * rate, 0.6 * early):
            return None  # slowing down, or a jump: something that fills up
        return Slope(rate, steps[0], steps[-1])

    def noticeable_rate(self) -> float | None:
        """The least growth in bytes a step that `slope` would have seen by now; None when it is too early to say.

        None also when it rose by more in the second half, even if not so steadily that it is growth.
        """
        steps, floors = self._steps, self._floors
        half = len(steps) // 2
        if len(steps) < _MIN_POINTS or steps[-1] - steps[0] < FAST_STEPS:
            return None
        rate = max(self._min_rate, FAST_RATE * (FAST_STEPS / (steps[-1] - steps[0])) ** 2)
        return rate if floors[-1] - floors[half] < rate * (steps[-1] - steps[half]) else None


def steps_needed(bytes_per_step: float) -> float:
    """Over how many steps growth of this size must be seen."""
    return FAST_STEPS * max(1.0, math.sqrt(FAST_RATE / bytes_per_step))


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median of the slopes of all pairs: up to 29 % of wild readings do not move it."""
    i, j = np.triu_indices(len(x), 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))  # np.median imports half of numpy in the middle of a step
    return float(slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2]) / 2


def mann_kendall(y: np.ndarray) -> float:
    """How many standard deviations the number of rising pairs is above that of falling ones."""
    i, j = np.triu_indices(len(y), 1)
    n = len(y)
    rising = float(np.sign(y[j] - y[i]).sum())
    return rising / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
