"""The folder of a run: which one, that nothing in it is overwritten, and the record of config and environment."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from safetrain.callbacks.base import Callback
from safetrain.config import Config
from safetrain.config.file import dump
from safetrain.errors import CheckpointError, ConfigError
from safetrain.state import RunState

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
_MARKS = (CONFIG, ENVIRONMENT, "metrics.jsonl", "findings.jsonl", "checkpoints")
"""Any of these says that a folder holds a run."""
_PACKAGES = ("safetrain", "torch", "numpy", "pydantic", "torchdata", "tensorboard", "tqdm", "scikit-learn")
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)


def choose(config: Config, name: str) -> Path:
    """The folder of a new run: `config.run_dir` or runs/<name>-<date>-<time>. Nothing is made yet.

    Raises:
        ConfigError: it already holds a run, or cannot be written.
    """
    path = config.run_dir
    if path is None:
        first = Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        path = next(p for n in range(1000) if not (p := first.with_name(first.name + (f"-{n}" if n else ""))).exists())
    held = [mark for mark in _MARKS if (path / mark).exists()]
    if held:
        raise ConfigError(
            f"run_dir: {path} already holds a run ({', '.join(held)}), which is left as it is; "
            f"continue it with `python -m safetrain resume {shlex.quote(str(path))}` or choose another folder: "
            "run_dir=…"
        )
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"run_dir: cannot write to {path}: {existing} is no folder; choose another: run_dir=…")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run_dir: cannot write to {path}: no permission in {existing}; choose another: run_dir=…")
    return path


class Record(Callback):
    """Writes config and environment when a fit starts: by then a checkpoint to resume from was found to fit."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def on_fit_start(self, state: RunState) -> None:
        """Write them to the run directory."""
        if state.run_dir is not None:
            record(state.run_dir, self._config)


def record(path: Path, config: Config) -> None:
    """Make the folder, write the config as it was resolved, and add this start to the list in environment.json.

    A config that differs from the one already there (a run resumed with other settings) takes its place; the former
    is kept as config-1.yaml, config-2.yaml, …

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        _record(path, dump(config))
    except OSError as error:
        raise ConfigError(
            f"run_dir: cannot write to {path}: {error.strerror}; choose another folder: run_dir=…"
        ) from error


def _record(path: Path, text: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    target = path / CONFIG
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.rename(next(p for n in range(1, 10_000) if not (p := path / f"config-{n}.yaml").exists()))
    target.write_text(text, encoding="utf-8")
    file = path / ENVIRONMENT
    starts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    starts.append(environment())
    file.write_text(json.dumps(starts, indent=2) + "\n", encoding="utf-8")


def config_of(path: Path) -> Path:
    """The config of the run in `path`. Raises `CheckpointError` when there is no such run."""
    if not path.is_dir():
        raise CheckpointError(
            f"no run folder {path}; give the folder that `run` printed, e.g. runs/digits-20260101-120000"
        )
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG}, so it was not made by `python -m safetrain run`; give the folder of a run"
        )
    return file


def environment() -> dict[str, Any]:
    """What a person needs to repeat a run: versions, machine, commit of the current folder, command. Imports torch."""
    import torch

    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "folder": str(Path.cwd()),
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "torch_build": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "system": platform.platform(),
        "cpu": {"machine": platform.machine(), "count": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit of the current folder and whether files differ from it; None outside a repository or without git."""

    def ask(*args: str) -> str | None:
        try:
            answer = subprocess.run(["git", *args], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "changed": bool(ask("status", "--porcelain"))}
