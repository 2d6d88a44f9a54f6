"""P201 late in a run: parameters that had a gradient in every step and get none any more."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report
from safetrain.guarding.coverage import held_by
from safetrain.guarding.gradient.arrivals import Arrivals
from safetrain.guarding.gradient.watch import Watch
from safetrain.recording.path_look import PathLook, WhyNoGradient
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.state import RunState

_REGULAR = 10
"""Steps of its optimizer in each of which a parameter must have had a gradient before its loss says something."""
_FIRST_LOOK = 10
_MOST_LOOKS = 12
_ENOUGH = 20
"""Steps of its optimizer without a gradient: enough at the end of a run."""
_WAIT_LEAST, _WAIT_MOST = 100, 300
_MOST_WATCHED = 2000
"""Steps of a run that are sampled for this guard's sake."""


@dataclass(slots=True, eq=False)
class _Followed:
    """A parameter that an optimizer holds. Steps are counted from 1; 0: none yet."""

    name: str
    ref: weakref.ref[Tensor]
    owner: str
    first: int = 0
    """The step in which it was first seen with a gradient."""
    turns: int = 0
    """Steps of its optimizer that were seen then; of those without a gradient, once `since` is set."""
    last: int = 0
    since: int = 0
    epoch: int = -1
    """The epoch in which it was lost, where that was at an epoch's start."""
    version: int = 0
    moved: bool = False
    looks: int = 0
    verdict: WhyNoGradient | None = None


class LostGradientGuard(Callback):
    """P201 late in a run. A tenth of a microsecond a parameter in sampled steps.

    Judged are parameters that had a gradient in each step of their optimizer that was seen, and then have none in any
    step for as long as they had one before, but at least 100 and at most 300 steps. Those that come and go (experts,
    stochastic depth, turns) are never judged again, nor are frozen ones, or those that something else writes to. What
    is lost as an epoch begins may be a schedule's: it must not return for two epochs. Every step is sampled meanwhile.
    One warning a run, and one note.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report, watch: Watch) -> None:
        self._report, self._watch = report, watch
        self._version = -1
        self._known: dict[int, _Followed] = {}
        self._regular: dict[str, list[_Followed]] = {}
        """By optimizer, those that had a gradient in each of its steps so far."""
        self._fresh: dict[str, list[_Followed]] = {}
        """Those that had none yet."""
        self._turns: dict[str, int] = {}
        self._micro_step: dict[str, int] = {}
        self._last_seen: dict[str, tuple[int, int]] = {}
        """(step, epoch) of each optimizer's last step that was seen."""
        self._suspects: dict[str, _Followed] = {}
        self._arrivals = Arrivals()
        self._stepped: set[str] = set()
        self._watched = 0
        self._noted = self._done = False

    def on_backward_end(self, state: RunState) -> None:
        if self._done:
            return
        if self._watch.version != self._version:
            self._join()
        for owner in state.stepping or tuple(state.optimizers):
            # A step without a backward before it (gradients that were not finite and were cleared) tells nothing.
            if (owner in self._regular or owner in self._fresh) and state.micro_step != self._micro_step.get(owner):
                self._micro_step[owner] = state.micro_step
                self._stepped.add(owner)
                self._see(owner, state)

    def _join(self) -> None:
        self._version = self._watch.version
        coverage = self._watch.coverage
        shared = {id(held.tensor) for held, _ in coverage.shared}  # what one optimizer misses another may use
        self._known = {key: followed for key, followed in self._known.items() if followed.ref() is not None}
        self._regular.clear()
        self._fresh.clear()
        regular = set()
        for held in coverage.trained:
            tensor = held.tensor
            if tensor is None or id(tensor) in shared:
                continue
            owner, followed = coverage.owner[id(tensor)], self._known.get(id(tensor))
            if followed is None or followed.ref() is not tensor or followed.owner != owner:
                followed = self._known[id(tensor)] = _Followed(held.name, held.ref, owner)
            followed.name = held.name  # a foreign loop's models get their names as they are found
            if followed.first >= 0:
                (self._regular if followed.first else self._fresh).setdefault(owner, []).append(followed)
                regular.add(followed)
        self._suspects = {f.name: f for f in self._suspects.values() if f in regular}

    def _see(self, owner: str, state: RunState) -> None:
        step = state.current_step
        turn = self._turns[owner] = self._turns.get(owner, 0) + 1
        for followed in self._fresh.pop(owner, ()):
            tensor = followed.ref()
            if tensor is not None and tensor.grad is not None:
                followed.first, followed.turns = step, turn
                self._regular.setdefault(owner, []).append(followed)
            else:
                self._fresh.setdefault(owner, []).append(followed)
        regular = self._regular.get(owner, [])
        without = [f for f in regular if (t := f.ref()) is not None and t.grad is None]
        for followed in without:
            self._miss(followed, turn, state)
        for followed in [f for f in self._suspects.values() if f.owner == owner and f not in without]:
            self._drop(followed)  # it comes and goes, or is gone
        if without:
            self._regular[owner] = [f for f in regular if f.first > 0]
        self._last_seen[owner] = (step, state.epoch)

    def _miss(self, followed: _Followed, turn: int, state: RunState) -> None:
        """It has no gradient in this step."""
        tensor = followed.ref()
        if tensor is None or not tensor.requires_grad:
            self._drop(followed)
        elif followed.since:
            followed.turns += 1
        elif turn - followed.turns < _REGULAR:
            self._drop(followed)
        else:
            followed.last, epoch = self._last_seen.get(followed.owner, (0, state.epoch))
            followed.since, followed.turns, followed.version = state.current_step, 1, tensor._version
            followed.epoch = state.epoch if epoch != state.epoch else -1
            self._suspects[followed.name] = followed

    def _drop(self, followed: _Followed) -> None:
        followed.first = -1
        self._suspects.pop(followed.name, None)

    def on_step_end(self, state: RunState) -> None:
        if not self._suspects and not self._arrivals.listens:
            return
        stepped, self._stepped = self._stepped, set()
        for name in self._arrivals.stop():
            if name in self._suspects:
                self._drop(self._suspects[name])  # cleared before it can be seen
        if not self._suspects:
            return
        for followed in self._suspects.values():
            tensor = followed.ref()
            followed.moved |= tensor is not None and tensor._version != followed.version
        if self._watch.finished is not None and self._watch.finished.saw_a_loss:
            self._take(self._watch.finished, stepped)
        if self._watched < _MOST_WATCHED:
            self._watched += 1
            state.request_samples(1)
        due = [f for f in self._suspects.values() if self._is_due(f, state)]
        if due:
            self._tell(due, state)
        elif asking := [f for f in self._suspects.values() if self._wants_look(f)]:
            for followed in asking:
                self._arrivals.watch(followed.name, followed.ref())
            self._watch.request_look(state)

    def _take(self, look: PathLook, stepped: set[str]) -> None:
        known = set(look.names)
        for followed in self._suspects.values():
            if followed.owner in stepped and followed.name in known:
                followed.verdict = verdict = look.why(followed.name)
                if verdict.cut is not None:  # a term that is constant because of this: one fault
                    self._watch.explained.update(t.source for t in look.terms if t.cut is verdict.cut)

    def _wants_look(self, followed: _Followed) -> bool:
        """Again, while looks fell on steps of other optimizers."""
        wanted = followed.verdict is None and followed.turns >= _FIRST_LOOK and followed.looks < _MOST_LOOKS
        followed.looks += wanted
        return wanted

    def _is_due(self, followed: _Followed, state: RunState) -> bool:
        if followed.turns < _ENOUGH or (followed.verdict is None and followed.looks < _MOST_LOOKS):
            return False
        absent, present = state.step - followed.since + 1, followed.since - followed.first
        return absent >= min(max(present, _WAIT_LEAST), _WAIT_MOST) and not _may_be_a_phase(followed, state)

    def on_exception(self, state: RunState) -> None:
        self._arrivals.stop()

    def on_fit_end(self, state: RunState) -> None:
        self._arrivals.stop()
        due = [f for f in self._suspects.values() if f.turns >= _ENOUGH and not _may_be_a_phase(f, state)]
        if due:
            self._tell(due, state)

    def _tell(self, lost: list[_Followed], state: RunState) -> None:
        held = {id(p) for _, _, p in held_by(state.optimizers)}  # empty once a script has ended
        verdicts: dict[str, WhyNoGradient | None] = {}
        for followed in lost:
            self._drop(followed)
            tensor = followed.ref()
            still = tensor is None or (
                tensor.requires_grad and tensor.grad is None and (id(tensor) in held or not held)
            )
            if still and not followed.moved:
                verdicts[followed.name] = followed.verdict
        steps = {f.name: (f.last, f.since) for f in lost}
        findings = rules.explain_lost(verdicts, state.model, steps)
        self._report.extend([f for f in findings if f.severity != "note" or not self._noted], step=max(1, state.step))
        self._noted |= bool(findings)
        if any(f.severity != "note" for f in findings):
            self._done = True
            self._suspects.clear()


def _may_be_a_phase(followed: _Followed, state: RunState) -> bool:
    """It was lost as an epoch began, and not for longer than it had been there or for two epochs."""
    absent, present = state.step - followed.since + 1, followed.since - followed.first
    return followed.epoch >= 0 and absent < present and state.epoch < followed.epoch + 2
