"""`python -m safetrain plan CONFIG`: the memory of a step before it runs, and the settings that make it fit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensorMode

from safetrain.data.batch import tensors_in
from safetrain.data.loader import EpochLoader
from safetrain.errors import ConfigError, SafetrainError
from safetrain.graph import format_bytes
from safetrain.planner import report
from safetrain.planner.faking import Unforecastable, fake, faking, make_mode, why
from safetrain.planner.search import Planner

if TYPE_CHECKING:
    from safetrain.config import Config
    from safetrain.config.build import Job

_LOOKED_AT = 8
"""Batches of which the biggest is taken: where lengths vary, the first may be small."""


def plan(config: Config, budget: int | None, tell: Callable[[str], object]) -> bool:
    """Tell what a step of the config takes, with each switch too, and what fits into `budget` bytes.

    Data are read for real, a few batches; model, optimizers and step are fake and allocate nothing. Returns whether the
    config fits or can be made to, True without a budget.

    Raises:
        ConfigError: the config does not build, or the step cannot be forecast; the message says why.
    """
    mode = make_mode()
    try:
        job = build_unwatched(config, mode, tell)
        window = window_of(job, config.loop.accumulate, mode)
        planner = Planner(job.trainer, window, mode)
    except Unforecastable as error:
        raise ConfigError(f"the step cannot be forecast: {error}") from error
    except SafetrainError:
        raise
    except Exception as error:  # the user's code: a fault of its own, or one that tensors without numbers make
        raise ConfigError(f"the step cannot be forecast, it fails on tensors without numbers: {why(error)}") from error
    size, trainer = job.trainer.batch_size(window[0]), job.trainer
    tell(f"a step on {trainer.device}, forecast: batches of {size}, {len(window)} a step, {config.precision}\n")
    tell(report.table(planner.base))
    if config.compile is not None:
        tell("compiled, it needs at most about that: what the compiler fuses is not made")
    tell("\n" + report.header())
    for option in planner.each():
        tell(report.row(option, planner.base))
    for setting, reason in planner.failed.items():
        tell(f"{setting}: cannot be forecast: {reason}")
    return budget is None or _tell_what_fits(planner, budget, tell)


def build_unwatched(config: Config, mode: FakeTensorMode, tell: Callable[[str], object]) -> Job:
    """The config's job with a model that has no bytes, and no guards or loader processes. Nothing compiles before it is
    called, and copies of it are eager.

    A model that cannot be made without numbers (it is trained, or read with NumPy, as it is built) is made for real.
    """
    from safetrain.config.build import build

    changes: dict[str, Any] = {"guards": "off"}
    if config.data.num_workers:
        changes["data"] = config.data.model_copy(update={"num_workers": 0})
    config = config.model_copy(update=changes)
    try:
        return build(config, making=partial(faking, mode))
    except ConfigError:
        raise
    except Exception as error:
        tell(f"the model is built for real, since it cannot be made without numbers: {type(error).__name__}: {error}")
    return build(config)


def window_of(job: Job, accumulate: int, mode: FakeTensorMode) -> list[Any]:
    """A window as big as the first batches show it, of fake tensors: each batch has its own bytes."""
    batches = list(itertools.islice(_batches(job.train), _LOOKED_AT))
    if not batches:
        raise ConfigError("the training data give no batch")
    biggest = max(batches, key=lambda batch: sum(t.nbytes for t in tensors_in(batch)))
    return [fake(copy.deepcopy(biggest), mode)[0] for _ in range(accumulate)]  # one tensor has one fake


def _batches(train: Iterable[Any]) -> Iterable[Any]:
    return EpochLoader.of(train).start_epoch(0)


def _tell_what_fits(planner: Planner, budget: int, tell: Callable[[str], object]) -> bool:
    base = planner.base
    if base.peak_bytes <= budget:
        tell(f"\n{format_bytes(base.peak_bytes)} fit into {format_bytes(budget)} as it is")
        return True
    option = planner.fastest(budget)
    if option is None:
        tell(f"\nno combination of these settings fits into {format_bytes(budget)}")
        return False
    tell(
        f"\nthe fastest that fits into {format_bytes(budget)}: {format_bytes(option.peak_bytes)}, estimated time "
        f"{option.slowdown - 1:+.0%} a step ({option.extra_flops:+.0%} FLOPs)"
        + (f"; {option.changes}" if option.changes else "")
        + f"\n\n{report.lines(option.switches)}"
    )
    return True
