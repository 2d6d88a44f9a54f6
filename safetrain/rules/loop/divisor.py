"""L503 for a number of accumulation steps that losses are divided by: not the window's, or gradients are once more."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from safetrain.findings import Finding, SourceLine
from safetrain.foreign.events import LoopEvent
from safetrain.rules.graph import visible_values
from safetrain.rules.loop.catalogue import ACCUMULATION_SCALE, place_of, text_of
from safetrain.source.syntax import scope_of, statement_at

_SAYS_STEPS = re.compile(r"accum|micro", re.IGNORECASE)
_WINDOWS = 3
"""Windows in a row in which it must be so."""


class WrongDivisor:
    """L503: each mean loss is divided by what the source calls the accumulation steps, and each step adds up another
    number of them; or it is the right number, and the gradients are divided by it too.

    Told when all of this is so in three windows in a row: one optimizer steps; gradients are cleared in between; the
    backwards stand on one line and are as many as the batches of a loader; each loss is a mean, weighed by plain
    numbers; the loop divides in one place only, by a name that speaks of accumulation and has just that value now.
    Silent where several processes train together: they may share the sum.
    """

    def __init__(self) -> None:
        self._micros: list[LoopEvent] = []
        self._batches: Counter[Any] = Counter()
        self._optimizers: set[Any] = set()
        self._cleared = False
        self._seen: tuple[Any, ...] | None = None
        self._times = 0
        self._told = False

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind = event.kind
        if kind == "batch":
            self._batches[event.data.get("loader")] += 1
        elif kind == "backward":
            self._micros.append(event)
        elif kind == "zero_grad":
            self._cleared = self._cleared or bool(event.data.get("params"))
        elif kind == "optimizer_step":
            self._optimizers.add(event.data.get("optimizer"))
            yield from self._stepped(event)
        elif kind == "scaler_step" and event.data.get("taken") is False:
            self._micros, self._batches = [], Counter()

    def _stepped(self, event: LoopEvent) -> Iterator[Finding]:
        micros, batches, cleared = self._micros, self._batches, self._cleared
        self._micros, self._batches, self._cleared = [], Counter(), False
        if self._told:
            return
        divisor = _common_divisor(micros) if cleared and len(self._optimizers) == 1 else None
        if divisor is None or len(micros) not in batches.values():
            self._times = 0
            return
        seen = (place_of(micros[0]), divisor, len(micros))
        self._times = self._times + 1 if seen == self._seen else 1
        self._seen = seen
        if self._times != _WINDOWS or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        judge = _divided_twice if divisor == len(micros) else _divided_wrongly
        for finding in judge(micros, event, divisor):
            self._told = True
            yield finding


def _divided_wrongly(micros: Sequence[LoopEvent], step: LoopEvent, divisor: int) -> Iterator[Finding]:
    scope, by = _division(micros[-1].source, divisor)
    if by is None or any(_writes_gradient(node) for node in ast.walk(scope)):
        return  # what is written to gradients may make up for it
    name, count = ast.unparse(by), len(micros)
    yield _finding(
        f"each loss is divided by `{name}`, which is {divisor}, and each step adds up {count} of them: its gradient is "
        f"{count}/{divisor} of that of one large batch",
        source=SourceLine(micros[-1].source.file, by.lineno) if micros[-1].source is not None else None,
        step=step,
        cause=f"{count} backwards before each step in {_WINDOWS} windows, and a division by {divisor}",
        fix=f"let one number decide both when to step and what to divide by: `{name}` = {count}, or a step every "
        f"{divisor} micro-batches",
    )


def _divided_twice(micros: Sequence[LoopEvent], step: LoopEvent, divisor: int) -> Iterator[Finding]:
    scope, by = _division(micros[-1].source, divisor)
    stepping = statement_at(step.source.file, step.source.line) if step.source is not None else None
    if by is None or stepping is None or scope_of(stepping) is not scope or step.source is None:
        return
    name = ast.unparse(by)
    for node in ast.walk(scope):
        same = any(ast.unparse(other) == name for other in _divides_gradient(node))
        if same and scope_of(node) is scope and _runs_with(node, stepping):
            yield _finding(
                f"each loss is divided by `{name}`, which is {divisor} as it should be, and the gradients are divided "
                f"by it once more before the step: they are 1/{divisor} of those of one large batch",
                source=SourceLine(step.source.file, node.lineno),  # type: ignore[attr-defined]  # a statement or a call
                step=step,
                cause=f"the loss is divided by `{name}` on line {by.lineno}, and so are the gradients",
                fix=f"divide the loss or the gradients by `{name}`, not both",
            )
            return


def _common_divisor(micros: list[LoopEvent]) -> int | None:
    """The whole number from two on that each loss of a window was divided by; None unless all are means of one line."""
    weights: list[Any] = [micro.data.get("weight") for micro in micros]
    if len(micros) < 2 or len({place_of(micro) for micro in micros}) != 1:
        return None
    if any(w is None or not w.count or w.reduction.endswith("by count") or w.factor <= 0 for w in weights):
        return None
    divisor = 1.0 / weights[0].factor  # all that weighs it: a name of that value was not made up for by something else
    if divisor < 1.5 or any(abs(w.factor * divisor - 1.0) > 1e-6 for w in weights):
        return None
    return round(divisor) if abs(divisor - round(divisor)) < 1e-6 * divisor else None


def _division(backward: SourceLine | None, divisor: int) -> tuple[ast.AST, ast.expr | None]:
    """The function around a backward, and in it the name that losses are divided by, if it is the only one.

    None unless it speaks of accumulation and has that very value now.
    """
    statement = statement_at(backward.file, backward.line) if backward is not None else None
    if statement is None:
        return ast.Pass(), None
    scope = scope_of(statement)
    found = [by for node in ast.walk(scope) for by in _divided_by(node) if _says_steps(by)]
    if len(found) != 1 or _number(found[0], visible_values()) != divisor:
        return scope, None
    return scope, found[0]


def _runs_with(node: ast.AST, step: ast.stmt) -> bool:
    """Whether a statement runs whenever the step does: no test stands around it that does not stand around the step."""
    tests = [above for above in _above(node) if isinstance(above, (ast.If, ast.Try, ast.While))]
    return all(_asks_for_gradient(test) or (_begins(test, node) and _begins(test, step)) for test in tests)


def _begins(test: ast.If | ast.Try | ast.While, node: ast.AST) -> bool:
    """Whether a node is in the first branch of a statement."""
    return any(node is inner for part in test.body for inner in ast.walk(part))


def _asks_for_gradient(node: ast.AST) -> bool:
    """`if p.grad is not None`."""
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and _is_gradient(test.left)


def _above(node: ast.AST) -> Iterator[ast.AST]:
    above = getattr(node, "parent", None)
    while above is not None:
        yield above
        above = getattr(above, "parent", None)


def _divides_gradient(node: ast.AST) -> Iterator[ast.expr]:
    """`k` of `p.grad /= k` and `p.grad.div_(k)`."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and _is_gradient(node.target):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "div_":
        yield from node.args[:1] if _is_gradient(node.func.value) else ()


def _is_gradient(node: ast.expr) -> bool:
    """`p.grad`, `p.grad.data`."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "grad" or (node.attr == "data" and _is_gradient(node.value))


def _writes_gradient(node: ast.AST) -> bool:
    """`p.grad *= 2`, `p.grad.mul_(2)`, `p.grad = 2 * p.grad`; not `p.grad = None`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        return "grad" in (getattr(node.func.value, "attr", ""), getattr(node.func.value, "id", ""))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    return any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in targets)


def _divided_by(node: ast.AST) -> Iterator[ast.expr]:
    """`k` of `x / k`, `x /= k` and of the division in `x * (1 / k)`, where `x` is no gradient."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not _is_gradient(node.left):
        yield node.right
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and not _is_gradient(node.target):
        yield node.value


def _says_steps(by: ast.expr) -> bool:
    name = _last_name(by)
    return _SAYS_STEPS.search(name) is not None and "size" not in name.lower()


def _last_name(by: ast.expr) -> str:
    if isinstance(by, ast.Name):
        return by.id
    if isinstance(by, ast.Attribute):
        return by.attr
    if isinstance(by, ast.Subscript) and isinstance(by.slice, ast.Constant) and isinstance(by.slice.value, str):
        return by.slice.value
    return ""


def _number(by: ast.expr, scope: Mapping[str, Any]) -> Any:
    """What a name, an attribute or an item stands for now; nothing of the user's is run for it."""
    if isinstance(by, ast.Name):
        return scope.get(by.id)
    if isinstance(by, ast.Attribute):
        owner = _number(by.value, scope)
        return vars(owner).get(by.attr) if hasattr(owner, "__dict__") else None
    if isinstance(by, ast.Subscript) and isinstance(by.slice, ast.Constant):
        owner = _number(by.value, scope)
        return owner.get(by.slice.value) if type(owner) is dict else None
    return None


def _finding(message: str, *, source: SourceLine | None, step: LoopEvent, cause: str, fix: str) -> Finding:
    return ACCUMULATION_SCALE.finding(
        f"{message}, so learning rate, clipping and weight decay no longer mean what they say.",
        first_step=max(1, step.step - _WINDOWS + 1),
        source=text_of(source),
        op="div",
        cause=cause,
        fix=fix,
    )
