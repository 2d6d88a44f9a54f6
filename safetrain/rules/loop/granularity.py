"""L507: checkpointed regions that cost time and save no memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.findings import Finding, SourceLine
from safetrain.graph import format_bytes
from safetrain.recording.regions import Clock, RegionCall
from safetrain.rules.loop.catalogue import CHECKPOINT_GRANULARITY, text_of

_NOTHING = 0.1
"""Up to this share of what a region keeps anyway, what it leaves out counts as next to nothing."""
_LEAST_TIME = 0.005
"""Share of forward and backward below which nobody minds recomputations that save nothing, all kinds together."""
_NOTABLE_TIME = 0.03
_WHOLE_TIME, _WHOLE_BYTES = 0.05, 1_000_000
"""For regions that are too large: share of the time, and bytes above what a meter's readings scatter."""


@dataclass(frozen=True, slots=True)
class RegionCost:
    """The calls of one kind of region in one step: one class of module, called on one line."""

    names: tuple[str, ...]
    kind: str
    source: SourceLine | None
    num_calls: int
    seconds: float
    """Of recomputing."""
    time_share: float
    """Of the step's forwards and backwards."""
    left_out: int
    """Bytes that backward needs and that these regions did not keep."""
    kept: int
    """Bytes that went in and that they keep alive."""
    kept_only: int
    """Of these, what would not be kept without checkpointing, as far as the regions themselves are concerned."""
    lowers_peak: int | None
    """Bytes by which the peak of forward and backward is lower for them; None where no meter is exact enough."""


def region_costs(
    forward: Sequence[RegionCall],
    recomputed: Sequence[RegionCall],
    *,
    names: Mapping[int, str],
    clock: Clock,
    seconds: float,
    used_at_backward: int | None,
    switched: Collection[str] = (),
) -> list[RegionCost]:
    """What each kind of region costs and saves, from one forward and backward of `seconds`.

    Args:
        forward: the calls before backward, in order.
        recomputed: those that backward ran again, in that order.
        names: the model's modules by id.
        used_at_backward: the meter when backward began; None where it is not exact.
        switched: names of the modules that `activation_checkpoint` switched; no line of the user's is to blame there.
    """
    kinds: dict[tuple[Any, ...], list[RegionCall]] = defaultdict(list)
    for call in forward:
        if call.recompute_end is not None:
            module = call.module() if call.module is not None else None
            kinds[type(module), call.source].append(call)
    return [_cost(calls, recomputed, names, clock, seconds, used_at_backward, switched) for calls in kinds.values()]


def _cost(
    calls: list[RegionCall],
    recomputed: Sequence[RegionCall],
    names: Mapping[int, str],
    clock: Clock,
    seconds: float,
    used_at_backward: int | None,
    switched: Collection[str],
) -> RegionCost:
    modules = [module for call in calls if call.module is not None and (module := call.module()) is not None]
    found = tuple(dict.fromkeys(names[id(module)] for module in modules if id(module) in names))
    spent = sum(clock.seconds(call.recompute_start, call.recompute_end) for call in calls)
    kept: dict[int, int] = {}
    for call in calls:
        kept.update(call.kept)
    return RegionCost(
        names=found,
        kind=type(modules[0]).__name__ if modules else "function",
        source=None if set(found) & set(switched) else calls[0].source,
        num_calls=len(calls),
        seconds=spent,
        time_share=spent / max(seconds, 1e-9),
        left_out=sum(map(_left_out, calls)),
        kept=sum(kept.values()),
        kept_only=min(sum(kept.values()), sum(call.kept_only_bytes for call in calls)),
        lowers_peak=None if used_at_backward is None else _lowers_peak(set(calls), recomputed, used_at_backward),
    )


def _left_out(call: RegionCall) -> int:
    # Under selective checkpointing some of what backward needs was kept: the meter did not rise for it.
    return min(call.left_out_bytes, max(0, call.used_after_recompute - call.used_before_recompute))


def _lowers_peak(calls: set[RegionCall], recomputed: Sequence[RegionCall], used_at_backward: int) -> int:
    """The peak if `calls` had kept everything, less the one there was: at the start of backward, or at a recomputation.

    What a call leaves out would have been there until backward came to it.
    """
    missing = sum(_left_out(call) for call in calls)
    with_it, without = used_at_backward, used_at_backward + missing
    for call in recomputed:
        missing -= _left_out(call) if call in calls else 0
        with_it = max(with_it, call.used_after_recompute)
        without = max(without, call.used_after_recompute + missing)
    return without - with_it


def find_checkpoint_granularity(costs: Iterable[RegionCost]) -> list[Finding]:
    """L507 for regions that leave out next to nothing, or no more than they keep instead, or come back all at once."""
    found = []
    costs = list(costs)
    for_nothing = [cost for cost in costs if cost.kept and cost.left_out <= _NOTHING * cost.kept]
    are_notable = sum(cost.time_share for cost in for_nothing) >= _LEAST_TIME
    for cost in costs:
        if cost in for_nothing:
            found += [_too_small(cost)] if are_notable else []
        elif 0 < cost.left_out <= cost.kept_only and cost.time_share >= _NOTABLE_TIME:
            found.append(_too_small(cost))
        elif (
            cost.time_share >= _WHOLE_TIME
            and cost.lowers_peak is not None
            and cost.left_out >= _WHOLE_BYTES
            and cost.lowers_peak <= _NOTHING * cost.left_out
        ):
            found.append(_too_large(cost))
    return found


def _too_small(cost: RegionCost) -> Finding:
    return CHECKPOINT_GRANULARITY.finding(
        f"recomputing {_listed(cost)} takes {_time(cost)}, and leaves out {format_bytes(cost.left_out)} where "
        f"{format_bytes(cost.kept)} go in and are kept: the step is slower, its memory hardly lower.",
        source=text_of(cost.source),
        module=cost.names[0] if cost.names else None,
        op="checkpoint",
        cause="the checkpointed part is so small that what goes in is as large as what backward needs from inside",
        fix="checkpoint the whole block around it, as in Trainer(activation_checkpoint='blocks.*'), or leave it out",
    )


def _too_large(cost: RegionCost) -> Finding:
    return CHECKPOINT_GRANULARITY.finding(
        f"recomputing {_listed(cost)} takes {_time(cost)}. It leaves out {format_bytes(cost.left_out)} in forward, all "
        "of which is back before backward has freed anything: the peak of the step is "
        f"{format_bytes(max(0, cost.lowers_peak or 0))} lower.",
        source=text_of(cost.source),
        module=cost.names[0] if cost.names else None,
        op="checkpoint",
        cause="backward begins with one checkpointed part that holds nearly everything that was left out",
        fix="checkpoint its blocks one by one, as in Trainer(activation_checkpoint='blocks.*'), or leave it out",
    )


def _listed(cost: RegionCost) -> str:
    shown = ", ".join(f"`{name}`" for name in cost.names[:2]) or "a checkpointed function"
    more = f" and {len(cost.names) - 2} more" if len(cost.names) > 2 else ""
    return f"{shown}{more} ({cost.kind}, {cost.num_calls} call{'s' if cost.num_calls > 1 else ''} a step)"


def _time(cost: RegionCost) -> str:
    return f"{cost.seconds * 1e3:.1f} ms, {cost.time_share:.0%} of forward and backward"
