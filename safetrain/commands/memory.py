"""`python -m safetrain memory CONFIG`: train a few steps, and show whose the bytes of the last one are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from safetrain.accounting.ownership import OwnershipProbe, StepMemory
from safetrain.callbacks.base import Listeners
from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.config import Config


def measure(config: Config, step: int = 3) -> StepMemory:
    """Run `step` steps of what a config describes, and watch the last one, operation by operation.

    The listeners of the config run (averages of weights are memory, too), guards do not; nothing is kept of the run.
    A model that the config compiles runs uncompiled: what compiled code does cannot be watched.

    Raises:
        ConfigError: the config does not build, or its data end before that step.
    """
    from safetrain.config.build import build

    config = config.model_copy(update={"guards": "off", "compile": None})
    probe = OwnershipProbe(step)
    with tempfile.TemporaryDirectory(prefix="safetrain-memory-") as folder:
        job = build(config, Path(folder))
        trainer = job.trainer
        trainer.max_steps, trainer.max_epochs, trainer.max_time, trainer.eval_every = step, None, None, step + 1
        probe.hold({"trainer": trainer, "training data": job.train, "evaluation data": job.val})
        trainer.listeners = Listeners([probe, *trainer.listeners.callbacks])
        trainer.fit(job.train, None)
    if probe.result is None:
        raise ConfigError(f"the run ended after step {trainer.state.step}, before step {step} could be watched")
    return probe.result
