"""Evaluation leaves training as it found it, and averages what it saw by samples."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain import BatchError, Callback, RunState, StepOutput, Trainer
from tests.hand_loops import loss_of, make_data, make_model


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Any:
        return loss_of(self.model, batch)

    def evaluation_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.model(x)
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean(), "size": len(y)}


def trainer_of(trainer_type: type[Trainer] = Classifier, model: nn.Module | None = None, **options: Any) -> Trainer:
    model = model or make_model(dropout=0.5)
    return trainer_type(model, torch.optim.SGD(model.parameters(), 0.1), max_epochs=2, guards="off", **options)


def unequal_batches() -> list[tuple[Tensor, Tensor]]:
    return [batch for size in (6, 6, 1, 3) for batch in make_data(1, batch_size=size, seed=size)]


def test_metrics_are_averaged_by_samples() -> None:
    trainer = trainer_of()
    got = trainer.evaluate(unequal_batches())
    trainer.model.eval()
    x, y = (torch.cat(part) for part in zip(*unequal_batches(), strict=True))
    with torch.no_grad():
        logits = trainer.model(x)
    assert got["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)
    assert got["accuracy"] == pytest.approx((logits.argmax(1) == y).float().mean().item())
    assert got["size"] == pytest.approx((36 + 36 + 1 + 9) / 16)


def test_a_step_output_is_averaged_by_its_weight() -> None:
    class Tokens(Classifier):
        def evaluation_step(self, batch: Any) -> StepOutput:
            x, y = batch
            kept = y != 0
            return StepOutput(F.cross_entropy(self.model(x)[kept], y[kept], reduction="sum"), kept.sum())

    trainer = trainer_of(Tokens)
    got = trainer.evaluate(unequal_batches())["loss"]
    x, y = (torch.cat(part) for part in zip(*unequal_batches(), strict=True))
    trainer.model.eval()
    with torch.no_grad():
        assert got == pytest.approx(F.cross_entropy(trainer.model(x)[y != 0], y[y != 0]).item(), rel=1e-6)


def test_many_batches_are_averaged_as_exactly_as_few() -> None:
    class Constant(Classifier):
        def evaluation_step(self, batch: Any) -> Tensor:
            return batch.double().mean().float()

    values = torch.rand(1000)
    got = trainer_of(Constant).evaluate(list(values.split(1)))["loss"]
    assert got == pytest.approx(values.double().mean().item(), abs=1e-6)


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_no_graph_is_built_and_grad_mode_comes_back(context: str) -> None:
    seen: list[bool] = []

    class Looks(Classifier):
        def evaluation_step(self, batch: Any) -> Tensor:
            loss = loss_of(self.model, batch)
            seen.append(loss.requires_grad or torch.is_grad_enabled() or self.model.training)
            return loss

    trainer_of(Looks, eval_context=context).evaluate(make_data(3))
    assert seen == [False] * 3
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_each_submodule_gets_its_own_mode_back_even_after_an_error() -> None:
    model = make_model(dropout=0.5)
    model[2].eval()  # a dropout switched off on purpose
    trainer = trainer_of(model=model)
    modes = [m.training for m in model.modules()]
    trainer.evaluate(make_data(2))
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError):
        trainer.evaluate([(torch.randn(3, 99), torch.zeros(3, dtype=torch.long))])
    assert [m.training for m in model.modules()] == modes
    assert trainer.state.phase != "eval"


class Merged(nn.Linear):
    """Adds a correction of low rank, which `train(False)` merges into the weight, as LoRA layers do."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.down, self.up = nn.Parameter(torch.randn(1, num_in)), nn.Parameter(torch.randn(num_out, 1))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.is_merged is mode:
            self.weight.data += (self.up @ self.down).detach() * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_merged else super().forward(x) + x @ self.down.T @ self.up.T


def test_a_module_that_changes_with_its_mode_is_told_of_it() -> None:
    layer = Merged(6, 4)
    trainer = trainer_of(model=nn.Sequential(nn.Linear(8, 6), layer, nn.Dropout()))
    trainer.model[2].eval()
    before = layer.weight.detach().clone()
    trainer.evaluate(make_data(2))
    assert layer.training and not layer.is_merged and not trainer.model[2].training
    assert torch.allclose(layer.weight, before, atol=1e-6)


def test_training_is_the_same_with_and_without_evaluation() -> None:
    def weights(val: Any, **options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        trainer = trainer_of(**options)
        data = [(x, y) for x, y in make_data(6)]
        torch.manual_seed(5)
        trainer.fit(
            DataLoader(TensorDataset(*map(torch.cat, zip(*data, strict=True))), batch_size=4, shuffle=True), val
        )
        return [p.detach().clone() for p in trainer.model.parameters()]

    class Noisy(list):
        def __iter__(self) -> Any:
            torch.rand(3), random.random()
            return super().__iter__()

    plain = weights(None)
    for options in ({}, {"eval_every": 1}, {"eval_context": "inference_mode", "eval_every": 2}):
        assert all(torch.equal(a, b) for a, b in zip(plain, weights(Noisy(make_data(3)), **options), strict=True))


def test_gradients_are_gone_while_evaluation_runs() -> None:
    held: list[int] = []

    class Looks(Classifier):
        def evaluation_step(self, batch: Any) -> Tensor:
            held.append(sum(p.grad is not None for p in self.model.parameters()))
            return loss_of(self.model, batch)

    trainer_of(Looks).fit(make_data(3), make_data(2))
    assert held == [0] * 4


def test_evaluation_rows_are_logged_with_their_step() -> None:
    rows: list[tuple[int, dict[str, float]]] = []

    class Keeps(Callback):
        def on_log(self, state: RunState) -> None:
            if "val/loss" in state.row:
                rows.append((state.step, dict(state.row)))

    trainer_of(callbacks=[Keeps()], eval_every=2).fit(make_data(5), make_data(2))
    assert [step for step, _ in rows] == [2, 4, 6, 8, 10]
    assert set(rows[0][1]) == {"val/loss", "val/accuracy", "val/size"}


def test_the_end_of_a_run_is_evaluated_once() -> None:
    steps: list[int] = []

    class Counts(Callback):
        def on_eval_end(self, state: RunState) -> None:
            steps.append(state.step)

    trainer_of(callbacks=[Counts()], eval_every=4).fit(make_data(5), make_data(2))
    assert steps == [4, 8, 10]


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(BatchError, match="gave no batch"):
        trainer_of().evaluate([])


def test_an_evaluation_without_any_number_is_refused() -> None:
    class Forgetful(Classifier):
        def evaluation_step(self, batch: Any) -> Any:
            loss_of(self.model, batch)

    with pytest.raises(BatchError, match="is a `return` missing"):
        trainer_of(Forgetful).evaluate(make_data(1))


def test_a_listener_that_fails_at_the_start_of_an_evaluation_leaves_the_phase_as_it_was() -> None:
    class Fails(Callback):
        def on_eval_start(self, state: RunState) -> None:
            raise RuntimeError("no room")

    trainer = trainer_of(callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="no room"):
        trainer.fit(make_data(2), make_data(1))
    assert trainer.state.phase == "train"
    assert all(module.training for module in trainer.model.modules())


def test_a_metric_that_is_no_scalar_is_named() -> None:
    class Vector(Classifier):
        def evaluation_step(self, batch: Any) -> Any:
            return {"per_class": torch.zeros(4)}

    with pytest.raises(BatchError, match="`per_class` has shape"):
        trainer_of(Vector).evaluate(make_data(1))


def test_predictions_come_in_order_without_graphs() -> None:
    trainer = trainer_of()
    outputs = trainer.predict([x for x, _ in make_data(3)])
    assert [tuple(o.shape) for o in outputs] == [(6, 4)] * 3
    assert not any(o.requires_grad for o in outputs)
    assert trainer.model.training


def test_limit_eval_batches() -> None:
    assert trainer_of(limit_eval_batches=1).evaluate(unequal_batches())["size"] == 6


def test_a_to_device_of_the_users_is_used_by_training_and_evaluation() -> None:
    class Moved(Classifier):
        moved = 0

        def to_device(self, batch: Any) -> Any:
            self.moved += 1
            return batch

    trainer = trainer_of(Moved)
    assert isinstance(trainer, Moved)
    trainer.evaluate(make_data(3))
    assert trainer.moved == 3
    trainer.fit(make_data(2))
    assert trainer.moved == 7
