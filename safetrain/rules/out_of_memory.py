"""M404: what memory was used for when it ran out, where, and what would have fitted."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from safetrain.accounting.failed_attempt import (
    EVALUATION,
    OPTIMIZER,
    SAVING,
    Attempt,
    Sized,
    bytes_to_save,
    kept_by_names,
    read_attempt,
)
from safetrain.data.batch import tensors_in
from safetrain.findings import Finding, rule
from safetrain.graph import format_bytes, storage_key
from safetrain.source import traceback_line

OUT_OF_MEMORY = rule(
    "M404", "out-of-memory", "error", "memory ran out: who had it, in which phase, and which switches would fit"
)

_log = logging.getLogger("safetrain")
_SHARE_SAVED = 0.8
"""Of the room for activations, how much may be saved for backward: the rest is for temporaries."""
_GROWTH_RULES = ("M401", "M402", "M405", "G101", "G103", "G106", "G107", "G110")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUEST = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is an allocator's no, or was raised for one: CUDA's, the CPU's, the system's, Python's own."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        text = str(error) if isinstance(error, (RuntimeError, OSError)) else ""
        if any(word in text for word in _WORDS) or "out of memory" in text.lower():
            return True
        error = error.__cause__
    return False


def find_out_of_memory(
    error: BaseException,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    *,
    used_bytes: int,
    meter: str = "CPU heap",
    used_before: int = 0,
    batch: Any = None,
    samples: int | None = None,
    evaluating: bool = False,
    forecast_peak: Callable[[int], int] | None = None,
    replay: Callable[[], Tensor] | None = None,
    findings: Iterable[Finding] = (),
) -> list[Finding]:
    """Explain an out-of-memory error while its traceback still holds the failed attempt.

    `used_bytes` is what the meter says now, `used_before` what it said before the run, without the model; `batch` the
    micro-batch and `samples` its size, where they are known; `forecast_peak` tells what a step would take at a
    micro-batch size, `replay` runs the micro-batch's forward: one of them is used, on tensors without data, to say what
    would fit. `findings` is what the run has shown so far: growth is named as the cause. Reads a device's allocator
    books at most, no host sync.
    """
    if not is_out_of_memory(error):
        return []
    at_least = used_bytes // 100
    attempt = read_attempt(error, model, batch, evaluating=evaluating, at_least=at_least)
    kept_bytes, kept = kept_by_names(error, model, optimizers, batch, at_least=at_least)
    owners = owned_bytes(model, optimizers)
    owners["batch"] = sum(t.untyped_storage().nbytes() for t in {storage_key(t): t for t in tensors_in(batch)}.values())
    owners["saved for backward"], owners["kept by other names"] = attempt.saved_bytes, kept_bytes
    rest = max(0, used_bytes - used_before - sum(owners.values()))
    request = requested_bytes(error)
    asked = f"{format_bytes(request)} more did not fit" if request is not None else "there was no more to be had"
    had = "".join(f"{owner} {format_bytes(size)}, " for owner, size in owners.items() if size)
    grown = next((f for f in findings if f.code in _GROWTH_RULES and f.severity != "note"), None)
    room = attempt.saved_bytes + rest
    known_samples = attempt.samples or samples
    smaller = None
    if known_samples is not None and known_samples > 1 and attempt.phase not in (EVALUATION, OPTIMIZER, SAVING):
        tells = _by_forecast(known_samples, used_bytes - used_before, forecast_peak) or _by_what_is_saved(
            known_samples, room, None if replay is None else bytes_to_save(replay, model, batch)
        )
        smaller = (
            f"micro-batches of {tells[0]} instead of {known_samples}{tells[1]} (in a Trainer "
            f"micro_batch_size={tells[0]}, or oom='split'; the gradients stay the same)"
        )
    return [
        OUT_OF_MEMORY.finding(
            f"out of memory in {attempt.phase}{f' of {attempt.module}' if attempt.module else ''}: {asked} beside "
            f"{format_bytes(used_bytes)} in use ({meter}): {had}temporaries and the rest {format_bytes(rest)}"
            + (f", before the run {format_bytes(used_before)}" if used_before else "")
            + _listed("Saved most", attempt.saved)
            + _listed("Largest names", attempt.names)
            + _listed("Kept by", kept),
            source=traceback_line(error.__traceback__),
            module=attempt.module,
            pinned_bytes=used_bytes,
            cause=None if grown is None else f"memory had been growing: {grown.code}, {grown.holder or grown.message}",
            fix=_remedy(attempt, smaller, owners, room, optimizers, grown),
        )
    ]


def _listed(title: str, entries: Sequence[Sized]) -> str:
    return f". {title}: " + "; ".join(f"{e.label} {format_bytes(e.num_bytes)}" for e in entries) if entries else ""


def _by_forecast(samples: int, capacity: int, forecast_peak: Callable[[int], int] | None) -> tuple[int, str] | None:
    """The micro-batch size whose peak is what was in use when memory ran out, on the line through two forecasts."""
    if forecast_peak is None:
        return None
    try:
        half = max(1, samples // 2)
        whole_peak, half_peak = forecast_peak(samples), forecast_peak(half)
    except Exception as error:
        _log.debug("what would fit could not be forecast: %s", error)
        return None
    each = (whole_peak - half_peak) / (samples - half)
    size = int(half + (capacity - half_peak) / each) if each > 0 else half
    if not 1 <= size < samples:
        return None
    size -= size % 8 if size > 32 else 0
    return size, f": {samples} are forecast to need {format_bytes(whole_peak)}, and there was {format_bytes(capacity)}"


def _by_what_is_saved(samples: int, room: int, needed_bytes: int | None) -> tuple[int, str]:
    """Half, or half of that, until what it saves leaves room for temporaries as well."""
    size = samples // 2
    if not needed_bytes:
        return size, ""
    while size > 1 and size / samples * needed_bytes > _SHARE_SAVED * room:
        size //= 2
    return (
        size,
        f": {samples} save {format_bytes(needed_bytes)} for backward, and there was room for {format_bytes(room)}",
    )


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
            if is_lazy(tensor):
                continue  # no bytes before the first call of its module
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


def _remedy(
    attempt: Attempt,
    smaller: str | None,
    owners: Mapping[str, int],
    room: int,
    optimizers: Mapping[str, Optimizer],
    grown: Finding | None,
) -> str:
    if grown is not None and grown.fix:
        return f"stop the growth first ({grown.code}): {grown.fix}"
    if attempt.phase == SAVING:
        return (
            "earlier checkpoints are as they were; leave more memory free: a checkpoint is written from a copy of parts"
        )
    if attempt.phase == EVALUATION:
        return "evaluate in smaller batches, and keep numbers or CPU copies of what a batch gives, not its outputs"
    if attempt.phase == OPTIMIZER:
        return _optimizer_remedy(owners, optimizers)
    ways = [smaller] if smaller is not None else []
    if room > sum(owners.values()) / 2:
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
