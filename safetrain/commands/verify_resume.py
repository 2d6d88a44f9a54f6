"""Proof that a run which is stopped and resumed ends like one that is not, for a user's own config.

Three fresh processes: one trains to the end, one is stopped after the given step and saved, one resumes that to the
end. Then every entry of the two final states is compared bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from safetrain import checkpoint
from safetrain.callbacks.base import Callback
from safetrain.checkpoint.plain import entries, same
from safetrain.config import Config
from safetrain.config import file as config_file
from safetrain.config.build import build
from safetrain.errors import ConfigError, SafetrainError
from safetrain.state import RunState

Part = Literal["whole", "stopped", "resumed"]

_IGNORED = ("versions", "classes")
_CONFIG, _RUN, _END = "config.yaml", "run", "end"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What the comparison found."""

    at_step: int
    last_step: int
    num_entries: int
    differing: tuple[tuple[str, str], ...]
    """Entries that differ, in the order of the state, each with what differs."""
    repeats: bool | None = None
    """Whether two runs that nothing interrupts are the same; looked at only when something differs."""

    @property
    def exact(self) -> bool:
        """Every entry has the same bits."""
        return not self.differing

    def __str__(self) -> str:
        run = f"stopped after step {self.at_step}, resumed in a fresh process, trained to step {self.last_step}"
        if self.exact:
            return f"exact: {run}; all {self.num_entries} entries of its state have the bits of the uninterrupted run"
        name, what = self.differing[0]
        lines = [
            f"not exact: {run}; {len(self.differing)} of {self.num_entries} entries differ from the uninterrupted run",
            f"first: {name}: {what}",
        ]
        lines += [f"also: {name}" for name, _ in self.differing[1:6]]
        if len(self.differing) > 6:
            lines.append(f"… and {len(self.differing) - 6} more")
        lines.append(_NOT_REPEATABLE if self.repeats is False else _INCOMPLETE)
        return "\n".join(lines)


_NOT_REPEATABLE = (
    "But two uninterrupted runs differ from each other as well, so the training itself does not repeat and resuming is "
    "not to blame: set `seed`, try `deterministic: true`, and look for randomness that is not seeded"
)
_INCOMPLETE = (
    "Two uninterrupted runs are the same, so something that shapes the run is not saved: usually an attribute of the "
    "trainer (give it state_dict and load_state_dict), of a module (get_extra_state) or of a callback (state_dict)"
)


def verify(config: Config, at_step: int) -> ResumeReport:
    """Run `config` uninterrupted, and stopped after `at_step` optimizer steps and resumed; compare the ends.

    Costs two trainings (three when they differ), each in a process of its own and in a temporary folder.

    Raises:
        ConfigError: `at_step` is not inside the run.
        SafetrainError: a run failed; the message has the end of what it printed.
    """
    if at_step < 1:
        raise ConfigError(f"--at {at_step}: steps are counted from 1")
    with tempfile.TemporaryDirectory(prefix="safetrain-verify-") as folder:
        root = Path(folder)
        (root / _CONFIG).write_text(config_file.dump(config), encoding="utf-8")
        whole = _end_of(root, ["whole"], at_step)
        last_step = whole["counters"]["step"]
        if at_step >= last_step:
            raise ConfigError(f"--at {at_step}: the run ends after step {last_step}; choose an earlier step")
        resumed = _end_of(root, ["stopped", "resumed"], at_step)
        differing = tuple(_differences(whole, resumed))
        repeats = not any(_differences(whole, _end_of(root, ["whole"], at_step))) if differing else None
    return ResumeReport(at_step, last_step, len(_compared(whole)), differing, repeats)


def _end_of(root: Path, parts: Sequence[Part], at_step: int) -> dict[str, Any]:
    """The final state after running `parts` in fresh processes. The same path each time: it may occur in the state."""
    with tempfile.TemporaryDirectory(dir=root) as aside:
        for part in parts:
            command = [sys.executable, "-m", "safetrain.commands.verify_resume", part, str(root), str(at_step)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                told = "\n".join(done.stdout.strip().splitlines()[-15:])
                raise SafetrainError(f"the {part} run failed with exit code {done.returncode}:\n{told}")
        payload = checkpoint.read(root / _END)
        for name in (_RUN, _END):
            if (root / name).exists():
                (root / name).rename(Path(aside) / name)
    return payload


def _compared(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entries(payload) if name.split(".", 1)[0] not in _IGNORED}


def _differences(left: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, str]]:
    """Entries of an uninterrupted and a resumed run that differ, and how."""
    mine, theirs = _compared(left), _compared(right)
    found = []
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if name not in theirs or name not in mine:
            found.append((_described(name, left), f"only in the {'uninterrupted' if name in mine else 'resumed'} run"))
        elif not same(mine[name], theirs[name]):
            found.append((_described(name, left), _how(mine[name], theirs[name])))
    return found


def _described(name: str, payload: dict[str, Any]) -> str:
    """`optimizers.main.state.3.exp_avg` with the name of the parameter that 3 stands for."""
    words = name.split(".")
    if words[0] == "optimizers" and words[2:3] == ["state"]:
        params = [param for group in payload["optimized"][words[1]] for param in group]
        if words[3].isdigit() and int(words[3]) < len(params):
            return f"{name} (of {params[int(words[3])]})"
    return name


def _how(left: Any, right: Any) -> str:
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return f"{left!r} uninterrupted, {right!r} resumed" if not isinstance(left, Tensor) else "of another type"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {list(left.shape)} uninterrupted, {right.dtype} {list(right.shape)} resumed"
    gap = (left.double() - right.double()).abs()
    return f"{int(torch.count_nonzero(left != right))} of {left.numel()} values differ, by up to {gap.max():.3g}"


class _Killed(BaseException):
    """Ends a run where it is, as a power cut would: nothing is evaluated or saved any more."""


class _KillAfter(Callback):
    """Has a step saved, then kills the run."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, state: RunState) -> None:
        if state.step == self._step:
            state.save_request = "verify-resume"

    def on_checkpoint_saved(self, state: RunState) -> None:
        if state.step == self._step:
            raise _Killed


def _run_part(part: Part, root: Path, at_step: int) -> None:
    """What one of the processes does."""
    run = root / _RUN
    job = build(config_file.load(root / _CONFIG), run, [_KillAfter(at_step)] if part == "stopped" else [])
    try:
        job.trainer.fit(job.train, job.val, resume=run if part == "resumed" else None)
    except _Killed:
        return
    job.trainer.save(root / _END)


if __name__ == "__main__":
    _run_part(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))  # type: ignore[arg-type]
