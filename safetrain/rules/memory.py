"""Family M, memory: what grows, where, and who keeps it.

The judges take measurements that anyone can make (see `safetrain.accounting`); the guard in `safetrain.guarding.memory`
makes them during a run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from safetrain.accounting.growth import Slope
from safetrain.accounting.inventory import Suspect
from safetrain.accounting.keeping import Purpose
from safetrain.findings import Finding, Rule, SourceLine, rule
from safetrain.graph import Holder, files_of, format_bytes
from safetrain.source import USER, grade, line_text, with_text

DEVICE = rule("M401", "device-memory-growth", "warning", "device memory at the same point of the step keeps rising")
HOST = rule("M402", "host-memory-growth", "warning", "host memory at the same point of the step keeps rising")
EVAL = rule("M405", "eval-memory-growth", "warning", "memory rises from one evaluation to the next")

_UNNAMED_FIX = (
    "let go of it when its step is over: look for a registry, a callback or an exception that still refers to it, or, "
    "with the collector switched off, for objects that refer to each other (call gc.collect() now and then)"
)
FRAGMENTED = rule("M403", "fragmentation", "warning", "reserved memory is far above what is allocated")

if TYPE_CHECKING:
    from safetrain.accounting.survivors import Survivors

_LRU = "_lru_cache_wrapper"
_MAX_DECORATORS = 5
_SMALL_RECORDS = 64_000
"""Numbers and short strings below so many bytes a step are a history, and nobody's fault."""
_FRAGMENT_BYTES = 256_000_000
_EXPANDABLE = "expandable_segments:True"
EXPLAINS = 0.4
"""Share of the measured growth that a place must account for before it is blamed."""


def blame(suspects: Iterable[Suspect], bytes_per_step: float) -> Suspect | None:
    """The place that accounts for most of the measured growth, None when none does.

    Left out is whatever carries a graph, which is the business of the graph rules.
    """
    most = max(suspects, key=_explained, default=None)
    if most is None or most.weight.attached or _explained(most) < EXPLAINS * bytes_per_step:
        return None
    return most


def _explained(suspect: Suspect) -> float:
    return suspect.bytes_per_step + suspect.overhead_per_step


def memory_growth(
    suspect: Suspect,
    slope: Slope,
    *,
    entry: Rule = HOST,
    meter: str = "CPU heap",
    purpose: Purpose | None = None,
    source: SourceLine | None = None,
    also: Sequence[str] = (),
) -> Finding:
    """The finding for a place that keeps growing. `also` names what grows beside it.

    A place that is collected after the loop is a note, unless it keeps far more than it shows. So is a history of plain
    numbers, which few runs are long enough to suffer from.
    """
    weight, place = suspect.weight, describe(suspect.holder)
    is_history = weight.numbers_only and suspect.bytes_per_step < _SMALL_RECORDS
    deliberate = purpose == "collected" and not weight.pins_views and entry is not DEVICE
    measured = f"{meter} rose by {format_bytes(slope.bytes_per_step * slope.span)} over {slope.span} {_unit(entry)}s"
    return entry.finding(
        f"{place} grows by {format_bytes(suspect.bytes_per_step)} {_each(entry)}"
        + (", to be put together after the loop" if deliberate else " and is not emptied")
        + (", with plain numbers" if is_history else "")
        + f" ({measured})"
        + _pinning(suspect)
        + (f"; so do {', '.join(also)}" if also else ""),
        severity="note" if deliberate or is_history else entry.severity,
        source=source,
        holder=place,
        growth_bytes_per_step=suspect.bytes_per_step,
        pinned_bytes=round(suspect.bytes_per_step * slope.span),
        fix=_fix(suspect, entry, purpose),
    )


def describe(holder: Holder) -> str:
    """The holder in words; a long chain of the same name is cut short."""
    steps: list[str] = []
    for step in holder.describe().split(" → "):
        if len(steps) > 2 and steps[-3:] == [step] * 3:
            continue
        steps.append(step)
    return " → ".join(steps)


def _unit(entry: Rule) -> str:
    return "evaluation" if entry is EVAL else "step"


def _each(entry: Rule) -> str:
    return "an evaluation" if entry is EVAL else "a step"


def _pinning(suspect: Suspect) -> str:
    weight = suspect.weight
    if not weight.pins_views:
        return ""
    return (
        f"; what it stores is only part of that: {weight.widest} keeps the whole storage behind it alive "
        f"({format_bytes(weight.held_bytes)} for {format_bytes(weight.shown_bytes)} shown)"
    )


def _fix(suspect: Suspect, entry: Rule, purpose: Purpose | None) -> str:
    if suspect.weight.pins_views:
        return "copy the part that you keep, so that the rest can go: `.detach().clone()` (`.copy()` for an array)"
    if any(type(obj).__name__ == _LRU for obj in suspect.holder.path):
        return "bound the cache, `@functools.lru_cache(maxsize=128)`, or take it off: every result stays in memory"
    if entry is EVAL:
        return (
            "empty it when an evaluation starts, and keep numbers rather than tensors; a hook that stores should do so "
            "under `if module.training:`"
        )
    if entry is DEVICE:
        return "move what you keep off the device: `.detach().cpu()`, or keep a number: `.item()`"
    if purpose == "emptied":
        return "it is emptied in the source, but was not for more than an epoch: empty it where every epoch passes"
    return "keep fewer (`collections.deque(maxlen=…)`), empty it when it has been used, or keep a number: `.item()`"


def unnamed_growth(survivors: Survivors, slope: Slope, *, entry: Rule = HOST, meter: str = "CPU heap") -> Finding:
    """The finding for growth that no name of the user's leads to: the line that makes what stays."""
    shape = list(survivors.shape)
    return entry.finding(
        f"tensors made here stay after their step, {format_bytes(survivors.bytes_per_step)} a step (e.g. one of shape "
        f"{shape} by {survivors.op}); {meter} rose by {format_bytes(slope.bytes_per_step * slope.span)} over "
        f"{slope.span} steps, and no variable, attribute or container that names reach accounts for it",
        source=survivors.source and with_text(survivors.source),
        holder=survivors.holder,
        op=survivors.op,
        growth_bytes_per_step=survivors.bytes_per_step,
        pinned_bytes=round(survivors.bytes_per_step * slope.span),
        fix=_UNNAMED_FIX,
    )


# ---------------------------------------------------------------------- M403


def find_fragmentation(
    stats: Mapping[str, Any], shapes: Collection[tuple[tuple[int, ...], ...]] = (), *, settings: str = ""
) -> list[Finding]:
    """Whether CUDA's caching allocator is fragmented, from `torch.cuda.memory_stats()`.

    It is when much of what it took from the driver can serve no request at the peak (a third of it and 256 MB or
    more), and it shows: requests had to flush the cache and try again, or free pieces of split blocks hold the
    difference. `shapes` are those that batches had; when they vary, that is why. `settings` are the allocator's, as the
    environment gives them: what is set already is not recommended.
    """
    expands = _EXPANDABLE in settings
    reserved, peak = int(stats.get("reserved_bytes.all.peak", 0)), int(stats.get("allocated_bytes.all.peak", 0))
    retries = int(stats.get("num_alloc_retries", 0))
    pieces = int(stats.get("inactive_split_bytes.all.current", 0))
    idle = reserved - peak
    if idle < max(_FRAGMENT_BYTES, reserved // 3) or not (retries or pieces > idle // 2):
        return []
    varied = [shape for shape in shapes if shape]
    told = f"; batches came in {len(varied)} shapes: {_shapes_in_words(varied)}" if len(varied) > 2 else ""
    padded = "pad batches to a few lengths" if told else "keep the sizes of what is allocated to a few"
    return [
        FRAGMENTED.finding(
            f"the allocator holds {format_bytes(reserved)} for a peak of {format_bytes(peak)}: {format_bytes(pieces)} "
            f"of it lie in pieces between blocks in use, {retries} allocations had to flush the cache and retry{told}",
            pinned_bytes=idle,
            cause="blocks of ever new sizes split the cache" if told else None,
            fix=padded if expands else f"set PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} before the start; {padded}",
        )
    ]


def _shapes_in_words(shapes: Sequence[tuple[tuple[int, ...], ...]]) -> str:
    """The biggest tensor of each batch: `[8, 17..512]`, or some of them where they differ in kind."""
    biggest = sorted(max(shape, key=math.prod) for shape in shapes)
    if len({len(shape) for shape in biggest}) > 1:
        return ", ".join(str(list(shape)) for shape in biggest[:3]) + ", …"
    sides = [(min(sizes), max(sizes)) for sizes in zip(*biggest, strict=True)]
    return "[" + ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in sides) + "]"


def cache_line(path: Iterable[Any]) -> SourceLine | None:
    """Where a `functools.lru_cache` among the objects was put on its function: that line is the one to change."""
    for obj in path:
        code = getattr(getattr(obj, "__wrapped__", None), "__code__", None) if type(obj).__name__ == _LRU else None
        if code is None:
            continue
        first = code.co_firstlineno  # of the first decorator
        lines = {at: line_text(code.co_filename, at) for at in range(first, first + _MAX_DECORATORS)}
        at = next((at for at, text in lines.items() if "cache" in text), first)
        return SourceLine(code.co_filename, at, lines[at])
    return None


def files_around(holder: Holder, model: nn.Module | None) -> list[str]:
    """Files that may store into a holder: those of the objects on its path, of the running frames and of the model."""
    found: dict[str, None] = {}
    for obj in holder.path:
        filename = getattr(sys.modules.get(type(obj).__module__), "__file__", None)
        for name in (filename, getattr(_code_of(obj), "co_filename", None)):
            if isinstance(name, str) and grade(name) == USER:
                found[name] = None
    return list({**found, **dict.fromkeys(files_of(model))})


def _code_of(obj: Any) -> Any:
    return getattr(getattr(obj, "__wrapped__", obj), "__code__", None)
