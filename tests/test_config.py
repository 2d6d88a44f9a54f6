"""The config: what it takes, what it refuses, and that its fields stay what they are."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from safetrain import Trainer, callbacks
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.compile import CompileOptions
from safetrain.config import (
    ActivationCheckpointConfig,
    CallbacksConfig,
    CompileConfig,
    Config,
    LoopConfig,
    OptimConfig,
    ScheduleConfig,
    build,
)
from safetrain.config import file as config_file
from safetrain.config.help import fields_help, schema
from safetrain.config.schedules import WarmupCosine
from safetrain.errors import ConfigError

TRAINER = """
from torch.utils.data import TensorDataset
import torch
from pydantic import BaseModel
from torch import nn
from safetrain import Trainer

class Toy(Trainer):
    class Params(BaseModel, extra="forbid"):
        hidden: int = 8

    @classmethod
    def build_model(cls, params):
        return nn.Sequential(nn.Linear(4, params.hidden), nn.ReLU(), nn.Linear(params.hidden, 1))

    @classmethod
    def build_data(cls, params):
        x = torch.randn(20, 4)
        return TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x, x.sum(1, keepdim=True))

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)
"""
MINIMAL = "trainer: toy.py:Toy\nloop: {max_steps: 3}\noptim: {name: SGD, lr: 0.1}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a trainer file and its config."""
    (tmp_path / "toy.py").write_text(TRAINER)
    (tmp_path / "toy.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*overrides: str) -> Config:
    return config_file.load("toy.yaml", overrides)


# ---------------------------------------------------------------------------------------------- reading


def test_overrides_replace_and_add_settings_wherever_they_are_nested(folder: Path) -> None:
    config = load(
        "optim.lr=1e-3",
        "optim.momentum=0.9",
        "params.hidden=16",
        "callbacks.ema.decay=0.9",
        "guards.G101=error",
        "compile=true",
    )
    assert config.optim == OptimConfig(name="SGD", lr=1e-3, momentum=0.9)  # type: ignore[call-arg]
    assert config.params == {"hidden": 16}
    assert config.callbacks.ema is not None and config.callbacks.ema.decay == 0.9
    assert config.guards == {"G101": "error"}
    assert config.compile == CompileConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E3", 1e3), (".5", 0.5), ("1.e-2", 1e-2), ("-2.5e+1", -25.0), ("3", 3), ("e5", "e5"),
        ("1e", "1e"), ("0x10", 16), ("null", None), ("[0.9, 1e-1]", [0.9, 0.1]),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(folder: Path, text: str, value: Any) -> None:
    # PyYAML alone reads 1e-4 as the string "1e-4", which an optimizer would meet many steps later.
    read = load(f"params.x={text}").params["x"]
    assert read == value and type(read) is type(value)


def test_a_switch_is_true_false_or_its_settings(folder: Path) -> None:
    assert load("callbacks.progress=false").callbacks.progress is None
    assert load("callbacks.ema=true").callbacks.ema is not None
    assert load("guards=off").guards == "off"  # YAML 1.1 reads a bare `off` as false


def test_what_is_written_reads_back_as_the_same_config(folder: Path) -> None:
    config = load(
        "optim.betas=[0.9,0.95]",
        "run_dir=here",
        "activation_checkpoint.modules='blocks.*'",
        "loop.clip_norm=1",
        "loop.clip_norm_type=.inf",
    )
    (folder / "again.yaml").write_text(config_file.dump(config))
    assert config_file.load("again.yaml") == config


def test_a_trainer_file_is_found_from_another_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "toy.yaml").write_text(MINIMAL)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert config_file.load(folder / "configs" / "toy.yaml").trainer == f"{folder / 'toy.py'}:Toy"


def test_the_config_is_frozen(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().loop.max_steps = 5  # type: ignore[misc]


def test_all_faults_are_told_at_once(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("loop.max_step=3", "optim.lr=fast", "callbacks.ema.deca=0.5", "lr=1", "zzz=1")
    told = str(caught.value)
    assert "toy.yaml" in told
    assert "loop.max_step: no such setting; did you mean loop.max_steps?" in told
    assert "optim.lr: should be a number, got 'fast' (str)" in told
    assert "callbacks.ema.deca: no such setting; did you mean callbacks.ema.decay?" in told
    assert "lr: no such setting; did you mean optim.lr?" in told
    assert "zzz: no such setting; the config takes trainer, params" in told


# ---------------------------------------------------------------------------------------------- building


def test_a_config_builds_what_it_names(folder: Path) -> None:
    job = build.build(load("params.hidden=5", "optim.name=AdamW", "optim.betas=[0.8, 0.9]", "data.batch_size=7"))
    assert job.trainer.params.hidden == 5
    optimizer = job.trainer.state.optimizers["main"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.1 and optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["fused"] is True, (
        "null takes the fused kernel, which needs no read for the finiteness gate"
    )
    assert [len(x) for x, _ in job.train] == [7, 7, 6]


def test_the_seed_decides_data_and_weights(folder: Path) -> None:
    def weights(seed: str) -> torch.Tensor:
        return nn.utils.parameters_to_vector(build.build(load(f"seed={seed}")).trainer.model.parameters()).detach()

    assert torch.equal(weights("3"), weights("3"))
    assert not torch.equal(weights("3"), weights("4"))


class TwoPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Linear(3, 1)


def test_several_optimizers_take_their_parameters_by_pattern() -> None:
    model = TwoPart()
    config = Config(
        trainer="toy.py:Toy",
        loop=LoopConfig(max_steps=1),
        optims={
            "generator": OptimConfig(params=("generator.*",)),
            "critic": OptimConfig(name="SGD", lr=1.0, params=("critic.*",)),
        },
    )
    made = build.build_optimizers(Trainer, model, None, config)
    assert isinstance(made, dict)
    held = {name: {id(p) for g in opt.param_groups for p in g["params"]} for name, opt in made.items()}
    assert held == {name: {id(p) for p in model.get_submodule(name).parameters()} for name in ("generator", "critic")}


def test_groups_get_their_own_arguments() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = build.build_optimizer(model, OptimConfig(lr=0.1, groups={"*.bias": {"weight_decay": 0.0}}), "optim")
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.01, 0.0, 0.01, 0.0]


def test_frozen_parameters_stay_out_of_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = build.build_optimizer(model, OptimConfig(), "optim")
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model[1].parameters()]


def test_warmup_cosine_rises_then_falls_and_knows_its_end_from_the_loop(folder: Path) -> None:
    job = build.build(
        load("schedule.name=WarmupCosine", "schedule.warmup_steps=2", "loop.max_steps=6", "schedule.final_factor=0.1")
    )
    schedule = job.trainer.state.schedulers["main"]
    assert isinstance(schedule, WarmupCosine)
    factors = [schedule.factor(step) for step in range(8)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[4] == pytest.approx(0.55)
    assert factors[6:] == pytest.approx([0.1, 0.1])
    assert job.trainer.state.optimizers["main"].param_groups[0]["lr"] == pytest.approx(0.05)


def test_warm_up_may_be_a_share_of_the_run(folder: Path) -> None:
    for max_steps, warmup in ((20, 2), (100, 10), (5, 0)):
        job = build.build(
            load("schedule.name=WarmupCosine", "schedule.warmup_steps=0.1", f"loop.max_steps={max_steps}")
        )
        schedule = job.trainer.state.schedulers["main"]
        assert isinstance(schedule, WarmupCosine)
        assert schedule.warmup_steps == warmup


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ExponentialLR", "ReduceLROnPlateau"])
def test_torch_schedules_are_built_by_name(folder: Path, name: str) -> None:
    arguments = {
        "StepLR": {"step_size": 2},
        "CosineAnnealingLR": {"T_max": 5},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
        "ExponentialLR": {"gamma": 0.9},
        "ReduceLROnPlateau": {},
    }
    overrides = [f"schedule.{key}={json.dumps(value)}" for key, value in arguments[name].items()]
    job = build.build(load(f"schedule.name={name}", *overrides))
    assert type(job.trainer.state.schedulers["main"]).__name__ == name


def test_a_ready_loader_of_the_trainer_is_used_as_it_is(folder: Path) -> None:
    text = TRAINER.replace(
        "return TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x, x.sum(1, keepdim=True))",
        "return [(x, x.sum(1, keepdim=True))], None",
    )
    (folder / "ready.py").write_text(text)
    job = build.build(load("trainer=ready.py:Toy"))
    assert isinstance(job.train, list) and job.val is None


# ---------------------------------------------------------------------------------------------- promises


def frozen_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Every dotted path with its default, in JSON terms."""
    found = {}
    for path, section, name in config_file.dotted_paths(model):
        field = section.model_fields[name]
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        found[path] = (
            "on" if isinstance(default, BaseModel) else list(default) if isinstance(default, tuple) else default
        )
    return found


def test_config_fields_and_defaults_are_frozen() -> None:
    """Config files of others depend on these. Adding is fine: add it to config_fields.json, and to the changelog."""
    expected = json.loads((Path(__file__).parent / "config_fields.json").read_text(encoding="utf-8"))
    assert frozen_fields(Config) == expected


def test_loop_settings_are_those_of_the_trainer() -> None:
    trainer = {
        name: p.default
        for name, p in inspect.signature(Trainer.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    loop = {name: field.default for name, field in LoopConfig.model_fields.items()}
    assert loop == {name: trainer[name] for name in loop}
    elsewhere = {
        "device",
        "precision",
        "scaler",
        "seed",
        "deterministic",
        "compile",
        "activation_checkpoint",
        "callbacks",
        "guards",
        "strict",
        "run_dir",
    }
    assert set(trainer) - set(loop) == elsewhere, "a new setting of the Trainer needs a place in the config"


@pytest.mark.parametrize(
    ("section", "target", "only_in_code"),
    [
        (CompileConfig, CompileOptions, set()),
        (ActivationCheckpointConfig, CheckpointOptions, set()),
        ("progress", callbacks.Progress, {"stream"}),
        ("jsonl", callbacks.JsonlMetrics, {"path"}),
        ("tensorboard", callbacks.TensorBoard, {"folder"}),
        ("checkpoint", callbacks.Saving, set()),
        ("early_stopping", callbacks.EarlyStopping, set()),
        ("ema", callbacks.EMA, set()),
        ("lr_monitor", callbacks.LrMonitor, set()),
        ("memory", callbacks.MemoryMonitor, {"meter"}),
        ("throughput", callbacks.Throughput, {"tokens"}),
    ],
)
def test_sections_have_the_names_and_defaults_of_what_they_build(
    section: Any, target: type, only_in_code: set[str]
) -> None:
    if isinstance(section, str):
        section = config_file.section_of(CallbacksConfig.model_fields[section].annotation)
    declared = {
        name: inspect.Parameter.empty if f.is_required() else f.default for name, f in section.model_fields.items()
    }
    taken = {name: p.default for name, p in inspect.signature(target).parameters.items() if name not in only_in_code}
    assert declared == taken


def test_every_field_has_a_docstring_and_help_and_schema_show_it() -> None:
    told, described = fields_help(), schema()
    for path, section, name in config_file.dotted_paths(Config):
        description = section.model_fields[name].description
        assert description, f"{path} has no docstring"
        assert f"{path}  (" in told
        assert json.dumps(description)[1:20] in described


def test_reading_a_config_does_not_import_torch() -> None:
    code = (
        "import sys, safetrain.config, safetrain.config.file, safetrain.config.help; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_open_sections_keep_further_keys() -> None:
    assert ScheduleConfig(name="StepLR", step_size=3).model_extra == {"step_size": 3}  # type: ignore[call-arg]
