"""When to save, and which checkpoints to keep. The loop writes them."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from safetrain import checkpoint
from safetrain.callbacks.base import Callback
from safetrain.callbacks.monitor import BestValue, Mode
from safetrain.callbacks.run_dir import writable_run_dir
from safetrain.errors import ConfigError

if TYPE_CHECKING:
    from safetrain.state import RunState

_ENDING = ("SIGINT", "SIGTERM")
_SAVING = ("SIGUSR1",)


class Saving(Callback):
    """Asks for checkpoints and removes old ones.

    Args:
        every_steps: save after every so many optimizer steps.
        every_epoch: save after each epoch, its evaluation included.
        at_end: save when the run ends.
        on_signals: SIGTERM and Ctrl-C save after the running step and end the run; SIGUSR1 saves and goes on. A second
            Ctrl-C interrupts at once, without saving. Former handlers come back at fit end.
        keep_last: how many of the newest checkpoints stay.
        monitor: a metric of the evaluation: each new best is saved and stays beside the newest.
        mode: "min" or "max" for `monitor`; may be left out for a loss or an accuracy.

    Raises:
        ConfigError: a number below 1, a mode that cannot be told; at fit start: no run directory, or not writable.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_epoch: bool = True,
        at_end: bool = True,
        on_signals: bool = True,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"Saving: every_steps={every_steps} must be at least 1; None saves at no fixed step")
        if keep_last < 1:
            raise ConfigError(f"Saving: keep_last={keep_last} would remove the checkpoint just written; use at least 1")
        self._every_steps, self._every_epoch, self._at_end = every_steps, every_epoch, at_end
        self._keep_last = keep_last
        self._best = BestValue(monitor, mode) if monitor is not None else None
        self._best_step: int | None = None
        self._signals = _Signals() if on_signals else None
        self._saved_at: tuple[int, int] | None = None
        self._running = False

    def on_fit_start(self, state: RunState) -> None:
        """Check the place, and listen to signals."""
        writable_run_dir(state, "Saving")
        self._running = True
        self._saved_at = (state.step, state.epoch)  # nothing new to save yet
        if self._signals is not None:
            self._signals.install()

    def on_step_end(self, state: RunState) -> None:
        """Save at every so many steps, or when a signal came."""
        if self._every_steps is not None and state.step % self._every_steps == 0:
            state.save_request = f"every {self._every_steps} steps"
        if self._signals is not None and self._signals.received:
            self._obey_signals(state)

    def on_epoch_end(self, state: RunState) -> None:
        """Save after the epoch."""
        if self._every_epoch:
            state.save_request = f"end of epoch {state.epoch}"

    def on_eval_end(self, state: RunState) -> None:
        """Save a new best, or when a signal came during the evaluation."""
        if not self._running:
            return  # an evaluation outside `fit`, of a test set perhaps
        if self._best is not None:
            value = self._best.read(state.eval_metrics, "Saving")
            if self._best.update(value):
                self._best_step = state.step
                state.save_request = f"best {self._best.monitor}: {value:.6g}"
        if self._signals is not None and self._signals.received:
            self._obey_signals(state)

    def on_checkpoint_saved(self, state: RunState) -> None:
        """Remove what is neither among the newest nor the best."""
        self._saved_at = (state.step, state.epoch)
        assert state.checkpoint_path is not None
        best = self._best_folder(state.checkpoint_path)
        checkpoint.prune(state.checkpoint_path.parent, keep_last=self._keep_last, keep=best)

    def on_fit_end(self, state: RunState) -> None:
        """Save the end, and give the signals back."""
        self._running = False
        if self._signals is not None:
            self._signals.restore()
        if self._at_end and self._saved_at != (state.step, state.epoch):
            state.save_request = "end of the run"

    def state_dict(self) -> dict[str, Any]:
        """The best value and the step that had it."""
        if self._best is None:
            return {}
        return {**self._best.state_dict(), "best_step": self._best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; a run that began to monitor later starts without a best."""
        if self._best is not None and "best" in state:
            self._best.load_state_dict(state)
            self._best_step = state["best_step"]

    def _best_folder(self, newest: Path) -> Path | None:
        return None if self._best_step is None else newest.with_name(f"step_{self._best_step:08d}")

    def _obey_signals(self, state: RunState) -> None:
        assert self._signals is not None
        while self._signals.received:
            name = self._signals.received.pop(0)
            state.save_request = name
            if name in _ENDING and state.stop_reason is None:
                state.stop_reason = f"signal {name}"


class _Signals:
    """Notes that a signal came; puts the former handlers back."""

    def __init__(self) -> None:
        self.received: list[str] = []  # only ever appended to and popped from, so that none is lost between the two
        self._former: dict[int, Any] = {}
        self._pid = 0

    def install(self) -> None:
        """Handle the signals, if this is the main thread (elsewhere Python does not allow it)."""
        self.restore()
        self.received.clear()
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "fit runs outside the main thread, where signals cannot be handled: "
                "the run will not be saved at SIGTERM or Ctrl-C (`Saving(on_signals=False)` silences this)",
                stacklevel=2,
            )
            return
        for name in _ENDING + _SAVING:
            number = getattr(signal, name, None)
            if number is None or signal.getsignal(number) is None:
                continue  # not on this system, or handled by C code that could not be put back
            self._former[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put the former handlers back, where nobody else has put one since."""
        for number, former in self._former.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, former)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._pid:
            self._handle_in_child(number)
            return
        self.received.append(name)
        then = "the run goes on"
        if name in _ENDING:
            then = "the run ends"
        if name == "SIGINT":
            signal.signal(number, self._former.pop(number, signal.default_int_handler))
            then += "; press Ctrl-C again to interrupt at once, without saving"
        # Not print: the signal may have come in the middle of a write to the same stream.
        os.write(2, f"\n{name}: saving after this step, then {then}\n".encode())

    def _handle_in_child(self, number: int) -> None:
        """A forked loader worker has inherited this handler. Ctrl-C reaches the whole group: leave it to the parent."""
        if number == signal.SIGINT:
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
