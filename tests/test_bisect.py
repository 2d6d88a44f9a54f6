"""`bisect` names the part of a run that makes memory grow, or says that the training itself does."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from safetrain import memory
from safetrain.cli import EXIT_FAILED, EXIT_OK, main
from safetrain.commands.bisect import GrowthReport, bisect, describe, smallest_sets
from safetrain.config import file as config_file
from safetrain.errors import ConfigError, SafetrainError

pytestmark = pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here")

TRAINER = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from safetrain import Callback, Trainer

    KEPT = []


    class Clean(Trainer):
        @classmethod
        def build_model(cls, params):
            return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

        @classmethod
        def build_data(cls, params):
            x = torch.randn(64, 3)
            return TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x, x.sum(1, keepdim=True))

        def training_step(self, batch):
            x, y = batch
            return nn.functional.mse_loss(self.model(x), y)


    class Keeper(Callback):
        def on_step_end(self, state):
            KEPT.append(torch.zeros(512))


    class Patient(Callback):
        pass


    class InCallback(Clean):
        @classmethod
        def build_callbacks(cls, params):
            return [Patient(), Keeper()]


    class InEvaluation(Clean):
        def evaluation_step(self, batch):
            KEPT.append(torch.zeros(2000))
            return {"loss": self.training_step(batch)}


    class InTraining(Clean):
        def training_step(self, batch):
            if self.state.phase == "train":
                KEPT.append(torch.zeros(512))
            return super().training_step(batch)


    class Breaking(Clean):
        def training_step(self, batch):
            raise RuntimeError("the roof is on fire")
"""
CONFIG = """
    trainer: leaky.py:{name}
    loop: {{max_epochs: 1}}
    optim: {{name: SGD, lr: 1e-3}}
    data: {{batch_size: 16}}
    guards: "off"
    callbacks: {{progress: false, jsonl: false, tensorboard: false, checkpoint: false, lr_monitor: false,
      memory: false, throughput: false, early_stopping: true}}
"""


def write(folder: Path, name: str) -> Path:
    (folder / "leaky.py").write_text(textwrap.dedent(TRAINER))
    path = folder / "leaky.yaml"
    path.write_text(textwrap.dedent(CONFIG.format(name=name)))
    return path


def search(folder: Path, name: str) -> GrowthReport:
    return bisect(config_file.load(write(folder, name)))


def test_growth_that_remains_with_everything_off_is_the_trainings_own(tmp_path: Path) -> None:
    report = search(tmp_path, "InTraining")
    assert report.smallest == ()
    assert report.bare.rate == pytest.approx(2048, rel=0.5)
    assert "the training itself grows by" in str(report) and "training_step" in str(report)


@pytest.mark.slow
def test_a_callback_that_keeps_is_named_among_others(tmp_path: Path) -> None:
    report = search(tmp_path, "InCallback")
    assert report.smallest == (frozenset({"callbacks/Keeper"}),)
    assert report.bare.rate == 0
    assert "smallest set that grows: callbacks (Keeper), which grows by" in str(report)


@pytest.mark.slow
def test_an_evaluation_that_keeps_is_named(tmp_path: Path) -> None:
    report = search(tmp_path, "InEvaluation")
    assert report.smallest == (frozenset({"evaluation"}),)


@pytest.mark.slow
def test_the_command_tells_each_run_and_its_exit_code_tells_growth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write(tmp_path, "InTraining"))
    assert main(["bisect", config, "guards=default"]) == EXIT_FAILED
    told = capsys.readouterr().out
    assert told.startswith("everything on: grows by") and "\neverything off: grows by" in told
    assert "the guards said: M402" in told and "KEPT.append(torch.zeros(512))" in told
    assert main(["bisect", config, f"trainer={tmp_path}/leaky.py:Clean", "--steps", "100"]) == EXIT_OK
    told = capsys.readouterr().out
    assert "memory does not grow: 100 steps with everything on rise by less than 2.0 kB a step" in told


def test_a_run_that_breaks_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(SafetrainError, match=r"the run failed with exit code 1:[\s\S]*the roof is on fire"):
        search(tmp_path, "Breaking")


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--steps 10: growth can be told from noise over 60 steps or more"):
        bisect(config_file.load(write(tmp_path, "Clean")), 10)


# ---------------------------------------------------------------- the search by itself

PARTS = frozenset({"callbacks/EMA", "callbacks/Keeper", "evaluation", "guards", "logging/metrics"})


def found(bare: float, *causes: tuple[set[str], float]) -> tuple[frozenset[str], ...]:
    """What the search finds where each cause grows by its rate as long as all of its parts are on."""
    return smallest_sets(PARTS, lambda on: bare + sum(rate for needed, rate in causes if needed <= on))


def test_two_that_grow_only_together_are_one_set() -> None:
    assert found(0, ({"callbacks/Keeper", "evaluation"}, 4e3)) == ({"callbacks/Keeper", "evaluation"},)


def test_two_that_grow_by_themselves_are_two_sets() -> None:
    sets = found(0, ({"callbacks/Keeper"}, 4e3), ({"evaluation"}, 4e3))
    assert set(sets) == {frozenset({"callbacks/Keeper"}), frozenset({"evaluation"})}


def test_what_grows_on_top_of_the_training_is_told_apart() -> None:
    assert found(5e3, ({"guards"}, 9e3)) == ({"guards"},)
    assert found(5e3, ({"guards"}, 400)) == ()
    assert found(5e3) == found(0) == ()


def test_parts_are_told_by_group() -> None:
    assert describe({"callbacks/Keeper", "callbacks/EMA", "guards"}) == "callbacks (EMA, Keeper), guards"
