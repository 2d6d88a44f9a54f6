"""Batches of any structure: moving them to the device and counting their samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """The same structure with `fn` applied to every tensor.

    Goes through mappings, tuples (named ones too), lists and dataclasses; an object with a `to` method that is none of
    these is left to itself, anything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(item, fn) for key, item in value.items()}
        return mapped if type(value) is dict else rebuild_mapping(value, mapped)
    if isinstance(value, tuple):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, fn) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), fn) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    return value


def rebuild_mapping(value: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """A mapping of the user's own type, or a plain dict where that type cannot be made from one."""
    try:
        return type(value)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor on `device`. Pinned tensors are copied without blocking the host."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    if not isinstance(batch, (Tensor, Mapping, tuple, list)) and hasattr(batch, "to"):
        return batch.to(device)
    return map_tensors(batch, move)


def to_host(value: Any) -> Any:
    """`value` with every tensor detached and on the CPU. A host sync on accelerators."""
    return map_tensors(value, lambda tensor: tensor.detach().cpu())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nested structure, depth first."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor  # types that check what they are made of, such as PackedSequence, are made again

    map_tensors(value, note)
    return iter(found)


def batch_size(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, 1 when it has none. No host sync."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch
    if not isinstance(first, Tensor):
        first = next(tensors_in(batch), None)
        if first is None:
            return 1
    shape = first.shape
    return shape[0] if shape else 1
