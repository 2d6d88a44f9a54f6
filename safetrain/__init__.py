"""safetrain: a training loop for PyTorch that knows what the autograd graph is doing, and says which line is wrong."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetrain.activation_checkpoint import CheckpointOptions as CheckpointOptions
    from safetrain.bare_loop import watch as watch
    from safetrain.callbacks.base import Callback as Callback
    from safetrain.compile import CompileOptions as CompileOptions
    from safetrain.errors import BatchError as BatchError
    from safetrain.errors import BudgetError as BudgetError
    from safetrain.errors import CheckpointError as CheckpointError
    from safetrain.errors import ConfigError as ConfigError
    from safetrain.errors import GuardError as GuardError
    from safetrain.errors import NonFiniteError as NonFiniteError
    from safetrain.errors import SafetrainError as SafetrainError
    from safetrain.findings import Finding as Finding
    from safetrain.loop import Trainer as Trainer
    from safetrain.rng import seed_everything as seed_everything
    from safetrain.rules.gradient import find_missing_grads as find_missing_grads
    from safetrain.rules.gradient import find_optimizer_mismatches as find_optimizer_mismatches
    from safetrain.rules.graph import find_retained_graphs as find_retained_graphs
    from safetrain.state import RunState as RunState
    from safetrain.stepping.weighting import StepOutput as StepOutput

__version__ = "0.1.0"

_HOMES = {
    "Trainer": "loop",
    "StepOutput": "stepping.weighting",
    "RunState": "state",
    "Callback": "callbacks.base",
    "Finding": "findings",
    "seed_everything": "rng",
    "CompileOptions": "compile",
    "CheckpointOptions": "activation_checkpoint",
    "watch": "bare_loop",
    "find_retained_graphs": "rules.graph",
    "find_missing_grads": "rules.gradient",
    "find_optimizer_mismatches": "rules.gradient",
    "SafetrainError": "errors",
    "ConfigError": "errors",
    "BatchError": "errors",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "NonFiniteError": "errors",
    "GuardError": "errors",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that the command line can answer `--help` without torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"safetrain.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'safetrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
