"""Rows of the run as JSON, one object a line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from safetrain.callbacks.base import Callback
from safetrain.callbacks.run_dir import unwritable, writable_run_dir

if TYPE_CHECKING:
    from safetrain.state import RunState


class JsonlMetrics(Callback):
    """Writes each row to `metrics.jsonl` in the run directory: its values with `step`, `epoch` and `time`.

    `time` is in seconds since 1970.

    Each row reaches the file system as it is written, so a crash loses none. A resumed run appends, after cutting off
    what was written after the checkpoint that it resumed from. A new run in a used directory keeps the old file as
    `metrics.1.jsonl`. Inf and NaN are written as `Infinity` and `NaN`, which Python reads back.

    Raises:
        ConfigError: at fit start, when there is no run directory or it cannot be written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = Path(path) if path is not None else None
        self._file: TextIO | None = None
        self._rows: int | None = None  # in the file; None before it is known

    def on_fit_start(self, state: RunState) -> None:
        """Open the file and cut it back to the run's step."""
        self._close()
        if self._given is None:
            path = writable_run_dir(state, "JsonlMetrics") / "metrics.jsonl"
        else:
            path = writable_run_dir(state, "JsonlMetrics", self._given.parent) / self._given.name
        try:
            if state.step == 0:
                _set_aside(path)
            self._rows = _cut_back(path, state.step, self._rows) if path.exists() else 0
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed at fit end
        except OSError as error:
            raise unwritable(path, "JsonlMetrics", error) from error

    def on_log(self, state: RunState) -> None:
        """Write the row."""
        if self._file is None or self._rows is None:
            return
        row: dict[str, Any] = {"step": state.step, "epoch": state.epoch, "time": round(time.time(), 3), **state.row}
        self._file.write(json.dumps(row) + "\n")
        self._rows += 1

    def on_fit_end(self, state: RunState) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """How many rows were written: a resumed run goes on after them."""
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._rows = state["rows"]

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, in order."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _set_aside(path: Path) -> None:
    """Keep the rows of an earlier run under a free name."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


def _cut_back(path: Path, step: int, rows: int | None) -> int:
    """Keep the first `rows` rows (None: any number) up to `step`; returns how many stayed.

    A line that a crash left unfinished goes too.
    """
    end = kept = 0
    with path.open("rb") as file:
        for line in file:
            if kept == rows or not line.endswith(b"\n") or _step_of(line) > step:
                break
            end += len(line)
            kept += 1
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
    return kept


def _step_of(line: bytes) -> float:
    """Step of a row; infinite for a line that is no row, so that it is cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
