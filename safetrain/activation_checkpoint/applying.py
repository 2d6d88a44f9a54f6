"""Switching activation checkpointing on and off, module by module."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Literal

from torch import nn

from safetrain.activation_checkpoint import buffers, randomness, recompute
from safetrain.activation_checkpoint.blocks import find_blocks
from safetrain.activation_checkpoint.offload import offloads_anything
from safetrain.activation_checkpoint.options import CheckpointOptions, Mode
from safetrain.errors import ConfigError
from safetrain.modules import is_wrapped, match_modules, outermost, unwrap_forward, wrap_forward

_OWNER = "activation_checkpoint"


def apply(model: nn.Module, options: CheckpointOptions) -> list[str]:
    """Make the chosen modules recompute (or offload), in place, and return their names. `undo` reverts it.

    Where gradients are off a module runs as ever. Gradients are bit-equal to those without checkpointing, under dropout
    and autocast too (but for `selective` with a weight that is used several times under autocast: equal to the
    rounding of its casts), and buffers such as BatchNorm's statistics are updated once. An in-place write over what
    backward needs is an error, as without checkpointing. Names in the state dict do not change. With `mode="auto"` all
    of them recompute: the state from which `AutoCheckpoint` starts.

    Cannot see: Python attributes that a forward changes. Raises `ConfigError` for a pattern that matches nothing, for
    a model without repeated blocks where no pattern is given, and for `preserve_rng_state=False` over dropout.
    """
    undo(model)
    chosen = choose(model, options)
    if options.preserve_rng_state is False:
        for name, module in chosen.items():
            _refuse_random(name, module)
    if options.mode == "offload" and not offloads_anything(model.parameters()):
        warnings.warn(
            f"activation_checkpoint.mode: offload moves nothing: {type(model).__name__} is on the CPU already",
            stacklevel=2,
        )
    mode = "recompute" if options.mode == "auto" else options.mode
    for module in chosen.values():
        set_mode(module, mode, options.preserve_rng_state)
    return list(chosen)


def choose(model: nn.Module, options: CheckpointOptions) -> dict[str, nn.Module]:
    """The modules that `options` mean, by name in model order.

    Of nested matches the outermost (what lies inside is part of it), then each n-th. Raises `ConfigError`.
    """
    if not options.modules:
        found = find_blocks(model)
        if not found:
            raise ConfigError(
                f"activation_checkpoint: {type(model).__name__} has no repeated blocks to be found; name modules by "
                "activation_checkpoint.modules, as in `layers.*`"
            )
    else:
        found = outermost(match_modules(model, options.modules, setting="activation_checkpoint.modules"))
    return dict(itertools.islice(found.items(), 0, None, options.every))


def set_mode(
    module: nn.Module, mode: Mode | Literal["keep"], preserve_rng_state: bool | Literal["auto"] = "auto"
) -> None:
    """Have one module recompute, recompute selectively, offload, or (`keep`) run as it is."""
    _reset(module)
    if mode == "offload":
        wrap_forward(module, _OWNER, recompute.offloading)
    elif mode != "keep":
        wrap = functools.partial(
            recompute.recomputing, selective=mode == "selective", preserve_rng_state=preserve_rng_state
        )
        wrap_forward(module, _OWNER, wrap)


def undo(model: nn.Module) -> None:
    """Every module of `model` keeps its activations again."""
    for module in model.modules():
        _reset(module)


def applied(model: nn.Module) -> list[str]:
    """Names of the modules that recompute or offload."""
    return [name for name, module in model.named_modules() if is_wrapped(module, _OWNER)]


def _reset(module: nn.Module) -> None:
    if unwrap_forward(module, _OWNER):
        for note in (buffers.KNOWN, recompute.CHECKED, recompute.STOPS_EARLY, randomness.HOST):
            vars(module).pop(note, None)


def _refuse_random(name: str, module: nn.Module) -> None:
    for inner_name, inner in module.named_modules(prefix=name):
        drops = isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0
        drops |= isinstance(inner, nn.RNNBase | nn.MultiheadAttention) and inner.dropout > 0
        if drops:
            raise ConfigError(
                f"activation_checkpoint.preserve_rng_state is false, but `{inner_name}` ({type(inner).__name__}) drops "
                "at random: backward would recompute with another mask and gradients would be wrong; leave it auto"
            )
