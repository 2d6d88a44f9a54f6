"""The command line, as a person uses it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from safetrain import cli
from safetrain.cli import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, VERBS, main

TRAINER = """
import torch
from pydantic import BaseModel
from torch import nn
from torch.utils.data import TensorDataset
from safetrain import Trainer

class Toy(Trainer):
    class Params(BaseModel, extra="forbid"):
        hidden: int = 8

    @classmethod
    def build_model(cls, params):
        return nn.Sequential(nn.Linear(4, params.hidden), nn.Dropout(0.1), nn.ReLU(), nn.Linear(params.hidden, 1))

    @classmethod
    def build_data(cls, params):
        x = torch.randn(40, 4)
        y = x.sum(1, keepdim=True)
        return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)
"""
CONFIG = (
    "trainer: toy.py:Toy\nloop: {max_epochs: 2, log_every: 1}\noptim: {name: AdamW, lr: 1e-2}\ndata: {batch_size: 8}\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a trainer file and its config."""
    (tmp_path / "toy.py").write_text(TRAINER)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=120, check=False)


def wait_until(happened: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").rglob("model.pt"))[-1]
    loaded: dict[str, torch.Tensor] = torch.load(newest, weights_only=True)
    return loaded


# ---------------------------------------------------------------------------------------------- answering at once


def test_what_is_missing_or_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for args, told in (
        (["run"], "required: FILE\n"),
        (["resume"], "required: RUN_DIR\n"),
        (["--fast"], "no option --fast"),
    ):
        with pytest.raises(SystemExit):
            main(args)
        assert told in capsys.readouterr().err


def test_verbs_are_frozen() -> None:
    """Scripts of others call these."""
    assert [verb.name for verb in VERBS] == [
        "run", "resume", "validate", "config", "schema", "verify-resume",
        "memory", "plan", "bisect", "doctor", "rules", "explain",
    ]  # fmt: skip


@pytest.mark.parametrize("args", [["--help"], [], *[[verb.name, "--help"] for verb in VERBS], ["config"], ["schema"]])
def test_help_answers_without_importing_torch(args: list[str]) -> None:
    code = (
        "import sys, contextlib\n"
        "from safetrain.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({args!r})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100


def test_help_of_the_module_lists_every_verb() -> None:
    done = python("-m", "safetrain", "--help")
    assert done.returncode == 0
    told = " ".join(done.stdout.split())
    for verb in VERBS:
        assert f"{verb.name} {verb.help}" in told


def test_config_help_explains_fields_and_schema_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    assert (
        "loop.accumulate  (whole number, default 1)\n    Micro-batches per optimizer step." in capsys.readouterr().out
    )
    assert main(["schema"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["properties"]["trainer"]["description"].startswith(
        "The Trainer subclass"
    )


def test_config_prints_what_a_file_and_overrides_come_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "toy.yaml", "optim.lr=3e-4"]) == EXIT_OK
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (
        resolved["optim"]["lr"] == 3e-4 and resolved["loop"]["max_epochs"] == 2 and resolved["data"]["num_workers"] == 0
    )


# ---------------------------------------------------------------------------------------------- running


def test_a_run_trains_writes_its_folder_and_says_how_it_went(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "run_dir=out", "optim.lr=2e-2"]) == EXIT_OK
    out = folder / "out"
    names = {path.name.partition(".out.")[0] for path in out.iterdir()}
    assert names == {"config.yaml", "environment.json", "metrics.jsonl", "findings.jsonl", "events", "checkpoints"}
    assert yaml.safe_load((out / "config.yaml").read_text())["optim"]["lr"] == 2e-2
    record = json.loads((out / "environment.json").read_text())[0]
    assert (
        torch.__version__.startswith(record["packages"]["torch"])
        and record["command"]
        and record["folder"] == str(folder)
    )
    logged = rows(out)
    assert [row["step"] for row in logged if "train/loss" in row] == list(range(1, 9))
    assert [row["step"] for row in logged if "val/loss" in row] == [4, 8]

    told = capsys.readouterr().out
    assert "trained     8 steps in" in told
    assert "validation  loss" in told
    assert "memory, MB  start" in told and "after backward" in told and "peak" in told
    assert "findings    none" in told
    assert "tensorboard --logdir out" in told


def test_a_run_that_is_told_to_end_saves_says_how_to_go_on_and_does_not_claim_success(folder: Path) -> None:
    command = [sys.executable, "-m", "safetrain", "run", "toy.yaml", "run_dir=out", "loop.max_epochs=100000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (folder / "out" / "metrics.jsonl").exists() and len(rows(folder / "out")) > 5)
    run.send_signal(signal.SIGTERM)
    told, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert "stopped     signal SIGTERM" in told and "python -m safetrain resume out" in told
    steps = rows(folder / "out")[-1]["step"]
    assert main(["resume", "out", f"loop.max_steps={int(steps) + 2}"]) == EXIT_OK
    assert rows(folder / "out")[-1]["step"] == steps + 2


def test_runs_without_a_folder_get_one_each(folder: Path) -> None:
    for _ in range(2):
        assert main(["run", "toy.yaml", "loop.max_epochs=1", "callbacks.tensorboard=false"]) == EXIT_OK
    assert len(list((folder / "runs").glob("toy-*"))) == 2


def test_options_and_overrides_may_come_in_any_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "--dry-run", "optim.lr=1e-3", "--traceback", "params.hidden=4"]) == EXIT_OK
    assert "dry run" in capsys.readouterr().out


def test_a_dry_run_leaves_nothing_behind(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    assert main(["run", "toy.yaml", "--dry-run"]) == EXIT_OK
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before - {"__pycache__"}


def test_a_resumed_run_equals_one_that_never_stopped(folder: Path) -> None:
    assert main(["run", "toy.yaml", "run_dir=whole", "loop.max_epochs=4"]) == EXIT_OK
    assert main(["run", "toy.yaml", "run_dir=parts", "loop.max_steps=6"]) == EXIT_OK  # the middle of the second epoch
    assert main(["resume", "parts", "loop.max_steps=null", "loop.max_epochs=4"]) == EXIT_OK
    whole, parts = weights(folder / "whole"), weights(folder / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [row["train/loss"] for row in rows(folder / "whole") if "train/loss" in row] == [
        row["train/loss"] for row in rows(folder / "parts") if "train/loss" in row
    ]
    assert yaml.safe_load((folder / "parts" / "config-1.yaml").read_text())["loop"]["max_steps"] == 6
    assert len(json.loads((folder / "parts" / "environment.json").read_text())) == 2


def test_a_run_folder_can_be_resumed_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["run", "toy.yaml", "run_dir=out"]) == EXIT_OK
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert main(["resume", str(folder / "out"), "loop.max_epochs=3"]) == EXIT_OK
    assert rows(folder / "out")[-1]["step"] == 12


def test_resuming_a_run_that_reached_its_end_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy.yaml", "run_dir=out"]) == EXIT_OK
    assert main(["resume", "out"]) == EXIT_OK
    assert (
        "trained     0 steps on top of 8" in (told := capsys.readouterr().out) and "nothing was left to train" in told
    )


def test_validate_builds_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "toy.yaml"]) == EXIT_OK
    assert "the config is right" in capsys.readouterr().out
    assert not (folder / "runs").exists()
    assert main(["validate", "toy.yaml", "optim.name=Adan"]) == EXIT_REFUSED


@pytest.mark.slow
def test_verify_resume_proves_it_for_a_users_own_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-resume", "toy.yaml", "--at", "3", "loop.max_steps=6"]) == EXIT_OK
    assert capsys.readouterr().out.startswith("exact: stopped after step 3")


@pytest.mark.slow
def test_verify_resume_names_what_a_run_does_not_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forgetful = TRAINER.replace(
        "x, y = batch\n", "x, y = batch\n        self.scale = getattr(self, 'scale', 1.0) * 0.9\n"
    ).replace("(self.model(x), y)", "(self.model(x), y) * self.scale")
    (folder / "forgetful.py").write_text(forgetful)
    command = ["verify-resume", "toy.yaml", "--at", "3", "loop.max_steps=6", "trainer=forgetful.py:Toy"]
    assert main(command) == EXIT_FAILED
    told = capsys.readouterr().out
    assert told.startswith("not exact") and "first: " in told and "attribute of the trainer" in " ".join(told.split())


# ---------------------------------------------------------------------------------------------- errors


def test_our_errors_are_one_message_and_traceback_shows_where(folder: Path) -> None:
    done = python("-m", "safetrain", "run", "toy.yaml", "optim.lr=fast")
    assert done.returncode == EXIT_REFUSED
    assert (
        done.stderr.startswith("safetrain run: toy.yaml: optim.lr: should be a number")
        and "Traceback" not in done.stderr
    )
    done = python("-m", "safetrain", "run", "toy.yaml", "optim.lr=fast", "--traceback")
    assert done.returncode == EXIT_REFUSED
    assert "Traceback" in done.stderr and "ConfigError" in done.stderr


def test_words_that_a_verb_does_not_take_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["rules", "all"])
    assert "rules does not understand all" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- rules


def test_rules_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == EXIT_OK
    listed = capsys.readouterr().out
    assert "G101  graph-retained" in listed
    for line in listed.splitlines():
        assert main(["explain", line.split()[0]]) == EXIT_OK
        assert line.split()[1] in capsys.readouterr().out
    assert main(["explain", "graph-retained"]) == EXIT_OK
    assert "G101" in capsys.readouterr().out


def test_every_rule_has_a_page() -> None:
    import safetrain.rules  # noqa: F401  (fills the catalogue)
    from safetrain.findings import RULES

    pages = Path(cli.__file__).parents[1] / "docs" / "rules"
    assert [code for code in sorted(RULES) if not (pages / f"{code}.md").is_file()] == []
