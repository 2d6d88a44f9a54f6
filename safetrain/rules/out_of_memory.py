"""M404: what memory was used for when it ran out, where, and what would have fitted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.accounting.inventory import weigh
from safetrain.data.batch import tensors_in
from safetrain.findings import Finding, rule
from safetrain.graph import format_bytes, storage_key
from safetrain.source import USER, frame_locals, grade, traceback_line

OUT_OF_MEMORY = rule(
    "M404", "out-of-memory", "error", "memory ran out: who had it, in which phase, and which switches would fit"
)

_GROWTH_RULES = ("M401", "M402", "M405", "G101", "G103", "G106", "G107", "G110")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUEST = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_LARGEST = 3


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is an allocator's no: CUDA's, another accelerator's, the CPU's, or Python's own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in text or "not enough memory" in text or "out of memory" in text.lower()


def find_out_of_memory(
    error: BaseException,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    *,
    used_bytes: int,
    meter: str = "CPU heap",
    used_before: int = 0,
    samples: int | None = None,
    evaluating: bool = False,
    findings: Iterable[Finding] = (),
) -> list[Finding]:
    """Explain an out-of-memory error while its traceback still holds the failed attempt.

    `used_bytes` is what the meter says now, `used_before` what it said before the run, without the model; `samples` the
    size of the batch, where it is known; `findings` what the run has shown so far: growth is named as the cause.
    Reads a device's allocator books at most, no host sync.
    """
    if not is_out_of_memory(error):
        return []
    scene = _Scene.of(error.__traceback__, model, evaluating)
    owners = owned_bytes(model, optimizers)
    rest = max(0, used_bytes - used_before - sum(owners.values()))
    request = requested_bytes(error)
    asked = f"{format_bytes(request)} more did not fit" if request is not None else "there was no more to be had"
    where = f" of {scene.module}" if scene.module else ""
    had = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in owners.items() if size)
    named = _largest_names(error.__traceback__, model, at_least=used_bytes // 100)
    largest = "; ".join(f"{name} {format_bytes(size)}" for name, size in named)
    grown = next((f for f in findings if f.code in _GROWTH_RULES and f.severity != "note"), None)
    return [
        OUT_OF_MEMORY.finding(
            f"out of memory in {scene.phase}{where}: {asked} beside {format_bytes(used_bytes)} in use ({meter}): "
            f"{had}{', ' if had else ''}activations, temporaries and what was kept {format_bytes(rest)}"
            + (f", before the run {format_bytes(used_before)}" if used_before else "")
            + (f". Largest names: {largest}" if largest else ""),
            source=traceback_line(error.__traceback__),
            module=scene.module,
            pinned_bytes=used_bytes,
            cause=None if grown is None else f"memory had been growing: {grown.code}, {grown.holder or grown.message}",
            fix=_remedy(scene, scene.samples or samples, owners, rest, optimizers, grown),
        )
    ]


def requested_bytes(error: BaseException) -> int | None:
    """What the failed allocation asked for, as the error says."""
    found = _REQUEST.search(str(error))
    if found is None:
        return None
    unit = next(size for name, size in _UNITS.items() if name.lower() == found[2].lower())
    return int(float(found[1]) * unit)


def owned_bytes(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, int]:
    """Bytes of parameters, buffers, gradients and optimizer state, each storage once."""
    seen: set[int] = set()

    def count(tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            key = storage_key(tensor)
            if key is not None and key not in seen:
                seen.add(key)
                total += tensor.untyped_storage().nbytes()
        return total

    params = list(model.parameters())
    return {
        "parameters": count(params),
        "buffers": count(model.buffers()),
        "gradients": count(p.grad for p in params if p.grad is not None),
        "optimizer state": count(t for opt in optimizers.values() for t in tensors_in(dict(opt.state))),
    }


@dataclass(frozen=True, slots=True)
class _Scene:
    """Where it happened."""

    phase: str
    module: str | None
    samples: int | None
    """First dimension of what the outermost module was given."""

    @staticmethod
    def of(tb: TracebackType | None, model: nn.Module, evaluating: bool) -> _Scene:
        names = {id(module): name for name, module in model.named_modules()}
        phase, module, samples = "the data or the loop", None, None
        for frame in _frames(tb):
            filename, function = frame.f_code.co_filename, frame.f_code.co_name
            if function == "_call_impl" and filename.endswith("module.py"):
                scope = frame_locals(frame)
                called = scope.get("self")
                if samples is None:
                    samples = next((t.shape[0] for t in tensors_in(scope.get("args", ())) if t.dim()), None)
                module = f"{names.get(id(called), '')} ({type(called).__name__})".strip()
                phase = "forward" if phase != "backward" else "backward, recomputing the forward"
            elif function == "backward" and os.sep + "torch" + os.sep in filename:
                phase, module = "backward", None
            elif os.sep + os.path.join("torch", "optim") + os.sep in filename:
                phase, module = "the optimizer's step", None
        return _Scene("evaluation" if evaluating else phase, module, samples)


def _frames(tb: TracebackType | None) -> Iterator[FrameType]:
    while tb is not None:
        yield tb.tb_frame
        tb = tb.tb_next


def _largest_names(tb: TracebackType | None, model: nn.Module, at_least: int) -> list[tuple[str, int]]:
    """Local names of the user's frames that hold most tensor bytes, the model apart."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())} | {id(model)}
    sizes: dict[str, int] = {}
    met: set[int] = set()
    for frame in _frames(tb):
        if grade(frame.f_code.co_filename) != USER:
            continue
        for name, value in frame_locals(frame).items():
            if name == "self" or id(value) in own | met or isinstance(value, (nn.Module, Optimizer)):
                continue
            met.add(id(value))
            size = sum(weigh([value]).by_device.values())
            if size >= max(1, at_least):
                sizes[f"`{name}` in {frame.f_code.co_name}()"] = size
    return sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST]


def _remedy(
    scene: _Scene,
    samples: int | None,
    owners: Mapping[str, int],
    rest: int,
    optimizers: Mapping[str, Optimizer],
    grown: Finding | None,
) -> str:
    if grown is not None and grown.fix:
        return f"stop the growth first ({grown.code}): {grown.fix}"
    if scene.phase == "evaluation":
        return "evaluate in smaller batches, and keep numbers or CPU copies of what a batch gives, not its outputs"
    if scene.phase == "the optimizer's step":
        return _optimizer_remedy(owners, optimizers)
    ways: list[str] = []
    if samples is not None and samples > 1:
        ways.append(f"micro-batches of {samples // 2} instead of {samples}, with accumulate=2 (the same gradients)")
    if rest > sum(owners.values()):
        ways.append("activation checkpointing of the biggest blocks (activation_checkpoint=…)")
    ways.append('precision="bf16"')
    if owners["optimizer state"] > owners["parameters"]:
        ways.append("an optimizer with less state (SGD, Adafactor)")
    return "cheapest first: " + "; ".join(ways)


def _optimizer_remedy(owners: Mapping[str, int], optimizers: Mapping[str, Optimizer]) -> str:
    unfused = [name for name, opt in optimizers.items() if opt.defaults.get("fused") is not True]
    ways: Sequence[str] = [
        *(["fused=True (no temporary copy of all parameters)"] if unfused else []),
        "an optimizer with less state (SGD, Adafactor)",
        "smaller micro-batches leave more room"
        if owners["optimizer state"]
        else "drop outputs and loss before the step",
    ]
    return "cheapest first: " + "; ".join(ways)
