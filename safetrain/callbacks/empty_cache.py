"""Give unused memory back to the device at chosen moments, and say what it cost and gave."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import torch

from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError
from safetrain.memory import Meter, meter_for

if TYPE_CHECKING:
    from safetrain.state import RunState


class EmptyCache(Callback):
    """Calls the device's `empty_cache()` after every so many steps, or around evaluations, and measures it.

    Memory that no tensor uses is freed to the driver, which waits for the device, and is asked for again by the next
    step: it makes no room for this process, whose allocator does the same by itself before it gives up. It helps where
    shapes change for good (training to evaluation and back) and the cache is in pieces that no longer fit (M403), or
    where another process needs the memory. The row says whether it was worth it:

    - `memory/cache_freed_mb`: given back since the last row, in units of 10^6 bytes, where the allocator tells.
    - `memory/cache_ms`: what that took the host. What the next steps lose is in their own time.

    Args:
        every_steps: after every so many optimizer steps; None: at no fixed step.
        around_evaluation: before and after each evaluation.

    Raises:
        ConfigError: every_steps below 1, or nothing to do.
    """

    def __init__(self, *, every_steps: int | None = None, around_evaluation: bool = True) -> None:
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"EmptyCache: every_steps={every_steps} must be at least 1; None: at no fixed step")
        if every_steps is None and not around_evaluation:
            raise ConfigError("EmptyCache: neither every_steps nor around_evaluation is set, so it would do nothing")
        self._every_steps, self._around_evaluation = every_steps, around_evaluation
        self._device: torch.device | None = None
        self._meter: Meter | None = None
        self._freed_bytes, self._elapsed_s, self._calls = 0, 0.0, 0

    def on_fit_start(self, state: RunState) -> None:
        """Find the allocator. On a device without one, say that this does nothing."""
        device = state.device or torch.device("cpu")
        if not hasattr(torch, device.type) or not hasattr(getattr(torch, device.type), "empty_cache"):
            warnings.warn(f"EmptyCache does nothing on {device}: it keeps no cache of freed memory", stacklevel=2)
            return
        self._device, self._meter = device, meter_for(device)

    def on_step_end(self, state: RunState) -> None:
        """At every so many steps."""
        if self._every_steps is not None and state.step % self._every_steps == 0:
            self._empty()

    def on_eval_start(self, state: RunState) -> None:
        """Before an evaluation."""
        if self._around_evaluation:
            self._empty()

    def on_eval_end(self, state: RunState) -> None:
        """After it."""
        if self._around_evaluation:
            self._empty()

    def on_log(self, state: RunState) -> None:
        """Add to the row what was done since the last one."""
        if self._calls:
            state.row["memory/cache_freed_mb"] = self._freed_bytes / 1e6
            state.row["memory/cache_ms"] = self._elapsed_s * 1e3
            self._freed_bytes, self._elapsed_s, self._calls = 0, 0.0, 0

    def _empty(self) -> None:
        if self._device is None or self._meter is None:
            return
        before = self._meter.reserved() or 0
        start = time.perf_counter()
        getattr(torch, self._device.type).empty_cache()
        self._elapsed_s += time.perf_counter() - start
        self._freed_bytes += before - (self._meter.reserved() or 0)
        self._calls += 1
