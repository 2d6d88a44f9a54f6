"""When sparse readings are taken, and of what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    pass


def is_sample(step: int) -> bool:
    """Steps (counted from 1) of sparse readings: 2, 3, 4, 8, 16, 32, then each 64th, after 512 each 256th."""
    return step in (2, 3, 4, 8, 16, 32) or step % (64 if step <= 512 else 256) == 0


def is_plain(tensor: Tensor) -> bool:
    """An ordinary dense tensor with entries: sparse and distributed ones are not measured here."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel() > 0
