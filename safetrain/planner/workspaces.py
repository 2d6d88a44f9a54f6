"""What oneDNN's recurrent layers keep for backward: a tensor of a size that only the library knows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
"""An LSTM's layer on the CPU. Its fake implementation says that the workspace, result 3, is empty."""

_INPUT, _BATCH_SIZES = 0, 8  # its arguments; inputs are [time, batch, features], whatever batch_first says
_SHORT, _LONG = 8, 32
"""Time steps that are run for real. The library rounds up to pages, which makes 3 % at most between these two."""


def with_workspace(result: tuple[Tensor, ...], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The layer's fake results with a workspace as big as the library makes it for these shapes."""
    if not torch.is_grad_enabled():
        return result
    length = args[_INPUT].shape[0]
    layer = tuple(_described(index, argument) for index, argument in enumerate(args))
    if length <= _LONG:
        size = _measured(layer, length)
    else:
        short, long = _measured(layer, _SHORT), _measured(layer, _LONG)
        size = long + (long - short) * (length - _LONG) // (_LONG - _SHORT)
    return (*result[:3], result[3].new_empty(size))


def _described(index: int, argument: Any) -> Any:
    """An argument as something to be looked up by: shape and dtype of a tensor, without the length of the input."""
    if not isinstance(argument, Tensor):
        return tuple(argument) if isinstance(argument, list) else argument
    return tuple(argument.shape)[int(index == _INPUT) :], argument.dtype


@functools.lru_cache(maxsize=256)
def _measured(layer: tuple[Any, ...], length: int) -> int:
    """Bytes of the workspace after `length` time steps. Runs the layer on zeros; without gradients it makes none."""
    shape, dtype = layer[_INPUT]
    with _disable_current_modes(), torch.enable_grad():
        args = [torch.zeros(a[0], dtype=a[1]) if _is_tensor(a) else a for a in layer]
        args[_INPUT] = torch.zeros(length, *shape, dtype=dtype)
        args[_BATCH_SIZES] = list(args[_BATCH_SIZES])
        workspace = RNN_LAYER(*args)[3]
        return int(workspace.nbytes) if workspace is not None else 0


def _is_tensor(described: Any) -> bool:
    return isinstance(described, tuple) and len(described) == 2 and isinstance(described[1], torch.dtype)
