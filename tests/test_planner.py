"""Forecasts of real small models: what they say, that nothing is changed by them, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from safetrain import BudgetError, CompileOptions, ConfigError, Trainer
from safetrain.callbacks import EMA
from safetrain.cli import EXIT_FAILED, EXIT_OK, main
from safetrain.commands.memory import measure
from safetrain.commands.plan import build_unwatched, window_of
from safetrain.config.file import load
from safetrain.graph import format_bytes
from safetrain.planner import Forecast, Unforecastable, forecast
from safetrain.planner.faking import faking, make_mode

ROOT = Path(__file__).parent.parent
MB = 1_000_000


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.back, self.drop = nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.back(F.gelu(self.feed(self.norm(x)))))


def blocks(width: int = 64, depth: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 10))


def batch(size: int = 256) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 32), torch.randint(10, (size,))


def make(model: nn.Module | None = None, kind: type[Trainer] = Classifier, **settings: Any) -> Trainer:
    model = blocks() if model is None else model
    optimizer = settings.pop("optimizer", lambda p: torch.optim.AdamW(p, fused=True))(model.parameters())
    return kind(model, optimizer, **{"max_steps": 2, "guards": "off", **settings})


def predict(trainer: Trainer, size: int = 256) -> Forecast:
    return forecast(trainer, [batch(size)] * trainer.accumulate, make_mode())


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_a_convolutional_model_comes_within_four_percent_of_the_heap(tmp_path: Path) -> None:
    assert max(compare(["cnn"], tmp_path)) <= 0.04


@pytest.mark.slow
def test_twelve_models_come_within_one_percent_in_the_median(tmp_path: Path) -> None:
    errors = sorted(compare([], tmp_path))
    assert len(errors) == 12
    assert errors[-1] <= 0.04
    assert (errors[5] + errors[6]) / 2 <= 0.01


def compare(names: list[str], tmp_path: Path) -> list[float]:
    rows = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks/forecast.py"), *names, "--json", str(rows)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return [abs(row["error"]) for row in json.loads(rows.read_text())]


@pytest.mark.slow
def test_a_gpt_of_a_billion_parameters_takes_under_a_minute_and_4_gb() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/forecast.py"), "--child", "predict", "billion"]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert row["seconds"] < 60
    assert row["rss"] < 4e9
    assert row["forecast"] > 4 * 4 * 1.5e9  # weights, gradients and two moments at least


def test_torchs_own_tracker_says_the_same() -> None:
    """`MemTracker` refuses windows, and models whose parts are called by themselves; here it can be asked."""
    ours = predict(make())
    with faking(make_mode()):
        model, (x, y) = blocks(), batch()
        optimizer, tracker = torch.optim.AdamW(model.parameters(), fused=True), MemTracker()
        tracker.track_external(model, optimizer, x, y)
        with tracker:
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                tracker.reset_mod_stats()
    theirs = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
    assert ours.peak_bytes == pytest.approx(theirs, rel=0.01)


def test_owners_are_what_they_must_be() -> None:
    trainer = make()
    weights = sum(p.nbytes for p in trainer.model.parameters())
    found = predict(trainer)
    at_step, at_forward = found.owners("step"), found.owners("forward")
    assert at_step["parameters"] == at_step["gradients"] == weights
    assert at_step["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert at_step["activations"] == 0
    assert at_forward["gradients"] == 0
    assert at_forward["activations"] > 2 * 4 * 256 * (4 * 64) * 4  # two wide tensors a block at least
    assert at_forward["inputs"] == 256 * (32 * 4 + 8)


@pytest.mark.parametrize(
    ("settings", "less"),
    [
        ({"activation_checkpoint": "1"}, 0.9),
        ({"micro_batch_size": 64}, 0.7),
        ({"precision": "bf16"}, 0.9),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, 0.95),
    ],
)
def test_settings_take_less(settings: dict[str, Any], less: float) -> None:
    assert predict(make(**settings)).peak_bytes < less * predict(make()).peak_bytes


def test_a_window_of_many_takes_little_more_than_one_batch() -> None:
    one, four = predict(make()).peak_bytes, predict(make(accumulate=4)).peak_bytes
    weights = sum(p.nbytes for p in blocks().parameters())
    assert one < four < one + weights + 4 * 256 * (32 * 4 + 8)  # gradients are there in the second forward


def test_averages_of_weights_count() -> None:
    model = blocks(256)
    weights = sum(p.nbytes for p in model.parameters())
    with_average = predict(make(model, callbacks=[EMA(0.9)])).peak_bytes
    assert with_average - predict(make(model)).peak_bytes == pytest.approx(weights, rel=0.01)


# ---- nothing happens -------------------------------------------------------------------------------------------------


class Remembering(Classifier):
    """Keeps a state from step to step, as truncated BPTT does."""

    seen: Tensor | None = None

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.model(x)
        self.seen = out.detach() if self.seen is None else self.seen + out.detach()
        return F.cross_entropy(out, y)


@pytest.mark.parametrize("kind", [Classifier, Remembering])
def test_a_run_that_was_forecast_trains_the_same_bits(kind: type[Trainer]) -> None:
    def weights(**settings: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 10))
        trainer = make(model, kind, seed=1, accumulate=2, clip_norm=1.0, max_steps=3, **settings)
        trainer.fit([batch(32) for _ in range(6)])
        return [*model.state_dict().values()]

    plain, watched = weights(), weights(memory_budget="1GB")
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


# ---- what cannot be forecast -----------------------------------------------------------------------------------------


class Branching(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        return loss if loss.item() < 100 else loss * 0


class Selecting(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        kept = x[:, 0] > 0
        return F.cross_entropy(self.model(x[kept]), y[kept])


class Logging(Classifier):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log("loss", loss.item())
        return loss


def test_logging_a_number_is_no_obstacle() -> None:
    assert predict(make(kind=Logging)).peak_bytes == predict(make()).peak_bytes


@pytest.mark.parametrize(("kind", "line"), [(Branching, "loss.item() < 100"), (Selecting, "self.model(x[kept])")])
def test_a_step_that_depends_on_numbers_runs_unforecast(kind: type[Trainer], line: str) -> None:
    with pytest.raises(Unforecastable, match="numbers"):
        predict(make(kind=kind))
    with pytest.warns(UserWarning, match="could not forecast the step, so it may run") as told:
        make(kind=kind, memory_budget="1kB").fit([batch(32)] * 2)
    assert line in str(told[0].message)


def test_a_trainer_that_cannot_be_copied_runs_unforecast() -> None:
    trainer = make(memory_budget="1kB")
    trainer.file = open(__file__)  # noqa: SIM115
    with trainer.file, pytest.warns(UserWarning, match="cannot be copied"):
        assert trainer.fit([batch(32)] * 2).step == 2


# ---- the command -----------------------------------------------------------------------------------------------------

TRAINER = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from safetrain import Trainer

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.feed, self.back = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.back(F.gelu(self.feed(x)))

class Mine(Trainer):
    @classmethod
    def build_model(cls, params):
        return nn.Sequential(nn.Linear(32, 64), *[Wide() for _ in range(3)], nn.Linear(64, 10)).to(torch.float32)

    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(600, 32), torch.randint(10, (600,))), None

    def training_step(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TRAINER)
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: mine.py:Mine\nloop: {max_steps: 2}\noptim: {name: AdamW}\ndata: {batch_size: 512}\n")
    return file


def test_the_plan_of_a_config_and_what_it_says_to_paste(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings it prints are taken by the config, and the forecast of that is what was promised."""
    assert main(["plan", str(config), "--budget", "2MB"]) == EXIT_OK
    told = capsys.readouterr().out
    for setting in ("precision: bf16", "loop.micro_batch_size: 256", "activation_checkpoint: {every: 2}", "name: SGD"):
        assert setting in told
    promise, pasted = re.search(r"fits into 2.0 MB: (\S+ MB).*?\n\n(.*)", told, re.DOTALL).groups()
    settings, whole = yaml.safe_load(pasted), yaml.safe_load(config.read_text())
    for key, value in settings.items():
        whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    config.write_text(yaml.safe_dump(whole))
    assert format_bytes(peak_of(config)) == promise


def test_the_plan_of_a_compiled_config_tells_what_it_takes_to_keep_less(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + "compile: {}\n")
    assert main(["plan", str(config), "--budget", "1.6MB", "activation_checkpoint=null"]) == EXIT_OK
    told = capsys.readouterr().out
    peaks = [float(peak) for peak in re.findall(r"compile.activation_memory_budget: \S+ +(\S+) MB", told)]
    whole = float(re.search(r"peak: (\S+) MB", told).group(1))
    assert len(peaks) == 2 and peaks[1] < peaks[0] and peaks[1] < 0.9 * whole
    assert "cannot be forecast" not in told


def peak_of(config: Path) -> int:
    mode, loaded = make_mode(), load(config, [])
    job = build_unwatched(loaded, mode, print)
    return forecast(job.trainer, window_of(job, loaded.loop.accumulate, mode), mode).peak_bytes


LSTM = """
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 64, num_layers=2), nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.lstm(x.reshape(-1, 64, 4).transpose(0, 1))[0][-1])

class Mine(Mine):
    @classmethod
    def build_model(cls, params):
        return Reads()

    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(192, 256), torch.randint(10, (192,))), None
"""


@pytest.mark.parametrize("settings", [["params={}"], ["loop.accumulate=3"]])
def test_what_an_lstm_keeps_and_each_batch_of_a_window_count(config: Path, settings: list[str]) -> None:
    """Against the tensors of a step that ran: oneDNN's workspace is most of an LSTM's memory."""
    config.with_name("mine.py").write_text(TRAINER + LSTM)
    loaded = load(config, ["data.batch_size=64", *settings])
    mode = make_mode()
    job = build_unwatched(loaded, mode, print)
    predicted = forecast(job.trainer, window_of(job, loaded.loop.accumulate, mode), mode).peak_bytes
    ran = measure(load(config, ["data.batch_size=64", "loop.max_steps=3", *settings]), 3)
    measured = ran.peak_bytes - ran.owners_at(ran.peak_clock)["retained"]
    assert abs(predicted / measured - 1) < 0.01


CARRIES = """
class Mine(Mine):
    def training_step(self, batch):
        if self.state.step == 0:
            self.seen = torch.zeros(512, 10)
        return F.cross_entropy(self.model(batch[0]) + self.seen, batch[1])
"""
OWN = """
class Mine(Mine):
    def train_step(self, window):
        for batch in self.to_device(window):
            self.zero_grad()
            self.backward(self.training_step(batch))
            self.optimizer_step()
"""
FAILS = """
class Mine(Mine):
    def training_step(self, batch):
        return super().training_step(batch) + float(batch[0].numpy().sum())
"""


def test_a_setting_that_the_step_cannot_bear_is_told_and_the_rest_is_forecast(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.with_name("mine.py").write_text(TRAINER + CARRIES)
    assert main(["plan", str(config)]) == EXIT_OK
    told = capsys.readouterr().out
    assert re.search(r"loop.micro_batch_size: 64: cannot be forecast: RuntimeError: .* at mine.py:\d+: `return", told)
    assert "activation_checkpoint: {every: 2}" in told


def test_settings_that_a_train_step_of_ones_own_does_not_heed_are_not_offered(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.with_name("mine.py").write_text(TRAINER + OWN)
    assert main(["plan", str(config)]) == EXIT_OK
    told = capsys.readouterr().out
    assert "micro_batch_size" not in told and "precision" not in told
    assert "activation_checkpoint: {every: 2}" in told


def test_a_step_that_fails_without_numbers_is_one_clear_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.with_name("mine.py").write_text(TRAINER + FAILS)
    assert main(["plan", str(config)]) != EXIT_OK
    told = capsys.readouterr().err
    assert "cannot be forecast" in told and "at mine.py:" in told and "Traceback" not in told


def test_another_optimizer_gets_the_configured_rate_not_that_of_the_warmup(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ["optim.lr=0.25", "schedule={name: WarmupCosine, warmup_steps: 1}", "loop.max_steps=10"]
    assert main(["plan", str(config), *rates]) == EXIT_OK
    assert "{name: SGD, lr: 0.25}" in capsys.readouterr().out


def test_a_budget_without_its_unit_is_asked_about(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--budget", "24"]) != EXIT_OK
    assert "--budget: '24' are 24 bytes" in capsys.readouterr().err


def test_a_budget_that_nothing_meets(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--budget", "100kB"]) == EXIT_FAILED
    assert "no combination of these settings fits into 100.0 kB" in capsys.readouterr().out


def test_planning_allocates_no_model(config: Path) -> None:
    """Thirty times as wide: over a gigabyte of weights, gradients and moments."""
    config.with_name("mine.py").write_text(TRAINER.replace("64", "2048").replace("256", "8192"))
    code = (
        "import resource; from pathlib import Path; import safetrain.planner; "
        "from tests.test_planner import peak_of; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        f"peak = peak_of(Path({str(config)!r})); "
        "print(peak, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    peak, grown = map(int, done.stdout.split())
    assert peak > 1e9
    assert grown < 0.2e9


# ---- refusing --------------------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_with_remedies_that_work() -> None:
    budget = int(0.8 * predict(make()).peak_bytes)
    with pytest.raises(BudgetError, match="the run cannot fit: a step needs") as refusal:
        make(memory_budget=budget).fit([batch()] * 2)
    told = str(refusal.value)
    assert "loop.micro_batch_size: 128" in told
    assert "activations" in told
    assert predict(make(micro_batch_size=128)).peak_bytes <= budget
    assert make(micro_batch_size=128, memory_budget=budget).fit([batch()] * 2).step == 2


def test_what_fits_is_not_refused() -> None:
    peak = predict(make()).peak_bytes
    assert make(memory_budget=peak).fit([batch()] * 2).step == 2
    assert make(memory_budget="auto").fit([batch()] * 2).step == 2


def test_a_budget_that_is_no_size() -> None:
    with pytest.raises(ConfigError, match="memory_budget: 'lots' is no size"):
        make(memory_budget="lots")
    with pytest.raises(ConfigError, match="memory_budget and oom='split' exclude each other"):
        make(memory_budget="1GB", oom="split")


def test_what_is_compiled_may_need_less_and_is_not_refused() -> None:
    trainer = make(compile=CompileOptions(backend="eager"), memory_budget="1kB")
    with pytest.warns(UserWarning, match="a compiled model cannot be forecast"):
        trainer.fit([batch(32)] * 2)


def test_a_limit_on_addresses_is_what_auto_means() -> None:
    """In a process of its own: the limit cannot be raised again."""
    code = (
        "import resource, torch; from tests.test_planner import make, blocks, batch; "
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2); "
        "make(blocks(64), memory_budget='auto').fit([batch(256)] * 2); print('small ran'); "
        "make(blocks(64), memory_budget='auto').fit([batch(100_000)] * 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "small ran\n"
    assert "BudgetError: the run cannot fit" in done.stderr
