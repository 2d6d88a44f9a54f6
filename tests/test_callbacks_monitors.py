"""Learning rates, memory and early stopping; and no listener makes the host wait between rows."""

from __future__ import annotations

import io
import math
import warnings

import pytest
import torch
from small_training import SmallTrainer, make_data, make_model, make_trainer
from torch import nn
from torch.profiler import ProfilerActivity, profile

import safetrain.callbacks as callbacks
from safetrain.callbacks import EMA, Callback, EarlyStopping, LrMonitor, MemoryMonitor
from safetrain.callbacks.monitor import BestValue
from safetrain.errors import ConfigError
from safetrain.state import RunState


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, state):
        self.rows.append({"step": state.step, **state.row})


def test_the_rate_in_the_row_is_the_one_that_the_step_used():
    rows = Rows()
    model = make_model()
    trainer = make_trainer(LrMonitor(momentum=True), rows, model=model, max_steps=4, log_every=1)
    optimizer = trainer.state.optimizers["main"]
    trainer.state.schedulers["main"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer.fit(make_data())
    assert [row["lr/main"] for row in rows.rows] == [0.01, 0.005, 0.0025, 0.00125]
    assert [row["lr/main"] for row in rows.rows] == [row["train/lr"] for row in rows.rows]
    assert rows.rows[0]["momentum/main"] == 0.9


def test_each_group_and_each_optimizer_has_its_own_line():
    rows = Rows()
    model = make_model()
    trainer = make_trainer(LrMonitor(), rows, model=model, max_steps=1)
    groups = [
        {"params": [model[0].weight], "lr": torch.tensor(0.25)},
        {"params": [model[0].bias], "lr": 0.5, "name": "bias"},
    ]
    trainer.state.optimizers.clear()
    trainer.state.optimizers["a"] = torch.optim.AdamW(groups)
    trainer.state.optimizers["b"] = torch.optim.SGD(model[4].parameters(), lr=0.125)
    monitor = trainer.callbacks[0]
    trainer.state.is_logging_step = True
    monitor.on_backward_end(trainer.state)
    groups_now = trainer.state.optimizers["a"].param_groups
    groups_now[0]["lr"].mul_(0.5)  # what a scheduler does to a rate kept as a tensor
    trainer.state.row = {}
    monitor.on_log(trainer.state)
    assert trainer.state.row == {"lr/a/0": 0.25, "lr/a/bias": 0.5, "lr/b": 0.125}


def test_memory_is_read_at_each_phase_and_the_graph_shows():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 50_000), nn.Linear(50_000, 3)

        def forward(self, x):
            return self.down(self.up(x).relu())

    rows = Rows()
    make_trainer(MemoryMonitor(), rows, model=Wide(), max_epochs=1, log_every=2, fused=False).fit(
        make_data(), make_data()
    )
    row = rows.rows[2]
    weights_mb = (8 * 50_000 + 50_000 + 50_000 * 3 + 3) * 4 / 1e6
    assert row["step"] == 4
    # 16 samples x 50,000 features x 4 bytes, kept after the relu; the gradients of the last step are gone.
    graph_mb = 16 * 50_000 * 4 / 1e6
    assert row["memory/after_forward_mb"] - row["memory/start_mb"] == pytest.approx(graph_mb - weights_mb, abs=0.5)
    assert row["memory/after_backward_mb"] - row["memory/start_mb"] == pytest.approx(0, abs=0.5)
    assert row["memory/after_step_mb"] == pytest.approx(row["memory/after_backward_mb"], abs=0.5)
    assert row["memory/peak_mb"] >= max(
        v for k, v in row.items() if k.endswith("_mb") and "res" not in k and "peak" not in k
    )
    evaluation = rows.rows[-1]
    assert "val/loss" in evaluation
    assert row["memory/after_step_mb"] - evaluation["memory/evaluation_mb"] == pytest.approx(weights_mb, abs=0.5)
    assert "memory/start_mb" not in evaluation


def test_the_bytes_after_forward_have_owners():
    rows = Rows()
    model = nn.Sequential(nn.Linear(8, 20_000), nn.BatchNorm1d(20_000), nn.Linear(20_000, 3))
    make_trainer(MemoryMonitor(), rows, model=model, max_steps=4, log_every=2, accumulate=2).fit(make_data())
    owned = {key.split("/")[-1]: value for key, value in rows.rows[-1].items() if "by_owner" in key}
    weights_mb = sum(p.nbytes for p in model.parameters()) / 1e6
    assert owned["parameters_mb"] == pytest.approx(weights_mb)
    assert owned["optimizer_state_mb"] == pytest.approx(2 * weights_mb, rel=1e-3)
    assert owned["buffers_mb"] == pytest.approx(2 * 20_000 * 4 / 1e6, rel=1e-3)
    assert owned["gradients_mb"] == pytest.approx(weights_mb)  # of the first of two micro-batches
    # Both outputs are kept for backward: 16 samples x 20,000 features x 4 bytes each.
    assert owned["activations_mb"] == pytest.approx(2 * 16 * 20_000 * 4 / 1e6, rel=0.2)


def test_growth_is_shown_as_a_slope():
    rows, kept = Rows(), []
    trainer = make_trainer(MemoryMonitor(), rows, max_steps=60, log_every=4)
    trainer.on_step = lambda step: kept.append(torch.zeros(10_000))
    trainer.fit(make_data())
    assert "memory/growth_kb_per_step" not in rows.rows[5]
    assert rows.rows[-1]["memory/growth_kb_per_step"] == pytest.approx(40, rel=0.2)
    assert 0 <= rows.rows[-1]["memory/fragmentation"] < 1


def test_a_summary_of_the_allocator_needs_cuda(tmp_path):
    with pytest.raises(ConfigError, match="summary_every=0 must be at least 1"):
        MemoryMonitor(summary_every=0)
    trainer = make_trainer(MemoryMonitor(summary_every=5), max_steps=1, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"what CUDA's allocator says, and this run is on cpu; remove it, or"):
        trainer.fit(make_data())


def test_memory_is_not_read_between_rows():
    class Counting:
        name, calls = "counting", 0

        def read(self) -> int:
            self.calls += 1
            return self.calls

        def peak(self) -> int | None:
            return None

        def reserved(self) -> int | None:
            return None

    meter, rows = Counting(), Rows()
    make_trainer(MemoryMonitor(meter), rows, max_steps=10, log_every=5).fit(make_data())
    assert meter.calls == 3 * 4
    assert rows.rows[-1]["memory/after_step_mb"] == 12 / 1e6


def run_with_losses(values, *listeners, **settings):
    """A run whose evaluations give `values`."""
    values = iter(values)
    current = [0.0]

    class Next(Callback):
        def on_eval_start(self, state):
            current[0] = next(values)

    trainer = make_trainer(Next(), *listeners, max_epochs=9, **settings)
    trainer.evaluation_step = lambda batch: {"loss": torch.tensor(current[0]), "accuracy": torch.tensor(current[0])}
    return trainer


@pytest.mark.parametrize(
    ("values", "options", "stops_after"),
    [
        ([3, 2, 1, 1.5, 1.2, 1.1, 0, 0, 0], {"patience": 3}, 6),
        ([3, 2, 1, 1.5, 0.9, 1.5, 1.5, 1.5, 0], {"patience": 3}, 8),
        ([3, 2.99, 2.98, 2.97, 0, 0, 0, 0, 0], {"patience": 2, "min_delta": 0.1}, 3),
        ([1, 2, 3, 2, 2, 9, 9, 9, 9], {"monitor": "accuracy", "patience": 2}, 5),
        ([1, 2, 3, 2, 2, 9, 9, 9, 9], {"monitor": "val/accuracy", "mode": "max", "patience": 2}, 5),
        ([math.nan, math.nan, 1, 1, 1, 1, 1, 1, 1], {"patience": 2}, 2),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], {"patience": 1}, 9),
    ],
)
def test_early_stopping_stops_when_nothing_gets_better(values, options, stops_after):
    state = run_with_losses(values, EarlyStopping(**options)).fit(make_data(), make_data())
    assert state.epoch == stops_after
    assert (state.stop_reason is None) == (stops_after == 9)


def test_early_stopping_counts_on_after_a_resume(tmp_path):
    values = [3, 2, 2, 2, 2, 2, 2, 2, 2]
    first = run_with_losses(values, EarlyStopping(patience=3), run_dir=tmp_path)
    first.max_epochs = 3
    first.fit(make_data(), make_data())
    path = first.save(tmp_path / "checkpoints")
    second = run_with_losses(values[3:], EarlyStopping(patience=3), run_dir=tmp_path)
    assert second.fit(make_data(), make_data(), resume=path).epoch == 5


def test_an_evaluation_after_the_run_neither_stops_nor_saves_nor_is_compared(tmp_path):
    stopping, saving = EarlyStopping(patience=1), callbacks.Saving(monitor="loss")
    trainer = make_trainer(stopping, saving, max_epochs=1, run_dir=tmp_path)
    trainer.fit(make_data(), make_data())
    before = stopping.state_dict(), saving.state_dict()
    trainer.evaluation_step = lambda batch: {"error_on_the_test_set": torch.tensor(0.0)}
    assert trainer.evaluate(make_data()) == {"error_on_the_test_set": 0.0}
    assert (stopping.state_dict(), saving.state_dict()) == before
    assert trainer.state.save_request is None


def test_early_stopping_without_an_evaluation_says_that_it_could_not_act():
    with pytest.warns(UserWarning, match="EarlyStopping never saw an evaluation"):
        make_trainer(EarlyStopping(), max_steps=2).fit(make_data())


def test_a_monitor_that_does_not_exist_names_those_that_do():
    with pytest.raises(ConfigError, match=r"EarlyStopping: monitor 'val/f1'.*: accuracy, loss"):
        make_trainer(EarlyStopping("val/f1", mode="max"), max_epochs=1).fit(make_data(), make_data())
    with pytest.raises(ConfigError, match="patience=0"):
        EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match="min_delta=-1"):
        EarlyStopping(min_delta=-1)
    with pytest.raises(ConfigError, match="'bleu' does not tell"):
        EarlyStopping("bleu")


def test_early_stopping_does_not_complain_where_nothing_was_left_to_train(tmp_path):
    first = make_trainer(max_steps=4, run_dir=tmp_path)
    first.fit(make_data(), make_data())
    path = first.save(tmp_path / "checkpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(EarlyStopping(), max_steps=4, run_dir=tmp_path).fit(make_data(), make_data(), resume=path)


def test_the_best_value_is_never_nan():
    best = BestValue("loss")
    assert [best.update(v) for v in (math.nan, 2.0, math.nan, 1.0, 1.0)] == [False, True, False, True, False]
    assert best.best == 1.0


@pytest.mark.filterwarnings("ignore:EarlyStopping never saw an evaluation")
@pytest.mark.parametrize("fused", [True, False])
def test_no_listener_makes_the_host_wait_between_rows(tmp_path, fused):
    """With every callback on, a step that is not logged reads no more scalars than a bare one."""
    all_of_them = [
        EMA(0.9), LrMonitor(), MemoryMonitor(), EarlyStopping(), callbacks.Saving(every_steps=1000, every_epoch=False),
        callbacks.Throughput(), callbacks.Progress(stream=io.StringIO()), callbacks.TensorBoard(),
        callbacks.JsonlMetrics(),
    ]  # fmt: skip
    reads = {}
    for name, listeners in (("bare", []), ("all", all_of_them)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)  # AdamW on the CPU reads its step counts
        trainer = SmallTrainer(
            model, optimizer, callbacks=listeners, guards="off", max_steps=12, log_every=1000, run_dir=tmp_path
        )
        profiler = profile(activities=[ProfilerActivity.CPU])

        def on_step(step, profiler=profiler):
            if step == 5:  # after the first row and the counted step
                profiler.__enter__()
            if step == 12:
                profiler.__exit__(None, None, None)

        trainer.on_step = on_step
        trainer.fit(list(make_data()))  # a DataLoader reads scalars of its own
        reads[name] = sum(e.count for e in profiler.key_averages() if e.key == "aten::_local_scalar_dense")
    expected = 0 if fused else 7  # the finiteness gate of an optimizer that cannot skip on the device
    assert reads == {"bare": expected, "all": expected}


def test_a_meter_that_is_exchanged_inside_a_step_costs_that_step_its_owners_only() -> None:
    class Exchanges(Callback):
        """What a heap that has become slow to read does to the timeline."""

        def on_backward_start(self, state: RunState) -> None:
            assert monitor.phases is not None
            monitor.phases.readings.clear()

    monitor = MemoryMonitor()
    trainer = make_trainer(Exchanges(), monitor, max_steps=2, log_every=1)
    trainer.fit(make_data())
    assert trainer.state.step == 2 and monitor.phases is not None and "after_step" in monitor.phases.readings
