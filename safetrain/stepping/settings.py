"""Settings of a Trainer that cannot be meant: one clear error each, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.compile import CompileOptions
from safetrain.errors import ConfigError
from safetrain.sizes import parse_bytes

if TYPE_CHECKING:
    from safetrain.loop import Trainer


def check_settings(t: Trainer) -> None:
    """One clear error for a setting that cannot be meant."""
    if not isinstance(t.model, nn.Module):
        raise ConfigError(f"model is a {type(t.model).__name__}; the Trainer needs a torch.nn.Module")
    if t.precision not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f"precision={t.precision!r}; it is 'fp32', 'bf16' or 'fp16'")
    choices = {
        "nonfinite": ("skip", "raise"),
        "oom": ("raise", "split"),
        "eval_context": ("no_grad", "inference_mode"),
        "schedule_every": ("step", "epoch"),
    }
    for name, allowed in choices.items():
        if getattr(t, name) not in allowed:
            raise ConfigError(f"{name}={getattr(t, name)!r}; it is {' or '.join(map(repr, allowed))}")
    if t.memory_budget not in (None, "auto"):
        parse_bytes(t.memory_budget, "memory_budget")
    if t.memory_budget is not None and t.oom == "split":
        raise ConfigError(
            "memory_budget and oom='split' exclude each other: one refuses a step that does not fit, the other makes "
            "it fit; remove one"
        )
    counts = ("accumulate", "micro_batch_size", "log_every", "max_steps", "max_epochs", "eval_every", "limit_batches",
              "limit_eval_batches", "overfit_batches", "seed")  # fmt: skip
    for name in counts:
        _check_type(name, getattr(t, name), Integral, "a whole number")
    for name in ("max_time", "clip_norm", "clip_value", "clip_norm_type"):
        _check_type(name, getattr(t, name), Real, "a number")
    for name in (*counts[:-2], "max_time", "clip_norm", "clip_value", "clip_norm_type"):
        value = getattr(t, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r}; it must be above zero")
    if t.overfit_batches < 0:
        raise ConfigError(f"overfit_batches={t.overfit_batches}; it is a count of batches, 0 for off")
    if t.clip_norm is not None and t.clip_value is not None:
        raise ConfigError("clip_norm and clip_value are both set; clip by one of them")
    if t.nonfinite == "raise" and not t.check_finite:
        raise ConfigError("nonfinite='raise' needs check_finite, which is off")


def check_arguments(compile: Any, activation_checkpoint: Any, callbacks: Any) -> None:
    """The same for arguments that the Trainer does not keep as they are given."""
    if not isinstance(compile, (bool, CompileOptions, NoneType)):
        raise ConfigError(f"compile={compile!r}; it is True, False or CompileOptions(...)")
    if not isinstance(activation_checkpoint, (CheckpointOptions, Iterable, NoneType)):
        raise ConfigError(
            f"activation_checkpoint={activation_checkpoint!r}; name the modules that recompute, such as 'blocks.*', or "
            "give CheckpointOptions(...)"
        )
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks={callbacks!r}; give a list, such as [Progress()]")


def _check_type(name: str, value: Any, kind: type, called: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}, a {type(value).__name__}; it is {called}")


def check_optimizers(optimizers: dict[str, Optimizer], schedulers: dict[str, Any], precision: str) -> None:
    if not optimizers:
        raise ConfigError("optimizers is empty; give the Trainer at least one optimizer")
    for name, opt in optimizers.items():
        if not isinstance(opt, Optimizer):
            raise ConfigError(
                f"optimizer `{name}` is a {type(opt).__name__}; the Trainer needs a torch.optim.Optimizer"
            )
        if needs_closure(opt) and (len(optimizers) > 1 or precision == "fp16"):
            other = "precision='fp16'" if precision == "fp16" else "other optimizers"
            raise ConfigError(
                f"optimizer `{name}` ({type(opt).__name__}) evaluates a closure, which does not go with {other}"
            )
    for name, scheduler in schedulers.items():
        if name not in optimizers:
            raise ConfigError(f"schedulers names `{name}`, but the optimizers are {', '.join(map(repr, optimizers))}")
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"the scheduler of `{name}` is a {type(scheduler).__name__}; the Trainer needs one of "
                "torch.optim.lr_scheduler, such as LambdaLR(optimizer, function)"
            )
        if getattr(scheduler, "optimizer", optimizers[name]) is not optimizers[name]:
            raise ConfigError(f"the scheduler of `{name}` was built for another optimizer than the Trainer's `{name}`")


def needs_closure(opt: Optimizer) -> bool:
    """It evaluates the loss several times a step (LBFGS)."""
    closure = inspect.signature(type(opt).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
