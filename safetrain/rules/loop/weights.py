"""How one micro-batch's loss weighs its elements, read from its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
    loss: Tensor, *, scaled: bool = False, shared: bool = False, may_sync: bool = True, limit: int = 64
) -> LossWeight | None:
    """Read from a loss's graph how it weighs its elements; None when its shape is not understood.

    `scaled`: the outermost factor is a loss scale and does not count. `shared`: an outermost division is the share of
    a micro-batch in its window. A sum that is divided by a whole number is a mean over so many elements.

    Reads numbers that live on the CPU; counts kept on an accelerator (`ignore_index`, masked means) cost a host sync:
    without `may_sync` such a loss is not understood.
    """
    node, factor = loss.grad_fn, 1.0
    divisor: float | None = None  # of the division right above
    for depth in range(limit):
        if node is None:
            return None
        name = node.name()
        reduction = _reduction(node, name, may_sync)
        if reduction is not None and reduction[1] is None and divisor is not None and divisor.is_integer():
            return LossWeight(factor * divisor, divisor, f"{reduction[0]} by count")
        if reduction is not None:
            return LossWeight(factor, reduction[1], reduction[0])
        divisor = None
        following = [n for n, _ in node.next_functions]
        if name.startswith(("MulBackward", "DivBackward")):
            if not (scaled and depth == 0 and name.startswith("Mul")):
                number = _scalar(node, may_sync)
                if number is None:
                    return None
                factor = factor * number if name.startswith("Mul") else factor / number
                if name.startswith("Div") and not (shared and depth == 0):
                    divisor = number
            node = following[0] if following[0] is not None else following[-1]
        elif name.startswith(("AddBackward", "SubBackward")):
            node = _label_smoothed(node, may_sync) or next((n for n in following if n is not None), None)
        elif name.startswith(("NegBackward", "ToCopyBackward", "SqueezeBackward", "ViewBackward", "CloneBackward")):
            node = following[0]
        else:
            return None
    return None


def _label_smoothed(node: Any, may_sync: bool) -> Any:
    """The loss node in the sum that `cross_entropy(label_smoothing=s)` makes: 1 - s of it, s of a mean over classes."""
    parts = [following for following, _ in node.next_functions if following is not None]
    if len(parts) != 2 or not all(part.name().startswith("MulBackward") for part in parts):
        return None
    nll = parts[0].next_functions[0][0]
    kept, spread = (_scalar(part, may_sync) for part in parts)
    if nll is None or not nll.name().startswith("NllLoss") or kept is None or spread is None:
        return None
    try:
        num_classes = nll._saved_self.shape[1]
    except (RuntimeError, IndexError):
        return None
    return nll if abs(kept + spread * num_classes - 1) < 1e-6 else None


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
        value: float = other.tolist()  # type: ignore[assignment]  # one number, as it has no dimension
        return float(value) or None
    return None
