"""The guard of L501 for parts of a model: in eval mode since an evaluation, while everything trains on."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from safetrain.callbacks.base import STEP_HOOKS, Callback
from safetrain.findings import Report, SourceLine
from safetrain.guarding.coverage import held_by
from safetrain.modules import is_compiled
from safetrain.rules import loop as rules
from safetrain.source.reading import find_forgotten_eval, is_for_evaluation

if TYPE_CHECKING:
    from safetrain.foreign.events import LoopEvent
    from safetrain.state import RunState

_TRAINED = 3
"""Steps in which a layer must have been seen in train mode."""
_HITS = 5
"""Steps in a row that a part trains in eval mode before it is told."""
_LONGEST = 64
"""Steps after which a part that does not show its mode is given up."""
_MOST_SUSPICIONS = 8


@dataclass(slots=True, eq=False)
class _Suspect:
    """A part in eval mode. Its first layer that cares is listened to: in which mode does it run with gradients?"""

    part: weakref.ref[nn.Module]
    handle: Any
    since: int
    hits: int = 0
    in_eval: int = 0
    in_train: int = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            if module.training:
                self.in_train += 1
            else:
                self.in_eval += 1


class PartModeGuard(Callback):
    """L501 for parts of a model. A twentieth of a microsecond a layer that cares, in sampled steps.

    Told is a part whose layers were in train mode at first and that then trains in eval mode for five steps in a row,
    when the call that put it there belongs to an evaluation: made or followed by work without gradients. The driver of
    a foreign loop knows that call; elsewhere it is looked for in the user's files. Compiled models are left alone.
    """

    sampled_hooks = STEP_HOOKS

    def __init__(self, report: Report) -> None:
        self._report = report
        self._layers: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._model: weakref.ref[nn.Module] | None = None
        self._next_scan = 0
        self._trained: dict[str, int] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._suspicions = 0
        self._calls: dict[int, tuple[SourceLine | None, bool]] = {}
        """By module: where `eval()` was called on it last, and whether gradients were off."""
        self._any_events = False
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> None:
        """Take note of a foreign loop's event."""
        self._any_events = True
        if event.kind == "eval_mode":
            self._calls[event.data["module_id"]] = (event.source, bool(event.data.get("no_grad")))
        elif event.kind == "train_mode":
            self._calls.pop(event.data["module_id"], None)
            if event.data.get("root"):
                self._calls.clear()

    def on_backward_end(self, state: RunState) -> None:
        model = state.model
        if state.step >= self._next_scan or self._model is None or self._model() is not model:
            self._scan(state)
        if not self._layers or self._suspicions > _MOST_SUSPICIONS:
            return
        off = []
        for name, ref in self._layers:
            layer = ref()
            if layer is None:
                continue
            if layer.training:
                self._trained[name] = self._trained.get(name, 0) + 1
            elif self._trained.get(name, 0) >= _TRAINED:
                off.append(name)
        if off or self._suspects:
            self._suspect(state, off)

    def _scan(self, state: RunState) -> None:
        """Find the layers again now and then: models grow, and drivers learn of further ones."""
        self._next_scan = state.step + (4 if state.step < 16 else 64)
        self._model = weakref.ref(state.model)
        self._layers = [
            (name, weakref.ref(layer))
            for name, layer in rules.mode_dependent(state.model)
            if not isinstance(layer, _BatchNorm) or layer.track_running_stats
        ]

    def _suspect(self, state: RunState, off: list[str]) -> None:
        """Which parts train in eval mode: this step's optimizers hold all of their parameters, which have gradients."""
        parts = {n: p for n, p in rules.find_parts_in_eval(state.model, off).items() if n not in self._told}
        stepping = state.stepping or tuple(state.optimizers)
        held = {id(p) for _, _, p in held_by({n: o for n, o in state.optimizers.items() if n in stepping})}
        for name, part in parts.items():
            if name not in self._suspects and all(p.grad is not None and id(p) in held for p in part.parameters()):
                self._listen(name, part, next(n for n in off if f"{n}.".startswith(f"{name}.")), state)
        for name, suspect in list(self._suspects.items()):
            if name not in parts or suspect.in_train or state.current_step > suspect.since + _LONGEST:
                self._drop(name)
            elif suspect.in_eval:
                suspect.hits += all(p.grad is not None for p in parts[name].parameters())
                suspect.in_eval = 0
                if suspect.hits == _HITS:
                    self._tell(name, parts[name], state)

    def _listen(self, name: str, part: nn.Module, layer: str, state: RunState) -> None:
        self._suspicions += 1
        if self._suspicions <= _MOST_SUSPICIONS and not any(map(is_compiled, state.model.modules())):
            suspect = _Suspect(weakref.ref(part), None, state.current_step)
            suspect.handle = state.model.get_submodule(layer).register_forward_pre_hook(suspect)
            self._suspects[name] = suspect

    def _tell(self, name: str, part: nn.Module, state: RunState) -> None:
        since = self._suspects[name].since
        self._drop(name)
        self._told.add(name)
        call, no_grad = self._calls.get(id(part), (None, False))
        if call is not None:
            meant = not no_grad and not is_for_evaluation(call.file, call.line)
            source = None if meant else call
        else:
            source = None if self._any_events else find_forgotten_eval(name.rpartition(".")[2])
        if source is not None:
            layers = [(n, m) for n, m in rules.mode_dependent(part) if not m.training]
            prefix = {f"{name}.{n}" if n else name for n, _ in layers}
            seen = max(self._trained.get(n, 0) for n in prefix)
            kinds = sorted({type(m).__name__ for _, m in layers})
            self._report.add(rules.part_finding(name, kinds, source, since, seen_in=seen), step=state.current_step)

    def on_step_end(self, state: RunState) -> None:
        if self._suspects:
            state.request_samples(1)

    def on_exception(self, state: RunState) -> None:
        self._clear()

    def on_fit_end(self, state: RunState) -> None:
        self._clear()

    def _drop(self, name: str) -> None:
        self._suspects.pop(name).handle.remove()

    def _clear(self) -> None:
        for name in list(self._suspects):
            self._drop(name)
