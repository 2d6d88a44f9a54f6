"""What operations cost in time, from their shapes: floating-point operations, and bytes read and written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_TRIES = 3


@dataclass(slots=True)
class Cost:
    """Work of many operations, kept apart by kind: (floating-point operations, bytes, dtype) of each."""

    operations: list[tuple[int, int, torch.dtype]] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Floating-point operations: matrix products, convolutions and attention, as `FlopCounterMode` counts them."""
        return sum(flops for flops, _, _ in self.operations)

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation by the tensors that went in and came out."""
        made = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        if func.is_view or not (made or not func._schema.returns):
            return
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*given, *made))
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        dtype = made[0].dtype if made else torch.float32
        self.operations.append((flops, int(moved), dtype))

    def seconds(self, machine: Machine) -> float:
        """The roofline: each operation takes as long as its arithmetic or its traffic, whichever is slower."""
        return sum(max(flops / machine.flops_per_s(dtype), moved / machine.bytes_per_s)
                   for flops, moved, dtype in self.operations)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a device computes and moves, measured."""

    speeds: dict[torch.dtype, float]
    """Floating-point operations per second of a matrix product, by dtype."""
    bytes_per_s: float

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """For other dtypes: that of float32."""
        return self.speeds.get(dtype, self.speeds[torch.float32])

    @staticmethod
    def measure(device: torch.device) -> Machine:
        """Times a matrix product per dtype and a copy: about 0.2 s, and 50 MB on an accelerator, 20 MB on a CPU."""
        size = 512 if device.type == "cpu" else 2048
        speeds = {}
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.ones(size, size, dtype=dtype, device=device)
            speeds[dtype] = 2 * size**3 / _seconds(lambda a=a: a @ a, device)  # type: ignore[misc]
        block = torch.ones(1 << 21, device=device)
        return Machine(speeds, 2 * block.nbytes / _seconds(block.clone, device))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of a few tries; the first warms up."""
    best = float("inf")
    for _ in range(_TRIES + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
