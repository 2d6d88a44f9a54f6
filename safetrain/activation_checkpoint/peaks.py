"""The highest memory in use over stretches of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain.memory import Meter


class StretchPeaks:
    """Highest bytes of a device since the last `take`, between `start` and `stop`.

    CUDA's allocator keeps the record itself, which `take` resets. Elsewhere the meter is read after every operation
    (some 10 µs each, so for single steps), which cannot see what a kernel uses inside.
    """

    def __init__(self, device: torch.device | None, meter: Meter) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._mode = _MeteredMode(meter)

    def start(self) -> None:
        """Begin, with nothing seen yet."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._mode.restart()
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def take(self) -> int:
        """The highest bytes since `start` or the last `take`."""
        if self._device is None:
            return self._mode.restart()
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def stop(self) -> None:
        """End."""
        if self._device is None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _MeteredMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._peak = 0

    def restart(self) -> int:
        """The peak so far; the next one starts from now."""
        now = self._meter.read()
        peak, self._peak = max(self._peak, now), now
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._peak = max(self._peak, self._meter.read())
        return result
