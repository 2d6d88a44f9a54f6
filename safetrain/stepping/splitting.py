"""Out of memory in forward or backward: run the window again in smaller micro-batches, as if for the first time.

The gradient of a window does not depend on how it is cut (`Shares`), so half the micro-batch size trains the same
model with half the activations. What is promised: from the step that was repeated on, the run equals, bit for bit, one
that was started there with `micro_batch_size` at the new value.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from safetrain.errors import BatchError, add_note
from safetrain.rules.out_of_memory import is_out_of_memory
from safetrain.stepping.undo import Undo

if TYPE_CHECKING:
    from safetrain.loop import Trainer


def in_micro_batches(trainer: Trainer, window: Sequence[Any]) -> list[Any]:
    """The window with its batches cut to the micro-batch size in force."""
    size = trainer.state.micro_batch_size
    return list(window) if size is None else [piece for batch in window for piece in trainer.split_batch(batch, size)]


class Splitter:
    """Runs windows, and halves the micro-batch size when one does not fit.

    Wraps forward and backward only. An optimizer's step is never repeated: it may have updated some parameters before
    it failed. The loss scale moves there too, so a window leaves nothing of it to put back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo = Undo(model)
        self.used = False

    def run(self, trainer: Trainer, window: Sequence[Any]) -> Tensor:
        """`trainer._forward_backward(window)`, in micro-batches that fit. The window's mean loss.

        Raises:
            BatchError: the window does not fit and its batches cannot be cut; names the part. The error that said so
                is its cause.
            The allocator's error, when micro-batches of one sample do not fit, or what the failed attempt changed
                cannot be put back; a note says which.
        """
        self.used = True
        self._undo.note(trainer, window)
        while True:
            try:
                loss = trainer._forward_backward(in_micro_batches(trainer, window))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                obstacle = self._undo.obstacle() or _halve(trainer, window, error)
                if obstacle is not None:
                    add_note(error, f"oom='split' did not help: {obstacle}")
                    raise
            # Outside of the `except`: the error is gone by now, and with its traceback the failed attempt's tensors.
            self._undo.roll_back(trainer)
            gc.collect()  # of those that refer to each other
        self._undo.done()
        return loss


def _halve(trainer: Trainer, window: Sequence[Any], error: Exception) -> str | None:
    """Choose the next micro-batch size and tell; what speaks against it, in words.

    The one place where the size is decided: ranks that train together have to agree on the smallest before any of them
    goes on.
    """
    state = trainer.state
    before = max(trainer.batch_size(batch) for batch in in_micro_batches(trainer, window))
    if before <= 1:
        return "a micro-batch of a single sample does not fit either"
    size = (before + 1) // 2
    if state.micro_batch_size is not None and before > state.micro_batch_size:
        return f"split_batch gave a piece of {before} samples where at most {state.micro_batch_size} were asked for"
    _check_cut(trainer, window, size, error)
    norms = sum(isinstance(module, _BatchNorm) and module.training for module in state.model.modules())
    state.micro_batch_size = size
    state.oom_splits += 1
    state.exception = error
    try:
        trainer.listeners.on_split(state)
    finally:
        state.exception = None
    warnings.warn(
        f"step {state.current_step}: out of memory with micro-batches of {before}; the step is repeated, and the run "
        f"goes on, with micro-batches of {size}"
        + (
            f". Gradients stay exact, but for BatchNorm: {norms} layers take their statistics over {size} samples from "
            "here on"
            if norms
            else " and the same gradients"
        ),
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _check_cut(trainer: Trainer, window: Sequence[Any], size: int, error: Exception) -> None:
    try:
        for batch in window:
            trainer.split_batch(batch, size)
    except BatchError as reason:
        raise BatchError(f"step {trainer.state.current_step}: out of memory, and {reason}") from error
    except Exception as full:
        if not is_out_of_memory(full):  # copies of pieces may not fit beside the failed attempt, and will after it
            raise


def warn_if_unused(trainer: Trainer) -> None:
    """Say once that nothing is repeated in a trainer that goes its own way."""
    if trainer.state.step == 0:
        warnings.warn(
            f"oom='split' has no effect: {type(trainer).__name__}.train_step does not call forward_backward, which is "
            "what it repeats. Compute the losses in training_step and call self.forward_backward(window), or remove it",
            RuntimeWarning,
            stacklevel=3,
        )
