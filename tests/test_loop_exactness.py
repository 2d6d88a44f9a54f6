"""A window's gradient is that of one large batch, whatever the split: short tails, ragged tokens, unequal batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from safetrain import BatchError, StepOutput, Trainer

VOCABULARY, PADDING = 11, -100


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, VOCABULARY)).double()


def ragged_batches(sizes: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences of 12 tokens of which between one and twelve count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        x = torch.randint(VOCABULARY, (size, 12), generator=generator)
        y = torch.randint(VOCABULARY, (size, 12), generator=generator)
        lengths = torch.randint(1, 13, (size,), generator=generator)
        y[torch.arange(12) >= lengths[:, None]] = PADDING
        batches.append((x, y))
    return batches


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (y != PADDING).sum()


class TokenTrainer(Trainer):
    weight_as_number = False

    def training_step(self, batch: Any) -> StepOutput:
        loss, count = summed(self.model, batch)
        return StepOutput(loss, int(count) if self.weight_as_number else count)


class MeanTrainer(Trainer):
    """A mean over samples, whose batches differ in size."""

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x)[:, 0], y[:, 0].clamp(min=0))


class KeepsGradients:
    """An SGD that remembers the gradients it was given, window by window."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.seen: list[list[torch.Tensor]] = []
        self.optimizer.register_step_pre_hook(
            lambda opt, *_: self.seen.append([p.grad.clone() for p in opt.param_groups[0]["params"]])
        )


def gradients_of(trainer_type: type[Trainer], batches: list[Any], accumulate: int, **attributes: Any) -> Any:
    model = language_model()
    keeper = KeepsGradients(model)
    trainer = trainer_type(model, keeper.optimizer, accumulate=accumulate, max_epochs=1, guards="off")
    vars(trainer).update(attributes)
    trainer.fit(batches)
    return keeper.seen, trainer


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 10, 16])
@pytest.mark.parametrize("as_number", [False, True])
def test_ragged_tokens_with_a_short_tail(accumulate: int, as_number: bool) -> None:
    batches = ragged_batches([4, 1, 3, 4, 2, 4, 4, 1, 4, 3])
    seen, _ = gradients_of(TokenTrainer, batches, accumulate, weight_as_number=as_number)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window, got in zip(range(0, 10, accumulate), seen, strict=True):
        large = tuple(torch.cat(part) for part in zip(*batches[window : window + accumulate], strict=True))
        optimizer.zero_grad()
        loss, count = summed(model, large)
        (loss / count).backward()
        for want, have in zip(model.parameters(), got, strict=True):
            torch.testing.assert_close(have, want.grad, rtol=0, atol=1e-12)
        optimizer.step()


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4, 4], [5, 1, 3, 2, 7], [1, 9]])
@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_unequal_sample_counts_with_mean_losses(sizes: list[int], accumulate: int) -> None:
    batches = ragged_batches(sizes)
    seen, _ = gradients_of(MeanTrainer, batches, accumulate)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start, got in zip(range(0, len(sizes), accumulate), seen, strict=True):
        x, y = (torch.cat(part) for part in zip(*batches[start : start + accumulate], strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x)[:, 0], y[:, 0].clamp(min=0)).backward()
        for want, have in zip(model.parameters(), got, strict=True):
            torch.testing.assert_close(have, want.grad, rtol=0, atol=1e-12)
        optimizer.step()


def test_every_split_of_the_same_samples_gives_the_same_gradient() -> None:
    x, y = ragged_batches([12])[0]
    results = []
    for cut in ([12], [6, 6], [1, 11], [3, 4, 5], [1] * 12):
        batches = list(zip(x.split(cut), y.split(cut), strict=True))
        seen, trainer = gradients_of(TokenTrainer, batches, len(cut))
        results.append([*seen[0], trainer.state.loss])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_micro_batch_without_any_token_counts_for_nothing() -> None:
    batches = ragged_batches([2, 2])
    empty = (batches[0][0], torch.full_like(batches[0][1], PADDING))
    with_empty, _ = gradients_of(TokenTrainer, [empty, batches[1]], 2)
    without, _ = gradients_of(TokenTrainer, [batches[1]], 1)
    for a, b in zip(with_empty[0], without[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_weight_with_a_graph_or_a_dimension_counts_like_a_plain_one() -> None:
    class Attached(TokenTrainer):
        def training_step(self, batch: Any) -> StepOutput:
            loss, count = summed(self.model, batch)
            return StepOutput(loss, (count + 0 * next(self.model.parameters()).sum()).reshape(1))

    batches = ragged_batches([3, 1, 2])
    for accumulate in (1, 3):
        attached, plain = (gradients_of(kind, batches, accumulate)[0] for kind in (Attached, TokenTrainer))
        for a, b in zip(attached[0], plain[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_window_without_any_token_is_skipped_and_told() -> None:
    x, y = ragged_batches([2])[0]
    model = language_model()
    before = [p.clone() for p in model.parameters()]
    trainer = TokenTrainer(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=2, max_epochs=1, guards="off")
    empty = (x, torch.full_like(y, PADDING))
    with pytest.warns(RuntimeWarning, match="skipped"):
        trainer.fit([empty, empty])
    assert trainer.state.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_mixing_mean_losses_and_step_outputs_in_a_window_is_refused() -> None:
    class Mixed(TokenTrainer):
        def training_step(self, batch: Any) -> Any:
            output = super().training_step(batch)
            return output if self.state.micro_step % 2 else output.loss_sum / output.weight

    with pytest.raises(BatchError, match="StepOutput for some micro-batches"):
        gradients_of(Mixed, ragged_batches([2, 2]), 2)


def test_gradients_there_before_a_ragged_window_are_refused() -> None:
    """Correcting the weights at the end would scale them too."""

    class Early(TokenTrainer):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            self.backward(self.model(window[0][0]).square().mean())
            self.forward_backward(window)
            self.optimizer_step()

    with pytest.raises(BatchError, match="before it began"):
        gradients_of(Early, ragged_batches([2, 2]), 2)
