"""L507: checkpoints that are too small or too large to save memory are told; whole blocks are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import safetrain
from safetrain import Trainer
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.findings import Finding
from safetrain.rules.loop.granularity import RegionCost, find_checkpoint_granularity

WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class ByHand(Net):
    """Calls `torch.utils.checkpoint` itself."""

    how = "blocks"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "whole":
            x = checkpoint(self.blocks, x, use_reentrant=False)
        for block in self.blocks if self.how != "whole" else ():
            if self.how == "norms":
                normed = checkpoint(block.norm, x, use_reentrant=False)
                x = x + block.down(block.act(block.up(normed)))
            else:
                x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Fit(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch).square().mean()


def _found(model: nn.Module, *, rows: int = 512, steps: int = 6, **settings: Any) -> list[Finding]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    trainer = Fit(model, optimizer, max_steps=steps, **settings)
    trainer.fit([torch.randn(rows, WIDTH) for _ in range(steps)])
    return [finding for finding in trainer.report.findings if finding.code == "L507"]


@pytest.mark.parametrize("pattern", ["blocks.*.norm", "blocks.*.act", ["blocks.*.up", "blocks.*.down"]])
def test_checkpointed_layers_that_keep_all_they_leave_out_are_told(pattern: Any) -> None:
    torch.manual_seed(0)
    (finding,) = _found(Net(), activation_checkpoint=pattern)  # one for each class of modules
    first = pattern if isinstance(pattern, str) else pattern[0]
    assert finding.module == first.replace("*", "0")
    assert f"{4 if first is pattern else 8} calls a step" in finding.message
    assert "blocks.*" in finding.fix
    assert finding.source is None  # a setting is to blame, no line
    assert (finding.first_step, finding.severity) == (3, "warning")
    assert torch.utils.checkpoint._checkpoint_hook.__name__ == "_checkpoint_hook"


@pytest.mark.parametrize(
    "setting",
    ["blocks.*", CheckpointOptions(every=2), CheckpointOptions(mode="selective"), "blocks.1", None],
    ids=["blocks", "every second", "selective", "one block", "none"],
)
@pytest.mark.parametrize("rows", [8, 1024])
def test_whole_blocks_are_a_sensible_grain_at_any_size(setting: Any, rows: int) -> None:
    torch.manual_seed(0)
    assert _found(Net(), rows=rows, activation_checkpoint=setting) == []


def test_the_model_as_one_piece_comes_back_all_at_once() -> None:
    torch.manual_seed(0)
    (finding,) = _found(Net(), rows=2048, activation_checkpoint="blocks")
    assert finding.module == "blocks"
    assert "back before backward has freed anything" in finding.message
    assert "one by one" in finding.fix


def test_accumulation_is_judged_by_its_micro_batches() -> None:
    torch.manual_seed(0)
    model = Net()
    assert _found(model, rows=512, steps=6, accumulate=2, limit_batches=6) == []
    trainer = Fit(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        max_steps=6,
        accumulate=2,
        activation_checkpoint="blocks.*.norm",
    )
    trainer.fit([torch.randn(512, WIDTH) for _ in range(12)])
    assert [f.module for f in trainer.report.findings if f.code == "L507"] == ["blocks.0.norm"]


@pytest.mark.parametrize(
    ("how", "text"), [("norms", "checkpoint(block.norm"), ("whole", "checkpoint(self.blocks"), ("blocks", None)]
)
def test_a_loop_of_ones_own_is_told_the_line(how: str, text: str | None) -> None:
    torch.manual_seed(0)
    model = ByHand()
    model.how = how
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with safetrain.watch(model, optimizer) as watching:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2048, WIDTH)).square().mean().backward()
            optimizer.step()
            watching.step()
    found = [f for f in watching.findings if f.code == "L507"]
    assert [text in f.source.text for f in found] == ([True] if text else [])


def _cost(**changes: Any) -> RegionCost:
    sensible = {
        "names": ("blocks.0",), "kind": "Block", "source": None, "num_calls": 1, "seconds": 0.01, "time_share": 0.25,
        "left_out": 10_000_000, "kept": 1_000_000, "kept_only": 0, "lowers_peak": 8_000_000,
    }  # fmt: skip
    return RegionCost(**{**sensible, **changes})


def test_what_is_weighed_against_what() -> None:
    sensible = [
        _cost(),
        _cost(left_out=0, time_share=0.004),  # for nothing, and nobody notices
        _cost(left_out=900_000, kept_only=0),  # a GELU before a product: its input is needed anyway
        _cost(left_out=900_000, kept_only=1_000_000, time_share=0.02),
        _cost(lowers_peak=None),  # no meter to tell
        _cost(lowers_peak=0, left_out=500_000, kept=10_000),  # too small for a meter
    ]
    assert find_checkpoint_granularity(sensible) == []
    for bad in (
        _cost(left_out=0, time_share=0.01),
        _cost(left_out=900_000, kept_only=1_000_000, time_share=0.05),
        _cost(lowers_peak=100_000),
    ):
        assert len(find_checkpoint_granularity([bad])) == 1
    assert len(find_checkpoint_granularity([_cost(left_out=0, time_share=0.003)] * 2)) == 2  # together they count
