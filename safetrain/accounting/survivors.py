"""Who allocates what stays? For growth that no name leads to: three steps are recorded, operation by operation.

Storages made in those steps that are still there some steps later are grouped by the user's line that made them; where
a Python object still holds one, its referrers are followed upward.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from safetrain.accounting.ownership import AllocationLog, Block
from safetrain.findings import SourceLine
from safetrain.graph import climb, storage_key
from safetrain.memory import Meter
from safetrain.recording.recorder import can_leave

_RECORDED, _WAITED = 3, 32
"""Steps that are recorded, and steps after which what was made in them counts as kept."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """What stayed of the recorded steps."""

    bytes_per_step: float
    source: SourceLine | None
    """The line that made most of it."""
    op: str
    shape: tuple[int, ...]
    holder: str | None
    """What refers to one of them, upward; None when no Python object does."""
    attached: bool
    """It carries a graph."""


class SurvivorHunt:
    """Records the steps after `step`. Call `advance` at the end of each further one until it is `over`."""

    def __init__(self, step: int, meter: Meter) -> None:
        self._log = AllocationLog(meter)
        self._stop_at = step + _RECORDED
        self._judge_at = step + _RECORDED + _WAITED
        self._active = False
        self.over = not can_record()
        if not self.over:
            self._log.__enter__()  # type: ignore[no-untyped-call]
            self._active = True

    def advance(self, step: int) -> Survivors | None:
        """The result, once: None until then, and when nothing stayed."""
        if self._active and step >= self._stop_at:
            self.stop()
        if self._active or step < self._judge_at:
            return None
        self.over = True
        return _survivors(self._log.blocks, self._log)

    def stop(self) -> None:
        """Take the recording off, unless the user's code is inside a mode of its own: then later."""
        if self._active and can_leave(self._log):
            self._log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._active = False


def can_record() -> bool:
    """Whether operations can be watched without changing what runs: nothing compiled, no mode of the user's.

    A record that begins inside `torch.inference_mode()` would see nothing after it.
    """
    if _get_current_dispatch_mode_stack() or torch.is_inference_mode_enabled():
        return False
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is None or not dynamo.counters["frames"]


def _survivors(blocks: Iterable[Block], log: AllocationLog) -> Survivors | None:
    by_line: dict[tuple[str, int] | None, list[Block]] = {}
    for block in blocks:
        if block.died is None and block.op and _makes(block.op):
            key = (block.source.file, block.source.line) if block.source is not None else None
            by_line.setdefault(key, []).append(block)
    if not by_line:
        return None
    most = max(by_line.values(), key=lambda found: sum(block.num_bytes for block in found))
    biggest = max(most, key=lambda block: block.num_bytes)
    tensor = _find_tensor({key for key, block in log.alive() if any(block is b for b in most)})
    chain = climb(tensor, apart_from=[most]) if tensor is not None else []
    return Survivors(
        bytes_per_step=sum(block.num_bytes for block in most) / _RECORDED,
        source=biggest.source,
        op=biggest.op,
        shape=biggest.shape,
        holder=" → ".join(chain) or None,
        attached=tensor is None or (tensor.requires_grad and not tensor.is_leaf),
    )


@functools.lru_cache(maxsize=512)
def _makes(op: str) -> bool:
    """Whether `aten.add.Tensor` makes storage, not a view of its input or the input changed in place, which is older.

    `lift_fresh` passes on what `torch.tensor` has just made.
    """
    parts = op.split(".")
    if len(parts) != 3:  # an operator of a higher order
        return True
    library, name, overload = parts
    returned = getattr(getattr(getattr(torch.ops, library), name), overload)._schema.returns
    return name == "lift_fresh" or not any(value.alias_info is not None for value in returned)


def _find_tensor(keys: set[int]) -> Tensor | None:
    """A Python tensor with one of these storages. Reads the heap once (0.1 s for a million objects)."""
    for obj in gc.get_objects():
        if issubclass(type(obj), Tensor) and type(obj) in (Tensor, torch.nn.Parameter) and storage_key(obj) in keys:
            return obj  # type: ignore[no-any-return]
    return None
