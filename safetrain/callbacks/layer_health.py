"""How each layer fares in a step: gradient norm, how far it moved, whether it is dead or explodes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from safetrain.state import RunState

_SAMPLED = 4_096
"""Entries of a parameter, evenly spaced, that say how far it moved: a copy of all would be memory of its own."""
_REMEMBERED, _ENOUGH = 20, 5
"""Norms of a layer that tell what is usual, and how many are needed."""
_EXPLODES = 100.0
"""Times its median of late from which a layer's norm counts as exploding."""

_Vectors = tuple[list[str], list[Tensor]]
"""Names of parameters, and their values: one float32 vector a device."""


class LayerHealth:
    """Call `before_step`, `after_step` and `read` in the steps that are to be looked at, and in no others.

    A layer is a module that owns parameters. Nothing is read from the device before `read`, which reads once a device.
    """

    def __init__(self) -> None:
        self._norms: dict[tuple[str, ...], _Vectors] = {}
        self._before: dict[tuple[str, ...], tuple[list[str], list[nn.Parameter], list[Tensor]]] = {}
        self._ratios: list[_Vectors] = []
        self._usual: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._without: set[str] = set()

    def clear(self) -> None:
        """Let go of all tensors."""
        self._norms.clear()
        self._before.clear()
        self._ratios.clear()
        self._without.clear()

    @torch.no_grad()
    def before_step(self, state: RunState) -> None:
        """Queue the norms of the gradients about to be used, and take samples of the weights."""
        chosen = _stepped(state)
        with_grad = [(name, p) for name, p in chosen if p.grad is not None]
        self._without |= {_layer(name) for name, p in chosen if p.grad is None}
        self._norms[state.stepping] = _norms_of([(name, p.grad) for name, p in with_grad if p.grad is not None])
        if state.stepping not in self._before:  # of several steps in one window the first: the window's way is told
            names, params = [name for name, _ in with_grad], [p for _, p in with_grad]
            self._before[state.stepping] = names, params, [_sample(p).clone() for p in params]

    @torch.no_grad()
    def after_step(self) -> None:
        """Queue how far the weights moved."""
        for names, params, before in self._before.values():
            moved = [_sample(p) - old for p, old in zip(params, before, strict=True)]
            self._ratios += [_norms_of(zip(names, values, strict=True)) for values in (moved, before)]
        self._before.clear()

    def read(self) -> dict[str, float]:
        """`grad_norm/<layer>`, `update_ratio/<layer>`, and how many layers are dead or explode. One host sync a device.

        - `update_ratio` is the norm of a layer's change over the norm of its weights, both over samples.
        - `gradients/dead_layers`: no gradient, or one that is exactly zero.
        - `gradients/exploding_layers`: not finite, or a hundred times what was usual in the last 20 looks.
        """
        norms = _by_layer(self._norms.values())
        ratios: dict[str, float] = {}
        for moved, weights in zip(self._ratios[::2], self._ratios[1::2], strict=True):
            size = _by_layer([weights])
            ratios |= {name: change / size[name] for name, change in _by_layer([moved]).items() if size[name]}
        told = {f"grad_norm/{layer}": norm for layer, norm in norms.items()}
        told |= {f"update_ratio/{layer}": ratio for layer, ratio in ratios.items()}
        if norms:
            dead = {layer for layer, norm in norms.items() if norm == 0} | (self._without - norms.keys())
            told["gradients/dead_layers"] = float(len(dead))
            told["gradients/exploding_layers"] = float(sum(self._explodes(name, norm) for name, norm in norms.items()))
        self.clear()
        return told

    def _explodes(self, layer: str, norm: float) -> bool:
        usual = self._usual[layer]
        explodes = not math.isfinite(norm) or (
            len(usual) >= _ENOUGH and norm > _EXPLODES * statistics.median(usual) > 0
        )
        if math.isfinite(norm):
            usual.append(norm)
        return explodes


def _stepped(state: RunState) -> list[tuple[str, nn.Parameter]]:
    """The parameters about to be stepped, with their names."""
    stepping = state.stepping or tuple(state.optimizers)
    chosen = {id(p) for name in stepping for group in state.optimizers[name].param_groups for p in group["params"]}
    return [(name, p) for name, p in state.model.named_parameters() if id(p) in chosen and p.requires_grad]


def _sample(param: Tensor) -> Tensor:
    """Up to 4,096 evenly spaced entries in float32; a view where it can be one."""
    stride = max(1, param.numel() // _SAMPLED)
    return param.detach().reshape(-1)[::stride].float()


def _norms_of(named: Iterable[tuple[str, Tensor]]) -> _Vectors:
    """2-norms, queued on each device."""
    by_device: dict[torch.device, tuple[list[str], list[Tensor]]] = defaultdict(lambda: ([], []))
    for name, tensor in named:
        names, tensors = by_device[tensor.device]
        names.append(name)
        tensors.append(tensor.coalesce().values() if tensor.is_sparse else tensor)
    names = [name for group, _ in by_device.values() for name in group]
    return names, [torch.stack(torch._foreach_norm(group, 2, torch.float32)) for _, group in by_device.values()]


def _by_layer(norms: Iterable[_Vectors]) -> dict[str, float]:
    """Norms read and joined over the parameters of each module."""
    squares: dict[str, float] = defaultdict(float)
    for names, vectors in norms:
        values = [value for vector in vectors for value in vector.tolist()]
        for name, value in zip(names, values, strict=True):
            squares[_layer(name)] += value * value
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def _layer(param: str) -> str:
    return param.rpartition(".")[0] or param
