"""Buffers while a module recomputes: updated once, and read as the first forward found them.

A forward that updates buffers (BatchNorm's statistics, a spectral norm's vectors, a codebook) would update them a
second time when it runs again, and would compute from what the first run left behind. So the second run gets clones
of the buffers as they were before the first, and its updates are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from safetrain.versions import set_version

KNOWN = "_recomputed_buffers"
"""Where a module keeps what is known about its buffers."""

Slot = tuple[nn.Module, str]
"""A buffer by its place (owner, name): the tensor there may be replaced."""


@dataclass(slots=True)
class _KnownBuffers:
    """What forwards so far have shown about a recomputing module's buffers."""

    slots: list[Slot]
    updated: list[Slot]


def buffer_contexts(module: nn.Module) -> tuple[Watching, Rewound]:
    """What to enter around the first forward of a call, and around each recomputation of it."""
    known: _KnownBuffers | None = vars(module).get(KNOWN)
    if known is None:
        slots = [(owner, name) for owner in module.modules() for name, b in owner._buffers.items() if b is not None]
        # Which buffers the forward updates is not known before it ran once: take them all, this once.
        known = vars(module)[KNOWN] = _KnownBuffers(slots, updated=[])
        before = {slot: _clone(slot) for slot in slots}
    else:
        before = {slot: _clone(slot) for slot in known.updated}
    return Watching(known, before), Rewound(before)


def _clone(slot: Slot) -> Tensor:
    return _copy(_get(slot))


def _copy(buffer: Tensor) -> Tensor:
    """A clone that counts in-place writes from where `buffer` does: recomputed values are compared by that too."""
    copy = buffer.detach().clone().requires_grad_(buffer.requires_grad)
    if not buffer.is_inference():
        set_version(copy, buffer._version)
    return copy


def _get(slot: Slot) -> Tensor:
    owner, name = slot
    buffer = owner._buffers[name]
    assert buffer is not None, f"buffer {name} of {type(owner).__name__} became None while it was in use"
    return buffer


def _version(buffer: Tensor) -> int:
    """How often it was written. An evaluation under inference_mode may have left a buffer that does not count."""
    return -1 if buffer.is_inference() else buffer._version


class Watching:
    """Around a first forward: learns which buffers it updates and lets go of the clones of the others."""

    def __init__(self, known: _KnownBuffers, before: dict[Slot, Tensor]) -> None:
        self._known = known
        self._before = before
        self._seen = [(slot, _get(slot), _version(_get(slot))) for slot in known.slots]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        for slot, buffer, version in self._seen:
            # BatchNorm's kernel writes its statistics without a new version; that it is in train mode is enough.
            changed = _get(slot) is not buffer or _version(buffer) != version or isinstance(slot[0], _NormBase)
            if changed and slot not in self._known.updated:
                self._known.updated.append(slot)
            if changed:
                # A buffer first updated by a later call has no clone of before: at least it is not updated twice.
                self._before.setdefault(slot, _clone(slot))
            elif slot not in self._known.updated:
                self._before.pop(slot, None)
        self._seen = []


class Rewound:
    """Around a recomputation: buffers are clones of what the first forward found."""

    def __init__(self, before: dict[Slot, Tensor]) -> None:
        self._before = before
        self._live: list[tuple[Slot, Tensor]] = []

    def __enter__(self) -> None:
        self._live = [(slot, _get(slot)) for slot in self._before]
        for (owner, name), value in self._before.items():
            # Clone again: a retained graph recomputes once per backward.
            owner._buffers[name] = _copy(value)

    def __exit__(self, *exc: object) -> None:
        for (owner, name), buffer in self._live:
            owner._buffers[name] = buffer
        self._live = []
