"""Explain a failed step down to the user's line, and screen the first one for wrong results that raise no error.

`explain(error, …)` turns an autograd error into a `Finding`, from a record of the step, a replay of the micro-batch, or
what the graph and the source say (then it says that it inferred). `Screen` records one step while it runs, changes
none of its results, and finds what goes wrong silently. `AutopsyGuard` does both for any driver.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.callbacks.base import Callback
from safetrain.errors import BatchError, NonFiniteError, add_note
from safetrain.findings import Finding, Report, Rule, SourceLine
from safetrain.recording.recorder import Recorder, can_leave
from safetrain.recording.replay import unchanged
from safetrain.recording.saved import nodes_of, saved_by
from safetrain.rules.autopsy import (
    AliasWatcher,
    Failure,
    LeafWatcher,
    RandomWatcher,
    catalogue,
    explain_backward_twice,
    explain_inference_tensor,
    explain_inplace_modified,
    explain_leaf_inplace,
    explain_no_graph,
    explain_non_scalar,
    explain_nonfinite,
    explain_recompute_mismatch,
    find_recompute_differences,
    find_silent_writes,
    frames_of,
    loss_in,
)

if TYPE_CHECKING:
    from safetrain.state import RunState

__all__ = ["AutopsyGuard", "Screen", "attach", "can_explain", "explain"]

_next_node = torch._C._autograd._get_sequence_nr
_log = logging.getLogger("safetrain")

_EXPLAINERS: tuple[tuple[str, Callable[[Failure], Finding]], ...] = (
    ("backward through the graph a second time", explain_backward_twice),
    ("modified by an inplace operation", explain_inplace_modified),
    ("is a view and is being modified inplace", explain_inplace_modified),
    ("is a view and its base or another view of its base has been modified inplace", explain_inplace_modified),
    ("leaf Variable that requires grad is being used in an in-place operation", explain_leaf_inplace),
    ("leaf Variable that requires grad has been used in an in-place operation", explain_leaf_inplace),
    ("does not require grad and does not have a grad_fn", explain_no_graph),
    ("grad can be implicitly created only for scalar outputs", explain_non_scalar),
    ("torch.utils.checkpoint: ", explain_recompute_mismatch),
    ("nference tensor", explain_inference_tensor),
)
_RULES: dict[Callable[[Failure], Finding], Rule] = {
    explain_backward_twice: catalogue.BACKWARD_TWICE,
    explain_inplace_modified: catalogue.INPLACE_MODIFIED,
    explain_leaf_inplace: catalogue.LEAF_INPLACE,
    explain_no_graph: catalogue.NO_GRAPH,
    explain_non_scalar: catalogue.NON_SCALAR,
    explain_recompute_mismatch: catalogue.RECOMPUTE_MISMATCH,
    explain_inference_tensor: catalogue.INFERENCE_TENSOR,
}
_WORTH_A_REPLAY = (explain_inplace_modified, explain_no_graph, explain_non_scalar, explain_recompute_mismatch)


def _explainer(error: BaseException) -> Callable[[Failure], Finding] | None:
    if not isinstance(error, (RuntimeError, BatchError)):
        return None  # torch raises no other kind for these
    text = str(error)
    return next((explainer for needle, explainer in _EXPLAINERS if needle in text), None)


def can_explain(error: BaseException) -> bool:
    """Whether `explain` knows this kind of error."""
    return isinstance(error, NonFiniteError) or _explainer(error) is not None


def explain(
    error: BaseException,
    *,
    model: nn.Module,
    replay: Callable[[], Tensor] | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    record: Recorder | None = None,
    first_node: int | None = None,
    gradients_off_at: SourceLine | None = None,
    scale: float = 1.0,
) -> Finding | None:
    """What made a step fail, in the user's words: the line, the object, the operation, one fix. None for other errors.

    Args:
        replay: runs the failed micro-batch forward again and returns its loss. It is called at most once, with
            generators, gradients, buffers, parameters and modes put back afterwards. Without it (or where a replay
            cannot show the fault) the cause is inferred from the traceback, the graph and the source, and says so.
        record: operations of the failed step, if they were recorded; then nothing is replayed.
        first_node: autograd's counter when the previous backward began: nodes below it belong to an earlier graph.
        gradients_off_at: the line that last switched grad mode off, where the driver knows it.
        scale: what the loss is multiplied with before backward (loss scaling).

    Host syncs freely: the run has failed already.
    """
    if isinstance(error, NonFiniteError):
        return explain_nonfinite(model, replay, scale=scale) if replay is not None else None
    explainer = _explainer(error)
    if explainer is None:
        return None
    frames = frames_of(error)
    failure = Failure(
        error=error,
        model=model,
        optimizers=dict(optimizers or {}),
        record=record,
        loss=loss_in(frames),
        first_node=first_node,
        gradients_off_at=gradients_off_at,
        frames=frames,
    )
    if record is not None and failure.loss is not None and not _covers(record, failure.loss):
        failure.record = None
    if failure.record is None and replay is not None and explainer in _WORTH_A_REPLAY:
        return _replayed(failure, explainer, replay)
    return _judged(explainer, failure)


def _judged(explainer: Callable[[Failure], Finding], failure: Failure) -> Finding:
    """The explanation; when that itself goes wrong, at least which rule it is and the user's line."""
    try:
        return explainer(failure)
    except Exception as problem:
        _log.warning("safetrain could not explain %s in full", type(failure.error).__name__, exc_info=True)
        first_line = failure.text.strip().split("\n", 1)[0][:200]
        cause = f"not known: the explanation failed ({type(problem).__name__})"
        return _RULES[explainer].finding(first_line, source=failure.source, cause=cause)


def _covers(record: Recorder, loss: Tensor) -> bool:
    """Whether a loss was made during the record."""
    if loss.grad_fn is None:
        return record.producer(loss) >= 0
    return record.maker(loss.grad_fn) is not None


def _replayed(failure: Failure, explainer: Callable[[Failure], Finding], replay: Callable[[], Tensor]) -> Finding:
    """Explain from a record of the micro-batch run again. The finding of the replay when it showed the fault."""
    with unchanged(failure.model):
        if explainer is explain_no_graph:
            torch.set_grad_enabled(True)  # the failed step may have left it off; the replay shows who switches it
        record = Recorder(failure.model, replay=True)
        loss: Tensor | None = None
        try:
            with record:
                loss = replay()
                if explainer is explain_recompute_mismatch:
                    torch.autograd.backward(loss.sum())
        except Exception as error:
            if _explainer(error) is not explainer:
                _log.debug("the replay failed in another way: %s", error)
                return _judged(explainer, failure)
        mine = loss if loss is not None else failure.loss
        shown = loss is None or _shows(explainer, loss, failure)
        if shown and mine is not None:
            failure.record, failure.loss = record, mine
        if explainer is explain_no_graph and not shown:
            torch.set_grad_enabled(False)
        return _judged(explainer, failure)


def _shows(explainer: Callable[[Failure], Finding], loss: Tensor, failure: Failure) -> bool:
    """Whether the replay met the fault. A foreign loop's replay gives the model's output and may not reach it."""
    if explainer is explain_no_graph:
        return not loss.requires_grad
    if explainer is explain_non_scalar:
        return failure.loss is None or failure.loss.shape == loss.shape
    if explainer is explain_inplace_modified:
        return any(s.condition == "changed" for node in nodes_of(loss.grad_fn) for s in saved_by(node))
    return True


def attach(error: BaseException, finding: Finding) -> None:
    """Put the explanation under the error's own message in its traceback."""
    where = f"\n  at {finding.source.file}:{finding.source.line}: {finding.source.text}" if finding.source else ""
    note = f"safetrain {finding.code} {finding.name}: {finding.message}{where}" + (
        f"\n  fix: {finding.fix}" if finding.fix else ""
    )
    add_note(error, note)


class Screen:
    """Records one step as it runs and finds wrong results that raise no error (G126, G128, G129).

    `start()` before the forward, `before_backward(loss)` before each backward, `stop()` after the step, then
    `findings()`. Results of the step stay the same to the bit. Costs about 50 µs an operation, for that step only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._random = RandomWatcher()
        self._alias = AliasWatcher()
        self._leaves = LeafWatcher()
        self.record = Recorder(model, watchers=(self._random, self._alias, self._leaves))
        self._random.record = self._alias.record = self.record
        self.elapsed_s = 0.0
        """How long the screened step took; zero until `stop`."""
        self._model = weakref.ref(model)
        self._findings: list[Finding] = []
        self._started_at: float | None = None

    @property
    def running(self) -> bool:
        """Between `start` and `stop`."""
        return self._started_at is not None

    def start(self) -> None:
        """Begin to record."""
        self._started_at = time.perf_counter()
        self.record.__enter__()

    def before_backward(self, loss: Tensor) -> None:
        """Judge the graph of a loss while what it saved is still there."""
        model = self._model()
        if model is None:
            return
        self.record.suspended = True
        try:
            self._findings += find_silent_writes(self.record, loss, model, self._leaves)
        finally:
            self.record.suspended = self.record.failed

    def stop(self) -> bool:
        """End the record. False when the user's code is inside a mode of its own just now: call again later."""
        if self._started_at is None:
            return True
        if not can_leave(self.record):
            self.record.suspended = True
            return False
        self.record.__exit__(None, None, None)
        self.elapsed_s = time.perf_counter() - self._started_at
        self._started_at = None
        return True

    def findings(self, *, failed: bool = False) -> list[Finding]:
        """What was found. A few host syncs, only where something was suspected.

        When the step has `failed`, its recomputations are left out: the error tells of them, or cut them short.
        """
        if self.record.failed:
            return []
        recomputed = [] if failed else self._random.findings() or find_recompute_differences(self.record)
        return [*self._findings, *recomputed, *self._alias.findings()]


def can_screen(model: nn.Module) -> bool:
    """Whether a record of this model shows anything and disturbs nothing: not compiled as a whole, not sharded."""
    if getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod"):
        return False
    if any(type(p).__name__ == "DTensor" or type(p.data).__name__ == "DTensor" for p in model.parameters()):
        return False
    # Older versions give up a compiled frame for good when it meets a dispatch mode.
    compiled_inside = any(m._compiled_call_impl is not None for m in model.modules())
    return not compiled_inside or hasattr(Recorder.__mro__[1], "ignore_compile_internals")


class AutopsyGuard(Callback):
    """G121 to G129: screens the first step and explains what ends a run. Later it costs a counter read a backward."""

    sampled_hooks = frozenset({"on_step_start", "on_step_end"})

    def __init__(self, report: Report, *, screen: bool = True) -> None:
        self.report = report
        self.screen_elapsed_s = 0.0
        """What the screened step took, recording included."""
        self._screens = screen
        self._screen: Screen | None = None
        self._record: Recorder | None = None  # of the first step, kept until the second has ended: it holds no tensor
        self._earlier_backward = self._last_backward = 0

    def on_step_start(self, state: RunState) -> None:
        """Start the screen in the first step of the run. One that could not be ended with it ends now."""
        if self._screen is not None:
            self._finish_screen(state)
        if self._screens:
            self._screens = False
            if can_screen(state.model):
                self._screen = Screen(state.model)
                self._screen.start()

    def on_backward_start(self, state: RunState) -> None:
        """Note where this graph ends; judge it in the first step."""
        self._earlier_backward = self._last_backward
        self._last_backward = _next_node()
        if self._screen is not None and self._screen.running and state.micro_loss is not None:
            try:
                self._screen.before_backward(state.micro_loss)
            except Exception:
                self._give_up()

    def on_step_end(self, state: RunState) -> None:
        """Report what the first step showed."""
        self._record = None
        if self._screen is not None:
            self._finish_screen(state)

    def _finish_screen(self, state: RunState, *, failed: bool = False) -> None:
        screen = self._screen
        if screen is None or not screen.stop():
            return
        self._screen, self._record = None, screen.record
        self.screen_elapsed_s = screen.elapsed_s
        try:
            findings = screen.findings(failed=failed)
        except Exception:
            self._give_up()
            return
        self.report.extend(findings, step=state.current_step)

    def _give_up(self) -> None:
        """A fault of the screen must not become one of the run."""
        _log.warning("safetrain could not screen the first step; the run is not affected", exc_info=True)

    def on_fit_end(self, state: RunState) -> None:
        """End a screen that the run left in the middle of its first step."""
        if self._screen is not None:
            self._finish_screen(state, failed=True)

    def on_exception(self, state: RunState) -> None:
        """Explain the error, record the finding, and attach it to the error."""
        error = state.exception
        if self._screen is not None:
            self._finish_screen(state, failed=True)
        record = self._record
        if error is None or not can_explain(error):
            return
        try:
            finding = explain(
                error,
                model=state.model,
                replay=state.replay,
                optimizers=state.optimizers,
                record=record,
                first_node=self._earlier_backward,
                gradients_off_at=state.gradients_off_at,
                scale=float(state.scaler.get_scale()) if state.scaler is not None else 1.0,
            )
        except Exception:
            # The run has failed of something else: that error must reach the user, not ours.
            _log.warning("safetrain could not explain %s", type(error).__name__, exc_info=True)
            return
        if finding is not None:
            self.report.add(finding, step=state.current_step, phase="eval" if state.phase == "eval" else "train")
            attach(error, finding)
