"""The Trainer's parameters equal those of a loop written by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from safetrain import Trainer
from tests.hand_loops import assert_same_bits, loss_of, make_data, make_model, train_by_hand


class Classifier(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        return loss_of(self.model, batch)


def trained(optimizer_of: Any, data: Any, *, epochs: int = 1, scheduler_of: Any = None, **options: Any) -> Trainer:
    model = make_model(dropout=options.pop("dropout", 0.0))
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    trainer = Classifier(model, optimizer, scheduler, max_epochs=epochs, guards="off", **options)
    torch.manual_seed(7)
    trainer.fit(data)
    return trainer


def by_hand(
    optimizer_of: Any, data: Any, *, scheduler_of: Any = None, dropout: float = 0.0, **options: Any
) -> nn.Module:
    model = make_model(dropout=dropout)
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    torch.manual_seed(7)
    train_by_hand(model, optimizer, data, scheduler=scheduler, **options)
    return model


def test_sparse_gradients() -> None:
    words = torch.randint(10, (6, 5), generator=torch.Generator().manual_seed(0))  # with repeats

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    class Squares(Trainer):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(batch).square().mean()

    (ours, optimizer), (hand, by_hand_optimizer) = parts(), parts()
    trainer = Squares(ours, optimizer, max_epochs=1, guards="off", log_every=1)
    trainer.fit(list(words))
    for word in words:
        by_hand_optimizer.zero_grad()
        hand(word).square().mean().backward()
        norm = hand.weight.grad.to_dense().norm()
        by_hand_optimizer.step()
    assert_same_bits(ours, hand)
    assert trainer.state.grad_norm is not None
    torch.testing.assert_close(trainer.state.grad_norm, norm)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_training_equals_the_hand_loop(name: str) -> None:
    data = make_data(7)
    ours = trained(OPTIMIZERS[name], data, epochs=3, dropout=0.3)
    assert_same_bits(ours.model, by_hand(OPTIMIZERS[name], data, epochs=3, dropout=0.3))


@pytest.mark.parametrize("accumulate", [2, 3, 4, 7, 10])
def test_accumulation_with_equal_batches_equals_dividing_by_the_window(accumulate: int) -> None:
    data = make_data(10)
    ours = trained(OPTIMIZERS["sgd"], data, epochs=2, accumulate=accumulate, dropout=0.2)
    assert_same_bits(ours.model, by_hand(OPTIMIZERS["sgd"], data, epochs=2, accumulate=accumulate, dropout=0.2))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_clipping_by_norm(norm_type: float) -> None:
    data = make_data(6)
    ours = trained(OPTIMIZERS["adamw"], data, clip_norm=0.05, clip_norm_type=norm_type)
    hand = by_hand(OPTIMIZERS["adamw"], data, clip=lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, norm_type))
    assert_same_bits(ours.model, hand)


def test_clipping_by_value() -> None:
    data = make_data(6)
    ours = trained(OPTIMIZERS["sgd"], data, clip_value=0.01)
    assert_same_bits(ours.model, by_hand(OPTIMIZERS["sgd"], data, clip=lambda ps: nn.utils.clip_grad_value_(ps, 0.01)))


def test_clipping_each_group_by_its_own_norm() -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.05}], lr=0.1
        )

    data = make_data(6)
    hand = make_model()
    ours = make_model()
    Classifier(ours, two_groups(ours), max_epochs=1, clip_norm=0.02, clip_per_group=True, guards="off").fit(data)

    def clip(_: Any) -> None:
        for part in (hand[0], hand[3]):
            nn.utils.clip_grad_norm_(part.parameters(), 0.02)

    train_by_hand(hand, two_groups(hand), data, clip=clip)
    assert_same_bits(ours, hand)


def test_bf16_autocast() -> None:
    data = make_data(6)
    ours = trained(OPTIMIZERS["adamw"], data, precision="bf16", accumulate=2, clip_norm=1.0)
    hand = by_hand(
        OPTIMIZERS["adamw"],
        data,
        autocast=torch.bfloat16,
        accumulate=2,
        clip=lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
    )
    assert_same_bits(ours.model, hand)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
def test_fp16_with_forced_overflows_skips_what_the_hand_loop_skips(optimizer: str) -> None:
    data = make_data(14)
    for index in (1, 2, 6):  # these overflow under any useful scale
        data[index] = (data[index][0] * 3e4, data[index][1])
    options = {"init_scale": 2.0**14, "growth_interval": 3}
    schedule = lambda o: lr_scheduler.StepLR(o, 2, 0.5)  # noqa: E731
    scaler = torch.amp.GradScaler("cpu", **options)
    ours = trained(
        OPTIMIZERS[optimizer], data, precision="fp16", clip_norm=1.0, scheduler_of=schedule, scaler=scaler, accumulate=1
    )
    hand_scaler = torch.amp.GradScaler("cpu", **options)
    hand = by_hand(
        OPTIMIZERS[optimizer],
        data,
        autocast=torch.float16,
        scaler=hand_scaler,
        scheduler_of=schedule,
        clip=lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
    )
    assert ours.state.skipped_steps >= 1
    assert hand_scaler.state_dict() == scaler.state_dict()
    assert_same_bits(ours.model, hand)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.filterwarnings("ignore:step 1:RuntimeWarning")
def test_a_first_step_that_is_skipped_leaves_no_momentum_behind(precision: str) -> None:
    fused = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)  # noqa: E731
    data = make_data(6)
    bad = (data[0][0] * 1e9, data[0][1])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if precision == "fp16" else None
    options = {"precision": precision, "scaler": scaler, "deterministic": True}  # which fills fresh memory with NaN
    if precision == "fp32":
        bad[0].fill_(float("nan"))
    ours = trained(fused, [bad, *data], **options)
    assert ours.state.skipped_steps == 1
    assert_same_bits(ours.model, trained(fused, data, **options).model)


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: min(1.0, (i + 1) / 4)),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=30),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's own, from SequentialLR
def test_schedules_advance_once_a_step(name: str) -> None:
    data = make_data(9)
    ours = trained(OPTIMIZERS["sgd"], data, epochs=2, scheduler_of=SCHEDULES[name])
    assert_same_bits(ours.model, by_hand(OPTIMIZERS["sgd"], data, epochs=2, scheduler_of=SCHEDULES[name]))


def test_a_schedule_by_epoch_and_one_by_plateau() -> None:
    data, val = make_data(5), make_data(3, seed=9)
    ours = make_model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    trainer = Classifier(
        ours, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), schedule_every="epoch", max_epochs=3, guards="off"
    )
    trainer.fit(data)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)

    hand = make_model()
    hand_optimizer = torch.optim.SGD(hand.parameters(), lr=3.0)
    plateau = lr_scheduler.ReduceLROnPlateau(hand_optimizer, patience=0, factor=0.1)
    for _ in range(3):
        train_by_hand(hand, hand_optimizer, data)
        with torch.no_grad():
            sizes = [len(y) for _, y in val]
            mean = sum(loss_of(hand, b).item() * n for b, n in zip(val, sizes, strict=True)) / sum(sizes)
        plateau.step(mean)
    ours = make_model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=3.0)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    Classifier(ours, optimizer, schedule, max_epochs=3, guards="off").fit(data, val)
    assert optimizer.param_groups[0]["lr"] == hand_optimizer.param_groups[0]["lr"]
    assert_same_bits(ours, hand)


def test_lbfgs_closures() -> None:
    data = make_data(4, batch_size=20)
    ours, hand = make_model(), make_model()
    trainer = Classifier(ours, torch.optim.LBFGS(ours.parameters(), lr=0.5, max_iter=5), max_epochs=2, guards="off")
    trainer.fit(data)
    optimizer = torch.optim.LBFGS(hand.parameters(), lr=0.5, max_iter=5)
    for _ in range(2):
        for batch in data:

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(hand, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same_bits(ours, hand)


class Adversarial(Trainer):
    """Two optimizers, one step each per window."""

    def train_step(self, window: Any) -> None:
        (real,) = window
        generator, critic = self.model["generator"], self.model["critic"]
        fake = generator(real[:, :2])
        self.zero_grad("critic")
        self.backward(critic(fake.detach()).mean() - critic(real).mean())
        self.optimizer_step("critic")
        self.zero_grad("generator")
        self.backward(-critic(fake).mean())
        self.optimizer_step("generator")


def test_two_optimizers_stepped_in_turn() -> None:
    def parts() -> tuple[nn.ModuleDict, dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)})
        return model, {name: torch.optim.Adam(model[name].parameters(), lr=0.01) for name in model}

    torch.manual_seed(3)
    data = [torch.randn(5, 3) for _ in range(8)]
    ours, optimizers = parts()
    trainer = Adversarial(ours, optimizers, max_epochs=1, guards="off")
    trainer.fit(data)
    hand, (g, c) = (model := parts())[0], model[1].values()
    for real in data:
        fake = hand["generator"](real[:, :2])
        c.zero_grad()
        (hand["critic"](fake.detach()).mean() - hand["critic"](real).mean()).backward()
        c.step()
        g.zero_grad()
        (-hand["critic"](fake).mean()).backward()
        g.step()
    assert_same_bits(ours, hand)
    assert trainer.state.step == 8


class GradientPenalty(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return loss_of(self.model, batch) + (slope.norm(dim=1) - 1).square().mean()


def test_gradient_penalty_differentiates_through_the_gradient() -> None:
    ours, hand = make_model(), make_model()
    GradientPenalty(ours, torch.optim.SGD(ours.parameters(), 0.1), max_epochs=1, guards="off").fit(make_data(5))

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss_of(model, batch) + (slope.norm(dim=1) - 1).square().mean()

    train_by_hand(hand, torch.optim.SGD(hand.parameters(), 0.1), make_data(5), losses=losses)
    assert_same_bits(ours, hand)


def test_activation_checkpointing_changes_no_bit() -> None:
    data = make_data(6)
    ours = trained(OPTIMIZERS["adamw"], data, dropout=0.4, activation_checkpoint=["0", "2"], accumulate=2)
    assert_same_bits(ours.model, by_hand(OPTIMIZERS["adamw"], data, dropout=0.4, accumulate=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while the compiler is imported
def test_compiled_training_stays_within_tolerance_and_keeps_its_names() -> None:
    data = make_data(6)
    ours = trained(OPTIMIZERS["sgd"], data, compile=True)
    hand = by_hand(OPTIMIZERS["sgd"], data)
    assert list(ours.model.state_dict()) == list(hand.state_dict())
    for mine, theirs in zip(ours.model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_log_softmax_sum_loss_equals_functional_mean() -> None:
    """A StepOutput with one micro-batch is the sum divided by its weight, nothing else."""
    from safetrain import StepOutput

    class Summed(Trainer):
        def training_step(self, batch: Any) -> StepOutput:
            x, y = batch
            return StepOutput(F.cross_entropy(self.model(x), y, reduction="sum"), len(y))

    ours, hand = make_model(), make_model()
    Summed(ours, torch.optim.SGD(ours.parameters(), 0.1), max_epochs=1, guards="off").fit(make_data(5))

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[1])

    train_by_hand(hand, torch.optim.SGD(hand.parameters(), 0.1), make_data(5), losses=losses)
    assert_same_bits(ours, hand)
