"""Family G, hand-written `autograd.Function`s: what they save and never read, and what they keep past backward."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from safetrain.findings import Finding, SourceLine, rule
from safetrain.graph import format_bytes, grad_fn_of, saved_tensors, walk
from safetrain.graph.storing import flat_targets
from safetrain.graph.walk import SavedFreed, is_leaf_node
from safetrain.rules.graph import CYCLE
from safetrain.source import USER, grade, line_text

UNUSED = rule(
    "G111",
    "function-saves-unused",
    "note",
    "a hand-written autograd.Function saves tensors that its backward never reads",
)
HOLDS = rule(
    "G112",
    "function-holds-tensor",
    "warning",
    "a hand-written autograd.Function keeps tensors on ctx or self; they outlive backward",
)


def find_function_faults(loss: Tensor, *, known: set[type] | None = None, limit: int = 5_000) -> list[Finding]:
    """Faults of the hand-written Functions in the graph of `loss`, one class once. Call it before backward.

    G106: `ctx` keeps the Function's own output, a cycle. G112: it keeps an input or another tensor outside
    `save_for_backward` (a note for intermediates, which torch allows). G111: it saves what backward never reads.
    Classes in `known` are passed over, and those looked at are added to it. About 1 µs a node, no host sync.
    """
    known = known if known is not None else set()
    findings: list[Finding] = []
    for node in walk([grad_fn_of(loss)], limit).nodes:
        if not isinstance(node, BackwardCFunction):
            continue
        function = getattr(node, "_forward_cls", None)
        if function is None or function in known:
            continue
        known.add(function)
        if _is_users(function):
            findings += _judge(node, function)
    return findings


def _is_users(function: type) -> bool:
    try:
        filename = inspect.getsourcefile(function)
    except TypeError:
        return function.__module__ == "__main__"
    return filename is not None and grade(filename) == USER


def _judge(node: Any, function: type) -> Iterable[Finding]:
    inputs = {id(_variable(n)) for n, _ in node.next_functions if n is not None and is_leaf_node(n)}
    producers = {id(n) for n, _ in node.next_functions if n is not None}
    for name, value in vars(node).items():
        for tensor in _tensors(value):
            maker = grad_fn_of(tensor)
            if maker is node:
                yield _cycle(function, name, tensor)
            else:
                is_input = id(tensor) in inputs or (maker is not None and id(maker) in producers)
                yield _kept(function, f"ctx.{name}", name, tensor, is_input)
    for name, value in vars(function).items():
        for tensor in _tensors(value):
            yield _kept(function, f"{function.__name__}.{name}", name, tensor, True)
    yield from _unused(node, function)


def _variable(node: Any) -> Any:
    return node.variable


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """Tensors in a value, up to three containers deep."""
    if issubclass(type(value), Tensor):
        return [value]
    inside = value if type(value) in (list, tuple) else value.values() if type(value) is dict else ()
    return [t for item in inside for t in _tensors(item, depth - 1)] if depth else []


def _cycle(function: type, name: str, tensor: Tensor) -> Finding:
    return CYCLE.finding(
        f"`{function.__name__}` keeps its own output on `ctx.{name}`: the graph refers to itself and dies only when "
        f"the cycle collector runs ({_bytes(tensor)} a call until then)",
        source=_store_on_ctx(function, name),
        holder=f"ctx.{name} of {function.__name__}",
        op=function.__name__,
        pinned_bytes=_count(tensor),
        cause="ctx is the graph node of that output, and the output holds its node",
        fix=f"ctx.save_for_backward({name}) in forward, and `{name}, = ctx.saved_tensors` in backward",
    )


def _kept(function: type, where: str, name: str, tensor: Tensor, reportable: bool) -> Finding:
    return HOLDS.finding(
        f"`{function.__name__}` keeps a tensor on `{where}`, outside save_for_backward: it outlives backward "
        f"({_bytes(tensor)} a call), and autograd cannot check it for in-place changes",
        severity="warning" if reportable else "note",
        source=_store_on_ctx(function, name),
        holder=where if where.startswith(function.__name__) else f"{where} of {function.__name__}",
        op=function.__name__,
        pinned_bytes=_count(tensor),
        fix=f"ctx.save_for_backward({name}) in forward, and `{name}, = ctx.saved_tensors` in backward",
    )


def _count(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> str:
    return format_bytes(_count(tensor))


def _store_on_ctx(function: type, name: str) -> SourceLine | None:
    """The line of the class that assigns `….name`."""

    def stores(node: ast.AST) -> bool:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, (ast.AnnAssign, ast.AugAssign))
            else []
        )
        return any(isinstance(t, ast.Attribute) and t.attr == name for t in flat_targets(targets))

    return _line_in(function, stores)


def _line_in(function: type, test: Any) -> SourceLine | None:
    tree, filename, first = _source_of(function)
    found = [node.lineno for node in ast.walk(tree) if test(node)] if tree is not None else []  # type: ignore[attr-defined]
    if not found:
        return None
    line = first + min(found) - 1
    return SourceLine(filename, line, line_text(filename, line))


def _source_of(obj: Any) -> tuple[ast.Module | None, str, int]:
    try:
        lines, first = inspect.getsourcelines(obj)
        return ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(obj) or "", first
    except (OSError, TypeError, SyntaxError):
        return None, "", 0


def _unused(node: Any, function: type) -> Iterable[Finding]:
    """Saved tensors that backward's source never reads. Silent when it reads them in a way not understood."""
    try:
        saved = list(saved_tensors(node))
    except SavedFreed:
        return
    backward = getattr(function, "backward", None)
    tree, _, _ = _source_of(backward) if backward is not None else (None, "", 0)
    if not saved or tree is None:
        return
    unread = unread_saved(tree, len(saved))
    if not unread:
        return
    wasted = sum(_count(saved[i]) for i in unread)
    which = "any of them" if len(unread) == len(saved) else "number " + ", ".join(str(i + 1) for i in unread)
    yield UNUSED.finding(
        f"`{function.__name__}` saves {len(saved)} tensors for backward, which never reads {which}: "
        f"{format_bytes(wasted)} a call for nothing",
        source=_line_in(
            function, lambda n: isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "save_for_backward"
        ),
        holder=f"save_for_backward of {function.__name__}",
        op=function.__name__,
        pinned_bytes=wasted,
        fix="save only what backward reads",
    )


def unread_saved(backward: ast.AST, count: int) -> list[int]:
    """Positions of `count` saved tensors that the source of a `backward` never reads."""
    for node in ast.walk(backward):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    reads = [
        n for n in ast.walk(backward) if isinstance(n, ast.Attribute) and n.attr in ("saved_tensors", "saved_variables")
    ]
    if not reads:
        passes_ctx_on = any(
            isinstance(n, ast.Call) and any(isinstance(a, ast.Name) and a.id in ("ctx", "self") for a in n.args)
            for n in ast.walk(backward)
        )
        return [] if passes_ctx_on else list(range(count))
    names = [n for n in ast.walk(backward) if isinstance(n, ast.Name)]
    used = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    of_saved: list[ast.AST] = list(reads)  # expressions whose value is the tuple of saved tensors
    for node in ast.walk(backward):
        if isinstance(node, ast.Assign) and node.value in reads and len(reads) == 1 and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == count:
                return [i for i, e in enumerate(target.elts) if isinstance(e, ast.Name) and e.id not in used]
            if isinstance(target, ast.Name):  # saved = ctx.saved_tensors
                of_saved = [n for n in names if n.id == target.id and n is not target]
    read = _constant_indices(backward, of_saved)
    return [] if read is None else [i for i in range(count) if i not in {at % count for at in read}]


def _constant_indices(tree: ast.AST, of: list[ast.AST]) -> set[int] | None:
    """The indices at which these expressions are read; None when they are used in any other way."""
    at: set[int] = set()
    indexed = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and node.value in of:
            try:
                index = ast.literal_eval(node.slice)
            except ValueError:
                return None
            if type(index) is not int:
                return None
            at.add(index)
            indexed += 1
    return at if of and indexed == len(of) else None


def _picked(read: ast.AST, count: int) -> int | None:
    """Which one is read by `ctx.saved_tensors[1]`; None for any other use."""
    parent = getattr(read, "parent", None)
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        index = parent.slice.value
        return index if isinstance(index, int) and 0 <= index < count else None
    return None
