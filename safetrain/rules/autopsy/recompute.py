"""G126: a recomputation under activation checkpointing that is not the forward over again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import Finding, SourceLine
from safetrain.recording.recorder import Op, OpInfo, Recorder, Watcher, Where, as_source
from safetrain.recording.regions import module_of
from safetrain.rules.autopsy.catalogue import RECOMPUTE_MISMATCH
from safetrain.rules.autopsy.failure import Failure, names_in


@dataclass(slots=True)
class _Draw:
    op: Op
    states: set[int]
    module: str | None


class RandomWatcher(Watcher):
    """Compares the generator's state at each random operation of a recomputation with those of the forward.

    Only states are compared (hashed), no values: a recomputation is right when it draws from a state that the forward
    drew from in the same module (outside modules: on the same line).
    """

    def __init__(self, record: Recorder | None = None) -> None:
        self.record = record
        self.mismatches: dict[tuple[str, str | Where | None], _Draw] = {}
        self._draws: dict[tuple[str, str | Where | None], _Draw] = {}

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """See the class."""
        if not info.random or (op.in_backward and not op.grad_enabled):
            return
        state = _generator_state(read)
        if state is None:
            return
        module = self.record.module_at(frame) if self.record is not None else None
        # A recomputation starts at the checkpointed function: what called it is not on the stack again.
        for key in ((op.name, op.where), (op.name, module)):
            if not op.in_backward:
                self._draws.setdefault(key, _Draw(op, set(), module)).states.add(state)
            elif key[1] is not None and key in self._draws:
                if state not in self._draws[key].states:
                    self.mismatches.setdefault(key, self._draws[key])
                return

    def findings(self) -> list[Finding]:
        """One for each line whose recomputation drew other numbers."""
        return [_mismatch(draw) for draw in self.mismatches.values()]


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
    caller = as_source(draw.op.stack[1]) if draw.op.checkpoint is None and len(draw.op.stack) > 1 else None
    called = f"; it is called on line {caller.line}: `{caller.text}`" if caller else ""
    return RECOMPUTE_MISMATCH.finding(
        "the recomputation under activation checkpointing drew other random numbers than the forward: "
        f"{draw.op.short_name}{inside}{line}. Gradients belong to another dropout mask (or noise) than the loss",
        severity="warning",
        source=place,
        module=draw.module,
        op=draw.op.short_name,
        cause=f"the generator was not put back before {draw.op.short_name}{line} was recomputed{called}",
        fix="let checkpoint keep the generator: preserve_rng_state=True (the default); a hand-written recomputation "
        "must save and restore it",
    )


# ---------------------------------------------------------------------------- errors


def explain_recompute_mismatch(failure: Failure) -> Finding:
    """The finding for torch.utils.checkpoint's complaint that a recomputation differs from the forward."""
    module, name = _checkpointed_module(failure)
    record = failure.record
    difference = _first_difference(record) if record is not None else None
    calls = [op.checkpoint for op in record.ops if op.checkpoint is not None] if record is not None else []
    if difference is not None:
        source = difference.source
    else:  # the comparison failed while a result was being saved, before the operation itself ran
        source = _last_recomputed(record) or (as_source(calls[0]) if calls else failure.source)
    kind = "other shapes or dtypes" if "metadata" in failure.text else "another number of tensors"
    what = f"`{name}`" if name else "a checkpointed function"
    what_differs = difference.short_name if difference is not None else "the one"
    where = (
        f"; the first operation that differs is {what_differs} on line {source.line}: `{source.text}`" if source else ""
    )
    return RECOMPUTE_MISMATCH.finding(
        f"recomputing {what} in backward saved {kind} than its forward{where}",
        source=source,
        module=name,
        op=difference.short_name if difference is not None else None,
        cause=_why_different(module) + where,
        fix="make the checkpointed code do the same twice: no branch on a counter, a cache, Python's random or a "
        "mode that changes "
        "between forward and backward; or leave that module out of checkpointing",
    )


def _checkpointed_module(failure: Failure) -> tuple[nn.Module | None, str | None]:
    """The module whose recomputation failed, from torch's own frames."""
    for frame, _ in reversed(failure.frames):
        if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            continue
        local = names_in(frame)
        for value in (local.get("frame"), local.get("self"), local.get("ctx"), local.get("gen")):
            function = getattr(value, "recompute_fn", None) or getattr(value, "run_function", None)
            module = module_of(function)
            if module is not None:
                names = {id(m): n for n, m in failure.model.named_modules()}
                return module, names.get(id(module)) or type(module).__name__
    return None, None


def find_recompute_differences(record: Recorder) -> list[Finding]:
    """G126 where a recomputation ran other operations than the forward and torch did not notice (same number of saves).

    Only operations on values with a graph count, and no casts: autocast may cache those.
    """
    op = _first_difference(record)
    if op is None:
        return []
    source = op.source
    where = f" on line {source.line}: `{source.text}`" if source else ""
    return [
        RECOMPUTE_MISMATCH.finding(
            f"the recomputation under activation checkpointing ran {op.short_name}{where} where the forward had done "
            "something else: "
            "gradients belong to another function than the loss",
            severity="warning",
            source=source,
            op=op.short_name,
            cause="the checkpointed code did not do the same thing twice (it branches on something that changed)",
            fix="make the checkpointed code depend on its inputs and parameters only, or leave it out of checkpointing",
        )
    ]


_UNTOLD = frozenset({"detach", "_to_copy", "alias"})


def _first_difference(record: Recorder) -> Op | None:
    """The first recomputed operation that the forward did not do at that place, over all checkpointed segments."""
    forward = [op for op in record.ops if op.task == -1 and op.checkpoint is not None and _compares(op)]
    if not forward:
        return None  # reentrant checkpoints run their forward without a graph, and hand-written ones are not known
    kinds = [_kind(op) for op in forward]
    for again in _recomputations(record):
        if any(op.selective for op in again):
            continue  # only some operations are done again
        best = max(_common(kinds, start, again) for start in range(len(kinds)))
        if best < len(again):
            return again[best]
    return None


def _last_recomputed(record: Recorder | None) -> SourceLine | None:
    again = [op for op in record.ops if op.recomputed] if record is not None else []
    return again[-1].source if again else None


def _compares(op: Op) -> bool:
    return op.grad_enabled and op.short_name not in _UNTOLD and any(i.requires_grad for i in op.inputs)


def _kind(op: Op) -> tuple[Any, ...]:
    """What must be the same: the operation, its shapes and numbers, and which leaves it reads."""
    numbers = () if "batch_norm" in op.name else op.scalars  # layers that hold their statistics still set momentum to 0
    leaves = tuple([i.storage for i in op.inputs if i.producer < 0 and i.requires_grad])
    return op.name, tuple([i.shape for i in op.inputs]), numbers, leaves


def _recomputations(record: Recorder) -> Iterator[list[Op]]:
    """Each stretch of operations that a checkpoint did again: one recomputed segment, or several in a row."""
    stretch: list[Op] = []
    for op in record.ops:
        if op.recomputed:
            if _compares(op):
                stretch.append(op)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _common(kinds: list[Any], start: int, again: list[Op]) -> int:
    count = 0
    while count < len(again) and start + count < len(kinds) and _kind(again[count]) == kinds[start + count]:
        count += 1
    return count


def _why_different(module: nn.Module | None) -> str:
    if module is not None and len({m.training for m in module.modules()}) > 1:
        return (
            "its submodules are in different modes now; a mode that changed between forward and backward changes "
            "what is saved"
        )
    return (
        "the checkpointed code did not do the same thing twice (a branch on changing state, autocast, mode or shapes)"
    )
