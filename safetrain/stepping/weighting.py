"""What a step may return, and how a window of micro-batches is weighed to give exactly one large batch's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from safetrain.errors import BatchError

Metrics = Mapping[str, "Tensor | float"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step returns when its loss is not a mean over samples (tokens, pixels, pairs).

    `loss_sum`: scalar, the sum over what counts. `weight`: how many, a number or a scalar tensor (no sync).
    A window's gradient is that of sum(loss_sum) / sum(weight), whatever the split into micro-batches.
    `metrics` are means over the same weight.
    """

    loss_sum: Tensor
    weight: Tensor | float
    metrics: Metrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.loss_sum, Tensor):
            raise BatchError(f"StepOutput: loss_sum is {_described(self.loss_sum)}; it is the loss, a scalar tensor")
        weight: Any = self.weight  # from users who run no type checker
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise BatchError(
                    f"StepOutput: weight has shape {tuple(weight.shape)}; it is one number, how many items loss_sum "
                    "adds up: such as `mask.sum()`"
                )
            if weight.ndim or weight.requires_grad:  # a count is no function of the weights
                object.__setattr__(self, "weight", weight.detach().reshape(()))
        elif not isinstance(weight, Real) or weight < 0:
            raise BatchError(
                f"StepOutput: weight={weight!r}; it is how many items loss_sum adds up, a number or a scalar tensor"
            )


class Shares:
    """Splits a window's gradient exactly: each micro-batch counts by its samples, or by its `StepOutput.weight`."""

    __slots__ = ("_reference", "_total", "_weights", "num_samples", "sizes")

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.num_samples = sum(sizes)
        self._total: Tensor | None = None  # of the shares handed out, detached
        self._weights: Tensor | float | None = None
        self._reference: Tensor | float = 1.0

    def share_of(
        self, loss: Tensor, weight: Tensor | float | None, index: int, gradients: Callable[[], list[Tensor]]
    ) -> Tensor:
        """What to differentiate for micro-batch `index`."""
        if index and (weight is None) != (self._weights is None):
            raise BatchError(
                "training_step returned a StepOutput for some micro-batches of a window and a mean loss for others"
            )
        if weight is not None:
            loss = self._share_of_sum(loss, weight, gradients)
        elif len(self.sizes) > 1:
            if not self.sizes[index]:
                raise BatchError(f"micro-batch {index} of the window has no samples, so it has no mean loss")
            loss = loss / (self.num_samples / self.sizes[index])  # so that k equal ones are divided by exactly k
        detached = loss.detach()
        self._total = detached if self._total is None else self._total + detached
        return loss

    def _share_of_sum(self, loss: Tensor, weight: Tensor | float, gradients: Callable[[], list[Tensor]]) -> Tensor:
        """The weights to come are unknown: divide by a guess now, and `finish` corrects the gradients once."""
        several = len(self.sizes) > 1
        if several and isinstance(weight, Tensor):
            weight = weight.to(torch.promote_types(loss.dtype, torch.float32))  # counts would divide in float32
        if self._weights is None:
            if several and gradients():
                raise BatchError(
                    "forward_backward over several StepOutputs corrects the gradients at its end, but some were there "
                    "before it began; call it before any other backward of the step"
                )
            self._weights = weight
            self._reference = (weight + (weight == 0)) * len(self.sizes) if several else weight
        else:
            self._weights = self._weights + weight
        return loss / self._reference

    def finish(self, gradients: Callable[[], list[Tensor]]) -> Tensor:
        """Correct the gradients where weights were guessed; the window's mean loss, detached."""
        assert self._total is not None
        if self._weights is None or len(self.sizes) == 1:
            return self._total
        nothing_counted = not isinstance(self._weights, Tensor) and self._weights == 0
        factor = math.nan if nothing_counted else self._reference / self._weights
        with torch.no_grad():
            torch._foreach_mul_(gradients(), factor)
        return self._total * factor


def unpack(output: Any) -> tuple[Tensor, Tensor | float | None, Metrics | None]:
    """(loss, weight or None for a mean loss, metrics or None) of what a step returned."""
    if isinstance(output, Tensor):
        return output, None, None
    if isinstance(output, StepOutput):
        return output.loss_sum, output.weight, output.metrics
    if (
        isinstance(output, tuple)
        and len(output) == 2
        and isinstance(output[0], Tensor)
        and isinstance(output[1], Mapping)
    ):
        return output[0], None, output[1]
    raise BatchError(
        f"a step returned {_described(output)}; return the loss as a tensor, `(loss, metrics)` or a StepOutput"
    )


def _described(value: Any) -> str:
    if value is None:
        return "None (is a `return` missing?)"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")


def check_loss(loss: Tensor, step: int) -> None:
    """Say what is wrong with a loss that cannot be differentiated."""
    where = f"step {step}: the loss"
    if loss.numel() != 1:
        raise BatchError(
            f"{where} has shape {tuple(loss.shape)}, but a loss is one number: return `loss.mean()`, or "
            "StepOutput(loss.sum(), loss.numel()) (torch: grad can be implicitly created only for scalar outputs)"
        )
    if not loss.requires_grad:
        raise BatchError(
            f"{where} carries no graph, so nothing would be trained: it was computed without gradients, or its path "
            "was cut by detach, item, argmax or a no_grad block (torch: element 0 of tensors does not require grad and "
            "does not have a grad_fn)"
        )
