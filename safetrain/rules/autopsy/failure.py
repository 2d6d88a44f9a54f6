"""What is known when a step has failed: the error, its frames, the loss, the model, and a record if there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.findings import SourceLine
from safetrain.recording.recorder import Recorder
from safetrain.source import USER, frame_locals, grade, line_text
from safetrain.source.called import Called, called_functions

_MAX_ITEMS = 64
_PLAIN_SKIP = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(slots=True)
class Failure:
    """The material of one explanation. Lives as long as the explaining does: it holds frames and tensors."""

    error: BaseException
    model: nn.Module
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    record: Recorder | None = None
    """Operations of the failed step, recorded live or in a replay."""
    loss: Tensor | None = None
    first_node: int | None = None
    """Autograd's counter when the failed step (or this backward's forward) began: older nodes are of earlier steps."""
    gradients_off_at: SourceLine | None = None
    """Where gradients were last switched off, when the driver watches that."""
    frames: list[tuple[FrameType, int]] = field(default_factory=list)
    """(frame, line) of the traceback, outermost first."""

    @property
    def text(self) -> str:
        """The error's message."""
        return str(self.error)

    @property
    def user_frames(self) -> list[tuple[FrameType, int]]:
        """The user's own frames, innermost first."""
        return [(f, line) for f, line in reversed(self.frames) if grade(f.f_code.co_filename) == USER]

    @property
    def source(self) -> SourceLine | None:
        """The innermost user line of the traceback."""
        for frame, line in self.user_frames:
            filename = frame.f_code.co_filename
            return SourceLine(filename, line, line_text(filename, line))
        return None

    def user_frames_lines(self) -> list[tuple[str, int]]:
        """(file, line) of `user_frames`."""
        return [(frame.f_code.co_filename, line) for frame, line in self.user_frames]

    def parameter_name(self, tensor: Tensor) -> str | None:
        """The model's name of a parameter or buffer."""
        for name, known in (*self.model.named_parameters(), *self.model.named_buffers()):
            if known is tensor:
                return name
        return None

    def storage_names(self) -> dict[int, str]:
        """Names of the model's parameters and buffers by storage."""
        named = [*self.model.named_buffers(), *self.model.named_parameters()]
        return {t.untyped_storage()._cdata: name for name, t in named if t.layout is torch.strided}

    def is_buffer(self, name: str) -> bool:
        """Whether the model's tensor of that name is a buffer."""
        return any(name == known for known, _ in self.model.named_buffers())


def names_in(frame: FrameType) -> dict[str, Any]:
    """The local names of a frame of the failed run. Also where a function reads `locals()` itself: nothing runs on."""
    return frame_locals(frame) or dict(frame.f_locals)


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """(frame, line) of an exception's traceback, outermost first, the calls above the handler included."""
    frames: list[tuple[FrameType, int]] = []
    tb = error.__traceback__
    if tb is not None:
        above = tb.tb_frame.f_back
        while above is not None:
            frames.append((above, above.f_lineno))
            above = above.f_back
        frames.reverse()
    while tb is not None:
        frames.append((tb.tb_frame, tb.tb_lineno))
        tb = tb.tb_next
    return frames


_LOSS_HOLDERS = {
    ("_tensor.py", "backward"): ("self",),
    ("__init__.py", "backward"): ("tensors",),
    ("__init__.py", "grad"): ("outputs",),
    ("loop.py", "backward"): ("loss",),
    ("patches.py", "call"): ("tensors", "outputs"),
}


def loss_in(frames: Sequence[tuple[FrameType, int]]) -> Tensor | None:
    """The tensor whose backward failed: what torch's own frames (or ours) were called with."""
    for frame, _ in reversed(frames):
        code = frame.f_code
        key = (code.co_filename.replace("\\", "/").rsplit("/", 1)[-1], code.co_name)
        for name in _LOSS_HOLDERS.get(key, ()):
            value = names_in(frame).get(name)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, Tensor):
                return value
    return None


@dataclass(slots=True)
class Named:
    """A tensor that a name of the user's reaches."""

    tensor: Tensor
    label: str
    """As it is said to the user: ``local `pred` in closure()``, ``model.hidden``."""
    name: str
    """The variable or attribute alone."""
    frame: FrameType | None = None
    line: int = 0
    owner: Any = None
    """The object whose attribute it is."""
    function: Called | None = None
    """The function that reaches it from its closure or as a global, when that has returned."""
    in_container: bool = False


def named_tensors(failure: Failure) -> Iterator[Named]:
    """Tensors that names reach: locals of the user's frames (innermost first), attributes of objects, globals."""
    seen: set[int] = set()
    for frame, line in failure.user_frames:
        where = f"in {frame.f_code.co_name}()" if frame.f_code.co_name != "<module>" else "of the script"
        local = names_in(frame)
        for name, value in local.items():
            for suffix, tensor in _inside(value):
                yield Named(tensor, f"local `{name}{suffix}` {where}", name, frame, line, in_container=bool(suffix))
        for name, value in local.items():
            yield from _attributes(name, value, seen)
        if frame.f_code.co_name != "<module>":
            for name, value in list(frame.f_globals.items()):
                for suffix, tensor in _inside(value):
                    yield Named(tensor, f"global `{name}{suffix}`", name, frame, line, in_container=bool(suffix))
    forwards = {kind: getattr(kind, "forward", None) for kind in map(type, failure.model.modules())}
    mine = [
        Called(f) for f in forwards.values() if isinstance(f, FunctionType) and grade(f.__code__.co_filename) == USER
    ]
    for called in (*called_functions(frame for frame, _ in failure.frames), *mine):
        yield from _outside(called)
    for path, module in failure.model.named_modules():
        yield from _attributes(path or "model", module, seen)


def _outside(called: Called) -> Iterator[Named]:
    for name, value in called.outside_values().items():
        for suffix, tensor in _inside(value):
            where = f"`{name}{suffix}` outside {called.function.__name__}()"
            yield Named(tensor, where, name, function=called, in_container=bool(suffix))


def _attributes(name: str, owner: Any, seen: set[int]) -> Iterator[Named]:
    kind = type(owner)
    if (
        id(owner) in seen
        or isinstance(owner, (type, dict, list, tuple, Tensor))
        or kind.__module__.startswith(("torch.", "builtins"))
    ):
        return
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    seen.add(id(owner))
    for attribute, value in list(attributes.items()):
        if attribute not in _PLAIN_SKIP:
            for suffix, tensor in _inside(value):
                yield Named(tensor, f"`{name}.{attribute}{suffix}` ({kind.__name__})", attribute, owner=owner)
    if isinstance(owner, nn.Module):
        for word, held in (("buffer", owner._buffers), ("parameter", owner._parameters)):
            for attribute, value in held.items():
                if isinstance(value, Tensor):
                    yield Named(value, f"{word} `{name}.{attribute}` ({kind.__name__})", attribute, owner=owner)


def _inside(value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif depth < 2 and type(value) in (list, tuple):
        for i, item in enumerate(value[:_MAX_ITEMS]):
            for suffix, tensor in _inside(item, depth + 1):
                yield f"[{i}]{suffix}", tensor
    elif depth < 2 and type(value) is dict:
        for key, item in list(value.items())[:_MAX_ITEMS]:
            for suffix, tensor in _inside(item, depth + 1):
                yield f"[{key!r}]{suffix}", tensor


def tensor_in_message(text: str) -> tuple[tuple[int, ...] | None, str | None, int | None, int | None]:
    """(shape, op that made it, its version, the version expected) out of autograd's in-place message."""
    match = re.search(
        r"\[[\w.]*Tensor \[([\d, ]*)\]\](?:, which is output \d+ of (\w+),)?"
        r" is at version (\d+); expected version (\d+)",
        text,
    )
    if match is None:
        return None, None, None, None
    shape = tuple(int(n) for n in match[1].split(",") if n.strip())
    return shape, match[2], int(match[3]), int(match[4])
