"""Rates are what a clock would say, and counting operations changes no result."""

from __future__ import annotations

import time

import pytest
import torch
from small_training import SmallTrainer, make_data, make_model, make_trainer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from safetrain.callbacks import Callback, Throughput
from safetrain.callbacks.throughput import tokens_in
from safetrain.errors import ConfigError


class Rows(Callback):
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_log(self, state):
        if "train/loss" in state.row:
            self.rows[state.step] = dict(state.row)


def test_rates_are_those_of_a_clock():
    rows = Rows()
    trainer = make_trainer(Throughput(measure_flops=False), rows, max_steps=11, log_every=10)
    trainer.on_step = lambda step: time.sleep(0.01)
    trainer.fit(make_data())
    row = rows.rows[10]
    assert 20 < row["throughput/steps_per_s"] < 100
    assert row["throughput/samples_per_s"] == pytest.approx(16 * row["throughput/steps_per_s"])
    assert not any(key.startswith("throughput/") for key in rows.rows[1]), "the first step is all setup"


def test_evaluations_and_saving_are_left_out(tmp_path):
    class Slow(Callback):
        def on_step_end(self, state):
            state.save_request = "a slow disk"

    rows = Rows()
    trainer = make_trainer(
        Throughput(measure_flops=False), rows, Slow(), max_steps=10, log_every=10, eval_every=2, run_dir=tmp_path
    )
    trainer.on_step = lambda step: time.sleep(0.01)
    trainer.evaluation_step = lambda batch: time.sleep(0.1) or {"loss": torch.zeros(())}
    write = trainer.save
    trainer.save = lambda directory: time.sleep(0.2) or write(directory)
    trainer.fit(make_data(), make_data())
    assert 20 < rows.rows[10]["throughput/steps_per_s"] < 100


def test_tokens_are_counted_when_the_batch_says_so():
    assert tokens_in({"input_ids": torch.zeros(4, 7, dtype=torch.long)}) == 28
    assert tokens_in({"input_ids": torch.zeros(4, 7), "num_tokens": 20}) == 20
    assert int(tokens_in({"num_tokens": torch.tensor([3, 4])})) == 7
    assert tokens_in((torch.zeros(4, 7), torch.zeros(4))) is None

    class Words(SmallTrainer):
        def training_step(self, batch):
            return self.model(batch["x"]).square().mean()

    rows = Rows()
    model = make_model()
    trainer = Words(
        model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Throughput(measure_flops=False), rows],
        guards="off", max_steps=6, log_every=6, accumulate=2,
    )  # fmt: skip
    batches = [{"x": torch.randn(4, 8), "num_tokens": torch.tensor(100 + i)} for i in range(12)]
    trainer.fit(batches)
    row = rows.rows[6]
    # Batches 2 to 11; those of the first step are left out.
    tokens_a_step = sum(100 + i for i in range(2, 12)) / 5
    assert row["throughput/tokens_per_s"] / row["throughput/steps_per_s"] == pytest.approx(tokens_a_step)
    assert row["throughput/samples_per_s"] / row["throughput/steps_per_s"] == pytest.approx(8)


def test_operations_of_a_step_are_those_that_the_flop_counter_counts():
    throughput, rows = Throughput(peak_flops=1e9), Rows()
    make_trainer(throughput, rows, max_steps=4, log_every=4, accumulate=2).fit(make_data())
    model = make_model()
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(16, 8)).sum().backward()
    assert throughput.flops_per_sample == counter.get_total_flops() / 16
    row = rows.rows[4]
    expected = throughput.flops_per_sample * row["throughput/samples_per_s"]
    assert row["throughput/tflops_per_s"] * 1e12 == pytest.approx(expected)
    assert row["throughput/mfu"] == pytest.approx(expected / 1e9)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_counting_changes_no_result(precision):
    """Weights, BatchNorm statistics, optimizer state and the generator, with dropout and accumulation."""
    ends = []
    for callbacks in ([], [Throughput()]):
        model = make_model()
        trainer = make_trainer(*callbacks, model=model, max_steps=7, accumulate=2, precision=precision, clip_norm=1.0)
        trainer.fit(make_data())
        moments = [v for s in trainer.state.optimizers["main"].state.values() for v in s.values()]
        ends.append([*model.state_dict().values(), *moments, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_the_counted_step_is_left_out_of_the_rate():
    class SlowCounting(Throughput):
        def on_step_start(self, state):
            super().on_step_start(state)
            if self._counter is not None:
                time.sleep(1)

    rows = Rows()
    trainer = make_trainer(SlowCounting(), rows, max_steps=10, log_every=10)
    trainer.on_step = lambda step: time.sleep(0.01)
    trainer.fit(make_data())
    assert 20 < rows.rows[10]["throughput/steps_per_s"] < 100


def test_a_step_that_fails_while_counted_leaves_no_counter_behind():
    trainer = make_trainer(Throughput(), max_steps=4)

    def fail(step: int) -> None:
        if step == 2:
            assert torch._C._len_torch_dispatch_stack() == 1
            raise RuntimeError("boom")

    trainer.on_step = fail
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(make_data())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_mode_entered_during_the_counted_step_stays():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    other = Other()

    class Enters(Callback):
        def on_backward_end(self, state):
            if state.current_step == 2:
                other.__enter__()

    throughput = Throughput()
    make_trainer(throughput, Enters(), max_steps=3).fit(make_data())
    try:
        assert torch._C._len_torch_dispatch_stack() == 1
        assert torch._C._get_dispatch_stack_at(0) is other
    finally:
        other.__exit__(None, None, None)
    assert throughput.flops_per_sample


def test_a_compiled_model_is_not_run_eagerly_to_be_counted():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(x)

    model = Net()
    model.compile(backend="eager")
    throughput = Throughput()
    make_trainer(throughput, model=model, max_steps=3).fit(make_data())
    assert throughput.flops_per_sample is None
    given, rows = Throughput(flops_per_sample=1000.0), Rows()
    make_trainer(given, rows, model=model, max_steps=3, log_every=3).fit(make_data())
    assert rows.rows[3]["throughput/tflops_per_s"] > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the LSTM runs op by op here")
def test_a_recurrent_layer_in_one_kernel_is_not_passed_over_in_silence(caplog):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.lstm(x[:, None])[0][:, -1])

    throughput = Throughput()
    with caplog.at_level("INFO", logger="safetrain"):
        make_trainer(throughput, model=Net(), max_steps=3).fit(make_data())
    assert throughput.flops_per_sample is None
    assert "no formula for aten.mkldnn_rnn_layer" in caplog.text


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="peak_flops=0"):
        Throughput(peak_flops=0)
    with pytest.raises(ConfigError, match="flops_per_sample=-1"):
        Throughput(flops_per_sample=-1)
