"""The settings that change how much memory a step takes, each as config lines and as what it does to a fake Trainer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from safetrain import activation_checkpoint
from safetrain import compile as compiling
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.compile import CompileOptions
from safetrain.errors import ConfigError
from safetrain.loop import Trainer, autocast_for

Kind = Literal["optimizer", "micro-batch", "activations", "precision"]
_HALVINGS = 3
_SHARES = (0.5, 0.1)
_PARTITIONER = "aot_eager_decomp_partition"
"""The backend that divides forward from backward as inductor does, and then runs operation by operation."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One setting."""

    kind: Kind
    """Of each kind a combination has one at most."""
    settings: dict[str, Any]
    """Config keys with dots, and their values."""
    apply: Callable[[Trainer], None]
    """Does it to a Trainer that is fake."""
    changes: str = ""
    """How it alters what is trained, in words; empty: it does not, but for rounding."""
    against: Switch | None = None
    """What its time is compared with, where that is not the step as it is."""

    @property
    def text(self) -> str:
        """`loop.micro_batch_size: 4`."""
        return ", ".join(f"{key}: {_yaml(value)}" for key, value in self.settings.items())


def available(trainer: Trainer, window: Sequence[Any]) -> list[Switch]:
    """What could be set otherwise for this Trainer."""
    return [
        *_optimizers(trainer),
        *_micro_batches(trainer, window),
        *_activations(trainer),
        *_compiled(trainer),
        *_precision(trainer),
    ]


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _optimizers(trainer: Trainer) -> list[Switch]:
    found = []
    several = len(trainer.state.optimizers) > 1
    for name, opt in trainer.state.optimizers.items():
        key = f"optims.{name}" if several else "optim"
        accepted = inspect.signature(type(opt)).parameters
        for option in ("fused", "foreach"):
            if option in accepted and not opt.defaults.get(option):
                others = {
                    f"{key}.{other}": False for other in ("fused",) if other != option and opt.defaults.get(other)
                }
                settings = {f"{key}.{option}": True, **others}
                change = {option: True, "fused" if option == "foreach" else "foreach": False}
                found.append(Switch("optimizer", settings, functools.partial(_exchange, name, type(opt), change)))
        for kind in (torch.optim.SGD, getattr(torch.optim, "Adafactor", None)):
            if kind is not None and not isinstance(opt, kind):
                group = opt.param_groups[0]
                rate = group.get("initial_lr", group["lr"])  # what a schedule starts from, not its first value
                found.append(
                    Switch(
                        "optimizer",
                        {key: {"name": kind.__name__, "lr": float(rate)}},
                        functools.partial(_exchange, name, kind, {}),
                        "another optimizer: find its learning rate anew",
                    )
                )
    return found


def _exchange(name: str, kind: type[Optimizer], change: dict[str, Any], trainer: Trainer) -> None:
    """Put an optimizer of `kind` over the same parameters in the place of one."""
    opt = trainer.state.optimizers[name]
    accepted = inspect.signature(kind).parameters
    same = isinstance(opt, kind)
    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr") or (same and key in accepted)} | change
        for group in opt.param_groups
    ]
    options = {key: value for key, value in opt.defaults.items() if same and key in accepted}
    trainer.state.optimizers[name] = kind(groups, **(options | change))


# ---- what the graph keeps --------------------------------------------------------------------------------------------


def _micro_batches(trainer: Trainer, window: Sequence[Any]) -> list[Switch]:
    size = min(max(trainer.batch_size(batch) for batch in window), trainer.state.micro_batch_size or 1 << 60)
    sizes = {max(1, size >> shift) for shift in range(1, _HALVINGS + 1)} - {size}
    uneven = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in trainer.model.modules())
    changes = "BatchNorm then normalises over fewer samples" if uneven else ""
    return [
        Switch("micro-batch", {"loop.micro_batch_size": n}, functools.partial(_cut, n), changes)
        for n in sorted(sizes, reverse=True)
    ]


def _cut(size: int, trainer: Trainer) -> None:
    trainer.micro_batch_size = trainer.state.micro_batch_size = size


def _activations(trainer: Trainer) -> list[Switch]:
    modes: list[dict[str, Any]] = [{"every": 2}, {"every": 1}, {"mode": "selective"}]
    if trainer.device.type != "cpu":
        modes.append({"mode": "offload"})
    on = set(activation_checkpoint.applied(trainer.model))
    found = []
    for mode in modes:
        options = CheckpointOptions(**mode)
        try:
            chosen = activation_checkpoint.choose(trainer.model, options)
        except ConfigError:
            return []  # no repeated blocks
        if on != set(chosen) or "mode" in mode:
            recompute = functools.partial(_recompute, options)
            found.append(Switch("activations", {"activation_checkpoint": mode}, recompute))
    return found


def _recompute(options: CheckpointOptions, trainer: Trainer) -> None:
    activation_checkpoint.apply(trainer.model, options)


def _compiled(trainer: Trainer) -> list[Switch]:
    options = trainer.compile_options
    if options is None or options.backend in ("eager", "aot_eager"):
        return []

    def keeping(share: float, against: Switch | None) -> Switch:
        settings = {"compile.activation_memory_budget": share}
        return Switch("activations", settings, functools.partial(_keep_share, options, share), against=against)

    everything = keeping(1.0, None)  # compiled too: one by one, its operations are others than the eager ones
    return [keeping(share, everything) for share in _SHARES]


def _keep_share(options: CompileOptions, share: float, trainer: Trainer) -> None:
    torch._dynamo.reset()  # code is known to it by the function, of which every copy of the model has the same
    options = dataclasses.replace(options, activation_memory_budget=share, backend=_PARTITIONER, mode="default")
    activation_checkpoint.undo(trainer.model)
    compiling.apply(trainer.model, options)


def _precision(trainer: Trainer) -> list[Switch]:
    if trainer.precision != "fp32":
        return []
    return [Switch("precision", {"precision": "bf16"}, _bf16, "most of forward and backward in bfloat16")]


def _bf16(trainer: Trainer) -> None:
    trainer.precision, trainer._autocast = "bf16", autocast_for(trainer.device, "bf16")


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
