"""What a graph saved for backward, read without running anything: intact, freed, or changed since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from safetrain.graph.walk import walk

Condition = Literal["intact", "freed", "changed"]

_fields: dict[type, tuple[str, ...]] = {}


@dataclass(slots=True)
class SavedTensor:
    """One tensor that a node saved. `tensor` is None unless intact; `error` is autograd's own text otherwise."""

    node: Any
    field: str
    condition: Condition
    tensor: Tensor | None = None
    error: str = ""


def nodes_of(root: Any, limit: int = 1_000_000) -> list[Any]:
    """Every node reachable from a `grad_fn` (or None)."""
    return walk([root], limit).nodes


def saved_by(node: Any) -> Iterator[SavedTensor]:
    """The tensors that a node saved, without those behind hooks (checkpointing, offloading): reading would run them."""
    for raw_name in _fields_of(node):
        name = raw_name.removeprefix("_raw_saved_")
        try:
            raw = getattr(node, raw_name)
        except RuntimeError as error:
            yield SavedTensor(node, name, _condition(error), None, str(error))
            continue
        if _behind_hooks(raw):
            continue
        yield from _read(node, name)


def saves_behind_hooks(node: Any) -> bool:
    """Whether reading what a node saved would run hooks. False also for a node that has let go of it."""
    try:
        return any(_behind_hooks(getattr(node, name)) for name in _fields_of(node))
    except RuntimeError:
        return False


def _fields_of(node: Any) -> tuple[str, ...]:
    kind = type(node)
    fields = _fields.get(kind)
    if fields is None:
        fields = _fields[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return fields


def _behind_hooks(raw: Any) -> bool:
    parts = raw if isinstance(raw, (list, tuple)) else (raw,)
    return any(getattr(part, "unpack_hook", None) is not None for part in parts)


def _read(node: Any, name: str) -> Iterator[SavedTensor]:
    attribute = "saved_tensors" if name == "tensors" and hasattr(type(node), "saved_tensors") else f"_saved_{name}"
    try:
        value = getattr(node, attribute)
    except RuntimeError as error:
        yield SavedTensor(node, name, _condition(error), None, str(error))
        return
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, Tensor):
            yield SavedTensor(node, name, "intact", tensor)


def _condition(error: RuntimeError) -> Condition:
    return "changed" if "modified by an inplace operation" in str(error) else "freed"


def is_freed(node: Any) -> bool | None:
    """Whether a node has let go of what it saved; None when it saved nothing that could tell."""
    verdict: bool | None = None
    for saved in saved_by(node):
        if saved.condition == "freed":
            return True
        verdict = False
    return verdict
