"""Where a search for a holder starts: everything that has a name."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from torch.nn.modules import module as torch_module

from safetrain.source import LIBRARY, MACHINERY, USER, frame_locals, grade

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


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
    """Batches of roots: what people name (given objects, user frames and modules, global hooks), then the rest.

    Frames are read without leaving anything behind. Outermost frames come first, so that an object that is passed
    down goes by its owner's name.
    """
    first = [Root(label, label, value) for label, value in (given or {}).items()]
    frames = _frames()
    spaces: dict[int, tuple[str, dict[str, Any]]] = {}
    for frame in frames:
        if grade(frame.f_code.co_filename) == USER:
            first += _locals_of(frame)
            spaces.setdefault(id(frame.f_globals), (frame.f_code.co_filename, frame.f_globals))
    first += _trainers()
    for filename, module in _user_modules():
        spaces.setdefault(id(module.__dict__), (filename, module.__dict__))
    for filename, space in spaces.values():
        first += _globals_of(filename, space)
    first += _process_wide()
    yield first
    yield [root for frame in frames if grade(frame.f_code.co_filename) == LIBRARY for root in _locals_of(frame)]
    yield [root for frame in frames if grade(frame.f_code.co_filename) == MACHINERY for root in _locals_of(frame)]


def _frames() -> list[FrameType]:
    """The running frames of every thread, outermost first, without this package's own."""
    own = threading.get_ident()
    tops = [sys._getframe(1)]  # not `_frames` itself: a frame that holds itself is a cycle
    tops += [top for ident, top in sys._current_frames().items() if ident != own]
    found: list[FrameType] = []
    for frame in tops:
        stack = []
        here: FrameType | None = frame
        while here is not None:
            if not here.f_code.co_filename.startswith(_PACKAGE):
                stack.append(here)
            here = here.f_back
        found += reversed(stack)
    return found


def _trainers() -> Iterator[Root]:
    """An object of a user's class whose inherited method of this package is running: a Trainer that nobody named."""
    here: FrameType | None = sys._getframe(1)
    while here is not None:
        if here.f_code.co_filename.startswith(_PACKAGE) and here.f_code.co_varnames[:1] == ("self",):
            owner = frame_locals(here).get("self")
            if is_user_class(type(owner)):
                yield Root(f"the running {type(owner).__name__}", type(owner).__name__, owner)
        here = here.f_back


_user_classes: dict[type, bool] = {}


def is_user_class(kind: type) -> bool:
    """Whether a class is defined in the user's own code."""
    known = _user_classes.get(kind)
    if known is None:
        module = sys.modules.get(kind.__module__)
        filename = getattr(module, "__file__", None)
        known = kind.__module__ == "__main__" or (isinstance(filename, str) and grade(filename) == USER)
        _user_classes[kind] = known
    return known


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
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    ):
        yield Root(f"torch's global module hooks ({name})", name, getattr(torch_module, name, None))
    for variable, value in contextvars.copy_context().items():
        yield Root(f"ContextVar `{variable.name}`", variable.name, value)
    for name in ("last_exc", "last_value"):
        if hasattr(sys, name):
            yield Root(f"sys.{name}", name, getattr(sys, name))
