"""A call of a model in a foreign loop, so that a fault in it can be replayed. Holds no tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from safetrain.findings import SourceLine
from safetrain.source import USER, grade, line_text


class ModuleCall:
    """One call of an outermost module: what it was given (tensors by weak reference), from where, which nodes it made.

    `first_node`: autograd's counter when it began.
    """

    __slots__ = ("_args", "_code", "_instruction", "_kwargs", "_module", "first_node", "next_node")

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType, first_node: int
    ) -> None:
        self._module = weakref.ref(module)
        self._args = tuple([_loosen(value) for value in args])
        self._kwargs = {key: _loosen(value) for key, value in kwargs.items()} if kwargs else kwargs
        self._code, self._instruction = caller.f_code, caller.f_lasti
        self.first_node = self.next_node = first_node

    @property
    def module(self) -> nn.Module | None:
        """What was called; None when it is gone."""
        return self._module()

    @property
    def line(self) -> SourceLine | None:
        """The user's line that made the call; None where that was no code of the user's."""
        filename = self._code.co_filename
        if grade(filename) != USER:
            return None
        for start, end, line in self._code.co_lines():
            if start <= self._instruction < end and line is not None:
                return SourceLine(filename, line, line_text(filename, line))
        return None

    def made(self, node: Any) -> bool:
        """Whether a graph node was made during the call."""
        return bool(self.first_node <= node._sequence_nr() < self.next_node)

    def let_go(self) -> None:
        """Forget arguments that are neither numbers, texts nor tensors: none may live longer for this."""
        for value in self._args if not self._kwargs else (*self._args, *self._kwargs.values()):
            if type(value) is not _Loose and not _is_light(value):
                self._args, self._kwargs = (_GONE,), {}
                return

    def floats(self) -> Iterator[Tensor]:
        """The tensors with a fraction that it was given and that are alive."""
        for value in (*self._args, *self._kwargs.values()):
            yield from (tensor for tensor in tensors_in(_fasten(value)) if tensor.is_floating_point())

    def replay(self) -> Callable[[], Tensor] | None:
        """The call again, returning its first tensor; None when it cannot be made as it was.

        Its arguments are cut off from their graphs, which the script has yet to differentiate. It cannot be made when
        the module or one of its arguments is gone, or an argument was written to in the meantime.
        """
        module = self._module()
        args, kwargs = _fasten(self._args), _fasten(self._kwargs)
        if module is None or args is _GONE or kwargs is _GONE:
            return None

        def again() -> Tensor:
            output = first_tensor(module(*_cut_off(args), **_cut_off(kwargs)))
            if output is None:
                raise TypeError("the module returned no tensor")
            return output

        return again


_GONE = object()


class _Loose(weakref.ref[Tensor]):
    """A tensor, and the version in which it was given."""

    __slots__ = ("version",)
    version: int | None


def _loosen(value: Any) -> Any:
    if isinstance(value, Tensor):
        loose = _Loose(value)
        try:
            loose.version = value._version
        except RuntimeError:  # an inference tensor counts none
            loose.version = None
        return loose
    if type(value) in (list, tuple):
        return type(value)(_loosen(item) for item in value)
    if type(value) is dict:
        return {key: _loosen(item) for key, item in value.items()}
    return value


def _fasten(value: Any) -> Any:
    """What `_loosen` took apart, or `_GONE` when a tensor in it is dead or has another version now."""
    if isinstance(value, _Loose):
        tensor = value()
        if tensor is None or (value.version is not None and tensor._version != value.version):
            return _GONE
        return tensor
    if type(value) in (list, tuple):
        items = [_fasten(item) for item in value]
        return _GONE if any(item is _GONE for item in items) else type(value)(items)
    if type(value) is dict:
        pairs = {key: _fasten(item) for key, item in value.items()}
        return _GONE if any(item is _GONE for item in pairs.values()) else pairs
    return value


def _cut_off(value: Any) -> Any:
    """The same values without the graphs behind them; what required gradients still does."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    if type(value) in (list, tuple):
        return type(value)(_cut_off(item) for item in value)
    return {key: _cut_off(item) for key, item in value.items()} if type(value) is dict else value


def _is_light(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_light(item) for item in value)
    if type(value) is dict:
        return all(_is_light(item) for item in value.values())
    return value is None or isinstance(value, (_Loose, bool, int, float, str))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or all that are inside containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


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
