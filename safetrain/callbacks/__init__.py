"""Listeners that come with safetrain, one behaviour a file.

List producers (they add to `state.row`: `LrMonitor`, `MemoryMonitor`, `Throughput`) before writers (`Progress`,
`JsonlMetrics`, `TensorBoard`): hooks run in list order. Importing this package imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from safetrain.callbacks.base import Callback

if TYPE_CHECKING:
    from safetrain.callbacks.early_stopping import EarlyStopping
    from safetrain.callbacks.ema import EMA
    from safetrain.callbacks.empty_cache import EmptyCache
    from safetrain.callbacks.jsonl import JsonlMetrics
    from safetrain.callbacks.lr_monitor import LrMonitor
    from safetrain.callbacks.memory import MemoryMonitor
    from safetrain.callbacks.progress import Progress
    from safetrain.callbacks.saving import Saving
    from safetrain.callbacks.tensorboard import TensorBoard
    from safetrain.callbacks.throughput import Throughput

__all__ = [
    "EMA",
    "Callback",
    "EarlyStopping",
    "EmptyCache",
    "JsonlMetrics",
    "LrMonitor",
    "MemoryMonitor",
    "Progress",
    "Saving",
    "TensorBoard",
    "Throughput",
]

_HOMES = {
    "EMA": "ema",
    "EarlyStopping": "early_stopping",
    "EmptyCache": "empty_cache",
    "JsonlMetrics": "jsonl",
    "LrMonitor": "lr_monitor",
    "MemoryMonitor": "memory",
    "Progress": "progress",
    "Saving": "saving",
    "TensorBoard": "tensorboard",
    "Throughput": "throughput",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
