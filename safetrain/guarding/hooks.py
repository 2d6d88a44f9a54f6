"""The guard of G113: counts hooks at a few steps, and looks for the registering line only when they rise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.callbacks.base import Callback
from safetrain.findings import Report, SourceLine
from safetrain.rules.hooks import HookCounts, count_hooks, find_piling_hooks, hook_owners
from safetrain.source import user_line, with_text

if TYPE_CHECKING:
    from safetrain.state import RunState

_EVERY, _EVERY_LATER, _LATER = 64, 256, 512
_AT = (1, 2, 3, 4)
"""Steps of every 64 (later 256) after which hooks are counted: four in a row, so a first rise is told by step four."""

_REGISTER: dict[tuple[type, str], str] = {
    (nn.Module, "register_forward_hook"): "_forward_hooks",
    (nn.Module, "register_forward_pre_hook"): "_forward_pre_hooks",
    (nn.Module, "register_full_backward_hook"): "_backward_hooks",
    (nn.Module, "register_full_backward_pre_hook"): "_backward_pre_hooks",
    (Tensor, "register_hook"): "_backward_hooks",
    (Tensor, "register_post_accumulate_grad_hook"): "_post_accumulate_grad_hooks",
    (Optimizer, "register_step_pre_hook"): "_optimizer_step_pre_hooks",
    (Optimizer, "register_step_post_hook"): "_optimizer_step_post_hooks",
}
"""Methods that register a hook, and the attribute that they put it in."""


class HookGuard(Callback):
    """G113. About 1 µs a module, in four steps of every 64."""

    sampled_hooks = frozenset({"on_step_end"})

    def __init__(self, report: Report) -> None:
        self._report = report
        self._samples: list[tuple[int, HookCounts]] = []
        self._told: set[str] = set()
        self._watch: _RegistrationWatch | None = None

    def on_step_end(self, state: RunState) -> None:
        place = state.step % (_EVERY if state.step < _LATER else _EVERY_LATER)
        if place not in _AT:
            return
        if place == _AT[0]:
            self._samples.clear()
        self._samples.append((state.step, count_hooks(state.model, state.optimizers)))
        suspects = find_piling_hooks([self._samples[0], *self._samples[-2:]]) if len(self._samples) == 3 else []
        if suspects and self._watch is None:
            self._watch = _RegistrationWatch()
        elif place == _AT[-1]:
            lines = self._stop_watching(state)
            for finding in find_piling_hooks(self._samples, lines=lines):
                if finding.holder not in self._told:
                    self._told.add(finding.holder or "")
                    self._report.add(finding, step=state.step)

    def on_exception(self, state: RunState) -> None:
        self._stop_watching(state)

    def on_fit_end(self, state: RunState) -> None:
        self._stop_watching(state)

    def _stop_watching(self, state: RunState) -> dict[tuple[str, str], SourceLine]:
        if self._watch is None:
            return {}
        watch, self._watch = self._watch, None
        watch.remove()
        return watch.lines(state)


class _RegistrationWatch:
    """Notes the user's line of each hook registration, until removed."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], SourceLine] = {}
        self._originals: dict[tuple[type, str], Callable[..., Any]] = {at: getattr(*at) for at in _REGISTER}
        for at, original in self._originals.items():
            setattr(*at, self._noting(original, _REGISTER[at]))

    def _noting(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(owner: Any, *args: Any, **kwargs: Any) -> Any:
            line = user_line()
            if line is not None:
                self._seen[id(owner), kind] = line
            return original(owner, *args, **kwargs)

        return register

    def lines(self, state: RunState) -> dict[tuple[str, str], SourceLine]:
        """By (owner's name, kind)."""
        return {
            (name, kind): with_text(line)
            for name, owner, kinds in hook_owners(state.model, state.optimizers)
            for kind in kinds
            if (line := self._seen.get((id(owner), kind))) is not None
        }

    def remove(self) -> None:
        """Put torch's own methods back."""
        for at, original in self._originals.items():
            setattr(*at, original)
