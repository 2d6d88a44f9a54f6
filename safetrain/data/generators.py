"""Generators that a data source owns: found by walking its attributes, saved and put back by name.

A dataset that draws from `self.rng = np.random.default_rng(0)` or a sampler with its own `torch.Generator` would
repeat or lose draws after a resume if only the global generators were saved.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_OBJECTS = 2000  # a walk must stay well under the time of one epoch's first batch
_MAX_ITEMS = 64  # longer containers hold samples, not transforms
_MAX_DEPTH = 6
_SKIPPED_ATTRIBUTES = {"_iterator"}  # the running iterator of a DataLoader: queues and processes
_LIBRARY_CLASSES = ("torch.", "numpy.", "builtins")


def find_generators(source: Any) -> dict[str, Any]:
    """Generators reachable from `source`, by attribute path such as `dataset.transform.rng`.

    Finds `torch.Generator`, `random.Random`, NumPy's `Generator` and `RandomState` in attributes, short containers,
    closures, and in globals that its functions name. It cannot see local variables of a running Python generator,
    objects with `__slots__`, or state inside worker processes.
    """
    kinds = _kinds()
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any, int]] = deque([("", source, 0)])
    while queue and len(seen) < _MAX_OBJECTS:
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
            found[path or "generator"] = value
        elif depth < _MAX_DEPTH:
            for name, child in _children(value, kinds):
                queue.append((f"{path}.{name}" if path else name, child, depth + 1))
    return found


def save_generators(generators: Mapping[str, Any]) -> dict[str, Any]:
    """State of each, as plain containers and tensors (NumPy arrays among them)."""
    return {name: [_kind(value), _get(value)] for name, value in generators.items()}


def load_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> list[str]:
    """Set each to its saved state. Returns the names that were saved and are not there (or are of another kind)."""
    missing = []
    for name, (kind, state) in states.items():
        value = generators.get(name)
        if value is None or _kind(value) != kind:
            missing.append(name)
        else:
            _set(value, state)
    return missing


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own: tuple[type, ...] = (torch.Generator, random.Random)
    return own if numpy is None else (*own, numpy.random.Generator, numpy.random.RandomState)


def _kind(value: Any) -> str:
    bits = getattr(value, "bit_generator", None)  # PCG64's state does not fit MT19937
    return type(value).__name__ if bits is None else f"{type(value).__name__}({type(bits).__name__})"


def _get(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        version, internal, gauss = value.getstate()
        return [version, list(internal), gauss]
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state(legacy=False)


def _set(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        version, internal, gauss = state
        value.setstate((version, tuple(internal), gauss))
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _children(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if issubclass(kind, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((str(key), item) for key, item in value.items())
    elif issubclass(kind, (list, tuple)):
        if len(value) <= _MAX_ITEMS:
            yield from ((str(i), item) for i, item in enumerate(value))
    elif kind is types.FunctionType:
        yield from _of_function(value, kinds)
    elif kind is types.MethodType:
        yield "self", value.__self__
        yield "function", value.__func__
    elif kind is functools.partial:
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    elif not issubclass(kind, (type, types.ModuleType, torch.Tensor)):
        yield from _of_object(value, kinds)


def _of_function(function: types.FunctionType, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    yield "defaults", function.__defaults__ or ()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable was never assigned, so it holds no generator
            continue
    yield from _named_globals(function, kinds)


def _named_globals(function: types.FunctionType, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, kinds):
            yield f"<{function.__module__}>.{name}", value


def _of_object(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
        yield from ((name, item) for name, item in attributes.items() if name not in _SKIPPED_ATTRIBUTES)
    for cls in type(value).__mro__:
        if not f"{cls.__module__}.".startswith(_LIBRARY_CLASSES):
            for member in vars(cls).values():
                if type(member) is types.FunctionType:
                    yield from _named_globals(member, kinds)
