"""L516 and L517: what a loop makes anew in each step, and so begins with again and again."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from safetrain.findings import Finding, SourceLine
from safetrain.foreign.events import LoopEvent
from safetrain.rules.loop.catalogue import REMADE_OPTIMIZER, REPEATED_BATCH, place_of, text_of
from safetrain.source.syntax import assigned_names, scope_of, statement_at

_IN_A_ROW = 4
"""Steps that must have done so."""


@dataclass(slots=True)
class _Pass:
    """A pass over a loader that began in this step."""

    start: LoopEvent
    batches: int = 0


class RepeatedBatch:
    """L516: `next(iter(loader))` in each step, of a loader that does not shuffle: all steps train on its first batch.

    A batch that is drawn anew in each step to be looked at is innocent: the names that the statement binds must be read
    above the backward of the same loop.
    """

    def __init__(self) -> None:
        self._passes: dict[Any, _Pass] = {}
        self._backward: LoopEvent | None = None
        self._others = False
        self._row: list[tuple[Any, Any]] = []
        self._told = False

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        if self._told:
            return
        loader = event.data.get("loader")
        if event.kind == "epoch_start":
            self._others = self._others or loader in self._passes
            self._passes[loader] = _Pass(event)
        elif event.kind == "batch":
            if loader in self._passes:
                self._passes[loader].batches += 1
            else:
                self._others = True  # of a pass that goes on
        elif event.kind == "backward":
            self._backward = event
        elif event.kind == "optimizer_step" and self._backward is not None:
            yield from self._judge(self._backward)
            self._passes, self._backward, self._others = {}, None, False

    def _judge(self, backward: LoopEvent) -> Iterator[Finding]:
        only = next(iter(self._passes.values())) if len(self._passes) == 1 and not self._others else None
        start = only.start if only is not None and only.batches == 1 else None
        order = start.data.get("order") if start is not None else None
        if start is None or order is None or (start.data.get("length") or 0) < 2 or start.data.get("shuffles"):
            self._row = []
            return
        key = (place_of(start), order)
        self._row = [*self._row, key] if key in self._row else [key]
        if len(self._row) < _IN_A_ROW or not feeds(start.source, backward.source):
            return
        self._told = True
        yield REPEATED_BATCH.finding(
            f"each step starts a new pass over the data and takes its first batch: {_IN_A_ROW} steps in a row trained "
            f"on the same samples. The other {start.data['length'] - 1} batches are never used.",
            first_step=backward.step,
            source=text_of(start.source),
            op="iter",
            cause="an iterator is made in each step, and the loader does not shuffle",
            fix="for batch in loader: … (or make the iterator once, before the loop)",
        )


def feeds(batch: SourceLine | None, backward: SourceLine | None) -> bool:
    """Whether a statement binds names in a loop that are read there before the backward of the same loop."""
    if batch is None or backward is None or batch.file != backward.file or batch.line >= backward.line:
        return False
    statement, end = statement_at(batch.file, batch.line), statement_at(backward.file, backward.line)
    loop = _loop_around(statement)
    if statement is None or end is None or loop is None or scope_of(statement) is not scope_of(end):
        return False
    bound = assigned_names(statement)
    return any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and node.id in bound
        and (statement.end_lineno or statement.lineno) < node.lineno <= end.lineno
        for node in ast.walk(loop)
    )


def _loop_around(node: ast.AST | None) -> ast.AST | None:
    scope = scope_of(node) if node is not None else None
    while node is not None and node is not scope:
        node = getattr(node, "parent", None)
        if isinstance(node, (ast.For, ast.While)):
            return node
    return None


@dataclass(slots=True)
class _Made:
    """An optimizer that replaced an earlier one."""

    event: LoopEvent
    num_steps: int = field(default=0)


class RemadeOptimizer:
    """L517: an optimizer with state is made for the same parameters in each step, takes one step, and is forgotten.

    Weights that are loaded in between (episodes that begin from the same ones) make that intended.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._row: Counter[Any] = Counter()
        self._told: set[Any] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        if event.kind == "optimizer_made":
            self._made.pop(event.data["optimizer"], None)
            if event.data.get("again") and event.data.get("keeps_state"):
                self._made[event.data["optimizer"]] = _Made(event)
        elif event.kind == "state_loaded" and event.data.get("target") in ("model", "optimizer"):
            self._made.clear()
            self._row.clear()
        elif event.kind == "optimizer_step" and event.data.get("optimizer") in self._made:
            yield from self._judge(self._made[event.data["optimizer"]], event)

    def _judge(self, made: _Made, step: LoopEvent) -> Iterator[Finding]:
        made.num_steps += 1
        place = place_of(made.event)
        if made.num_steps > 1 or place is None:
            self._row[place] = 0
            return
        self._row[place] += 1
        if self._row[place] < _IN_A_ROW or place in self._told:
            return
        self._told.add(place)
        name = made.event.data["name"]
        yield REMADE_OPTIMIZER.finding(
            f"each step makes a new {name} for the same parameters: {_IN_A_ROW} in a row took one step each. What it "
            "keeps from step to step (momentum, averages of gradients) starts from zero every time.",
            first_step=step.step,
            source=text_of(made.event.source),
            op=name,
            cause="the optimizer is made inside the loop",
            fix="make the optimizer once, before the loop",
        )
