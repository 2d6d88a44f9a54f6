"""Which line of the user's source calls an operation, where no record of the step tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

from torch import nn

from safetrain.findings import SourceLine
from safetrain.rules.autopsy.carried import class_node, file_of_class
from safetrain.source import line_text, syntax
from safetrain.source.called import called_functions

_OPERATORS: dict[str, type[ast.operator]] = {
    "div": ast.Div,
    "mul": ast.Mult,
    "add": ast.Add,
    "sub": ast.Sub,
    "pow": ast.Pow,
    "mm": ast.MatMult,
    "bmm": ast.MatMult,
    "addmm": ast.MatMult,
}
_ALSO_CALLED: dict[str, frozenset[str]] = {
    "nll_loss": frozenset({"nll_loss", "cross_entropy"}),
    "log_softmax": frozenset({"log_softmax", "cross_entropy"}),
    "linalg_vector_norm": frozenset({"norm", "vector_norm"}),
    "binary_cross_entropy_with_logits": frozenset({"binary_cross_entropy_with_logits"}),
    "div": frozenset({"div", "true_divide"}),
}


def find_call(
    model: nn.Module, frame: FrameType | None, name: str, neighbours: set[str]
) -> tuple[SourceLine | None, str | None]:
    """(line, class) of the statement that calls the operation `name`: in the model's classes, in `frame` or below it.

    Among several, the one that calls most of its `neighbours` in the graph; None when that does not decide.
    """
    scored: dict[tuple[str, int], tuple[int, str | None]] = {}
    for filename, scope, owner in _scopes(model, frame):
        for statement in ast.walk(scope):
            if not isinstance(statement, ast.stmt) or isinstance(statement, _COMPOUND) or not _calls(statement, name):
                continue
            score = sum(_calls(statement, other) for other in neighbours - {name})
            known = scored.get((filename, statement.lineno))
            scored[filename, statement.lineno] = (score, owner if known is None else known[1] or owner)
    ranked = sorted(scored.items(), key=lambda item: -item[1][0])
    if not ranked or (len(ranked) > 1 and ranked[0][1][0] == ranked[1][1][0]):
        return None, None
    (filename, line), (_, owner) = ranked[0]
    return SourceLine(filename, line, line_text(filename, line)), owner


_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


def _scopes(model: nn.Module, frame: FrameType | None) -> Iterator[tuple[str, ast.AST, str | None]]:
    """(file, tree, class name) of what may have called it: the model's classes, the loop, the functions it calls."""
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        filename, node = file_of_class(kind), class_node(kind)
        if filename is not None and node is not None:
            yield filename, node, kind.__name__
    if frame is None:
        return
    for code in (frame.f_code, *(called.function.__code__ for called in called_functions([frame]))):
        scope = syntax.scope_of_code(code)
        if scope is not None:
            yield code.co_filename, scope, None


def _calls(statement: ast.stmt, name: str) -> bool:
    names = _ALSO_CALLED.get(name, frozenset({name}))
    operator = _OPERATORS.get(name)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and syntax.called_name(node).rstrip("_") in names:
            return True
        if operator is not None and isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, operator):
            return True
    return False
