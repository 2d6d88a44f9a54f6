"""Stop when a metric of the evaluation no longer gets better."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from safetrain.callbacks.base import Callback
from safetrain.callbacks.monitor import BestValue, Mode
from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.state import RunState


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations in a row that did not improve `monitor` by more than `min_delta`.

    Args:
        monitor: a metric of the evaluation, such as `loss` or `val/accuracy`.
        patience: how many evaluations without improvement are borne; the run ends with the last of them.
        mode: "min" or "max"; may be left out for a loss or an accuracy.
        min_delta: how much better counts as better.

    A metric that is NaN has not improved.

    Raises:
        ConfigError: patience below 1, unknown mode; in the first evaluation: no such metric.
    """

    def __init__(
        self, monitor: str = "loss", *, patience: int = 3, mode: Mode | None = None, min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ConfigError(
                f"EarlyStopping: patience={patience} would stop before anything was compared; use at least 1"
            )
        self.patience = patience
        self._best = BestValue(monitor, mode, min_delta=min_delta)
        self._without_gain = 0
        self._running = self._evaluated = self._failed = False
        self._first_step = 0

    def on_fit_start(self, state: RunState) -> None:
        """Evaluations count from here on."""
        self._running, self._evaluated, self._failed = True, False, False
        self._first_step = state.step

    def on_eval_end(self, state: RunState) -> None:
        """Compare, and ask for the stop."""
        if not self._running:
            return  # an evaluation outside `fit`, of a test set perhaps
        self._evaluated = True
        value = self._best.read(state.eval_metrics, "EarlyStopping")
        if self._best.update(value):
            self._without_gain = 0
            return
        self._without_gain += 1
        if self._without_gain >= self.patience and state.stop_reason is None:
            best = "no finite value yet" if self._best.best is None else f"best {self._best.best:.6g}"
            state.stop_reason = (
                f"early stopping: {self._best.monitor} did not improve in {self._without_gain} evaluations "
                f"(last {value:.6g}, {best})"
            )

    def on_exception(self, state: RunState) -> None:
        """A run that failed early is not blamed for missing evaluations."""
        self._failed = True

    def on_fit_end(self, state: RunState) -> None:
        """Say so when there was nothing to compare, unless the run was told to stop before its first evaluation."""
        self._running = False
        nothing_was_left = state.step == self._first_step
        if not (self._evaluated or self._failed or nothing_was_left) and state.stop_reason is None:
            warnings.warn(
                "EarlyStopping never saw an evaluation and could not act: give `fit` validation data", stacklevel=2
            )

    def state_dict(self) -> dict[str, Any]:
        """Best value and evaluations without improvement."""
        return {**self._best.state_dict(), "without_gain": self._without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where the saved run was."""
        self._best.load_state_dict(state)
        self._without_gain = state["without_gain"]
