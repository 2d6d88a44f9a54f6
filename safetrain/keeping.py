"""What the source says about a place that grows: does it let go again by itself, or is it kept for a purpose?

A reading of the text, not of the run, by the holder's name. Used only when growth was measured.
"""

from __future__ import annotations

import ast
import queue
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from safetrain.graph import Holder, bound_of
from safetrain.graph.storing import names
from safetrain.syntax import tree_of

Purpose = Literal["bounded", "emptied", "collected"]
"""`bounded`: it stops growing by itself. `emptied`: somebody clears it now and then. `collected`: it is put together
into one once the loop is over."""

_STORES = frozenset({"append", "add", "extend", "insert", "appendleft", "update", "setdefault", "put", "push"})
_DROPS = frozenset({"popleft", "popitem", "remove", "clear", "pop"})
_EMPTIES = frozenset({"clear", "reset", "reset_states", "flush", "empty"})
_COLLECTORS = frozenset(
    {"cat", "stack", "concat", "concatenate", "hstack", "vstack", "array", "asarray", "tensor", "DataFrame"}
    | {"pad_sequence", "save", "savez", "dump"}
)
_LIMIT_WORD = re.compile(r"max|cap|limit|window|budget|(?<!batch_)size", re.IGNORECASE)
_Loop = (ast.For, ast.AsyncFor, ast.While)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def purpose_of(holder: Holder, files: Iterable[str], scope: Mapping[str, Any]) -> Purpose | None:
    """Why the place may grow, None when nothing says that it should. `scope`: the names that the user's frames see."""
    files = list(files)
    if is_bounded_by_type(holder) or bound_of(holder, files, scope) is not None:
        return "bounded"
    nodes = [node for filename in files for node in _nodes(filename)]
    name = holder.name
    if any(_is_guarded_by_size(node, name) for node in nodes):
        return "bounded"
    calls = _calls_in(nodes)
    if any(_empties(node, name) and _runs_again(node, calls) for node in nodes):
        return "emptied"
    return "collected" if any(_collects(node, name) and not _runs_again(node, calls) for node in nodes) else None


def is_bounded_by_type(holder: Holder) -> bool:
    """`deque(maxlen=…)`, `lru_cache(maxsize=…)`, `Queue(maxsize=…)` on the way."""
    for obj in holder.path:
        if isinstance(obj, deque) and obj.maxlen is not None:
            return True
        if type(obj).__name__ == "_lru_cache_wrapper" and obj.cache_parameters()["maxsize"] is not None:
            return True
        if isinstance(obj, queue.Queue) and obj.maxsize > 0:
            return True
    return False


def _nodes(filename: str) -> Iterator[ast.AST]:
    tree = tree_of(filename)
    return iter(()) if tree is None else ast.walk(tree)


def _is_guarded_by_size(node: ast.AST, name: str) -> bool:
    """`if len(x) < n: x.append(…)`, `if self.size < self.cap: …`, `while len(x) > n: x.popleft()`, `x[i % n] = …`."""
    if isinstance(node, (ast.If, ast.While)):
        if not _compares_a_size(node.test, name):
            return False
        inside = [inner for part in (*node.body, *node.orelse) for inner in ast.walk(part)]
        return any(_stores(inner, name) or _drops(inner, name) for inner in inside)
    if isinstance(node, ast.Assign):
        items = [target for target in node.targets if isinstance(target, ast.Subscript)]
        return any(names(item.value, name) and _has_modulo(item.slice) for item in items)
    return False


def _compares_a_size(test: ast.expr, name: str) -> bool:
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq)):
            continue
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) and side.value in (0, 1) for side in sides):
            continue  # asks whether it is empty
        lengths = [side for side in sides if isinstance(side, ast.Call) and _called(side) == "len" and side.args]
        if any(names(length.args[0], name) for length in lengths):
            return True
        if any(_LIMIT_WORD.search(word) for side in sides for word in [_last_word(side)] if word):
            return True
    return False


def _last_word(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _has_modulo(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod) for inner in ast.walk(node))


def _stores(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _STORES and names(node.func.value, name)
    return isinstance(node, ast.Assign) and _names_an_item(node.targets, name)


def _names_an_item(targets: Iterable[ast.expr], name: str) -> bool:
    return any(isinstance(target, ast.Subscript) and names(target.value, name) for target in targets)


def _drops(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _DROPS and names(node.func.value, name)
    return isinstance(node, ast.Delete) and any(names(target, name) for target in node.targets)


def _empties(node: ast.AST, name: str) -> bool:
    """Clearing, or starting afresh."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _EMPTIES and names(node.func.value, name)
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [one for t in targets for one in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
        return any(not isinstance(t, ast.Subscript) and names(t, name) for t in flat) and _is_empty(node.value)
    return isinstance(node, ast.Delete) and _names_an_item(node.targets, name)


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return all(_is_empty(element) for element in value.elts)
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.Call):
        return _called(value) in ("list", "dict", "set", "deque", "defaultdict", "OrderedDict", "zeros", "empty")
    return isinstance(value, (ast.ListComp, ast.DictComp))


def _runs_again(node: ast.AST, calls: Mapping[str, Sequence[ast.AST]], depth: int = 3) -> bool:
    """In a loop, or in a function that is called from one. A hook `on_…` is called by somebody else's loop."""
    above = getattr(node, "parent", None)
    while above is not None and not isinstance(above, _Function):
        if isinstance(above, _Loop):
            return True
        above = getattr(above, "parent", None)
    name = getattr(above, "name", "")
    if not name or name == "__init__" or depth == 0:
        return False
    return name.startswith("on_") or any(_runs_again(call, calls, depth - 1) for call in calls.get(name, ()))


def _calls_in(nodes: Iterable[ast.AST]) -> dict[str, list[ast.AST]]:
    calls: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.Call):
            calls.setdefault(_called(node), []).append(node)
    return calls


def _collects(node: ast.AST, name: str) -> bool:
    """`torch.cat(x)` and the like."""
    if not isinstance(node, ast.Call) or _called(node) not in _COLLECTORS:
        return False
    return any(names(part, name) for argument in node.args for part in _parts(argument))


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
