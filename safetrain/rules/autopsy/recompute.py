"""G126 and the observation behind L511: a recomputation that draws other numbers, or writes buffers again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import Finding
from safetrain.recorder import Op, OpInfo, Recorder, Watcher, Where, as_source
from safetrain.rules.autopsy.catalogue import RECOMPUTE_MISMATCH
from safetrain.rules.autopsy.failure import Failure
from safetrain.source import frame_locals


@dataclass(slots=True)
class _Draw:
    op: Op
    states: set[int]
    module: str | None


class RandomWatcher(Watcher):
    """Compares the generator's state at each random operation of a recomputation with those of the forward.

    Only states are compared (hashed), no values: a recomputation is right when it draws from a state that the forward
    drew from on the same line. Operations with a generator of their own are left out.
    """

    def __init__(self, record: Recorder | None = None) -> None:
        self.record = record
        self.mismatches: dict[tuple[str, Where | None], tuple[_Draw, Op]] = {}
        self._draws: dict[tuple[str, Where | None], _Draw] = {}

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """See the class."""
        if not info.random or (op.in_backward and not op.grad_enabled):
            return
        state = _generator_state(read)
        if state is None:
            return
        key = (op.name, op.where)
        if not op.in_backward:
            draw = self._draws.get(key)
            if draw is None:
                module = self.record.module_at(frame) if self.record is not None else None
                draw = self._draws[key] = _Draw(op, set(), module)
            draw.states.add(state)
        elif key in self._draws and state not in self._draws[key].states:
            self.mismatches.setdefault(key, (self._draws[key], op))

    def findings(self) -> list[Finding]:
        """One for each line whose recomputation drew other numbers."""
        return [_mismatch(draw) for draw, _ in self.mismatches.values()]


def _generator_state(read: list[Tensor]) -> int | None:
    device = read[0].device if read else torch.device("cpu")
    if device.type == "cpu":
        return hash(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return hash(torch.cuda.get_rng_state(device).numpy().tobytes())
    return None


def _mismatch(draw: _Draw) -> Finding:
    drawn_at = draw.op.source
    place = as_source(draw.op.checkpoint) or drawn_at
    line = f" (line {drawn_at.line}: `{drawn_at.text}`)" if drawn_at else ""
    inside = f" in module `{draw.module}`" if draw.module else ""
    return RECOMPUTE_MISMATCH.finding(
        f"the recomputation under activation checkpointing drew other random numbers than the forward: {draw.op.short_name}"
        f"{inside}{line}. Gradients belong to another dropout mask (or noise) than the loss",
        severity="warning",
        source=place,
        module=draw.module,
        op=draw.op.short_name,
        cause=f"the generator was not put back before {draw.op.short_name}{line} was recomputed",
        fix="let checkpoint keep the generator: preserve_rng_state=True (the default); a hand-written recomputation must save and restore it",
    )


@dataclass(frozen=True, slots=True)
class RewrittenBuffer:
    """A buffer that the forward updated and its recomputation updated again."""

    name: str
    module: str
    module_class: str
    where: Where | None
    """The checkpoint call, or the line of the forward."""


class BufferWatcher(Watcher):
    """Finds buffers that a recomputation changes once more (BatchNorm's running statistics under checkpointing).

    Keeps copies of the buffers that are touched inside backward, for that step. Values are compared, so a layer that
    holds its statistics still while it is recomputed is not accused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers: dict[int, tuple[str, nn.Module, str, Tensor]] = {}
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.layout is torch.strided:
                    key = buffer.untyped_storage()._cdata
                    self._buffers[key] = (path, module, f"{path}.{name}" if path else name, buffer)
        self._in_forward: dict[int, Where | None] = {}
        self._before: dict[int, Tensor] = {}

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """See the class."""
        if not self._buffers:
            return
        touched = written if not _normalises(op.name) else read
        for tensor in touched:
            if tensor.layout is not torch.strided:
                continue
            key = tensor.untyped_storage()._cdata
            if key not in self._buffers:
                continue
            if not op.in_backward:
                self._in_forward[key] = op.checkpoint or op.where
            elif op.grad_enabled and key in self._in_forward and key not in self._before:
                self._before[key] = self._buffers[key][3].detach().clone()

    def rewritten(self) -> list[RewrittenBuffer]:
        """Buffers whose value the recomputation changed. A host sync each."""
        found = []
        for key, before in self._before.items():
            path, module, name, buffer = self._buffers[key]
            if not torch.equal(buffer.detach(), before) and not _compensated(module):
                found.append(RewrittenBuffer(name, path or "model", type(module).__name__, self._in_forward[key]))
        return found


def _normalises(name: str) -> bool:
    """Batch norm kernels update running statistics without declaring it."""
    return "batch_norm" in name and "backward" not in name


def _compensated(module: nn.Module) -> bool:
    """Whether the momentum was chosen so that two updates equal one: 1 - sqrt(1 - m) for a round m."""
    momentum = getattr(module, "momentum", None)
    if not isinstance(momentum, float) or not 0 < momentum < 1:
        return False
    twice = 1 - (1 - momentum) ** 2
    return abs(twice - round(twice, 3)) < 1e-9 and abs(momentum - round(momentum, 6)) > 1e-9


# ---------------------------------------------------------------------------- errors


def explain_recompute_mismatch(failure: Failure) -> Finding:
    """The finding for torch.utils.checkpoint's complaint that a recomputation differs from the forward."""
    module, name = _checkpointed_module(failure)
    record = failure.record
    difference = _first_difference(record) if record is not None else None
    calls = [op.checkpoint for op in record.ops if op.checkpoint is not None] if record is not None else []
    source = difference.source if difference is not None else as_source(calls[0]) if calls else failure.source
    kind = "other shapes or dtypes" if "metadata" in failure.text else "another number of tensors"
    what = f"`{name}`" if name else "a checkpointed function"
    where = f"; the first operation that differs is {difference.short_name} on line {source.line}: `{source.text}`" if difference and source else ""
    return RECOMPUTE_MISMATCH.finding(
        f"recomputing {what} in backward saved {kind} than its forward{where}",
        source=source,
        module=name,
        op=difference.short_name if difference is not None else None,
        cause=_why_different(module) + where,
        fix="make the checkpointed code do the same twice: no branch on a counter, a cache, Python's random or a mode that changes "
        "between forward and backward; or leave that module out of checkpointing",
    )


def _checkpointed_module(failure: Failure) -> tuple[nn.Module | None, str | None]:
    """The module whose recomputation failed, from torch's own frames."""
    for frame, _ in reversed(failure.frames):
        if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            continue
        local = frame_locals(frame)
        for value in (local.get("frame"), local.get("self"), local.get("ctx"), local.get("gen")):
            module = _module_of(value)
            if module is not None:
                names = {id(m): n for n, m in failure.model.named_modules()}
                return module, names.get(id(module)) or type(module).__name__
    return None, None


def _module_of(holder: Any) -> nn.Module | None:
    function = getattr(holder, "recompute_fn", None) or getattr(holder, "run_function", None)
    cells = getattr(function, "__closure__", None) or ()
    for value in (function, *(cell.cell_contents for cell in cells)):
        target = getattr(value, "__self__", value)
        if isinstance(target, nn.Module):
            return target
    return None


def _first_difference(record: Recorder) -> Op | None:
    """The first recomputed operation that is not the forward's at the same place of its segment."""
    segments: dict[Where, list[Op]] = defaultdict(list)
    for op in record.ops:
        if not op.in_backward and op.checkpoint is not None:
            segments[op.checkpoint].append(op)
    again = [op for op in record.ops if op.in_backward and op.grad_enabled and op.short_name != "detach"]
    forward = [op for ops in segments.values() for op in ops if op.short_name != "detach"]
    lines = {(op.name, op.where) for op in forward}
    for op in again:
        if (op.name, op.where) not in lines:
            return op
    for op in again:
        matching = [f for f in forward if (f.name, f.where) == (op.name, op.where)]
        if matching and all([i.shape for i in f.inputs] != [i.shape for i in op.inputs] for f in matching):
            return op
    return None


def _why_different(module: nn.Module | None) -> str:
    if module is not None and len({m.training for m in module.modules()}) > 1:
        return "its submodules are in different modes now; a mode that changed between forward and backward changes what is saved"
    return "the checkpointed code did not do the same thing twice (a branch on changing state, autocast, mode or shapes)"
