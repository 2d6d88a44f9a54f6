"""A classifier on 64 made-up samples, small enough to train in milliseconds: what the callback tests listen to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain.callbacks import Callback
from safetrain.loop import Trainer


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))


def make_data(batch_size: int = 16, samples: int = 64) -> DataLoader[Any]:
    """Four batches an epoch, in order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch_size)


class SmallTrainer(Trainer):
    """Cross entropy and accuracy; `poison` lists steps whose loss is turned to NaN."""

    poison: Sequence[int] = ()
    on_step: Callable[[int], None] = staticmethod(lambda step: None)

    def training_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        if self.state.phase == "train":
            self.on_step(self.state.current_step)
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        if self.state.phase == "train" and self.state.current_step in self.poison:
            loss = loss * float("nan")
        return loss, {"accuracy": (logits.argmax(1) == y).float().mean()}


def make_trainer(
    *callbacks: Callback, model: nn.Module | None = None, fused: bool = True, **settings: Any
) -> SmallTrainer:
    """A trainer of `model` with AdamW."""
    model = model if model is not None else make_model()
    settings.setdefault("guards", "off")
    settings.setdefault("seed", 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return SmallTrainer(model, optimizer, callbacks=callbacks, **settings)
