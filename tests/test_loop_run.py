"""A run from start to end: when it stops, what it counts, what it survives, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from safetrain import BatchError, Callback, ConfigError, NonFiniteError, RunState, Trainer
from tests.hand_loops import assert_same_bits, loss_of, make_data, make_model


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Any:
        return loss_of(self.model, batch)


def trainer_of(trainer_type: type[Trainer] = Classifier, **options: Any) -> Trainer:
    model = options.pop("model", None) or make_model()
    options.setdefault("guards", "off")
    return trainer_type(model, torch.optim.SGD(model.parameters(), 0.1), **options)


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_steps": 7}, 7, 1),
        ({"max_epochs": 3}, 15, 3),
        ({"max_epochs": 2, "accumulate": 2}, 6, 2),
        ({"max_epochs": 2, "limit_batches": 3}, 6, 2),
        ({"max_epochs": 2, "limit_batches": 3, "accumulate": 2}, 4, 2),
        ({"max_epochs": 4, "overfit_batches": 2}, 8, 4),
        ({"max_steps": 100, "max_epochs": 1}, 5, 1),
        ({"max_steps": 10}, 10, 2),
    ],
)
def test_limits(options: dict[str, Any], steps: int, epochs: int) -> None:
    state = trainer_of(**options).fit(make_data(5))
    assert (state.step, state.epoch) == (steps, epochs)


def test_a_time_limit_ends_the_run_at_a_step() -> None:
    state = trainer_of(max_time=0.2).fit(make_data(5))
    assert state.step > 5


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps, max_epochs or max_time"):
        trainer_of().fit(make_data(1))


def test_a_listener_can_end_the_run() -> None:
    class Stops(Callback):
        def on_step_end(self, state: RunState) -> None:
            if state.step == 3:
                state.stop_reason = "seen enough"

    state = trainer_of(max_epochs=10, callbacks=[Stops()]).fit(make_data(5))
    assert state.step == 3
    assert state.stop_reason == "seen enough"


def test_fit_goes_on_where_the_last_fit_stopped() -> None:
    trainer = trainer_of(max_steps=3)
    trainer.fit(make_data(3))
    trainer.max_steps = 6
    trainer.fit(make_data(3))
    assert trainer.state.step == 6


def test_events_come_in_order() -> None:
    events: list[str] = []

    class Records(Callback):
        pass

    for hook in (
        "fit_start",
        "step_start",
        "backward_start",
        "backward_end",
        "step_end",
        "log",
        "eval_start",
        "eval_end",
        "fit_end",
    ):
        setattr(Records, f"on_{hook}", lambda self, state, hook=hook: events.append(hook))
    trainer_of(max_epochs=1, accumulate=2, callbacks=[Records()]).fit(make_data(2), make_data(1))
    step = ["step_start", "backward_start", "backward_start", "backward_end", "step_end", "log"]
    assert events == ["fit_start", *step, "eval_start", "eval_end", "log", "fit_end"]


def test_the_order_of_listeners_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class First(Callback):
        pass

    class Second(Callback):
        pass

    with caplog.at_level(logging.INFO, "safetrain"):
        trainer_of(max_steps=1, callbacks=[First(), Second()]).fit(make_data(1))
    assert "First, Second" in caplog.text


def test_a_misspelt_hook_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean `on_step_end`"):

        class Wrong(Callback):
            def on_step_ended(self, state: RunState) -> None: ...


def test_the_row_of_a_logging_step_holds_numbers() -> None:
    rows: dict[int, dict[str, float]] = {}

    class Keeps(Callback):
        def on_log(self, state: RunState) -> None:
            rows[state.step] = dict(state.row)

    class Logs(Classifier):
        def training_step(self, batch: Any) -> Any:
            self.log("size", len(batch[1]))
            return loss_of(self.model, batch), {"half": 0.5}

    data = make_data(3) + make_data(1, batch_size=2)
    trainer_of(Logs, max_epochs=1, accumulate=2, log_every=2, callbacks=[Keeps()]).fit(data)
    assert sorted(rows) == [1, 2]
    assert set(rows[2]) == {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/skipped_steps",
        "train/size",
        "train/half",
    }
    assert rows[2]["train/size"] == pytest.approx((6 * 6 + 2 * 2) / 8)
    assert rows[2]["train/half"] == 0.5
    assert all(type(value) is float for value in rows[2].values())


def test_an_attached_metric_is_detached_and_reported_to_listeners() -> None:
    names: set[str] = set()

    class Keeps(Callback):
        def on_step_end(self, state: RunState) -> None:
            names.update(state.attached_metrics)

    class Attaches(Classifier):
        def training_step(self, batch: Any) -> Any:
            loss = loss_of(self.model, batch)
            return loss, {"loss_again": loss, "clean": loss.detach()}

    trainer_of(Attaches, max_steps=3, callbacks=[Keeps()]).fit(make_data(3))
    assert names == {"loss_again"}


def test_nothing_of_a_step_outlives_it() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Keeps(Classifier):
        def training_step(self, batch: Any) -> Any:
            logits = self.model(batch[0])
            kept.append(weakref.ref(logits))
            return nn.functional.cross_entropy(logits, batch[1])

    gc.disable()
    try:
        trainer = trainer_of(Keeps, max_steps=4)
        trainer.fit(make_data(4))
        assert [ref() for ref in kept] == [None] * 4
        assert trainer.state.batch is None
    finally:
        gc.enable()


def test_outputs_are_gone_before_backward_runs() -> None:
    alive: list[bool] = []

    class Looks(Classifier):
        def training_step(self, batch: Any) -> Any:
            logits = self.model(batch[0])
            self.ref = weakref.ref(logits)
            return logits.exp().mean()

        def backward(self, loss: Tensor, **options: Any) -> None:
            alive.append(self.ref() is not None)
            super().backward(loss, **options)

    trainer_of(Looks, max_steps=2).fit(make_data(2))
    assert alive == [False, False]


def test_a_run_dir_that_cannot_be_made_is_refused_before_the_first_step(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("not a folder")
    trainer = trainer_of(max_steps=1, run_dir=tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="the Trainer cannot write to"):
        trainer.fit(make_data(1))
    assert trainer.state.step == 0


def test_batches_may_come_from_a_function() -> None:
    trainer = trainer_of(max_epochs=2, overfit_batches=2)
    trainer.fit(lambda: iter(make_data(5)), lambda: iter(make_data(2)))
    assert trainer.state.step == 4


def test_a_failed_step_leaves_no_gradient_behind() -> None:
    class FailsOnce(Classifier):
        failed = False

        def training_step(self, batch: Any) -> Any:
            if self.state.micro_step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("the user's own error")
            return loss_of(self.model, batch)

    seen: list[str] = []

    class Watches(Callback):
        def on_exception(self, state: RunState) -> None:
            seen.append(f"{state.current_step}: {state.exception}")
            assert state.replay is not None
            assert state.replay().requires_grad

        def on_fit_end(self, state: RunState) -> None:
            seen.append("end")

    trainer = trainer_of(FailsOnce, max_steps=4, accumulate=2, callbacks=[Watches()])
    with pytest.raises(RuntimeError, match="the user's own error"):
        trainer.fit(make_data(8))
    assert seen == ["2: the user's own error", "end"]
    assert trainer.state.exception is None
    assert trainer.state.replay is None
    trainer.fit(make_data(8)[2:])
    hand = trainer_of(max_steps=4, accumulate=2)
    hand.fit(make_data(8))
    assert_same_bits(trainer.model, hand.model)


def test_nonfinite_gradients_raise_when_asked_and_never_reach_the_weights() -> None:
    data = make_data(3)
    data[1] = (data[1][0] * float("inf"), data[1][1])
    trainer = trainer_of(max_epochs=1, nonfinite="raise")
    with pytest.raises(NonFiniteError, match="step 2: the gradients of optimizer `main`"):
        trainer.fit(data)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


class TwoParts(Trainer):
    """Each part has an optimizer of its own; in step 2 the first part's loss is spoilt."""

    def training_step(self, batch: Any) -> Tensor:
        first = loss_of(self.model["first"], batch)
        if self.state.current_step == 2:
            first = first * float("nan")
        return first + loss_of(self.model["second"], batch)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_that_share_a_clipped_norm_are_skipped_together(precision: Any, fused: bool) -> None:
    """The norm of all is NaN and would scale the finite gradients of the second part to NaN as well."""
    model = nn.ModuleDict({"first": make_model(), "second": make_model()})
    optimizers = {name: torch.optim.SGD(part.parameters(), 0.1, fused=fused) for name, part in model.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if precision == "fp16" else None
    before: dict[str, Tensor] = {}

    class Remember(Callback):
        def on_step_start(self, state: RunState) -> None:
            before.update({name: p.detach().clone() for name, p in model.named_parameters()})

    trainer = TwoParts(
        model, optimizers, precision=precision, scaler=scaler, clip_norm=1.0, max_steps=2, guards="off",
        callbacks=[Remember()],
    )  # fmt: skip
    tells = pytest.warns(RuntimeWarning, match="steps together with it") if scaler is None else contextlib.nullcontext()
    with tells:
        trainer.fit(make_data(1))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_lbfgs_gets_its_weights_back_when_the_closure_is_not_finite() -> None:
    model = make_model()
    data = make_data(3)
    data[1] = (data[1][0] * float("nan"), data[1][1])
    trainer = Classifier(model, torch.optim.LBFGS(model.parameters()), max_epochs=1, guards="off")
    with pytest.warns(RuntimeWarning, match="step 2"):
        trainer.fit(data)
    assert all(p.isfinite().all() for p in model.parameters())
    assert trainer.state.skipped_steps == 1


def test_the_seed_repeats_a_run_and_global_generators_are_what_it_sets() -> None:
    def run(seed: int | None) -> nn.Module:
        torch.manual_seed(torch.seed() % 1000)
        trainer = trainer_of(model=make_model(dropout=0.5), max_epochs=1, seed=seed)
        torch.rand(3)
        trainer.fit(make_data(3))
        return trainer.model

    assert_same_bits(run(4), run(4))
    with pytest.raises(AssertionError):
        assert_same_bits(run(4), run(5))


def test_deterministic_is_put_back() -> None:
    during: list[bool] = []

    class Looks(Classifier):
        def training_step(self, batch: Any) -> Any:
            during.append(torch.are_deterministic_algorithms_enabled())
            return loss_of(self.model, batch)

    trainer_of(Looks, max_steps=1, deterministic=True).fit(make_data(1))
    assert during == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_modules_set_to_eval_on_purpose_stay_so() -> None:
    model = make_model(dropout=0.5)
    model[2].eval()
    trainer_of(model=model, max_steps=1).fit(make_data(1))
    assert not model[2].training
    model.eval()
    trainer_of(model=model, max_steps=1).fit(make_data(1))
    assert model.training
    assert model[2].training


def test_a_batch_may_be_a_packed_sequence() -> None:
    class Recurrent(Trainer):
        def training_step(self, batch: Any) -> Any:
            return self.model(batch[0])[1].pow(2).mean()

    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    model = nn.GRU(3, 4)
    trainer = Recurrent(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=2)
    trainer.fit([(packed, torch.zeros(2))] * 2)
    assert trainer.state.step == 2


def test_a_model_that_sets_its_modes_itself_is_asked_to() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[2].eval()
            return self

    model = Frozen(*make_model(dropout=0.5))
    trainer_of(model=model, max_steps=1).fit(make_data(1))
    assert model.training and not model[2].training


def test_a_dry_run_tries_everything_and_changes_nothing(tmp_path: Any) -> None:
    class Saves(Callback):
        def __init__(self) -> None:
            self.saved: list[str] = []

        def on_step_end(self, state: RunState) -> None:
            state.save_request = "dry"

        def on_checkpoint_saved(self, state: RunState) -> None:
            self.saved.append(str(state.checkpoint_path))

    model = make_model(dropout=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    saves = Saves()
    trainer = Classifier(model, optimizer, max_epochs=1, run_dir=tmp_path / "run", guards="off", callbacks=[saves])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    numbers = trainer.dry_run(make_data(4), make_data(2))
    assert set(numbers) == {"train/loss", "val/loss"}
    assert len(saves.saved) == 1
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert not optimizer.state
    assert (trainer.state.step, trainer.max_epochs) == (0, 1)


Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "a batch"


@pytest.mark.parametrize(
    ("shape", "unpack"),
    [
        (lambda x, y: {"x": x, "more": [y]}, lambda b: (b["x"], b["more"][0])),
        (lambda x, y: Pair(x, y), lambda b: (b.x, b.y)),
        (lambda x, y: Record(x, y), lambda b: (b.x, b.y)),
        (lambda x, y: ("id", {"pair": (x, y)}), lambda b: b[1]["pair"]),
    ],
    ids=["dict", "namedtuple", "dataclass", "nested"],
)
def test_batches_may_have_any_structure(shape: Any, unpack: Any) -> None:
    class AnyShape(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return loss_of(self.model, unpack(batch))

    data = make_data(4) + make_data(1, batch_size=2)
    ours = trainer_of(AnyShape, max_epochs=1, accumulate=5)
    ours.fit([shape(x, y) for x, y in data])
    plain = trainer_of(max_epochs=1, accumulate=5)
    plain.fit(data)
    assert_same_bits(ours.model, plain.model)
    assert ours.state.num_samples == 26


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda model, b: None, "returned None"),
        (lambda model, b: 0.5, "returned a float"),
        (lambda model, b: (1, 2, 3), "returned a tuple of 3"),
        (lambda model, b: model(b[0]), r"has shape \(6, 4\)"),
        (lambda model, b: model(b[0]).detach().mean(), "carries no graph"),
    ],
    ids=["none", "float", "tuple", "matrix", "no_graph"],
)
def test_a_step_must_return_a_loss(returned: Any, message: str) -> None:
    class Wrong(Trainer):
        def training_step(self, batch: Any) -> Any:
            return returned(self.model, batch)

    with pytest.raises(BatchError, match=message):
        trainer_of(Wrong, max_steps=1).fit(make_data(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
        ({"nonfinite": "raise", "check_finite": False}, "needs check_finite"),
        ({"eval_context": "grad"}, "eval_context='grad'"),
        ({"overfit_batches": -1}, "overfit_batches=-1"),
        ({"accumulate": 1.5}, "accumulate=1.5, a float; it is a whole number"),
        ({"max_steps": "10"}, "max_steps='10', a str; it is a whole number"),
        ({"clip_norm": "1"}, "clip_norm='1', a str; it is a number"),
        ({"seed": "a"}, "seed='a'"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"activation_checkpoint": True}, "activation_checkpoint=True; name the modules"),
        ({"callbacks": Callback()}, "give a list"),
        ({"guards": {"G101": "eror"}}, "G101 is 'eror'; it is one of ignore"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(**{"max_steps": 1, **options})


def test_optimizers_and_schedules_must_belong_together() -> None:
    model = make_model()
    optimizer, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ConfigError, match="built for another optimizer"):
        Classifier(model, optimizer, schedule, max_steps=1, guards="off")
    with pytest.raises(ConfigError, match="names `critic`"):
        Classifier(model, optimizer, {"critic": schedule}, max_steps=1, guards="off")
    with pytest.raises(ConfigError, match="the scheduler of `main` is a function"):
        Classifier(model, optimizer, lambda step: 0.5, max_steps=1, guards="off")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the Trainer needs"):
        Classifier(model, model.parameters(), max_steps=1, guards="off")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="which does not go with"):
        Classifier(model, torch.optim.LBFGS(model.parameters()), precision="fp16", max_steps=1, guards="off")
    trainer = Classifier(model, optimizer, max_steps=1, guards="off")
    with pytest.raises(ConfigError, match="no optimizer `critic`; the Trainer has 'main'"):
        trainer.optimizer_step("critic")
