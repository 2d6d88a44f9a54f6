"""Guards over the lifetime of graphs: retained ones, wasted ones, and what hand-written Functions hold."""

from __future__ import annotations

import ast
import gc
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Finding, Report, SourceLine
from safetrain.graph import (
    Census,
    Mark,
    Marks,
    SavedFreed,
    StoreTrace,
    bound_of,
    files_of,
    find_holders,
    grad_fn_of,
    is_freed,
    marks_reached,
    owned_tensors,
    put_mark,
    reaches,
    saved_tensors,
    storage_key,
    walk,
)
from safetrain.graph.holders import Wanted
from safetrain.graph.marks import KEY
from safetrain.graph.walk import is_leaf_node
from safetrain.rules import functions, graph
from safetrain.source import user_frame, user_line, with_text
from safetrain.source.syntax import called_name, mentions, statement_at
from safetrain.state import RunState


def retention_guards(report: Report) -> list[Callback]:
    """Those that watch how long graphs live."""
    return [RetentionGuard(report), WasteGuard(report), FunctionGuard(report)]


class Guard(Callback):
    """Base: where findings go."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def tell(self, findings: list[Finding], state: RunState) -> None:
        """Report what a judge found now."""
        self.report.extend(findings, step=state.current_step, phase="eval" if state.phase == "eval" else "train")


def is_sampled(step: int) -> bool:
    """Whether something costly may be done after so many steps: the first four, then at every power of two."""
    return step < 4 or not step & (step - 1)


class RetentionGuard(Guard):
    """G101 to G103, G106, G107 and G110: graphs that outlive their step.

    Each step: one mark on the loss, and on every tensor made in the step that still carries a graph at its end (a
    census of the collector's young objects). A mark lives as long as its graph, so the number of earlier steps whose
    mark is alive is the number of graphs that somebody keeps. When it rises twice, the holder is looked for and the
    next step is traced; when it rises a third time, that is reported.
    """

    def __init__(self, report: Report, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(report)
        self._given = dict(given or {})
        self._census = Census()
        self._marks = Marks()
        self._mark: Mark = self._marks.new(1)
        self._growth = graph.Growth()
        self._told = graph.Told()
        self._searches = _SearchBudget()
        self._traces: list[tuple[str, StoreTrace]] = []
        self._lines: dict[str, tuple[SourceLine | None, SourceLine | None]] = {}
        self._patience = 0
        self._walks = 0
        self._is_first = True
        self._exceptions: set[int] = set()
        self._evaluation = _Evaluation()

    # ------------------------------------------------------------------ events

    def on_fit_start(self, state: RunState) -> None:
        self._census.before_collections(self._put_mark)

    def on_backward_start(self, state: RunState) -> None:
        loss = state.micro_loss
        if loss is None:
            return
        put_mark(loss, self._mark)  # in each step: `total += loss` keeps graphs and makes no tensor that a census meets
        if not state.is_sampled:
            return
        if self._is_first or is_sampled(state.step):
            self._mark_all(loss)
        else:
            self._mark_trunk(loss)
        if sys.exc_info()[1] is not None:
            self._look_at_exception(state)
        if len(self._marks) > 1 and self._marks.alive_before(self._mark.step):
            self._look_for_carried_state(loss, state)
        if self._evaluation.marks:
            self.tell(self._evaluation.settle(loss), state)

    def on_step_end(self, state: RunState) -> None:
        self._is_first = False
        if state.attached_metrics:
            self._tell_metrics(state)
        self._census.visit_step(self._put_mark)
        self._mark = self._marks.next(self._mark, state.step + 1)
        earlier = self._marks.alive_before(state.step) if len(self._marks) > 1 else []
        if earlier or self._growth.count or self._traces:
            state.request_samples(_WATCHED)
            self._judge(earlier, state)
        if self._evaluation.marks:
            state.request_samples(_WATCHED)  # losses tell whether it was one
            self._judge_evaluation(state)

    def on_eval_start(self, state: RunState) -> None:
        self._mark_young(self._mark)
        self._census.before_collections(None)  # what an evaluation makes has marks of its own

    def on_eval_end(self, state: RunState) -> None:
        self._mark_young(self._evaluation.mark(state.step))
        self._census.before_collections(self._put_mark)
        if state.attached_metrics:
            self._tell_metrics(state)

    def on_exception(self, state: RunState) -> None:
        self._end_traces()
        self._census.before_collections(None)

    def on_fit_end(self, state: RunState) -> None:
        self._end_traces()
        self._census.before_collections(None)
        if self._evaluation.marks:
            self._judge_evaluation(state, at_end=True)
        self.tell(self._evaluation.last_word(), state)

    def outputs_made(self, state: RunState, module: nn.Module, output: Any) -> None:
        """For drivers that see forwards: an outermost module has returned `output`."""
        if module.training or not torch.is_grad_enabled() or self._evaluation.is_training:
            return
        tensors = graph_tensors(output)
        if tensors and self._evaluation.see(tensors, state.step, module):
            holders = find_holders(self._evaluation.of_batches(), self._names(state))
            self._evaluation.suspect(graph.find_eval_graphs([h for h in holders if len(h.steps) > 2][:1], module))

    def _tell_metrics(self, state: RunState) -> None:
        self.tell(graph.find_attached_metrics(state.attached_metrics), state)

    def _mark_young(self, mark: Mark) -> None:
        """Mark what was made since the last look and still carries a graph."""
        self._census.visit(lambda tensor: put_mark(tensor, mark))

    def _put_mark(self, tensor: Tensor) -> None:
        put_mark(tensor, self._mark)

    def _mark_all(self, loss: Tensor) -> None:
        """Mark the whole graph: who keeps a node of it keeps no tensor that a census could meet.

        And a first optimizer step imports so much that a census cannot see this step's tensors.
        """
        for node in walk([grad_fn_of(loss)], limit=2_000).nodes:
            if not is_leaf_node(node):  # a leaf's node is shared by the graphs of all steps
                node.metadata.setdefault(KEY, self._mark)

    def _mark_trunk(self, loss: Tensor) -> None:
        """Mark the way from a loss to its oldest operation, past residual branches: most of a forward hangs on it."""
        node = grad_fn_of(loss)
        for _ in range(_LONGEST_TRUNK):
            beneath = [n for n, _ in node.next_functions if n is not None and not is_leaf_node(n)] if node else []
            if not beneath:
                return
            node = min(beneath, key=lambda n: n._sequence_nr())
            node.metadata.setdefault(KEY, self._mark)

    # ------------------------------------------------------------------ judging

    def _judge(self, earlier: list[Mark], state: RunState) -> None:
        self._end_traces()
        rose = self._growth.update(len(earlier))
        if len(earlier) < self._patience:
            return
        if not rose:
            if earlier and earlier[0].step == state.step - 3 and self._searches.allow_single():
                self._report_exception_holder(earlier, state)
        elif self._growth.certain:
            self._report_holders(earlier, state)
        elif self._growth.suspicious:
            self._search_and_trace(earlier, state)

    def _search_and_trace(self, earlier: list[Mark], state: RunState) -> None:
        """The first look: who holds, and a trace of the coming step for the line that stores there."""
        for holder in find_holders(reaches(earlier), self._names(state))[:3]:
            key = holder.root.label + holder.name
            if key in self._lines or len(holder.steps) < 2:
                continue
            trace = graph.start_trace(holder)
            if trace is not None:
                self._traces.append((key, trace))
            break

    def _report_holders(self, earlier: list[Mark], state: RunState) -> None:
        self._patience = 2 * len(earlier)
        wanted = reaches(earlier)
        holders = find_holders(wanted, self._names(state))
        if not holders:
            del wanted
            self._report_cycle(earlier, state, searched=holders.is_complete)
            return
        files = files_of(state.model)
        windows = [b for h in holders if (b := bound_of(h, files, graph.visible_values())) is not None]
        if windows:
            self._patience = min(max(windows), graph.MAX_WINDOW) + 3
        at_least = max(2, len(earlier) // 2)
        findings = graph.findings_of(holders[:4], state.model, lines=self._lines, at_least=at_least, told=self._told)
        self.tell(findings, state)

    def _report_exception_holder(self, earlier: list[Mark], state: RunState) -> None:
        """One graph lives on and on. That is nobody's business, unless a traceback keeps it by accident."""
        holders = [h for h in find_holders(reaches(earlier), self._names(state)) if h.through_exception]
        self.tell(graph.findings_of(holders[:1], state.model, lines=self._lines, told=self._told), state)

    def _report_cycle(self, earlier: list[Mark], state: RunState, *, searched: bool) -> None:
        """No name was found that leads to them: do they die by a collection?"""
        if not self._searches.allow_collection():
            return
        owners, chain = graph.find_cycle(reaches(earlier))
        if self._is_known_cycle(owners):
            return
        if not owners:
            return
        verdicts = [
            graph.graph_cycle(owners, chain, state.model, collected=collected, searched=searched)
            for collected in (False, True)
        ]
        count = len(earlier)
        owners.clear()
        earlier.clear()
        gc.collect()
        self.tell([verdicts[len(self._marks.alive_before(state.step)) < count]], state)
        self._searches.no_more_collections()

    def _is_known_cycle(self, owners: list[Tensor]) -> bool:
        """Whether a hand-written Function was already reported for a cycle that runs through these graphs."""
        known = {f"{f.op}Backward" for f in self.report.findings if f.code == graph.CYCLE.code}
        nodes = walk([grad_fn_of(owner) for owner in owners[:8]], limit=2_000).nodes if known else []
        return any(type(node).__name__ in known for node in nodes)

    def _look_for_carried_state(self, loss: Tensor, state: RunState) -> None:
        self._walks += 1
        if self._walks > 16 and self._walks & (self._walks - 1):
            return  # something is held for good, and it is not this: look at ever longer intervals
        self.tell(graph.find_carried_state(loss, self._mark.step, given=self._names(state)), state)

    def _look_at_exception(self, state: RunState) -> None:
        error = sys.exc_info()[1]
        if id(error) not in self._exceptions and len(self._exceptions) < 8:
            self._exceptions.add(id(error))
            self.tell(graph.find_exception_holders(error, state.model), state)

    def _judge_evaluation(self, state: RunState, *, at_end: bool = False) -> None:
        wanted = self._evaluation.kept(state.step, at_end)
        if wanted is not None:
            holders = find_holders(wanted, self._names(state))
            self._evaluation.told = True
            self.tell(graph.find_eval_graphs(holders[:1], state.model, told=self._told), state)

    def _names(self, state: RunState) -> dict[str, Any]:
        return {**self._given, "model": state.model}

    def _end_traces(self) -> None:
        for key, trace in self._traces:
            trace.stop()
            if trace.stored_at is not None:
                self._lines[key] = (trace.stored_at, trace.made_at)
        self._traces = []


class _SearchBudget:
    """What may be done only a few times in a run because it costs more than a step."""

    def __init__(self) -> None:
        self._singles = 2
        self._collections = 2

    def allow_single(self) -> bool:
        """A search for a single graph that lives on."""
        self._singles -= 1
        return self._singles >= 0

    def allow_collection(self) -> bool:
        """A full collection, which takes a second on a heap of five million objects."""
        self._collections -= 1
        return self._collections >= 0

    def no_more_collections(self) -> None:
        """What it was for has been told."""
        self._collections = 0


class _Evaluation:
    """Graphs that an evaluation built: those that were alive when it ended, and its outputs where forwards are seen."""

    def __init__(self) -> None:
        self.marks = 0
        self.told = False
        self.is_training = False
        """Losses were computed from outputs in eval mode: that is how this model is trained."""
        self._alive = Marks()
        self._pending: list[Finding] = []
        self._seen = False
        self._newest: weakref.ref[Tensor] | None = None

    def mark(self, step: int) -> Mark:
        """A mark for what an evaluation after `step` built."""
        self.marks += 1
        return self._alive.new(step, "eval")

    def see(self, tensors: list[Tensor], step: int, module: nn.Module) -> bool:
        """Mark a forward's outputs. True when so many batches' outputs are alive that somebody collects them."""
        mark = self.mark(step)
        for tensor in tensors:
            put_mark(tensor, mark)
        if not self._seen:
            self._seen = True
            self._pending = [graph.eval_built_graphs(tensors[0], module, user_line())]
        elif self._pending and self._was_used():
            self._pending = [finding for finding in self._pending if finding.severity != "note"]
        self._newest = weakref.ref(tensors[0])
        suspicious = not self.told and len(self._alive.alive_before(step + 1)) == _COLLECTED_BATCHES
        return suspicious and all(finding.severity == "note" for finding in self._pending)

    def _was_used(self) -> bool:
        """Whether the evaluation differentiates its outputs (attacks, saliency): then it needs their graphs."""
        newest = self._newest() if self._newest is not None else None
        return newest is not None and any(is_freed(node) for node in walk([grad_fn_of(newest)], limit=64).nodes)

    def of_batches(self) -> Wanted:
        """Which batches' graphs a tensor keeps."""
        number = {mark: i for i, mark in enumerate(self._alive.alive_before(sys.maxsize))}

        def wanted(tensor: Tensor) -> frozenset[int]:
            return frozenset(number[mark] for mark in marks_reached(tensor, 4_000) if mark in number)

        return wanted

    def suspect(self, findings: list[Finding]) -> None:
        """To be told once it is certain that this was an evaluation."""
        if findings:
            self._pending = findings
            self.told = True

    def settle(self, loss: Tensor) -> list[Finding]:
        """A loss that reaches those graphs makes it a training; otherwise what was suspected is certain now."""
        if any(mark.kind == "eval" for mark in marks_reached(loss, 20_000)):
            self.is_training, self.told = True, False
            self.marks, self._alive = 0, Marks()
            self._pending = []
        certain = [finding for finding in self._pending if finding.severity != "note"]
        self._pending = [finding for finding in self._pending if finding.severity == "note"]
        return certain

    def last_word(self) -> list[Finding]:
        """Graphs were built, and nothing worse was told about them."""
        return [finding for finding in self._pending if finding.severity != "note" or not self.told]

    def kept(self, step: int, at_end: bool) -> Wanted | None:
        """What to look for when something of an evaluation is alive two steps later."""
        old = self._alive.alive_before(step + 1 if at_end else step - 1)
        self.marks = len(self._alive)
        return reaches(old) if old and not self.told else None


_WATCHED = 2
"""Steps to watch closely after one in which an earlier graph was alive."""
_LONGEST_TRUNK = 500
"""Nodes, of a network without residual branches."""
_COLLECTED_BATCHES = 5
"""Outputs of so many batches alive at once: a loop's own names keep two."""


def graph_tensors(output: Any) -> list[Tensor]:
    """The tensors with a graph in a module's output: itself, or one level into a tuple, list or mapping."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    )
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf]


class WasteGuard(Guard):
    """G104, G105 and G108: graphs that are built or kept for nothing, by retain_graph or create_graph."""

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._retained: _Retained | None = None
        self._retaining: set[SourceLine] = set()
        self._unused_retains = 0
        self._big: list[tuple[int, StorageWeakRef, int]] = []
        self._stale_told = False
        self._unused_graphs = 0
        self._first_backward = True
        self._probe = 0

    def on_backward_start(self, state: RunState) -> None:
        if self._first_backward:
            self._first_backward = False
            self._look_at_carried_grads(state)
        if self._retained is not None:
            self._settle_retained(state)
        if is_sampled(state.step):
            self._note_retained(state)

    def on_backward_end(self, state: RunState) -> None:
        if self._retained is not None:
            self._retained.note_end()
        if is_sampled(state.step):
            self._look_at_unused_graphs(state)

    def on_step_end(self, state: RunState) -> None:
        self._first_backward = True
        self._retaining.clear()
        if self._retained is not None:
            self._retained.note_end()

    def outputs_made(self, state: RunState, module: nn.Module, output: Any) -> None:
        """For drivers that see forwards: an outermost module has returned `output`."""
        big = [t for t in graph_tensors(output) if t.nbytes >= graph.STALE_BYTES]
        if not big and not self._big:
            return
        stale = sum(count for step, ref, count in self._big if step < state.step and not is_dead(ref))
        if stale and not self._stale_told:
            self._stale_told = True
            self.tell([graph.stale_output(stale, user_line())], state)
        self._big = [(state.step, StorageWeakRef(t.untyped_storage()), t.nbytes) for t in big]  # type: ignore[no-untyped-call]

    def _look_at_carried_grads(self, state: RunState) -> None:
        """One parameter each step, in turn: a graph on `.grad` before the first backward stays on all of them."""
        for optimizer in state.optimizers.values():
            params = optimizer.param_groups[0]["params"]
            grad = params[self._probe % len(params)].grad if params else None
            if grad is not None and grad.requires_grad:
                self.tell(graph.find_attached_grads(state.model.named_parameters()), state)
        self._probe += 1

    def _look_at_unused_graphs(self, state: RunState) -> None:
        """Before a step: gradients with a graph that no second backward used. Those not of torch may yet use it."""
        if any(not type(opt).__module__.startswith("torch.optim") for opt in state.optimizers.values()):
            return
        found = graph.find_attached_grads(state.model.named_parameters(), unused=True)
        self._unused_graphs = self._unused_graphs + 1 if found else 0
        if self._unused_graphs >= 2:
            self.tell(found, state)

    def _note_retained(self, state: RunState) -> None:
        call = retaining_call()
        if call is None or state.micro_loss is None:
            return
        source, name = call
        if name == "grad" and source in self._retaining:
            self._retained = None  # one gradient a term is wanted: all calls but the last need the graph again
            return
        self._retaining.add(source)
        self._retained = _Retained(state.micro_loss, source, owned_tensors(state.model))

    def _settle_retained(self, state: RunState) -> None:
        """What was kept is gone before this backward: rebound, not used. Gone later: used by this one."""
        retained = self._retained
        assert retained is not None
        if not retained.is_gone():
            retained.held = False
            return
        self._unused_retains = self._unused_retains + 1 if retained.held else 0
        self._retained = None
        if self._unused_retains >= 2:
            self.tell([graph.unused_retain(retained.source, retained.num_bytes)], state)


def is_dead(storage: StorageWeakRef) -> bool:
    """Whether a storage is gone."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _Retained:
    """What a backward with retain_graph=True left in its graph, known by weak references to the storages.

    Of numbers with a fraction only: labels and indices are the batch's, which lives on in its data set.
    """

    __slots__ = ("_refs", "held", "num_bytes", "source")

    def __init__(self, loss: Tensor, source: SourceLine, apart_from: list[Tensor]) -> None:
        self.source = source
        self.held = False
        self.num_bytes = 0
        self._refs: list[StorageWeakRef] = []
        known = {storage_key(tensor) for tensor in apart_from} | {None}
        for node in walk([grad_fn_of(loss)], limit=2_000).nodes:
            try:
                for tensor in saved_tensors(node):
                    key = storage_key(tensor)
                    if key not in known and tensor.is_floating_point():
                        known.add(key)
                        self._refs.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                        self.num_bytes += tensor.untyped_storage().nbytes()
            except SavedFreed:
                continue

    def is_complete(self) -> bool:
        """Whether all of it is alive."""
        return bool(self._refs) and self._num_dead() == 0

    def is_gone(self) -> bool:
        """Whether nearly all of it is dead; the batch may live on in its data set."""
        return self._num_dead() >= 0.7 * len(self._refs)

    def _num_dead(self) -> int:
        return sum(is_dead(ref) for ref in self._refs)

    def note_end(self) -> None:
        """The step is over, or about to step: is it still there?"""
        self.held = self.is_complete()


def retaining_call() -> tuple[SourceLine, str] | None:
    """The user's line that is calling backward now, if it asks to retain the graph; and what it calls."""
    frame = user_frame()
    if frame is None or not mentions(frame.f_code.co_filename, "retain_graph"):
        return None
    statement = statement_at(frame.f_code.co_filename, frame.f_lineno)
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                asked = not isinstance(keyword.value, ast.Constant) or bool(keyword.value.value)
                if keyword.arg == "retain_graph" and asked:
                    return with_text(SourceLine(frame.f_code.co_filename, keyword.value.lineno)), called_name(node)
    return None


class FunctionGuard(Guard):
    """G111 and G112: hand-written autograd Functions, each class once, in the first steps and then ever more rarely."""

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._known: set[type] = set()

    def on_backward_start(self, state: RunState) -> None:
        if state.micro_loss is not None and is_sampled(state.step):
            self.tell(functions.find_function_faults(state.micro_loss, known=self._known), state)
