"""Walks over an autograd graph: its nodes, the parameters it reaches, the bytes it pins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from safetrain.graph.marks import Mark, grad_fn_of, mark_of

NODE_BYTES = 460
"""What a node costs after backward freed its tensors, about (measured: 420 to 500)."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The nodes met, nearest first. `complete` is False when the limit was reached."""

    nodes: list[Any]
    complete: bool


def walk(starts: Iterable[Any], limit: int = 20_000) -> Walk:
    """Nodes reachable from `starts` (nodes or None) by `next_functions`, breadth first: about 0.9 µs a node."""
    nodes = list(dict.fromkeys(node for node in starts if node is not None))
    seen = set(nodes)
    at = 0
    while at < len(nodes):
        for following, _ in nodes[at].next_functions:
            if following is not None and following not in seen:
                if len(nodes) >= limit:
                    return Walk(nodes, False)
                seen.add(following)
                nodes.append(following)
        at += 1
    return Walk(nodes, True)


def is_leaf_node(node: Any) -> bool:
    """Whether the node is where gradients of a leaf arrive."""
    return type(node).__name__ == "AccumulateGrad"


def reachable_parameters(loss: Tensor, limit: int = 100_000) -> list[Tensor]:
    """The leaves that a backward of `loss` would reach. They are the model's own tensors, not copies."""
    return [node.variable for node in walk([grad_fn_of(loss)], limit).nodes if is_leaf_node(node)]


def marks_reached(tensor: Tensor | Any, limit: int) -> list[Mark]:
    """The marks on the nodes of the graph behind a tensor or a node, nearest first."""
    found = (mark_of(node) for node in walk([grad_fn_of(tensor)], limit).nodes)
    return list(dict.fromkeys(mark for mark in found if mark is not None))


class SavedFreed(Exception):
    """The node's saved tensors are gone: a backward went through it."""


_saved_names: dict[type, tuple[str, ...]] = {}


def saved_tensors(node: Any, *, fakes: bool = False) -> Iterator[Tensor]:
    """The tensors that a node saved for backward, without running unpack hooks (which may recompute a checkpoint).

    Fake tensors are left out unless `fakes`: compilers keep them alive, and they have no bytes.

    Raises:
        SavedFreed: a backward has freed them.
    """
    kind = type(node)
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError as error:
            raise SavedFreed from error
        for one in saved if isinstance(saved, (tuple, list)) else (saved,):
            if one is not None and hasattr(one, "data"):  # older torch says nothing about hooks: nothing is read there
                yield from _content(node, name, one, fakes)


def _content(node: Any, name: str, saved: Any, fakes: bool) -> Iterator[Tensor]:
    """What a `SavedTensor` holds."""
    packed = saved.data
    if packed is None:
        # Freed, or a tensor that was never there. Without data there is no hook to run, so asking is safe.
        try:
            getattr(node, name.replace("_raw_", "_", 1), None)
        except RuntimeError as error:
            raise SavedFreed from error
        return
    for value in packed if isinstance(packed, (tuple, list)) else (packed,):
        if isinstance(value, Tensor) and (fakes or not isinstance(value, FakeTensor)):
            yield value


def is_freed(node: Any) -> bool:
    """Whether a backward has freed what the node saved. A node that saves nothing is never freed."""
    try:
        for _ in saved_tensors(node):
            pass
    except SavedFreed:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a piece of graph keeps alive."""

    num_nodes: int
    saved_bytes: int
    """Storages of saved tensors, each once, without those that live anyway."""
    freed: bool
    """Some node's tensors were freed by a backward."""

    @property
    def bytes(self) -> int:
        """All of it: saved tensors and the nodes themselves."""
        return self.saved_bytes + self.num_nodes * NODE_BYTES

    def describe(self) -> str:
        """`18.2 MB of activations` or `skeleton`."""
        if self.saved_bytes > self.num_nodes * NODE_BYTES:
            return f"{format_bytes(self.saved_bytes)} of activations"
        return f"skeleton: {self.num_nodes} nodes, {format_bytes(self.bytes)}"


def pinned(nodes: Iterable[Any], apart_from: Iterable[Tensor] = ()) -> Pinned:
    """Bytes that `nodes` keep alive, not counting the storages of `apart_from` (parameters, buffers, the batch)."""
    known = {key for tensor in apart_from if (key := storage_key(tensor)) is not None}
    count = total = 0
    freed = False
    for node in nodes:
        count += 1
        try:
            for tensor in saved_tensors(node):
                key = storage_key(tensor)
                if key is not None and key not in known:
                    known.add(key)
                    total += tensor.untyped_storage().nbytes()
        except SavedFreed:
            freed = True
    return Pinned(count, total, freed)


def storage_key(tensor: Tensor, *, fakes: bool = False) -> int | None:
    """Identity of a tensor's storage; None for layouts and wrappers (of `torch.func`) without one.

    A fake tensor has none unless `fakes`.
    """
    if tensor.layout is not torch.strided or (isinstance(tensor, FakeTensor) and not fakes):
        return None
    try:
        key: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None
    return key


def owned_tensors(model: nn.Module | None) -> list[Tensor]:
    """Parameters and buffers: alive whatever any graph does."""
    return [] if model is None else [*model.parameters(), *model.buffers()]


def format_bytes(count: float) -> str:
    """`18.2 MB`; powers of 1000, as torch users read them off a monitor."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
