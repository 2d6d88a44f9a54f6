"""The average equals the recurrence written by hand, serves evaluations, and leaves training as it was."""

from __future__ import annotations

import pytest
import torch
from small_training import make_data, make_model, make_trainer
from torch import nn

from safetrain.callbacks import EMA, Callback
from safetrain.errors import CheckpointError, ConfigError
from safetrain.stepping.deferred import DeferredFlag


class ByHand(Callback):
    """The recurrence, one tensor at a time, right after each step that was taken."""

    def __init__(self, decay: float, *, warmup: bool = False) -> None:
        self.decay, self.warmup, self.taken = decay, warmup, 0

    def on_fit_start(self, state):
        self.average = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        self.before = {name: p.detach().clone() for name, p in state.model.named_parameters()}

    def on_step_end(self, state):
        now = dict(state.model.named_parameters())
        if any(not torch.equal(now[name], value) for name, value in self.before.items()):
            self.taken += 1
            decay = min(self.decay, self.taken / (self.taken + 9)) if self.warmup else self.decay
            for name, average in self.average.items():
                average.lerp_(now[name].detach(), 1 - decay)
        self.before = {name: p.detach().clone() for name, p in now.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_average_equals_the_recurrence_bit_for_bit(fused, warmup):
    ema, by_hand = EMA(0.9, warmup=warmup), ByHand(0.9, warmup=warmup)
    make_trainer(ema, by_hand, fused=fused, max_steps=11, log_every=3).fit(make_data())
    assert ema.num_updates == by_hand.taken == 11
    assert_same(ema.weights(), by_hand.average)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.filterwarnings("ignore:step 3. the gradients:RuntimeWarning")
def test_skipped_steps_do_not_move_the_average(fused, log_every):
    ema, by_hand = EMA(0.9), ByHand(0.9)
    trainer = make_trainer(ema, by_hand, fused=fused, max_steps=9, log_every=log_every, eval_every=4)
    trainer.poison = (3, 4, 9)  # the last of an evaluation period and the last of the run among them
    trainer.fit(make_data(), make_data())
    assert trainer.state.skipped_steps == 3
    assert ema.num_updates == by_hand.taken == 6
    assert_same(ema.weights(), by_hand.average)


@pytest.mark.filterwarnings("ignore:step .. the gradients:RuntimeWarning")
def test_a_skip_that_is_known_one_step_late_does_not_move_the_average(monkeypatch):
    """As on CUDA, where the verdict of a fused step is read when the next one is about to be made."""
    ema, by_hand = EMA(0.9), ByHand(0.9)
    trainer = make_trainer(ema, by_hand, max_steps=8, log_every=100)
    trainer.poison = (2, 3, 6)
    monkeypatch.setattr(DeferredFlag, "waits", True)
    lag = []
    trainer.on_step = lambda step: lag.append(trainer.state.skipped_steps)
    trainer.fit(make_data())
    assert lag[2] == 0, "the skip of step 2 should not be known while step 3 runs its forward"
    assert ema.num_updates == 5
    assert_same(ema.weights(), by_hand.average)


@pytest.mark.parametrize("eval_context", ["no_grad", "inference_mode"])
def test_evaluation_sees_the_average_and_training_goes_on_as_if_there_were_none(eval_context):
    seen = []

    class Look(Callback):
        def on_eval_start(self, state):
            seen.append({name: p.detach().clone() for name, p in state.model.named_parameters()})

    ema, by_hand = EMA(0.8), ByHand(0.8)
    with_ema, without = make_model(), make_model()
    settings = {"max_steps": 11, "eval_every": 4, "eval_context": eval_context}
    make_trainer(ema, Look(), by_hand, model=with_ema, **settings).fit(make_data(), make_data())
    make_trainer(model=without, **settings).fit(make_data(), make_data())
    assert len(seen) == 3
    assert_same(seen[-1], by_hand.average)
    assert_same(with_ema.state_dict(), without.state_dict())


def test_weights_come_back_when_the_evaluation_fails():
    model = make_model()
    ema = EMA(0.5)
    trainer = make_trainer(ema, model=model, max_steps=8, eval_every=4)
    live = {}

    def fail(batch):
        live.update(averaged={n: p.detach().clone() for n, p in model.named_parameters()})
        raise RuntimeError("no such validation set")

    trainer.evaluation_step = fail
    with pytest.raises(RuntimeError, match="no such validation set"):
        trainer.fit(make_data(), make_data())
    assert_same(live["averaged"], ema.weights())
    reference = make_model()
    make_trainer(model=reference, max_steps=4).fit(make_data())
    assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_an_evaluation_after_the_run_uses_the_average_too():
    model, ema = make_model(), EMA(0.5)
    trainer = make_trainer(ema, model=model, max_steps=4)
    trainer.fit(make_data())
    of_average = trainer.evaluate(make_data())
    reference = make_model()
    reference.load_state_dict(model.state_dict())
    reference.load_state_dict(ema.weights(), strict=False)
    assert of_average == make_trainer(model=reference, max_steps=1).evaluate(make_data())


def test_the_average_can_be_put_into_the_model_for_a_while():
    model, ema = make_model(), EMA(0.5)
    make_trainer(ema, model=model, max_steps=4).fit(make_data())
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    with ema.in_model():
        assert_same(dict(model.named_parameters()), ema.weights())
    assert_same(dict(model.named_parameters()), own)


def test_a_resumed_average_ends_in_the_same_bits(tmp_path):
    whole = EMA(0.9, warmup=True)
    make_trainer(whole, max_steps=12).fit(make_data())

    first = make_trainer(EMA(0.9, warmup=True), max_steps=6, run_dir=tmp_path)
    first.fit(make_data())
    path = first.save(tmp_path / "checkpoints")
    second = EMA(0.9, warmup=True)
    make_trainer(second, max_steps=12, run_dir=tmp_path).fit(make_data(), resume=path)
    assert second.num_updates == 12
    assert_same(second.weights(), whole.weights())


def test_low_precision_weights_are_averaged_in_float32():
    """0.001 of a difference is below bfloat16's resolution: an average kept in it would never move."""
    model = nn.Linear(4, 3).to(torch.bfloat16)
    model.weight.data.fill_(1.0)
    ema = EMA(0.999)
    trainer = make_trainer(ema, model=model, max_steps=1)
    ema.on_fit_start(trainer.state)
    model.weight.data.fill_(1.5)
    for _ in range(10):
        ema.on_step_end(trainer.state)
        ema.on_backward_end(trainer.state)
    average = ema.weights()["weight"]
    assert average.dtype == torch.float32
    assert torch.allclose(average, torch.full((3, 4), 1.5 - 0.5 * 0.999**10))
    with ema.in_model():
        assert torch.equal(model.weight, average.to(torch.bfloat16))
    assert torch.equal(model.weight, torch.full((3, 4), 1.5, dtype=torch.bfloat16))


def test_frozen_weights_cost_nothing_and_join_when_they_are_unfrozen():
    model = make_model()
    model[0].requires_grad_(False)
    ema = EMA(0.5)

    class Unfreeze(Callback):
        def on_step_end(self, state):
            if state.step == 3:
                model[0].requires_grad_(True)

    make_trainer(Unfreeze(), ema, model=model, max_steps=2, log_every=1).fit(make_data())
    assert "0.weight" not in ema.weights()
    make_trainer(Unfreeze(), ema, model=model, max_steps=8, log_every=1).fit(make_data())
    assert "0.weight" in ema.weights()
    assert not torch.equal(ema.weights()["0.weight"], model[0].weight)


def test_the_average_holds_no_graph():
    ema = EMA(0.9)
    make_trainer(ema, max_steps=3).fit(make_data())
    assert all(not w.requires_grad and w.grad_fn is None for w in ema.weights().values())


def test_an_average_of_another_model_is_refused(tmp_path):
    ema = EMA(0.9)
    trainer = make_trainer(max_steps=1)
    ema.load_state_dict({"average": {"0.weight": torch.zeros(2, 2)}, "num_updates": 3})
    with pytest.raises(CheckpointError, match=r"`0.weight`, shape \[2, 2\].*has shape \[16, 8\]"):
        ema.on_fit_start(trainer.state)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 1.5])
def test_a_decay_outside_zero_and_one_is_refused(decay):
    with pytest.raises(ConfigError, match="decay"):
        EMA(decay)
