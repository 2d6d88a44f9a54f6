"""Attributes of the user's modules while they run again: changed once, and read as the first forward found them.

A forward that counts its calls, or anneals a temperature, would otherwise compute with other numbers in backward than
it did before, and count twice. What it changes in place (a list that it appends to) is not noted.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from safetrain.activation_checkpoint.buffers import KNOWN
from safetrain.activation_checkpoint.randomness import HOST

_MISSING = object()
_OWN = frozenset({KNOWN, HOST, "_checked_for_randomness", "_parameters", "_buffers", "_modules"})


def attribute_contexts(module: nn.Module) -> tuple[Noting, Reverted]:
    """What to enter around the first forward of a call, and around each recomputation of it."""
    reverted = Reverted()
    modules = [m for m in module.modules() if not type(m).__module__.startswith("torch.nn.")]
    return Noting(modules, reverted), reverted


class Noting:
    """Around a first forward: what attributes were before, of those that it sets."""

    def __init__(self, modules: list[nn.Module], reverted: Reverted) -> None:
        self._before = [(m, dict(vars(m))) for m in modules]
        self._reverted = reverted

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        for module, before in self._before:
            now = vars(module)
            for name in now if now.keys() == before.keys() else now.keys() | before.keys():
                old = before.get(name, _MISSING)
                if old is not now.get(name, _MISSING) and name not in _OWN:
                    self._reverted.values.append((module, name, old))
        self._before = []


class Reverted:
    """Around a recomputation: these attributes are as the first forward found them, and afterwards as it left them."""

    def __init__(self) -> None:
        self.values: list[tuple[nn.Module, str, Any]] = []
        self._now: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> None:
        self._now = [(module, name, vars(module).get(name, _MISSING)) for module, name, _ in self.values]
        _put(self.values)

    def __exit__(self, *exc: object) -> None:
        _put(self._now)
        self._now = []


def _put(values: list[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in values:
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
