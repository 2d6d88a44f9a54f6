"""Where in a graph values stopped being finite, from what its nodes saved: nothing is run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from safetrain.graph.walk import is_leaf_node
from safetrain.recording.saved import SavedTensor, nodes_of, saved_by

_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze", "Clone")
_PUT_ON_PURPOSE = ("MaskedFill", "Where", "IndexPut", "IndexFill", "Triu", "MaskedScatter")
"""Operations that put an infinity where the user asked for one (attention masks)."""
_GIVEN = frozenset({"self", "other", "input", "mat1", "mat2", "vec", "batch1", "batch2", "target", "exponent"})
"""Names under which nodes save what they were given, not what they worked out."""
_KEEPS_FINITE = frozenset(
    {
        "Relu", "Neg", "Abs", "Clamp", "Tanh", "Sigmoid", "Select", "Slice", "Cat", "Stack", "Max", "Min", "Where",
        "MaskedFill", "Split", "Unbind", "Index", "Gather", "LeakyRelu", "Softplus", "Gelu", "Silu",
    }
)  # fmt: skip
"""Operations that give nothing but finite values for finite ones."""
_SPREADS_INF = frozenset({"Mul", "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution"})
"""Operations that an infinity which they are given goes through (dividing by one gives zero)."""
_PASSES_BAD = frozenset({"Mean", "Sum", "Add", "Sub", "Neg", "Mul", "Cat", "Stack"})
"""Operations that are not finite once any value that they are given is not."""
_AGAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "Log": torch.log, "Log2": torch.log2, "Log10": torch.log10, "Log1p": torch.log1p, "Acos": torch.acos,
    "Asin": torch.asin, "Atanh": torch.atanh,
}  # fmt: skip
"""Operations with a pole that save only what they were given: their result is computed again from that."""


@dataclass(frozen=True, slots=True)
class Origin:
    """An operation whose result was not finite.

    `made`: all that it was given by the graph was. `fed`: it was given such a value by a tensor that no operation of
    the graph made. `known`: it is the earliest that can be told; what it was given was not kept.
    """

    node: Any
    kind: Literal["made", "fed", "known"]


def find_origin(loss: Tensor) -> Origin | None:
    """Follow a loss that is not finite back through its graph, as far as values were kept. Host syncs.

    None for a loss without a graph.
    """
    with _disable_current_modes():  # a record of the step that is being made has no place for numbers that nodes saved
        node = beneath_views(loss.grad_fn)
        return _descend(node, _Values(loss)) if node is not None else None


def _descend(node: Any, values: _Values) -> Origin:
    while True:
        given = [maker for maker in _makers(node) if not is_leaf_node(maker)]
        bad = [maker for maker in given if values.bad.get(maker)]
        unknown = [maker for maker in given if maker not in values.bad]
        if bad:
            node = min(bad, key=lambda maker: maker._sequence_nr())
        elif node in values.fed:
            return Origin(node, "fed")
        elif not unknown:
            return Origin(node, "made")
        elif len(unknown) == 1 and name_of(node) in _KEEPS_FINITE:
            node = unknown[0]
        else:
            beneath = [other for other in nodes_of(node) if other is not node and values.is_suspect(other)]
            if not beneath:
                return Origin(node, "known")
            node = min(beneath, key=lambda other: other._sequence_nr())


class _Values:
    """Which results in a graph hold NaN or Inf (`bad`), as far as it is known, and which nodes were `fed` such."""

    def __init__(self, loss: Tensor) -> None:
        self.bad: dict[Any, bool] = {}
        self.fed: set[Any] = set()
        nodes = sorted(nodes_of(loss.grad_fn), key=lambda node: node._sequence_nr())
        for node in nodes:
            for saved in saved_by(node):
                self._read(node, saved)
        for node in nodes:  # oldest first: what it was given is known by then
            if node not in self.bad and not is_leaf_node(node):
                verdict = self._work_out(node)
                if verdict is not None:
                    self.bad[node] = verdict

    def _read(self, node: Any, saved: SavedTensor) -> None:
        tensor = saved.tensor
        if tensor is None or not tensor.is_floating_point():
            return
        if saved.field.startswith(("result", "output")):
            self._note(node, tensor)
            return
        maker = beneath_views(tensor.grad_fn)
        if maker is not None:
            self._note(maker, tensor)
        elif (
            saved.field in _GIVEN
            and tensor.grad_fn is None
            and is_bad(tensor)
            and (name_of(node) in _SPREADS_INF or bool(torch.isnan(tensor).any()))
        ):
            self.fed.add(node)

    def is_suspect(self, node: Any) -> bool:
        """Whether its result is known to hold NaN or Inf, or must because of what it was fed."""
        return self.bad.get(node, False) or node in self.fed

    def _note(self, node: Any, value: Tensor) -> None:
        on_purpose = name_of(node) in _PUT_ON_PURPOSE and not bool(torch.isnan(value).any())
        self.bad[node] = self.bad.get(node, False) or (is_bad(value) and not on_purpose)

    def _work_out(self, node: Any) -> bool | None:
        name = name_of(node)
        given = [self.bad.get(maker, False if is_leaf_node(maker) else None) for maker in _makers(node)]
        if name in _AGAIN:
            return next((is_bad(_AGAIN[name](s.tensor)) for s in saved_by(node) if s.tensor is not None), None)
        if name in _PASSES_BAD and any(given):
            return True
        if name == "Div" and given and given[0]:
            return True
        return False if name in _KEEPS_FINITE and all(verdict is False for verdict in given) else None


def is_bad(value: Tensor) -> bool:
    """Whether a tensor holds NaN or Inf. Host sync."""
    return not bool(torch.isfinite(value.detach()).all())


def name_of(node: Any) -> str:
    """`Softmax` of `SoftmaxBackward0`."""
    text: str = node.name()
    return text.split("Backward", 1)[0]


def beneath_views(node: Any) -> Any:
    """The node that made the values which a node only shows in another shape; None for a leaf's."""
    while node is not None and name_of(node) in _VIEWS:
        node = node.next_functions[0][0]
    return None if node is None or is_leaf_node(node) else node


def _makers(node: Any) -> Iterator[Any]:
    """The nodes that made what a node was given, views apart; a leaf's is left as it is."""
    for following, _ in node.next_functions:
        if following is not None:
            yield beneath_views(following) or following
