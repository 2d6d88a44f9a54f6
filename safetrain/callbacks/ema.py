"""An exponential moving average of the weights, used for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from safetrain.callbacks.base import Callback
from safetrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from safetrain.state import RunState


class EMA(Callback):
    """Keeps `average = lerp(average, weight, 1 - decay)` of every trainable weight and evaluates with it.

    Args:
        decay: how much of the old average each step keeps.
        warmup: use min(decay, (1 + n) / (10 + n)) at the n-th taken step, so that a short run is not all start.

    The average starts as a copy of the weights at fit start and lives on their device; weights of reduced precision are
    averaged in float32, where a step of 1 - decay is not lost to rounding. During an evaluation the model holds the
    averaged weights and a copy of its own is kept aside, as much memory as the gradients that were freed for it.
    Buffers are not averaged: the model's own serve both (BatchNorm statistics are those of the live weights).
    A frozen weight is its own average; one that is unfrozen later joins with the value it then has.

    A skipped step does not move the average. Whether a step was skipped may be known only when the next one is about to
    be made (optimizers that skip on the device), so each update is applied then, before that step touches the weights,
    or earlier when the average is asked for. Same numbers, no host sync.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigError(f"EMA: decay={decay} must lie between 0 and 1, such as 0.999")
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        """Taken steps that have entered the average."""
        self._live: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._same_dtype: tuple[list[Tensor], list[Tensor]] = ([], [])  # averages and weights that one lerp can take
        self._widened: list[tuple[Tensor, Tensor]] = []  # averages kept in float32 for weights that are not
        self._aside: list[Tensor] | None = None  # the model's own weights while it holds the average
        self._loaded: dict[str, Tensor] | None = None
        self._pending = False  # a step was made whose weights have not entered yet
        self._skipped_seen = 0
        self._state: RunState | None = None

    def on_fit_start(self, state: RunState) -> None:
        """Copy the weights, or take up a loaded average."""
        self._restore()  # an evaluation outside `fit` may have failed, of which nobody hears
        self._state, self._skipped_seen, self._pending = state, state.skipped_steps, False
        if self._loaded is not None:
            self._install(state.model)
        else:
            self._join_trainable(state.model)

    def on_backward_end(self, state: RunState) -> None:
        """Let the last step's weights enter: its fate is known now, and this one has not stepped yet."""
        if self._pending:
            self._catch_up(state)

    def on_step_end(self, state: RunState) -> None:
        """Remember that the weights have moved, unless they were skipped."""
        self._pending = True

    def on_eval_start(self, state: RunState) -> None:
        """Put the average into the model."""
        if self._state is None or self._aside is not None:
            return
        self._catch_up(state)
        live = list(self._live.values())
        self._aside = [weight.detach().clone() for weight in live]
        with torch.no_grad():
            torch._foreach_copy_(live, list(self._average.values()))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the average inside, its own weights afterwards: to predict with it or to export it."""
        assert self._state is not None, "no weights before fit"
        self.on_eval_start(self._state)
        try:
            yield
        finally:
            self._restore()

    def on_eval_end(self, state: RunState) -> None:
        """Give the model its own weights back, bit for bit."""
        self._restore()

    def on_exception(self, state: RunState) -> None:
        """The same, when an evaluation failed."""
        self._restore()

    def on_fit_end(self, state: RunState) -> None:
        """Let the last step enter."""
        self._restore()
        self._catch_up(state)

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name, up to date. The tensors are the average itself: clone what you keep.

        `model.load_state_dict(ema.weights(), strict=False)` makes a model of them.
        """
        if self._state is not None and not self._state.in_step:
            self._catch_up(self._state)
        return dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        """The average and its count."""
        return {"average": self.weights(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved average; it is matched with the model at fit start."""
        self._loaded, self.num_updates = dict(state["average"]), int(state["num_updates"])
        self._pending = False
        if self._state is not None:
            self._install(self._state.model)

    def _catch_up(self, state: RunState) -> None:
        """Enter the last step's weights if it was taken. `state.skipped_steps` must be exact up to that step."""
        if not self._pending:
            return
        self._pending = False
        skipped, self._skipped_seen = state.skipped_steps > self._skipped_seen, state.skipped_steps
        if skipped:
            return
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (9 + self.num_updates)) if self.warmup else self.decay
        self._enter(1.0 - decay)
        if state.is_logging_step:
            self._join_trainable(state.model)

    @torch.no_grad()
    def _enter(self, share: float) -> None:
        if self._same_dtype[0]:
            torch._foreach_lerp_(*self._same_dtype, share)
        for average, weight in self._widened:
            average.lerp_(weight.to(average.dtype), share)

    def _join_trainable(self, model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if weight.requires_grad and name not in self._average and weight.is_floating_point():
                self._live[name] = weight
                self._average[name] = _copy(weight.detach(), weight)
        self._pair_up()

    def _pair_up(self) -> None:
        pairs = [(average, self._live[name]) for name, average in self._average.items()]
        same = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        self._same_dtype = ([average for average, _ in same], [weight for _, weight in same])
        self._widened = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]

    def _install(self, model: nn.Module) -> None:
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        live = dict(model.named_parameters())
        for name, value in loaded.items():
            if name not in live or live[name].shape != value.shape:
                have = f"has shape {list(live[name].shape)}" if name in live else "is not there"
                raise CheckpointError(
                    f"the saved average of `{name}`, shape {list(value.shape)}, does not fit this model, "
                    f"where it {have}; resume with the model that the run was started with"
                )
        self._live = {name: live[name] for name in loaded}
        self._average = {name: _copy(value, live[name]) for name, value in loaded.items()}
        self._pair_up()

    def _restore(self) -> None:
        if self._aside is not None:
            with torch.no_grad():
                torch._foreach_copy_(list(self._live.values()), self._aside)
            self._aside = None


def _copy(value: Tensor, weight: Tensor) -> Tensor:
    """An average that starts at `value`, for `weight`: on its device, in float32 at least."""
    dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
    return torch.empty_like(weight, dtype=dtype, requires_grad=False).copy_(value)
