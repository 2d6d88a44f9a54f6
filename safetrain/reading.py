"""Reads the user's source for the statement that did it, where a running program leaves no trace of its line.

Only ever on suspicion: it parses the files of the user's loaded modules, once each.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator

from safetrain.findings import SourceLine
from safetrain.source import USER, grade, line_text

_MAX_FILES = 200


def user_files() -> list[str]:
    """Files of the loaded modules that are the user's own, the main script first."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    files = [main] if isinstance(main, str) and grade(main) == USER else []
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.endswith(".py") and name not in files and grade(name) == USER:
            files.append(name)
    return files[:_MAX_FILES]


@functools.lru_cache(maxsize=_MAX_FILES)
def _tree(filename: str) -> ast.Module | None:
    try:
        with open(filename, encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _nodes(files: list[str] | None) -> Iterator[tuple[str, ast.AST]]:
    for name in files if files is not None else user_files():
        tree = _tree(name)
        if tree is not None:
            for node in ast.walk(tree):
                yield name, node


def find_attribute_assignment(attribute: str, owner: str = "", *, files: list[str] | None = None) -> SourceLine | None:
    """The first `….owner.attribute = …` of the user's files; with an empty `owner`, any `….attribute = …`."""
    for name, node in _nodes(files):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and target.attr == attribute and _ends_with(target.value, owner):
                return SourceLine(name, node.lineno, line_text(name, node.lineno))
    return None


def find_method_call(method: str, *, files: list[str] | None = None) -> list[SourceLine]:
    """All `….method(…)` of the user's files."""
    return [
        SourceLine(name, node.lineno, line_text(name, node.lineno))
        for name, node in _nodes(files)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
    ]


def find_freeze_of_state_dict(*, files: list[str] | None = None) -> SourceLine | None:
    """A loop over `x.state_dict()` whose body sets `requires_grad`: those tensors are copies of no effect."""
    for name, node in _nodes(files):
        if isinstance(node, ast.For) and _reads_state_dict(node.iter):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and any(
                    isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in inner.targets
                ):
                    return SourceLine(name, inner.lineno, line_text(name, inner.lineno))
    return None


def _reads_state_dict(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "state_dict"
        for part in ast.walk(node)
    )


def _ends_with(node: ast.expr, owner: str) -> bool:
    if not owner:
        return True
    if isinstance(node, ast.Attribute):
        return node.attr == owner
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value) == owner
    return isinstance(node, ast.Name) and node.id == owner
