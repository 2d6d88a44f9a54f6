"""Weighted means of named values, kept on the device until somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

from safetrain.errors import BatchError

_RUN = 64  # values added up in their own precision before the sum moves to float64: an addition there costs twice


class Average:
    """The weighted mean of one name. Values that come with equal weights are added up plainly, and weighed in runs."""

    __slots__ = ("_device", "_length", "_name", "_run", "_run_weight", "_total", "_weight")

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        total_dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._total = torch.zeros((), dtype=total_dtype, device=device)
        self._weight: Tensor | float | None = None
        self._run: Tensor | None = None
        self._run_weight: float = 0.0
        self._length = 0

    def add(self, value: Tensor | float, weight: float) -> None:
        """Count `value`, a scalar without graph, `weight` times. No host sync."""
        if isinstance(value, Tensor) and value.ndim:
            value = self.scalar(value)
        run = self._run
        if run is None or weight != self._run_weight:
            run = self._begin_run(value, weight)
        run.add_(value)
        self._length += 1
        if self._length == _RUN:
            self._fold()

    def add_sum(self, value_sum: Tensor | float, weight: Tensor | float) -> None:
        """Count a sum over `weight` items, as `StepOutput.loss_sum` is. No host sync."""
        self._total.add_(value_sum)
        self._weight = weight if self._weight is None else self._weight + weight

    @property
    def counted(self) -> bool:
        """Whether anything was added."""
        return self._weight is not None or self._length > 0

    def mean(self) -> Tensor:
        """Scalar, on the device."""
        self._fold()
        assert self._weight is not None
        return self._total / self._weight

    def _begin_run(self, first: Tensor | float, weight: float) -> Tensor:
        self._fold()
        dtype = torch.promote_types(first.dtype, torch.float32) if isinstance(first, Tensor) else torch.float32
        self._run, self._run_weight = torch.zeros((), dtype=dtype, device=self._device), weight
        return self._run

    def _fold(self) -> None:
        if self._run is not None and self._length:
            self.add_sum(self._run * self._run_weight, self._length * self._run_weight)
            self._run.zero_()
            self._length = 0

    def scalar(self, value: Tensor) -> Tensor:
        """`value` without dimensions.

        Raises:
            BatchError: it holds several numbers.
        """
        if value.numel() != 1:
            raise BatchError(
                f"metric `{self._name}` has shape {tuple(value.shape)}; a metric is one number a batch: return "
                f"`{self._name}.mean()`"
            )
        return value.reshape(())


class Averages:
    """One `Average` a name; `averages[name]` makes it when it is new."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_name: dict[str, Average] = {}

    def __getitem__(self, name: str) -> Average:
        average = self._by_name.get(name)
        if average is None:
            average = self._by_name[name] = Average(name, self._device)
        return average

    def add(self, name: str, value: Tensor | float, weight: Tensor | float) -> None:
        """Count `value` `weight` times under `name`; the weight may be a scalar tensor. No host sync."""
        try:
            if isinstance(weight, Tensor):
                self[name].add_sum((self[name].scalar(value) if isinstance(value, Tensor) else value) * weight, weight)
            else:
                self[name].add(value, weight)
        except (TypeError, RuntimeError) as error:
            raise BatchError(
                f"metric `{name}` is {value!r:.80}, a {type(value).__name__}; a metric is one real number a batch: a "
                "float or a scalar tensor"
            ) from error

    def compute(self) -> dict[str, float]:
        """The means as numbers: one host sync, however many names."""
        counted = {name: average.mean() for name, average in self._by_name.items() if average.counted}
        return dict(zip(counted, torch.stack(list(counted.values())).tolist(), strict=True)) if counted else {}
