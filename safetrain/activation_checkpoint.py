"""Activation checkpointing by module name: a chosen module keeps its inputs only, and runs again during backward."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from safetrain.errors import ConfigError
from safetrain.modules import Forward, as_patterns, is_wrapped, match_modules, outermost, unwrap_forward, wrap_forward

_OWNER = "activation_checkpoint"
_BUFFERS = "_recomputed_buffers"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Which modules recompute. Raises `ConfigError` when `modules` is empty."""

    modules: tuple[str, ...]
    """`fnmatch` patterns of module names as `model.named_modules()` gives them, as in `blocks.*`."""
    preserve_rng_state: bool = True
    """Recompute with the random numbers of the first forward; without it dropout draws another mask in backward."""

    def __post_init__(self) -> None:
        patterns = as_patterns(self.modules)
        if not patterns:
            raise ConfigError("activation_checkpoint.modules: no pattern given; name the modules, as in `blocks.*`")
        object.__setattr__(self, "modules", patterns)


def apply(model: nn.Module, options: CheckpointOptions) -> list[str]:
    """Make the matching modules recompute, in place, and return their names. `undo` reverts it.

    Of nested matches the outermost recomputes (what lies inside is part of it). Where gradients are off the module runs
    as ever. Gradients are bit-equal to those without checkpointing, under dropout and autocast too, and buffers such as
    BatchNorm's statistics are updated once. Names in the state dict do not change.

    Cannot see: Python attributes that a forward changes, and functional dropout under `preserve_rng_state=False`.
    Raises `ConfigError` for a pattern that matches nothing, and for `preserve_rng_state=False` over dropout.
    """
    undo(model)
    chosen = outermost(match_modules(model, options.modules, setting="activation_checkpoint.modules"))
    if not options.preserve_rng_state:
        for name, module in chosen.items():
            _refuse_random(name, module)
    for module in chosen.values():
        wrap_forward(module, _OWNER, functools.partial(_recomputing, preserve_rng_state=options.preserve_rng_state))
    return list(chosen)


def undo(model: nn.Module) -> None:
    """Every module of `model` keeps its activations again."""
    for module in model.modules():
        if unwrap_forward(module, _OWNER):
            vars(module).pop(_BUFFERS, None)


def applied(model: nn.Module) -> list[str]:
    """Names of the modules that recompute."""
    return [name for name, module in model.named_modules() if is_wrapped(module, _OWNER)]


def _recomputing(inner: Forward, *, preserve_rng_state: bool) -> Forward:
    # `forward` by name: a pickled bound method is looked up by its function's name, and must find the class's own.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        run = functools.partial(inner, self)
        if torch.compiler.is_compiling():
            # The compiler plans recomputation itself and moves buffer updates out of it; it takes no context_fn.
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=functools.partial(_buffer_contexts, self),
            **kwargs,
        )

    return forward


def _refuse_random(name: str, module: nn.Module) -> None:
    for inner_name, inner in module.named_modules(prefix=name):
        drops = isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0
        drops |= isinstance(inner, nn.RNNBase | nn.MultiheadAttention) and inner.dropout > 0
        if drops:
            raise ConfigError(
                f"activation_checkpoint.preserve_rng_state is false, but `{inner_name}` ({type(inner).__name__}) drops "
                "at random: backward would recompute with another mask and gradients would be wrong; leave it true"
            )


# ---- buffers ---------------------------------------------------------------------------------------------------------
#
# A forward that updates buffers (BatchNorm's statistics, a spectral norm's vectors, a codebook) would update them a
# second time when it runs again, and would compute from what the first run left behind. So the second run gets clones
# of the buffers as they were before the first, and its updates are thrown away.

_Slot = tuple[nn.Module, str]
"""A buffer by its place (owner, name): the tensor there may be replaced."""


@dataclass(slots=True)
class _KnownBuffers:
    """What forwards so far have shown about a recomputing module's buffers."""

    slots: list[_Slot]
    updated: list[_Slot]


def _buffer_contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What `checkpoint` enters around the first forward of a call, and around each recomputation of it."""
    known: _KnownBuffers | None = vars(module).get(_BUFFERS)
    if known is None:
        slots = [(owner, name) for owner in module.modules() for name, b in owner._buffers.items() if b is not None]
        # Which buffers the forward updates is not known before it ran once: take them all, this once.
        known = vars(module)[_BUFFERS] = _KnownBuffers(slots, updated=[])
        before = {slot: _clone(slot) for slot in slots}
    else:
        before = {slot: _clone(slot) for slot in known.updated}
    return _Watching(known, before), _Rewound(before)


def _clone(slot: _Slot) -> Tensor:
    buffer = _get(slot)
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def _get(slot: _Slot) -> Tensor:
    owner, name = slot
    buffer = owner._buffers[name]
    assert buffer is not None, f"buffer {name} of {type(owner).__name__} became None while it was in use"
    return buffer


class _Watching:
    """Around a first forward: learns which buffers it updates and lets go of the clones of the others."""

    def __init__(self, known: _KnownBuffers, before: dict[_Slot, Tensor]) -> None:
        self._known = known
        self._before = before
        self._seen = [(slot, _get(slot), _get(slot)._version) for slot in known.slots]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        for slot, buffer, version in self._seen:
            # BatchNorm's kernel writes its statistics without a new version; that it is in train mode is enough.
            changed = _get(slot) is not buffer or buffer._version != version or isinstance(slot[0], _NormBase)
            if changed and slot not in self._known.updated:
                self._known.updated.append(slot)
            if changed:
                # A buffer first updated by a later call has no clone of before: at least it is not updated twice.
                self._before.setdefault(slot, _clone(slot))
            elif slot not in self._known.updated:
                self._before.pop(slot, None)
        self._seen = []


class _Rewound:
    """Around a recomputation: buffers are clones of what the first forward found."""

    def __init__(self, before: dict[_Slot, Tensor]) -> None:
        self._before = before
        self._live: list[tuple[_Slot, Tensor]] = []

    def __enter__(self) -> None:
        self._live = [(slot, _get(slot)) for slot in self._before]
        for (owner, name), value in self._before.items():
            # Clone again: a retained graph recomputes once per backward.
            owner._buffers[name] = value.detach().clone().requires_grad_(value.requires_grad)

    def __exit__(self, *exc: object) -> None:
        for (owner, name), buffer in self._live:
            owner._buffers[name] = buffer
        self._live = []
