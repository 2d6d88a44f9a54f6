"""P201 and G109: parameters without gradient and terms that cannot teach, with the line that cut the path."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import CodeType

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.findings import Finding, SourceLine
from safetrain.recording.path_look import Cut, PathLook, Term, WhyNoGradient, written
from safetrain.rules.gradient.catalogue import (
    CONSTANT_TERM,
    GRAD_NONE,
    by_module,
    common_module,
    entries,
    listed,
)
from safetrain.rules.loop.norms import reentrant_finding
from safetrain.source import with_text
from safetrain.source.syntax import no_grad_block, statement_at

_CUT_ADVICE: dict[str, tuple[str, str]] = {
    "reentrant": (
        "it runs inside a reentrant checkpoint whose inputs need no gradient, so nothing inside it gets one",
        "checkpoint(..., use_reentrant=False)",
    ),
    "no_grad": ("`{op}` ran while gradients were switched off", "move it out of the no_grad block"),
    "rebuilt": (
        "`{op}` makes a new tensor, which starts without a graph",
        "use the tensor itself, or torch.stack(...) for a list",
    ),
    "detached": ("`{op}` cuts the graph", "remove `{op}` from the path to the loss"),
    "number": (
        "`{op}` turns the tensor into a plain number, which carries no graph",
        "keep the tensor: drop `{op}` and use torch.stack(...)",
    ),
    "grad": ("`torch.autograd.grad` was called without create_graph", "torch.autograd.grad(..., create_graph=True)"),
    "no_derivative": (
        "`{op}` has no derivative",
        "use a differentiable form (softmax for argmax, a margin for a comparison)",
    ),
    "branch": ("it only decides a branch", "make the loss depend on it"),
}


def find_missing_grads(
    model: nn.Module,
    optimizers: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    look: PathLook | None = None,
) -> list[Finding]:
    """P201 for every trainable parameter whose `.grad` is None now, after a backward. Frozen ones never count.

    With `optimizers`, only parameters that one of them holds. With a `look` that watched the step, each finding carries
    a proved cause and its line. No host sync.
    """
    names = _missing(model, optimizers)
    if look is None or not look.saw_a_loss:
        return explain_missing(dict.fromkeys(names), model)
    return explain_missing({name: look.why(name) for name in names if name in look.names}, model)


def _missing(model: nn.Module, optimizers: Optimizer | Mapping[str, Optimizer] | None) -> list[str]:
    held = None if optimizers is None else {id(p) for _, p in entries(optimizers)}
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is None and (held is None or id(p) in held)
    ]


def explain_missing(verdicts: Mapping[str, WhyNoGradient | None], model: nn.Module) -> list[Finding]:
    """P201 findings for parameters without gradient, one for each cause: cuts by their line, unused ones by module."""
    by_cut, by_kind = group_by_cause(verdicts)
    findings = [_cut_finding(cut, names) for cut, names in by_cut]
    for kind, names in by_kind.items():
        for module, inside in by_module(model, names).items():
            findings.append(_unused_finding(kind, module, inside, verdicts))
    return findings


def group_by_cause(
    verdicts: Mapping[str, WhyNoGradient | None],
) -> tuple[list[tuple[Cut, list[str]]], dict[str, list[str]]]:
    """Parameters by the cut on their path, and those without one by the kind of their verdict ("unknown" for none).

    Operations under one and the same `no_grad` are one cut.
    """
    by_cut: dict[object, tuple[Cut, list[str]]] = {}
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, verdict in verdicts.items():
        if verdict is not None and verdict.cut is not None:
            by_cut.setdefault(_switch(verdict.cut) or id(verdict.cut), (verdict.cut, []))[1].append(name)
        else:
            by_kind["unknown" if verdict is None else verdict.kind].append(name)
    return list(by_cut.values()), by_kind


def cut_cause(cut: Cut) -> tuple[str, str, SourceLine | None]:
    """Why the path ends there, what to do, and the line to change."""
    why, fix = (text.format(op=cut.op) for text in _CUT_ADVICE[cut.kind])
    switch = _switch(cut)
    line = switch or cut.source
    region = f" (switched off at {written(switch)})" if switch else ""
    return why + region, fix, with_text(line) if line else None


def _switch(cut: Cut) -> SourceLine | None:
    """Where gradients were switched off for it."""
    return cut.region or no_grad_block(cut.places)


def _cut_finding(cut: Cut, names: list[str]) -> Finding:
    why, fix, source = cut_cause(cut)
    at = written(cut.source)
    if cut.kind == "reentrant":
        return reentrant_finding(names, source)
    return GRAD_NONE.finding(
        f"{listed(names)} got no gradient: the path to the loss is cut at {at}, where {why}. "
        "The optimizer steps without ever changing it.",
        source=source,
        params=names,
        module=common_module(names),
        op=cut.op,
        cause=f"path cut by `{cut.op}` at {at}: {why}",
        fix=fix,
    )


def _unused_finding(kind: str, module: str, names: list[str], verdicts: Mapping[str, WhyNoGradient | None]) -> Finding:
    what = f"`{module}` ({listed(names)})" if module else listed(names)
    op: str | None = None
    source: SourceLine | None = None
    if kind == "never_used":
        cause = "module never called: no operation of the step read these parameters"
        fix = f"call it in forward, or freeze it: {module or 'the module'}.requires_grad_(False)"
    elif kind == "result_unused":
        verdict = next((v for n in names if (v := verdicts[n]) is not None and v.tip is not None), None)
        cause = "its result is not used by any loss"
        if verdict is not None and verdict.tip is not None:
            op, line = verdict.tip
            source = with_text(line) if line else None
            cause += f"; the last thing made from it is `{op}` at {written(line)}"
        fix = "use the result in the loss, or freeze the module"
    elif kind == "backward_gave_none":
        function = next((v.function for n in names if (v := verdicts[n]) is not None and v.function), None)
        who = f"the backward of `{function.__name__}`" if function is not None else "a backward on the way"
        cause = f"the loss reaches it, but {who} returned None instead of a gradient"
        fix = "return a gradient for that input from the Function's backward"
        source = _last_return(function) if function is not None else None
    else:
        cause = "it is not reachable from the loss"
        fix = "use it in the loss, or freeze it with requires_grad_(False)"
    return GRAD_NONE.finding(
        f"{what} got no gradient: {cause}. It stays as it was initialised.",
        source=source, params=names, module=module or None, op=op, cause=cause, fix=fix,
    )  # fmt: skip


def _last_return(function: type) -> SourceLine | None:
    """The last `return` of a hand-written Function's backward."""
    code: CodeType | None = getattr(getattr(function, "backward", None), "__code__", None)
    if code is None:
        return None
    for line in sorted({line for _, _, line in code.co_lines() if line}, reverse=True):
        if isinstance(statement_at(code.co_filename, line), ast.Return):
            return with_text(SourceLine(code.co_filename, line))
    return None


def find_constant_terms(terms: Iterable[Term]) -> list[Finding]:
    """G109 for scalars that were added to a differentiated loss though their graph had been cut before.

    A warning where the cut cannot be meant (argmax, a comparison, `autograd.grad` without `create_graph`, `.item()`),
    a note where it may be (`detach`, no_grad).
    """
    findings = []
    for cut in {id(t.cut): t.cut for t in terms}.values():
        why, fix = (text.format(op=cut.op) for text in _CUT_ADVICE[cut.kind])
        source = with_text(cut.source) if cut.source else None
        added = next((t.source for t in terms if t.cut is cut), None)
        findings.append(
            CONSTANT_TERM.finding(
                "a term of the loss teaches nothing: it comes from parameters, but its graph ends at "
                f"{written(cut.source)}, "
                f"where {why}. It is added to the loss at {written(added)} and changes the printed value only.",
                severity="warning" if cut.kind in ("no_derivative", "grad", "number", "rebuilt") else "note",
                source=source,
                op=cut.op,
                cause=f"`{cut.op}` at {written(cut.source)}: {why}",
                fix=fix,
            )
        )
    return findings


def may_have_constant_term(loss: Tensor) -> bool:
    """Whether the sums at the top of a loss have an addend without graph: a number, or a tensor that lost its graph."""
    stack, seen = [loss.grad_fn], 0
    while stack and seen < 32:
        node = stack.pop()
        seen += 1
        name = node.name() if node is not None else ""
        following = [n for n, _ in node.next_functions] if node is not None else []
        if name.startswith(("AddBackward", "SubBackward", "RsubBackward", "StackBackward", "CatBackward")):
            if None in following:
                return True
            stack.extend(following)
        elif name.startswith(
            ("MulBackward", "DivBackward", "NegBackward", "MeanBackward", "SumBackward", "ToCopyBackward")
        ):
            stack.extend(n for n in following[:1] if n is not None)
    return False
