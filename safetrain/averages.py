"""Weighted means of named values, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from safetrain.errors import BatchError


class Averages:
    """Means of scalars by weight (samples, tokens). Nothing syncs but `compute`, which syncs once for all names."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | float] = {}

    def add(self, name: str, value: Tensor | float, weight: Tensor | float) -> None:
        """Count `value`, a scalar without graph, `weight` times."""
        if isinstance(value, Tensor) and value.ndim:
            value = _scalar(name, value)
        self._count(name, value * weight, weight)

    def add_sum(self, name: str, value_sum: Tensor, weight: Tensor | float) -> None:
        """Count a sum over `weight` items, as `StepOutput.loss_sum` is."""
        self._count(name, value_sum, weight)

    def extend(self, name: str, values: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Count scalars on one device, each by its weight: a fraction of the cost of adding them one by one."""
        if values:
            counts = torch.tensor(weights, dtype=self._dtype, device=self._device)
            total = torch.dot(torch.stack([_scalar(name, v) for v in values]).to(self._dtype), counts)
            self._count(name, total, float(sum(weights)))

    def compute(self) -> dict[str, float]:
        """The means as numbers: one host sync, however many names."""
        if not self._totals:
            return {}
        means = [total / self._weights[name] for name, total in self._totals.items()]
        return dict(zip(self._totals, torch.stack(means).tolist(), strict=True))

    def _count(self, name: str, amount: Tensor | float, weight: Tensor | float) -> None:
        if name not in self._totals:
            self._totals[name] = torch.zeros((), dtype=self._dtype, device=self._device)
            self._weights[name] = 0.0
        self._totals[name].add_(amount)
        self._weights[name] = self._weights[name] + weight


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.ndim == 0:
        return value
    if value.numel() != 1:
        raise BatchError(
            f"metric `{name}` has shape {tuple(value.shape)}; a metric is one number a batch: return `{name}.mean()`"
        )
    return value.reshape(())
