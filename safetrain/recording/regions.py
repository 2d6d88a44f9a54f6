"""Checkpointed regions as they run: what each keeps, what it leaves out, and what running it again takes.

Any call of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` is seen, whoever makes it, from one class of
torch's that every such call goes through. Compiled regions and reentrant ones do not.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from safetrain.data.batch import tensors_in
from safetrain.findings import SourceLine
from safetrain.graph import owned_tensors, storage_key
from safetrain.memory import Meter
from safetrain.source import user_line


class Clock:
    """Moments of a device's work: read on the host for the CPU, noted in its stream for CUDA. No host sync."""

    def __init__(self, device: torch.device | None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"

    def now(self) -> Any:
        """This moment."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to another. On CUDA it waits for `end`: ask some steps later."""
        if not self._on_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


@dataclass(slots=True, eq=False)
class RegionCall:
    """One call of a checkpointed region. Bytes of the meter are those in use. Holds no tensor."""

    module: weakref.ref[nn.Module] | None
    """What was called, where that is a module or a method of one."""
    source: SourceLine | None
    """The user's line that called it."""
    used_before: int
    forward_start: Any
    forward_end: Any = None
    used_after: int = 0
    recompute_start: Any = None
    """None: backward did not need it, or has not come to it."""
    recompute_end: Any = None
    used_before_recompute: int = 0
    used_after_recompute: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    """Bytes by storage of what went in, which the region keeps alive until backward. Known once it ran again."""
    kept_only_bytes: int = 0
    """Of these, what backward inside needs not: without checkpointing the region would not keep it."""
    left_out_bytes: int = 0
    """Tensors that backward needs and that were computed again, without those that went in and the model's own."""


class RegionWatch:
    """Notes every checkpointed region between `start` and `stop`, in `calls`. Costs some ten µs a region.

    `at_boundary(call, moment)` is called at each "forward", "kept", "recompute" and "recomputed": the starts and ends
    of the first forward and of the recomputation.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        clock: Clock,
        at_boundary: Callable[[RegionCall, str], None] | None = None,
    ) -> None:
        self.calls: list[RegionCall] = []
        self._own = frozenset(_sizes(owned_tensors(model)))
        self._meter, self._clock = meter, clock
        self._at_boundary = at_boundary

    def start(self) -> None:
        """Begin to watch. Several may watch at once."""
        if not _watching:
            torch_checkpoint._checkpoint_hook = _WatchedHook  # type: ignore[misc]
        _watching.append(self)

    def stop(self) -> None:
        """End it; torch's own class is back once nobody watches."""
        if self in _watching:
            _watching.remove(self)
        if not _watching:
            torch_checkpoint._checkpoint_hook = _torchs_hook  # type: ignore[misc]

    def _begin(self, module: nn.Module | None) -> RegionCall:
        reference = weakref.ref(module) if module is not None else None
        call = RegionCall(reference, user_line(), self._meter.read(), self._clock.now())
        self.calls.append(call)
        self._tell(call, "forward")
        return call

    def _end(self, call: RegionCall) -> None:
        self._tell(call, "kept")
        call.forward_end, call.used_after = self._clock.now(), self._meter.read()

    def _begin_again(self, call: RegionCall) -> None:
        call.used_before_recompute, call.recompute_start = self._meter.read(), self._clock.now()
        self._tell(call, "recompute")

    def _end_again(self, call: RegionCall, kept: dict[int, int], made: dict[int, int]) -> None:
        self._tell(call, "recomputed")
        call.recompute_end, call.used_after_recompute = self._clock.now(), self._meter.read()
        call.kept = {key: size for key, size in kept.items() if key not in self._own}
        call.kept_only_bytes = sum(size for key, size in call.kept.items() if key not in made)
        call.left_out_bytes = sum(size for key, size in made.items() if key not in self._own and key not in kept)

    def _tell(self, call: RegionCall, moment: str) -> None:
        if self._at_boundary is not None:
            self._at_boundary(call, moment)


_watching: list[RegionWatch] = []
_torchs_hook = torch_checkpoint._checkpoint_hook
_Calls = list[tuple[RegionWatch, RegionCall]]


class _WatchedHook(_torchs_hook):
    """Torch's hooks around the forward of a region, told to whoever watches."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self._calls: _Calls = []
        if torch._C._current_graph_task_id() == -1:  # else a region inside of one that runs again
            module = module_of(frame.recompute_fn)
            self._calls = [(watch, watch._begin(module)) for watch in _watching]
            frame.recompute_fn = functools.partial(_again, self._calls, frame.recompute_fn, weakref.ref(frame))

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for watch, call in self._calls:
            watch._end(call)


def _again(calls: _Calls, run: Callable[..., Any], frame: weakref.ref[Any], *inputs: Any) -> None:
    """Run a region again. A second time (a retained graph) is not noted."""
    noted = [(watch, call) for watch, call in calls if watch in _watching and call.recompute_start is None]
    if not noted:
        run(*inputs)
        return
    for watch, call in noted:
        watch._begin_again(call)
    with suppress(torch_checkpoint._StopRecomputationError):
        run(*inputs)  # torch ends here as well; first the frames of the forward must go, and what they hold
    kept = _sizes(tensors_in((inputs, getattr(_given_to_checkpoint(run), "keywords", None))))
    made = _sizes(_recomputed_by(frame()))
    for watch, call in noted:
        watch._end_again(call, kept, made)


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {key: t.untyped_storage().nbytes() for t in tensors if (key := storage_key(t)) is not None}


def _recomputed_by(frame: Any) -> list[Tensor]:
    return [tensor for saved in list(frame.recomputed.values()) for tensor in saved.values()] if frame else []


# ---- what is checkpointed --------------------------------------------------------------------------------------------


def module_of(function: Any) -> nn.Module | None:
    """The module that a checkpointed function is, is a method of, or carries in its closure or first argument."""
    if isinstance(function, functools.partial) and function.func is _again:
        function = function.args[1]
    for value in (function, *(_content(cell) for cell in getattr(function, "__closure__", None) or ())):
        while isinstance(value, functools.partial):
            value = value.args[0] if value.args and isinstance(value.args[0], nn.Module) else value.func
        target = getattr(value, "__self__", value)
        if isinstance(target, nn.Module):
            return target
    return None


def _given_to_checkpoint(recompute: Any) -> Any:
    """The function that was given to `checkpoint`: the name `fn` in the closure that torch recomputes with."""
    names = getattr(getattr(recompute, "__code__", None), "co_freevars", ())
    return _content(recompute.__closure__[names.index("fn")]) if "fn" in names else None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound yet
        return None
