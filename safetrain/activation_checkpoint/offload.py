"""Saved tensors in host memory: what a module saves for backward leaves the device, and comes back when it is needed.

Autograd checks by itself that what it saved was not changed in place, but not for tensors that pass through hooks. A
copy in host memory keeps the values of the forward, whatever is written later. What stays where it is has its version
noted, and a change raises autograd's own error, with the line of the forward that saved it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from safetrain.findings import SourceLine
from safetrain.graph import storage_key
from safetrain.source import user_line

MIN_BYTES = 1 << 16
"""Smaller ones stay: a transfer costs some microseconds whatever its size."""


@dataclass(frozen=True, slots=True)
class _Stays:
    """A saved tensor where it was. Detached: a result that its own node saves would hold the graph in a cycle."""

    tensor: Tensor
    version: int
    source: SourceLine | None


@dataclass(frozen=True)
class _OnHost:
    """A saved tensor's copy in (page-locked) host memory."""

    copy: Tensor
    device: torch.device


class Offload(saved_tensors_hooks):
    """Around the forward of `module`. One for each call.

    Parameters, buffers, small tensors and what is on the CPU already stay. Copies run in the order of the device's
    stream, so nothing waits for them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owned = {storage_key(t) for t in (*module.parameters(), *module.buffers())}
        self._copies: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[_OnHost]]] = {}
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Stays | _OnHost:
        key = storage_key(tensor)
        if tensor.device.type == "cpu" or key is None or key in self._owned or tensor.nbytes < MIN_BYTES:
            return _Stays(tensor.detach(), tensor._version, user_line())
        # q, k and v of an attention all save their common input: one copy serves them.
        place = (key, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version)
        storage, copy = self._copies.get(place, (None, None))
        known = copy() if storage is not None and copy is not None and storage() is not None else None
        if known is None:
            known = _OnHost(_to_host(tensor), tensor.device)
            self._copies[place] = weakref.ref(tensor.untyped_storage()), weakref.ref(known)
        return known


def _to_host(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", requires_grad=False, pin_memory=pinned)
    return copy.copy_(tensor.detach(), non_blocking=pinned)


def _unpack(saved: _Stays | _OnHost) -> Tensor:
    if isinstance(saved, _OnHost):
        return saved.copy.to(saved.device, non_blocking=True)
    now = saved.tensor._version
    if now != saved.version:
        line = f"{saved.source.file}:{saved.source.line}" if saved.source is not None else "an unknown line"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{saved.tensor.type()} {list(saved.tensor.shape)}], which the forward saved at {line}, is at version "
            f"{now}; expected version {saved.version} instead"
        )
    return saved.tensor


def offloads_anything(tensors: Iterable[Tensor]) -> bool:
    """Whether any of them is on a device whose memory is not the host's."""
    return any(t.device.type not in ("cpu", "meta") for t in tensors)
