"""A batch of any structure, cut along its samples."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from safetrain.data.batch import rebuild_mapping
from safetrain.errors import BatchError

_ALIGNMENT = 64
"""Fresh tensors begin at a multiple of so many bytes. Kernels may choose by it, and then round in another way."""
_WHOLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


def cut(batch: Any, size: int, num_samples: int) -> list[Any]:
    """`batch` in pieces of at most `size` of its `num_samples` samples, in order; the batch itself if it is no bigger.

    Cut are tensors and arrays whose first dimension counts the samples, and lists with one entry a sample; numbers,
    strings and tensors without dimensions go to every piece as they are. Tensors of a piece are views of the batch's,
    or copies where a view would begin at another alignment than a tensor of its own.

    Raises:
        BatchError: names the part that cannot be cut, or says that nothing can.
    """
    if num_samples <= size:
        return [batch]
    cutter = _Cutter(num_samples)
    pieces = [cutter.take(batch, slice(start, start + size), "batch") for start in range(0, num_samples, size)]
    if not cutter.found:
        raise BatchError(
            f"the batch cannot be split: no tensor in it has {num_samples} samples as its first dimension{_REMEDY}"
        )
    return pieces


_REMEDY = "; override `split_batch(self, batch, size)` of the Trainer to say how such a batch is cut"


class _Cutter:
    def __init__(self, num_samples: int) -> None:
        self._count = num_samples
        self.found = False
        """Something had one entry a sample."""

    def take(self, value: Any, rows: slice, path: str) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return self._rows_of(value, rows, path)
        if isinstance(value, Mapping):
            taken = {key: self.take(item, rows, f"{path}[{key!r}]") for key, item in value.items()}
            return taken if type(value) is dict else rebuild_mapping(value, taken)
        if isinstance(value, (list, tuple)):
            return self._list_of(value, rows, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            taken = {name: self.take(getattr(value, name), rows, f"{path}.{name}") for name in fields}
            return dataclasses.replace(value, **taken)
        if isinstance(value, _WHOLE):
            return value
        raise BatchError(f"the batch cannot be split: {path} is a {type(value).__name__}{_REMEDY}")

    def _rows_of(self, value: Any, rows: slice, path: str) -> Any:
        if not value.ndim:
            return value
        sparse = isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided)
        if sparse or value.shape[0] != self._count:
            what = "is sparse or nested" if sparse else f"has shape {tuple(value.shape)}"
            raise BatchError(
                f"the batch cannot be split: {path} {what}, with no first dimension of {self._count} samples{_REMEDY}"
            )
        self.found = True
        if isinstance(value, np.ndarray):
            return value[rows]
        piece = value.detach()[rows]
        if _address(piece) % _ALIGNMENT and not piece.is_pinned():
            piece = piece.clone()
        return piece.requires_grad_() if value.requires_grad else piece

    def _list_of(self, value: Any, rows: slice, path: str) -> Any:
        """A list holds one entry a sample, or is a structure whose parts do."""
        if len(value) == self._count and self._has_an_entry_a_sample(value, path):
            self.found = True
            items = list(value[rows])
        else:
            items = [self.take(item, rows, f"{path}[{index}]") for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _has_an_entry_a_sample(self, value: Any, path: str) -> bool:
        if hasattr(value, "_fields"):
            return False
        as_structure = _Cutter(self._count)
        try:
            for item in value:
                as_structure.take(item, slice(0, 0), path)
        except BatchError:
            return True
        if as_structure.found and path != "batch":
            raise BatchError(
                f"the batch cannot be split: {path} has {len(value)} entries of {len(value)} samples each, so which of "
                f"the two counts samples is not clear{_REMEDY}"
            )
        return not as_structure.found


def _address(tensor: Tensor) -> int:
    """Where it begins; a fake tensor, whose storage is nowhere: within its storage."""
    if isinstance(tensor, FakeTensor):
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()
