"""The random number generators that a run draws from, saved and put back together."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _accelerator() -> Any:
    """The module of the accelerator in use (torch.cuda, …); None on a CPU machine or before its first use."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return None
    module = getattr(torch, accelerator.current_accelerator().type, None)
    initialised = getattr(module, "is_initialized", None)
    return module if module is not None and (initialised is None or initialised()) else None


def capture() -> dict[str, Any]:
    """States of Python's, NumPy's (when imported), torch's and the accelerator's generators, in plain containers."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {**capture_torch(), "python": [version, list(internal), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, pos, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [name, [int(k) for k in keys], int(pos), int(has_gauss), float(cached)]
    return states


def capture_torch() -> dict[str, Any]:
    """States of torch's and the accelerator's generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    module = _accelerator()
    if module is not None:
        one_state = not hasattr(module, "get_rng_state_all")  # MPS has a single generator
        states["accelerator"] = [module.get_rng_state()] if one_state else list(module.get_rng_state_all())
    return states


def restore(states: dict[str, Any]) -> None:
    """Put back what `capture` or `capture_torch` returned."""
    torch.set_rng_state(states["torch"])
    if "python" in states:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        import numpy

        name, keys, pos, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), pos, has_gauss, cached))
    module = _accelerator()
    if module is not None and "accelerator" in states:
        saved = states["accelerator"]
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(saved)
        else:
            module.set_rng_state(saved[0])


@contextmanager
def preserved() -> Iterator[None]:
    """Run a block without moving any generator."""
    states = capture()
    try:
        yield
    finally:
        restore(states)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy (when imported) and torch on every device."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Within the block, have torch refuse operations that do not repeat exactly. Settings are put back afterwards."""
    if not enabled:
        yield
        return
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is only deterministic with it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


class HostGenerators:
    """States of Python's and NumPy's generators as they give them: 0.1 ms to read."""

    def __init__(self) -> None:
        import numpy

        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state()

    def have_moved(self) -> bool:
        """Whether anything was drawn from them since."""
        import numpy

        now = numpy.random.get_state()
        return self._python != random.getstate() or not all(map(numpy.array_equal, self._numpy, now))

    def restore(self) -> None:
        """Put them back."""
        import numpy

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
