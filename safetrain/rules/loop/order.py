"""L509: epochs that replay one order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from safetrain.findings import Finding
from safetrain.foreign.events import LoopEvent
from safetrain.rules.loop.catalogue import (
    SAME_ORDER,
    text_of,
)


class SameOrder:
    """L509: a sampler with `set_epoch` that is never told the epoch, or a shuffling loader that repeats one order."""

    def __init__(self) -> None:
        self._epochs: dict[Any, list[LoopEvent]] = defaultdict(list)
        self._told: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event. Orders are filled in as epochs run, so an epoch is judged when the next one starts."""
        if event.kind == "epoch_start":
            epochs = self._epochs[event.data.get("loader")]
            epochs.append(event)
            del epochs[:-4]
        if event.kind in ("epoch_start", "epoch_end"):
            loader = event.data.get("loader")
            finding = None if loader in self._told else self._judge(self._epochs[loader])
            if finding is not None:
                self._told.add(loader)
                yield finding

    def _judge(self, epochs: Sequence[LoopEvent]) -> Finding | None:
        full = [e for e in epochs if e.data.get("length") is None or e.data["length"] > 1]
        if len(full) < 2 or not full[-1].data.get("shuffles"):
            return None
        knows = full[-1].data.get("set_epoch")
        needed = 2 if knows else 3
        last = full[-needed:]
        orders = {e.data.get("order") for e in last}
        if len(last) < needed or len(orders) != 1 or None in orders:
            return None
        if knows and len({e.data.get("sampler_epoch") for e in last}) != 1:
            return None
        sampler = last[-1].data.get("sampler") or "the sampler"
        is_batch = "batch" in sampler.lower()
        place = "loader.batch_sampler" if is_batch else "loader.sampler"
        if knows:
            cause, fix = f"{sampler}.set_epoch was not called", f"{place}.set_epoch(epoch) at the start of each epoch"
        else:
            cause, fix = "the generator is seeded anew in each epoch", "seed once, before the first epoch"
        return SAME_ORDER.finding(
            f"each epoch replays the same order: {sampler} ({place}) gave the same batches {needed} epochs in a row, "
            f"as {cause}.",
            first_step=last[-1].step,
            source=text_of(last[-1].source),
            op="set_epoch" if knows else None,
            holder=sampler,
            cause=cause,
            fix=fix,
        )
