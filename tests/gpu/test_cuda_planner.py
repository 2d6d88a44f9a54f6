"""Forecasts against what the CUDA allocator counted, and the refusal of what the device has no room for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import BudgetError, Trainer
from safetrain.planner import forecast
from safetrain.planner.faking import make_mode


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


def make(device: torch.device, **settings: Any) -> Trainer:
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(2048, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=settings.pop("fused", True))
    return Classifier(model, optimizer, device=device, max_steps=3, guards="off", **settings)


def batch(size: int = 8192) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2048), torch.randint(10, (size,))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fused": False},
        {"precision": "bf16"},
        {"activation_checkpoint": ["0", "1", "2", "3", "4", "5"]},
        {"micro_batch_size": 2048, "clip_norm": 1.0},
    ],
)
def test_the_forecast_is_what_the_allocator_counts(cuda: torch.device, settings: dict[str, Any]) -> None:
    """Workspaces that libraries keep are there from a first run, and counted before the second."""
    make(cuda, **settings).fit([batch()] * 3)
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    trainer = make(cuda, **settings)
    predicted = forecast(trainer, [batch()], make_mode()).peak_bytes
    torch.cuda.reset_peak_memory_stats(cuda)
    trainer.fit([batch()] * 3)
    assert predicted == pytest.approx(torch.cuda.max_memory_allocated(cuda) - before, rel=0.04)


def test_forecasting_allocates_nothing(cuda: torch.device) -> None:
    trainer = make(cuda)
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    forecast(trainer, [batch()], make_mode())
    assert torch.cuda.max_memory_allocated(cuda) - before < 10_000


def test_what_the_device_has_no_room_for_is_refused(cuda: torch.device) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    rows = 2 * total // (2048 * 4 * 6)  # twice the device in activations
    x = torch.zeros(1, 2048).expand(int(rows), 2048)
    with pytest.raises(BudgetError, match="micro_batch_size"):
        make(cuda, memory_budget="auto").fit([(x, torch.zeros(int(rows), dtype=torch.long))] * 3)
    assert make(cuda, memory_budget="auto").fit([batch()] * 3).step == 3
