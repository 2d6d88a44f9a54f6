"""Which line stored it: one step of the user's own lines is traced, and each is followed by a look at the holder.

The trace sees lines of user files only, stands for one step, and is not set where a debugger or a coverage tool has its
own. The fallback reads the source for statements that store under the holder's name.
"""

from __future__ import annotations

import ast
import bisect
import inspect
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import SourceLine
from safetrain.graph.holders import Holder
from safetrain.graph.marks import grad_fn_of, is_graph_node
from safetrain.source import USER, grade, line_text, user_frame
from safetrain.source.syntax import tree_of

_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
_MAX_LINES = 200_000
"""Lines after which a trace gives up: a step with a long loop of Python must not hang."""
_MAX_SECONDS = 2.0
_MAX_ITEMS = 2_000

Place = tuple[str, int]
Print = tuple[Any, ...] | None


class _Watch:
    """Looks whether a holder changed. `look(frame)` gives a print of it, or None when it cannot be seen from there."""

    def __init__(self, look: Callable[[FrameType], Print], newest: Callable[[FrameType], Any]) -> None:
        self.look = look
        self.newest = newest
        self.last: Print = None


def _watches(holder: Holder) -> list[_Watch]:
    found = [_watch_container(container) for container in holder.watched]
    if len(holder.path) == 1:
        root = holder.root
        if root.code is not None:
            found.append(_watch_local(root.code, root.name))
        elif root.namespace is not None:
            found.append(_watch_slot(root.namespace, root.name))
    return found


def _watch_container(container: Any) -> _Watch:
    def values() -> list[Any]:
        if type(container).__name__ == "_lru_cache_wrapper":
            return [container.cache_info().currsize]
        if isinstance(container, (dict, OrderedDict)):
            return list(dict.values(container))
        if isinstance(container, (list, tuple, deque, set, frozenset)):
            return list(container)
        found = getattr(container, "__dict__", None)
        return list(found.values()) if isinstance(found, dict) else []

    def look(_: FrameType) -> Print:
        items = values()
        if type(container).__name__ == "_lru_cache_wrapper":
            return (items[0],)
        if len(items) > _MAX_ITEMS:
            return (len(items), id(items[0]), id(items[-1]))
        return (len(items), *map(id, items))

    def newest(_: FrameType) -> Any:
        items = values()
        return items[-1] if items else None

    return _Watch(look, newest)


def _watch_local(code: CodeType, name: str) -> _Watch:
    def value(frame: FrameType) -> Any:
        return frame.f_locals.get(name)

    def look(frame: FrameType) -> Print:
        # Only while the function itself runs: then Python has just refreshed its locals for the trace.
        return (id(value(frame)),) if frame.f_code is code else None

    return _Watch(look, value)


def _watch_slot(space: dict[str, Any], name: str) -> _Watch:
    return _Watch(lambda _: (id(space.get(name)),), lambda _: space.get(name))


def _outside_dynamo(function: Any) -> Any:
    """Dynamo would compile a trace function that runs within a compiled model's frames."""
    if "torch._dynamo" not in sys.modules:
        return function
    return torch._dynamo.disable(function)  # type: ignore[no-untyped-call]


class StoreTrace:
    """Traces the calling thread's user lines from `start` to `stop`, at most for one step."""

    def __init__(self, holder: Holder) -> None:
        self._watches = _watches(holder)
        self._stores: list[tuple[bool, Place, int | None]] = []
        self._positions: list[tuple[int, Place]] = []
        self._here: Place | None = None
        self._lines = 0
        self._deadline = 0.0
        self._active = False
        self._call, self._line = _outside_dynamo(self._on_call), _outside_dynamo(self._on_line)

    def start(self) -> bool:
        """False when somebody else is tracing, or there is nothing to look at."""
        if not self._watches or sys.gettrace() is not None:
            return False
        frame: FrameType | None = sys._getframe(1)
        nearest = user_frame(frame)
        if nearest is not None:
            self._here = (nearest.f_code.co_filename, nearest.f_lineno)
            self._positions.append((_sequence_nr(), self._here))
        for watch in self._watches:
            watch.last = None
        while frame is not None:
            if grade(frame.f_code.co_filename) == USER:
                self._look(frame)
                frame.f_trace = self._line
            frame = frame.f_back
        self._active = True
        self._deadline = time.perf_counter() + _MAX_SECONDS
        sys.settrace(self._call)
        return True

    def stop(self) -> None:
        """End the trace and let go of everything but lines and numbers."""
        if self._line is not None:  # also after it gave up half way: the frames still have it
            self._active = False
            if sys.gettrace() is self._call:
                sys.settrace(None)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if frame.f_trace is self._line:
                    frame.f_trace = None
                    _forget_snapshot(frame)
                frame = frame.f_back
        self._watches = []
        self._call = self._line = None  # bound methods of this object: a cycle with it

    @property
    def stored_at(self) -> SourceLine | None:
        """The line after which the holder had one more; None when it did not change."""
        if not self._stores:
            return None
        _, (filename, line), _ = max(self._stores, key=lambda store: store[0])
        return SourceLine(filename, line, line_text(filename, line))

    @property
    def made_at(self) -> SourceLine | None:
        """The line that made the tensor which was stored."""
        if not self._stores:
            return None
        number = max(self._stores, key=lambda store: store[0])[2]
        if number is None:
            return None
        at = bisect.bisect_right(self._positions, number, key=lambda entry: entry[0]) - 1
        if at < 0:
            return None
        filename, line = self._positions[at][1]
        return SourceLine(filename, line, line_text(filename, line))

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._active or grade(frame.f_code.co_filename) != USER:
            return None
        return self._line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._active:
            return None
        self._look(frame)
        if event == "line":
            self._move((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            above = user_frame(frame.f_back) if frame.f_back is not None else None
            if above is not None:
                self._move((above.f_code.co_filename, above.f_lineno))
        return self._line

    def _move(self, place: Place) -> None:
        self._here = place
        self._positions.append((_sequence_nr(), place))
        self._lines += 1
        if self._lines > _MAX_LINES or (not self._lines & 255 and time.perf_counter() > self._deadline):
            self._active = False
            sys.settrace(None)

    def _look(self, frame: FrameType) -> None:
        for watch in self._watches:
            now = watch.look(frame)
            if now is None:
                continue
            if watch.last is not None and now != watch.last and self._here is not None:
                number = _node_number(watch.newest(frame))
                # One more element, or a value that carries a graph: a store of what was found, not some other change.
                grew = number is not None or (len(now) > 1 and now[0] > watch.last[0])
                self._stores.append((grew, self._here, number))
            watch.last = now


def _node_number(value: Any) -> int | None:
    """Sequence number of the newest node behind a stored value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        numbers = [n for item in value[:16] if _may_carry(item) and (n := _node_number(item)) is not None]
        return max(numbers, default=None)
    node = grad_fn_of(value) if _may_carry(value) else None
    return int(node._sequence_nr()) if node is not None else None


def _may_carry(value: Any) -> bool:
    return issubclass(type(value), Tensor) or is_graph_node(type(value))


def _forget_snapshot(frame: FrameType) -> None:
    """Before Python 3.13 a trace leaves a snapshot of the locals in the frame, which would keep this step's tensors."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        if "locals" not in frame.f_code.co_names:
            frame.f_locals.clear()


# ---------------------------------------------------------------- reading the source

_ADDERS = frozenset({"append", "add", "extend", "insert", "appendleft", "update", "setdefault", "put", "push"})


def storing_line(name: str, files: Iterable[str], *, attribute: bool | None = None) -> SourceLine | None:
    """The statement in `files` that stores under `name`: `name.append(x)`, `name[k] = x`, `name += x`, `name = x`.

    A reading of the text, not of the run: of several, one that adds to what is there wins over a plain assignment.
    `attribute` says whether the name is an attribute (`anything.name`) or a variable, where that is known.
    """
    best: tuple[int, str, int] | None = None
    for filename in files:
        tree = tree_of(filename)
        for node in ast.walk(tree) if tree is not None else ():
            weight = _stores_under(node, name, attribute)
            if weight and (best is None or weight > best[0]):
                best = (weight, filename, node.lineno)  # type: ignore[attr-defined]
    return None if best is None else SourceLine(best[1], best[2], line_text(best[1], best[2]))


def _stores_under(node: ast.AST, name: str, attribute: bool | None) -> int:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDERS:
        return 3 if names(node.func.value, name, attribute) else 0
    if isinstance(node, ast.AugAssign):
        return 3 if names(node.target, name, attribute) else 0
    if isinstance(node, ast.Assign):
        for target in flat_targets(node.targets):
            if isinstance(target, ast.Subscript) and names(target.value, name, attribute):
                return 3
            if names(target, name, attribute):
                # `x = 0.9 * x + …` feeds on itself; `x = []` starts afresh.
                uses_itself = any(names(inner, name) for inner in ast.walk(node.value))
                return 2 if uses_itself else 0 if is_fresh(node.value) else 1
    return 0


def adds_to(node: ast.AST, name: str) -> bool:
    """Whether a statement adds to what the name holds, or binds it to something that grew out of it."""
    return _stores_under(node, name, None) >= 2


def flat_targets(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """`a`, `b` and `c` of `a, (b, *c) = …`."""
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from flat_targets(target.elts)
        else:
            yield target.value if isinstance(target, ast.Starred) else target


_MAKERS = frozenset(
    {
        "zeros",
        "ones",
        "empty",
        "full",
        "tensor",
        "randn",
        "rand",
        "zeros_like",
        "ones_like",
        "new_zeros",
        "deque",
        "dict",
        "list",
        "set",
        "defaultdict",
        "OrderedDict",
    }
)


def is_fresh(value: ast.expr) -> bool:
    """Whether an expression starts afresh: a constant, an empty or new container, a new tensor."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(is_fresh(element) for element in value.elts)
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in _MAKERS or called in ("detach", "item")
    return isinstance(value, (ast.Constant, ast.Dict, ast.Set))


def names(node: ast.AST, name: str, attribute: bool | None = None) -> bool:
    """Whether an expression is `name`, `anything.name`, or an item or call on one. `attribute` allows one of both."""
    if isinstance(node, ast.Name):
        return node.id == name and attribute is not True
    if isinstance(node, ast.Attribute):
        return node.attr == name and attribute is not False
    if isinstance(node, ast.Subscript):
        return names(node.value, name, attribute)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and names(node.func.value, name, attribute)
    return False


def files_of(model: nn.Module | None) -> list[str]:
    """Files in which the user's loop and modules stand, those of the running frames first."""
    found: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if grade(frame.f_code.co_filename) == USER:
            found[frame.f_code.co_filename] = None
        frame = frame.f_back
    for module in model.modules() if model is not None else ():
        filename = getattr(sys.modules.get(type(module).__module__), "__file__", None)
        if filename is not None and grade(filename) == USER:
            found[filename] = None
    return list(found)
