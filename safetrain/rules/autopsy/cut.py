"""G123 and G124: where the loss lost its graph, or was never reduced to a number."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from safetrain.findings import Finding, SourceLine
from safetrain.recording.recorder import Op, Recorder
from safetrain.rules.autopsy.catalogue import NO_GRAPH, NON_SCALAR
from safetrain.rules.autopsy.failure import Failure
from safetrain.source import USER, grade, line_text, syntax

_NOT_DIFFERENTIABLE = frozenset(
    {
        "argmax", "argmin", "argsort", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite",
        "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
        "nonzero", "one_hot", "multinomial", "bincount", "searchsorted", "bucketize", "histc", "any", "all",
        "sort", "topk", "max", "min", "count_nonzero", "unique", "_unique2", "_local_scalar_dense", "equal",
        "allclose", "isclose", "bernoulli", "sgn_", "floor_divide",
    }
)  # fmt: skip
"""Operations whose (integer or boolean) result has no gradient; `max`, `sort` and such only in their indices."""


@dataclass(slots=True)
class Cut:
    """One place where a value with a graph was turned into one without."""

    kind: str
    """`op` (it has no gradient), `detach`, `item`, `no_grad`, or `grad` (autograd.grad without create_graph)."""
    op: Op

    @property
    def how(self) -> str:
        """As it is said to the user."""
        if self.kind == "op":
            return f"{self.op.short_name}, which has no gradient"
        if self.kind == "item":
            return ".item(), which leaves a plain number"
        return {
            "detach": "a detached copy (`.detach()`, `.data` or a NumPy round trip)",
            "no_grad": "code that runs without gradients (no_grad, inference_mode or grad mode off)",
            "grad": "torch.autograd.grad without create_graph=True",
        }[self.kind]


def cuts_of(record: Recorder, start: int) -> list[Cut]:
    """Where the value made by operation `start`, which has no graph, was cut from values that had one. Latest first."""
    found: list[Cut] = []
    seen, stack = {start}, [start]
    while stack:
        if stack[-1] < 0:
            stack.pop()
            continue
        op = record.ops[stack.pop()]
        if op.in_backward:
            found.append(Cut("grad", op))
            continue
        for source in op.inputs:
            if source.requires_grad:
                found.append(Cut(_kind(op), op))
                break
        for source in op.inputs:
            if not source.requires_grad and source.producer not in seen:
                seen.add(source.producer)
                stack.append(source.producer)
    return sorted(found, key=lambda c: -c.op.index)


def _kind(op: Op) -> str:
    name = op.short_name
    if name == "_local_scalar_dense":
        return "item"
    if name in _NOT_DIFFERENTIABLE:
        return "op"
    if name in ("detach", "alias"):
        return "detach"
    return "no_grad" if not op.grad_enabled else "op"


# ---------------------------------------------------------------------------- G123


def explain_no_graph(failure: Failure) -> Finding:
    """The finding for “element 0 of tensors does not require grad and does not have a grad_fn”."""
    if not any(p.requires_grad for p in failure.model.parameters()) and any(True for _ in failure.model.parameters()):
        files = dict.fromkeys(filename for filename, _ in failure.user_frames_lines())
        freezing = [line for filename in files for line in syntax.lines_where(filename, _freezes)]
        return NO_GRAPH.finding(
            "the loss carries no graph because no parameter of the model requires grad",
            source=freezing[-1] if freezing else failure.source,
            cause="every parameter has requires_grad=False",
            fix="unfreeze what should train: `model.head.requires_grad_(True)`, and give those parameters to the "
            "optimizer",
        )
    switched = _grad_mode_off(failure)
    if switched is not None:
        return switched
    if failure.record is not None and failure.loss is not None and not failure.loss.requires_grad:
        traced = _traced_cut(failure, failure.record, failure.loss)
        if traced is not None:
            return traced
    return _cut_from_source(failure)


def _freezes(node: ast.AST) -> bool:
    """`p.requires_grad = False` or `module.requires_grad_(False)`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is False:
        return any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
    if not syntax.is_call_of(node, "requires_grad_"):
        return False
    return any(isinstance(a, ast.Constant) and a.value is False for a in node.args)  # type: ignore[attr-defined]


def _grad_mode_off(failure: Failure) -> Finding | None:
    """Grad mode is off for the whole program: a switch that nothing turned back."""
    if torch.is_grad_enabled() and failure.gradients_off_at is None:
        return None
    place = failure.gradients_off_at
    enclosing = None if place is not None else syntax.no_grad_block(failure.user_frames_lines())
    place = place or enclosing
    candidates = [] if place is not None else list(grad_switches(f for f, _ in failure.user_frames_lines()))
    if place is None and candidates:
        place = candidates[0] if len(candidates) == 1 else _above_first_without(failure.record, candidates)
    if enclosing is not None:
        how = "backward runs inside a block without gradients"
    elif place is not None:
        how = f"`{place.text}` switched grad mode off and nothing switched it back on"
    else:
        how = "grad mode was switched off and nothing switched it back on"
    listed = "; ".join(f"{c.file}:{c.line} `{c.text}`" for c in candidates[:5])
    return NO_GRAPH.finding(
        f"the loss carries no graph: {how}",
        source=place or failure.source,
        op="set_grad_enabled" if place is None or "set_grad_enabled" in place.text else None,
        cause="grad mode is off" + (f"; switches in the program: {listed}" if listed else ""),
        fix="use it as a block, which restores the mode: `with torch.no_grad(): …`",
    )


def _above_first_without(record: Recorder | None, candidates: list[SourceLine]) -> SourceLine | None:
    """The switch above the first operation from which the record ran without gradients to its end, in its function."""
    first: Op | None = None
    for op in reversed(record.ops) if record is not None else ():
        if op.task != -1 or op.grad_enabled:
            break
        first = op
    if first is None or first.where is None:
        return None
    statement = syntax.statement_at(*first.where)
    scope = syntax.scope_of(statement) if statement is not None else None
    above = [
        c
        for c in candidates
        if c.file == first.where[0]
        and c.line <= first.where[1]
        and (there := syntax.statement_at(c.file, c.line)) is not None
        and syntax.scope_of(there) is scope
    ]
    return max(above, key=lambda c: c.line, default=None)


def grad_switches(also: Iterable[str] = ()) -> Iterator[SourceLine]:
    """Lines of the user's loaded code (and of the files `also`) that switch gradients off for good.

    That is `torch.set_grad_enabled(False)` as a statement of its own, not as a block or a decorator.
    """
    files = {getattr(m, "__file__", None) for m in list(sys.modules.values())} | set(also)
    for filename in sorted(f for f in files if f is not None and grade(f) == USER):
        yield from syntax.lines_where(filename, _switches_off)


def _switches_off(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    call = node.value
    if syntax.called_name(call) == "__enter__":
        return any(syntax.is_call_of(n, "no_grad", "inference_mode", "set_grad_enabled") for n in ast.walk(call.func))
    if syntax.called_name(call) != "set_grad_enabled" or not call.args:
        return False
    value = call.args[0]
    return not (isinstance(value, ast.Constant) and value.value is True)


def _traced_cut(failure: Failure, record: Recorder, loss: Tensor) -> Finding | None:
    index = record.producer(loss)
    cuts = cuts_of(record, index) if index >= 0 else []
    if not cuts:
        cuts = _left_as_numbers(record, index)
    if not cuts:
        return None
    cut = cuts[0]
    block = syntax.no_grad_block(cut.op.stack) if cut.kind == "no_grad" else None
    place = block or cut.op.source
    where = f" on line {place.line}: `{place.text}`" if place is not None else ""
    return NO_GRAPH.finding(
        f"the loss carries no graph: its path to the parameters was cut by {cut.how}{where}",
        source=place or failure.source,
        op=cut.op.short_name if cut.kind in ("op", "detach", "item") else None,
        cause=f"cut by {cut.how}{where}",
        fix=_fix(cut.kind),
    )


def _left_as_numbers(record: Recorder, before: int) -> list[Cut]:
    """The loss was built from Python or NumPy numbers: the last values with a history that left torch before it."""
    last = record.ops if before < 0 else record.ops[:before]
    return [
        Cut("item" if op.short_name == "_local_scalar_dense" else "detach", op)
        for op in reversed(last)
        if op.short_name in ("_local_scalar_dense", "detach")
        and not op.in_backward
        and any(i.requires_grad for i in op.inputs)
        and op.where is not None
        and re.search(r"item|numpy|tolist|float\(|int\(|tensor\(|detach|\.data\b", line_text(*op.where))
    ][:1]


def _fix(kind: str) -> str:
    return {
        "op": "use a differentiable form (softmax and an expectation in place of argmax or a comparison)",
        "detach": "drop the `.detach()`, `.data` or NumPy conversion on the way from the model to the loss",
        "item": "keep the tensor: use `.item()` only for printing and logging",
        "no_grad": "run the forward of what should train outside that block",
        "grad": "pass create_graph=True to torch.autograd.grad, so that its result can be differentiated",
    }[kind]


_CUTTING_CALLS = frozenset(
    {"detach", "item", "argmax", "argmin", "numpy", "tolist", "from_numpy", "as_tensor", "tensor", "round", "sign"}
)


def _cut_from_source(failure: Failure) -> Finding:
    """Without a record: what the source says about how the loss was made."""
    place = next(
        (found for frame, line in failure.user_frames if (found := _cut_in_slice(frame.f_code.co_filename, line))), None
    )
    if place is not None:
        return NO_GRAPH.finding(
            f"the loss carries no graph; its path was probably cut on line {place.line}: `{place.text}`",
            source=place,
            cause="inferred from the source, not replayed",
            fix="keep tensors with their graph from the model to the loss; detach, item, argmax and NumPy end it",
        )
    return NO_GRAPH.finding(
        "the loss carries no graph: nothing it was computed from requires grad",
        source=failure.source,
        cause="the path from the parameters to the loss was cut (not replayed, so the place is not known)",
        fix="compute the loss from the model's output without detach, item, argmax, NumPy or no_grad on the way",
    )


def _cut_in_slice(filename: str, line: int) -> SourceLine | None:
    """The cut nearest to a failed line, among the statements and functions that its loss was computed by."""
    block = syntax.no_grad_block([(filename, line)])
    if block is not None:
        return block
    for statement in syntax.slice_before(filename, line):
        for node in ast.walk(statement):
            if _cuts(node):
                return SourceLine(filename, node.lineno, line_text(filename, node.lineno))  # type: ignore[attr-defined]
        block = syntax.no_grad_block([(filename, statement.lineno)])
        if block is not None:
            return block
        for name in {syntax.called_name(n) for n in ast.walk(statement) if isinstance(n, ast.Call)}:
            found = _cut_in_function(filename, name)
            if found is not None:
                return found
    return None


def _cut_in_function(filename: str, name: str) -> SourceLine | None:
    """The cut in the only function of that name in the file."""
    definitions = syntax.functions_named(filename, name)
    if len(definitions) != 1:
        return None
    returns = [n for n in ast.walk(definitions[0]) if isinstance(n, ast.Return) and n.value is not None]
    block = syntax.no_grad_block([(filename, n.lineno) for n in returns])
    if block is not None:
        return block
    for node in returns:
        for statement in syntax.slice_before(filename, node.lineno):
            cut = next((n for n in ast.walk(statement) if _cuts(n)), None)
            if cut is not None:
                return SourceLine(filename, cut.lineno, line_text(filename, cut.lineno))  # type: ignore[attr-defined]
    return None


def _cuts(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Load):
        return True
    return isinstance(node, ast.Call) and syntax.called_name(node) in _CUTTING_CALLS


def explain_non_scalar(failure: Failure) -> Finding:
    """The finding for “grad can be implicitly created only for scalar outputs”."""
    loss = failure.loss
    source = failure.source
    made_by = None
    if loss is not None and failure.record is not None:
        index = failure.record.producer(loss)
        made_by = failure.record.ops[index] if index >= 0 else None
        if made_by is not None and (source is None or "backward(" not in source.text):
            source = made_by.source  # a trainer called backward: the line that made the loss is the one to change
    shape = f" of shape {list(loss.shape)}" if loss is not None else ""
    line = made_by.source if made_by is not None else None
    where = f" on line {line.line}: `{line.text}`" if line is not None and line != source else ""
    op = (
        made_by.short_name
        if made_by
        else loss.grad_fn.name()
        if loss is not None and loss.grad_fn is not None
        else None
    )
    return NON_SCALAR.finding(
        f"backward was called on a tensor{shape}, not on one number" + (f"; it was made by {op}{where}" if op else ""),
        source=source,
        op=op,
        cause="a loss that was not reduced (reduction='none', or a missing .mean())",
        fix="reduce it before backward: `loss.mean().backward()`",
    )
