"""What the gradient guards share: the coverage of parameters by optimizers, and the look at one step."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report, SourceLine
from safetrain.guarding.coverage import ChangeDetector, Coverage, read_coverage
from safetrain.guarding.gradient.sampling import is_sample
from safetrain.modules import is_compiled
from safetrain.recording.path_look import PathLook
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.foreign.events import LoopEvent
    from safetrain.state import RunState


class _Seen(NamedTuple):
    """A parameter that no optimizer holds, when it was first seen with a gradient."""

    step: int
    grad: weakref.ref[Tensor]
    grad_version: int
    value_version: int


class Watch(Callback):
    """P202 to P205 and P212, and what the guards here share.

    First in the list: it starts looks, and judges coverage as gradients arrive.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report, *, may_look: bool = True) -> None:
        self.report = report
        self.coverage = Coverage()
        self.version = 0
        self.had: set[int] = set()
        """Parameters that were seen with a gradient, by id, among those that no optimizer holds."""
        self.lines: dict[int, SourceLine | None] = {}
        """Where optimizers were made, by id, as far as known."""
        self.look: PathLook | None = None
        """The look that is being taken."""
        self.finished: PathLook | None = None
        """The look that ended with this step; readable in `on_step_end` of the guards that follow."""
        self.explained: set[SourceLine | None] = set()
        """Lines of constant terms of the loss whose cut another finding names."""
        self._may_look = may_look
        self._is_over = False
        self._foreign = False
        self._compiled_before = 0
        self._wanted = False
        self._changes: ChangeDetector | None = None
        self._next_check = 0
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._roots: set[int] = set()
        self._made_late: set[int] = set()
        self._thawed_late: set[int] = set()
        self._first_seen: dict[int, _Seen] = {}
        self._told: set[Any] = set()
        self._moving: dict[str, Tensor] = {}
        self._moved: dict[str, int] = {}
        self._marks: dict[str, tuple[str, weakref.ref[Tensor], int]] = {}
        self._double: dict[str, int] = {}
        self._check_freezes = False
        self._met: dict[int, weakref.ref[nn.Parameter]] = {}

    # ------------------------------------------------------------------ looks

    def request_look(self, between: RunState | None = None) -> None:
        """Have the next step watched op by op. Callers that stand between two steps give the state."""
        self._wanted = self._may_look
        if between is not None:
            between.request_samples(1)
        if between is not None and self._foreign and not self._is_over:
            # A foreign step begins for us with its first forward that has gradients on; what comes before counts too.
            self._start_look(between)

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        self._foreign = True
        if event.kind == "optimizer_made":
            self.lines[event.data.get("optimizer", 0)] = event.source

    def on_fit_start(self, state: RunState) -> None:
        self._is_over = False
        self._compiled_before = _frames_compiled()
        self._rebuild(state, first=True)

    def on_step_start(self, state: RunState) -> None:
        self.finished = None
        self._start_look(state)

    def _start_look(self, state: RunState) -> None:
        if self._wanted and self.look is None:
            self._wanted = False
            if _frames_compiled() == self._compiled_before and not any(map(is_compiled, state.model.modules())):
                self.look = PathLook({n: p for n, p in state.model.named_parameters() if p.requires_grad})
                self.look.start()

    def on_eval_start(self, state: RunState) -> None:
        if self.look is not None:
            self.look.forget()

    def on_backward_start(self, state: RunState) -> None:
        loss = state.micro_loss
        if loss is None:
            return
        if self.look is not None:
            self.look.loss(loss)
        if state.step in (1, 2) or state.step % 256 == 255:
            self._meet(state, loss)

    def on_step_end(self, state: RunState) -> None:
        if self.look is not None and self.look.stop():
            self.finished, self.look = self.look, None
        if self._moving:
            self._compare_frozen(state)

    def on_exception(self, state: RunState) -> None:
        self._abandon()

    def on_fit_end(self, state: RunState) -> None:
        self._is_over = True  # a guard that asks for a look now would leave its mode behind
        self._abandon()
        self.report.extend(rules.judge_frozen(self.coverage), step=max(1, state.step))

    def _abandon(self) -> None:
        self._wanted = False
        self._moving.clear()
        if self.look is not None:
            self.look.stop()
            self.look = None

    # ------------------------------------------------------------------ coverage

    def on_backward_end(self, state: RunState) -> None:
        changes = self._changes
        if changes is None or not changes.is_of(state.model):
            self._rebuild(state)
        elif state.step >= self._next_check:
            self._next_check = state.step + (changes.interval if state.step > 3 else 1)
            if changes.optimizers_changed(state.optimizers) or changes.model_changed():
                self._rebuild(state)
        coverage = self.coverage
        if coverage.uncovered:
            self._judge_uncovered(state)
        if coverage.shared:
            self._judge_shared(state)
        if coverage.frozen_held and is_sample(state.step + 1):
            self._keep_frozen()
        if self._check_freezes:
            self._judge_freezes(state)

    def _rebuild(self, state: RunState, *, first: bool = False) -> None:
        model = state.model
        self.coverage = read_coverage(model, state.optimizers)
        self.version += 1
        self._changes = ChangeDetector(model, state.optimizers)
        self._next_check = state.step + (self._changes.interval if state.step > 3 else 1)
        now: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        roots = list(model.children()) if type(model).__name__ == "Models" else [model]
        for root in roots:
            seen_before = id(root) in self._roots and not first
            for param in root.parameters():
                key = id(param)
                now[key] = (weakref.ref(param), param.requires_grad)
                before = self._known.get(key)
                if not seen_before:
                    continue  # a model that the driver learnt of only now may be as old as the others
                if before is None or before[0]() is None:
                    self._made_late.add(key)
                    self._thawed_late.discard(key)
                elif param.requires_grad and not before[1]:
                    self._thawed_late.add(key)
        self._known, self._roots = now, {id(root) for root in roots}
        alive = set(now) | {id(h.tensor) for h in self.coverage.strays}
        self.had &= alive
        self._first_seen = {k: v for k, v in self._first_seen.items() if k in alive}
        step = max(1, state.current_step)
        self.report.extend(rules.judge_duplicates(self.coverage), step=step)
        self._check_freezes = bool(rules.find_ineffective_freezes(model, lines=False)) or step <= 2

    def _judge_uncovered(self, state: RunState) -> None:
        step = state.current_step
        ripe = False
        for held in (*self.coverage.uncovered, *self.coverage.strays):
            tensor = held.tensor
            grad = tensor.grad if tensor is not None else None
            if tensor is None or grad is None:
                continue
            seen = self._first_seen.setdefault(
                id(tensor), _Seen(step, weakref.ref(grad), grad._version, tensor._version)
            )
            if tensor._version != seen.value_version:
                self.had.discard(id(tensor))  # it is trained after all: by hand, or by an optimizer not of torch.optim
            elif seen.step < step and (seen.grad() is not grad or seen.grad_version != grad._version):
                ripe = True  # and its gradient is not one left over from long ago
                self.had.add(id(tensor))
        if not ripe:
            return
        mark = (self.version, len(self.had))
        if mark in self._told:
            return
        self._told.add(mark)
        evidence = rules.GradientEvidence(self.had, self._made_late, self._thawed_late)
        lines = {name: self.lines.get(id(opt)) for name, opt in state.optimizers.items()}
        for finding in rules.judge_coverage(self.coverage, evidence, state.model, lines):
            steps = [self._first_seen[id(h.tensor)].step for h in self.coverage.uncovered if id(h.tensor) in self.had]
            finding.first_step = min(steps, default=step)
            if (finding.code, *finding.params) not in self._told:
                self._told.add((finding.code, *finding.params))
                self.report.add(finding, step=step)

    def _judge_shared(self, state: RunState) -> None:
        """Two optimizers that step on one and the same gradient: nothing wrote to it between their steps."""
        stepping = state.stepping or tuple(state.optimizers)
        for held, owners in self.coverage.shared:
            tensor = held.tensor
            grad = tensor.grad if tensor is not None else None
            here = [name for name in owners if name in stepping]
            if grad is None or not here:
                continue
            mark = self._marks.get(held.name)
            twice = len(here) > 1 or (
                mark is not None and mark[0] != here[0] and mark[1]() is grad and mark[2] == grad._version
            )
            self._marks[held.name] = (here[-1], weakref.ref(grad), grad._version)
            if twice:
                self._double[held.name] = self._double.get(held.name, 0) + 1
        doubled = [n for n, times in self._double.items() if times == 2]
        if doubled:
            owners = next(o for h, o in self.coverage.shared if h.name == doubled[0])
            for name in doubled:
                self._double[name] += 1
            self.report.add(rules.shared_finding(doubled, owners, proved=True), step=state.current_step)

    def _keep_frozen(self) -> None:
        for held in self.coverage.frozen_held:
            tensor = held.tensor
            if tensor is None or tensor.requires_grad or tensor.grad is None:
                continue  # some are thawed and frozen again in every step
            if held.name not in self._told:
                self._moving[held.name] = tensor.detach().clone()

    def _compare_frozen(self, state: RunState) -> None:
        """Frozen parameters with an old gradient: did the step move them? One host sync each, on sampled steps."""
        before, self._moving = self._moving, {}
        by_name = {h.name: h.tensor for h in self.coverage.frozen_held}
        for name, old in before.items():
            now = by_name.get(name)
            if now is not None and now.shape == old.shape and not torch.equal(now.detach(), old):
                self._moved[name] = self._moved.get(name, 0) + 1
        moved = [n for n, times in self._moved.items() if times >= 2 and n not in self._told]
        if moved:
            self._told.update(moved)
            self.report.extend(rules.judge_frozen(self.coverage, moved), step=max(1, state.step))

    def _judge_freezes(self, state: RunState) -> None:
        self._check_freezes = False
        held = {id(h.tensor) for h in self.coverage.trained}
        had = {id(p) for p in state.model.parameters() if p.grad is not None and id(p) in held}
        findings = rules.find_ineffective_freezes(state.model, had_gradient=had)
        if not findings and state.step <= 1:
            findings = rules.find_state_dict_freeze(state.model, had_gradient=had)
            self._check_freezes = state.step == 0
        self.report.extend(findings, step=state.current_step)

    # ------------------------------------------------------------------ parameters that are not registered

    def _meet(self, state: RunState, loss: Tensor) -> None:
        """Parameters in the graph that neither the model nor an optimizer knows; the same object twice is a finding."""
        known = {id(p) for p in state.model.parameters()} | set(self.coverage.owner)
        strangers = [p for p in rules.graph_parameters(loss) if id(p) not in known]
        again = [p for p in strangers if (ref := self._met.get(id(p))) is not None and ref() is p]
        fresh = {id(p): weakref.ref(p) for p in strangers}
        self._met = fresh if state.step == 1 and not again else {**self._met, **fresh}
        if again and state.step > 1:
            beside = rules.parameters_of_drivers(sys._getframe(1))
            held = set(self.coverage.owner)
            for finding in rules.find_unregistered(state.model, again, held, lambda p: beside.get(id(p))):
                if finding.holder not in self._told:
                    self._told.add(finding.holder)
                    finding.first_step = 1
                    self.report.add(finding, step=state.current_step)


def _frames_compiled() -> int:
    """How often torch.compile has compiled: under a function mode it would have to compile again."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"].get("total", 0)) if utils is not None else 0
