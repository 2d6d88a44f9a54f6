"""Questions about the user's source, answered from its syntax tree: which statement, which names, what runs where.

For reports only. Every answer is None or empty where the source is not to be had (compiled code, an edited file).
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from safetrain.findings import SourceLine
from safetrain.source import line_text

_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Loop = (ast.For, ast.AsyncFor, ast.While)


@functools.lru_cache(maxsize=64)
def tree_of(filename: str) -> ast.Module | None:
    """The syntax tree of a source file, each node with a `parent`."""
    text = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


@functools.lru_cache(maxsize=256)
def mentions(filename: str, *words: str) -> bool:
    """Whether all these words stand in a source file: asked before it is parsed, which takes milliseconds."""
    text = "".join(linecache.getlines(filename))
    return all(word in text for word in words)


@functools.lru_cache(maxsize=4096)
def statement_at(filename: str, line: int) -> ast.stmt | None:
    """The innermost statement that covers a line."""
    tree = tree_of(filename)
    best: ast.stmt | None = None
    for node in ast.walk(tree) if tree is not None else ():
        if (
            isinstance(node, ast.stmt)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
            and (best is None or (node.lineno, -(node.end_lineno or 0)) >= (best.lineno, -(best.end_lineno or 0)))
        ):
            best = node
    return best


def class_at(filename: str, name: str) -> ast.ClassDef | None:
    """The definition of a class in a file."""
    tree = tree_of(filename)
    return (
        next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)
        if tree is not None
        else None
    )


def scope_of_code(code: CodeType) -> ast.AST | None:
    """The definition of a function's code; of a module's code, the whole file."""
    tree = tree_of(code.co_filename)
    if tree is None or code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            first = min((node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))))
            if first == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name:
                return node
    return None


def scope_of(node: ast.AST) -> ast.AST:
    """The function around a node, else its module."""
    here = node
    while hasattr(here, "parent"):
        here = here.parent
        if isinstance(here, _Function):
            return here
    return here


def siblings_after(statement: ast.stmt) -> list[ast.stmt]:
    """The statements that follow in the same block."""
    parent = getattr(statement, "parent", None)
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(parent, block, None)
        if isinstance(statements, list) and statement in statements:
            return statements[statements.index(statement) + 1 :]
    return []


def running_node(frame: FrameType) -> ast.AST | None:
    """The expression or statement that a frame is in the middle of. None before Python 3.11: columns are unknown."""
    return _node_at(frame.f_code, frame.f_lasti)


def running_statement(frame: FrameType) -> ast.stmt | None:
    """The statement that a frame is at: of several on one line that which runs, where Python tells (3.11 and later)."""
    node: Any = running_node(frame)
    while node is not None and not isinstance(node, ast.stmt):
        node = getattr(node, "parent", None)
    return node or statement_at(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(maxsize=512)
def _node_at(code: CodeType, instruction: int) -> ast.AST | None:
    positions = getattr(code, "co_positions", None)
    position = next(itertools.islice(positions(), instruction // 2, None), None) if positions is not None else None
    tree = tree_of(code.co_filename) if position is not None else None
    if tree is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt)) and (
            (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position
        ):
            return node
    return None


_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


def operand_names(node: ast.AST) -> set[str]:
    """Names whose values an expression works on: `x` in `f(x)`, `x + y`, `x.relu()`, `[x]`.

    Not those inside other calls, and not `x.shape` or `x.device`, which read no value.
    """
    found: set[str] = set()
    stack = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        stack[0] = node.func.value
    elif isinstance(node, ast.Name):
        stack = [node]
    while stack:
        here = stack.pop()
        if isinstance(here, ast.Name):
            found.add(here.id)
        elif isinstance(here, (ast.Starred, ast.keyword, ast.List, ast.Tuple, ast.UnaryOp)):
            stack += ast.iter_child_nodes(here)
        elif isinstance(here, ast.Subscript) or (isinstance(here, ast.Attribute) and here.attr in _VIEWS):
            stack.append(here.value)
    return found


def assigned_names(statement: ast.AST | None) -> set[str]:
    """Plain names that a statement binds."""
    targets: list[ast.AST] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        targets = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    found = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if statement is not None and not isinstance(statement, (ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith)):
        found |= {n.target.id for n in ast.walk(statement) if isinstance(n, ast.NamedExpr)}
    return found


def names_stored_into(statement: ast.AST | None) -> set[str]:
    """Plain names that a statement writes into: `x` in `x[mask] = y` and in `x.part[0] += y`."""
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    else:
        return set()
    places = [n for t in targets for n in ast.walk(t) if isinstance(n, (ast.Subscript, ast.Attribute))]
    stored: set[str] = set()
    for place in places:
        base: ast.expr = place
        while isinstance(base, (ast.Subscript, ast.Attribute)):
            base = base.value
        if isinstance(place.ctx, ast.Store) and isinstance(base, ast.Name):
            stored.add(base.id)
    return stored


def lines_where(filename: str, test: Callable[[ast.AST], bool], *, inside: ast.AST | None = None) -> list[SourceLine]:
    """Lines of the nodes that pass a test, in order."""
    tree = inside if inside is not None else tree_of(filename)
    found = [node for node in ast.walk(tree) if test(node)] if tree is not None else []
    lines = sorted({node.lineno for node in found})  # type: ignore[attr-defined]
    return [SourceLine(filename, line, line_text(filename, line)) for line in lines]


def is_call_of(node: ast.AST, *names: str) -> bool:
    """Whether a node calls a function or method of that last name: `no_grad` in `torch.no_grad()`."""
    return isinstance(node, ast.Call) and called_name(node) in names


def called_name(node: ast.Call) -> str:
    """Last part of what is called."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def assignments_of(filename: str, name: str, *, line: int | None = None) -> list[ast.stmt]:
    """Statements that bind a plain name in the scope around `line` (default: the module), in order."""
    anchor = statement_at(filename, line) if line is not None else tree_of(filename)
    if anchor is None:
        return []
    scope = scope_of(anchor)
    found = [
        n for n in ast.walk(scope) if isinstance(n, ast.stmt) and scope_of(n) is scope and name in assigned_names(n)
    ]
    return sorted(found, key=lambda n: n.lineno)


def functions_named(filename: str, name: str) -> list[ast.FunctionDef]:
    """The functions and methods of that name in a file."""
    tree = tree_of(filename)
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name] if tree is not None else []


def slice_before(filename: str, line: int, most: int = 12) -> list[ast.stmt]:
    """The statement at a line and those before it in its scope that bind what it uses, directly or through others."""
    start = statement_at(filename, line)
    if start is None:
        return []
    found, wanted = [start], [start]
    while wanted and len(found) < most:
        statement = wanted.pop(0)
        for name in sorted(
            {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        ):
            before = [s for s in assignments_of(filename, name, line=line) if s.lineno < statement.lineno]
            simple = [s for s in before if isinstance(s, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
            if simple and simple[-1] not in found:
                found.append(simple[-1])
                wanted.append(simple[-1])
    return found


def attribute_stores(filename: str, attribute: str) -> list[ast.stmt]:
    """Statements of a file that assign to an attribute of that name (`self.hidden = …`), in order."""
    tree = tree_of(filename)
    found = [
        node.parent  # type: ignore[attr-defined]
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Store)
    ]
    statements = []
    for node in found:
        while not isinstance(node, ast.stmt):
            node = node.parent
        statements.append(node)
    return sorted(statements, key=lambda n: n.lineno)


def carried_names(filename: str, line: int) -> Iterator[tuple[str, ast.stmt]]:
    """Names that the loop around `line` reads before it binds them, with the statement that binds them."""
    here: Any = statement_at(filename, line)
    while here is not None and not isinstance(here, _Loop):
        if isinstance(here, _Function):
            return
        here = getattr(here, "parent", None)
    if here is None:
        return
    targets = assigned_names(here)
    events: list[tuple[int, int, int, str, str, ast.stmt]] = []
    for node in ast.walk(here):
        if isinstance(node, ast.Name) and scope_of(node) is scope_of(here) and node.id not in targets:
            statement = _statement_of(node)
            # Within a statement its value is read before its targets are bound.
            order = 1 if isinstance(node.ctx, ast.Store) else 0
            kind = "store" if order else "load"
            events.append((statement.lineno, statement.col_offset, order, node.id, kind, statement))
    first_load: dict[str, int] = {}
    for at, (*_, name, kind, statement) in enumerate(sorted(events, key=lambda e: e[:3])):
        if kind == "load":
            first_load.setdefault(name, at)
        elif name in first_load:
            yield name, statement
            first_load.pop(name)
        else:
            first_load[name] = sys.maxsize  # bound before it is read: made anew each turn
    return


def _statement_of(node: Any) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = node.parent
    return node


def no_grad_block(places: Iterable[tuple[str, int]]) -> SourceLine | None:
    """The innermost `with torch.no_grad()` block or decorator around one of these lines."""
    for filename, line in places:
        node: ast.AST | None = statement_at(filename, line)
        while node is not None:
            holders: list[ast.expr] = []
            if isinstance(node, (ast.With, ast.AsyncWith)):
                holders = [item.context_expr for item in node.items]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                holders = node.decorator_list
            for holder in holders:
                if any(isinstance(n, (ast.Name, ast.Attribute)) and _last(n) in _NO_GRAD for n in ast.walk(holder)):
                    return SourceLine(filename, holder.lineno, line_text(filename, holder.lineno))
            node = getattr(node, "parent", None)
    return None


_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr
