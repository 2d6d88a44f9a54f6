"""What the source says about a place that grows: does it let go again by itself, or is it kept for a purpose?

A reading of the text, not of the run, by the names that the place goes by. Used only when growth was measured.
"""

from __future__ import annotations

import ast
import functools
import queue
import re
from collections import deque
from collections.abc import Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Literal

from torch.optim import Optimizer

from safetrain.accounting.inventory import BUFFERS, length_of
from safetrain.findings import SourceLine
from safetrain.graph import Holder
from safetrain.graph.storing import flat_targets
from safetrain.source import line_text
from safetrain.source.syntax import tree_of

Purpose = Literal["bounded", "emptied", "collected", "remembered"]
"""`bounded`: it stops growing by itself. `emptied`: somebody clears it now and then. `collected`: it is put together
into one once the loop is over. `remembered`: results by key, which stops once every key was met."""

_STORES = frozenset(
    {"append", "add", "extend", "insert", "appendleft", "update", "setdefault", "put", "push", "write", "writelines"}
)
_DROPS = frozenset({"popleft", "popitem", "remove", "clear", "pop"})
_EMPTIES = frozenset({"clear", "reset", "reset_states", "flush", "empty"})
_EMPTY_CALLS = frozenset(
    {"list", "dict", "set", "deque", "defaultdict", "OrderedDict", "zeros", "empty", "BytesIO", "StringIO", "bytearray"}
)
_COLLECTORS = frozenset(
    {"cat", "stack", "concat", "concatenate", "hstack", "vstack", "array", "asarray", "tensor", "DataFrame"}
    | {"pad_sequence", "save", "savez", "dump"}
)
_LIMIT_WORD = re.compile(r"max|cap|limit|window|budget|(?<!batch_)size", re.IGNORECASE)
_NAMELESS = (list, tuple, dict, set, deque, functools.partial, FunctionType, MethodType, CellType)
"""What has no attributes of the user's own."""
_Loop = (ast.For, ast.AsyncFor, ast.While)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Reading:
    """What the files say about one place.

    An attribute is met under its name on any object. A local variable is met under its name in its function and in
    functions that have a parameter of that name.
    """

    def __init__(self, holder: Holder, files: Sequence[str]) -> None:
        self._holder = holder
        self._name = holder.name
        self._is_attribute = holder.is_attribute
        self._is_local = holder.root.code is not None and len(holder.way) == 1
        self._owners = _owner_classes(holder)
        self._nodes: list[tuple[str, ast.AST]] = [(f, node) for f in files for node in self._of_file(f)]
        self._calls: dict[str, list[ast.AST]] = {}
        for tree in filter(None, map(tree_of, files)):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    self._calls.setdefault(_called(node), []).append(node)

    def purpose(self) -> Purpose | None:
        """Why the place may grow, None when nothing says that it should."""
        if is_bounded_by_type(self._holder):
            return "bounded"
        nodes = [node for _, node in self._nodes]
        if any(self._is_guarded_by_size(node) or self._keeps_the_end(node) for node in nodes):
            return "bounded"
        if any(self._empties(node) and self._runs_again(node) for node in nodes):
            return "emptied"
        if any(type(obj).__name__ == "_lru_cache_wrapper" for obj in self._holder.path):
            return "remembered"
        if any(self._remembers(node) for node in nodes):
            return "remembered"
        place = self._holder.path[-1]
        if length_of(place) is None or isinstance(place, BUFFERS):
            return None  # one tensor or text that gets bigger: what puts it together is what makes it grow
        return "collected" if any(self._collects(node) and not self._runs_again(node) for node in nodes) else None

    def storing_line(self) -> SourceLine | None:
        """The statement that adds to the place, else one that binds it to something that is not empty."""
        best: tuple[int, str, int] | None = None
        for filename, node in self._nodes:
            weight = 3 if self._stores(node) else self._binding(node)
            if weight and (best is None or weight > best[0]):
                best = (weight, filename, node.lineno)  # type: ignore[attr-defined]
        return None if best is None else SourceLine(best[1], best[2], line_text(best[1], best[2]))

    # ------------------------------------------------------------------ is this node the place?

    def _of_file(self, filename: str) -> Iterator[ast.AST]:
        tree = tree_of(filename)
        if tree is None:
            return iter(())
        code = self._holder.root.code
        if not self._is_local or code is None:
            return ast.walk(tree)
        return (
            node
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (self._is_home(function, filename) or self._name in _parameters(function))
            for node in ast.walk(function)
        )

    def _is_home(self, function: ast.FunctionDef | ast.AsyncFunctionDef, filename: str) -> bool:
        code = self._holder.root.code
        if code is None or code.co_filename != filename or code.co_name != function.name:
            return False
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        return first <= code.co_firstlineno <= (function.end_lineno or function.lineno)

    def _is_it(self, node: ast.AST) -> bool:
        """`x`, `anything.x`, an item of it, or a call on it such as `x.setdefault(…)`."""
        if isinstance(node, ast.Name):
            return not self._is_attribute and node.id == self._name
        if isinstance(node, ast.Attribute):
            return node.attr == self._name and not self._is_local and self._may_be_the_owner(node)
        if isinstance(node, ast.Subscript):
            return self._is_it(node.value)
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._is_it(node.func.value)

    def _may_be_the_owner(self, node: ast.Attribute) -> bool:
        """`self.x` in another class is another place."""
        if not self._owners or not isinstance(node.value, ast.Name) or node.value.id != "self":
            return True
        above = getattr(node, "parent", None)
        while above is not None and not isinstance(above, ast.ClassDef):
            above = getattr(above, "parent", None)
        return above is None or above.name in self._owners

    def _is_item(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Subscript) and self._is_it(node.value)

    # ------------------------------------------------------------------ what does this statement do with it?

    def _stores(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _STORES and self._is_it(node.func.value)
        if isinstance(node, ast.AugAssign):
            return self._is_it(node.target)
        return isinstance(node, ast.Assign) and any(self._is_item(target) for target in node.targets)

    def _binding(self, node: ast.AST) -> int:
        """2 for `x = [*x, new]`, which feeds on itself; 1 for another value that is not empty."""
        if not isinstance(node, ast.Assign) or not any(self._is_it(target) for target in flat_targets(node.targets)):
            return 0
        if any(self._is_it(inner) for inner in ast.walk(node.value)):
            return 2
        return 0 if _is_empty(node.value) else 1

    def _drops(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _DROPS and self._is_it(node.func.value)
        return isinstance(node, ast.Delete) and any(self._is_it(target) for target in node.targets)

    def _empties(self, node: ast.AST) -> bool:
        """Clearing, or starting afresh."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in _EMPTIES and self._is_it(node.func.value)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return _is_empty(node.value) and any(self._is_it(t) and not self._is_item(t) for t in flat_targets(targets))
        return isinstance(node, ast.Delete) and any(self._is_item(target) for target in node.targets)

    def _is_guarded_by_size(self, node: ast.AST) -> bool:
        """`if len(x) < n: x.append(…)`, `if self.at < self.cap: …`, `while len(x) > n: x.popleft()`, `x[i % n] = …`."""
        if isinstance(node, (ast.If, ast.While)):
            if not self._compares_a_size(node.test):
                return False
            inside = [inner for part in (*node.body, *node.orelse) for inner in ast.walk(part)]
            return any(self._stores(inner) or self._drops(inner) or self._empties(inner) for inner in inside)
        if isinstance(node, ast.Assign):
            return any(
                isinstance(t, ast.Subscript) and self._is_it(t.value) and _has_modulo(t.slice) for t in node.targets
            )
        return False

    def _compares_a_size(self, test: ast.expr) -> bool:
        for node in ast.walk(test):
            if not isinstance(node, ast.Compare) or isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
                continue
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Constant) and side.value in (0, 1) for side in sides):
                continue  # asks whether it is empty
            if any(self._is_length(side) for side in sides):
                return True
            if any(_LIMIT_WORD.search(_last_word(side)) for side in sides):
                return True
        return False

    def _is_length(self, node: ast.AST) -> bool:
        """`len(x)`, `x.tell()`, `x.qsize()`."""
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in ("tell", "qsize") and self._is_it(node.func.value)
        return _called(node) == "len" and bool(node.args) and self._is_it(node.args[0])

    def _remembers(self, node: ast.AST) -> bool:
        """`if key not in x: x[key] = …`, also with the test the other way round, or with `x.get(key) is None`."""
        if not isinstance(node, ast.If):
            return False
        tests = [inner for inner in ast.walk(node.test) if isinstance(inner, ast.Compare)]
        if not any(isinstance(t.ops[0], (ast.In, ast.NotIn)) and self._is_it(t.comparators[0]) for t in tests):
            return False
        parent = getattr(node, "parent", None)
        around = parent if isinstance(parent, (*_Function, *_Loop)) else node
        return any(self._stores(inner) for inner in ast.walk(around))

    def _keeps_the_end(self, node: ast.AST) -> bool:
        """`x = x[-n:]`."""
        if not isinstance(node, ast.Assign) or not any(self._is_it(target) for target in node.targets):
            return False
        value = node.value
        return isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice) and self._is_it(value.value)

    def _collects(self, node: ast.AST) -> bool:
        """`torch.cat(x)` and the like."""
        if not isinstance(node, ast.Call) or _called(node) not in _COLLECTORS:
            return False
        return any(self._is_it(part) for argument in node.args for part in _parts(argument))

    def _runs_again(self, node: ast.AST, depth: int = 3) -> bool:
        """In a loop, or in a function that is called from one. A hook `on_…` is called by somebody else's loop."""
        above = getattr(node, "parent", None)
        while above is not None and not isinstance(above, _Function):
            if isinstance(above, _Loop):
                return True
            above = getattr(above, "parent", None)
        name = getattr(above, "name", "")
        if not name or name == "__init__" or depth == 0:
            return False
        if name.startswith("on_") and isinstance(getattr(above, "parent", None), ast.ClassDef):
            return True
        return any(self._runs_again(call, depth - 1) for call in self._calls.get(name, ()))


def is_bounded_by_type(holder: Holder) -> bool:
    """`deque(maxlen=…)`, `lru_cache(maxsize=…)`, `Queue(maxsize=…)` on the way, or an optimizer of torch's.

    Those keep a state of one size, but for LBFGS, whose history ends at `history_size`.
    """
    for obj in holder.path:
        if isinstance(obj, Optimizer) and type(obj).__module__.startswith("torch.optim."):
            return True
        if isinstance(obj, deque) and obj.maxlen is not None:
            return True
        if type(obj).__name__ == "_lru_cache_wrapper" and obj.cache_parameters()["maxsize"] is not None:
            return True
        if isinstance(obj, queue.Queue) and obj.maxsize > 0:
            return True
    return False


def _owner_classes(holder: Holder) -> set[str]:
    """Classes of the object whose attribute the place is."""
    for obj in reversed(holder.path[:-1]):
        if type(obj) not in _NAMELESS:
            kind = obj if isinstance(obj, type) else type(obj)
            return {base.__name__ for base in kind.__mro__}
    return set()


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _last_word(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _has_modulo(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod) for inner in ast.walk(node))


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_empty(element) for element in value.elts)
    if isinstance(value, ast.Dict):
        return all(_is_empty(element) for element in value.values)
    if isinstance(value, ast.Call):
        return _called(value) in _EMPTY_CALLS
    if isinstance(value, ast.DictComp):
        return _is_empty(value.value)
    return isinstance(value, ast.ListComp) and _is_empty(value.elt)


def _parts(argument: ast.expr) -> list[ast.expr]:
    """The argument itself, what a comprehension goes over, the elements of a literal."""
    if isinstance(argument, (ast.ListComp, ast.GeneratorExp)):
        return [generator.iter for generator in argument.generators]
    if isinstance(argument, (ast.List, ast.Tuple)):
        return list(argument.elts)
    if isinstance(argument, ast.Dict):
        return list(argument.values)
    return [argument]


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
