"""Everything that people get wrong in a config, a loader or a step: one clear error each, and nothing is lost.

Every error names the thing and says what to do; `toy.yaml` and its trainer are right until a case breaks them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain import (
    BatchError,
    Callback,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    SafetrainError,
    StepOutput,
    Trainer,
)
from safetrain.cli import EXIT_FAILED, EXIT_REFUSED, main

TRAINER = '''
import torch
from pydantic import BaseModel
from torch import nn
from torch.utils.data import TensorDataset
from safetrain import Trainer

class Base(Trainer):
    class Params(BaseModel, extra="forbid", use_attribute_docstrings=True):
        hidden: int = 8
        """Width of the hidden layer."""

    @classmethod
    def build_model(cls, params):
        return nn.Sequential(nn.Linear(4, params.hidden), nn.ReLU(), nn.Linear(params.hidden, 1))

    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(20, 4), torch.randn(20, 1)), TensorDataset(torch.randn(8, 4), torch.randn(8, 1))

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

class Toy(Base):
    pass

class NoVal(Base):
    @classmethod
    def build_data(cls, params):
        return Base.build_data(params)[0], None

class Empty(Base):
    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(0, 4), torch.randn(0, 1)), None

class OneThing(Base):
    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(4, 4))

class Ready(Base):
    @classmethod
    def build_data(cls, params):
        return [(torch.randn(4, 4), torch.randn(4, 1))], None

class Frozen(Base):
    @classmethod
    def build_model(cls, params):
        return nn.Linear(4, 1).requires_grad_(False)

class NotAModel(Base):
    @classmethod
    def build_model(cls, params):
        return lambda x: x

class NoModel(Trainer):
    pass

class PlainMethod(Base):
    def build_model(self, params):
        return nn.Linear(4, 1)

class OwnOptimizer(Base):
    @classmethod
    def build_optimizers(cls, model, params):
        return torch.optim.SGD(model.parameters(), lr=0.1)

class NotATrainer:
    pass

class WrongShape(Base):
    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.randn(20, 7), torch.randn(20, 1)), None

class NaNData(Base):
    @classmethod
    def build_data(cls, params):
        return TensorDataset(torch.full((20, 4), torch.nan), torch.randn(20, 1)), None
'''
CONFIG = "trainer: toy.py:Toy\nloop: {max_steps: 3}\noptim: {name: AdamW, lr: 1e-2}\ncallbacks: {tensorboard: false}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.py").write_text(TRAINER)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, the compiled ones aside."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


BAD_SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    # what is wrong: (overrides, what the message says)
    "wrong type": (["optim.lr=fast"], ["optim.lr", "should be a number, got 'fast'"]),
    "number as text": (["loop.max_steps='30'"], ["loop.max_steps", "should be an integer, got '30' (str)"]),
    "true for a number": (["loop.max_steps=true"], ["loop.max_steps", "got True"]),
    "out of range": (["loop.accumulate=0"], ["loop.accumulate", "greater than or equal to 1"]),
    "unknown choice": (["precision=fp8"], ["precision", "'fp32', 'bf16' or 'fp16'"]),
    "unknown key": (["loop.max_step=3"], ["loop.max_step", "did you mean loop.max_steps?"]),
    "key of another section": (["batch_size=8"], ["batch_size", "did you mean data.batch_size?"]),
    "unknown section": (["optimizer.lr=1"], ["optimizer", "did you mean optim?"]),
    "section that is no mapping": (["data=8"], ["data", "should hold settings of its own"]),
    "override without value": (["optim.lr"], ["optim.lr", "key.sub=value"]),
    "override below a value": (["optim.lr.x=1"], ["optim.lr", "has no keys"]),
    "override that is no YAML": (["optim.betas=[0.9"], ["override optim.betas", "not valid YAML"]),
    "override with dashes": (["--optim.lr=1"], ["--optim.lr=1", "without dashes: optim.lr=1"]),
    "nothing ends the run": (["loop.max_steps=null"], ["max_steps, max_epochs and max_time", "max_epochs: 10"]),
    "two ways to clip": (["loop.clip_norm=1", "loop.clip_value=1"], ["clip_norm and clip_value", "clip by one of them"]),
    "a clip setting without clipping": (["loop.clip_per_group=true"], ["clip_per_group", "clip_norm"]),
    "a policy without its check": (["loop.nonfinite=raise", "loop.check_finite=false"], ["nonfinite: raise", "check_finite: true"]),
    "two limits": (["loop.overfit_batches=1", "loop.limit_batches=1"], ["overfit_batches and limit_batches", "remove one"]),
    "overfit and shuffle": (["loop.overfit_batches=1", "data.shuffle=true"], ["loop.overfit_batches", "data.shuffle"]),
    "fp16 and LBFGS": (["precision=fp16", "optim={name: LBFGS}"], ["precision: fp16", "optim.name: LBFGS", "bf16"]),
    "optim and optims": (["optims.a.params='*'"], ["optim and optims", "remove one"]),
    "optimizer without parameters": (["optim=null", "optims.a.name=SGD"], ["optims.a.params", "generator.*"]),
    "schedule without optimizer": (["schedules.b.name=StepLR"], ["schedules.b", "no optimizer of that name"]),
    "no optimizer": (["optim=null"], ["optim is missing", "optim: {name: AdamW, lr: 1e-3}"]),
    "unknown optimizer": (["optim.name=AdamWW"], ["optim.name", "no AdamWW in torch.optim", "did you mean AdamW?"]),
    "optimizer in lower case": (["optim.name=sgd"], ["optim.name", "did you mean SGD?"]),
    "unknown optimizer argument": (["optim.weight_deca=0.1"], ["optim.weight_deca", "did you mean optim.weight_decay?"]),
    "argument that the optimizer refuses": (["optim.betas=[2.0, 0.9]"], ["optim", "AdamW refuses", "beta"]),
    "argument of the wrong type": (["optim.betas=often"], ["optim", "AdamW refuses"]),
    "pattern without parameter": (["optim.params='head.*'"], ["optim.params", "'head.*' matches no trainable parameter", "0.weight"]),
    "group without parameter": (["optim.groups={'*.bia': {lr: 0.1}}"], ["optim.groups", "'*.bia'"]),
    "parameter in two optimizers": (["optim=null", "optims.a.params='*'", "optims.b.params='0.*'"], ["optims.a.params and optims.b.params", "0.weight"]),
    "optimizer in other letters": (["optim.name=Adamw"], ["optim.name", "did you mean AdamW?"]),
    "unknown schedule": (["schedule.name=CosineLR"], ["schedule.name", "no CosineLR", "torch.optim.lr_scheduler"]),
    "schedule without its argument": (["schedule.name=StepLR"], ["schedule.step_size is missing", "StepLR needs it"]),
    "schedule that takes functions": (["schedule.name=LambdaLR"], ["schedule.name", "LambdaLR takes functions", "build_schedulers"]),
    "schedule without an end": (["schedule.name=WarmupCosine", "loop={max_epochs: 1}"], ["schedule.total_steps", "loop.max_steps"]),
    "unknown parameter": (["params.hiden=3"], ["params.hiden", "did you mean params.hidden?"]),
    "parameter of the wrong type": (["params.hidden=wide"], ["params.hidden", "got 'wide'", "Width of the hidden layer"]),
    "unknown device": (["device=cudaa"], ["device: 'cudaa'", "device=cpu"]),
    "guards of the wrong type": (["guards=3"], ["guards", "default, off, or a policy"]),
    "unknown policy": (["guards={G101: fatal}"], ["guards", "'fatal' is no policy", "error"]),
    "trainer without class": (["trainer=toy.py"], ["trainer", "folder/file.py:Class"]),
    "missing trainer file": (["trainer=toi.py:Toy"], ["trainer", "no file toi.py", "did you mean toy.py?"]),
    "missing trainer module": (["trainer=no_such.place:Toy"], ["trainer", "no module no_such", "path/to/file.py:Class"]),
    "file without the class": (["trainer=toy.py:Tyo"], ["trainer", "no class Tyo", "did you mean Toy?"]),
    "class that is no trainer": (["trainer=toy.py:NotATrainer"], ["trainer", "no subclass of safetrain.Trainer"]),
    "trainer without a model": (["trainer=toy.py:NoModel"], ["NoModel has no build_model", "@classmethod def build_model(cls, params)"]),
    "model builder that is no classmethod": (["trainer=toy.py:PlainMethod"], ["PlainMethod.build_model", "put @classmethod above it"]),
    "model that is none": (["trainer=toy.py:NotAModel"], ["NotAModel.build_model returned a function", "torch.nn.Module"]),
    "model with nothing to train": (["trainer=toy.py:Frozen"], ["optim", "no parameter that requires a gradient"]),
    "data that is no pair": (["trainer=toy.py:OneThing"], ["OneThing.build_data returned a TensorDataset", "return (train, val)"]),
    "empty data": (["trainer=toy.py:Empty"], ["empty training TensorDataset", "check the path"]),
    "data settings that would be ignored": (["trainer=toy.py:Ready", "data.batch_size=2"], ["data.batch_size would be ignored", "return the dataset"]),
    "optimizer settings that would be ignored": (["trainer=toy.py:OwnOptimizer"], ["optim would be ignored", "OwnOptimizer.build_optimizers"]),
    "eval_every without validation data": (["trainer=toy.py:NoVal", "loop.eval_every=1"], ["loop.eval_every", "no validation data"]),
    "early stopping without validation data": (["trainer=toy.py:NoVal", "callbacks.early_stopping=true"], ["callbacks.early_stopping", "no validation data"]),
    "monitor without validation data": (["trainer=toy.py:NoVal", "callbacks.checkpoint.monitor=loss"], ["callbacks.checkpoint.monitor", "no validation data"]),
    "monitor that does not exist": (["callbacks.early_stopping={monitor: val/los, mode: min}"], ["val/los", "did you mean 'loss'?"]),
    "monitor of unknown direction": (["callbacks.early_stopping.monitor=f1"], ["f1", "max"]),
    "run folder below a file": (["run_dir=toy.py/run"], ["run_dir", "toy.py", "choose another"]),
    "NaN data": (["trainer=toy.py:NaNData", "loop.nonfinite=raise"], ["step 1", "Inf or NaN", "nonfinite"]),
    "recomputing a module that is not there": (["activation_checkpoint.modules='blocks.*'"], ["activation_checkpoint.modules", "blocks.*"]),
    "unknown rule": (["guards={G999: error}"], ["guards", "G999", "safetrain rules"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_gives_one_clear_error(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    overrides, expected = BAD_SETTINGS[case]
    assert main(["run", "toy.yaml", "run_dir=out", *overrides]) == EXIT_REFUSED
    told = capsys.readouterr().err
    for part in expected:
        assert part in told
    assert "Traceback" not in told


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


BAD_FILES: dict[str, tuple[Callable[[Path], Any], list[str], list[str]]] = {
    # what is wrong: (how the folder is broken, the command, what the message says)
    "missing config": (lambda f: None, ["run", "tooy.yaml"], ["no config file tooy.yaml", "did you mean toy.yaml?"]),
    "config that is a folder": (lambda f: (f / "d.yaml").mkdir(), ["run", "d.yaml"], ["cannot read the config d.yaml"]),
    "config that is no text": (lambda f: (f / "b.yaml").write_bytes(b"\xff\xfe\x00\x81"), ["run", "b.yaml"], ["cannot read the config b.yaml"]),
    "bad YAML": (written("b.yaml", "a: 1\nb: [1,\n"), ["run", "b.yaml"], ["b.yaml, line 3", "not valid YAML"]),
    "tab in YAML": (written("b.yaml", "loop:\n\tmax_steps: 1\n"), ["run", "b.yaml"], ["b.yaml, line 2"]),
    "config that is a list": (written("b.yaml", "- 1\n"), ["run", "b.yaml"], ["b.yaml", "mapping", "got a list"]),
    "empty config": (written("b.yaml", ""), ["run", "b.yaml"], ["trainer is missing", "loop is missing"]),
    "key given twice": (written("b.yaml", "seed: 1\nseed: 2\n"), ["run", "b.yaml"], ["line 2", "'seed' is given twice"]),
    "YAML that asks for code": (written("b.yaml", "a: !!python/object/apply:os.getcwd []\n"), ["run", "b.yaml"], ["b.yaml, line 1"]),
    "trainer file with a syntax error": (written("bad.py", "class A(:\n"), ["run", "toy.yaml", "trainer=bad.py:A"], ["bad.py fails when imported", "SyntaxError in line 1"]),
    "trainer file that raises": (written("bad.py", "x = 1\ny = x / 0\n"), ["run", "toy.yaml", "trainer=bad.py:A"], ["ZeroDivisionError", "line 2"]),
    "trainer file whose import is missing": (written("bad.py", "import no_such_thing\n"), ["run", "toy.yaml", "trainer=bad.py:A"], ["no_such_thing", "line 1"]),
    "resume of nothing": (lambda f: None, ["resume", "runs/gone"], ["no run folder runs/gone"]),
    "resume of a folder that is no run": (lambda f: (f / "other").mkdir(), ["resume", "other"], ["other holds no config.yaml"]),
    "resume of a run without checkpoint": (lambda f: (f / "r").mkdir() or shutil.copy(f / "toy.yaml", f / "r" / "config.yaml"), ["resume", "r"], ["r", "checkpoint"]),
    "unknown rule to explain": (lambda f: None, ["explain", "graph-retaind"], ["no rule graph-retaind", "did you mean graph-retained?"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_gives_one_clear_error(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    spoil, command, expected = BAD_FILES[case]
    spoil(folder)
    before = contents(folder)
    assert main(command) == EXIT_REFUSED
    told = capsys.readouterr().err
    for part in expected:
        assert part in told
    assert "Traceback" not in told
    assert contents(folder) == before, "nothing is written before everything was found right"


# ---------------------------------------------------------------------------------------------- nothing is lost


def test_a_folder_that_holds_a_run_is_left_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "run_dir=out"]) == 0
    before = contents(folder / "out")
    assert main(["run", "toy.yaml", "run_dir=out"]) == EXIT_REFUSED
    told = capsys.readouterr().err
    assert "out already holds a run" in told and "python -m safetrain resume out" in told
    assert contents(folder / "out") == before


def test_files_of_others_in_the_run_folder_stay(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    assert main(["run", "toy.yaml", "run_dir=out"]) == 0
    assert (folder / "out" / "notes.txt").read_text() == "mine"


def test_a_checkpoint_of_another_model_is_refused_and_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "run_dir=out"]) == 0
    before = contents(folder / "out")
    assert main(["resume", "out", "params.hidden=16", "loop.max_steps=9"]) == EXIT_REFUSED
    told = capsys.readouterr().err
    assert "0.weight" in told and "(8, 4)" in told.replace("[", "(").replace("]", ")")
    assert contents(folder / "out") == before


def test_a_damaged_checkpoint_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "run_dir=out"]) == 0
    weights = sorted((folder / "out" / "checkpoints").rglob("model.pt"))[-1]
    weights.write_bytes(weights.read_bytes()[:-10])
    assert main(["resume", "out", "loop.max_steps=9"]) == EXIT_REFUSED
    assert "model.pt" in capsys.readouterr().err


def test_a_batch_of_the_wrong_shape_is_shown_with_step_line_and_shapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # torch's own error, from a line of the user's: the traceback stays, and the last lines say what was being done.
    assert main(["run", "toy.yaml", "trainer=toy.py:WrongShape", "run_dir=out", "data.batch_size=5"]) == EXIT_FAILED
    last = capsys.readouterr().err.rpartition("safetrain: ")[2]
    assert "step 1: RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x7 and 4x8)" in last
    assert "toy.py" in last and "return nn.functional.mse_loss(self.model(x), y)" in last
    assert "float32[5, 7], float32[5, 1]" in last


# ---------------------------------------------------------------------------------------------- in a script


class Script(Trainer):
    """A trainer whose step a case may replace."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)


def make(step: Callable[[Trainer, Any], Any] | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    kind = type("Case", (Script,), {"training_step": step}) if step else Script
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"max_steps": 2, **options})


def batches(rows: int = 8, fill: float | None = None) -> list[Any]:
    x = torch.randn(rows, 4) if fill is None else torch.full((rows, 4), fill)
    return [(x, torch.randn(rows, 1))] * 3


BAD_INPUT: dict[str, tuple[Any, type[SafetrainError], list[str]]] = {
    # what is wrong: (what is run, the error, what its message says)
    "empty list": (lambda: make().fit([]), BatchError, ["train loader", "empty"]),
    "empty dataset": (
        lambda: make().fit(DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1)))), BatchError, ["train loader", "0 samples"]),
    "everything dropped as a short batch": (
        lambda: make().fit(DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1)), batch_size=8, drop_last=True)),
        BatchError, ["3 samples do not fill one batch of 8", "drop_last=False"]),
    "a dataset for a loader": (
        lambda: make().fit(TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1))), BatchError, ["TensorDataset", "DataLoader(dataset"]),
    "None for a loader": (lambda: make().fit(None), BatchError, ["NoneType", "give a DataLoader"]),
    "a tensor for a loader": (lambda: make().fit(torch.zeros(3, 4)), BatchError, ["Tensor", "give a DataLoader"]),
    "a generator for two epochs": (
        lambda: make(max_steps=None, max_epochs=2).fit(batch for batch in batches()), BatchError, ["used up", "generator"]),
    "empty validation data": (lambda: make().fit(batches(), []), BatchError, ["evaluation", "gave no batch"]),
    "no training_step": (
        lambda: Trainer(nn.Linear(4, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), max_steps=1).fit(batches()),
        ConfigError, ["training_step", "def training_step(self, batch)"]),
    "loss None": (lambda: make(lambda self, batch: None).fit(batches()), BatchError, ["None", "return"]),
    "loss a number": (lambda: make(lambda self, batch: 0.5).fit(batches()), BatchError, ["float", "tensor"]),
    "loss in a list": (lambda: make(lambda self, batch: [self.model(batch[0]).mean()]).fit(batches()), BatchError, ["list"]),
    "loss without graph": (
        lambda: make(lambda self, batch: self.model(batch[0]).mean().detach()).fit(batches()), BatchError, ["step 1", "carries no graph", "detach"]),
    "loss for each sample": (
        lambda: make(lambda self, batch: self.model(batch[0])).fit(batches()), BatchError, ["step 1", "(8, 1)", "loss.mean()"]),
    "loss_sum that is no tensor": (lambda: make(lambda self, batch: StepOutput(0.5, 8)).fit(batches()), BatchError, ["loss_sum is a float"]),
    "weight None": (
        lambda: make(lambda self, batch: StepOutput(self.model(batch[0]).sum(), None)).fit(batches()), BatchError, ["weight=None", "how many items"]),
    "negative weight": (
        lambda: make(lambda self, batch: StepOutput(self.model(batch[0]).sum(), -1)).fit(batches()), BatchError, ["weight=-1"]),
    "weight for each sample": (
        lambda: make(lambda self, batch: StepOutput(self.model(batch[0]).sum(), torch.ones(8))).fit(batches()), BatchError, ["weight has shape (8,)", "mask.sum()"]),
    "metric None": (lambda: make(lambda self, batch: (self.model(batch[0]).mean(), {"f1": None})).fit(batches()), BatchError, ["`f1` is None"]),
    "metric in a list": (
        lambda: make(lambda self, batch: (self.model(batch[0]).mean(), {"f1": [0.5]})).fit(batches()), BatchError, ["`f1` is [0.5], a list"]),
    "a dataset for validation data": (
        lambda: make().fit(batches(), TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1))), BatchError, ["evaluation loader", "DataLoader(dataset"]),
    "a number for validation data": (lambda: make().fit(batches(), 3), BatchError, ["evaluation loader", "int", "give a DataLoader"]),
    "a dataset to predict": (lambda: make().predict(TensorDataset(torch.zeros(3, 4))), BatchError, ["prediction loader", "DataLoader(dataset"]),
    "a generator for two evaluations": (
        lambda: make(eval_every=1).fit(batches(), iter(batches())), BatchError, ["evaluation loader", "used up before", "give a function"]),
    "NaN data": (lambda: make(nonfinite="raise").fit(batches(fill=torch.nan)), NonFiniteError, ["step 1", "weights are as before"]),
    "infinite data": (lambda: make(nonfinite="raise").fit(batches(fill=torch.inf)), NonFiniteError, ["step 1"]),
    "nothing ends the run": (lambda: make(max_steps=None).fit(batches()), ConfigError, ["max_steps, max_epochs or max_time"]),
    "setting below zero": (lambda: make(accumulate=0), ConfigError, ["accumulate=0"]),
    "unknown precision": (lambda: make(precision="fp8"), ConfigError, ["precision='fp8'", "'bf16'"]),
    "no optimizer": (lambda: Script(nn.Linear(4, 1), {}), ConfigError, ["optimizers is empty"]),
    "parameters for an optimizer": (lambda: Script(nn.Linear(4, 1), nn.Linear(4, 1)), ConfigError, ["Linear", "torch.optim.Optimizer"]),
    "a function for a model": (lambda: Script(lambda x: x, None), ConfigError, ["function", "torch.nn.Module"]),
    "a listener that is none": (lambda: make(callbacks=[print]), ConfigError, ["callbacks", "safetrain.Callback"]),
    "a misspelt hook": (lambda: type("Mine", (Callback,), {"on_step_ended": print}), ConfigError, ["Mine.on_step_ended", "did you mean `on_step_end`?"]),
    "resume of nothing": (lambda: make().fit(batches(), resume="gone"), CheckpointError, ["gone"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_in_a_script_gives_one_clear_error(case: str) -> None:
    run, kind, expected = BAD_INPUT[case]
    with pytest.raises(kind) as caught:
        run()
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_bad_numbers_never_reach_the_weights(fill: float) -> None:
    trainer = make(nonfinite="raise")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError):
        trainer.fit(batches(fill=fill))
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
