"""`python -m safetrain bisect CONFIG`: which part of a run makes memory grow?

The same steps run again and again, each time in a fresh process, with parts of the run switched off: listeners, the
rows of the log, evaluation, compile, guards, activation checkpointing. What is left when nothing more can be taken away
without the growth going away is the answer.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from safetrain.accounting.growth import FAST_RATE, FAST_STEPS, MIN_RATE, WARM_UP
from safetrain.accounting.tracks import host_meter, series_for
from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError, SafetrainError
from safetrain.graph import format_bytes
from safetrain.memory import Meter, meter_for

if TYPE_CHECKING:
    from safetrain.config import Config
    from safetrain.config.build import Job
    from safetrain.state import RunState

DEFAULT_STEPS = 200
MIN_STEPS = 60
_ROWS, _EVALUATIONS, _EVAL_BATCHES = 40, 20, 8
"""Rows of the log and evaluations that the steps are given at least, and batches of each evaluation at most."""
_WARM_UP_SHARE = 10
"""One step in so many, at the start, does not count."""
_EXCESS = 1.3
"""Growth that something adds to what the bare training does must be above this factor of it."""
_CONFIG, _RESULT = "config.yaml", "result.json"
_METRICS = "logging/metrics"
_LOGGING = ("Progress", "JsonlMetrics", "TensorBoard", "LrMonitor", "MemoryMonitor", "Throughput")

Parts = frozenset[str]
"""Names of parts of a run, such as `guards` or `callbacks/EMA`; what stands before the slash is its group."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the steps."""

    off: Parts
    rates: dict[str, float]
    """Bytes a step by meter, 0 where nothing grew."""
    num_steps: int
    parts: Parts
    """What could be switched off."""
    told: tuple[str, ...] = ()
    """What guards said about memory."""

    @property
    def rate(self) -> float:
        """The fastest growth that any meter saw, bytes a step."""
        return max(self.rates.values(), default=0.0)

    def __str__(self) -> str:
        grown = [f"{format_bytes(rate)} a step ({meter})" for meter, rate in self.rates.items() if rate]
        return "grows by " + ", ".join(grown) if grown else "does not grow"


@dataclass(frozen=True, slots=True)
class GrowthReport:
    """What was found."""

    trials: tuple[Trial, ...]
    """In the order of running; the first with everything on, the second, if there is one, with everything off."""
    smallest: tuple[Parts, ...]
    """Sets of parts that grow beyond what the bare training does and do so no longer when any of them is off."""

    @property
    def grows(self) -> bool:
        """With everything on."""
        return self.trials[0].rate > 0

    @property
    def bare(self) -> Trial | None:
        """The training with everything off; None when nothing grew."""
        return self.trials[1] if self.grows else None

    def __str__(self) -> str:
        whole, bare = self.trials[0], self.bare
        if bare is None:
            least = _least_rate(whole.num_steps)
            return (
                f"memory does not grow: {whole.num_steps} steps with everything on rise by less than "
                f"{format_bytes(least)} a step, the least that so many steps can tell; more --steps see less"
            )
        lines = []
        if bare.rate:
            lines.append(
                f"the training itself {bare} with everything off: look at training_step, the model, the data and the "
                "optimizer"
            )
        for parts in self.smallest:
            also = "on top of that " if bare.rate else ""
            lines.append(f"smallest set that grows {also}".rstrip() + f": {describe(parts)}, which {self._of(parts)}")
        if not lines:
            lines.append("with everything off the growth went away, and no set of parts shows it again")
        return "\n".join([*lines, *(f"the guards said: {told}" for told in whole.told)])

    def _of(self, parts: Parts) -> Trial:
        return next(trial for trial in self.trials if trial.parts - trial.off == parts)


def bisect(
    config: Config, num_steps: int = DEFAULT_STEPS, tell: Callable[[str], None] = lambda line: None
) -> GrowthReport:
    """Run `num_steps` steps of `config` with everything, with nothing, and between; each run is told to `tell`.

    Every run trains from the start, with the same seed, in a process and a temporary folder of its own. Evaluations
    and rows of the log come often enough to be seen in so few steps, so that rates are those of the replay.

    Raises:
        ConfigError: too few steps to tell growth from noise.
        SafetrainError: a run failed; the message has the end of what it printed.
    """
    if num_steps < MIN_STEPS:
        raise ConfigError(f"--steps {num_steps}: growth can be told from noise over {MIN_STEPS} steps or more")
    trials: dict[Parts, Trial] = {}
    with tempfile.TemporaryDirectory(prefix="safetrain-bisect-") as folder:
        from safetrain.config import file as config_file

        (Path(folder) / _CONFIG).write_text(config_file.dump(_prepared(config, num_steps)), encoding="utf-8")

        def run(off: Parts) -> float:
            if off not in trials:
                trials[off] = _in_a_process(Path(folder), off, num_steps)
                tell(f"{_row(trials[off])}: {trials[off]}")
            return trials[off].rate

        smallest: tuple[Parts, ...] = ()
        if run(frozenset()):
            parts = trials[frozenset()].parts
            smallest = smallest_sets(parts, lambda on: run(parts - on))
    return GrowthReport(tuple(trials.values()), smallest)


def smallest_sets(parts: Parts, rate_with: Callable[[Parts], float]) -> tuple[Parts, ...]:
    """Disjoint sets of parts that each grow more than nothing does, and less without any one of their members.

    `rate_with` says how fast memory grows with only the given parts on, 0 for not at all. Asks about `parts` and the
    empty set first; whole groups are taken away before their members.
    """
    bare = rate_with(frozenset())
    enough = max(_EXCESS * bare, bare + MIN_RATE) if bare else MIN_RATE
    found = []
    left = parts
    while left and rate_with(left) >= enough:
        smallest = left
        groups = [frozenset(p for p in left if p.split("/")[0] == group) for group in _groups(left)]
        for members in [*groups, *(frozenset({part}) for part in sorted(left))]:
            fewer = smallest - members
            if fewer != smallest and rate_with(fewer) >= enough:
                smallest = fewer
        found.append(smallest)
        left -= smallest
    return tuple(found)


def describe(parts: Collection[str]) -> str:
    """`callbacks (EMA), evaluation`."""
    words = []
    for group in _groups(parts):
        members = sorted(part.partition("/")[2] for part in parts if part.split("/")[0] == group)
        words.append(f"{group} ({', '.join(members)})" if any(members) else group)
    return ", ".join(words)


def _groups(parts: Iterable[str]) -> list[str]:
    return sorted({part.split("/")[0] for part in parts})


def _row(trial: Trial) -> str:
    if not trial.off:
        return "everything on"
    on = trial.parts - trial.off
    if not on:
        return "everything off"
    return f"without {describe(trial.off)}" if len(trial.off) <= len(on) else f"only {describe(on)}"


def _least_rate(num_steps: int) -> float:
    """Bytes a step that `num_steps` can tell from noise: `growth.steps_needed` the other way round."""
    return max(MIN_RATE, FAST_RATE * (FAST_STEPS / (num_steps - _warm_up(num_steps))) ** 2)


def _warm_up(num_steps: int) -> int:
    return max(WARM_UP, num_steps // _WARM_UP_SHARE)


def _prepared(config: Config, num_steps: int) -> Config:
    """The config of a replay: so many steps, nothing that ends them early, rows and evaluations often enough."""
    loop, every = config.loop, num_steps // _EVALUATIONS
    policy = config.guards
    if isinstance(policy, dict):
        policy = {code: "warning" if wanted == "error" else wanted for code, wanted in policy.items()}
    return config.model_copy(
        update={
            "run_dir": None,
            "strict": False,
            "guards": policy,
            "callbacks": config.callbacks.model_copy(update={"early_stopping": None}),
            "loop": loop.model_copy(
                update={
                    "max_steps": num_steps,
                    "max_epochs": None,
                    "max_time": None,
                    "log_every": min(loop.log_every, max(1, num_steps // _ROWS)),
                    "eval_every": min(loop.eval_every or every, every),
                    "limit_eval_batches": min(loop.limit_eval_batches or _EVAL_BATCHES, _EVAL_BATCHES),
                }
            ),
        }
    )


# ---------------------------------------------------------------------------------------------- one run


def _in_a_process(root: Path, off: Parts, num_steps: int) -> Trial:
    with tempfile.TemporaryDirectory(dir=root) as folder:
        command = [sys.executable, "-m", "safetrain.commands.bisect", str(root), folder, json.dumps(sorted(off))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        result = Path(folder) / _RESULT
        if done.returncode or not result.is_file():
            told = "\n".join(done.stdout.strip().splitlines()[-15:])
            without = f" without {describe(off)}" if off else ""
            raise SafetrainError(f"the run{without} failed with exit code {done.returncode}:\n{told}")
        told = json.loads(result.read_text(encoding="utf-8"))
    return Trial(off, told["rates"], num_steps, frozenset(told["parts"]), tuple(told["findings"]))


class _Readings(Callback):
    """The last listener: reads the meters at the end of steps, without the garbage that waits to be collected."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        meters: list[Meter] = [host_meter()]
        if device.type not in ("cpu", "meta"):
            meters.append(meter_for(device))
        self._first = _warm_up(num_steps)
        self._series = [(meter, series_for(meter)) for meter in meters]

    def on_fit_start(self, state: RunState) -> None:
        """Leave what is there out of later collections, which are quick then."""
        gc.freeze()

    def on_step_end(self, state: RunState) -> None:
        """Read."""
        stride = self._series[0][1].stride
        if state.step < self._first or state.step % stride:
            return
        if gc.isenabled():  # who switched the collector off keeps the garbage
            gc.collect()
        for meter, series in self._series:
            series.add(state.step, meter.read())

    def rates(self) -> dict[str, float]:
        """Bytes a step by meter, 0 where readings do not rise for good."""
        slopes = {meter.name: series.slope() for meter, series in self._series}
        return {name: slope.bytes_per_step if slope is not None else 0.0 for name, slope in slopes.items()}


def _run_trial(root: Path, folder: Path, off: Parts) -> None:
    """What one of the processes does."""
    from safetrain.config import file as config_file
    from safetrain.config.build import build

    config = config_file.load(root / _CONFIG)
    switches = {part.replace(" ", "_") for part in off}
    job = build(
        config.model_copy(
            update={
                **{name: None for name in ("compile", "activation_checkpoint") if name in switches},
                **({"guards": "off"} if "guards" in off else {}),
            }
        ),
        folder,
    )
    trainer = job.trainer
    num_steps = trainer.max_steps
    assert num_steps is not None
    named = dict(zip(_listener_names(trainer.callbacks), trainer.callbacks, strict=True))
    dropped = {id(callback) for name, callback in named.items() if name in off}
    readings = _Readings(trainer.device, num_steps)
    kept = [callback for callback in trainer.listeners.callbacks if id(callback) not in dropped]
    trainer.listeners = trainer.listeners.with_callbacks([*kept, readings])
    if _METRICS in off:
        trainer.log_every = num_steps + 1
    trainer.fit(job.train, None if "evaluation" in off else job.val)
    result = {
        "rates": readings.rates(),
        "parts": [*named, _METRICS, *_switches(config, job)],
        "findings": [
            f"{f.code} {f.message}" + (f" ({f.source.file}:{f.source.line}: {f.source.text})" if f.source else "")
            for f in trainer.report.findings
            if f.code[0] in "GM" and f.severity != "note"
        ],
    }
    (folder / _RESULT).write_text(json.dumps(result), encoding="utf-8")


def _listener_names(callbacks: Iterable[Callback]) -> list[str]:
    """`logging/TensorBoard`, `callbacks/EMA`; a second one of a class gets a number."""
    names: list[str] = []
    for callback in callbacks:
        kind = type(callback)
        ours = kind.__module__.startswith("safetrain.") and kind.__name__ in _LOGGING
        name = f"{'logging' if ours else 'callbacks'}/{kind.__name__}"
        again = sum(other.split(" #")[0] == name for other in names)
        names.append(f"{name} #{again + 1}" if again else name)
    return names


def _switches(config: Config, job: Job) -> list[str]:
    """Parts that are no listeners."""
    present = {
        "evaluation": job.val is not None,
        "guards": config.guards != "off",
        "compile": config.compile is not None,
        "activation checkpoint": config.activation_checkpoint is not None,
    }
    return [name for name, there in present.items() if there]


if __name__ == "__main__":
    _run_trial(Path(sys.argv[1]), Path(sys.argv[2]), frozenset(json.loads(sys.argv[3])))
