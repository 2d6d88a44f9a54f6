"""Activation checkpointing on CUDA: the same gradients, fewer bytes, budgets kept by the allocator's own record."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from safetrain import Callback, RunState, Trainer, activation_checkpoint
from safetrain.activation_checkpoint import CheckpointOptions


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.mix(attended.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.feed(self.norm2(x))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.1, depth: int = 8, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model(device: torch.device, dropout: float = 0.1) -> Model:
    torch.manual_seed(0)
    return Model(dropout).to(device)


def _gradients(model: nn.Module, device: torch.device, precision: torch.dtype | None) -> tuple[list[torch.Tensor], int]:
    """(gradients, bytes kept on the device between forward and backward)."""
    x = torch.randn(16, 256, 256, device=device)
    torch.manual_seed(1)
    with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
        before = torch.cuda.memory_allocated()
        loss = model(x).float().square().mean()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return [p.grad for p in model.parameters()], kept


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["recompute", "selective", "offload"])
def test_fewer_bytes_on_the_device_and_the_same_bits(cuda: torch.device, mode: str, precision: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = _model(cuda)
        model = copy.deepcopy(plain)
        activation_checkpoint.apply(model, CheckpointOptions(mode=mode))
        torch.manual_seed(2)
        expected, all_kept = _gradients(plain, cuda, precision)
        torch.manual_seed(2)
        actual, kept = _gradients(model, cuda, precision)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert kept < (0.8 if mode == "selective" else 0.5) * all_kept


def test_an_offloaded_value_is_that_of_the_forward_whatever_is_written_later(cuda: torch.device) -> None:
    class WritesOver(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y.sin()
            y.mul_(2)
            return z

    model = nn.Sequential(WritesOver())
    activation_checkpoint.set_mode(model[0], "offload")
    x = torch.randn(1 << 16, device=cuda, requires_grad=True)
    model(x).sum().backward()
    expected = x.detach().clone().requires_grad_()
    expected.exp().sin().sum().backward()
    assert torch.equal(x.grad, expected.grad)


class Fit(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch).square().mean()


class Peak(Callback):
    """The allocator's peak of the steps after the choice."""

    peak = 0

    def on_step_start(self, state: RunState) -> None:
        if state.step == 8:
            torch.cuda.reset_peak_memory_stats()

    def on_fit_end(self, state: RunState) -> None:
        type(self).peak = torch.cuda.max_memory_allocated()


def _peak(device: torch.device, checkpoint: Any) -> tuple[int, Trainer]:
    torch.cuda.empty_cache()
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    trainer = Fit(
        model, optimizer, max_steps=12, activation_checkpoint=checkpoint, callbacks=[Peak()], guards="off", seed=0
    )
    trainer.fit([torch.randn(16, 256, 256, generator=torch.Generator().manual_seed(1))] * 12)
    return Peak.peak, trainer


def test_budgets_are_kept_by_the_allocators_record(cuda: torch.device) -> None:
    most, least = _peak(cuda, None)[0], _peak(cuda, "blocks.*")[0]
    for share in (0.05, 0.5, 1.05):
        budget = int(least + share * (most - least))
        used, trainer = _peak(cuda, CheckpointOptions(mode="auto", budget=budget))
        assert used <= budget
        assert trainer.callbacks[0].is_settled
