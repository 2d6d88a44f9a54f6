"""L503, L504, P209 and P213: the backwards between two steps, how they weigh, and what becomes of their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetrain.findings import Finding
from safetrain.foreign.events import LoopEvent
from safetrain.rules.gradient.catalogue import DROPPED_GRAD, STALE_GRAD, listed
from safetrain.rules.loop.catalogue import (
    ACCUMULATION_SCALE,
    SHORT_WINDOW,
    place_of,
    text_of,
)
from safetrain.rules.loop.weights import LossWeight
from safetrain.source.reading import gradients_are_read, named_only


@dataclass(slots=True)
class _Micro:
    """One backward of a window."""

    event: LoopEvent
    weight: LossWeight | None
    batches: int
    """Batches that loaders had given since the window began."""


class Windows:
    """L503 and L504: how the backwards between two steps weigh, and what becomes of an epoch's leftover."""

    def __init__(self) -> None:
        self._micros: list[_Micro] = []
        self._batches: Counter[Any] = Counter()
        self._sizes: Counter[int] = Counter()
        self._crossed = 0  # micro-batches of the window from before the epoch ended
        self._unnormalised: dict[Any, int] = {}
        self._uneven: dict[Any, int] = {}
        self._dropped = 0
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "batch":
            self._batches[event.data.get("loader")] += 1
        elif kind == "backward":
            if not event.data.get("grad_mode_eval"):
                self._micros.append(_Micro(event, event.data.get("weight"), max(self._batches.values(), default=0)))
        elif kind in ("epoch_start", "epoch_end"):
            if self._micros and event.data.get("backwards") != 0:
                self._crossed = len(self._micros)
        elif kind == "zero_grad" and event.data.get("params"):
            yield from self._cleared(event)
        elif kind == "optimizer_step" or (kind == "scaler_step" and event.data.get("taken") is False):
            yield from self._stepped(event)

    @property
    def usual(self) -> int:
        """Micro-batches in the window that is most common so far; 0 before any."""
        return self._sizes.most_common(1)[0][0] if self._sizes else 0

    def _reset(self) -> None:
        self._micros, self._crossed = [], 0
        self._batches.clear()

    def _cleared(self, event: LoopEvent) -> Iterator[Finding]:
        """Gradients went before a step: at an epoch's boundary they were the leftover of a window."""
        micros, crossed = self._micros, self._crossed
        self._reset()
        if not crossed or crossed != len(micros) or not 0 < crossed < self.usual or "dropped" in self._told:
            return
        if len({place_of(m.event) for m in micros}) != 1:
            return
        self._told.add("dropped")
        yield SHORT_WINDOW.finding(
            f"the last {crossed} micro-batches of the epoch never reach the optimizer: the window (accumulation over "
            f"{self.usual}) was not full, no step followed, and zero_grad dropped their gradients.",
            first_step=event.step,
            source=text_of(event.source),
            op="zero_grad",
            cause=f"{crossed} micro-batches left over at the end of the epoch, with steps every {self.usual}",
            fix="also step at the end: if (i + 1) % accum == 0 or i + 1 == len(loader)",
        )

    def _stepped(self, event: LoopEvent) -> Iterator[Finding]:
        micros, crossed, batches = self._micros, self._crossed, dict(self._batches)
        self._reset()
        if not micros:
            return
        usual = self.usual
        alike = len({place_of(m.event) for m in micros}) == 1
        if alike:
            self._sizes[len(micros)] += 1
        if (len(micros) < 2 and usual < 2) or not alike:
            return
        yield from self._carried(event, micros, crossed, usual)
        yield from self._short(event, micros, usual)
        if len(micros) >= 2:
            yield from self._uneven_window(event, micros)
            yield from self._scale(event, micros, batches)

    def _carried(self, event: LoopEvent, micros: Sequence[_Micro], crossed: int, usual: int) -> Iterator[Finding]:
        if usual < 2 or not 0 < crossed < usual or len(micros) != crossed + usual or "carried" in self._told:
            return
        self._told.add("carried")
        yield SHORT_WINDOW.finding(
            f"a step uses {len(micros)} micro-batches instead of {usual}: the {crossed} left over at the end of an "
            "epoch were kept "
            "and added to the first window of the next.",
            first_step=event.step,
            source=text_of(micros[-1].event.source),
            op="backward",
            cause=f"{crossed} leftover micro-batches carried into the next epoch",
            fix="also step at the end: if (i + 1) % accum == 0 or i + 1 == len(loader)",
        )

    def _short(self, event: LoopEvent, micros: Sequence[_Micro], usual: int) -> Iterator[Finding]:
        """A short window whose losses are divided by the length of a full one."""
        if not 0 < len(micros) < usual or "short" in self._told:
            return
        divisors = [_divisor(m) for m in micros]
        if any(d is None or round(d) != usual for d in divisors):
            return
        self._told.add("short")
        yield SHORT_WINDOW.finding(
            f"a window of {len(micros)} micro-batches is divided by {usual}: its step gets {len(micros)}/{usual} of "
            "the right gradient.",
            first_step=event.step,
            source=text_of(micros[-1].event.source),
            op="backward",
            cause="the last window of the epoch is short, and its losses are divided by the full length",
            fix="divide by the window's own number of micro-batches",
        )

    def _uneven_window(self, event: LoopEvent, micros: Sequence[_Micro]) -> Iterator[Finding]:
        weights = [m.weight for m in micros]
        known = [w for w in weights if w is not None and w.count]
        if len(known) != len(micros) or "uneven" in self._told:
            return
        per_element = [w.per_element for w in known]
        counts = [w.count or 0.0 for w in known]
        if max(per_element) < 1.25 * min(per_element) or _follows_batch_size(micros, counts):
            return
        place = place_of(micros[-1].event)
        self._uneven[place] = self._uneven.get(place, 0) + 1
        if self._uneven[place] < 2:
            return
        self._told.add("uneven")
        yield uneven_finding(known[0].reduction, counts, max(per_element) / min(per_element), micros[-1].event)

    def _scale(self, event: LoopEvent, micros: Sequence[_Micro], batches: Mapping[Any, int]) -> Iterator[Finding]:
        """As many batches of one loader as backwards, each loss a whole mean: the sum of means, not their mean."""
        weights = [m.weight for m in micros]
        if "scale" in self._told or any(w is None or not w.count or abs(w.factor - 1.0) > 1e-6 for w in weights):
            return
        if any(w is not None and w.reduction.endswith("by count") for w in weights):
            return  # what it was divided by may well be the whole window's count
        if not any(n == len(micros) for n in batches.values()):
            return
        if micros[0].batches == micros[-1].batches and len(micros) > 1 and not _window_was_gathered(micros):
            return
        place = place_of(micros[-1].event)
        self._unnormalised[place] = self._unnormalised.get(place, 0) + 1
        if self._unnormalised[place] < 2:
            return
        self._told.add("scale")
        yield ACCUMULATION_SCALE.finding(
            f"{len(micros)} backwards add up before each step and each loss is a full mean, so the gradient is "
            f"{len(micros)} times "
            "that of one large batch: learning rate, clipping and weight decay no longer mean what they say.",
            first_step=max(1, event.step - 1),
            source=text_of(micros[-1].event.source),
            op="backward",
            cause="losses of an accumulation window are not divided by its number of micro-batches",
            fix=f"(loss / {len(micros)}).backward()",
        )


def _follows_batch_size(micros: Sequence[_Micro], counts: Sequence[float]) -> bool:
    """Only the number of samples differs, as it does for the last batch of an epoch."""
    sizes = [m.event.data.get("batch_size") or 0 for m in micros]
    if not all(sizes):
        return False
    per_sample = [count / size for count, size in zip(counts, sizes, strict=True)]
    return max(per_sample) < 1.01 * min(per_sample)


def _divisor(micro: _Micro) -> float | None:
    if micro.weight is not None and micro.weight.factor:
        return 1.0 / micro.weight.factor
    value = micro.event.data.get("divided_by")
    return float(value) if value else None


def _window_was_gathered(micros: Sequence[_Micro]) -> bool:
    """All batches were fetched before the first backward, into a list."""
    return micros[0].batches == len(micros)


def uneven_finding(reduction: str, counts: Sequence[float], ratio: float, event: LoopEvent | None = None) -> Finding:
    """L503 for micro-batches whose mean losses run over unequal numbers of elements."""
    low, high = min(counts), max(counts)
    what = (
        "cross_entropy with ignore_index or class weights"
        if reduction.startswith("NllLoss")
        else f"a mean ({reduction})"
    )
    if reduction.endswith("by count"):
        what = "a sum divided by its own count"
    return ACCUMULATION_SCALE.finding(
        f"the micro-batches of a window average over unequal counts ({low:.6g} to {high:.6g} tokens, elements or "
        f"weights; {what}), and their means are averaged: an element of the smallest counts {ratio:.1f} times as much "
        "as one of the largest. "
        "The gradient is not that of one large batch.",
        first_step=max(1, event.step - 1) if event is not None else 0,
        source=text_of(event.source) if event is not None else None,
        op="backward",
        cause="a mean of means over micro-batches of unequal counts",
        fix="sum the loss and divide by the window's total count; in a Trainer: return StepOutput(loss_sum, count)",
    )


class EvalBackward:
    """P209 for backwards in eval mode whose gradients a later training step uses: evaluation ran backward."""

    def __init__(self) -> None:
        self._eval: list[LoopEvent] = []
        self._train = False
        self._told = False

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "backward":
            if event.data.get("grad_mode_eval"):
                if not self._train:
                    self._eval.append(event)
            else:
                self._train = True
        elif kind == "zero_grad" and (event.data.get("params") or not event.data.get("set_to_none", True)):
            self._eval.clear()
            self._train = False
        elif kind == "optimizer_step":
            stale, self._eval = self._eval, []
            mixed, self._train = self._train and bool(stale), False
            if mixed and not self._told:
                self._told = True
                yield STALE_GRAD.finding(
                    f"the step uses gradients of {len(stale)} backwards that ran in eval mode before it: an "
                    "evaluation calls "
                    "backward, nothing clears its gradients, and the next training step adds them to its own. The "
                    "model trains "
                    "on its validation data.",
                    first_step=event.step,
                    source=text_of(stale[-1].source),
                    op="backward",
                    cause=f"{len(stale)} backwards in eval mode without a zero_grad before the next step",
                    fix="run the evaluation under torch.no_grad() and without backward",
                )


class UnclearedByHand:
    """P209 for steps that are written by hand: the next backward finds the gradients of the last step in place."""

    def __init__(self) -> None:
        self._hits = 0

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        names = event.data.get("uncleared")
        if names is None:
            return
        self._hits = self._hits + 1 if names else 0
        if self._hits == 2:
            yield STALE_GRAD.finding(
                f"{listed(names)} {'are' if len(names) > 1 else 'is'} updated by hand with gradients that nothing "
                "cleared: this backward adds to those of the step before, so each step repeats all steps before it.",
                source=text_of(event.source),
                params=list(names),
                cause="no gradient is set to None or zeroed between two steps",
                fix="after the update: `p.grad = None` (or `p.grad.zero_()`) for each parameter, or model.zero_grad()",
            )


_MOST_CLEARED = 512
"""Backwards that are remembered until a step."""
_NEVER_STEPPED = 8
"""Gradients that must have been cleared unused before it is said that a run never steps."""


class ClearedTooEarly:
    """P213: a backward whose gradients are cleared and a step that then finds none; or clearing inside a window.

    Or no step at all, by the end of the run, though there is an optimizer that clears.
    """

    def __init__(self) -> None:
        self._backwards: list[LoopEvent] = []
        self._cleared: list[tuple[LoopEvent, LoopEvent]] = []  # (zero_grad, the backward it undid)
        self._hits: dict[Any, int] = {}
        self._told: set[Any] = set()
        self._tried = False
        self._never_used = 0  # gradients that an optimizer cleared, while no step was seen

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "backward":
            self._backwards.append(event)
        elif kind == "zero_grad":
            if self._backwards and event.data.get("params"):
                self._cleared += [(event, b) for b in self._backwards]
                del self._cleared[:-_MOST_CLEARED]
                self._never_used += event.data.get("optimizer") is not None
            self._backwards = []
        elif kind == "scaler_step":
            self._tried = True  # a scaler that skips them all is another fault
        elif kind == "run_end" and not self._tried and event.step == 1 and self._never_used >= _NEVER_STEPPED:
            if not gradients_are_read():
                yield self._no_step(self._cleared[-1])
        elif kind == "optimizer_step":
            backwards, cleared = self._backwards, self._cleared
            self._backwards, self._cleared = [], []
            if cleared and not backwards and not event.data.get("filled"):
                yield from self._hit("step", event, cleared)
            elif cleared and self._in_window(cleared, backwards):
                yield from self._hit("window", event, cleared)

    def _no_step(self, last: tuple[LoopEvent, LoopEvent]) -> Finding:
        zero, backward = last
        named = named_only("step", near=backward.source)
        return DROPPED_GRAD.finding(
            f"no optimizer took a step: gradients were computed and cleared {self._never_used} times, and nothing was "
            "learned." + (f" `{named.text}` names the method and does not call it." if named is not None else ""),
            first_step=1,
            source=named or text_of(zero.source),
            op="step",
            cause="optimizer.step() is never called",
            fix="optimizer.step() after backward",
        )

    @staticmethod
    def _in_window(cleared: Sequence[tuple[LoopEvent, LoopEvent]], used: Sequence[LoopEvent]) -> bool:
        """All on one line and each divided by their number: a window was meant, and all but its last part is lost."""
        everything = [b for _, b in cleared] + list(used)
        lines = {place_of(b) for b in everything}
        divisors = [round(b.data.get("divided_by") or 0) for b in everything]
        return len(lines) == 1 and min(divisors) >= 2 and divisors[0] == len(everything)

    def _hit(self, how: str, step: LoopEvent, cleared: Sequence[tuple[LoopEvent, LoopEvent]]) -> Iterator[Finding]:
        zero = cleared[-1][0]
        place = (how, place_of(zero))
        self._hits[place] = self._hits.get(place, 0) + 1
        if self._hits[place] < 2 or place in self._told:
            return
        self._told.add(place)
        if how == "step":
            message = (
                "zero_grad runs between backward and optimizer.step(): the gradients are cleared before any step "
                "uses them, so "
                "nothing is learned."
            )
            cause, fix = (
                "zero_grad after backward and before the step",
                "call zero_grad before backward (or after the step)",
            )
        else:
            n = len({id(b) for _, b in cleared})
            message = (
                f"zero_grad runs inside the accumulation window: the gradients of {n} of {n + 1} micro-batches are "
                "cleared before "
                "the step, which uses the last one only."
            )
            cause, fix = "zero_grad in every micro-batch of a window", "call zero_grad once per step"
        first = max(1, step.step - 1)
        yield DROPPED_GRAD.finding(
            message, first_step=first, source=text_of(zero.source), op="zero_grad", cause=cause, fix=fix
        )
