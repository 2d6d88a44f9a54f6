"""A run that cannot fit is refused before its first step, with the cheapest ways to make it fit."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from safetrain.errors import BudgetError
from safetrain.graph import format_bytes
from safetrain.loop import Trainer
from safetrain.planner.faking import Unforecastable, make_mode, why
from safetrain.planner.report import line
from safetrain.planner.search import Option, Planner
from safetrain.rules.out_of_memory import owned_bytes
from safetrain.sizes import parse_bytes

_log = logging.getLogger("safetrain")
_CLEARLY_ABOVE = 1.05
"""The forecast has been up to 4 % off: what is nearer than that to the limit may run."""
_REMEDIES = 3


def refuse_if_too_big(trainer: Trainer, window: Sequence[Any], budget: int | str | Literal["auto"]) -> None:
    """Forecast a step over `window`, and raise if it is clearly above `budget` (bytes, or what the device has left).

    A step that cannot be forecast is warned about and may run; so is a compiled one, which may need less. Takes
    seconds; allocates nothing, but for 20 to 50 MB to time the device when it refuses.

    Raises:
        BudgetError: it cannot fit; the message has the owners and the three cheapest remedies.
    """
    limit = available_bytes(trainer) if budget == "auto" else parse_bytes(budget, "memory_budget")
    if limit is None:
        warnings.warn("memory_budget='auto': this system does not tell how much memory is left", stacklevel=2)
        return
    if trainer.compile_options is not None:
        warnings.warn("memory_budget: a compiled model cannot be forecast, so it may run", stacklevel=2)
        return
    try:
        planner = Planner(trainer, window, make_mode())
    except Unforecastable as error:
        warnings.warn(f"memory_budget: could not forecast the step, so it may run: {error}", stacklevel=2)
        return
    except Exception as error:  # the user's code met tensors that have no numbers: the run must not suffer
        warnings.warn(f"memory_budget: could not forecast the step, so it may run: {why(error)}", stacklevel=2)
        return
    if planner.base.peak_bytes <= limit * _CLEARLY_ABOVE:
        return
    try:
        remedies = _remedies(planner, limit)
    except Exception as error:  # such as no memory left to time the device with: that it cannot fit is known
        _log.info("memory_budget: the remedies could not be worked out: %s", why(error))
        remedies = []
    raise BudgetError(_refusal(planner, limit, remedies))


def _refusal(planner: Planner, limit: int, remedies: Sequence[Option]) -> str:
    base = planner.base
    owners = sorted(base.memory.owners_at(base.memory.peak_clock).items(), key=lambda item: -item[1])
    had = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in owners if size >= base.peak_bytes / 100)
    ways = "".join(f"\n  {line(option)}" for option in remedies) or "\n  none of the settings that could be tried"
    return (
        f"the run cannot fit: a step needs {format_bytes(base.peak_bytes)} ({had}) and there are {format_bytes(limit)}."
        f" What would fit, the cheapest first:{ways}\nmemory_budget=None starts it all the same"
    )


def _remedies(planner: Planner, limit: int) -> list[Option]:
    fitting = [option for option in planner.each() if option.peak_bytes <= limit]
    fitting.sort(key=lambda option: (bool(option.changes), option.slowdown))
    if not fitting:
        combination = planner.fastest(limit)
        return [] if combination is None else [combination]
    return fitting[:_REMEDIES]


def available_bytes(trainer: Trainer) -> int | None:
    """Bytes that the run can have on its device: what is free, and what its model and optimizers hold already.

    On the CPU: within the limit on this process's addresses (`RLIMIT_AS`), its container and the machine. None where
    nothing tells.
    """
    owned = sum(owned_bytes(trainer.model, trainer.state.optimizers).values())
    if trainer.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(trainer.device)
        cached = torch.cuda.memory_reserved(trainer.device) - torch.cuda.memory_allocated(trainer.device)
        return int(free) + cached + owned
    limits = list(_free_on_host()) if trainer.device.type == "cpu" else []
    return min(limits) + owned if limits else None


def _free_on_host() -> Iterator[int]:
    with contextlib.suppress(ImportError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        container = Path("/sys/fs/cgroup")
        used = int((container / "memory.current").read_text())
        yield int((container / "memory.max").read_text()) - used  # "max", no number: no limit
    with contextlib.suppress(OSError):
        for row in Path("/proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                yield int(row.split()[1]) * 1024
