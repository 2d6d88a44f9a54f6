"""What a run says when it is over: metrics, time, memory by phase, findings and where to look, or why it failed."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from safetrain.callbacks.base import Callback
from safetrain.data.batch import tensors_in
from safetrain.findings import Finding
from safetrain.source import traceback_line
from safetrain.state import RunState

_PHASES = ("start", "after_forward", "after_backward", "after_step", "evaluation", "peak")


class RunNotes(Callback):
    """Keeps what the last lines of a run need: the newest number of each name, the time, and where it failed.

    Last in the list of listeners, so that the rows are complete.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.failure: str | None = None
        self.elapsed_s = 0.0
        self._started = 0.0
        self._first_step = 0

    def on_fit_start(self, state: RunState) -> None:
        """Start the clock."""
        self._started, self._first_step = time.monotonic(), state.step

    def on_log(self, state: RunState) -> None:
        """Keep the numbers."""
        self.values.update(state.row)

    def on_exception(self, state: RunState) -> None:
        """Say where it happened while the state still knows."""
        assert state.exception is not None
        self.failure = describe_failure(state.exception, state)

    def on_fit_end(self, state: RunState) -> None:
        """Stop the clock."""
        self.elapsed_s = time.monotonic() - self._started

    def summary(self, state: RunState, findings: Iterable[Finding]) -> str:
        """Several lines for people."""
        run_dir = state.run_dir
        made = state.step - self._first_step
        rate = f", {made / self.elapsed_s:,.0f} steps/s" if made and self.elapsed_s else ""
        skipped = f", {state.skipped_steps} skipped" if state.skipped_steps else ""
        resumed = f" on top of {self._first_step:,}" if self._first_step else ""
        lines = [("trained", f"{made:,} steps{resumed}{skipped} in {_duration(self.elapsed_s)}{rate}")]
        if not made:
            lines.append(("", "nothing was left to train; raise loop.max_steps or loop.max_epochs to go on"))
        if state.stop_reason:
            lines.append(("stopped", state.stop_reason))
        if state.eval_metrics:
            lines.append(("validation", "  ".join(f"{name} {value:.4g}" for name, value in state.eval_metrics.items())))
        elif "train/loss" in self.values:
            lines.append(("train loss", f"{self.values['train/loss']:.4g} (nothing was evaluated)"))
        memory = [(p, self.values[key]) for p in _PHASES if (key := f"memory/{p}_mb") in self.values]
        if memory:
            lines.append(
                ("memory, MB", "  ".join(f"{phase.replace('_', ' ')} {value:,.1f}" for phase, value in memory))
            )
        lines += [("findings" if n == 0 else "", text) for n, text in enumerate(_findings(findings))]
        if run_dir is not None:
            lines.append(("run folder", str(run_dir)))
            if state.stop_reason and state.stop_reason.startswith("signal"):
                lines.append(("go on with", f"python -m safetrain resume {shlex.quote(str(run_dir))}"))
            lines.append(("look at it", f"{_tensorboard()} --logdir {shlex.quote(str(_shown(run_dir)))}"))
        return "\n".join(f"{name:<11} {text}" for name, text in lines)


def describe_failure(error: BaseException, state: RunState) -> str:
    """One paragraph: step, error, the user's line, and the shapes of the batch that was being processed."""
    where = f"evaluation after step {state.step}" if state.phase == "eval" else f"step {state.current_step}"
    text = f"{where}: {type(error).__name__}: {error}"
    line = traceback_line(error.__traceback__)
    if line is not None:
        text += f"\n  at {line.file}:{line.line}: {line.text}"
    if state.batch is not None:
        text += f"\n  the batch was {describe_batch(state.batch)}"
    return text


def describe_batch(batch: Any) -> str:
    """Types and shapes of a batch's tensors."""
    if isinstance(batch, Tensor):
        return _tensor(batch)
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{key!r}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)) and len(batch) <= 8:
        return f"{type(batch).__name__}({', '.join(describe_batch(value) for value in batch)})"
    shapes = ", ".join(_tensor(tensor) for tensor in tensors_in(batch))
    return f"{type(batch).__name__}({shapes})" if shapes else f"a {type(batch).__name__}"


def _tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _findings(findings: Iterable[Finding]) -> list[str]:
    """`none`, or one line each."""
    told = []
    for finding in findings:
        times = f", {finding.count} times" if finding.count > 1 else ""
        told.append(
            f"{finding.code} {finding.name} ({finding.severity}, step {finding.first_step}{times}): {finding.message}"
        )
    return told or ["none"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _tensorboard() -> str:
    """The command as it can be typed here, where the environment may not be the active one."""
    ours = Path(sys.executable).parent / "tensorboard"
    if shutil.which("tensorboard") == str(ours) or not ours.exists():
        return "tensorboard"
    return shlex.quote(str(_shown(ours)))


def _shown(path: Path) -> Path:
    """Relative where that is shorter to type."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
