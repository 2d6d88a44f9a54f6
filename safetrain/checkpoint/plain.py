"""Turning a nested state into what `torch.load(weights_only=True)` can read, and back; and walking it by entry name."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from safetrain.errors import CheckpointError

_ATOMS = (str, int, float, bool, type(None), bytes, complex, torch.Size, torch.dtype, torch.device)
_ARRAY = "__numpy__"


def pack(value: Any, entry: str) -> Any:
    """`value` with tensors detached and NumPy arrays spelt out. Tensors share memory with the originals.

    Raises:
        CheckpointError: it holds something that could not be loaded again without running code; names the entry.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if kind in (dict, OrderedDict, Counter):
        return _pack_mapping(value, entry)
    if kind is list or kind is tuple:
        return kind(pack(item, f"{entry}.{i}") for i, item in enumerate(value))
    if kind is set:
        return {pack(item, entry) for item in value}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and type(value.item()) in _ATOMS:
        return value.item()
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject:
        data = bytearray(value.tobytes())
        return {_ARRAY: value.dtype.str, "shape": list(value.shape), "data": _bytes_tensor(data)}
    raise CheckpointError(
        f"`{entry}` is a {kind.__module__}.{kind.__qualname__}, which cannot be loaded again safely; have the "
        "state_dict return "
        "tensors, numbers, strings, lists, tuples and dicts only"
    )


def unpack(value: Any) -> Any:
    """What `pack` was given."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        if _ARRAY in value:
            import numpy

            data = value["data"].numpy().tobytes()
            return numpy.frombuffer(data, dtype=value[_ARRAY]).reshape(value["shape"]).copy()
        for key, item in value.items():
            value[key] = unpack(item)
        return value
    if kind is list or kind is tuple:
        return kind(unpack(item) for item in value)
    return value


def entries(value: Any, entry: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name, such as `optimizers.main.state.3.exp_avg`.

    An empty container is a leaf, and so is a long list of numbers (the state of a generator).
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from entries(item, f"{entry}.{key}" if entry else str(key))
    elif (
        isinstance(value, (list, tuple))
        and value
        and not (len(value) > 64 and {type(v) for v in value} <= {int, float})
    ):
        for i, item in enumerate(value):
            yield from entries(item, f"{entry}.{i}" if entry else str(i))
    else:
        yield entry, value


def same(left: Any, right: Any) -> bool:
    """Whether two leaves hold the same bits (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.layout is not torch.strided or right.layout is not torch.strided:
            return left.layout is right.layout and torch.equal(left, right)
        return torch.equal(_bits(left), _bits(right))
    return type(left) is type(right) and repr(left) == repr(right)


def _pack_mapping(value: Any, entry: str) -> Any:
    packed = type(value)()
    for key, item in value.items():
        if type(key) not in (*_ATOMS, tuple):
            raise CheckpointError(
                f"`{entry}` has the key {key!r}, a {type(key).__name__}; use strings or numbers as keys"
            )
        packed[key] = pack(item, f"{entry}.{key}")
    if hasattr(value, "_metadata"):  # versions of the modules in a model's state dict
        packed._metadata = value._metadata
    return packed


def _bytes_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
