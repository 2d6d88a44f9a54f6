"""`python -m safetrain memory CONFIG`: train a few steps, and show whose the bytes of the last one are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from safetrain.accounting.ownership import OwnershipProbe, StepMemory
from safetrain.callbacks.base import Listeners
from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.config import Config


_MAX_ENTRIES = 1_000_000
"""Allocations and frees that a snapshot keeps, some kilobytes each with their stacks."""


def measure(config: Config, step: int = 3, snapshot: Path | None = None) -> StepMemory:
    """Run `step` steps of what a config describes, and watch the last one, operation by operation.

    The listeners of the config run (averages of weights are memory, too), guards do not; nothing is kept of the run.
    A model that the config compiles runs uncompiled: what compiled code does cannot be watched.

    `snapshot` is a file for all that CUDA's allocator did, with the stacks, as https://pytorch.org/memory_viz reads it:
    from before the model is made to the end of one more step, which runs unwatched.

    Raises:
        ConfigError: the config does not build, its data end before that step, or a snapshot is asked for without CUDA.
    """
    from safetrain.config.build import build

    last = step if snapshot is None else step + 1
    if snapshot is not None:
        _check_cuda(config.device)
    config = config.model_copy(update={"guards": "off", "compile": None})
    probe = OwnershipProbe(step)
    with tempfile.TemporaryDirectory(prefix="safetrain-memory-") as folder, _recorded(snapshot):
        job = build(config, Path(folder))
        trainer = job.trainer
        trainer.max_steps, trainer.max_epochs, trainer.max_time, trainer.eval_every = last, None, None, last + 1
        probe.hold({"trainer": trainer, "training data": job.train, "evaluation data": job.val})
        trainer.listeners = Listeners([probe, *trainer.listeners.callbacks])
        trainer.fit(job.train, None)
    if probe.result is None:
        raise ConfigError(f"the run ended after step {trainer.state.step}, before step {step} could be watched")
    return probe.result


def _check_cuda(device: str) -> None:
    from safetrain.config.build import pick_device

    chosen = pick_device(device)
    if chosen.type != "cuda":
        raise ConfigError(
            f"--snapshot records what CUDA's allocator does, and this run is on {chosen}; run it where there is a GPU "
            "(device=cuda), or leave --snapshot away: the table and the page show the CPU's memory as well"
        )


@contextmanager
def _recorded(snapshot: Path | None) -> Iterator[None]:
    """Have CUDA's allocator keep its history meanwhile, and write it to the file."""
    if snapshot is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, stacks="python")
    try:
        yield
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ConfigError(f"--snapshot {snapshot}: cannot be written: {error.strerror or error}") from error
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
