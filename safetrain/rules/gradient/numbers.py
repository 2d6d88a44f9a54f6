"""P207, P208 and P210: gradients that are zero, vanish or explode, and updates that change nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from safetrain.findings import Finding, SourceLine
from safetrain.graph import walk
from safetrain.recording.path_look import written
from safetrain.recording.saved import saves_behind_hooks
from safetrain.rules.gradient.catalogue import (
    GRADIENT_SCALE,
    NO_UPDATE,
    STALE_GRAD,
    ZERO_GRAD,
    common_module,
    listed,
)
from safetrain.source import with_text

_FLAT_NODES = ("SignBackward", "SgnBackward", "RoundBackward", "FloorBackward", "CeilBackward", "TruncBackward")
_FLAT_NAMES = ("sign", "sgn", "round", "floor", "ceil", "trunc")
_MAY_STOP = {
    "Relu": "every unit of a `relu` is off for the whole batch (dead)",
    "Threshold": "every unit of a `relu` is off for the whole batch (dead)",
    "Clamp": "`clamp` cuts off every value, so its derivative is zero",
    "ClampMin": "`clamp` cuts off every value, so its derivative is zero",
    "ClampMax": "`clamp` cuts off every value, so its derivative is zero",
    "Hardtanh": "`hardtanh` cuts off every value, so its derivative is zero",
    "Hardsigmoid": "`hardsigmoid` is saturated for the whole batch, so its derivative is zero",
    "Hardswish": "every unit of a `hardswish` is off for the whole batch (dead)",
    "Sigmoid": "`sigmoid` is saturated for the whole batch, so its derivative is zero",
    "Tanh": "`tanh` is saturated for the whole batch, so its derivative is zero",
    "Gelu": "every unit of a `gelu` is off for the whole batch (dead)",
    "Silu": "every unit of a `silu` is off for the whole batch (dead)",
    "Elu": "every unit of an `elu` is off for the whole batch (dead)",
    "Softplus": "every unit of a `softplus` is off for the whole batch (dead)",
    "Softmax": "`softmax` is saturated for the whole batch, so its derivative is zero",
    "LogSoftmax": "`log_softmax` is saturated for the whole batch, so its derivative is zero",
    "Div": "`div` with rounding is flat: its derivative is zero everywhere",
    "Mul": "it is multiplied by zero",
}
"""Nodes that may pass no gradient on at all, and what it means when they do."""
_LEADS_TO_THE_LOSS = (
    "Mean", "Sum", "Add", "Sub", "Rsub", "Neg", "Div", "Mul", "Stack", "Cat", "View", "UnsafeView", "ReshapeAlias",
    "Squeeze", "Unsqueeze", "Expand", "Select", "Slice", "ToCopy", "Index", "Clone", "Pow",
)  # fmt: skip
"""Nodes that only gather a loss: a hinge below nothing but these is met, not dead."""
_SUBTRACT = ("Sub", "Rsub")


@dataclass(slots=True)
class ZeroCause:
    """Why a gradient is exactly zero: an operation, and whether that proves a mistake."""

    op: str
    text: str
    proved: bool
    meant: bool = False
    """A term of the loss that has reached its limit (a hinge, free bits): no fault."""
    node: int = 0
    """Autograd's number of the operation."""
    line: SourceLine | None = None


def zero_gradient_causes(loss: Tensor, params: Mapping[str, Tensor], limit: int = 200_000) -> dict[str, ZeroCause]:
    """For parameters whose gradient is zero: the operation on every path from the loss that makes it so.

    Runs the backward of single activations with random gradients (a host sync each): only on suspicion.
    """
    if not bool(loss.detach().any()):
        met = ZeroCause("loss", "the loss is zero: it is met", False, meant=True)
        return dict.fromkeys(params, met)
    dead: dict[object, ZeroCause] = {}
    reached: set[int] = set()
    gathers: dict[object, bool] = {}
    stack: list[tuple[Any, bool]] = [(loss.grad_fn, True)] if loss.grad_fn is not None else []
    while stack and len(gathers) < limit:
        node, gathering = stack.pop()
        if gathers.get(node, not gathering) is gathering or gathers.get(node) is False:
            continue  # seen as part of the loss already, or from further in
        gathers[node] = gathering
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
            continue
        stops = _stops_gradient(node)
        # A difference that is squared compares with a target: what it is made of is no hinge.
        is_error = _name_of(node) == "Pow" and any(
            c is not None and _name_of(c) in _SUBTRACT for c, _ in node.next_functions
        )
        below = gathering and _gathers(node) and not is_error
        for place, (child, _) in enumerate(node.next_functions):
            if child is None:
                continue
            if stops is not None and stops.edges[place]:
                cause = stops.cause
                cause.meant = gathering and cause.op in ("relu", "clamp")
                if child not in dead or dead[child].meant:
                    dead[child] = cause
            else:
                stack.append((child, below))
    causes: dict[str, ZeroCause] = {}
    for child, cause in dead.items():
        below_it = _leaves_below(child, limit)
        for name, p in params.items():
            if id(p) in below_it and id(p) not in reached and (name not in causes or causes[name].meant):
                causes[name] = cause
    return causes


def _gathers(node: Any) -> bool:
    """Whether a node only sums, scales or reshapes what the loss is made of."""
    name = _name_of(node)
    if name in ("Mul", "Div") and sum(child is not None for child, _ in node.next_functions) > 1:
        return False
    return name in _LEADS_TO_THE_LOSS


def _name_of(node: Any) -> str:
    return str(node.name()).split("Backward", 1)[0]


def _leaves_below(root: object, limit: int) -> set[int]:
    seen: set[object] = set()
    leaves: set[int] = set()
    stack = [root]
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        stack.extend(n for n, _ in node.next_functions if n is not None)  # type: ignore[attr-defined]
    return leaves


@dataclass(slots=True)
class _Stop:
    cause: ZeroCause
    edges: tuple[bool, ...]
    """For each input of the node: does it get nothing?"""


def _stops_gradient(node: Any) -> _Stop | None:
    name = _name_of(node)
    if node.name().startswith(_FLAT_NODES):
        op = name.lower()
        cause = ZeroCause(op, f"`{op}` is flat: its derivative is zero everywhere", True, node=node._sequence_nr())
        return _Stop(cause, (True,) * len(node.next_functions))
    if name not in _MAY_STOP or saves_behind_hooks(node):
        return None  # under activation checkpointing asking would recompute
    try:
        edges = _dead_edges(node)
    except (RuntimeError, AttributeError, IndexError):
        return None  # freed, or of another version of torch: nothing is proved
    if not any(edges):
        return None
    plain = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    op = {"threshold": "relu", "clamp_min": "clamp", "clamp_max": "clamp"}.get(plain, plain)
    text = _MAY_STOP[name]
    if "softmax" in op and _width(node) == 1:
        text = f"`{op}` runs over a dimension of size 1, so its result is always the same"
    return _Stop(ZeroCause(op, text, op != "mul", node=node._sequence_nr()), edges)


def _width(softmax: Any) -> int:
    """Size of the dimension that a softmax runs over."""
    shape, dim = softmax._input_metadata[0].shape, softmax._saved_dim
    return int(shape[dim - 2**64 if dim > 2**63 else dim]) if len(shape) else 1


def _dead_edges(node: Any) -> tuple[bool, ...]:
    """Which inputs of a node get exactly nothing from a random gradient. A linear map that gives zero then is zero."""
    meta = node._input_metadata[0]
    generator = torch.Generator(device=meta.device).manual_seed(0)  # the run's own generators stay as they are
    gradient = torch.randn(meta.shape, dtype=meta.dtype, device=meta.device, generator=generator)
    with torch.no_grad():
        results = node(gradient, *(None for _ in node._input_metadata[1:]))
    results = results if isinstance(results, tuple) else (results,)
    return tuple(isinstance(r, Tensor) and r.numel() > 0 and not bool(r.any()) for r in results)


_ADDS_A_BIAS = ("Convolution", "Addmm", "Add", "Baddbmm", "Linear")
_RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "ToCopy")


def biases_before_norm(loss: Tensor, limit: int = 200_000) -> set[int]:
    """Ids of the leaves that are added per channel just before a normalisation which takes the channel's mean off.

    Their gradient is zero by mathematics and rounding noise in practice. About a microsecond a node, no host sync.
    """
    found: set[int] = set()
    for node in walk([loss.grad_fn], limit).nodes:
        name = _name_of(node)
        per_channel = name in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm") and (
            getattr(node, "_saved_training", True)
        )
        if name == "NativeGroupNorm":
            per_channel = node._saved_group == node._saved_C
        if not per_channel:
            continue
        fed = node.next_functions[0][0]
        while fed is not None and _name_of(fed) in _RESHAPES:
            fed = fed.next_functions[0][0]
        if fed is None or _name_of(fed) not in _ADDS_A_BIAS:
            continue
        for child, _ in fed.next_functions:
            while child is not None and _name_of(child) in _RESHAPES:  # autocast
                child = child.next_functions[0][0]
            leaf = getattr(child, "variable", None)
            if leaf is not None and leaf.dim() == 1:
                found.add(id(leaf))
    return found


def find_zero_grads(
    zeros: Sequence[str],
    causes: Mapping[str, ZeroCause],
    *,
    steps: int,
    weights: Sequence[str],
) -> list[Finding]:
    """P207 for parameters whose gradient was exactly zero in every look at `steps` steps.

    A warning where an operation proves it; without a cause a note, and for `weights` (two or more dimensions) only: a
    zero gradient of a bias can be mathematics (a critic's last bias under a gradient penalty, a bias before a norm).
    """
    by_cause: dict[object, tuple[ZeroCause, list[str]]] = {}
    rest: list[str] = []
    for name in zeros:
        cause = causes.get(name)
        if cause is not None:
            by_cause.setdefault((cause.text, cause.line), (cause, []))[1].append(name)
        elif name in weights:
            rest.append(name)
    findings = []
    for cause, names in by_cause.values():
        line = cause.line
        where = f" at {written(line)}" if line else ""
        findings.append(
            ZERO_GRAD.finding(
                f"the gradient of {listed(names)} is exactly zero, seen over {steps} steps: {cause.text}{where}. It "
                "does not learn.",
                severity="warning" if cause.proved else "note",
                source=with_text(line) if line else None,
                params=names,
                module=common_module(names),
                op=cause.op,
                cause=cause.text + where,
                fix=_ZERO_FIX.get(cause.op, "let the loss depend on it"),
            )
        )
    if rest:
        findings.append(
            ZERO_GRAD.finding(
                f"the gradient of {listed(rest)} is exactly zero, seen over {steps} steps. It does not learn.",
                severity="note",
                params=rest,
                module=common_module(rest),
                cause="no operation was found that explains it",
                fix="check masks, loss weights of zero and dead activations on the way to it",
            )
        )
    return findings


_STRAIGHT = "use a straight-through estimator: y = x + (x.{op}() - x).detach()"
_ZERO_FIX = {op: _STRAIGHT.format(op=op) for op in _FLAT_NAMES} | {
    "relu": "a smaller learning rate, another initialisation, or leaky_relu",
    "softmax": "softmax over the class dimension (dim=-1), or sigmoid for one output",
    "clamp": "check the limits; a squashing function keeps a gradient",
}


VANISHED = 1e-12
"""Share of the highest learning rate below which one has vanished: cosine tails get there in their last step."""


def find_no_updates(
    names: Sequence[str],
    *,
    steps: int,
    rates: Mapping[str, float],
    dtype: str,
    all_groups: bool,
    peak_rate: float = 0.0,
) -> list[Finding]:
    """P208 for parameters that had a gradient and were the same bits after the step, in all looks at `steps` steps.

    `rates`: learning rate of each name; `peak_rate`: the highest that was seen. A warning when every group's rate is
    zero or has vanished, or when the update is below the resolution of a 16-bit parameter; a note for a single group at
    zero, which may be meant.
    """
    zero = [n for n in names if rates.get(n, 1.0) <= VANISHED * peak_rate]
    small = [n for n in names if n not in zero]
    findings = []
    if zero:
        rate = rates[zero[0]]
        fell = f"has fallen to {rate:.0e}, from {peak_rate:g}" if rate else "is 0"
        findings.append(
            NO_UPDATE.finding(
                f"{listed(zero)} gets gradients but does not change: its learning rate {fell} "
                f"(seen over {steps} steps).",
                severity="warning" if all_groups else "note",
                params=zero,
                module=common_module(zero),
                cause=f"learning rate {rate:.0e}" if rate else "learning rate 0",
                fix="check the schedule: what it multiplies the rate by, and how long it lasts",
            )
        )
    if small:
        half = dtype in ("bfloat16", "float16")
        findings.append(
            NO_UPDATE.finding(
                f"{listed(small)} gets gradients but does not change (seen over {steps} steps): the update is "
                "smaller than the "
                f"spacing of {dtype} numbers around the weights, so adding it changes nothing.",
                severity="warning" if half else "note",
                params=small,
                module=common_module(small),
                cause=f"update below the resolution of {dtype}",
                fix="keep the weights in float32 and use autocast for the 16-bit part"
                if half
                else "check learning rate and weight scale",
            )
        )
    return findings


def find_gradient_scale(history: Sequence[Mapping[str, float]], *, eps: float | None = None) -> list[Finding]:
    """P210 from the largest absolute gradient of each parameter in a few looks, oldest first.

    Vanishing: a parameter a million times below the median of all, four looks in a row (a warning when also below the
    optimizer's `eps`, where Adam no longer evens it out). Exploding: ten thousand times its earlier median and above a
    million, in two looks.
    """
    findings: list[Finding] = []
    if len(history) >= 4:
        tiny = set.intersection(*(_tiny(look) for look in history[-4:]))
        if tiny:
            names = sorted(tiny)
            below = eps is not None and all(look[n] < eps for look in history[-4:] for n in names)
            findings.append(
                GRADIENT_SCALE.finding(
                    f"gradients vanish: those of {listed(names)} are below a millionth of the median over all "
                    "parameters.",
                    severity="warning" if below else "note",
                    params=names,
                    module=common_module(names),
                    cause="gradients shrink from layer to layer"
                    + (f", below the optimizer's eps of {eps:g}" if below else ""),
                    fix="normalise between layers, add skip connections, or use another activation or initialisation",
                )
            )
    if len(history) >= 5:
        names = [n for n in history[-1] if _exploded(n, history)]
        if names:
            findings.append(
                GRADIENT_SCALE.finding(
                    f"gradients explode: {listed(names)} reached {max(history[-1][n] for n in names):.3g}.",
                    severity="warning",
                    params=names,
                    module=common_module(names),
                    cause="gradients grew ten thousand times above what they were",
                    fix="clip by norm, lower the learning rate, or warm up",
                )
            )
    return findings


def _tiny(look: Mapping[str, float]) -> set[str]:
    values = sorted(v for v in look.values() if v > 0)
    if len(values) < 4:
        return set()
    median = values[len(values) // 2]
    tiny = {n for n, v in look.items() if 0 < v < 1e-6 * median}
    # A bias before a normalisation has a gradient of mere rounding, whatever flows: count layers, not lone parameters.
    flowing = {n.rpartition(".")[0] for n in look if n not in tiny}
    return {n for n in tiny if n.rpartition(".")[0] not in flowing}


def _exploded(name: str, history: Sequence[Mapping[str, float]]) -> bool:
    earlier = sorted(look[name] for look in history[:-2] if name in look)
    if not earlier or any(name not in look for look in history[-2:]):
        return False
    floor = max(1e4 * earlier[len(earlier) // 2], 1e6)
    return all(floor < look[name] < float("inf") for look in history[-2:])


def stale_finding(optimizer: str, names: Sequence[str], source: SourceLine | None = None) -> Finding:
    """P209: gradients were never cleared between two steps of an optimizer."""
    return STALE_GRAD.finding(
        f"optimizer `{optimizer}` steps on gradients that still contain those of earlier steps (seen on "
        f"{listed(names)}): "
        "nothing cleared them in between, so each step repeats all steps before it.",
        source=with_text(source) if source else None,
        params=list(names),
        cause="no zero_grad between two steps",
        fix="optimizer.zero_grad() before the backward of each step",
    )
