"""Guards over gradients: thin listeners that feed the judges of `rules.gradient` from any driver.

They share one `Watch`: the coverage of parameters by optimizers, kept up to date, and the look (see `path_look`) that
is taken for one step when something is suspect. No guard keeps a tensor alive or reads one as a number outside logging
steps and the sparse steps of `is_sample`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from safetrain.callbacks.base import Callback
from safetrain.coverage import ChangeDetector, Coverage, Held, read_coverage
from safetrain.findings import Report, SourceLine
from safetrain.path_look import PathLook, WhyNoGradient
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.events import LoopEvent
    from safetrain.state import RunState

_HARD_CUTS = frozenset({"reentrant", "rebuilt", "number", "no_derivative"})
"""Cuts that no schedule switches off again; the others may be a late start and need patience."""
_MOST_MEASURED = 128
_MOST_COMPARED = 48
"""Parameters whose gradients are measured, and whose values are compared, on one sampled step."""


def is_sample(step: int) -> bool:
    """Steps (counted from 1) at which sparse readings are taken: 2, 3, 4, 8, 16, 32 and every 64th."""
    return step in (2, 3, 4, 8, 16, 32) or step % 64 == 0


class Watch(Callback):
    """What the guards here share. First in the list: it starts looks, and judges coverage as gradients arrive."""

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
        self._may_look = may_look
        self._foreign = False
        self._compiled_before = 0
        self._wanted = False
        self._changes: ChangeDetector | None = None
        self._next_check = 0
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._roots: set[int] = set()
        self._made_late: set[int] = set()
        self._thawed_late: set[int] = set()
        self._first_seen: dict[int, tuple[int, weakref.ref[Tensor], int]] = {}
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
        if between is not None and self._foreign:
            # A foreign step begins for us with its first forward that has gradients on; what comes before counts too.
            self._start_look(between)

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        self._foreign = True
        if event.kind == "optimizer_made":
            self.lines[event.data.get("optimizer", 0)] = event.source

    def on_fit_start(self, state: RunState) -> None:
        self._compiled_before = _frames_compiled()
        self._rebuild(state, first=True)

    def on_step_start(self, state: RunState) -> None:
        self.finished = None
        self._start_look(state)

    def _start_look(self, state: RunState) -> None:
        if self._wanted and self.look is None:
            self._wanted = False
            if _frames_compiled() == self._compiled_before and not any(map(_is_compiled, state.model.modules())):
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
        if changes is None or not changes.is_of(state.model) or changes.optimizers_changed(state.optimizers):
            self._rebuild(state)
        elif state.step >= self._next_check:
            self._next_check = state.step + changes.interval
            if changes.model_changed():
                self._rebuild(state)
        coverage = self.coverage
        if coverage.uncovered:
            self._judge_uncovered(state)
        if coverage.shared:
            self._judge_shared(state)
        if coverage.frozen_held and is_sample(state.current_step):
            self._keep_frozen()
        if self._check_freezes:
            self._judge_freezes(state)

    def _rebuild(self, state: RunState, *, first: bool = False) -> None:
        model = state.model
        self.coverage = read_coverage(model, state.optimizers)
        self.version += 1
        self._changes = ChangeDetector(model, state.optimizers)
        self._next_check = state.step + self._changes.interval
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
            if grad is None:
                continue
            first, ref, version = self._first_seen.setdefault(id(tensor), (step, weakref.ref(grad), grad._version))
            if first < step and (ref() is not grad or version != grad._version):  # not one left over from long ago
                ripe = True
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
            seen = [self._first_seen[id(h.tensor)][0] for h in self.coverage.uncovered if id(h.tensor) in self.had]
            finding.first_step = min(seen, default=step)
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
            for finding in rules.find_unregistered(state.model, again, set(self.coverage.owner)):
                if finding.holder not in self._told:
                    self._told.add(finding.holder)
                    finding.first_step = 1
                    self.report.add(finding, step=state.current_step)


class MissingGradientGuard(Callback):
    """P201 with its cause, L506, and G109: which parameters got no gradient, and where the path was cut.

    A cut that no schedule can undo is reported as soon as a look proved it. What may be a late start (a branch not
    called yet, an unused result, a no_grad block, detach) waits `patience` steps (`soft_patience` when the cut was
    seen), or for the end of a run of at least `min_steps`. `first_step` is the step since which it had no gradient.
    """

    def __init__(
        self, report: Report, watch: Watch, *, patience: int = 100, soft_patience: int = 20, min_steps: int = 4
    ) -> None:
        self._report, self._watch = report, watch
        self._patience, self._soft, self._min = patience, soft_patience, min_steps
        self._pending: dict[str, tuple[weakref.ref[Tensor], int, int]] = {}  # name -> (parameter, since, version then)
        self._verdicts: dict[str, WhyNoGradient] = {}
        self._version = -1
        self._joined: set[int] = set()
        self._look_at = 3
        self._looked_for_terms = False
        self._arrivals: list[torch.utils.hooks.RemovableHandle] = []
        self._arrived: set[str] = set()
        self._explained: set[SourceLine | None] = set()

    def on_backward_start(self, state: RunState) -> None:
        if not self._looked_for_terms and state.step < 2:
            loss = state.micro_loss
            if loss is not None and rules.may_have_constant_term(loss):
                self._looked_for_terms = True
                self._watch.request_look()

    def on_backward_end(self, state: RunState) -> None:
        if self._watch.version != self._version:
            self._join(state)
        if self._pending:
            for name, (ref, _, _) in list(self._pending.items()):
                tensor = ref()
                if tensor is None or tensor.grad is not None or not tensor.requires_grad:
                    del self._pending[name]
                    self._verdicts.pop(name, None)

    def on_step_end(self, state: RunState) -> None:
        look = self._watch.finished
        if self._arrivals:
            self._unhook()
        if look is not None:
            self._take(look, state)
        if not self._pending:
            return
        step = state.step
        if step >= self._look_at:
            self._look_at = step + (5 if step < 8 else 12 if step < 20 else self._patience)
            self._watch_arrivals()
            self._watch.request_look(state)
        due = [
            name
            for name, (_, since, _) in self._pending.items()
            if step - since + 1 >= self._wait_for(self._verdicts.get(name))
        ]
        if due:
            self._tell(due, state)

    def on_exception(self, state: RunState) -> None:
        self._unhook()

    def on_fit_end(self, state: RunState) -> None:
        self._unhook()
        due = [name for name, (_, since, _) in self._pending.items() if state.step - since + 1 >= self._min]
        if due:
            self._tell(due, state)

    def _join(self, state: RunState) -> None:
        """Parameters that an optimizer holds and that never had a gradient yet. Seen once, a parameter is done."""
        self._version = self._watch.version
        step = state.current_step
        names = {h.name for h in self._watch.coverage.trained}
        self._pending = {n: entry for n, entry in self._pending.items() if n in names}
        for held in self._watch.coverage.trained:
            tensor = held.tensor
            if tensor is None or id(tensor) in self._joined:
                continue
            self._joined.add(id(tensor))
            self._pending[held.name] = (held.ref, step, tensor._version)
        if self._pending:
            self._look_at = min(max(self._look_at, step), step + 1) if step > 1 else 2

    def _wait_for(self, verdict: WhyNoGradient | None) -> int:
        if verdict is None or verdict.cut is None:
            return self._patience if verdict is None or verdict.kind != "backward_gave_none" else 5
        return 2 if verdict.cut.kind in _HARD_CUTS or verdict.cut.op == "data" else self._soft

    def _take(self, look: PathLook, state: RunState) -> None:
        if look.saw_a_loss:
            known = set(look.names)
            self._verdicts.update({name: look.why(name) for name in self._pending if name in known})
        cuts = {id(v.cut) for v in self._verdicts.values() if v.cut is not None}
        self._explained.update(t.source for t in look.terms if id(t.cut) in cuts)  # constant because of P201: one fault
        terms = [t for t in look.terms if t.source not in self._explained]
        self._report.extend(rules.find_constant_terms(terms), step=max(1, state.step))

    def _watch_arrivals(self) -> None:
        """Does backward bring a parameter nothing in the next step, or is its gradient cleared before we see it?"""
        for name, (ref, _, _) in self._pending.items():
            tensor = ref()
            if tensor is not None and tensor.requires_grad:
                note = functools.partial(_note_arrival, self._arrived, name)
                self._arrivals.append(tensor.register_hook(note))  # type: ignore[no-untyped-call]

    def _unhook(self) -> None:
        for handle in self._arrivals:
            handle.remove()
        self._arrivals.clear()
        for name in self._arrived:
            self._pending.pop(name, None)
            self._verdicts.pop(name, None)
        self._arrived.clear()

    def _tell(self, names: list[str], state: RunState) -> None:
        since = {n: self._pending[n][1] for n in names}
        verdicts: dict[str, WhyNoGradient | None] = {}
        for name in names:
            ref, _, version = self._pending.pop(name)
            tensor = ref()
            if tensor is not None and tensor.grad is None and tensor._version == version:
                verdicts[name] = self._verdicts.get(name)  # changed by hand: a moving average or a copy, not forgotten
        for finding in rules.explain_missing(verdicts, state.model):
            finding.first_step = min(since[n] for n in finding.params)
            self._report.add(finding, step=max(1, state.step))


class NumbersGuard(Callback):
    """P207, P208 and P210: zero, vanishing or exploding gradients and updates that change nothing.

    Takes device readings at the steps of `is_sample` (a handful of `_foreach` calls) and reads them as numbers one
    sample later, when they are long done.
    """

    def __init__(self, report: Report, watch: Watch) -> None:
        self._report, self._watch = report, watch
        self._waiting: list[tuple[int, list[str], Tensor]] = []
        self._zero: dict[str, list[int]] = {}
        self._history: list[dict[str, float]] = []
        self._before: list[tuple[Held, Tensor, float]] = []
        self._updates: list[tuple[int, list[tuple[str, float, str]], Tensor]] = []
        self._still: dict[str, list[int]] = {}
        self._ask_cause: dict[str, list[int]] = {}
        self._asking = False
        self._turn = 0
        self._causes: dict[str, rules.ZeroCause] = {}
        self._lines: dict[str, SourceLine | None] = {}
        self._told: set[str] = set()
        self._peak_rate = 0.0
        self._skipped = 0

    def on_backward_start(self, state: RunState) -> None:
        if self._asking and state.micro_loss is not None:
            by_name = {h.name: t for h in self._watch.coverage.trained if (t := h.tensor) is not None}
            wanted = {n: by_name[n] for n in self._ask_cause if n in by_name}
            self._causes.update(rules.zero_gradient_causes(state.micro_loss, wanted))

    def on_backward_end(self, state: RunState) -> None:
        if not is_sample(state.current_step):
            return
        self._turn += 1
        stepping = state.stepping or tuple(state.optimizers)
        coverage = self._watch.coverage
        chosen = [
            (h, t, t.grad)
            for h in coverage.trained
            if (t := h.tensor) is not None and _plain(t) and t.grad is not None and _plain(t.grad)
            and coverage.owner.get(id(t)) in stepping
        ]  # fmt: skip
        if state.current_step > 64 and len(chosen) > _MOST_MEASURED:
            # Large models are measured in turns, so that the cost of a step does not grow with them.
            start = self._turn * _MOST_MEASURED % len(chosen)
            chosen = [*chosen[start:], *chosen[:start]][:_MOST_MEASURED]
        self._measure(state, chosen)

    def _measure(self, state: RunState, chosen: list[tuple[Held, Tensor, Tensor]]) -> None:
        """Largest absolute value of each gradient, and a slice of each parameter to compare after the step."""
        rates = {id(p): g["lr"] for o in state.optimizers.values() for g in o.param_groups for p in g["params"]}
        by_device: dict[torch.device, list[tuple[Held, Tensor, Tensor]]] = {}
        for held, tensor, grad in chosen:
            by_device.setdefault(grad.device, []).append((held, tensor, grad))
        with torch.no_grad():
            for entries in by_device.values():
                norms = torch._foreach_norm([g for _, _, g in entries], float("inf"))
                self._waiting.append(
                    (state.current_step, [h.name for h, _, _ in entries], torch.stack([n.float() for n in norms]))
                )
                every = -(-len(entries) // _MOST_COMPARED)
                for held, tensor, _ in entries[self._turn % every :: every]:
                    rate = rates.get(id(tensor), 1.0)
                    self._before.append(
                        (held, tensor.reshape(-1)[:256].clone(), rate if isinstance(rate, float) else 1.0)
                    )

    def on_step_end(self, state: RunState) -> None:
        if self._before:
            self._compare(state)
        if self._asking:
            if self._watch.finished is not None:
                self._lines.update(self._watch.finished.flat_lines)
            self._asking = False
            self._tell_zero(state)
        if is_sample(state.step) or state.is_logging_step:
            self._read(state)

    def on_fit_end(self, state: RunState) -> None:
        self._before.clear()
        self._read(state, everything=True)
        if self._ask_cause:
            self._tell_zero(state)

    def _compare(self, state: RunState) -> None:
        before, self._before = self._before, []
        if state.skipped_steps > self._skipped:
            self._skipped = state.skipped_steps
            return
        by_device: dict[torch.device, list[tuple[Held, Tensor, Tensor, float]]] = {}
        for held, old, rate in before:
            tensor = held.tensor
            if tensor is not None:
                now = tensor.detach().reshape(-1)[:256]
                if now.shape == old.shape and now.device == old.device and now.dtype == old.dtype:
                    by_device.setdefault(old.device, []).append((held, old, now, rate))
        with torch.no_grad():
            for entries in by_device.values():
                changed = torch.stack([torch.ne(now, old).any() for _, old, now, _ in entries])
                facts = [(h.name, rate, str(old.dtype).removeprefix("torch.")) for h, old, _, rate in entries]
                self._updates.append((state.step, facts, changed))

    # ------------------------------------------------------------------ reading, one sample later

    def _read(self, state: RunState, *, everything: bool = False) -> None:
        keep = 0 if everything else 1
        ready, self._waiting = self._split(self._waiting, state.step, keep)
        look: dict[str, float] = {}
        for step, names, norms in ready:
            look.update(zip(names, norms.tolist(), strict=True))  # the host sync of a sampled step
            for name in names:
                if look[name] == 0.0:
                    self._zero.setdefault(name, []).append(step)
                else:
                    self._zero.pop(name, None)
                    self._ask_cause.pop(name, None)
        if look:
            self._history = [*self._history[-7:], look]
            self._judge_scale(state)
        updates, self._updates = self._split(self._updates, state.step, keep)
        for step, facts, changed in updates:
            self._judge_updates(
                state, step, facts, changed.tolist(), look or (self._history[-1] if self._history else {})
            )
        suspects = {n: s for n, s in self._zero.items() if len(s) >= 2 and n not in self._told}
        if suspects and {n: len(s) for n, s in suspects.items()} != {n: len(s) for n, s in self._ask_cause.items()}:
            self._ask_cause = {n: list(s) for n, s in suspects.items()}
            self._asking = True
            if any(len(s) <= 3 for s in suspects.values()):
                self._watch.request_look(state)

    @staticmethod
    def _split(items: list[Any], step: int, keep: int) -> tuple[list[Any], list[Any]]:
        ready = [item for item in items if item[0] <= step - keep]
        return ready, [item for item in items if item[0] > step - keep]

    def _judge_scale(self, state: RunState) -> None:
        eps = [g.get("eps") for o in state.optimizers.values() for g in o.param_groups]
        adam = all("betas" in g for o in state.optimizers.values() for g in o.param_groups)
        smallest = min((e for e in eps if isinstance(e, float)), default=None) if adam else None
        for finding in rules.find_gradient_scale(self._history, eps=smallest):
            if finding.cause not in self._told:
                self._told.add(finding.cause or "")
                self._report.add(finding, step=max(1, state.step))

    def _tell_zero(self, state: RunState) -> None:
        """Proved causes at once; without one, only after eight looks at zero over at least sixty steps."""
        suspects = {n: s for n, s in self._ask_cause.items() if n not in self._told}
        ready = [
            n
            for n, s in suspects.items()
            if (c := self._causes.get(n)) is not None and ((c.proved and len(s) >= 3) or len(s) >= 8)
        ]
        ready += [n for n, s in suspects.items() if n not in self._causes and len(s) >= 8 and s[-1] - s[0] >= 60]
        if not ready:
            return
        self._told.update(ready)
        weights = [h.name for h in self._watch.coverage.trained if (t := h.tensor) is not None and t.dim() >= 2]
        first = min(suspects[n][0] for n in ready)
        for finding in rules.find_zero_grads(
            ready, self._causes, self._lines, steps=state.step - first + 1, weights=weights
        ):
            finding.first_step = first
            self._report.add(finding, step=max(1, state.step))

    def _judge_updates(
        self,
        state: RunState,
        step: int,
        facts: list[tuple[str, float, str]],
        changed: list[bool],
        grads: Mapping[str, float],
    ) -> None:
        self._peak_rate = max(self._peak_rate, *(rate for _, rate, _ in facts))
        typical = sorted(grads.values())[len(grads) // 2] if grads else 0.0
        for (name, rate, dtype), moved in zip(facts, changed, strict=True):
            late = 0.0 < rate < 0.01 * self._peak_rate  # the end of a schedule: small updates are meant
            # A bias before a normalisation has a gradient of rounding errors, and no update by right.
            noise = dtype == "float32" and rate and grads.get(name, 0.0) < 1e-4 * typical
            if moved or late or noise or not 0.0 < grads.get(name, 0.0) < float("inf"):
                self._still.pop(name, None)
            else:
                self._still.setdefault(name, []).append(step)
        zero_rate = all(rate == 0.0 for _, rate, _ in facts)
        still = [
            n for n, steps in self._still.items()
            if n not in self._told and len(steps) >= 3 and steps[-1] - steps[0] >= 6
        ]  # fmt: skip
        if not still:
            return
        rates = {name: rate for name, rate, _ in facts}
        dtype = next((d for name, _, d in facts if name == still[0]), "float32")
        self._told.update(still)
        first = min(self._still[n][0] for n in still)
        for finding in rules.find_no_updates(
            still, steps=step - first + 1, rates=rates, dtype=dtype, all_groups=zero_rate
        ):
            finding.first_step = first
            self._report.add(finding, step=max(1, state.step))


class StaleGradientGuard(Callback):
    """P209: an optimizer steps on gradients that nothing cleared since its last step.

    One parameter per optimizer is watched by the identity of its gradient. A gradient that is the same object at every
    backward between two steps is read once (is it zero?) at the first steps and then at every 64th.
    """

    def __init__(self, report: Report, watch: Watch) -> None:
        self._report, self._watch = report, watch
        self._probes: dict[str, tuple[str, weakref.ref[Tensor]]] = {}
        self._marks: dict[str, weakref.ref[Tensor]] = {}
        self._proved: set[str] = set()
        self._hits: dict[str, int] = {}
        self._version = -1
        self.source: SourceLine | None = None
        """Line of the last backward, where a driver knows it."""

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        if event.kind == "backward":
            self.source = event.source

    def on_backward_start(self, state: RunState) -> None:
        if not self._marks:
            return
        for name, mark in list(self._marks.items()):
            tensor = self._probes[name][1]()
            grad = tensor.grad if tensor is not None else None
            if grad is None or mark() is not grad or not bool(grad.any()):  # a host sync, on the steps of _reads_after
                del self._marks[name]
                self._proved.discard(name)
            else:
                self._proved.add(name)

    def on_backward_end(self, state: RunState) -> None:
        if not self._proved:
            return
        for name in state.stepping or tuple(state.optimizers):
            if name in self._proved and name in self._marks:
                self._hits[name] = self._hits.get(name, 0) + 1
                if self._hits[name] == 2:
                    label = self._probes[name][0]
                    self._report.add(rules.stale_finding(name, [label], self.source), step=max(1, state.current_step))

    def on_step_end(self, state: RunState) -> None:
        if not _reads_after(state.step):
            return
        if self._version != self._watch.version:
            self._choose()
        self._proved.clear()
        marks: dict[str, weakref.ref[Tensor]] = {}
        for name, (_, ref) in self._probes.items():
            tensor = ref()
            grad = tensor.grad if tensor is not None else None
            if grad is not None and _plain(grad):
                marks[name] = weakref.ref(grad)
        self._marks = marks

    def _choose(self) -> None:
        """The first parameter of each optimizer that has a gradient now."""
        self._version = self._watch.version
        coverage = self._watch.coverage
        self._probes = {}
        for held in coverage.trained:
            tensor = held.tensor
            if tensor is not None and tensor.grad is not None:
                self._probes.setdefault(coverage.owner[id(tensor)], (held.name, held.ref))


def _reads_after(step: int) -> bool:
    """After these steps the gradients that are left are looked at, until the next step."""
    return step <= 4 or step % 64 <= 1


def _note_arrival(arrived: set[str], name: str, grad: Tensor | None) -> None:
    """Hook of a parameter: backward brought it a gradient."""
    if grad is not None:
        arrived.add(name)


def _plain(tensor: Tensor) -> bool:
    """An ordinary dense tensor: sparse and distributed ones are not measured here."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _frames_compiled() -> int:
    """How often torch.compile has compiled: under a function mode it would have to compile again."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"].get("total", 0)) if utils is not None else 0


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def gradient_guards(report: Report, *, may_look: bool = True, patience: int = 100) -> list[Callback]:
    """The guards of this file, in the order they must run."""
    watch = Watch(report, may_look=may_look)
    return [
        watch,
        MissingGradientGuard(report, watch, patience=patience),
        NumbersGuard(report, watch),
        StaleGradientGuard(report, watch),
    ]
