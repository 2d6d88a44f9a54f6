"""Learning-rate schedules that torch.optim.lr_scheduler lacks."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupCosine(LRScheduler):
    """Linear from 0 over `warmup_steps` to the optimizer's rate, then half a cosine down to `final_factor` times it.

    `warmup_steps` below 1 is a share of `total_steps`, which stays right where a run is made shorter or longer.
    The first of the warm-up steps already moves: it runs at 1/warmup_steps of the rate. After `total_steps` the rate
    stays where it is. The rate depends on the step alone, so a resumed run continues on the same curve.

    Raises:
        ValueError: `total_steps` is not larger than `warmup_steps`, or a number is out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: float = 0,
        final_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if 0 < warmup_steps < 1:
            warmup_steps = int(warmup_steps * total_steps)
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps ({warmup_steps}) must be at least 0 and below total_steps ({total_steps}), or a share "
                "of them below 1"
            )
        if not 0 <= final_factor <= 1:
            raise ValueError(f"final_factor ({final_factor}) must lie between 0 and 1")
        self.total_steps, self.warmup_steps, self.final_factor = total_steps, warmup_steps, final_factor
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Rate of each group for the coming step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, step: int) -> float:
        """What the optimizer's rate is multiplied with after `step` finished steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.final_factor + (1 - self.final_factor) * 0.5 * (1 + math.cos(math.pi * done))
