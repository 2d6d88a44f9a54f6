"""Steps that are skipped on the device: who can, and the flag that says so, which the host need not read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def not_finite(norm: Tensor) -> Tensor:
    """1.0 where `norm` is Inf or NaN, else 0.0, on the device: times zero they are NaN, which differs from zero."""
    return torch.ne(norm * 0, 0).to(torch.float32)


def skips_on_device(opt: Optimizer) -> bool:
    """Its kernel leaves the weights alone where the device says so; the host need not know."""
    return getattr(opt, "_step_supports_amp_scaling", False)


def skip_together(scaler: torch.amp.GradScaler, optimizers: Collection[Optimizer], norm: Tensor) -> None:
    """Have the scaler skip all of several when their common norm is not finite, without reading it."""
    if len(optimizers) < 2:
        return
    flag = not_finite(norm)
    for opt in optimizers:
        for device, found in scaler._found_inf_per_device(opt).items():
            found.copy_(torch.maximum(found, flag.to(device)))  # fused kernels compare it with exactly 1


def found_inf(scaler: torch.amp.GradScaler, opt: Optimizer) -> Tensor:
    """What `unscale_` found, on the device: non-zero when a gradient was Inf or NaN."""
    found: dict[Any, Tensor] = scaler._found_inf_per_device(opt)
    return torch.stack(list(found.values())).sum() if len(found) > 1 else next(iter(found.values()))
