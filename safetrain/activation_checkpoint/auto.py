"""Activation checkpointing within a budget: the fastest choice, module by module, from a few measured steps.

A run starts with all blocks recomputing, which takes the least memory. The third step of it is timed, the fourth tells
peaks and bytes, the fifth tries selective recomputation on some blocks, the sixth runs with the choice and confirms
its peak. Gradients are the same bits in all of them, so these are steps of the training like any other.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from safetrain.activation_checkpoint.applying import choose, set_mode
from safetrain.activation_checkpoint.budget import Choice, Option, Span, fastest, keep, peak, selective
from safetrain.activation_checkpoint.options import CheckpointOptions
from safetrain.activation_checkpoint.peaks import StretchPeaks
from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.data.batch import tensors_in
from safetrain.errors import ConfigError
from safetrain.graph import format_bytes, storage_key
from safetrain.memory import HeapMeter, Meter, heap_is_readable, meter_for
from safetrain.recording.regions import Clock, RegionCall, RegionWatch
from safetrain.rules.out_of_memory import owned_bytes

if TYPE_CHECKING:
    from safetrain.state import RunState

_log = logging.getLogger("safetrain")

_TIMED, _MEASURED, _TRIED = 3, 4, 5
"""Steps of a run: earlier ones make optimizer state, warm kernels and are looked at by others."""
_MARGIN = 0.003
"""Share of the budget that the choice leaves free: batches and the heap differ a little from step to step."""
_MAX_TRIED = 3
"""Blocks of one class on which selective recomputation is tried."""
_TRIAL_BYTES = 1.5
"""What it may keep there at most, in shares of what a block leaves out: not known before it was tried."""
_LAST_OUTPUTS = 3
"""Tensors of the output's size that the end of a block makes: a product, a dropout, a sum."""
_SLOW_HEAP_NS = 1_000_000_000
"""The heap's own account is worth waiting for: few steps are measured."""


@dataclass(slots=True)
class _Profile:
    """A step in which every block recomputes: the peak of each stretch, and the calls of each block."""

    peaks: list[int] = field(default_factory=list)
    calls: dict[str, list[tuple[RegionCall, Span]]] = field(default_factory=dict)
    outside: int = 0
    """Bytes of the meter that are not the training's."""


class AutoCheckpoint(Callback):
    """Decides what each of the chosen modules does within `options.budget`. `modes` tells what was decided.

    Raises:
        ConfigError: in the fourth step when even all blocks recomputing exceeds the budget; there is no such block;
            or the device does not tell its memory.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, model: nn.Module, options: CheckpointOptions, *, device: torch.device) -> None:
        assert isinstance(options.budget, int), "CheckpointOptions turns a budget into bytes"
        self.budget = options.budget
        self.blocks = choose(model, options)
        self.modes: dict[str, Choice] = dict.fromkeys(self.blocks, "recompute")
        """What each module does now."""
        self.peak_bytes: int | None = None
        """Highest bytes of the last measured step."""
        self.is_settled = False
        self._rng = options.preserve_rng_state
        self._names = {id(module): name for name, module in self.blocks.items()}
        self._device = device
        self._meter = _exact_meter(device)
        self._clock = Clock(device)
        self._seen = 0
        self._budget_left = float(self.budget)
        self._watch: RegionWatch | None = None
        self._peaks: StretchPeaks | None = None
        self._events: list[tuple[str, RegionCall]] = []
        self._taken: list[int] = []
        self._batch_bytes = 0
        self._outside = 0
        self._seconds: dict[str, tuple[float, float]] = {}
        self._profile = _Profile()
        self._options: list[Option] = []

    # ------------------------------------------------------------------ the measured steps

    def on_fit_start(self, state: RunState) -> None:
        """Measure anew, unless the choice was made."""
        if self.is_settled:
            return
        self._seen, self._budget_left = 0, float(self.budget)
        for name in self.blocks:
            self._set(name, "recompute")

    def on_step_start(self, state: RunState) -> None:
        """Start the measurement that is due."""
        if self.is_settled:
            return
        self._seen += 1
        if self._seen < _TIMED:
            return
        self._events, self._taken, self._batch_bytes = [], [], 0
        owned = sum(owned_bytes(state.model, state.optimizers).values())
        self._outside = self._meter.read() - owned if self._device.type == "cpu" else 0
        if self._seen == _TRIED and not self._try_selective():
            self._seen = _TRIED + 1
            self._decide()
        if self._seen in (_TIMED, _MEASURED, _TRIED):
            self._watch = RegionWatch(
                state.model, self._meter, self._clock, self._note if self._seen == _MEASURED else None
            )
            self._watch.start()
        if self._seen not in (_TIMED, _TRIED):
            self._peaks = StretchPeaks(self._device, self._meter)
            self._peaks.start()

    def on_backward_start(self, state: RunState) -> None:
        """The batch belongs to the training as well."""
        if self._peaks is not None and self._device.type == "cpu":
            sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(state.batch)}
            self._batch_bytes = max(self._batch_bytes, sum(sizes.values()))

    def on_step_end(self, state: RunState) -> None:
        """Read what was measured."""
        if self._watch is None and self._peaks is None:
            return
        if self._peaks is not None:
            self._taken.append(self._peaks.take())
            self.peak_bytes = max(self._taken) - self._outside + self._batch_bytes
        watch = self._stop()
        if self._seen == _TIMED and watch is not None:
            self._seconds = self._times(watch.calls)
        elif self._seen == _MEASURED and watch is not None:
            self._take_profile(state)
        elif self._seen == _TRIED and watch is not None:
            self._options += self._selective_options(watch.calls)
            self._decide()
        else:
            self._confirm(state)

    def on_exception(self, state: RunState) -> None:
        """Nothing may go on watching."""
        self._stop()

    def on_fit_end(self, state: RunState) -> None:
        """The same where a run ends within a measured step."""
        self._stop()

    def _stop(self) -> RegionWatch | None:
        watch, self._watch = self._watch, None
        peaks, self._peaks = self._peaks, None
        if watch is not None:
            watch.stop()
        if peaks is not None:
            peaks.stop()
        return watch

    def _note(self, call: RegionCall, moment: str) -> None:
        assert self._peaks is not None
        self._taken.append(self._peaks.take())
        self._events.append((moment, call))

    # ------------------------------------------------------------------ what they tell

    def _by_block(self, calls: Iterable[RegionCall]) -> dict[str, list[RegionCall]]:
        found: dict[str, list[RegionCall]] = defaultdict(list)
        for call in calls:
            name = self._names.get(id(call.module())) if call.module is not None else None
            if name is not None and call.recompute_end is not None:
                found[name].append(call)
        return found

    def _times(self, calls: Iterable[RegionCall]) -> dict[str, tuple[float, float]]:
        """Seconds of (recomputation, first forward) in a step, by block; equal blocks share their medians."""
        seconds = self._clock.seconds
        times: dict[str, tuple[float, float]] = {}
        equal: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, block in self._by_block(calls).items():
            times[name] = (
                sum(seconds(call.recompute_start, call.recompute_end) for call in block),
                sum(seconds(call.forward_start, call.forward_end) for call in block),
            )
            sizes = tuple(call.left_out_bytes for call in block)
            equal[type(self.blocks[name]), self.modes[name], sizes].append(name)
        return {
            name: (median(times[n][0] for n in names), median(times[n][1] for n in names))
            for names in equal.values()
            for name in names
        }

    def _take_profile(self, state: RunState) -> None:
        assert self.peak_bytes is not None
        if self.peak_bytes > self.budget:
            raise ConfigError(
                f"activation_checkpoint.budget: {format_bytes(self.budget)} cannot be kept: step {state.step} took "
                f"{format_bytes(self.peak_bytes)} with all {len(self.blocks)} modules recomputing, the smallest peak "
                "that checkpointing them reaches. Raise the budget, or make micro-batches smaller (loop.accumulate "
                "with a smaller data.batch_size)"
            )
        place = {(id(call), moment): index + 1 for index, (moment, call) in enumerate(self._events)}
        starts = sorted(place[key] for key in place if key[1] in ("forward", "recompute"))
        last = len(self._taken)
        calls = {
            name: [
                (call, Span(
                    place[id(call), "forward"],
                    place[id(call), "recompute"],
                    (back := place[id(call), "recomputed"]),
                    next((start for start in starts if start > back), last),
                ))
                for call in block
            ]
            for name, block in self._by_block(call for moment, call in self._events if moment == "forward").items()
        }  # fmt: skip
        self._profile = _Profile(self._taken, calls, self._outside - self._batch_bytes)
        self._options = [
            keep(
                name,
                self._seconds.get(name, (0.0, 0.0))[0],
                [(span, _left_out(call), _reaches_higher(call, span, self._taken)) for call, span in block],
                last,
            )
            for name, block in calls.items()
        ]

    def _required(self) -> np.ndarray:
        return np.array(self._profile.peaks) - self._profile.outside

    # ------------------------------------------------------------------ selective recomputation, tried

    def _try_selective(self) -> bool:
        """Have some blocks of each class recompute selectively for this step. False: no need, or no room."""
        if peak(self._required(), self._options) <= self.budget * (1 - _MARGIN):
            return False
        tried: list[Option] = []
        by_kind: dict[type[nn.Module], int] = defaultdict(int)
        for option in reversed(self._options):
            kind = type(self.blocks[option.block])
            guess = Option(option.block, "keep", 1.0, _TRIAL_BYTES * np.maximum(option.extra, 0.0))
            if by_kind[kind] < _MAX_TRIED and peak(self._required(), [*tried, guess]) <= self.budget:
                by_kind[kind] += 1
                tried.append(guess)
                self._set(option.block, "selective")
        return bool(tried)

    def _selective_options(self, calls: Iterable[RegionCall]) -> list[Option]:
        """From the blocks on which it was tried, for all blocks of their classes."""
        calls = list(calls)
        times, trial = self._times(calls), self._by_block(calls)
        facts: dict[type[nn.Module], list[tuple[float, float, float]]] = defaultdict(list)
        for name, mode in self.modes.items():
            if mode != "selective" or name not in trial or name not in self._profile.calls:
                continue
            whole = [call for call, _ in self._profile.calls[name]]
            left_out = sum(map(_left_out, whole))
            kept = sum(c.used_after - c.used_before for c in trial[name]) - sum(
                c.used_after - c.used_before for c in whole
            )
            again = sum(map(_left_out, trial[name]))
            before, now = self._seconds[name], times[name]
            saving = (before[0] - now[0] - max(0.0, now[1] - before[1])) / max(before[0], 1e-9)
            facts[type(self.blocks[name])].append(
                (saving, kept / max(left_out, 1), max(0.0, kept + again - left_out) / max(left_out, 1))
            )
        options = []
        for name, block in self._profile.calls.items():
            known = facts.get(type(self.blocks[name]))
            if known is None:
                continue
            saved, kept, beyond = map(median, zip(*known, strict=True))
            sizes = [(span, _left_out(call)) for call, span in block]
            spans = [(span, kept * size, beyond * size) for span, size in sizes]
            options.append(selective(name, saved * self._seconds[name][0], spans, len(self._profile.peaks)))
        return options

    # ------------------------------------------------------------------ the choice

    def _decide(self) -> None:
        chosen = fastest(self._required(), self._options, self._budget_left - _MARGIN * self.budget)
        for name in self.blocks:
            self._set(name, chosen[name].choice if name in chosen else "recompute")

    def _set(self, name: str, choice: Choice) -> None:
        if self.modes[name] != choice:
            self.modes[name] = choice
            set_mode(self.blocks[name], choice, self._rng)

    def _confirm(self, state: RunState) -> None:
        """The step with the choice: where it took more than was reckoned, choose again with so much less."""
        assert self.peak_bytes is not None
        if self.peak_bytes > self.budget and set(self.modes.values()) != {"recompute"}:
            self._budget_left -= self.peak_bytes - self.budget
            self._decide()
            return
        self.is_settled = True
        counts = {choice: list(self.modes.values()).count(choice) for choice in ("keep", "selective", "recompute")}
        _log.info(
            "activation checkpointing within %s: %s; step %d took %s",
            format_bytes(self.budget),
            ", ".join(f"{count} {choice}" for choice, count in counts.items() if count),
            state.step,
            format_bytes(self.peak_bytes),
        )


def auto_listeners(
    model: nn.Module, options: CheckpointOptions, *, device: torch.device, is_compiled: bool
) -> list[Callback]:
    """The listener that chooses, for `mode="auto"`; none for other modes.

    Raises `ConfigError` where `compile` takes no notice of the mode.
    """
    if is_compiled and options.mode in ("auto", "offload"):
        raise ConfigError(
            f"compile and activation_checkpoint.mode: {options.mode} exclude each other: compiled code plans by itself "
            "what it keeps; use mode: recompute or selective, or leave compile out"
        )
    return [AutoCheckpoint(model, options, device=device)] if options.mode == "auto" else []


def _left_out(call: RegionCall) -> int:
    """Bytes that came back as a region ran again."""
    return call.used_after_recompute - call.used_before_recompute


def _reaches_higher(call: RegionCall, span: Span, peaks: list[int]) -> int:
    """By how much the peak of a forward is higher when it keeps everything.

    The recomputation is such a forward, but for what comes after the last value that backward needs: a few tensors of
    the output's size.
    """
    left_out, output = _left_out(call), call.used_after - call.used_before
    inside = max(peaks[span.recompute] - call.used_before_recompute, left_out + _LAST_OUTPUTS * output)
    return min(left_out, max(0, call.used_before + inside - peaks[span.forward]))


def _exact_meter(device: torch.device) -> Meter:
    if device.type == "cpu" and heap_is_readable():
        return HeapMeter(slow_ns=_SLOW_HEAP_NS)
    meter = meter_for(device)
    if meter.name.startswith("resident"):
        raise ConfigError(
            f"activation_checkpoint.mode: auto cannot measure memory on {device}: only resident memory is told here, "
            "which never falls quickly; name modules by activation_checkpoint.modules instead"
        )
    return meter
