"""G121: which tensor carried an earlier graph into this backward, who holds it, and which line stored it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from safetrain.findings import Finding, SourceLine
from safetrain.recording.saved import is_freed, nodes_of
from safetrain.rules.autopsy.catalogue import BACKWARD_TWICE
from safetrain.rules.autopsy.failure import Failure, Named, named_tensors
from safetrain.source import USER, grade, line_text, syntax
from safetrain.source.called import Called

_LEAF = 1 << 63
"""Accumulation nodes are numbered near 2**64: they belong to no step."""


@dataclass(slots=True)
class Carrier:
    """What brought the earlier graph here."""

    label: str
    name: str
    source: SourceLine | None
    reassigned: bool
    """The tensor itself is gone: the name holds this step's value already, as it will at the next."""


def explain_backward_twice(failure: Failure) -> Finding:
    """The finding for “Trying to backward through the graph a second time”."""
    loss = failure.loss
    nodes = nodes_of(loss.grad_fn) if loss is not None else []
    old = older_nodes(failure, nodes)
    again = _other_backward(failure)
    whole = bool(nodes) and (not old or loss.grad_fn in old) and _all_freed(nodes)  # type: ignore[union-attr]
    if whole and not old and again is not None:
        return _same_loss(failure, again)
    carrier = find_carrier(failure, nodes, old)
    if carrier is None and whole:
        return _same_loss(failure, again)
    if carrier is None:
        return BACKWARD_TWICE.finding(
            "backward ran into a graph that an earlier backward has already freed",
            source=failure.source,
            cause="part of this loss was computed before an earlier backward; no name still reaches the tensor that "
            "links them",
            fix="compute every part of the loss anew after each backward, or detach what is carried over",
        )
    how = (
        f"{carrier.label} is carried from one step to the next with its graph"
        if carrier.reassigned
        else f"{carrier.label} was computed before an earlier backward, and this loss is built on it"
    )
    return BACKWARD_TWICE.finding(
        f"{how}; that backward has freed the graph it hangs on",
        source=carrier.source or failure.source,
        holder=carrier.label,
        cause=f"`{carrier.name}` links this loss to a graph that was already differentiated",
        fix=(
            f"detach it where it is stored: `{carrier.name} = {carrier.name}.detach()`"
            if carrier.reassigned
            else f"recompute `{carrier.name}` after each backward (inside the loop or closure), "
            "or `.detach()` it if it is meant to stay fixed"
        )
        + "; retain_graph=True would only hide this and keep every step's graph",
    )


def older_nodes(failure: Failure, nodes: Iterable[Any]) -> set[Any]:
    """Nodes of the failed graph that were made before the previous backward began, or that a recorded one ran."""
    first = min(failure.first_node or 0, _LEAF)
    run = failure.record.nodes_run() if failure.record is not None else {}
    last = max(run.values(), default=-1)  # the failed backward itself
    earlier = {number for number, task in run.items() if task < last}
    return {n for n in nodes if n._sequence_nr() < first or n._sequence_nr() in earlier}


def _all_freed(nodes: Iterable[Any]) -> bool:
    verdicts = [is_freed(n) for n in nodes]
    return any(verdicts) and not any(v is False for v in verdicts)


def _same_loss(failure: Failure, earlier: SourceLine | None) -> Finding:
    source = failure.source
    also = f"; `{earlier.text}` (line {earlier.line}) had done it" if earlier is not None else ""
    return BACKWARD_TWICE.finding(
        f"this loss was differentiated already{also}, and that freed its graph",
        source=source,
        cause="the same graph is differentiated twice",
        fix="add the losses and call backward once; if both calls are needed, pass retain_graph=True to the first only",
    )


def _other_backward(failure: Failure) -> SourceLine | None:
    """Another `.backward()` of the same name above the failed line, in the same function."""
    source = failure.source
    statement = syntax.statement_at(source.file, source.line) if source is not None else None
    if source is None or statement is None:
        return None
    called = {_caller(n) for n in ast.walk(statement) if syntax.is_call_of(n, "backward")}
    calls = syntax.lines_where(
        source.file,
        lambda n: syntax.is_call_of(n, "backward") and _caller(n) in called,
        inside=syntax.scope_of(statement),
    )
    return next((call for call in calls if call.line < source.line), None)


def _caller(call: Any) -> str:
    return ast.unparse(call.func)


def find_carrier(failure: Failure, nodes: list[Any], old: set[Any]) -> Carrier | None:
    """The name that links this loss to an earlier graph: one that holds the old tensor, else one carried over."""
    named = list(named_tensors(failure))
    links = {child for n in nodes if n not in old for child, _ in n.next_functions if child in old}
    found = _holding(named, links) or _holding(named, old)
    if found is None and not old:
        found = _shared(failure, named, nodes) or _free_variable(failure, named, set(nodes))
    if found is not None:
        return Carrier(found.label, found.name, _made_at(failure, found), reassigned=False)
    return _carried_over(failure, named, set(nodes))


def _holding(named: list[Named], nodes: set[Any]) -> Named | None:
    """The newest named tensor that one of the nodes made."""
    holding = [n for n in named if n.tensor.grad_fn is not None and n.tensor.grad_fn in nodes]
    return max(holding, key=lambda n: n.tensor.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]


def _shared(failure: Failure, named: list[Named], nodes: list[Any]) -> Named | None:
    """Without a boundary: the newest named value that this loss shares with another loss in sight."""
    mine = set(nodes)
    loss = failure.loss
    for other in named:
        if (
            other.tensor.grad_fn is None
            or other.tensor is loss
            or other.tensor.numel() != 1
            or other.tensor.grad_fn in mine
        ):
            continue
        shared = mine.intersection(nodes_of(other.tensor.grad_fn))
        held = _holding([n for n in named if n.tensor is not loss], {n for n in shared if n._sequence_nr() < _LEAF})
        if held is not None:
            return held
    return None


def _free_variable(failure: Failure, named: list[Named], nodes: set[Any]) -> Named | None:
    """Without a boundary: a value of this graph that the failed function did not make (a closure's, a global)."""
    outside = [
        n
        for n in named
        if n.frame is not None
        and n.tensor is not failure.loss
        and n.tensor.grad_fn in nodes
        and n.frame.f_code.co_name != "<module>"
        and (n.name in n.frame.f_code.co_freevars or n.label.startswith("global "))
    ]
    return outside[0] if outside else None


def _carried_over(failure: Failure, named: list[Named], nodes: set[Any]) -> Carrier | None:
    """The old tensor has no name any more: a name that outlives the step and holds a value of this step's graph."""
    inner = {n for n in nodes if n._sequence_nr() < _LEAF}
    for item in named:
        if (
            item.tensor.grad_fn is None
            or (item.tensor is failure.loss and item.function is None)  # one that a function stores is a running total
            or inner.isdisjoint(nodes_of(item.tensor.grad_fn))
        ):
            continue
        if item.owner is not None:
            source = attribute_store(item.owner, item.name)
        elif item.function is not None:
            source = _store_in(item.function, item.name)
            if source is None:
                continue  # that function only reads it
        elif item.frame is not None and item.name in (*item.frame.f_code.co_freevars, *_globals_in_function(item)):
            source = _container_store(item.frame.f_code.co_filename, item.name)
        else:
            continue
        return Carrier(item.label, item.name, source, reassigned=True)
    by_name = {n.name: n for n in reversed(named) if n.tensor.grad_fn is not None}
    for frame, line in failure.user_frames:
        filename = frame.f_code.co_filename
        for name, statement in syntax.carried_names(filename, line):
            if name in by_name and by_name[name].frame is frame:
                source = SourceLine(filename, statement.lineno, line_text(filename, statement.lineno))
                return Carrier(by_name[name].label, name, source, reassigned=True)
    return None


def _globals_in_function(item: Named) -> tuple[str, ...]:
    return (item.name,) if item.label.startswith("global ") else ()


def _made_at(failure: Failure, item: Named) -> SourceLine | None:
    """Where a tensor was made: from the record, else where its name is bound."""
    if failure.record is not None and item.tensor.grad_fn is not None:
        maker = failure.record.maker(item.tensor.grad_fn)
        if maker is not None and maker.where is not None:
            return maker.source
    if item.owner is not None:
        return attribute_store(item.owner, item.name, made_once=True)
    if item.function is not None:
        stored = _store_in(item.function, item.name) if item.in_container else None
        return stored or binding_of(item.function.filename, item.name, item.function.function.__code__.co_firstlineno)
    if item.frame is None:
        return None
    if item.in_container and item.label.startswith("global "):
        stored = _container_store(item.frame.f_code.co_filename, item.name)
        if stored is not None:
            return stored
    return binding_of(item.frame.f_code.co_filename, item.name, item.line)


def binding_of(filename: str, name: str, line: int) -> SourceLine | None:
    """The statement that gave a name its value, seen from `line`: in its scope, or the nearest one outside."""
    anchor: Any = syntax.statement_at(filename, line)
    while anchor is not None:
        found = syntax.assignments_of(filename, name, line=anchor.lineno)
        if found:
            before = [s for s in found if s.lineno <= line]
            chosen = (before or found)[-1]
            return SourceLine(filename, chosen.lineno, line_text(filename, chosen.lineno))
        scope = syntax.scope_of(anchor)
        anchor = getattr(scope, "parent", None) and scope
        if isinstance(scope, ast.Module):
            return None
    return None


def attribute_store(owner: Any, attribute: str, *, made_once: bool = False) -> SourceLine | None:
    """The assignment of an object's attribute that keeps a graph: not one that detaches or resets it.

    The constructor's counts only for a value that was `made_once`.
    """
    for kind in type(owner).__mro__:
        filename = file_of_class(kind)
        if filename is None:
            continue
        stores = [s for s in syntax.attribute_stores(filename, attribute) if _in_class(s, kind)]
        later = [s for s in stores if not _in_constructor(s)]
        keeping = [s for s in later if not _is_reset(s)] or later
        if made_once and not keeping:
            keeping = [s for s in stores if not _is_reset(s)]
        if keeping:
            line = keeping[-1].lineno
            return SourceLine(filename, line, line_text(filename, line))
    return None


def file_of_class(kind: type) -> str | None:
    """The source file of a class, from its own methods: `inspect` asks the module, which a script may lack."""
    for member in vars(kind).values():
        code = getattr(member, "__code__", None)
        if code is not None and grade(code.co_filename) == USER:
            return str(code.co_filename)
    return None


def class_node(kind: type) -> ast.ClassDef | None:
    """The definition of a class: of several by one name, that which holds its methods."""
    filename = file_of_class(kind)
    tree = syntax.tree_of(filename) if filename is not None else None
    codes = [code for m in vars(kind).values() if (code := getattr(m, "__code__", None)) is not None]
    lines = [code.co_firstlineno for code in codes if code.co_filename == filename]
    for node in ast.walk(tree) if tree is not None else ():
        if (
            isinstance(node, ast.ClassDef)
            and node.name == kind.__name__
            and any(node.lineno <= line <= (node.end_lineno or 0) for line in lines)
        ):
            return node
    return None


def _in_class(node: Any, kind: type) -> bool:
    definition = class_node(kind)
    while node is not None:
        if isinstance(node, ast.ClassDef):
            return node is definition
        node = getattr(node, "parent", None)
    return False


def _is_reset(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Constant):
        return True
    return value is not None and any(
        syntax.is_call_of(n, "detach", "zeros", "zeros_like", "new_zeros") for n in ast.walk(value)
    )


def _in_constructor(statement: ast.stmt) -> bool:
    scope = syntax.scope_of(statement)
    return isinstance(scope, ast.FunctionDef) and scope.name == "__init__"


def _container_store(filename: str, name: str, *, within: tuple[int, int] | None = None) -> SourceLine | None:
    """The first line that stores into a container by that name; `within` (first, last line): or rebinds the name."""

    def names(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == name

    def stores(node: ast.AST) -> bool:
        if within is not None and not within[0] <= getattr(node, "lineno", 0) <= within[1]:
            return False
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            return names(node.value)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return within is not None and names(node)
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"append", "extend", "update"}
            and names(node.func.value)
        )

    found = syntax.lines_where(filename, stores)
    return found[0] if found else None


def _store_in(called: Called, name: str) -> SourceLine | None:
    """The line of a function that stores under a name which outlives it."""
    code = called.function.__code__
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return _container_store(code.co_filename, name, within=(code.co_firstlineno, last))
