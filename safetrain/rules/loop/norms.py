"""L502, L506, L511 and L513: BatchNorm's statistics, and reentrant checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from safetrain.findings import Finding, SourceLine
from safetrain.rules.loop.catalogue import (
    BATCHNORM_BATCH,
    CHECKPOINT_INPUT,
    FROZEN_BUT_MOVING,
    RECOMPUTE_BUFFERS,
    line_of,
    text_of,
)

_FEW = 16


def find_batchnorm_batch(
    model: nn.Module, *, micro_batch: int, micro_batches: int, smallest: int = 16
) -> list[Finding]:
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
        message = (
            f"{listed} takes batch statistics over a single sample, so training and evaluation see different functions."
        )
        cause = "one sample per micro-batch in train mode"
    else:
        message = (
            f"{micro_batches} micro-batches of {micro_batch} are not a batch of {micro_batch * micro_batches} for "
            f"{listed}: "
            f"its statistics are those of {micro_batch} samples, and its running ones move {micro_batches} times a "
            "step."
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
    at = f" by the checkpoint at {line_of(source)}" if source is not None else ""
    return RECOMPUTE_BUFFERS.finding(
        f"{', '.join(f'`{n}` ({k})' for n, k in list(zip(names, kinds, strict=True))[:4])} updates running_mean and "
        "running_var a second time while backward "
        f"recomputes it{at}: each batch counts twice, so evaluation differs from the same model without checkpointing.",
        source=text_of(source),
        module=names[0],
        op="checkpoint",
        cause="activation checkpointing recomputes a BatchNorm in train mode",
        fix="leave BatchNorm out of the checkpointed part, or use safetrain's activation_checkpoint",
    )


@dataclass(slots=True)
class BufferMarks:
    """Versions of BatchNorm statistics, and the parameters of frozen modules around them, at one moment."""

    norms: dict[str, int] = field(default_factory=dict)
    frozen: dict[str, _Stand] = field(default_factory=dict)


@dataclass(slots=True)
class _Stand:
    """Where parameters stand: versions, and the first values of a few, since a write through `.data` counts no version.

    Copies of a few hundred numbers; no tensor of the model is kept.
    """

    versions: tuple[int, ...]
    values: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> _Stand:
        params = [p.detach() for p in module.parameters()]
        few = [p for p in params if p.layout is torch.strided and p.ndim][:_FEW]
        return cls(tuple(p._version for p in params), [p[(0,) * (p.ndim - 1)][:_FEW].clone() for p in few])

    def same_as(self, later: _Stand) -> bool:
        """Whether nothing was written in between. Syncs when no version has changed."""
        return self.versions == later.versions and all(map(torch.equal, self.values, later.values))


def mark_buffers(norms: Sequence[tuple[str, nn.Module]], model: nn.Module) -> BufferMarks:
    """Where the statistics of BatchNorm layers in train mode stand, and the frozen modules around them. No sync."""
    marks = BufferMarks()
    stands: dict[str, _Stand] = {}
    for name, norm in norms:
        tracked = norm.num_batches_tracked  # the statistics are written below autograd, which counts no version there
        if not norm.training or not isinstance(tracked, Tensor):
            continue
        marks.norms[name] = tracked._version
        top = _frozen_around(model, name)
        if top is not None:
            if top not in stands:
                stands[top] = _Stand.of(_module(model, top))
            marks.frozen[name] = stands[top]
    return marks


def find_frozen_but_moving(
    model: nn.Module, norms: Sequence[tuple[str, nn.Module]], before: BufferMarks
) -> list[Finding]:
    """L513 from two marks a step apart: statistics that moved inside a module that is frozen and did not change itself.

    Target networks (their parameters are moved by hand) and modules that are thawed in between are not frozen.
    """
    by_top: dict[str, list[str]] = defaultdict(list)
    still: dict[str, bool] = {}
    for name, norm in norms:
        stand = before.frozen.get(name)
        top = _frozen_around(model, name)
        if stand is None or top is None or not norm.training or not isinstance(norm.num_batches_tracked, Tensor):
            continue
        if norm.num_batches_tracked._version == before.norms.get(name):
            continue
        if top not in still:
            still[top] = stand.same_as(_Stand.of(_module(model, top)))
        if still[top]:
            by_top[top].append(name)
    return [
        FROZEN_BUT_MOVING.finding(
            f"`{top or type(model).__name__}` is frozen, but its running statistics still change "
            f"({', '.join(f'`{n}`' for n in names[:4])}): it is in "
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


def reentrant_finding(names: Sequence[str], source: SourceLine | None) -> Finding:
    """L506 for parameters inside a reentrant checkpoint none of whose inputs needs a gradient."""
    listed = ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return CHECKPOINT_INPUT.finding(
        f"{listed} got no gradient: it runs inside a reentrant checkpoint whose inputs need no gradient (frozen "
        "embeddings, "
        "plain data), and such a checkpoint gives none to what is inside.",
        source=text_of(source),
        params=list(names),
        op="checkpoint",
        cause="reentrant checkpoint without an input that requires grad",
        fix="checkpoint(..., use_reentrant=False)",
    )
