"""Which blocks keep, recompute or recompute selectively: the fastest choice whose peak stays within a budget.

The peaks of a step in which every block recomputes are measured, stretch by stretch between the boundaries of blocks.
A block that keeps its activations adds what it had left out to each stretch from its forward to its backward, and its
recomputation falls away; so the peak of any choice is a sum, and no choice has to be tried to know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Choice = Literal["keep", "selective", "recompute"]


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers of the stretches of one call of a block: its forward, its recomputation, its backward, what follows."""

    forward: int
    recompute: int
    backward: int
    end: int


@dataclass(frozen=True, slots=True)
class Option:
    """What another choice than `recompute` means for one block: what it saves, what it costs."""

    block: str
    choice: Choice
    seconds: float
    """What is saved of a step's time."""
    extra: np.ndarray
    """Bytes added to each stretch; minus infinity where the stretch falls away."""


def keep(block: str, seconds: float, spans: Iterable[tuple[Span, float, float]], num_stretches: int) -> Option:
    """The option to keep activations: `spans` with the bytes that each call left out, and by how many its forward
    reaches higher. `seconds` of recomputation."""
    extra = np.zeros(num_stretches)
    for span, left_out, in_forward in spans:
        extra[span.forward] += in_forward
        extra[span.forward + 1 : span.recompute] += left_out
        extra[span.recompute : span.backward] = -np.inf
    return Option(block, "keep", seconds, extra)


def selective(block: str, seconds: float, spans: Iterable[tuple[Span, float, float]], num_stretches: int) -> Option:
    """The option to recompute selectively: `spans` with the bytes kept from forward on, and beyond what a whole
    recomputation brings."""
    extra = np.zeros(num_stretches)
    for span, kept, beyond in spans:
        extra[span.forward : span.backward] += kept
        extra[span.backward : span.end] += max(0.0, beyond)
    return Option(block, "selective", seconds, extra)


def peak(peaks: np.ndarray, chosen: Iterable[Option]) -> float:
    """The highest stretch with what is chosen."""
    return float(_sum(peaks, {option.block: option for option in chosen}).max())


def fastest(peaks: np.ndarray, options: Iterable[Option], budget: float) -> dict[str, Option]:
    """The options, at most one a block, that save the most time with every stretch within `budget`; the rest recompute.

    Greedy by time for the share of the room that is taken, over keeping only, selective only and both. With equal
    blocks that is the best; else near it. Nothing fits where `peaks` themselves do not.
    """
    options = [option for option in options if option.seconds > 0]
    trials = [
        _greedy(peaks, [o for o in options if o.choice in choices], budget)
        for choices in (("keep",), ("keep", "selective"), ("selective",))
    ]
    return max(trials, key=lambda chosen: sum(option.seconds for option in chosen.values()))


def _greedy(peaks: np.ndarray, options: list[Option], budget: float) -> dict[str, Option]:
    chosen: dict[str, Option] = {}
    while True:
        room = np.maximum(1.0, budget - _finite(_sum(peaks, chosen)))
        best: tuple[float, Option] | None = None
        for option in options:
            before = chosen.get(option.block)
            gain = option.seconds - (before.seconds if before else 0.0)
            if gain <= 0 or _sum(peaks, {**chosen, option.block: option}).max() > budget:
                continue
            taken = np.max((_finite(option.extra) - (_finite(before.extra) if before else 0.0)) / room)
            worth = gain / max(float(taken), 1e-9)
            if best is None or worth > best[0]:
                best = worth, option
        if best is None:
            return chosen
        chosen[best[1].block] = best[1]


def _sum(peaks: np.ndarray, chosen: Mapping[str, Option]) -> np.ndarray:
    total: np.ndarray = sum((option.extra for option in chosen.values()), start=peaks.astype(float))
    return total


def _finite(extra: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(extra), extra, 0.0)
