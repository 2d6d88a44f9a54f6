"""Bounded windows: does what holds the graphs let go of them again by itself, and after how many?"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from safetrain.graph.holders import Holder
from safetrain.graph.storing import names, parse

_DROPPERS = frozenset({"clear", "pop", "popleft", "remove"})


def bound_of(holder: Holder, files: Iterable[str], scope: Mapping[str, Any]) -> int | None:
    """How many graphs the holder keeps at most, as far as can be told; None when nothing says so.

    A `deque(maxlen=…)` says so itself. Otherwise the source is read for a statement that empties, shortens or rebinds
    the holder under a test of its length or of a step count: `if len(window) > 8: …`, `if step % 10 == 0: …`.
    Numbers are looked up in `scope` (visible names); one that cannot be found counts as not bounded.
    """
    for obj in holder.path:
        if isinstance(obj, deque) and obj.maxlen is not None:
            return obj.maxlen
    bounds = [
        bound
        for filename in files
        for part in _parts(filename, holder)
        for bound in _bounds_in(part, holder.name, scope)
    ]
    return min(bounds, default=None)


def _parts(filename: str, holder: Holder) -> Iterable[ast.AST]:
    """The source in which the name means the holder: for a local variable, its function."""
    tree = parse(filename)
    code = holder.root.code
    if tree is None:
        return
    if code is None or len(holder.path) > 1:
        yield tree
    elif code.co_filename == filename:
        lines = range(code.co_firstlineno, max((line for _, _, line in code.co_lines() if line), default=0) + 1)
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno in lines)


def _bounds_in(tree: ast.AST, name: str, scope: Mapping[str, Any]) -> Iterable[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)) and any(
            _drops(inner, name) for part in node.body for inner in ast.walk(part)
        ):
            yield from _limits(node.test, name, scope)
        elif isinstance(node, ast.Assign) and any(names(target, name) for target in node.targets):
            yield from _tail_length(node.value, name, scope)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                yield from _tail_length(target, name, scope)


def _drops(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPERS:
        return names(node.func.value, name)
    if isinstance(node, ast.Delete):
        return any(names(target, name) for target in node.targets)
    return isinstance(node, ast.Assign) and any(
        not isinstance(t, ast.Subscript) and names(t, name) for t in node.targets
    )


def _limits(test: ast.expr, name: str, scope: Mapping[str, Any]) -> Iterable[int]:
    """Numbers that `len(name)` is compared with, and moduli of step counts."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            for side, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                if _is_length(side, name):
                    yield from _number(other, scope)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            yield from _number(node.right, scope)


def _is_length(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
        and len(node.args) == 1 and names(node.args[0], name)
    )  # fmt: skip


def _tail_length(value: ast.expr, name: str, scope: Mapping[str, Any]) -> Iterable[int]:
    """`n` of `name[-n:]` and of `del name[:-n]`, on the list itself."""
    if not (isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)):
        return
    if isinstance(value.value, (ast.Name, ast.Attribute)) and names(value.value, name):
        for end in (value.slice.lower, value.slice.upper):
            if isinstance(end, ast.UnaryOp) and isinstance(end.op, ast.USub):
                yield from _number(end.operand, scope)


def _number(node: ast.expr, scope: Mapping[str, Any]) -> Iterable[int]:
    value: Any = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name):
        value = scope.get(node.id)
    elif isinstance(node, ast.Attribute):
        owner = scope.get(node.value.id) if isinstance(node.value, ast.Name) else None
        value = vars(owner).get(node.attr) if hasattr(owner, "__dict__") else None
    if type(value) is int and value > 0:
        yield value
