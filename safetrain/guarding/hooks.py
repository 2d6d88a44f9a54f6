"""The guard of G113: counts hooks at a few steps, and looks for the registering line only when they rise."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from safetrain.callbacks.base import Callback
from safetrain.findings import Report, SourceLine
from safetrain.foreign.naming import visible_names
from safetrain.rules.hooks import HookCounts, count_hooks, find_piling_hooks, hook_owners
from safetrain.source import user_line, with_text

if TYPE_CHECKING:
    from safetrain.state import RunState

_EVERY, _EVERY_LATER, _LATER = 64, 256, 512
_AT = (1, 2, 3, 4)
"""Steps of every 64 (later 256) after which hooks are counted: four in a row, so a first rise is told by step four."""

_OF_MODULES: dict[tuple[type, str], str] = {
    (nn.Module, "register_forward_hook"): "_forward_hooks",
    (nn.Module, "register_forward_pre_hook"): "_forward_pre_hooks",
    (nn.Module, "register_full_backward_hook"): "_backward_hooks",
    (nn.Module, "register_full_backward_pre_hook"): "_backward_pre_hooks",
}
_OF_ALL: dict[tuple[type, str], str] = {
    **_OF_MODULES,
    (Tensor, "register_hook"): "_backward_hooks",
    (Tensor, "register_post_accumulate_grad_hook"): "_post_accumulate_grad_hooks",
    (Optimizer, "register_step_pre_hook"): "_optimizer_step_pre_hooks",
    (Optimizer, "register_step_post_hook"): "_optimizer_step_post_hooks",
}
"""Methods that register a hook, and the attribute that they put it in."""


class HookGuard(Callback):
    """G113. About 1 µs a module, in four steps of every 64.

    Modules that are not the model's (a teacher, a feature extractor, wherever it is kept) are met as they are given a
    hook: when torch's count of all hooks ever made rises in the second of those steps, the next two are listened to.
    """

    sampled_hooks = frozenset({"on_step_end"})

    def __init__(self, report: Report) -> None:
        self._report = report
        self._samples: list[tuple[int, HookCounts]] = []
        self._outside: list[tuple[int, _Counts]] = []
        self._made = 0
        self._told: set[str] = set()
        self._watch: _RegistrationWatch | None = None

    def on_step_end(self, state: RunState) -> None:
        place = state.step % (_EVERY if state.step < _LATER else _EVERY_LATER)
        if place not in _AT:
            return
        if place == _AT[0]:
            self._stop_watching()
            self._samples.clear()
            self._outside.clear()
        self._samples.append((state.step, count_hooks(state.model, state.optimizers)))
        if self._watch is not None:
            if not self._outside:
                self._outside.append((state.step - 1, self._watch.counts(state.model, before=True)))
            self._outside.append((state.step, self._watch.counts(state.model)))
        made, self._made = self._made, RemovableHandle.next_id
        if place == _AT[1] and self._made > made:
            self._watch = _RegistrationWatch(_OF_MODULES)
        elif place == _AT[2] and len(self._samples) == 3 and find_piling_hooks(self._samples):
            self._watch = _RegistrationWatch(_OF_ALL, known=self._stop_watching())
        elif place == _AT[3]:
            self._judge(state)

    def _judge(self, state: RunState) -> None:
        watch = self._stop_watching()
        if watch is None:
            return
        findings = find_piling_hooks(self._samples, lines=watch.lines_of(hook_owners(state.model, state.optimizers)))
        owners = [(_name_of(m), m, _KINDS) for key in _rising(self._outside) if (m := watch.owner(key)) is not None]
        names = {id(module): name for name, module, _ in owners}
        samples = [
            (step, {(names[key], kind): n for (key, kind), n in counts.items() if key in names})
            for step, counts in self._outside
        ]
        for finding in [*findings, *find_piling_hooks(samples, lines=watch.lines_of(owners))]:
            if finding.holder not in self._told:
                self._told.add(finding.holder or "")
                self._report.add(finding, step=state.step)

    def on_exception(self, state: RunState) -> None:
        self._stop_watching()

    def on_fit_end(self, state: RunState) -> None:
        self._stop_watching()

    def _stop_watching(self) -> _RegistrationWatch | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
        return watch


_KINDS = tuple(_OF_MODULES.values())


_Counts = dict[tuple[int, str], int]
"""Hooks by a module's id and the attribute that holds them."""


def _rising(samples: list[tuple[int, _Counts]]) -> list[tuple[int, str]]:
    """Of modules outside the model, those with more hooks after each of two steps than before."""
    if len(samples) < 3:
        return []
    (_, first), (_, second), (_, third) = samples
    return [key for key, n in third.items() if first.get(key, n) < second.get(key, 0) < n]


def _name_of(module: nn.Module) -> str:
    """The user's name for a module, as far as running frames show one; else its class."""
    for name, value in visible_names(sys._getframe(1)):
        if issubclass(type(value), nn.Module):
            for inner, candidate in value.named_modules():
                if candidate is module:
                    return f"{name}.{inner}" if inner else name
    return f"a {type(module).__name__}"


class _RegistrationWatch:
    """Notes which module, parameter or optimizer is given a hook, and by which of the user's lines, until removed.

    `known`: the watch before it, whose owners count too.
    """

    def __init__(self, methods: dict[tuple[type, str], str], *, known: _RegistrationWatch | None = None) -> None:
        self._owners: dict[tuple[int, str], weakref.ref[Any]] = dict(known._owners) if known is not None else {}
        self._before: _Counts = dict(known._before) if known is not None else {}
        """How many hooks an owner had when it was first given one."""
        self._lines: dict[tuple[int, str], SourceLine] = {}
        self._originals: dict[tuple[type, str], Callable[..., Any]] = {at: getattr(*at) for at in methods}
        self._wrappers = {at: self._noting(original, methods[at]) for at, original in self._originals.items()}
        for at, wrapper in self._wrappers.items():
            setattr(*at, wrapper)

    def _noting(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(owner: Any, *args: Any, **kwargs: Any) -> Any:
            key = (id(owner), kind)
            if isinstance(owner, nn.Module) and self.owner(key) is not owner:
                self._owners[key] = weakref.ref(owner)
                self._before[key] = len(getattr(owner, kind))
            line = user_line()
            if line is not None:
                self._lines[key] = line
            return original(owner, *args, **kwargs)

        return register

    def owner(self, key: tuple[int, str]) -> Any:
        """The module, None once it is gone."""
        ref = self._owners.get(key)
        return ref() if ref is not None else None

    def counts(self, model: nn.Module, *, before: bool = False) -> _Counts:
        """How many hooks the modules now have that were given one and are not inside `model`; `before`: had then."""
        if not self._owners:
            return {}
        inside = {id(module) for module in model.modules()}
        return {
            key: self._before[key] if before else len(getattr(owner, key[1]))
            for key in self._owners
            if key[0] not in inside and (owner := self.owner(key)) is not None
        }

    def lines_of(self, owners: Iterable[tuple[str, Any, tuple[str, ...]]]) -> dict[tuple[str, str], SourceLine]:
        """By (owner's name, kind)."""
        if not self._lines:
            return {}
        return {
            (name, kind): with_text(line)
            for name, owner, kinds in owners
            for kind in kinds
            if (line := self._lines.get((id(owner), kind))) is not None
        }

    def remove(self) -> None:
        """Put torch's own methods back, but where somebody has wrapped them since."""
        for at, original in self._originals.items():
            if getattr(*at) is self._wrappers[at]:
                setattr(*at, original)
