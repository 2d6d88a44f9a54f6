"""What callbacks that write files need: a run directory that takes them, or one clear error before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.state import RunState


def writable_run_dir(state: RunState, who: str, folder: Path | None = None) -> Path:
    """`folder`, or the run's directory, made if missing.

    Raises:
        ConfigError: there is none, or it cannot be written.
    """
    path = folder if folder is not None else state.run_dir
    if path is None:
        raise ConfigError(f'{who} has nowhere to write: give the Trainer `run_dir="runs/my-run"`, or remove {who}')
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, who, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise unwritable(path, who, PermissionError(13, "no permission to write"))
    return path


def unwritable(path: Path, who: str, error: OSError) -> ConfigError:
    """The error for a place that cannot be written."""
    return ConfigError(
        f"{who} cannot write to {path} ({error.strerror or error}): choose another `run_dir`, "
        f"or make this one writable (`chmod u+rwx {path}`)"
    )
