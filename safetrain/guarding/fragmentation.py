"""The guard over fragmentation of CUDA's caching allocator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.data.batch import tensors_in
from safetrain.findings import Report
from safetrain.rules import memory

if TYPE_CHECKING:
    from safetrain.state import RunState


_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that set up the allocator: both names work in a recent torch."""


class FragmentationGuard(Callback):
    """M403, on CUDA: looks at the allocator's books every few steps, and notes which shapes the batches have."""

    sampled_hooks = STEP_HOOKS

    EVERY = 64
    MAX_SHAPES = 64

    def __init__(self, report: Report) -> None:
        self.report = report
        self._device: torch.device | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._told = False

    def on_fit_start(self, state: RunState) -> None:
        """Nothing to do without CUDA."""
        on_cuda = state.device is not None and state.device.type == "cuda"
        self._device = state.device if on_cuda else None

    def on_backward_start(self, state: RunState) -> None:
        """Note the shapes."""
        if self._device is not None and len(self._shapes) < self.MAX_SHAPES and state.batch is not None:
            self._shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_in(state.batch)))

    def on_step_end(self, state: RunState) -> None:
        """Look at the books now and then."""
        if self._device is None or self._told or state.step % self.EVERY:
            return
        settings = ",".join(os.environ.get(name, "") for name in _SETTINGS)
        found = memory.find_fragmentation(torch.cuda.memory_stats(self._device), self._shapes, settings=settings)
        self._told = bool(found)
        self.report.extend(found, step=state.current_step)
