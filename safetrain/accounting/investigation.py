"""Who made the readings rise? What names reach, looked through several times."""

from __future__ import annotations

from safetrain.accounting.growth import FAST_RATE, Slope
from safetrain.accounting.inventory import Inventory, Suspect, find_growing, is_ours, newest, weigh
from safetrain.accounting.tracks import Track
from safetrain.findings import SourceLine
from safetrain.graph import Holder, StoreTrace, Survey
from safetrain.rules.graph import start_trace


class Investigation:
    """Who made the readings rise? Further looks, as far apart as the growth is slow, until two rises in a row tell."""

    def __init__(self, track: Track, slope: Slope, first: Inventory) -> None:
        self.track, self.slope = track, slope
        self.trace: StoreTrace | None = None
        self.stored_at: SourceLine | None = None
        rate = slope.bytes_per_step
        gap = 1 if rate >= FAST_RATE / 8 else 6
        self._gaps = [gap, 4 * gap, 16 * gap, 16 * gap]  # after the first two looks: what grows every few steps only
        self._seen = [first]
        self._began = first.step, track.meter.read()
        self.due = first.step + gap

    def look(self, survey: Survey, step: int) -> list[Suspect]:
        """What grew from the look before the last to the last, and from that to this one."""
        now = Inventory(survey, step, before=self._seen[-1])
        suspects = find_growing(survey, self._seen[-2], self._seen[-1], now) if len(self._seen) > 1 else []
        self._seen = [*self._seen[-1:], now]
        return suspects

    def go_on(self, survey: Survey) -> bool:
        """Plan the next look, and trace the next step for the line that stores; False when it was enough."""
        if not self._gaps:
            return False
        self.due = self._seen[-1].step + self._gaps.pop(0)
        growing = self._growing(survey) if len(self._seen) > 1 else None
        self.trace = start_trace(growing) if growing is not None else None
        return True

    def _growing(self, survey: Survey) -> Holder | None:
        """The container that gained most since the last look, of those that are not the Trainer's own."""
        before, now = self._seen
        gained = {
            key: length - before.lengths[key][1]
            for key, (kind, length) in now.lengths.items()
            if key in before.lengths and before.lengths[key][0] is kind and length > before.lengths[key][1]
        }
        best: tuple[int, Holder | None] = (0, None)
        for obj in survey.objects():
            if id(obj) in gained:
                gain = weigh(newest(obj, gained[id(obj)]), before).held_bytes
                holder = survey.holder(obj)
                if gain > best[0] and not is_ours(holder):
                    best = (gain, holder)
        return best[1]

    def still_rises(self, step: int) -> bool:
        """Whether memory rose further since the first look. What filled up (a window, a cache) has stopped by now."""
        began, used = self._began
        return self.track.meter.read() - used >= self.slope.bytes_per_step * (step - began) / 4

    def end_trace(self) -> None:
        """Let go of the trace, but keep the line that it saw."""
        if self.trace is not None:
            self.trace.stop()
            self.stored_at = self.stored_at or self.trace.stored_at
            self.trace = None
