"""Where a search for a holder starts: everything that has a name."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch.nn.modules import module as torch_module

from safetrain.source import LIBRARY, MACHINERY, USER, frame_locals, grade


@dataclass(frozen=True, slots=True)
class Root:
    """A named place. `label` is for people: ``local `history` in main()``."""

    label: str
    name: str
    value: Any
    code: CodeType | None = None
    """For a local variable: the function it is in."""
    namespace: dict[str, Any] | None = None
    """For a global variable: the module's dict."""


def gather_roots(given: Mapping[str, Any] | None = None) -> Iterator[list[Root]]:
    """Two batches of roots: what people name (given objects, user frames and modules, torch's global hooks), then the rest.

    Frames are read without leaving anything behind. Outermost frames come first, so that an object that is passed
    down goes by its owner's name.
    """
    first = [Root(label, label, value) for label, value in (given or {}).items()]
    frames = list(_frames())
    spaces: dict[int, tuple[str, dict[str, Any]]] = {}
    for frame in frames:
        if grade(frame.f_code.co_filename) == USER:
            first += _locals_of(frame)
            spaces.setdefault(id(frame.f_globals), (frame.f_code.co_filename, frame.f_globals))
    for filename, module in _user_modules():
        spaces.setdefault(id(module.__dict__), (filename, module.__dict__))
    for filename, space in spaces.values():
        first += _globals_of(filename, space)
    first += _process_wide()
    yield first
    yield [root for frame in frames if grade(frame.f_code.co_filename) == LIBRARY for root in _locals_of(frame)]
    yield [root for frame in frames if grade(frame.f_code.co_filename) == MACHINERY for root in _locals_of(frame)]


def _frames() -> Iterator[FrameType]:
    """The running frames of every thread, outermost first, without this package's own."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    for top in sys._current_frames().values():
        stack = []
        frame: FrameType | None = top
        while frame is not None:
            if not os.path.abspath(frame.f_code.co_filename).startswith(here):
                stack.append(frame)
            frame = frame.f_back
        yield from reversed(stack)


def _locals_of(frame: FrameType) -> list[Root]:
    code = frame.f_code
    if frame.f_code.co_name == "<module>":
        return []
    where = f"{code.co_name}()"
    return [
        Root(f"local `{name}` in {where}", name, value, code=code)
        for name, value in frame_locals(frame).items()
        if not name.startswith("__")
    ]


def _user_modules() -> Iterator[tuple[str, ModuleType]]:
    for module in list(sys.modules.values()):
        filename = getattr(module, "__dict__", {}).get("__file__")
        if type(module) is ModuleType and isinstance(filename, str) and grade(filename) == USER:
            yield filename, module


def _globals_of(filename: str, space: dict[str, Any]) -> list[Root]:
    where = os.path.basename(filename)
    return [
        Root(f"global `{name}` in {where}", name, value, namespace=space)
        for name, value in list(space.items())
        if not name.startswith("__") and type(value) is not ModuleType
    ]


def _process_wide() -> Iterable[Root]:
    """Global hooks, context variables, and the exception that an interactive session keeps."""
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"):
        yield Root(f"torch's global module hooks ({name})", name, getattr(torch_module, name, None))
    for variable, value in contextvars.copy_context().items():
        yield Root(f"ContextVar `{variable.name}`", variable.name, value)
    for name in ("last_exc", "last_value"):
        if hasattr(sys, name):
            yield Root(f"sys.{name}", name, getattr(sys, name))
