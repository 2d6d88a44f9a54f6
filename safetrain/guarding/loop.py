"""Guards over the loop itself: thin listeners that feed the judges of `rules.loop` and `rules.precision`.

Drivers of foreign loops hand their events to the judges themselves (`loop_judges`, `precision_judges`). The guards here
watch facts that any loop can get wrong, the Trainer's too: how losses weigh, BatchNorm's statistics, modes,
compilation, loss scaling, kept snapshots. Their `see` takes an event too, and returns nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report, SourceLine
from safetrain.guarding.gradient import is_sample
from safetrain.guarding.parts import PartModeGuard
from safetrain.modules import is_compiled
from safetrain.rules import loop as rules
from safetrain.rules import precision
from safetrain.source import user_frame
from safetrain.source.reading import find_method_calls

if TYPE_CHECKING:
    from safetrain.foreign.events import LoopEvent
    from safetrain.state import RunState

Holders = Callable[[], Iterable[tuple[str, Any]]]


class LossWeightGuard(Callback):
    """L503 wherever micro-batches are weighed by their means over unequal counts, and the weights for `Windows`.

    How a loss weighs its elements is read from its graph in the first steps and in every 64th. In a foreign loop each
    weight goes with its "backward" event (`see`, before the judges get it); in the Trainer it is judged here.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._weight: rules.LossWeight | None = None
        self._window: list[rules.LossWeight] = []
        self._places: set[tuple[CodeType | None, int]] = set()
        self._batch = 0  # id of the last backward's, in this step
        self._uneven = 0
        self._any_events = False

    def see(self, event: LoopEvent) -> None:
        """Put the weight of the loss into its event."""
        self._any_events = True
        if event.kind == "backward":
            event.data["weight"] = self._weight
            self._weight = None

    def on_backward_start(self, state: RunState) -> None:
        step = state.step
        if not (step < 12 or step % 64 < 4) or state.micro_loss is None:
            return
        # Only foreign loops hand over a loss that was scaled already.
        scaled = self._any_events and state.scaler is not None and state.scaler.is_enabled()
        self._weight = rules.loss_weight(state.micro_loss, scaled=scaled, shared=not self._any_events)
        if not self._any_events and self._weight is not None and self._weight.count and self._is_next_batch(state):
            self._window.append(self._weight)

    def _is_next_batch(self, state: RunState) -> bool:
        """Not another loss on the batch of the last backward. An overridden `train_step` need not tell its batches."""
        frame = user_frame()
        self._places.add((frame.f_code, frame.f_lasti) if frame is not None else (None, 0))
        before, self._batch = self._batch, id(state.batch)
        return state.batch is None or self._batch != before

    def on_step_end(self, state: RunState) -> None:
        window, self._window = self._window, []
        places, self._places, self._batch = self._places, set(), 0
        if len(window) < 2 or len(places) > 1 or len({w.reduction for w in window}) > 1:
            return  # several terms of a step, each with a backward of its own, are no micro-batches
        weights = [w.per_element for w in window]
        if max(weights) >= 1.25 * min(weights) > 0:
            self._uneven += 1
            if self._uneven == 2:
                counts = [w.count or 0.0 for w in window]
                finding = rules.uneven_finding(window[0].reduction, counts, max(weights) / min(weights))
                self._report.add(finding, step=max(1, state.step))


class BatchNormGuard(Callback):
    """L502, L511 and L513: what BatchNorm's statistics do. Compares versions of buffers, which is no host sync.

    A recomputation that moves them is confirmed by their values one step later, and its line taken by a hook on the
    layer, for that step only and never in a compiled model.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._norms: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._next_scan = 0
        self._before: dict[str, int] = {}
        self._values: dict[str, Tensor] = {}
        self._suspects: set[str] = set()
        self._lines: dict[str, SourceLine | None] = {}
        self._handles: list[RemovableHandle] = []
        self._marks: rules.BufferMarks | None = None
        self._marked_at = 0
        self._micro_step = 0
        self._small = 0
        self._batch_size: int | None = None
        self._backwards = 0  # since gradients were last cleared or used, as far as a foreign loop tells
        self._micro_batches = 0
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        if event.kind == "backward" and not event.data.get("grad_mode_eval"):
            self._backwards += 1
            self._batch_size = event.data.get("batch_size") or self._batch_size
        elif event.kind == "zero_grad" and event.data.get("params"):
            self._backwards = 0
        elif event.kind == "optimizer_step" and self._backwards:
            self._micro_batches, self._backwards = self._backwards, 0

    def on_fit_start(self, state: RunState) -> None:
        self._scan(state)

    def on_step_start(self, state: RunState) -> None:
        if state.step >= self._next_scan:
            self._scan(state)
        self._micro_step = state.micro_step
        if self._suspects and not self._handles:
            self._watch_suspects()

    def on_backward_start(self, state: RunState) -> None:
        if self._norms and is_sample(state.current_step):
            live = self._live()
            self._before = {n: m.num_batches_tracked._version for n, m in live if m.training and _tracks(m)}
            self._values = {n: m.running_mean.clone() for n, m in live if n in self._suspects and _tracks(m)}

    def on_backward_end(self, state: RunState) -> None:
        if not self._norms:
            return
        if self._before:
            self._judge_recompute(state)
        step = state.current_step
        if self._marks is not None and step > self._marked_at:
            self._judge_frozen(state, self._marks)
        if (step == 1 or is_sample(step)) and self._marks is None:
            self._marks, self._marked_at = rules.mark_buffers(self._live(), state.model), step

    def on_step_end(self, state: RunState) -> None:
        if not self._norms:
            return
        self._judge_batch(state)

    def on_fit_end(self, state: RunState) -> None:
        self._unhook()
        self._values.clear()

    def on_exception(self, state: RunState) -> None:
        self._unhook()

    def _scan(self, state: RunState) -> None:
        """Find the layers again now and then: models grow, and drivers learn of further ones."""
        self._next_scan = state.step + (4 if state.step < 16 else 64)
        self._norms = [(n, weakref.ref(m)) for n, m in state.model.named_modules() if isinstance(m, _BatchNorm)]

    def _live(self) -> list[tuple[str, Any]]:
        return [(name, module) for name, ref in self._norms if (module := ref()) is not None]

    # ------------------------------------------------------------------ L511

    def _judge_recompute(self, state: RunState) -> None:
        before, self._before = self._before, {}
        values, self._values = self._values, {}
        live = dict(self._live())
        moved = {
            n for n, v in before.items() if n in live and _tracks(live[n]) and live[n].num_batches_tracked._version != v
        }
        proved = [
            n for n in moved & values.keys() if n not in self._told and not torch.equal(values[n], live[n].running_mean)
        ]
        self._suspects |= moved - self._told
        if proved and (not self._handles or self._lines):
            self._told.update(proved)
            self._suspects.difference_update(proved)
            self._unhook()
            kinds = [type(live[n]).__name__ for n in proved]
            line = next((self._lines[n] for n in proved if n in self._lines), None)
            self._report.add(rules.recompute_finding(proved, kinds, line), step=state.current_step)

    def _watch_suspects(self) -> None:
        compiled = any(is_compiled(m) for _, m in self._live())
        for name, module in self._live():
            if name in self._suspects and not compiled:
                self._handles.append(module.register_forward_pre_hook(_LineOf(name, self._lines)))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ L513, L502

    def _judge_frozen(self, state: RunState, marks: rules.BufferMarks) -> None:
        self._marks = None
        for finding in rules.find_frozen_but_moving(state.model, self._live(), marks):
            key = finding.module or ""
            if key not in self._told:
                self._told.add(key)
                finding.first_step = self._marked_at
                self._report.add(finding, step=state.current_step)

    def _judge_batch(self, state: RunState) -> None:
        micro_batches = self._micro_batches or state.micro_step - self._micro_step
        size = self._batch_size or (state.num_samples // micro_batches if micro_batches and state.num_samples else 0)
        if not size or not micro_batches:
            return
        if size == 1 or micro_batches >= 2:
            self._small += 1
        else:
            self._small = 0
        if self._small == 3 and "L502" not in self._told:
            found = rules.find_batchnorm_batch(state.model, micro_batch=size, micro_batches=micro_batches)
            if found:
                self._told.add("L502")
            for finding in found:
                finding.first_step = max(1, state.step - 2)
                self._report.add(finding, step=max(1, state.step))


class _LineOf:
    """Forward pre-hook of one layer: the user's line that called the checkpoint around it."""

    def __init__(self, name: str, lines: dict[str, SourceLine | None]) -> None:
        self._name, self._lines = name, lines

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or self._name in self._lines:
            return
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("checkpoint.py"):
            frame = frame.f_back
        found = user_frame(frame) if frame is not None else None
        self._lines[self._name] = SourceLine(found.f_code.co_filename, found.f_lineno) if found is not None else None


class ModeGuard(Callback):
    """L501 and L512 where no events tell: training that goes on in eval mode, evaluation in train mode."""

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._any_events = False
        self._trained_in_train_mode = False
        self._hits = 0
        self._first = 0
        self._modes: dict[int, bool] = {}
        self._handle: RemovableHandle | None = None
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> None:
        """Where there are events, their judges see more than this guard, which then leaves it to them."""
        self._any_events = True

    def on_fit_start(self, state: RunState) -> None:
        self._trained_in_train_mode |= state.model.training and not self._any_events

    def on_backward_start(self, state: RunState) -> None:
        if self._any_events or state.model.training:
            self._trained_in_train_mode = True
            return
        if self._trained_in_train_mode and "train" not in self._told:
            self._first = self._first or state.current_step
            self._hits += 1
            if self._hits >= 2:
                self._tell(state)

    def _tell(self, state: RunState) -> None:
        self._told.add("train")
        layers = rules.mode_dependent(state.model)
        if not layers:
            return
        calls = [*find_method_calls("eval"), *find_method_calls("train", argument=False)]
        kinds = sorted({type(m).__name__ for _, m in layers})
        self._report.add(
            rules.mode_finding(
                type(state.model).__name__, calls[0] if len(calls) == 1 else None, self._first, " and ".join(kinds)
            ),
            step=state.current_step,
        )

    def on_eval_start(self, state: RunState) -> None:
        if self._any_events:
            return
        model = state.model
        self._modes = {id(m): m.training for m in model.modules()}
        if "eval" not in self._told and not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            self._handle = model.register_forward_pre_hook(self._at_first_forward)

    def _at_first_forward(self, module: nn.Module, args: Any) -> None:
        self._unhook()
        if torch._C._current_graph_task_id() == -1:
            for finding in rules.find_train_mode_in_eval(module):
                self._told.add("eval")
                self._report.add(finding, step=max(1, finding.first_step), phase="eval")

    def on_eval_end(self, state: RunState) -> None:
        self._unhook()
        if self._modes and not self._any_events:
            self._report.extend(
                rules.find_changed_modes(state.model, self._modes), step=max(1, state.step), phase="eval"
            )
        self._modes = {}
        state.request_samples(3)  # training may go on in the mode that evaluation left

    def on_fit_end(self, state: RunState) -> None:
        self._unhook()

    def on_exception(self, state: RunState) -> None:
        self._unhook()

    def _unhook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class CompileGuard(Callback):
    """L508 from dynamo's own counters, read at sparse steps."""

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._seen = 0
        self._before = rules.CompileCounts()
        self._told: set[Any] = set()

    def on_fit_start(self, state: RunState) -> None:
        self._before = rules.read_compile_counts() or self._before

    def on_step_end(self, state: RunState) -> None:
        if is_sample(state.step):
            self._read(state)

    def on_fit_end(self, state: RunState) -> None:
        self._read(state)

    def _read(self, state: RunState) -> None:
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return
        frames = utils.counters["frames"].get("total", 0)
        if frames == self._seen:
            return
        self._seen = frames
        counts = rules.read_compile_counts()
        for finding in rules.find_compile_trouble(counts.since(self._before)) if counts is not None else ():
            key = finding.key()
            if key not in self._told:
                self._told.add(key)
                finding.first_step = 1 if "graph break" in (finding.cause or "") else 0
                self._report.add(finding, step=max(1, state.step))


class ScalerGuard(Callback):
    """A303 at the first steps, A304 from the count of skipped steps."""

    sampled_hooks = frozenset({"on_backward_start"})

    def __init__(self, report: Report) -> None:
        self._report = report
        self._skips = precision.SkipRecord()
        self._skipped = 0
        self._hits = 0
        self._scale: float | None = None
        self._source: SourceLine | None = None
        self._any_events = False

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        self._any_events = True
        if event.kind == "scale":
            self._source = event.source
        elif event.kind == "scaler_update":
            self._scale = event.data.get("scale")
        elif event.kind == "scaler_step":
            found = self._skips.add(event.step, bool(event.data.get("taken")), self._scale)
            self._report.extend(found, step=max(1, event.step))

    def on_backward_start(self, state: RunState) -> None:
        scaler, loss = state.scaler, state.micro_loss
        if scaler is None or loss is None or not 0 <= self._hits < 2 or not scaler.is_enabled():
            return
        found = precision.find_scaler_without_fp16(loss, source=self._source)
        self._hits = self._hits + 1 if found else -1
        if self._hits == 2:
            for finding in found:
                finding.first_step = max(1, state.step)
                self._report.add(finding, step=state.current_step)

    def on_step_end(self, state: RunState) -> None:
        scaler = state.scaler
        if scaler is None or self._any_events:
            return
        taken = state.skipped_steps == self._skipped
        self._skipped = state.skipped_steps
        scale = scaler.get_scale() if state.is_logging_step and not taken else None
        self._report.extend(self._skips.add(state.step, taken, scale), step=max(1, state.step))


class SnapshotGuard(Callback):
    """L514: a kept `state_dict` that is the live model. Looks two levels into `holders()` when evaluations end.

    Also after a few steps, farther and farther apart: a validation need not look like one.
    A dict of live tensors that is still there one step later, after the model has moved, is a fault.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report, holders: Holders) -> None:
        self._report, self._holders = report, holders
        self._seen: dict[str, tuple[rules.Alias, int]] = {}
        self._told: set[str] = set()
        self._fresh = False

    def on_step_end(self, state: RunState) -> None:
        if self._fresh or (state.step >= _FIRST_LOOK and not state.step & (state.step - 1)):
            self._fresh = False
            self._look(state)

    def on_eval_end(self, state: RunState) -> None:
        self._look(state)

    def on_fit_end(self, state: RunState) -> None:
        self._look(state)

    def _look(self, state: RunState) -> None:
        found = rules.find_aliased_snapshots(state.model, self._holders())
        for path, key in found.items():
            known = self._seen.get(path)
            if path in self._told:
                continue
            if known is not None and known[0] == key and known[1] < state.step:
                self._told.add(path)
                finding = rules.aliased_finding(path, rules.line_of_snapshot(path), is_model=key.is_model)
                self._report.add(finding, step=max(1, state.step))
            elif known is None or known[0] != key:
                self._seen[path] = (key, state.step)
                self._fresh = True
                state.request_samples(1)


_FIRST_LOOK = 8
"""Steps."""


def _tracks(norm: Any) -> bool:
    return isinstance(norm.running_mean, Tensor) and isinstance(norm.num_batches_tracked, Tensor)


def loop_guards(report: Report, *, holders: Holders | None = None, scaled: bool = True) -> list[Callback]:
    """The guards of this file. `holders` gives the (name, object) pairs in which kept snapshots are looked for.

    `scaled`: the loss may be scaled.
    """
    guards: list[Callback] = [
        LossWeightGuard(report),
        BatchNormGuard(report),
        ModeGuard(report),
        PartModeGuard(report),
        CompileGuard(report),
        *([ScalerGuard(report)] if scaled else []),
    ]
    if holders is not None:
        guards.append(SnapshotGuard(report, holders))
    return guards
