"""A user's hook leaves grad mode, autocast, default dtype, modes and freezing as it found them, or is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from safetrain.callbacks.base import Callback, Hook
from safetrain.findings import Finding, Report, SourceLine
from safetrain.rules.loop import CONTEXT_LEAK
from safetrain.source import line_text

if TYPE_CHECKING:
    from safetrain.state import RunState

_World = tuple[bool, bool, bool, torch.dtype]
_ONLOOKERS = ("on_log", "on_eval_start", "on_eval_end", "on_checkpoint_saved")


@dataclass(slots=True)
class _Modules:
    """Modes and freezing of a whole model at one moment, in the order of `model.modules()` and `.parameters()`."""

    training: list[bool]
    frozen: list[bool]


class ContextGuard:
    """Wraps hooks so that what they leave behind is put back and reported (L515).

    `guarded = context.watch(hook, "MyCallback.on_step_end")`, once per hook, before the run. Each call costs two or
    three microseconds. The modes of all submodules are compared at the first calls of a hook, then at every 64th; the
    freezing of parameters only where `may_freeze` is off, because unfreezing in a callback is common and right.
    Inference mode that was entered and not left cannot be switched off from outside: it is reported only.
    """

    def __init__(self, model: nn.Module, report: Report, *, device_type: str = "cpu") -> None:
        self._model, self._report, self._device = model, report, device_type

    def watch_callback(self, hook: str, callback: Callback, bound: Hook) -> Hook:
        """A user's callback under watch; safetrain's own are left as they are.

        Hooks that only look on (logging, evaluation, saving) must leave the modes of submodules alone as well. In the
        others a run is set up on purpose: a backbone put into eval mode, a part unfrozen.
        """
        if type(callback).__module__.startswith("safetrain."):
            return bound
        return self.watch(bound, f"{type(callback).__name__}.{hook}", may_switch=hook not in _ONLOOKERS)

    def watch(
        self,
        hook: Hook,
        who: str,
        *,
        may_freeze: bool = True,
        may_switch: bool = False,
        source: SourceLine | None = None,
    ) -> Hook:
        """`hook` under watch; `who` is its name in a finding. `may_switch`: modes of submodules are its to set."""
        world, calls, has_offended = self._world, 0, False

        def watched(state: RunState) -> None:
            nonlocal calls, has_offended
            calls += 1
            thorough = not may_switch and (calls <= 2 or calls % 64 == 0 or has_offended)
            modules = self._modules() if thorough else None
            before = world()
            hook(state)
            if world() != before or (modules is not None and self._changed(modules, may_freeze)):
                has_offended = True  # from now on it is put back each time
                self._settle(before, modules, who, may_freeze, source or _line_of(hook), state)

        return watched

    def _world(self) -> _World:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(self._device),
            torch.get_default_dtype(),
        )

    def _modules(self) -> _Modules:
        return _Modules(
            [m.training for m in self._model.modules()], [not p.requires_grad for p in self._model.parameters()]
        )

    def _changed(self, before: _Modules, may_freeze: bool) -> bool:
        if [m.training for m in self._model.modules()] != before.training:
            return True
        return not may_freeze and [not p.requires_grad for p in self._model.parameters()] != before.frozen

    def _settle(
        self,
        before: _World,
        modules: _Modules | None,
        who: str,
        may_freeze: bool,
        source: SourceLine | None,
        state: RunState,
    ) -> None:
        left = [*self._restore_world(before), *(self._restore_modules(modules, may_freeze) if modules else ())]
        self._report.add(_finding(who, left, source), step=max(1, state.current_step), phase=state.phase)

    def _restore_world(self, before: _World) -> Iterator[str]:
        grad, inference, autocast, dtype = before
        if torch.is_inference_mode_enabled() != inference:
            yield "inference mode on, which only leaving its `with` block ends"
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
            yield f"gradients {'off' if grad else 'on'}"
        if torch.is_autocast_enabled(self._device) != autocast:
            torch.set_autocast_enabled(self._device, autocast)
            yield f"autocast {'off' if autocast else 'on'}"
        if torch.get_default_dtype() != dtype:
            yield f"the default dtype at {torch.get_default_dtype()}"
            torch.set_default_dtype(dtype)

    def _restore_modules(self, before: _Modules, may_freeze: bool) -> Iterator[str]:
        named = list(self._model.named_modules())
        changed = [
            (name or type(module).__name__, module, was)
            for (name, module), was in zip(named, before.training, strict=False)
            if module.training != was
        ]
        for _, module, was in changed:
            module.training = was
        if changed:
            name, module, _ = changed[0]
            more = f" and {len(changed) - 1} more modules" if len(changed) > 1 else ""
            yield f"`{name}`{more} in {'eval' if module.training else 'train'} mode"
        if may_freeze:
            return
        turned = [
            (name, p, frozen)
            for (name, p), frozen in zip(self._model.named_parameters(), before.frozen, strict=False)
            if p.requires_grad is frozen
        ]
        for _, p, frozen in turned:
            p.requires_grad_(not frozen)
        if turned:
            yield f"`{turned[0][0]}` {'unfrozen' if turned[0][2] else 'frozen'} ({len(turned)} parameters)"


def _finding(who: str, left: list[str], source: SourceLine | None) -> Finding:
    what = "; ".join(left)
    return CONTEXT_LEAK.finding(
        f"{who} left {what}. The rest of the run would have gone on like that; it was put back.",
        source=source,
        holder=who,
        cause=f"{who} changed the context of the run and did not restore it",
        fix="use a with block (torch.no_grad(), torch.autocast(...)), and restore model.training in a finally",
    )


def _line_of(hook: Any) -> SourceLine | None:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None:
        return None
    return SourceLine(code.co_filename, code.co_firstlineno, line_text(code.co_filename, code.co_firstlineno))
