"""P201, L506 and G109: parameters without gradient, with the cause."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report
from safetrain.guarding.gradient.arrivals import Arrivals
from safetrain.guarding.gradient.watch import Watch
from safetrain.recording.path_look import PathLook, WhyNoGradient
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.state import RunState


class MissingGradientGuard(Callback):
    """P201 with its cause, L506, and G109: which parameters got no gradient, and where the path was cut.

    A cut that no schedule can undo is reported as soon as a look proved it. What may be a late start (a branch not
    called yet, an unused result, a no_grad block, detach) waits `patience` steps (`soft_patience` when the cut was
    seen), or for the end of a run of at least `min_steps`. `first_step` is the step since which it had no gradient.
    While one is without, every step is sampled.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(
        self, report: Report, watch: Watch, *, patience: int = 100, soft_patience: int = 20, min_steps: int = 4
    ) -> None:
        self._report, self._watch = report, watch
        self._patience, self._soft, self._min = patience, soft_patience, min_steps
        self._pending: dict[str, tuple[weakref.ref[Tensor], int, int]] = {}  # name -> (parameter, since, version then)
        self._verdicts: dict[str, WhyNoGradient] = {}
        self._moved: set[str] = set()
        """Pending ones that were written to by hand. A script's model is gone when its run ends: note it before."""
        self._owners: dict[str, str | None] = {}
        self._stepped: set[str] = set()
        self._version = -1
        self._joined: set[int] = set()
        self._look_at = 3
        self._looked_for_terms = False
        self._arrivals = Arrivals()

    def on_backward_start(self, state: RunState) -> None:
        if not self._looked_for_terms and state.step < 2:
            loss = state.micro_loss
            if loss is not None and rules.may_have_constant_term(loss):
                self._looked_for_terms = True
                self._watch.request_look()

    def on_backward_end(self, state: RunState) -> None:
        if self._watch.version != self._version:
            self._join(state)
        self._stepped.update(state.stepping or state.optimizers)
        if self._pending:
            for name, (ref, _, _) in list(self._pending.items()):
                tensor = ref()
                if tensor is None or tensor.grad is not None or not tensor.requires_grad:
                    del self._pending[name]
                    self._verdicts.pop(name, None)

    def on_step_end(self, state: RunState) -> None:
        look = self._watch.finished
        self._drop_arrived()
        if look is not None:
            self._take(look, state)
        if not self._pending:
            return
        self._moved |= {n for n, (ref, _, v) in self._pending.items() if (t := ref()) is not None and t._version != v}
        state.request_samples(1)  # a gradient that comes in between must be seen
        step = state.step
        if step >= self._look_at:
            self._look_at = step + (5 if step < 8 else 12 if step < 20 else self._patience)
            for name, (ref, _, _) in self._pending.items():
                self._arrivals.watch(name, ref())
            self._watch.request_look(state)
        due = [
            name
            for name, (_, since, _) in self._pending.items()
            if step - since + 1 >= self._wait_for(self._verdicts.get(name))
        ]
        if due:
            self._tell(due, state)

    def on_exception(self, state: RunState) -> None:
        self._drop_arrived()

    def on_fit_end(self, state: RunState) -> None:
        self._drop_arrived()
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
            self._owners[held.name] = self._watch.coverage.owner.get(id(tensor))
        if self._pending:
            self._look_at = min(max(self._look_at, step), step + 1) if step > 1 else 2

    def _wait_for(self, verdict: WhyNoGradient | None) -> int:
        if verdict is None or verdict.cut is None:
            return self._patience if verdict is None or verdict.kind != "backward_gave_none" else 5
        return 2 if verdict.cut.is_hard else self._soft

    def _take(self, look: PathLook, state: RunState) -> None:
        if look.saw_a_loss:
            known = set(look.names)
            self._verdicts.update({name: look.why(name) for name in self._pending if name in known})
        cuts = {id(v.cut) for v in self._verdicts.values() if v.cut is not None}
        explained = self._watch.explained
        explained.update(t.source for t in look.terms if id(t.cut) in cuts)  # constant because of P201: one fault
        terms = [t for t in look.terms if t.source not in explained]
        self._report.extend(rules.find_constant_terms(terms), step=max(1, state.step))

    def _drop_arrived(self) -> None:
        """Backward did bring them a gradient: it is cleared before it can be seen."""
        for name in self._arrivals.stop():
            self._pending.pop(name, None)
            self._verdicts.pop(name, None)

    def _tell(self, names: list[str], state: RunState) -> None:
        since = {n: self._pending[n][1] for n in names}
        verdicts: dict[str, WhyNoGradient | None] = {}
        for name in names:
            tensor = self._pending.pop(name)[0]()
            lacks = tensor.grad is None if tensor is not None else self._owners[name] in self._stepped
            if lacks and name not in self._moved:
                verdicts[name] = self._verdicts.get(name)  # changed by hand: a moving average or a copy, not forgotten
        for finding in rules.explain_missing(verdicts, state.model):
            finding.first_step = min(since[n] for n in finding.params)
            self._report.add(finding, step=max(1, state.step))
