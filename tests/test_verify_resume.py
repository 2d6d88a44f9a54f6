"""`verify-resume`: says exact when it is, and otherwise names the entry, the parameter and the likely cause."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from safetrain.commands.verify_resume import verify
from safetrain.config import Config
from safetrain.config import file as config_file
from safetrain.errors import ConfigError, SafetrainError

TRAINER = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from safetrain.loop import Trainer


    class Complete(Trainer):
        @classmethod
        def build_model(cls, params):
            return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))

        @classmethod
        def build_data(cls, params):
            x = torch.randn(20, 3)
            return TensorDataset(x, x.sum(1, keepdim=True)), None

        def training_step(self, batch):
            x, y = batch
            return nn.functional.mse_loss(self.model(x), y)


    class Forgetful(Complete):
        '''Its own average of the losses weighs the loss and is not saved.'''

        average = 1.0

        def training_step(self, batch):
            loss = super().training_step(batch)
            self.average = 0.9 * self.average + 0.1 * loss.item()
            return loss * self.average


    class Unseeded(Complete):
        def training_step(self, batch):
            import os

            return super().training_step(batch) * (1 + os.urandom(1)[0])


    class Breaking(Complete):
        def training_step(self, batch):
            raise RuntimeError("the roof is on fire")
"""


def config(folder: Path, trainer: str, *overrides: str) -> Config:
    (folder / "own.py").write_text(textwrap.dedent(TRAINER))
    (folder / "own.yaml").write_text(
        f"trainer: own.py:{trainer}\n"
        "loop: {max_steps: 9}\n"
        "optim: {name: AdamW, lr: 1e-2}\n"
        "data: {batch_size: 4, shuffle: true}\n"
        "device: cpu\n"
        "guards: 'off'\n"
    )
    return config_file.load(folder / "own.yaml", overrides)


def test_what_is_not_saved_is_found_and_the_entry_named(tmp_path: Path) -> None:
    report = verify(config(tmp_path, "Forgetful"), 4)
    assert not report.exact and report.repeats and report.last_step == 9
    text = str(report)
    assert "first: model.0.weight: 12 of 12 values differ, by up to" in text
    assert any(name.startswith("optimizers.main.state.0.exp_avg (of 0.weight)") for name, _ in report.differing)
    assert "an attribute of the trainer (give it state_dict and load_state_dict)" in text


@pytest.mark.slow
def test_a_run_whose_state_is_complete_is_exact(tmp_path: Path) -> None:
    report = verify(config(tmp_path, "Complete", "precision=fp16", "callbacks.ema={decay: 0.9}"), 7)
    assert report.exact, str(report)
    assert str(report).startswith("exact: stopped after step 7, resumed in a fresh process, trained to step 9; all ")


@pytest.mark.slow
def test_a_training_that_does_not_repeat_is_told_apart(tmp_path: Path) -> None:
    report = verify(config(tmp_path, "Unseeded"), 4)
    assert report.repeats is False and "the training itself does not repeat" in str(report)


def test_a_step_outside_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps are counted from 1"):
        verify(config(tmp_path, "Complete"), 0)
    with pytest.raises(ConfigError, match="--at 9: the run ends after step 9"):
        verify(config(tmp_path, "Complete"), 9)


def test_a_run_that_fails_shows_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(SafetrainError, match=r"(?s)the whole run failed with exit code 1:.*the roof is on fire"):
        verify(config(tmp_path, "Breaking"), 3)
