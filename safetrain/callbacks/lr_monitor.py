"""The learning rate of every parameter group, in the row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from safetrain.callbacks.base import Callback

if TYPE_CHECKING:
    from safetrain.state import RunState


class LrMonitor(Callback):
    """Adds `lr/<optimizer>`, or `lr/<optimizer>/<group>` where there are several groups: the rate that the step used.

    `momentum=True` adds `momentum/…` (momentum, or the first beta) for schedules that move it.
    Rates are taken before the step, since the schedule has moved on when the row is written.
    """

    def __init__(self, *, momentum: bool = False) -> None:
        self._momentum = momentum
        self._taken: dict[str, Any] = {}

    def on_backward_end(self, state: RunState) -> None:
        """Take the rates of the optimizers about to step."""
        if not state.is_logging_step:
            return
        for name in state.stepping or state.optimizers:
            groups = state.optimizers[name].param_groups
            for index, group in enumerate(groups):
                key = name if len(groups) == 1 else f"{name}/{group.get('name', index)}"
                self._taken[f"lr/{key}"] = _frozen(group["lr"])
                if self._momentum:
                    momentum = group.get("momentum", group.get("betas", (None,))[0])
                    if momentum is not None:
                        self._taken[f"momentum/{key}"] = _frozen(momentum)

    def on_log(self, state: RunState) -> None:
        """Add them to the row."""
        for key, value in self._taken.items():
            state.row[key] = float(value)
        self._taken.clear()


def _frozen(value: Any) -> Any:
    """A rate kept as a tensor changes in place; its copy does not. Read as a number in `on_log` only."""
    return value.detach().clone() if isinstance(value, Tensor) else value
