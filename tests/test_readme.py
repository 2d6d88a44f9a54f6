"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from safetrain.config import build
from safetrain.config import file as config_file

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_script_runs_and_learns() -> None:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block("python"), "README.md", "exec"), names)
    assert names["trainer"].state.eval_metrics["loss"] < 0.5
    assert names["trainer"].state.epoch == 10


def test_the_config_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "readme.yaml").write_text(block("yaml"))
    job = build.build(config_file.load(tmp_path / "readme.yaml"))
    assert type(job.trainer).__name__ == "DigitsTrainer"
