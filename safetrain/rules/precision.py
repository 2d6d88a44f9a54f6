"""Family A: loss scaling, clipping and schedules in the wrong order or of no effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from safetrain.findings import Finding, SourceLine, rule
from safetrain.foreign.events import LoopEvent
from safetrain.graph import walk
from safetrain.source import with_text

CLIP_BEFORE_UNSCALE = rule("A301", "clip-before-unscale", "warning", "clipped while still scaled")
DOUBLE_UNSCALE = rule("A302", "double-unscale", "warning", "unscale_() was misused")
SCALER_WITHOUT_FP16 = rule("A303", "scaler-without-fp16", "warning", "loss scaling with bf16 or fp32")
SCALE_COLLAPSE = rule("A304", "scale-collapse", "warning", "the scaler keeps skipping and shrinking")
SCHEDULE_ON_SKIP = rule(
    "A305", "schedule-on-skip", "warning", "the scheduler moved on a skipped step, or before the optimizer"
)
CLIP_WITHOUT_EFFECT = rule("A306", "clip-without-effect", "warning", "clipping saw no gradients")
CLIP_PER_MICRO_BATCH = rule("A307", "clip-per-micro-batch", "warning", "clipping inside the accumulation window")


def find_precision_faults(events: Iterable[LoopEvent]) -> list[Finding]:
    """A301, A302, A305, A306 and A307 in a record of a loop, one finding a fault."""
    judges = precision_judges()
    return [finding for event in events for judge in judges for finding in judge.see(event)]


def precision_judges() -> list[Any]:
    """Fresh judges of this family: feed each event in order to `see(event)`, which yields findings."""
    return [ClipBeforeUnscale(), UnscaleMisuse(), ScheduleOrder(), ClipEffect(), ClipPerMicroBatch()]


class ClipBeforeUnscale:
    """A301: backward of a scaled loss, a clip, and the scaler's step, with no `unscale_` before the clip."""

    def __init__(self) -> None:
        self._scaled = False
        self._clip: LoopEvent | None = None

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, data = event.kind, event.data
        if kind == "backward":
            self._scaled = bool(data.get("scaled"))
            self._clip = None
        elif kind == "unscale" or kind == "optimizer_step":
            self._scaled = False
        elif kind == "clip" and self._scaled and data.get("num_grads"):
            self._clip = event
        elif kind == "scaler_step":
            clip, self._clip = self._clip, None
            self._scaled = False
            if clip is not None:
                yield CLIP_BEFORE_UNSCALE.finding(
                    f"{clip.data.get('function', 'clip_grad_norm_')} runs on gradients that still carry the loss "
                    "scale: they are "
                    "thousands of times too large, so clipping shrinks every one of them and training hardly moves. "
                    "Call scaler.unscale_(optimizer) first.",
                    first_step=clip.step,
                    source=_text(clip.source),
                    op=clip.data.get("function", "clip_grad_norm_"),
                    cause="no scaler.unscale_() between backward and clipping",
                    fix="scaler.unscale_(optimizer) before clip_grad_norm_(...)",
                )


class UnscaleMisuse:
    """A302: a second `unscale_` before `update`, or scaled gradients added to unscaled ones."""

    def __init__(self) -> None:
        self._unscaled: dict[Any, LoopEvent] = {}
        self._backward_after: dict[Any, LoopEvent] = {}

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, data = event.kind, event.data
        if kind == "unscale":
            key = (data.get("scaler"), data.get("optimizer"))
            first = self._unscaled.get(key)
            if first is not None:
                yield _double_unscale(first, event)
            self._unscaled[key] = event
        elif kind == "backward" and data.get("scaled"):
            for key in self._unscaled:
                self._backward_after.setdefault(key, event)
        elif kind == "zero_grad":
            self._backward_after.clear()
        elif kind == "scaler_step":
            key = (data.get("scaler"), data.get("optimizer"))
            late = self._backward_after.pop(key, None)
            first = self._unscaled.get(key)
            if late is not None and first is not None:
                yield DOUBLE_UNSCALE.finding(
                    "a backward of a scaled loss ran after unscale_(): its gradients, still scaled, were added to "
                    "unscaled ones, "
                    "and the step uses both as they are.",
                    first_step=event.step,
                    source=_text(first.source),
                    op="unscale_",
                    cause=f"unscale_() {_at(first.source)}, then backward {_at(late.source)}, then scaler.step()",
                    fix="call scaler.unscale_(optimizer) once, after the last backward of the window",
                )
        elif kind == "scaler_update":
            scaler = data.get("scaler")
            self._unscaled = {k: v for k, v in self._unscaled.items() if k[0] != scaler}
            self._backward_after = {k: v for k, v in self._backward_after.items() if k[0] != scaler}


def _double_unscale(first: LoopEvent, second: LoopEvent) -> Finding:
    return DOUBLE_UNSCALE.finding(
        "unscale_() was called twice for one optimizer with no scaler.update() in between: first "
        f"{_at(first.source)}, again "
        f"{_at(second.source)}. torch refuses the second call.",
        severity="error",
        first_step=second.step,
        source=_text(second.source),
        op="unscale_",
        cause="a second unscale_() before update()",
        fix="once per step: scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update()",
    )


class ScheduleOrder:
    """A305: a schedule that moves every step also moved when the scaler skipped, or moves before its optimizer does."""

    def __init__(self) -> None:
        self._skipped: dict[Any, int] = {}  # optimizer -> step it skipped, until something steps it
        self._steps: dict[Any, int] = {}
        self._moves: dict[Any, int] = {}
        self._moved_on_skip: dict[Any, list[LoopEvent]] = {}
        self._ahead: dict[Any, list[LoopEvent]] = {}
        self._last: dict[Any, str] = {}
        self._resumed = False
        self._told: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, opt = event.kind, event.data.get("optimizer")
        if kind in ("state_loaded", "checkpoint_loaded"):
            self._resumed = True
        elif kind == "optimizer_step":
            self._steps[opt] = self._steps.get(opt, 0) + 1
            self._last[opt] = kind
            self._skipped.pop(opt, None)
        elif kind == "scaler_step" and event.data.get("taken") is False:
            self._steps[opt] = self._steps.get(opt, 0) + 1
            self._skipped[opt] = event.step
            self._last[opt] = "optimizer_step"
        elif kind == "scheduler_step" and not str(event.data.get("scheduler", "")).startswith("ReduceLROnPlateau"):
            yield from self._moved(event, opt)

    def _moved(self, event: LoopEvent, opt: Any) -> Iterator[Finding]:
        self._moves[opt] = self._moves.get(opt, 0) + 1
        steps = self._steps.get(opt, 0)
        if opt in self._skipped:
            del self._skipped[opt]
            self._moved_on_skip.setdefault(opt, []).append(event)
        elif steps == 0 or (self._ahead.get(opt) and self._last.get(opt) == "optimizer_step"):
            ahead = self._ahead.setdefault(opt, [])
            if not ahead or _place(ahead[0]) == _place(
                event
            ):  # a single move before the loop skips a warm-up's rate of 0
                ahead.append(event)
        if steps == 0 and self._last.get(opt) == "scheduler_step":
            self._ahead[
                opt
            ] = []  # several moves before the first step: a schedule wound forward to where a run stopped
        self._last[opt] = "scheduler_step"
        on_skip, ahead = self._moved_on_skip.get(opt, []), self._ahead.get(opt, [])
        if len(on_skip) >= 1 and self._moves[opt] >= steps and steps >= 2 and (opt, "skip") not in self._told:
            self._told.add((opt, "skip"))
            yield _schedule_finding(on_skip[0], event, skipped=True)
        elif len(ahead) >= 2 and (self._moves[opt] > steps or not self._resumed) and (opt, "ahead") not in self._told:
            self._told.add((opt, "ahead"))
            yield _schedule_finding(ahead[0], event, skipped=False)


def _schedule_finding(first: LoopEvent, last: LoopEvent, *, skipped: bool) -> Finding:
    name = first.data.get("scheduler", "the scheduler")
    if skipped:
        return SCHEDULE_ON_SKIP.finding(
            f"{name}.step() ran although the scaler had skipped the optimizer's step: the schedule (lr_scheduler) "
            "runs ahead of "
            "the training, and a warm-up ends too early.",
            first_step=first.step,
            source=_text(last.source),
            op=f"{name}.step",
            cause="scheduler.step() on a skipped step",
            fix="old = scaler.get_scale(); ...; scaler.update(); if scaler.get_scale() >= old: scheduler.step()",
        )
    return SCHEDULE_ON_SKIP.finding(
        f"{name}.step() runs before optimizer.step(): the first learning rate of the schedule (lr_scheduler) is "
        "never used.",
        first_step=first.step,
        source=_text(last.source),
        op=f"{name}.step",
        cause="scheduler.step() before optimizer.step()",
        fix="call scheduler.step() after optimizer.step()",
    )


class ClipEffect:
    """A306: a clip that found no gradient, came before backward or after the step, or was given other parameters."""

    def __init__(self) -> None:
        self._fresh = False  # a backward came since the last zero_grad or step
        self._clips: list[tuple[LoopEvent, str]] = []
        self._told: set[Any] = set()
        self._counts: dict[Any, int] = {}
        self._useful: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "backward":
            self._fresh = True
        elif kind == "zero_grad":
            if event.data.get("params") or event.data.get("set_to_none") is False:
                self._fresh = False
        elif kind == "clip":
            if not event.data.get("num_grads"):
                self._clips.append((event, self._empty(event)))
            elif not self._fresh:
                self._clips.append((event, "after"))
            else:
                self._useful.add(_place(event))
        elif kind == "optimizer_step":
            yield from self._stepped_with(event)
            self._fresh = False

    def _empty(self, event: LoopEvent) -> str:
        if not event.data.get("params"):
            return "exhausted"
        return "other" if self._fresh else "before"

    def _stepped_with(self, event: LoopEvent) -> Iterator[Finding]:
        used = event.data.get("params")
        clips, self._clips = self._clips, []
        for clip, why in clips:
            place = _place(clip)
            if place in self._useful or place in self._told:
                continue
            self._counts[place] = self._counts.get(place, 0) + 1
            if self._counts[place] >= 2 and used:
                self._told.add(place)
                yield _clip_finding(clip, why)


_CLIP_CAUSES = {
    "exhausted": (
        "it was given no parameters at all: an iterator (a filter or generator) that the optimizer or an earlier "
        "call had used up",
        "make it a list: params = [p for p in model.parameters() if p.requires_grad]",
    ),
    "before": (
        "it runs before backward, when there are no gradients yet",
        "clip between backward and optimizer.step()",
    ),
    "after": (
        "it runs after the step, on gradients that were used already",
        "clip between backward and optimizer.step()",
    ),
    "other": (
        "none of the parameters that it was given has a gradient",
        "clip the parameters that the optimizer steps",
    ),
}


def _clip_finding(clip: LoopEvent, why: str) -> Finding:
    function = clip.data.get("function", "clip_grad_norm_")
    cause, fix = _CLIP_CAUSES[why]
    return CLIP_WITHOUT_EFFECT.finding(
        f"{function} clips nothing: {cause}. The norm that it returns says nothing about the gradients that are "
        "stepped.",
        first_step=max(1, clip.step - 1),
        source=_text(clip.source),
        op=function,
        cause=cause,
        fix=fix,
    )


class ClipPerMicroBatch:
    """A307: the same parameters are clipped more than once in a window, with a backward in between."""

    def __init__(self) -> None:
        self._window: list[LoopEvent] = []
        self._hits: dict[Any, int] = {}
        self._told: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        if event.kind in ("backward", "clip"):
            self._window.append(event)
        elif event.kind == "zero_grad":
            if event.data.get("params"):
                self._window.clear()
        elif event.kind == "optimizer_step":
            window, self._window = self._window, []
            yield from self._judge(window)

    def _judge(self, window: Sequence[LoopEvent]) -> Iterator[Finding]:
        clips = [(i, e) for i, e in enumerate(window) if e.kind == "clip" and e.data.get("num_grads")]
        if len(clips) < 2:
            return
        first, last = clips[0], clips[-1]
        same = _place(first[1]) == _place(last[1]) and set(first[1].data["params"]) & set(last[1].data["params"])
        between = any(e.kind == "backward" for e in window[first[0] : last[0]])
        if not same or not between:
            return
        place = _place(last[1])
        self._hits[place] = self._hits.get(place, 0) + 1
        if self._hits[place] >= 2 and place not in self._told:
            self._told.add(place)
            function = last[1].data.get("function", "clip_grad_norm_")
            yield CLIP_PER_MICRO_BATCH.finding(
                f"{function} runs {len(clips)} times in one accumulation window: gradients that were already clipped "
                "are added to "
                "and clipped again, so early micro-batches count less than late ones. Clip once, before "
                "optimizer.step().",
                first_step=max(1, last[1].step - 1),
                source=_text(last[1].source),
                op=function,
                cause="clipping after each backward instead of once per step",
                fix="move it under the condition that guards optimizer.step()",
            )


# ---------------------------------------------------------------------- A303, A304


def find_scaler_without_fp16(loss: Tensor, *, source: SourceLine | None = None, limit: int = 20_000) -> list[Finding]:
    """A303 for a scaled loss in whose graph no operation ran in float16: scaling then only adds skipped steps.

    Walks the graph (about a microsecond a node, no host sync). Silent for compiled graphs, which do not show their
    inside.
    """
    dtypes = graph_dtypes(loss, limit)
    if dtypes is None or "float16" in dtypes or not dtypes:
        return []
    kind = "bfloat16" if "bfloat16" in dtypes else "float32"
    return [
        SCALER_WITHOUT_FP16.finding(
            f"a GradScaler scales the loss of a {kind} model: {kind} has the exponent range of float32, so scaling "
            "gains nothing; "
            "the scale grows without limit and late steps are skipped when it overflows.",
            source=_text(source),
            op="scaler.scale",
            cause=f"GradScaler is enabled, the forward ran in {kind}",
            fix="GradScaler(enabled=dtype is torch.float16), or drop the scaler",
        )
    ]


def graph_dtypes(loss: Tensor, limit: int = 20_000) -> set[str] | None:
    """Names of the floating types that the nodes of a graph produced; None when part of it is hidden (compiled)."""
    found: set[str] = set()
    for node in walk([loss.grad_fn], limit).nodes:
        if "Compiled" in node.name():
            return None
        for meta in getattr(node, "_input_metadata", ()):
            dtype = getattr(meta, "dtype", None)
            if dtype is not None:
                name = str(dtype).removeprefix("torch.")
                found.add(name)
                if name == "float16":
                    return found
    return found


class SkipRecord:
    """A304 from which steps were taken: `add(step, taken, scale)`, which returns findings.

    The first skips after the start are how a scale is found. Collapse is: twelve skips in a row beyond what halving the
    first scale to 1 needs, a scale below 1, or more than half of the last sixty steps skipped after the first sixty.
    """

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=60)
        self._row = 0
        self._seen = 0
        self._told = False

    def add(self, step: int, taken: bool, scale: float | None = None) -> list[Finding]:
        """One step of the scaler; `scale` when it is known without a host sync."""
        self._seen += 1
        self._last.append(taken)
        self._row = 0 if taken else self._row + 1
        half = self._seen >= 120 and self._last.count(False) > 30
        if self._told or not (self._row >= 24 or (scale is not None and scale < 1.0 and not taken) or half):
            return []
        self._told = True
        skipped = self._last.count(False)
        shown = f", and the scale is down to {scale:g}" if scale is not None else ""
        return [
            SCALE_COLLAPSE.finding(
                f"the loss scale collapses: {skipped} of the last {len(self._last)} steps were skipped for Inf or "
                f"NaN gradients{shown}. "
                "Scaling is not the cause: the loss or its gradients are not finite by themselves.",
                first_step=max(1, step - self._row + 1),
                op="scaler.step",
                cause="gradients stay Inf or NaN whatever the scale",
                fix="find the operation that overflows in float16 (rules P206 and P211 name it) and run it in float32",
            )
        ]


def _place(event: LoopEvent) -> Any:
    return (event.source.file, event.source.line) if event.source is not None else event.data.get("function")


def _text(source: SourceLine | None) -> SourceLine | None:
    return with_text(source) if source is not None else None


def _at(source: SourceLine | None) -> str:
    return f"at line {source.line}" if source is not None else "(line unknown)"
