"""The counter of in-place writes that autograd checks saved tensors by, set back after a write that was undone."""

from __future__ import annotations

import torch
from torch import Tensor


def set_version(tensor: Tensor, version: int) -> None:
    """Make `tensor._version` equal `version`. The values must be those that the tensor had at that version."""
    setter = torch._C._autograd._unsafe_set_version_counter
    try:
        setter((tensor,), (version,))
    except TypeError:  # torch before 2.7 takes one tensor
        setter(tensor, version)  # type: ignore[arg-type]
