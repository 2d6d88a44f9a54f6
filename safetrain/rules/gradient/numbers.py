"""P207, P208 and P210: gradients that are zero, vanish or explode, and updates that change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from safetrain.findings import Finding, SourceLine
from safetrain.recording.path_look import written
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


@dataclass(slots=True)
class ZeroCause:
    """Why a gradient is exactly zero: an operation, and whether that proves a mistake."""

    op: str
    text: str
    proved: bool


def zero_gradient_causes(loss: Tensor, params: Mapping[str, Tensor], limit: int = 200_000) -> dict[str, ZeroCause]:
    """For parameters whose gradient is zero: the operation on every path from the loss that makes it so.

    Reads saved tensors of activations (a host sync each): only on suspicion.
    """
    dead: dict[object, ZeroCause] = {}
    reached: set[int] = set()
    seen: set[object] = set()
    stack = [loss.grad_fn] if loss.grad_fn is not None else []
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        cause = _stops_gradient(node)
        if cause is not None:
            dead[node] = cause
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        stack.extend(n for n, _ in node.next_functions if n is not None and n not in seen)
    causes: dict[str, ZeroCause] = {}
    for flat, cause in dead.items():
        below = _leaves_below(flat, limit)
        for name, p in params.items():
            if id(p) in below and id(p) not in reached:
                causes.setdefault(name, cause)
    return causes


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


def _stops_gradient(node: object) -> ZeroCause | None:
    name: str = node.name()  # type: ignore[attr-defined]
    if name.startswith(_FLAT_NODES):
        op = name.split("Backward", 1)[0].lower()
        return ZeroCause(op, f"`{op}` is flat: its derivative is zero everywhere", True)
    try:
        if name.startswith(("ReluBackward", "ThresholdBackward")):
            result = getattr(node, "_saved_result", None)
            if result is not None and not bool((result > 0).any()):
                return ZeroCause("relu", "every unit of a `relu` is off for the whole batch (dead)", True)
        elif name.startswith(("SoftmaxBackward", "LogSoftmaxBackward")):
            result = node._saved_result  # type: ignore[attr-defined]
            dim = node._saved_dim  # type: ignore[attr-defined]
            dim = dim - 2**64 if dim > 2**63 else dim
            if result.dim() and result.shape[dim] == 1:
                return ZeroCause("softmax", "`softmax` runs over a dimension of size 1, so it is always 1", True)
        elif name.startswith("MulBackward"):
            other = getattr(node, "_saved_other", None)
            if isinstance(other, Tensor) and not bool(other.any()):
                return ZeroCause("mul", "it is multiplied by zero", False)
        elif name.startswith("ClampBackward") and _all_clamped(node):
            return ZeroCause("clamp", "`clamp` cuts off every value, so its derivative is zero", True)
    except (RuntimeError, AttributeError, IndexError):
        return None  # freed, packed by a hook, or of another version of torch: nothing is proved
    return None


def _all_clamped(node: object) -> bool:
    value = node._saved_self  # type: ignore[attr-defined]
    low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
    inside = torch.ones_like(value, dtype=torch.bool)
    if low is not None:
        inside &= value >= low
    if high is not None:
        inside &= value <= high
    return not bool(inside.any())


def find_zero_grads(
    zeros: Sequence[str],
    causes: Mapping[str, ZeroCause],
    lines: Mapping[str, SourceLine | None],
    *,
    steps: int,
    weights: Sequence[str],
) -> list[Finding]:
    """P207 for parameters whose gradient was exactly zero in every look at `steps` steps.

    A warning where an operation proves it; without a cause a note, and for `weights` (two or more dimensions) only: a
    zero gradient of a bias can be mathematics (a critic's last bias under a gradient penalty, a bias before a norm).
    `lines` are lines of flat operations by name.
    """
    by_cause: dict[str, tuple[ZeroCause, list[str]]] = {}
    rest: list[str] = []
    for name in zeros:
        cause = causes.get(name)
        if cause is not None:
            by_cause.setdefault(cause.text, (cause, []))[1].append(name)
        elif name in weights:
            rest.append(name)
    findings = []
    for cause, names in by_cause.values():
        line = next((src for op, src in lines.items() if op.strip("_") == cause.op and src), None)
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


def find_no_updates(
    names: Sequence[str], *, steps: int, rates: Mapping[str, float], dtype: str, all_groups: bool
) -> list[Finding]:
    """P208 for parameters that had a gradient and were the same bits after the step, in all looks at `steps` steps.

    `rates`: learning rate of each name. A warning when every group's rate is zero, or when the update is below the
    resolution of a 16-bit parameter; a note for a single group at zero, which may be meant.
    """
    zero = [n for n in names if rates.get(n) == 0.0]
    small = [n for n in names if rates.get(n, 1.0) != 0.0]
    findings = []
    if zero:
        findings.append(
            NO_UPDATE.finding(
                f"{listed(zero)} gets gradients but does not change: its learning rate is 0 (seen over {steps} steps).",
                severity="warning" if all_groups else "note",
                params=zero,
                module=common_module(zero),
                cause="learning rate 0",
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
