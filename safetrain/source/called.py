"""Which of the user's functions the running code calls: those that returned already and left no frame behind."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from safetrain.source import USER, frame_locals, grade

_MAX_FUNCTIONS = 64
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Called:
    """A function of the user's, and the object whose method it is."""

    function: FunctionType
    owner: Any = None

    @property
    def filename(self) -> str:
        """Its source file."""
        return self.function.__code__.co_filename

    def outside_values(self) -> dict[str, Any]:
        """What it reaches by name beyond its own locals: its closure, and the globals that it mentions."""
        code, world = self.function.__code__, self.function.__globals__
        values = {name: world[name] for name in code.co_names if name in world}
        for name, cell in zip(code.co_freevars, self.function.__closure__ or (), strict=False):
            try:
                values[name] = cell.cell_contents
            except ValueError:
                continue  # a name that has no value yet
        return values


def called_functions(frames: Iterable[FrameType]) -> list[Called]:
    """The user's functions whose names the code of `frames` mentions, and what those mention in turn.

    Read from names, not from what ran: a function among them may not have been called.
    """
    found: dict[CodeType, Called] = {}
    for frame in frames:
        values = frame_locals(frame)
        if grade(frame.f_code.co_filename) == USER:
            values = {n: v for n, v in frame.f_globals.items() if n in frame.f_code.co_names} | values
        else:  # a loop of ours: only the user's object that it drives is of interest
            values = {n: v for n, v in values.items() if n == "self"}
        _follow(values, frame.f_code, found, _MAX_DEPTH)
    return list(found.values())


def _follow(values: dict[str, Any], code: CodeType, found: dict[CodeType, Called], depth: int) -> None:
    for called in _mentioned(values, code):
        inner = called.function.__code__
        if inner in found or len(found) >= _MAX_FUNCTIONS or grade(inner.co_filename) != USER:
            continue
        found[inner] = called
        if depth:
            owner = {} if called.owner is None else {"self": called.owner}
            _follow(called.outside_values() | owner, inner, found, depth - 1)


def _mentioned(values: dict[str, Any], code: CodeType) -> Iterator[Called]:
    """Functions among the values, and methods of theirs that the code names; a module is called by its `forward`."""
    for value in list(values.values()):
        kind = type(value)
        if kind is FunctionType:
            yield Called(value)
        elif kind is MethodType:
            yield Called(value.__func__, value.__self__)
        elif is_users_class(kind):
            for name in (*code.co_names, "forward", "__call__"):
                member = inspect.getattr_static(value, name, None)
                if isinstance(member, FunctionType):
                    yield Called(member, value)


def is_users_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code."""
    filename = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (filename is not None and grade(filename) == USER)
