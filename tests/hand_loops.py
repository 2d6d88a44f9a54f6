"""Loops as careful users write them by hand, which the Trainer must equal bit for bit; and small models to run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Data = list[tuple[torch.Tensor, torch.Tensor]]


def make_model(*, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))


def make_data(num_batches: int, batch_size: int = 6, seed: int = 1) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(batch_size, 8, generator=generator), torch.randint(4, (batch_size,), generator=generator))
        for _ in range(num_batches)
    ]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: Callable[[list[nn.Parameter]], object] | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    losses: Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor]], torch.Tensor] = loss_of,
) -> None:
    """The recipe of the PyTorch documentation: accumulate, unscale, clip, step, update, schedule."""
    model.train()
    for _ in range(epochs):
        for start in range(0, len(data), accumulate):
            window = data[start : start + accumulate]
            optimizer.zero_grad(set_to_none=True)
            for batch in window:
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = losses(model, batch)
                if len(window) > 1:
                    loss = loss / len(window)
                (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            if clip:
                clip([p for p in model.parameters() if p.grad is not None])
            if scaler:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                taken = scaler.get_scale() >= before
            else:
                optimizer.step()
                taken = True
            if scheduler is not None and taken:
                scheduler.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), f"{name} differs by {(mine - theirs).abs().max().item():.3g}"
