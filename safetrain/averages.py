"""Weighted means of named values, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from safetrain.errors import BatchError


class Averages:
    """Means of scalars by weight (samples, tokens). `add` never syncs; `compute` syncs once for all names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | float] = {}

    def add(self, name: str, value: Tensor | float, weight: Tensor | float) -> None:
        """Count `value`, a scalar without graph, `weight` times."""
        total = self._totals.get(name)
        if total is None:
            total = self._totals[name] = torch.zeros((), dtype=self._dtype, device=self._device)
            self._weights[name] = 0.0
        if isinstance(value, Tensor) and value.ndim:
            value = _scalar(name, value)
        if isinstance(weight, Tensor):
            total.add_(value * weight)
        elif isinstance(value, Tensor):
            total.add_(value, alpha=weight)
        else:
            total.add_(value * weight)
        self._weights[name] = self._weights[name] + weight

    def add_sum(self, name: str, value_sum: Tensor, weight: Tensor | float) -> None:
        """Count a sum over `weight` items, as `StepOutput.loss_sum` is."""
        if name not in self._totals:
            self.add(name, 0.0, 0.0)
        self._totals[name].add_(value_sum)
        self._weights[name] = self._weights[name] + weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._totals)

    def compute(self) -> dict[str, float]:
        """The means as numbers: one host sync, however many names."""
        if not self._totals:
            return {}
        means = [total / self._weights[name] for name, total in self._totals.items()]
        return dict(zip(self._totals, torch.stack(means).tolist(), strict=True))


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise BatchError(
            f"metric `{name}` has shape {tuple(value.shape)}; a metric is one number a batch: return `{name}.mean()`"
        )
    return value.reshape(())
