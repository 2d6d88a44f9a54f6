"""Within a budget: the run fits it, trains the same bits, and says so when it cannot."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from safetrain import Callback, RunState, Trainer
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.activation_checkpoint.auto import AutoCheckpoint
from safetrain.activation_checkpoint.budget import Option, Span, fastest, keep, peak, selective
from safetrain.activation_checkpoint.peaks import StretchPeaks
from safetrain.errors import ConfigError
from safetrain.memory import HeapMeter

WIDTH, BATCH = 64, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Fit(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(batch).square().mean()


class Peaks(Callback):
    """The highest bytes that each of the last steps added to what was there when it began."""

    def __init__(self, first: int) -> None:
        self.first, self.added = first, [0]

    def on_step_start(self, state: RunState) -> None:
        if state.current_step >= self.first:
            state.model.zero_grad()
            meter = HeapMeter(slow_ns=10**9)
            self._start = meter.read()
            self._peaks = StretchPeaks(None, meter)
            self._peaks.start()

    def on_step_end(self, state: RunState) -> None:
        if state.step >= self.first:
            self.added.append(self._peaks.take() - self._start)
            self._peaks.stop()


def _trained(checkpoint: Any, *, steps: int = 9, accumulate: int = 1, first: int = 8) -> tuple[Trainer, int]:
    """(trainer, bytes that the training takes at its peak): parameters, optimizer state, and what a step adds."""
    torch.manual_seed(0)
    model = Net()
    peaks = Peaks(first)
    trainer = Fit(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
        max_steps=steps,
        accumulate=accumulate,
        activation_checkpoint=checkpoint,
        callbacks=[peaks],
        guards="off",
    )
    generator = torch.Generator().manual_seed(1)
    trainer.fit([torch.randn(BATCH, WIDTH, generator=generator) for _ in range(steps * accumulate)])
    own = 3 * sum(p.nbytes for p in model.parameters())
    return trainer, own + BATCH * WIDTH * 4 + max(peaks.added)


def _auto(budget: int) -> CheckpointOptions:
    return CheckpointOptions(mode="auto", budget=budget)


def _settled(trainer: Trainer) -> AutoCheckpoint:
    listener = trainer.callbacks[0]
    assert isinstance(listener, AutoCheckpoint)
    assert listener.is_settled
    return listener


def test_five_budgets_from_the_least_to_the_most_are_kept_and_used() -> None:
    reference, most = _trained(None)
    _, least = _trained("blocks.*")
    kept = []
    for share in (0.02, 0.3, 0.55, 0.8, 1.05):
        budget = int(least + share * (most - least))
        trainer, used = _trained(_auto(budget))
        assert used <= budget
        modes = list(_settled(trainer).modes.values())
        kept.append(modes.count("keep") + 0.5 * modes.count("selective"))
        for expected, actual in zip(reference.model.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(expected, actual)
    assert kept == sorted(kept)
    assert kept[-1] == 6  # with room for everything nothing recomputes
    assert kept[-2] >= 3


def test_a_budget_below_what_recomputing_everything_takes_names_the_least_peak() -> None:
    _, least = _trained("blocks.*")
    with pytest.raises(ConfigError, match=r"budget: .* cannot be kept: step 4 took .* with all 6 modules recomputing"):
        _trained(_auto(int(0.9 * least)))


def test_accumulation_counts_every_micro_batch() -> None:
    _, least = _trained("blocks.*", accumulate=2)
    _, most = _trained(None, accumulate=2)
    budget = (least + most) // 2
    trainer, used = _trained(_auto(budget), accumulate=2)
    assert used <= budget
    assert "keep" in _settled(trainer).modes.values()


def test_nothing_goes_on_watching_after_a_run_that_ends_early_or_fails() -> None:
    trainer, _ = _trained(_auto(10**9), steps=3)
    assert set(trainer.callbacks[0].modes.values()) == {"recompute"}
    assert torch.utils.checkpoint._checkpoint_hook.__name__ == "_checkpoint_hook"
    broken = copy.deepcopy(trainer.model)

    class Fails(Fit):
        def training_step(self, batch: Any) -> torch.Tensor:
            if self.state.step == 3:
                raise ValueError("stop")
            return super().training_step(batch)

    failing = Fails(broken, torch.optim.SGD(broken.parameters(), 0.1), max_steps=5, activation_checkpoint=_auto(10**9))
    with pytest.raises(ValueError, match="stop"):
        failing.fit([torch.randn(4, WIDTH) for _ in range(5)])
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.utils.checkpoint._checkpoint_hook.__name__ == "_checkpoint_hook"


# ---- the choice by itself --------------------------------------------------------------------------------------------


def _chain(num_blocks: int, sizes: list[int], seconds: list[float]) -> tuple[np.ndarray, list[Option]]:
    """A chain of blocks: forwards, the loss, then (recomputation, backward) of each from the last to the first."""
    num = num_blocks + 1 + 2 * num_blocks
    peaks = np.full(num, 100)
    options = []
    for i in range(num_blocks):
        back = num_blocks + 1 + 2 * (num_blocks - 1 - i)
        peaks[back : back + 2] += sizes[i]
        span = Span(i, back, back + 1, back + 2)
        options.append(keep(f"b{i}", seconds[i], [(span, sizes[i], sizes[i])], num))
        options.append(selective(f"b{i}", 0.7 * seconds[i], [(span, 0.4 * sizes[i], 0)], num))
    return peaks, options


def _best(peaks: np.ndarray, options: list[Option], budget: float) -> float:
    """Every combination, tried."""
    blocks = sorted({option.block for option in options})
    combinations: list[list[Option]] = [[]]
    for block in blocks:
        mine = [o for o in options if o.block == block]
        combinations = [[*c, *([o] if o else [])] for c in combinations for o in (None, *mine)]
    return max(sum(o.seconds for o in c) for c in combinations if peak(peaks, c) <= budget)


def test_the_last_block_of_a_chain_is_free_to_keep() -> None:
    """Its recomputation brings everything back when all else is still there, so it never lowers the peak."""
    peaks, options = _chain(4, [50] * 4, [1.0] * 4)
    assert {name: option.choice for name, option in fastest(peaks, options, 150).items()} == {"b3": "keep"}


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_fits_and_is_near_the_best_of_all_combinations(seed: int) -> None:
    draw = np.random.default_rng(seed)
    peaks, options = _chain(5, draw.integers(10, 100, 5).tolist(), draw.uniform(0.5, 2.0, 5).tolist())
    for budget in np.linspace(peaks.max(), peaks.max() + 300, 7):
        chosen = fastest(peaks, options, budget)
        assert peak(peaks, chosen.values()) <= budget
        assert sum(o.seconds for o in chosen.values()) >= 0.85 * _best(peaks, options, budget)


def test_a_selective_option_that_saves_no_time_is_never_taken() -> None:
    peaks, options = _chain(3, [50] * 3, [1.0] * 3)
    slow = [Option(o.block, o.choice, -0.1, o.extra) if o.choice == "selective" else o for o in options]
    assert {o.choice for o in fastest(peaks, slow, 10_000).values()} == {"keep"}
