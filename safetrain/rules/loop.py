"""Family L: the loop's own order and bookkeeping. Judged from what a loop was seen to do, and from modules and loaders."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from safetrain.events import LoopEvent
from safetrain.findings import Finding, SourceLine, rule
from safetrain.rules.gradient import DROPPED_GRAD, STALE_GRAD
from safetrain.source import USER, grade, with_text

MODE_NOT_RESTORED = rule("L501", "mode-not-restored", "warning", "train/eval mode differs after an evaluation")
BATCHNORM_BATCH = rule("L502", "batchnorm-batch", "warning", "batch statistics over one sample, or accumulation with BatchNorm")
ACCUMULATION_SCALE = rule("L503", "accumulation-scale", "warning", "several backwards before a step, not normalised")
SHORT_WINDOW = rule("L504", "short-window", "warning", "leftover micro-batches dropped or wrongly weighted")
CHECKPOINT_INPUT = rule("L506", "checkpoint-no-grad-input", "warning", "a reentrant checkpoint whose inputs need no gradient")
RECOMPILES = rule("L508", "recompiles", "warning", "torch.compile keeps recompiling or falls back")
SAME_ORDER = rule("L509", "same-order", "warning", "every epoch replays one order")
RESUME_INCOMPLETE = rule("L510", "resume-incomplete", "warning", "a resumed run misses part of its state")
RECOMPUTE_BUFFERS = rule("L511", "recompute-updates-buffers", "warning", "checkpointing runs BatchNorm's update twice")
TRAIN_IN_EVAL = rule("L512", "train-mode-in-eval", "warning", "evaluation runs with dropout or BatchNorm in train mode")
FROZEN_BUT_MOVING = rule("L513", "frozen-but-moving", "warning", "a frozen module still changes its buffers")
ALIASED_SNAPSHOT = rule("L514", "aliased-snapshot", "warning", "a kept state_dict shares memory with the live model")
CONTEXT_LEAK = rule("L515", "context-leak", "warning", "a hook or callback left grad mode, autocast, modes or freezing changed")


def find_loop_faults(events: Iterable[LoopEvent]) -> list[Finding]:
    """L501, L503, L504, L509, L510, L512, P209 and P213 in a record of a loop, one finding a fault."""
    judges = loop_judges()
    return [finding for event in events for judge in judges for finding in judge.see(event)]


def loop_judges() -> list[Any]:
    """Fresh judges of a foreign loop: feed each event in order to `see(event)`, which yields findings."""
    return [ModeLeft(), Windows(), EvalBackward(), ClearedTooEarly(), SameOrder(), ResumeGaps(), TrainModeInEval()]


def _text(source: SourceLine | None) -> SourceLine | None:
    return with_text(source) if source is not None else None


def _place(event: LoopEvent) -> Any:
    return (event.source.file, event.source.line) if event.source is not None else None


def _at(source: SourceLine | None) -> str:
    return f"line {source.line}" if source is not None else "an unknown line"


# ---------------------------------------------------------------------- how a loss weighs its elements


@dataclass(slots=True)
class LossWeight:
    """How one micro-batch's loss weighs what it averages over: `factor` times a mean (or sum) over `count` elements.

    `factor` is the product of the plain numbers on the way (1/4 for `loss / 4`). `count` is None for a sum.
    """

    factor: float
    count: float | None
    reduction: str
    """Name of the operation that averages or sums."""

    @property
    def per_element(self) -> float:
        """Weight of a single element in the gradient."""
        return self.factor / self.count if self.count else self.factor


def loss_weight(
    loss: Tensor, *, scaled: bool = False, may_sync: bool = True, limit: int = 64
) -> LossWeight | None:
    """Read from a loss's graph how it weighs its elements; None when its shape is not understood.

    `scaled`: the outermost factor is a loss scale and does not count. Reads numbers that live on the CPU; counts kept on
    an accelerator (`ignore_index`, masked means) cost a host sync: without `may_sync` such a loss is not understood.
    """
    node, factor = loss.grad_fn, 1.0
    for depth in range(limit):
        if node is None:
            return None
        name = node.name()
        reduction = _reduction(node, name, may_sync)
        if reduction is not None:
            return LossWeight(factor, reduction[1], reduction[0])
        following = [n for n, _ in node.next_functions]
        if name.startswith(("MulBackward", "DivBackward")):
            if not (scaled and depth == 0 and name.startswith("Mul")):
                number = _scalar(node, may_sync)
                if number is None:
                    return None
                factor = factor * number if name.startswith("Mul") else factor / number
            node = following[0] if following[0] is not None else following[-1]
        elif name.startswith(("AddBackward", "SubBackward")):
            node = next((n for n in following if n is not None), None)
        elif name.startswith(("NegBackward", "ToCopyBackward", "SqueezeBackward", "ViewBackward", "CloneBackward")):
            node = following[0]
        else:
            return None
    return None


def _reduction(node: Any, name: str, may_sync: bool) -> tuple[str, float | None] | None:
    """(name, elements averaged over or None for a sum) when this node reduces many elements to one."""
    short = name.split("Backward", 1)[0]
    try:
        if short in ("NllLoss", "NllLoss2D"):
            if node._saved_reduction == 2:
                return short, None
            total = node._saved_total_weight
            readable = node._saved_reduction == 1 and (may_sync or total.is_cpu)
            return (short, float(total.tolist())) if readable else None
        if hasattr(node, "_saved_reduction"):
            if node._saved_reduction == 2:
                return short, None
            return (short, float(node._saved_self.numel())) if node._saved_reduction == 1 else None
        if short == "Mean" and hasattr(node, "_saved_self_sym_numel"):
            return short, float(node._saved_self_sym_numel)
        if short == "Sum" and hasattr(node, "_saved_self_sym_sizes"):
            return short, None
    except (RuntimeError, AttributeError, TypeError):
        return None
    return None


def _scalar(node: Any, may_sync: bool) -> float | None:
    try:
        other = node._saved_other
    except (RuntimeError, AttributeError):
        return None
    if isinstance(other, (int, float)):
        return float(other) or None
    if isinstance(other, Tensor) and other.ndim == 0 and not other.requires_grad and (may_sync or other.is_cpu):
        return float(other.tolist()) or None
    return None


# ---------------------------------------------------------------------- L503, L504


@dataclass(slots=True)
class _Micro:
    """One backward of a window."""

    event: LoopEvent
    weight: LossWeight | None
    batches: int
    """Batches that loaders had given since the window began."""


class Windows:
    """L503 and L504: how the backwards between two steps weigh, and what becomes of those left over at an epoch's end."""

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
        if len({_place(m.event) for m in micros}) != 1:
            return
        self._told.add("dropped")
        yield SHORT_WINDOW.finding(
            f"the last {crossed} micro-batches of the epoch never reach the optimizer: the window (accumulation over "
            f"{self.usual}) was not full, no step followed, and zero_grad dropped their gradients.",
            first_step=event.step,
            source=_text(event.source),
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
        alike = len({_place(m.event) for m in micros}) == 1
        if alike:
            self._sizes[len(micros)] += 1
        if len(micros) < 2 and usual < 2 or not alike:
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
            f"a step uses {len(micros)} micro-batches instead of {usual}: the {crossed} left over at the end of an epoch were kept "
            "and added to the first window of the next.",
            first_step=event.step,
            source=_text(micros[-1].event.source),
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
            f"a window of {len(micros)} micro-batches is divided by {usual}: its step gets {len(micros)}/{usual} of the right gradient.",
            first_step=event.step,
            source=_text(micros[-1].event.source),
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
        if max(per_element) < 1.25 * min(per_element):
            return
        place = _place(micros[-1].event)
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
        if not any(n == len(micros) for n in batches.values()):
            return
        if micros[0].batches == micros[-1].batches and len(micros) > 1 and not _window_was_gathered(micros):
            return
        place = _place(micros[-1].event)
        self._unnormalised[place] = self._unnormalised.get(place, 0) + 1
        if self._unnormalised[place] < 2:
            return
        self._told.add("scale")
        yield ACCUMULATION_SCALE.finding(
            f"{len(micros)} backwards add up before each step and each loss is a full mean, so the gradient is {len(micros)} times "
            "that of one large batch: learning rate, clipping and weight decay no longer mean what they say.",
            first_step=max(1, event.step - 1),
            source=_text(micros[-1].event.source),
            op="backward",
            cause="losses of an accumulation window are not divided by its number of micro-batches",
            fix=f"(loss / {len(micros)}).backward()",
        )


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
    what = "cross_entropy with ignore_index" if reduction.startswith("NllLoss") else f"a mean ({reduction})"
    return ACCUMULATION_SCALE.finding(
        f"the micro-batches of a window average over unequal counts ({low:g} to {high:g} tokens or elements; {what}), and their "
        f"means are averaged: an element of the smallest counts {ratio:.1f} times as much as one of the largest. "
        "The gradient is not that of one large batch.",
        first_step=max(1, event.step - 1) if event is not None else 0,
        source=_text(event.source) if event is not None else None,
        op="backward",
        cause="a mean of means over micro-batches of unequal token counts",
        fix="sum the loss (reduction='sum') and divide by the window's total count; in a Trainer return StepOutput(loss_sum, count)",
    )


# ---------------------------------------------------------------------- P209, P213


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
                    f"the step uses gradients of {len(stale)} backwards that ran in eval mode before it: an evaluation calls "
                    "backward, nothing clears its gradients, and the next training step adds them to its own. The model trains "
                    "on its validation data.",
                    first_step=event.step,
                    source=_text(stale[-1].source),
                    op="backward",
                    cause=f"{len(stale)} backwards in eval mode without a zero_grad before the next step",
                    fix="run the evaluation under torch.no_grad() and without backward",
                )


class ClearedTooEarly:
    """P213: a backward whose gradients are cleared and a step that then finds none; or clearing inside a window."""

    def __init__(self) -> None:
        self._backwards: list[LoopEvent] = []
        self._cleared: list[tuple[LoopEvent, LoopEvent]] = []  # (zero_grad, the backward it undid)
        self._hits: dict[Any, int] = {}
        self._told: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "backward":
            self._backwards.append(event)
        elif kind == "zero_grad":
            if self._backwards and event.data.get("params"):
                self._cleared += [(event, b) for b in self._backwards]
            self._backwards = []
        elif kind == "optimizer_step":
            backwards, cleared = self._backwards, self._cleared
            self._backwards, self._cleared = [], []
            if cleared and not backwards:
                yield from self._hit("step", event, cleared)
            elif cleared and self._in_window(cleared, backwards):
                yield from self._hit("window", event, cleared)

    @staticmethod
    def _in_window(cleared: Sequence[tuple[LoopEvent, LoopEvent]], used: Sequence[LoopEvent]) -> bool:
        """All on one line and each divided by their number: a window was meant, and all but its last part is lost."""
        everything = [b for _, b in cleared] + list(used)
        lines = {_place(b) for b in everything}
        divisors = [b.data.get("divided_by") for b in everything]
        return len(lines) == 1 and all(d and round(d) >= 2 for d in divisors) and round(divisors[0]) == len(everything)

    def _hit(self, how: str, step: LoopEvent, cleared: Sequence[tuple[LoopEvent, LoopEvent]]) -> Iterator[Finding]:
        zero = cleared[-1][0]
        place = (how, _place(zero))
        self._hits[place] = self._hits.get(place, 0) + 1
        if self._hits[place] < 2 or place in self._told:
            return
        self._told.add(place)
        if how == "step":
            message = (
                "zero_grad runs between backward and optimizer.step(): the gradients are cleared before any step uses them, so "
                "nothing is learned."
            )
            cause, fix = "zero_grad after backward and before the step", "call zero_grad before backward (or after the step)"
        else:
            n = len({id(b) for _, b in cleared})
            message = (
                f"zero_grad runs inside the accumulation window: the gradients of {n} of {n + 1} micro-batches are cleared before "
                "the step, which uses the last one only."
            )
            cause, fix = "zero_grad in every micro-batch of a window", "call zero_grad once per step"
        yield DROPPED_GRAD.finding(
            message, first_step=max(1, step.step - 1), source=_text(zero.source), op="zero_grad", cause=cause, fix=fix,
        )  # fmt: skip


# ---------------------------------------------------------------------- L501, L512


class ModeLeft:
    """L501: a model that trained in train mode was put into eval mode, stayed there, and training went on."""

    def __init__(self) -> None:
        self._train_seen = False
        self._train_called: set[Any] = set()
        self._eval_call: LoopEvent | None = None
        self._in_eval = False
        self._hits = 0
        self._first = 0
        self._told = False

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, data = event.kind, event.data
        if kind == "train_mode":
            self._train_called.add(data.get("module_id"))  # before its first forward nobody knows that it is a model
            if data.get("root"):
                self._train_seen, self._eval_call, self._in_eval = True, None, False
        elif kind == "eval_mode" and data.get("root"):
            self._eval_call = event
            self._train_seen |= data.get("module_id") in self._train_called
        elif kind == "backward":
            self._in_eval = bool(data.get("grad_mode_eval"))
        elif kind == "optimizer_step":
            if not self._in_eval:
                self._train_seen = True
            elif self._train_seen and self._eval_call is not None:
                self._first = self._first or event.step
                self._hits += 1
                if self._hits == 2 and not self._told:
                    self._told = True
                    yield mode_finding(self._eval_call.data.get("module", "the model"), self._eval_call.source, self._first)


def mode_finding(module: str, source: SourceLine | None, first_step: int = 0, layers: str = "Dropout and BatchNorm") -> Finding:
    """L501: training goes on in eval mode."""
    source = _text(source)
    text = f" (`{source.text}`)" if source is not None and source.text else ""
    return MODE_NOT_RESTORED.finding(
        f"training goes on in eval mode: {module}.eval() was called at {_at(source)}{text} and nothing switched back. {layers} "
        "have no effect on these steps (`training` is False).",
        first_step=first_step,
        source=source,
        module=module,
        op="eval",
        cause="eval() without train() afterwards",
        fix="was = model.training; model.eval(); ...; model.train(was)",
    )


def mode_dependent(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers whose result depends on train or eval mode: dropout with p > 0, BatchNorm, RNNs with dropout."""
    return [
        (name, m)
        for name, m in model.named_modules()
        if (isinstance(m, _DropoutNd) and m.p > 0)
        or isinstance(m, _BatchNorm)
        or (isinstance(m, nn.RNNBase) and m.dropout > 0)
        or (isinstance(m, nn.MultiheadAttention) and m.dropout > 0)
    ]


def find_changed_modes(model: nn.Module, before: Mapping[int, bool], *, where: str = "the evaluation") -> list[Finding]:
    """L501 for submodules whose `training` differs from `before` (`{id(m): m.training for m in model.modules()}`)."""
    changed = [(n, m) for n, m in model.named_modules() if before.get(id(m), m.training) != m.training]
    if not changed:
        return []
    names = [name or type(m).__name__ for name, m in changed]
    now = "train" if changed[0][1].training else "eval"
    return [
        MODE_NOT_RESTORED.finding(
            f"after {where}, {len(changed)} modules are in {now} mode that were not before: {', '.join(f'`{n}`' for n in names[:4])}.",
            module=names[0],
            cause=f"{where} changed train/eval mode and did not restore it",
            fix="restore each submodule's `training` flag afterwards",
        )
    ]


class TrainModeInEval:
    """L512: a whole pass over a loader that never fed training, without backward, with the model in train mode."""

    def __init__(self) -> None:
        self._trained: set[Any] = set()
        self._any_backward = False
        self._told = False

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        if event.kind != "epoch_end":
            return
        data = event.data
        if data.get("backwards"):
            self._any_backward = True
            self._trained.add(data.get("loader"))
            return
        active = data.get("active") or ()
        if (
            self._told or not self._any_backward or not data.get("forwards") or not data.get("root_training")
            or not active or data.get("loader") in self._trained
        ):  # fmt: skip
            return
        self._told = True
        yield train_in_eval_finding([name for name, _ in active], [kind for _, kind in active], event)


def train_in_eval_finding(names: Sequence[str], kinds: Sequence[str], event: LoopEvent | None = None) -> Finding:
    """L512 for these layers, which ran in train mode during an evaluation."""
    norms = any("BatchNorm" in k for k in kinds)
    harm = "BatchNorm normalises by the batch and takes validation data into its running statistics" if norms else "dropout is active"
    return TRAIN_IN_EVAL.finding(
        f"the evaluation runs in train mode: {', '.join(f'`{n}` ({k})' for n, k in list(zip(names, kinds, strict=True))[:4])}; {harm}.",
        first_step=event.step if event is not None else 0,
        phase="eval",
        source=_text(event.source) if event is not None else None,
        module=names[0] if names else None,
        cause="model.eval() was not called before the evaluation",
        fix="model.eval() before it, model.train() after it",
    )


def find_train_mode_in_eval(model: nn.Module) -> list[Finding]:
    """L512 for a model about to be evaluated: call it right before (or in) a forward of the evaluation.

    A model whose root is in eval mode with only dropout switched on is Monte Carlo dropout and is left alone.
    """
    active = [(n, m) for n, m in mode_dependent(model) if m.training]
    norms = [(n, m) for n, m in active if isinstance(m, _BatchNorm)]
    if not active or (not model.training and not norms):
        return []
    chosen = active if model.training else norms
    return [train_in_eval_finding([n for n, _ in chosen], [type(m).__name__ for _, m in chosen])]


# ---------------------------------------------------------------------- L502, L511, L513


def find_batchnorm_batch(model: nn.Module, *, micro_batch: int, micro_batches: int, smallest: int = 16) -> list[Finding]:
    """L502 for BatchNorm in train mode under accumulation over small micro-batches, or over single samples.

    A warning with fewer than `smallest` samples a micro-batch, a note above: statistics of 16 and more are usable.
    """
    norms = [
        (n, m) for n, m in model.named_modules()
        if isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) and m.training
    ]  # fmt: skip
    single = micro_batch == 1
    if not norms or (micro_batches < 2 and not single):
        return []
    names = [n or type(m).__name__ for n, m in norms]
    listed = ", ".join(f"`{n}` ({type(m).__name__})" for n, (_, m) in zip(names[:4], norms, strict=False))
    if single:
        message = f"{listed} takes batch statistics over a single sample, so training and evaluation see different functions."
        cause = "one sample per micro-batch in train mode"
    else:
        message = (
            f"{micro_batches} micro-batches of {micro_batch} are not a batch of {micro_batch * micro_batches} for {listed}: "
            f"its statistics are those of {micro_batch} samples, and its running ones move {micro_batches} times a step."
        )
        cause = f"accumulation over {micro_batches} micro-batches of {micro_batch} samples with BatchNorm in train mode"
    return [
        BATCHNORM_BATCH.finding(
            message,
            severity="warning" if single or micro_batch < smallest else "note",
            module=names[0],
            cause=cause,
            fix="nn.GroupNorm instead of BatchNorm, larger micro-batches, or BatchNorm in eval mode",
        )
    ]


def recompute_finding(names: Sequence[str], kinds: Sequence[str], source: SourceLine | None) -> Finding:
    """L511 for layers whose running statistics moved during backward."""
    at = f" by the checkpoint at {_at(source)}" if source is not None else ""
    return RECOMPUTE_BUFFERS.finding(
        f"{', '.join(f'`{n}` ({k})' for n, k in list(zip(names, kinds, strict=True))[:4])} updates running_mean and running_var a second time while backward "
        f"recomputes it{at}: each batch counts twice, so evaluation differs from the same model without checkpointing.",
        source=_text(source),
        module=names[0],
        op="checkpoint",
        cause="activation checkpointing recomputes a BatchNorm in train mode",
        fix="leave BatchNorm out of the checkpointed part, or use safetrain's activation_checkpoint, which holds its statistics",
    )


@dataclass(slots=True)
class BufferMarks:
    """Versions of BatchNorm statistics and of the parameters of frozen modules at one moment. No tensor is kept."""

    norms: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)


def mark_buffers(norms: Sequence[tuple[str, nn.Module]], model: nn.Module) -> BufferMarks:
    """Where the statistics of BatchNorm layers in train mode stand, and the frozen modules around them. No host sync."""
    marks = BufferMarks()
    for name, norm in norms:
        tracked = norm.num_batches_tracked  # the statistics are written below autograd, which counts no version there
        if not norm.training or not isinstance(tracked, Tensor):
            continue
        marks.norms[name] = tracked._version
        top = _frozen_around(model, name)
        if top is not None:
            marks.frozen[name] = tuple(p._version for p in _module(model, top).parameters())
    return marks


def find_frozen_but_moving(model: nn.Module, norms: Sequence[tuple[str, nn.Module]], before: BufferMarks) -> list[Finding]:
    """L513 from two marks a step apart: statistics that moved inside a module that is frozen and did not change itself.

    Target networks (their parameters are moved by hand) and modules that are thawed in between are not frozen.
    """
    by_top: dict[str, list[str]] = defaultdict(list)
    for name, norm in norms:
        versions = before.frozen.get(name)
        top = _frozen_around(model, name)
        if versions is None or top is None or not norm.training or not isinstance(norm.num_batches_tracked, Tensor):
            continue
        if norm.num_batches_tracked._version == before.norms.get(name):
            continue
        if tuple(p._version for p in _module(model, top).parameters()) == versions:
            by_top[top].append(name)
    return [
        FROZEN_BUT_MOVING.finding(
            f"`{top or type(model).__name__}` is frozen, but its running statistics still change ({', '.join(f'`{n}`' for n in names[:4])}): it is in "
            "train mode, so BatchNorm follows the batches and its outputs drift.",
            module=top or None,
            params=[f"{n}.running_mean" for n in names],
            cause="all parameters are frozen, BatchNorm is in train mode",
            fix=f"model.{top}.eval() after each model.train()",
        )
        for top, names in by_top.items()
    ]


def _frozen_around(model: nn.Module, name: str) -> str | None:
    """The outermost module around `name` whose parameters (at least one) are all frozen; None when there is none."""
    parts = name.split(".")
    for i in range(len(parts) + 1):
        top = ".".join(parts[:i])
        params = list(_module(model, top).parameters())
        if params and not any(p.requires_grad for p in params):
            return top
    return None


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name) if name else model


# ---------------------------------------------------------------------- L506


def reentrant_finding(names: Sequence[str], source: SourceLine | None) -> Finding:
    """L506 for parameters inside a reentrant checkpoint none of whose inputs needs a gradient."""
    listed = ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return CHECKPOINT_INPUT.finding(
        f"{listed} got no gradient: it runs inside a reentrant checkpoint whose inputs need no gradient (frozen embeddings, "
        "plain data), and such a checkpoint gives none to what is inside.",
        source=_text(source),
        params=list(names),
        op="checkpoint",
        cause="reentrant checkpoint without an input that requires grad",
        fix="checkpoint(..., use_reentrant=False)",
    )


# ---------------------------------------------------------------------- L508


@dataclass(slots=True)
class CompileCounts:
    """What torch.compile has done so far."""

    compiled: dict[tuple[str, int, str], int] = field(default_factory=dict)
    """How often each code object was compiled: (file, first line, name)."""
    reasons: dict[tuple[str, int, str], str] = field(default_factory=dict)
    breaks: list[tuple[str, SourceLine | None]] = field(default_factory=list)
    limit_hit: bool = False

    def since(self, before: CompileCounts) -> CompileCounts:
        """What came after `before` was read: the counters are the process's, which may have run other models."""
        compiled = {key: times - before.compiled.get(key, 0) for key, times in self.compiled.items()}
        return CompileCounts(
            compiled={key: times for key, times in compiled.items() if times > 0},
            reasons=self.reasons,
            breaks=self.breaks[len(before.breaks) :],
            limit_hit=self.limit_hit and not before.limit_hit,
        )


def read_compile_counts() -> CompileCounts | None:
    """Read dynamo's own counters; None when nothing was compiled. No import, no host sync."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not utils.counters["frames"].get("total"):
        return None
    counts = CompileCounts()
    for metric in utils.get_compilation_metrics():
        key = (metric.co_filename, metric.co_firstlineno, metric.co_name)
        if key[0] is None or "torch_dynamo_resume" in str(key[2]):
            continue
        counts.compiled[key] = counts.compiled.get(key, 0) + 1
        if getattr(metric, "recompile_reason", None):
            counts.reasons[key] = str(metric.recompile_reason)
    for reason in utils.graph_break_reasons:
        line = next(
            (SourceLine(f.filename, f.lineno or 0, f.line or "") for f in reversed(reason.user_stack) if grade(f.filename) == USER),
            None,
        )
        if line is not None:
            counts.breaks.append((reason.reason, line))
    counts.limit_hit = any("recompile_limit" in str(k) or "cache_size_limit" in str(k) for k in utils.counters["unimplemented"])
    return counts


_SYNCS = ("item", "tolist", "numpy", "data-dependent", "data dependent", "scalar", "_local_scalar_dense", "bool")


def find_compile_trouble(counts: CompileCounts, *, recompiles: int = 5) -> list[Finding]:
    """L508: graph breaks in the user's code (a warning where a number is read from a tensor, a note otherwise), and code
    objects that were compiled more than `recompiles` times, or given up.
    """
    findings = []
    for reason, source in {(r, s): None for r, s in counts.breaks}:
        short = reason.strip().splitlines()[0][:160]
        sync = any(word in reason for word in _SYNCS)
        findings.append(
            RECOMPILES.finding(
                f"graph break at {_at(source)}: {short}. The compiled graph ends here and starts again after it, in every call"
                + (", and the device waits for the number." if sync else "."),
                severity="warning" if sync else "note",
                source=_text(source),
                op="item" if "item" in reason else None,
                cause=f"graph break: {short}",
                fix="return the tensor (x.detach()) and read it outside the compiled code" if sync else "move it out of the compiled code",
            )
        )
    for (file, line, name), times in counts.compiled.items():
        if times <= recompiles and not counts.limit_hit:
            continue
        if times < 3:
            continue
        reason = counts.reasons.get((file, line, name), "")
        findings.append(
            RECOMPILES.finding(
                f"`{name}` was compiled {times} times"
                + (" and is now run uncompiled" if counts.limit_hit else "")
                + (f"; last reason: {reason.strip().splitlines()[-1][:160]}" if reason.strip() else "")
                + ". Each time costs seconds.",
                source=_text(SourceLine(file, line)) if grade(file) == USER else None,
                op=name,
                cause=reason.strip()[:300] or "guards fail from call to call",
                fix="torch.compile(dynamic=True), pad to fixed shapes, or keep changing Python values out of the compiled code",
            )
        )
    return findings


# ---------------------------------------------------------------------- L509


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
            f"each epoch replays the same order: {sampler} ({place}) gave the same batches {needed} epochs in a row, as {cause}.",
            first_step=last[-1].step,
            source=_text(last[-1].source),
            op="set_epoch" if knows else None,
            holder=sampler,
            cause=cause,
            fix=fix,
        )


# ---------------------------------------------------------------------- L510


class ResumeGaps:
    """L510: after a checkpoint's model and optimizer were loaded, other state of the run starts afresh."""

    def __init__(self) -> None:
        self._saved: LoopEvent | None = None
        self._loaded: LoopEvent | None = None
        self._restored: set[str] = set()
        self._present: dict[str, LoopEvent] = {}
        self._positions: dict[str, Any] = {}
        self._steps = 0
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, data = event.kind, event.data
        if kind == "checkpoint_saved":
            self._saved = event
        elif kind == "checkpoint_loaded":
            self._loaded, self._steps = event, 0
            self._restored, self._present, self._positions = set(), {}, {}
        elif self._loaded is None:
            return
        elif kind == "state_loaded":
            self._restored.add(data.get("target", ""))
        elif kind == "rng_restored":
            self._restored.add("rng")
        elif kind == "scheduler_step":
            if "scheduler" not in self._present:
                self._positions["scheduler"] = data.get("position")
            self._present.setdefault("scheduler", event)
        elif kind == "scaler_step":
            self._present.setdefault("scaler", event)
        elif kind == "optimizer_step":
            self._steps += 1
        if self._steps and self._loaded is not None:
            yield from self._judge()

    def _judge(self) -> Iterator[Finding]:
        if "model" not in self._restored or not self._restored & {"optimizer", "scheduler", "scaler", "rng"}:
            return  # weights to start from, not a run to go on with
        assert self._loaded is not None
        parts = set(self._loaded.data.get("parts") or ())
        for part, event in self._present.items():
            if part in self._restored or part in self._told or (part == "scheduler" and self._positions.get(part)):
                continue
            self._told.add(part)
            yield resume_finding(part, self._loaded, self._saved, name=event.data.get("scheduler"), in_file=part in parts)
        if "optimizer" not in self._restored and "optimizer" not in self._told:
            self._told.add("optimizer")
            yield resume_finding("optimizer", self._loaded, self._saved, in_file="optimizer" in parts)
        if "rng" in parts and "rng" not in self._restored and "rng" not in self._told:
            self._told.add("rng")
            yield resume_finding("rng", self._loaded, self._saved, in_file=True)


_RESUME = {
    "scheduler": ("the schedule ({name}, last_epoch 0) starts again from its first learning rate", "scheduler.load_state_dict(ckpt['scheduler'])"),
    "scaler": ("the GradScaler starts again from its first scale, which costs a run of skipped steps", "scaler.load_state_dict(ckpt['scaler'])"),
    "optimizer": ("the optimizer starts without its momentum and step counts", "optimizer.load_state_dict(ckpt['optimizer'])"),
    "rng": ("the random number generators (rng) go on from wherever they are: dropout, noise and shuffling differ from an uninterrupted run",
            "torch.set_rng_state(ckpt['rng'])"),
}  # fmt: skip


def resume_finding(
    part: str, loaded: LoopEvent, saved: LoopEvent | None, *, name: str | None = None, in_file: bool
) -> Finding:
    """L510 for one part of a run's state."""
    harm, fix = _RESUME[part]
    harm = harm.format(name=name or "lr_scheduler")
    where = "it is in the checkpoint but was not loaded" if in_file else "the checkpoint does not hold it"
    missing_in_save = not in_file and saved is not None and saved.source is not None
    source = saved.source if missing_in_save and saved is not None else loaded.source
    return RESUME_INCOMPLETE.finding(
        f"the resumed run misses its {part}: {where}. So {harm}.",
        source=_text(source),
        op="torch.save" if missing_in_save else "torch.load",
        cause=f"{part} state not restored: {where}",
        fix=fix if in_file else f"save its state_dict() too, and {fix}",
    )


# ---------------------------------------------------------------------- L514


def find_aliased_snapshots(model: nn.Module, holders: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Kept dicts of tensors that share memory with the model's own, as path → id, looking two levels into `holders`.

    A dict that is found again after the model has trained is a fault (see `aliased_finding`): what was kept as the best
    weights are the current ones. No host sync.
    """
    live = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta" and t.numel()}
    found: dict[str, int] = {}
    for path, holder in holders:
        _search_aliases(path, holder, live, found, 2)
    return found


def _search_aliases(path: str, value: Any, live: set[int], found: dict[str, int], depth: int) -> None:
    if issubclass(type(value), dict):
        tensors = [t for t in list(value.values())[:8] if type(t) is Tensor]
        if tensors and all(_shares(t, live) for t in tensors):
            found[path] = id(value)
        elif depth and len(value) <= 64:
            for key, item in list(value.items()):
                _search_aliases(f"{path}[{key!r}]", item, live, found, depth - 1)
    elif depth and type(value) in (list, tuple):
        for i, item in enumerate(value[:16]):
            _search_aliases(f"{path}[{i}]", item, live, found, depth - 1)
    elif depth and hasattr(value, "__dict__") and not issubclass(type(value), (nn.Module, type)):
        for key, item in list(vars(value).items())[:64]:
            _search_aliases(f"{path}.{key}", item, live, found, depth - 1)


def _shares(tensor: Tensor, live: set[int]) -> bool:
    try:
        return not tensor.requires_grad and tensor.untyped_storage().data_ptr() in live
    except (RuntimeError, NotImplementedError):
        return False


def aliased_finding(path: str, source: SourceLine | None = None) -> Finding:
    """L514 for a kept snapshot at `path`."""
    return ALIASED_SNAPSHOT.finding(
        f"`{path}` was kept as a snapshot of the model, but its tensors are the live ones: state_dict() does not copy, so it "
        "changes with every step and restores nothing.",
        source=_text(source),
        holder=path,
        cause="state_dict() kept without a copy",
        fix="best = copy.deepcopy(model.state_dict())",
    )


