"""The guard over finite numbers: a loss or gradient that turns Inf or NaN is traced to where it began."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from safetrain.callbacks.base import Callback
from safetrain.errors import NonFiniteError
from safetrain.rules.autopsy import (
    explain_nonfinite,
    explain_nonfinite_calls,
    find_nonfinite_gradients,
    find_nonfinite_loss,
    unexplained_loss,
)
from safetrain.source import user_frame

if TYPE_CHECKING:
    from safetrain.findings import Finding, Report
    from safetrain.foreign.module_call import ModuleCall
    from safetrain.state import RunState

_log = logging.getLogger("safetrain")
_SHORT = 64


def finite_guard(report: Report, *, gated: bool) -> Callback:
    """P206 and P211, once a run; `gated`: the driver keeps Inf and NaN from the weights and tells by `on_skip`."""
    return GateGuard(report) if gated else FiniteGuard(report)


class _Explainer(Callback):
    """Explains, once a run, a step whose gradients are not finite."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._told = False
        self._pending: list[Finding] = []

    def _explain(self, state: RunState) -> None:
        self._told = True
        finding = _by_replay(state)
        if finding is None and len(calls := state.module_calls(None)) > 1:
            finding = _by_replays(state, calls, "P206")
        if finding is None and state.loss is not None:
            finding = unexplained_loss(state.loss)
        self._pending = [finding] if finding is not None else find_nonfinite_gradients(state.model)

    def on_step_end(self, state: RunState) -> None:
        """Report what the gradient showed."""
        if self._pending:
            self.report.extend(self._pending, step=state.current_step)
            self._pending = []

    def on_exception(self, state: RunState) -> None:
        """The same, unless the error is about just this: then its explanation says it."""
        if not isinstance(state.exception, NonFiniteError) or state.replay is None:
            self.on_step_end(state)


class GateGuard(_Explainer):
    """P206 and P211 where the driver has a gate of its own: it sees every gradient, and nothing is read for them.

    A loss that is not finite while its gradients are (a constant term, a mean over nothing) passes that gate. It shows
    in a logged row; the next step is then looked at. On CPU the loss is also read on sampled steps.
    """

    sampled_hooks = frozenset({"on_backward_end"})

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._suspect = False

    def on_log(self, state: RunState) -> None:
        """A logged loss is a number already."""
        if not self._told and state.scaler is None and not math.isfinite(state.row.get("train/loss", 0.0)):
            self._suspect = True
            state.request_samples(1)

    def on_backward_end(self, state: RunState) -> None:
        """Look at the loss of a sampled step."""
        loss = state.loss
        if self._told or loss is None or not (self._suspect or _may_read(loss, state)):
            return
        number = _only(loss.tolist())
        if not math.isfinite(number) and (state.scaler is None or math.isnan(number)):
            self._explain(state)  # a scaled loss may overflow: the scaler skips that step

    def on_skip(self, state: RunState) -> None:
        """The gate kept a step from the weights."""
        if not self._told:
            self._explain(state)


class FiniteGuard(_Explainer):
    """P206 and P211 where there is none: reads one number of the loss before each backward, and of a gradient after.

    A small one of an early layer, which gets its gradient last, so what went wrong on the way is in it. On CPU these
    are memory reads (4 µs a step); on other devices they are made on logging steps only. Under loss scaling gradients
    are left to the scaler.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._probe: weakref.ref[Tensor] | None = None

    def on_backward_start(self, state: RunState) -> None:
        """Look at the loss."""
        loss = state.micro_loss
        if self._told or loss is None or not _may_read(loss, state) or loss.numel() != 1:
            return
        number = _only(loss.detach().tolist())
        if math.isfinite(number) or (state.scaler is not None and math.isinf(number)):
            return  # a scaled loss may overflow: the scaler skips that step and scales less
        self._told = True
        finding = _by_replay(state)
        calls = state.module_calls(loss)
        if finding is None and len(calls) > 1:
            finding = _by_replays(state, calls, "P211")
        if finding is None or finding.code != "P211":  # the fault is outside what can be replayed
            finding = find_nonfinite_loss(state.model, loss, frame=user_frame(), calls=calls)
        if finding is not None:
            self.report.add(finding, step=state.current_step)

    def on_backward_end(self, state: RunState) -> None:
        """Look at one gradient."""
        if self._told or state.scaler is not None:
            return
        probe = self._probe() if self._probe is not None else None
        if probe is None or probe.grad is None:
            probe = self._choose_probe(state)
        if probe is None or probe.grad is None or not _may_read(probe.grad, state):
            return
        if not math.isfinite(_total(probe.grad)):
            self._explain(state)

    def _choose_probe(self, state: RunState) -> Tensor | None:
        early = [p for p in state.model.parameters() if p.grad is not None and not p.grad.is_sparse][:2]
        probe = min(early, key=lambda p: p.numel(), default=None)
        self._probe = weakref.ref(probe) if probe is not None else None
        return probe


def _by_replay(state: RunState) -> Finding | None:
    if state.replay is None:
        return None
    try:
        return explain_nonfinite(state.model, state.replay)
    except Exception as error:
        _log.debug("the step could not be replayed: %s", error)
        return None


def _by_replays(state: RunState, calls: Sequence[ModuleCall], code: str) -> Finding | None:
    try:
        return explain_nonfinite_calls(state.model, calls, code=code)
    except Exception as error:
        _log.debug("the step's module calls could not be replayed: %s", error)
        return None


def _total(gradient: Tensor) -> float:
    """The sum of a gradient; NaN or Inf when an entry is. For a short one on the CPU plain numbers are quicker."""
    if gradient.is_complex():
        gradient = gradient.detach().abs()
    if gradient.dim() == 1 and gradient.numel() <= _SHORT and gradient.is_cpu:
        return float(sum(gradient.tolist()))
    return _only(gradient.detach().sum(dtype=torch.float32).tolist())


def _may_read(tensor: Tensor, state: RunState) -> bool:
    return tensor.is_cpu or state.is_logging_step


def _only(value: object) -> float:
    while isinstance(value, list):
        value = value[0]
    return float(value)  # type: ignore[arg-type]
