"""What is still there of an attempt that ran out of memory, read from its traceback: phase, module, names, graph."""

from __future__ import annotations

import dis
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from safetrain.accounting.inventory import names_of, weigh
from safetrain.data.batch import tensors_in
from safetrain.graph import SavedFreed, Survey, grad_fn_of, saved_tensors, storage_key, walk
from safetrain.graph.walk import is_leaf_node
from safetrain.recording.replay import plain_attributes, restore_plain_attributes
from safetrain.source import USER, frame_locals, grade

_log = logging.getLogger("safetrain")
EVALUATION, OPTIMIZER, SAVING = "evaluation", "the optimizer's step", "saving a checkpoint"
_OPTIMIZERS = os.sep + os.path.join("torch", "optim") + os.sep
_CHECKPOINTS = os.sep + os.path.join("safetrain", "checkpoint") + os.sep
_LOOP = os.sep + os.path.join("safetrain", "loop.py")
_BACKWARD = re.compile(r"Backward\d*$")
_LARGEST = 3
_NEAR = 64  # nodes behind one to look for a parameter's name in
_SEARCH_S = 2.0


@dataclass(frozen=True, slots=True)
class Sized:
    """Something that takes memory, in words."""

    label: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where memory ran out, and what the failed attempt held then."""

    phase: str
    module: str | None
    samples: int | None
    """First dimension of what the outermost module was given."""
    names: list[Sized]
    """Local names of the user's frames that held most, with the lines that set them."""
    saved_bytes: int
    """Saved for backward so far, parameters and the batch not counted."""
    saved: list[Sized]
    """The operations that saved most."""


def read_attempt(error: BaseException, model: nn.Module, batch: Any, *, evaluating: bool, at_least: int) -> Attempt:
    """Read it while the traceback holds its frames. Names below `at_least` bytes are left out. No host sync."""
    frames = list(frames_of(error))
    phase, module, samples = _scene(frames, model)
    known = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    saved_bytes, saved = _saved(frames, model, known)
    if evaluating and phase != SAVING:
        phase = EVALUATION
    return Attempt(phase, module, samples, _names(frames, known, model, at_least), saved_bytes, saved)


def frames_of(error: BaseException | None) -> Iterator[FrameType]:
    """Frames that an error went through, and the errors that it was raised for, outermost first."""
    while error is not None:
        yield from _frames(error.__traceback__)
        error = error.__cause__


def in_evaluation(error: BaseException) -> bool:
    """Whether it went through a Trainer's evaluation, which has put the phase back by the time it is looked at."""
    return any(
        f.f_code.co_name in ("_evaluate", "predict") and f.f_code.co_filename.endswith(_LOOP) for f in frames_of(error)
    )


def _frames(tb: TracebackType | None) -> Iterator[FrameType]:
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _scene(frames: Iterable[FrameType], model: nn.Module) -> tuple[str, str | None, int | None]:
    names = {id(module): name for name, module in model.named_modules()}
    phase, module, samples = "the data or the loop", None, None
    for frame in frames:
        filename, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "_call_impl" and filename.endswith("module.py"):
            scope = frame_locals(frame)
            called = scope.get("self")
            if samples is None:
                samples = next((t.shape[0] for t in tensors_in(scope.get("args", ())) if t.dim()), None)
            module = f"{names.get(id(called), '')} ({type(called).__name__})".strip()
            phase = "forward" if phase != "backward" else "backward, recomputing the forward"
        elif function == "training_step" and phase == "the data or the loop":
            phase = "forward"
        elif function == "backward" and os.sep + "torch" + os.sep in filename:
            phase, module = "backward", None
        elif _OPTIMIZERS in filename:
            phase, module = OPTIMIZER, None
        elif _CHECKPOINTS in filename:
            return SAVING, None, samples
    return phase, module, samples


def _names(frames: Iterable[FrameType], known: list[Tensor], model: nn.Module, at_least: int) -> list[Sized]:
    """Local names of the user's frames that hold most tensor bytes, the model and the batch apart."""
    met = {id(tensor) for tensor in known} | {id(model)}
    found: list[Sized] = []
    for frame in frames:
        if grade(frame.f_code.co_filename) != USER:
            continue
        for name, value in frame_locals(frame).items():
            if name == "self" or id(value) in met or isinstance(value, (nn.Module, Optimizer)):
                continue
            met.add(id(value))
            size = sum(weigh([value]).by_device.values())
            if size >= max(1, at_least):
                shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
                line = _set_at(frame, name)
                where = f" ({os.path.basename(frame.f_code.co_filename)}:{line})" if line else ""
                found.append(Sized(f"`{name}`{shape} in {frame.f_code.co_name}(){where}", size))
    return sorted(found, key=lambda one: -one.num_bytes)[:_LARGEST]


def _set_at(frame: FrameType, name: str) -> int | None:
    """The line that last set a local name before the frame stopped; None for an argument."""
    line, last = None, None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.starts_line:
            line = _line_of(instruction)
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname.startswith("STORE_") and instruction.argval == name:
            last = line
    return last


def _line_of(instruction: dis.Instruction) -> int | None:
    number = getattr(instruction, "line_number", None) or instruction.starts_line  # a flag since Python 3.13
    return int(number) if number is not None else None


def _saved(frames: Iterable[FrameType], model: nn.Module, known: list[Tensor]) -> tuple[int, list[Sized]]:
    """Bytes that the graph of the frames' tensors saved for backward, and the operations that saved most."""
    starts = [grad_fn_of(tensor) for frame in frames for tensor in _tensors_of(frame)]
    nodes = walk(starts, limit=200_000).nodes
    counted = {storage_key(tensor) for tensor in known}
    sizes: dict[str, int] = {}
    total = 0
    owners = {id(param): name.rpartition(".")[0] or name for name, param in model.named_parameters()}
    for node in nodes:
        try:
            for tensor in saved_tensors(node):
                key = storage_key(tensor)
                if key is None or key in counted:
                    continue
                counted.add(key)
                size = tensor.untyped_storage().nbytes()
                total += size
                label = f"{_BACKWARD.sub('', type(node).__name__).lower()} {list(tensor.shape)}{_behind(node, owners)}"
                sizes[label] = sizes.get(label, 0) + size
        except SavedFreed:
            continue
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]
    return total, [Sized(label, size) for label, size in biggest]


def _tensors_of(frame: FrameType) -> Iterator[Tensor]:
    """Tensors that a frame's names hold, directly or one level down."""
    for value in frame_locals(frame).values():
        kind = type(value)
        inside = value.values() if kind is dict else value if kind in (tuple, list) else (value,)
        yield from (one for one in inside if isinstance(one, Tensor))


def _behind(node: Any, owners: Mapping[int, str]) -> str:
    """The module whose parameter the node's operation follows most closely."""
    for near in walk([node], limit=_NEAR).nodes:
        if is_leaf_node(near) and id(near.variable) in owners:
            return f" at `{owners[id(near.variable)]}`"
    return ""


def kept_by_names(
    error: BaseException, model: nn.Module, optimizers: Mapping[str, Optimizer], batch: Any, *, at_least: int
) -> tuple[int, list[Sized]]:
    """Bytes of tensors that the user's names keep beside model, optimizers and batch, and the places that keep most.

    Looks through everything that names lead to: a tenth of a second in a big program, two seconds at most.
    """
    apart = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    apart += [p.grad for p in model.parameters() if p.grad is not None]
    counted = {storage_key(t) for t in (*apart, *(t for o in optimizers.values() for t in tensors_in(dict(o.state))))}
    tb, error.__traceback__ = error.__traceback__, None  # the failed attempt is not what a name keeps
    try:
        survey = Survey(names_of(model, optimizers), budget_s=_SEARCH_S)
        places: dict[int, tuple[Any, list[Tensor]]] = {}
        total = 0
        for obj in survey.objects():
            key = storage_key(obj) if issubclass(type(obj), Tensor) else None
            if key is None or key in counted:
                continue
            counted.add(key)
            total += obj.untyped_storage().nbytes()
            path = survey.holder(obj).path
            parent = path[-2] if len(path) > 1 else obj
            places.setdefault(id(parent), (parent, []))[1].append(obj)
        found = [
            Sized(survey.holder(parent, tensors).describe(), size)
            for parent, tensors in places.values()
            if (size := sum(t.untyped_storage().nbytes() for t in tensors)) >= at_least
        ]
    finally:
        error.__traceback__ = tb
    return total, sorted(found, key=lambda one: -one.num_bytes)[:_LARGEST]


def bytes_to_save(replay: Callable[[], Tensor], model: nn.Module, batch: Any) -> int | None:
    """What the whole forward of a micro-batch saves for backward, by running it on tensors without data.

    None where it cannot be told: the step reads values (`.item()`, an `if` on a tensor), or there is no memory left for
    Python itself. Recomputation is seen as it will be; memory that is not saved for backward is not counted.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: set[int] = set()
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage must not give its place to another

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    kept = [(module, plain_attributes(module), dict(module._buffers)) for module in model.modules()]
    try:
        for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch)):
            alive += (tensor, mode.from_tensor(tensor))
            known |= {one.untyped_storage()._cdata for one in alive[-2:]}
        with mode, saved_tensors_hooks(pack, lambda tensor: tensor):
            replay()
    except Exception as error:
        _log.debug("what the forward saves could not be told: %s", error)
        return None
    finally:
        for module, plain, buffers in kept:
            restore_plain_attributes(module, plain)
            module._buffers.update(buffers)
    return sum(size for key, size in sizes.items() if key not in known)
