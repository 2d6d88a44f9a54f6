"""Finds the user's statement that did it, where a running program leaves no trace of its line. For reports only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator

from torch import nn

from safetrain.findings import SourceLine
from safetrain.source import USER, grade, line_text
from safetrain.source.syntax import (
    attribute_stores,
    called_name,
    mentions,
    no_grad_block,
    scope_of,
    siblings_after,
    statement_at,
    tree_of,
)

_MAX_FILES = 200


def user_files(near: nn.Module | None = None) -> list[str]:
    """Files of the user's own loaded modules, the main script first; with `near`, that and the model's file only."""
    names = ["__main__", *((kind.__module__ for kind in type(near).__mro__) if near is not None else sys.modules)]
    files: dict[str, None] = {}
    for name in names:
        filename = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(filename, str) and filename.endswith(".py") and grade(filename) == USER:
            files[filename] = None
    return list(files)[:_MAX_FILES]


def find_attribute_assignment(
    attribute: str, owner: str = "", *, files: Iterable[str] | None = None
) -> SourceLine | None:
    """The first `….owner.attribute = …` of the user's files; with an empty `owner`, any `….attribute = …`."""
    for filename in files if files is not None else user_files():
        for statement in attribute_stores(filename, attribute):
            targets = (n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and n.attr == attribute)
            if any(_ends_with(target.value, owner) for target in targets):
                return SourceLine(filename, statement.lineno, line_text(filename, statement.lineno))
    return None


def find_method_calls(
    method: str, *, argument: bool | None = None, files: Iterable[str] | None = None
) -> list[SourceLine]:
    """All `….method(…)` of the user's files; with `argument`, those whose one argument is that constant."""
    return [
        SourceLine(filename, node.lineno, line_text(filename, node.lineno))
        for filename in (files if files is not None else user_files())
        for node in _walk(filename)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method
        if argument is None or _is_constant([*node.args, *(keyword.value for keyword in node.keywords)], argument)
    ]


def _is_constant(arguments: list[ast.expr], value: bool) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and arguments[0].value is value


def find_forgotten_eval(owner: str, *, files: Iterable[str] | None = None) -> SourceLine | None:
    """The line of the user's files that puts `….owner` into eval mode for an evaluation and never puts it back.

    Where no call names the owner, it may go by a local name: `net.eval()`. None where a call that may be meant could
    have done it too, or several lines could.
    """
    calls = [
        (filename, node)
        for filename in (files if files is not None else user_files())
        if mentions(filename, "eval()") or mentions(filename, "train(False)")
        for node in _walk(filename)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _switches_to_eval(node, node.func)
    ]
    named = [(filename, node) for filename, node in calls if _ends_with(_receiver(node), owner)]
    unnamed = [(filename, node) for filename, node in calls if not isinstance(_receiver(node), ast.Attribute)]
    chosen = [(filename, node) for filename, node in named or unnamed if not _switched_back(node)]
    if len(chosen) != 1 or not is_for_evaluation(chosen[0][0], chosen[0][1].lineno):
        return None
    filename, node = chosen[0]
    return SourceLine(filename, node.lineno, line_text(filename, node.lineno))


def is_for_evaluation(filename: str, line: int) -> bool:
    """Whether the `x.eval()` at a line stands under `no_grad`, or what `x` is used for next in its block does."""
    statement = statement_at(filename, line)
    if statement is None:
        return False
    if no_grad_block([(filename, line)]) is not None:
        return True
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    receivers = {ast.dump(_receiver(node)) for node in calls if called_name(node) in ("eval", "train")}
    for following in siblings_after(statement):
        nodes = list(ast.walk(following))
        if any(isinstance(node, ast.Call) and called_name(node) == "backward" for node in nodes):
            return False
        uses = [node for node in nodes if ast.dump(node) in receivers]
        if uses and all(no_grad_block([(filename, node.lineno)]) is not None for node in uses):  # type: ignore[attr-defined]
            return True
        if uses or any(_hands_over(node, receivers) for node in nodes):
            return False
    return False


def _hands_over(node: ast.AST, receivers: set[str]) -> bool:
    """A call whose function or argument holds a receiver: `train(model)` or `self.fit()`, for `model.encoder`."""
    if not isinstance(node, ast.Call):
        return False
    given = [_receiver(node), *node.args, *(keyword.value for keyword in node.keywords)]
    return any(ast.dump(value) in receiver for value in given for receiver in receivers)


def _switches_to_eval(node: ast.Call, function: ast.Attribute) -> bool:
    values = [*node.args, *(keyword.value for keyword in node.keywords)]
    return (function.attr == "eval" and not values) or (function.attr == "train" and _is_constant(values, False))


def _switched_back(node: ast.Call) -> bool:
    """The same function calls `train()` on the same thing."""
    owner = ast.dump(_receiver(node))
    return any(
        isinstance(other, ast.Call)
        and called_name(other) == "train"
        and not _is_constant([*other.args], False)
        and ast.dump(_receiver(other)) == owner
        for other in ast.walk(scope_of(node))
    )


def _receiver(node: ast.Call) -> ast.expr:
    return node.func.value if isinstance(node.func, ast.Attribute) else node.func


def find_freeze_of_state_dict(*, files: Iterable[str] | None = None) -> SourceLine | None:
    """A loop over `x.state_dict()` whose body sets `requires_grad`: those tensors are copies of no effect.

    Not one under a condition, or in a function that no file calls by name under none.
    """
    searched = list(files if files is not None else user_files())
    for filename in searched:
        if not mentions(filename, "state_dict", "requires_grad"):
            continue
        for node in _walk(filename):
            if not isinstance(node, ast.For) or not _reads_state_dict(node.iter) or not _surely_runs(node, searched):
                continue
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and inner.attr == "requires_grad"
                    and isinstance(inner.ctx, ast.Store)
                ):
                    return SourceLine(filename, inner.lineno, line_text(filename, inner.lineno))
    return None


def _surely_runs(node: ast.AST, files: list[str], known: frozenset[str] = frozenset()) -> bool:
    """Whether a node runs whenever its script does: it is under no condition, nor is what calls the function around it.

    A method runs, for frameworks call those.
    """
    if _is_conditional(node):
        return False
    scope = scope_of(node)
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return True
    if isinstance(getattr(scope, "parent", None), ast.ClassDef):
        return True
    name = scope.name
    return name not in known and any(
        _surely_runs(other, files, known | {name})
        for filename in files
        if mentions(filename, name)
        for other in _walk(filename)
        if (isinstance(other, ast.Name) and other.id == name)
        or (isinstance(other, ast.Attribute) and other.attr == name)
    )


def _is_conditional(node: ast.AST) -> bool:
    """Under an `if`, a `match` or an `except` of its function. `if __name__ == "__main__"` is none."""
    scope, inner = scope_of(node), node
    while (parent := getattr(inner, "parent", None)) is not None and parent is not scope:
        if isinstance(parent, (ast.If, ast.IfExp)) and inner is not parent.test:
            if not any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(parent.test)):
                return True
        elif isinstance(parent, (ast.ExceptHandler, ast.match_case)):
            return True
        inner = parent
    return False


def named_only(method: str, *, near: SourceLine | None) -> SourceLine | None:
    """A statement that names a method and does not call it (`optimizer.step`), in the function around a line."""
    if near is None or (statement := statement_at(near.file, near.line)) is None:
        return None
    for node in ast.walk(scope_of(statement)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute) and node.value.attr == method:
            return SourceLine(near.file, node.lineno, line_text(near.file, node.lineno))
    return None


def gradients_are_read(*, files: Iterable[str] | None = None) -> bool:
    """Whether the user's files read `.grad` of anything: to step by hand, to look at it, to prune by it."""
    for filename in files if files is not None else user_files():
        for node in _walk(filename) if mentions(filename, ".grad") else ():
            if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
                parent = getattr(node, "parent", None)
                if not (isinstance(parent, ast.Call) and parent.func is node):
                    return True
    return False


def reads_key(source: SourceLine, keys: Iterable[str]) -> bool:
    """Whether the function around a line reads one of these keys: `state["epoch"]`, `state.get("epoch")`, `.pop(…)`."""
    statement = statement_at(source.file, source.line)
    wanted = set(keys)
    for node in ast.walk(scope_of(statement)) if statement is not None else ():
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice
        elif isinstance(node, ast.Call) and called_name(node) in ("get", "pop") and node.args:
            key = node.args[0]
        if isinstance(key, ast.Constant) and str(key.value).lower() in wanted:
            return True
    return False


def _walk(filename: str) -> Iterator[ast.AST]:
    tree = tree_of(filename)
    return ast.walk(tree) if tree is not None else iter(())


def _reads_state_dict(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Call) and called_name(part) == "state_dict" for part in ast.walk(node))


def _ends_with(node: ast.expr, owner: str) -> bool:
    if not owner:
        return True
    if isinstance(node, ast.Attribute):
        return node.attr == owner
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value) == owner
    return isinstance(node, ast.Name) and node.id == owner
