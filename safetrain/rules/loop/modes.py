"""L501 and L512: train and eval mode where the other belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from safetrain.findings import Finding, SourceLine
from safetrain.foreign.events import LoopEvent
from safetrain.rules.loop.catalogue import (
    MODE_NOT_RESTORED,
    TRAIN_IN_EVAL,
    line_of,
    text_of,
)


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
                    yield mode_finding(
                        self._eval_call.data.get("module", "the model"), self._eval_call.source, self._first
                    )


def mode_finding(
    module: str, source: SourceLine | None, first_step: int = 0, layers: str = "Dropout and BatchNorm"
) -> Finding:
    """L501: training goes on in eval mode."""
    source = text_of(source)
    text = f" (`{source.text}`)" if source is not None and source.text else ""
    where = f": {module}.eval() was called at {line_of(source)}{text} and nothing switched back" if source else ""
    return MODE_NOT_RESTORED.finding(
        f"training goes on in eval mode{where}. {layers} have no effect on these steps (`training` is False).",
        first_step=first_step,
        source=source,
        module=module,
        op="eval",
        cause="eval() without train() afterwards",
        fix="was = model.training; model.eval(); ...; model.train(was)",
    )


def part_finding(
    part: str, kinds: Sequence[str], source: SourceLine | None, first_step: int, *, seen_in: int
) -> Finding:
    """L501: one part of a model is in eval mode, and trains on, since an evaluation put it there."""
    source = text_of(source)
    text = f" (`{source.text}`)" if source is not None and source.text else ""
    last = part.rpartition(".")[2]
    return MODE_NOT_RESTORED.finding(
        f"`{part}` is in eval mode since step {first_step}, while the rest is in train mode and its own parameters "
        f"go on training: it was put there for an evaluation at {line_of(source)}{text}, and nothing switched back. "
        f"Until then it had trained in train mode, in {seen_in} steps seen. Its {' and '.join(kinds)} "
        f"{'have' if len(kinds) > 1 else 'has'} no effect, or no longer follows the data.",
        first_step=first_step,
        source=source,
        module=part,
        op="eval",
        cause=f"eval() on `{part}` without train() afterwards",
        fix=f"was = {last}.training; {last}.eval(); ...; {last}.train(was)",
    )


def find_parts_in_eval(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The outermost parts in eval mode around these layers of a model that is itself in train mode.

    Not the layers themselves where they are BatchNorm or dropout: switching those off one by one is a way to freeze
    them. Nor parts in which a parameter is frozen.
    """
    whole = type(model).__name__ == "Models"  # of a foreign loop: several models, none of which is a part
    if not whole and not model.training:
        return {}
    parts: dict[str, nn.Module] = {}
    for layer in layers:
        part, names = model, layer.split(".")
        for depth, name in enumerate(names):
            part = part.get_submodule(name)
            if not part.training:
                parameters = list(part.parameters())
                if (
                    not isinstance(part, (_BatchNorm, _DropoutNd))
                    and parameters
                    and all(p.requires_grad for p in parameters)
                ):
                    parts[".".join(names[: depth + 1])] = part
                break
    if whole and not any(m.training for name, m in model.named_children() if name not in parts):
        return {}
    return parts


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
            f"after {where}, {len(changed)} modules are in {now} mode that were not before: "
            f"{', '.join(f'`{n}`' for n in names[:4])}.",
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
    harm = (
        "BatchNorm normalises by the batch and takes validation data into its running statistics"
        if norms
        else "dropout is active"
    )
    return TRAIN_IN_EVAL.finding(
        "the evaluation runs in train mode: "
        f"{', '.join(f'`{n}` ({k})' for n, k in list(zip(names, kinds, strict=True))[:4])}; {harm}.",
        first_step=event.step if event is not None else 0,
        phase="eval",
        source=text_of(event.source) if event is not None else None,
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
