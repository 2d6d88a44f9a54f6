"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError
from safetrain.memory import meter_for

if TYPE_CHECKING:
    from safetrain.state import RunState


class _Bar(tqdm):  # type: ignore[type-arg]
    # Without tqdm's watcher thread: Python warns when a process with threads forks loader workers.
    monitor_interval = 0


class Progress(Callback):
    """Shows step, rate, loss and memory.

    On a terminal: a bar that moves each step, its numbers renewed on logging steps, and a line that stays for each
    evaluation. Elsewhere (a log file, CI), where a reader wants to know that the run is alive and how it ended: a line
    for the first row, then for training rows at most one every `plain_every_s` seconds, one for every evaluation (with
    the training loss last logged), and one at the end.

    Args:
        plain_every_s: seconds between lines of training rows when not on a terminal; 0 writes every row.
        stream: where to write; default standard error.
    """

    def __init__(self, *, plain_every_s: float = 10.0, stream: TextIO | None = None) -> None:
        if plain_every_s < 0:
            raise ConfigError(f"Progress: plain_every_s={plain_every_s} must not be negative")
        self._plain_every_s = plain_every_s
        self._given_stream = stream
        self._stream: TextIO = stream or sys.stderr
        self._bar: Any = None
        self._held_back = ""
        self._failed = False

    def on_fit_start(self, state: RunState) -> None:
        """Open the bar."""
        self._stream = self._given_stream or sys.stderr
        self._meter = meter_for(state.device)
        self._first_step, self._started = state.step, time.monotonic()
        self._last_step, self._last_time, self._shown_at = state.step, self._started, -1e9
        self._held_back, self._failed = "", False
        self._train_loss: float | None = None
        if self._stream.isatty():
            self._bar = _Bar(
                total=state.total_steps,
                initial=state.step,
                unit="step",
                file=self._stream,
                dynamic_ncols=True,
                desc="train",
            )

    def on_step_end(self, state: RunState) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update()

    def on_log(self, state: RunState) -> None:
        """Show the row."""
        is_evaluation = any(key.startswith("val/") for key in state.row)
        if self._bar is not None:
            if is_evaluation:
                self._write(_evaluation_line(state, None))
            else:
                self._bar.set_postfix_str(_numbers(state.row, self._memory(state.row)), refresh=False)
            return
        if is_evaluation:
            self._write(_evaluation_line(state, self._train_loss))
            self._held_back = ""  # what it would say of the loss has been said
            return
        now = time.monotonic()
        self._train_loss = state.row.get("train/loss")
        line = self._training_line(state, now)
        if now - self._shown_at < self._plain_every_s:
            self._held_back = line
            return
        self._write(line)
        self._held_back, self._shown_at = "", now

    def on_exception(self, state: RunState) -> None:
        """Leave the terminal clean for the traceback."""
        self._failed = True
        self._close()

    def on_fit_end(self, state: RunState) -> None:
        """Close the bar and say how the run ended."""
        self._close()
        if self._held_back:
            self._write(self._held_back)
            self._held_back = ""
        if not self._failed:
            seconds = time.monotonic() - self._started
            rate = (state.step - self._first_step) / max(seconds, 1e-9)
            why = f": {state.stop_reason}" if state.stop_reason else ""
            self._write(f"finished at step {state.step} after {_duration(seconds)}, {rate:.3g} steps/s{why}")

    def _training_line(self, state: RunState, now: float) -> str:
        rate = (state.step - self._last_step) / max(now - self._last_time, 1e-9)
        self._last_step, self._last_time = state.step, now
        of = f"/{state.total_steps}" if state.total_steps else ""
        numbers = _numbers(state.row, self._memory(state.row))
        return f"step {state.step}{of}  epoch {state.epoch}  {numbers}  {rate:.3g} steps/s"

    def _memory(self, row: dict[str, float]) -> str:
        """The run's peak where somebody measured it, else what is in use now."""
        if "memory/peak_mb" in row:
            return f"peak {_megabytes(row['memory/peak_mb'])}"
        return f"memory {_megabytes(self._meter.read() / 1e6)}"

    def _write(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


_NOT_SHOWN = ("train/lr", "train/loss_scale")


def _numbers(row: dict[str, float], memory: str) -> str:
    """`loss 0.1234  accuracy 0.98  peak 120 MB`."""
    shown = [
        f"{key.removeprefix('train/')} {value:.4g}"
        for key, value in row.items()
        if key.startswith("train/") and not key.startswith(_NOT_SHOWN) and (value or key != "train/skipped_steps")
    ]
    return "  ".join([*shown, memory])


def _evaluation_line(state: RunState, train_loss: float | None) -> str:
    """The evaluation, beside the training loss last logged where the bar does not show it."""
    before = "" if train_loss is None else f"loss {train_loss:.4g}  "
    values = "  ".join(f"{key} {value:.4g}" for key, value in state.row.items() if key.startswith("val/"))
    return f"step {state.step}  epoch {state.epoch}  {before}{values}"


def _megabytes(value: float) -> str:
    return f"{value:.0f} MB" if value < 10_000 else f"{value / 1000:.1f} GB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
