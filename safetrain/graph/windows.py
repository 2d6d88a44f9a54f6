"""Bounded windows: does what holds the graphs let go of them again by itself, and after how many?"""

from __future__ import annotations

import ast
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor

from safetrain.graph.holders import Holder
from safetrain.graph.storing import adds_to, is_fresh, names
from safetrain.source.syntax import called_name, is_call_of, tree_of

_DROPPERS = frozenset({"clear", "pop", "popleft", "remove"})


_SAME_LENGTH = frozenset({"enumerate", "tqdm", "reversed", "sorted", "iter", "list", "tuple", "track"})
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def bound_of(holder: Holder, files: Iterable[str], scope: Mapping[str, Any]) -> int | None:
    """How many graphs the holder keeps at most, as far as can be told; None when nothing says so.

    A `deque(maxlen=…)` and its like say so themselves. Otherwise the source is read for one of these:

    - a statement that empties, shortens or rebinds the holder under a test of its length or of a step count:
      `if len(window) > 8: …`, `if step % 10 == 0: …`;
    - places that are written over: `ring[i % 8] = x`, or item assignments as the only stores into a list or array;
    - a fresh start in each turn of a loop (or call of a function) around another loop of known length; not of a running
      sum, which is a number to be printed and needs no graph of any length.

    Numbers and lengths are looked up in `scope` (visible names); what cannot be found counts as not bounded.
    """
    for obj in holder.path:
        bound = _bound_by_type(obj)
        if bound is not None:
            return bound
    parts = [part for filename in files for part in _parts(filename, holder)]
    is_sum = isinstance(holder.path[-1], Tensor)
    bounds = [bound for part in parts for bound in _bounds_in(part, holder.name, scope, is_sum)]
    if holder.is_named_itself:
        bounds += _places(holder.path[-1], parts, holder.name)
    return min(bounds, default=None)


def only_rebinds(holder: Holder, files: Iterable[str]) -> bool:
    """Whether the holder is a variable that is bound anew and never added to: what it shows is kept elsewhere."""
    is_variable = holder.root.code is not None or holder.root.namespace is not None
    if not is_variable or holder.is_attribute or holder.name != holder.root.name:
        return False
    parts = [part for filename in files for part in _parts(filename, holder)]
    return not any(adds_to(node, holder.name) for part in parts for node in ast.walk(part))


def _bound_by_type(obj: Any) -> int | None:
    if isinstance(obj, deque):
        return obj.maxlen
    if isinstance(obj, queue.Queue):
        return obj.maxsize if obj.maxsize > 0 else None
    if type(obj).__name__ == "_lru_cache_wrapper":
        most: int | None = obj.cache_parameters()["maxsize"]
        return most
    return None


def _parts(filename: str, holder: Holder) -> Iterable[ast.AST]:
    """The source in which the name means the holder: for a local variable, its function."""
    tree = tree_of(filename)
    code = holder.root.code
    if tree is None:
        return
    if code is None or len(holder.path) > 1:
        yield tree
    elif code.co_filename == filename:
        lines = range(code.co_firstlineno, max((line for _, _, line in code.co_lines() if line), default=0) + 1)
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno in lines)


def _bounds_in(tree: ast.AST, name: str, scope: Mapping[str, Any], is_sum: bool) -> Iterable[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)) and any(
            _drops(inner, name) for part in node.body for inner in ast.walk(part)
        ):
            yield from _limits(node.test, name, scope)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and names(target.value, name):
                    if not any(names(inner, name) for inner in ast.walk(node.value)):
                        yield from _modulus(target.slice, scope)
                elif names(target, name):
                    yield from _tail_length(node.value, name, scope)
                    yield from () if is_sum else _turn_length(node, name, scope)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                yield from _tail_length(target, name, scope)


def _places(container: Any, parts: Sequence[ast.AST], name: str) -> Iterator[int]:
    """The length of a list or array into which nothing but item assignments store: it never grows."""
    if not isinstance(container, (list, np.ndarray)):
        return
    stores = [node for part in parts for node in ast.walk(part) if adds_to(node, name)]
    if stores and all(_is_item_store(node, name) for node in stores):
        yield len(container)


def _is_item_store(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(t, ast.Subscript) and not isinstance(t.slice, ast.Slice) and names(t.value, name)
        for t in node.targets
    )


def _modulus(index: ast.expr, scope: Mapping[str, Any]) -> Iterable[int]:
    """`n` of `x[i % n]`."""
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Mod):
        yield from _number(index.right, scope)


def _turn_length(start: ast.Assign, name: str, scope: Mapping[str, Any]) -> Iterable[int]:
    """Turns of the loops between a fresh start that comes again and what stores under the name after it."""
    around = _above(start, (*_LOOPS, *_FUNCTIONS))
    if around is None or (isinstance(around, _FUNCTIONS) and not _is_called_in_a_loop(around)):
        return
    if not is_fresh(start.value):
        return
    most = 0
    for node in ast.walk(around):
        if node is start or not adds_to(node, name):
            continue
        turns = 1
        loop = _above(node, (*_LOOPS, *_FUNCTIONS))
        while loop is not None and loop is not around:
            length = _length(loop.iter, scope) if isinstance(loop, ast.For) else None
            if length is None:
                return
            turns *= length
            loop = _above(loop, (*_LOOPS, *_FUNCTIONS))
        most += turns
    if most:
        yield most


def _above(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
    above: ast.AST | None = getattr(node, "parent", None)
    while above is not None and not isinstance(above, kinds):
        above = getattr(above, "parent", None)
    return above


def _is_called_in_a_loop(function: Any) -> bool:
    module = function
    while hasattr(module, "parent"):
        module = module.parent
    calls = [node for node in ast.walk(module) if is_call_of(node, function.name)]
    return any(_above(call, _LOOPS) is not None for call in calls)


def _length(iterated: ast.expr, scope: Mapping[str, Any]) -> int | None:
    """Turns of a loop over this expression, where its length can be looked up."""
    if isinstance(iterated, ast.Call):
        called = called_name(iterated)
        if called == "range" and len(iterated.args) == 1:
            return next(iter(_number(iterated.args[0], scope)), None)
        if called == "zip":
            return min((n for arg in iterated.args if (n := _length(arg, scope)) is not None), default=None)
        return _length(iterated.args[0], scope) if called in _SAME_LENGTH and iterated.args else None
    value = _value_of(iterated, scope)
    try:
        return len(value) if isinstance(value, Sized) else None
    except TypeError:  # a loader over a stream
        return None


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
    value = node.value if isinstance(node, ast.Constant) else _value_of(node, scope)
    if is_call_of(node, "len"):
        value = _length(node.args[0], scope)  # type: ignore[attr-defined]
    if type(value) is int and value > 0:
        yield value


def _value_of(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, stands for."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = scope.get(node.value.id)
        return vars(owner).get(node.attr) if hasattr(owner, "__dict__") else None
    return None
