"""Watching one evaluation metric for its best value, for those who save or stop by it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

from safetrain.errors import ConfigError

Mode = Literal["min", "max"]


class BestValue:
    """The best value so far of one evaluation metric.

    `monitor` names it, with or without the `val/` that rows carry. `mode` may be left out where the name tells: `min`
    for a loss, `max` for an accuracy. `min_delta` is how much better a value must be to count. NaN is never better.

    Raises:
        ConfigError: the mode cannot be told from the name.
    """

    def __init__(self, monitor: str, mode: Mode | None = None, *, min_delta: float = 0.0) -> None:
        if mode not in (None, "min", "max"):
            raise ConfigError(f'mode={mode!r} for monitor {monitor!r}: use "min" or "max"')
        if min_delta < 0:
            raise ConfigError(f"min_delta={min_delta} for monitor {monitor!r} must not be negative")
        self.monitor = monitor
        self.mode: Mode = mode or _mode_of(monitor)
        self.min_delta = min_delta
        self.best: float | None = None

    def read(self, metrics: Mapping[str, float], who: str) -> float:
        """The monitored value among the results of an evaluation.

        Raises:
            ConfigError: the evaluation made no such metric; the message names those it made.
        """
        plain = {name.removeprefix("val/"): float(value) for name, value in metrics.items()}
        wanted = self.monitor.removeprefix("val/")
        if wanted not in plain:
            near = difflib.get_close_matches(wanted, plain, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            have = ", ".join(sorted(plain)) or "none at all"
            raise ConfigError(
                f"{who}: monitor {self.monitor!r} is not among the metrics of the evaluation, which are: {have}{hint}"
            )
        return plain[wanted]

    def update(self, value: float) -> bool:
        """Whether `value` is the best so far; it is remembered if so."""
        if math.isnan(value):
            return False
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            if not gain > self.min_delta:
                return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.best = state["best"]


def _mode_of(monitor: str) -> Mode:
    name = monitor.lower()
    if "loss" in name:
        return "min"
    if "accuracy" in name or name.removeprefix("val/") == "acc":
        return "max"
    raise ConfigError(f'monitor {monitor!r} does not tell whether less or more is better: add mode="min" or mode="max"')
