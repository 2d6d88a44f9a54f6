"""M402 for loader workers: pages of the data set that each of them copies, and caches that grow inside them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from safetrain.accounting.inventory import length_of, newest
from safetrain.accounting.keeping import Reading
from safetrain.findings import Finding, SourceLine
from safetrain.graph import Holder, Survey, format_bytes
from safetrain.rules.memory import HOST, cache_line, describe, files_around
from safetrain.source import line_text

_COPIED = 16_000_000
"""Bytes a worker that a copied list must have cost to be worth a word: starting up costs half as much by itself."""
_CACHED = 48_000_000
"""The same for growth that only a cache inside the worker explains."""
_MANY = 20_000
"""Elements from which a container is worth sharing well."""
_SAMPLE = 400


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """Private bytes of a loader worker, averaged over the workers, after a step."""

    step: int
    private_bytes: float


def find_worker_growth(readings: Sequence[WorkerReading], num_workers: int, dataset: Any) -> list[Finding]:
    """Whether the workers of a loader keep making memory their own, and what of the data set explains it.

    `readings` are of one set of workers, the first soon after its start. The data set is the parent's: what it holds
    as many small Python objects is copied page by page; a cache that its methods fill grows inside the workers, unseen.
    """
    if len(readings) < 3:
        return []
    rises = [b.private_bytes - a.private_bytes for a, b in itertools.pairwise(readings)]
    growth, steps = readings[-1].private_bytes - readings[0].private_bytes, readings[-1].step - readings[0].step
    if growth < _COPIED or min(rises) <= 0:
        return []
    if rises[-1] < growth / 10:
        return []  # it has come to rest
    copied = _many_objects(dataset)
    if copied is not None and copied[1] >= growth / 2:
        return [_copied(copied[0], copied[1], growth, steps, num_workers)]
    if len(readings) < 4 or growth < _CACHED or not _is_steady(readings):
        return []
    return [_cached(dataset, growth, steps, num_workers)]


def _is_steady(readings: Sequence[WorkerReading]) -> bool:
    rates = [(b.private_bytes - a.private_bytes) / (b.step - a.step) for a, b in itertools.pairwise(readings)]
    return rates[-1] > 0.6 * max(rates)


def _copied(holder: Holder, size: float, growth: float, steps: int, num_workers: int) -> Finding:
    place = describe(holder)
    return HOST.finding(
        f"each of the {num_workers} loader workers made {format_bytes(growth)} its own within {steps} steps, and goes "
        f"on: {place} is about {format_bytes(size)} of Python objects, whose pages are copied as they are looked at",
        source=Reading(holder, files_around(holder, None)).storing_line(),
        holder=place,
        growth_bytes_per_step=num_workers * growth / steps,
        pinned_bytes=round(num_workers * growth),
        cause="forked workers share memory until it is written to; to look at an object writes its reference count",
        fix="keep samples in NumPy arrays or tensors (strings as one array of bytes with offsets): workers share them",
    )


def _cached(dataset: Any, growth: float, steps: int, num_workers: int) -> Finding:
    holder = f"data set {type(dataset).__name__} in the loader's workers"
    return HOST.finding(
        f"memory of each of the {num_workers} loader workers rises by {format_bytes(growth / steps)} a step "
        f"({format_bytes(growth)} within {steps} steps) and does not slow down: something in {type(dataset).__name__} "
        "is kept from sample to sample",
        source=_cache_of(dataset),
        holder=holder,
        growth_bytes_per_step=num_workers * growth / steps,
        pinned_bytes=round(num_workers * growth),
        fix="bound what the data set remembers (`functools.lru_cache(maxsize=128)`); every worker has its own copy",
    )


def _many_objects(dataset: Any) -> tuple[Holder, float] | None:
    """The container of the data set with most bytes of small Python objects, and how many those are."""
    survey = Survey({f"data set {type(dataset).__name__}": dataset}, budget_s=0.5)
    best: tuple[Any, float] = (None, 0.0)
    for obj in survey.objects():
        length = length_of(obj)
        if length is not None and length >= _MANY:
            size = length * _bytes_each(obj)
            best = max(best, (obj, size), key=lambda pair: pair[1])
    return (survey.holder(best[0]), best[1]) if best[0] is not None else None


def _bytes_each(container: Any) -> float:
    """Mean bytes of an element's Python objects, from a sample. Arrays and tensors count as the handles they are."""
    sample = list(newest(container, _SAMPLE))
    return sum(_object_bytes(item) for item in sample) / max(1, len(sample)) + 8


def _object_bytes(item: Any, depth: int = 2) -> float:
    size = float(sys.getsizeof(item))
    if isinstance(item, Tensor) or depth == 0:
        return size
    return size + sum(_object_bytes(inner, depth - 1) for inner in _parts(item))


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        return iter(item.values())
    if isinstance(item, (list, tuple)):
        return iter(item)
    return iter(getattr(item, "__dict__", {}).values())


def _cache_of(dataset: Any) -> SourceLine | None:
    """The decorator of an unbounded cache on the data set's class, else where its `__getitem__` begins."""
    for kind in type(dataset).__mro__:
        for value in vars(kind).values():
            if type(value).__name__ == "_lru_cache_wrapper" and value.cache_parameters()["maxsize"] is None:
                return cache_line([value])
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is None:
        return None
    return SourceLine(code.co_filename, code.co_firstlineno, line_text(code.co_filename, code.co_firstlineno))
