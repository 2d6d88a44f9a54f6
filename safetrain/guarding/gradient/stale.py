"""P209: gradients that nothing cleared."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report, SourceLine
from safetrain.guarding.gradient.sampling import is_plain
from safetrain.guarding.gradient.watch import Watch
from safetrain.rules import gradient as rules

if TYPE_CHECKING:
    from safetrain.foreign.events import LoopEvent
    from safetrain.state import RunState


class StaleGradientGuard(Callback):
    """P209: an optimizer steps on gradients that nothing cleared since its last step.

    One parameter per optimizer is watched by the identity of its gradient. A gradient that is the same object at every
    backward between two steps is read once (is it zero?) at the first steps and then at every 64th.
    """

    sampled_hooks = STEP_HOOKS

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
            if name in self._proved and name in self._marks and self._holds(state, name):
                self._hits[name] = self._hits.get(name, 0) + 1
                if self._hits[name] == 2:
                    label = self._probes[name][0]
                    self._report.add(rules.stale_finding(name, [label], self.source), step=max(1, state.current_step))

    def _holds(self, state: RunState, name: str) -> bool:
        """Whether the optimizer of that name steps on the watched one: loops make both anew for each task."""
        optimizer, watched = state.optimizers.get(name), self._probes[name][1]()
        return optimizer is None or any(p is watched for group in optimizer.param_groups for p in group["params"])

    def on_step_end(self, state: RunState) -> None:
        if not _reads_after(state.step):
            return
        if self._version != self._watch.version or len(self._probes) < len(state.optimizers):
            self._choose()
        self._proved.clear()
        marks: dict[str, weakref.ref[Tensor]] = {}
        for name, (_, ref) in self._probes.items():
            tensor = ref()
            grad = tensor.grad if tensor is not None else None
            if grad is not None and is_plain(grad):
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
