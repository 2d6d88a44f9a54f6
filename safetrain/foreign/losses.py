"""What the graph of a loss says about how it was made, read without a sync."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MAX_NODES = 5000


def divisor_of(loss: Tensor) -> float | None:
    """The number that a loss was last divided by (`loss / 4`, `loss * 0.25`), also under a scaler's factor. Else None.

    Only plain numbers: they are kept on the CPU, so reading one is no sync.
    """
    node = loss.grad_fn
    for _ in range(2):  # a scaled loss is the user's own times the scale
        if node is None:
            return None
        factor = _number(node)
        if factor is not None:
            return factor
        if node.name() != "MulBackward0":
            return None
        node = node.next_functions[0][0]
    return None


def _number(node: Any) -> float | None:
    name = node.name()
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    try:
        other = node._saved_other
    except RuntimeError:  # the graph was freed: a second backward is about to say so itself
        return None
    if not isinstance(other, Tensor):
        return None
    if other.dim() or other.device.type != "cpu" or other.requires_grad:
        return None
    value = float(other)
    if name == "DivBackward0":
        return value
    return 1 / value if value else None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward of this loss accumulates into. Bounded; for scripts that train without modules."""
    if loss.grad_fn is None:
        return []
    seen, todo, leaves = {loss.grad_fn}, [loss.grad_fn], []
    while todo and len(seen) < _MAX_NODES:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves
