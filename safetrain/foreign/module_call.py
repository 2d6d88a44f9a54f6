"""The last call of a model in a foreign loop, so that an error in it can be replayed. Holds no tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


class ModuleCall:
    """One call of an outermost module: what it was given, tensors by weak reference."""

    __slots__ = ("_args", "_kwargs", "_module")

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = weakref.ref(module)
        self._args = tuple([_loosen(value) for value in args])
        self._kwargs = {key: _loosen(value) for key, value in kwargs.items()}

    def replay(self) -> Callable[[], Tensor] | None:
        """The call again, returning its first tensor; None when the module or one of its arguments is gone."""
        module = self._module()
        args, kwargs = _fasten(self._args), _fasten(self._kwargs)
        if module is None or args is _GONE or kwargs is _GONE:
            return None

        def again() -> Tensor:
            output = first_tensor(module(*args, **kwargs))
            if output is None:
                raise TypeError("the module returned no tensor")
            return output

        return again


_GONE = object()


def _loosen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return weakref.ref(value)
    if type(value) in (list, tuple):
        return type(value)(_loosen(item) for item in value)
    if type(value) is dict:
        return {key: _loosen(item) for key, item in value.items()}
    return value


def _fasten(value: Any) -> Any:
    """What `_loosen` took apart, or `_GONE` when a tensor in it is dead."""
    if isinstance(value, weakref.ref):
        tensor = value()
        return _GONE if tensor is None else tensor
    if type(value) in (list, tuple):
        items = [_fasten(item) for item in value]
        return _GONE if any(item is _GONE for item in items) else type(value)(items)
    if type(value) is dict:
        pairs = {key: _fasten(item) for key, item in value.items()}
        return _GONE if any(item is _GONE for item in pairs.values()) else pairs
    return value


def first_tensor(value: Any) -> Tensor | None:
    """A tensor, or the first one inside containers."""
    if isinstance(value, Tensor):
        return value
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    return next((found for item in inner if (found := first_tensor(item)) is not None), None)


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """First dimension of the first tensor argument that has one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return None
