"""Listeners: what they may override, and how events reach them at no cost to those that do not."""

from __future__ import annotations

import difflib
import functools
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from safetrain.errors import ConfigError
from safetrain.findings import Report

if TYPE_CHECKING:
    from safetrain.state import RunState

Hook = Callable[["RunState"], None]

STEP_HOOKS = frozenset({"on_step_start", "on_backward_start", "on_backward_end", "on_step_end"})
"""The hooks that are called in every step."""


class Callback:
    """A listener. Override the hooks you need; those you leave alone cost nothing.

    Every hook receives the `RunState`. Hooks run in list order. Reading a tensor of the state as a number is a host
    sync: do it in `on_log`, where `state.row` already holds plain numbers.
    """

    sampled_hooks: ClassVar[frozenset[str]] = frozenset()
    """Of `STEP_HOOKS`, those that need not hear of every step: called while `state.is_sampled` only."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("on_") and name not in HOOKS:
                near = difflib.get_close_matches(name, HOOKS, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else f"; the hooks are {', '.join(HOOKS)}"
                raise ConfigError(f"{cls.__name__}.{name} is not a hook and would never be called{hint}")

    def on_fit_start(self, state: RunState) -> None:
        """Before the first step, after everything was built and a checkpoint was loaded."""

    def on_fit_end(self, state: RunState) -> None:
        """After the last step, also when the run ended early or by an exception."""

    def on_step_start(self, state: RunState) -> None:
        """Before gradients are zeroed."""

    def on_backward_start(self, state: RunState) -> None:
        """Before each backward; `state.micro_loss` carries the graph and must not be kept."""

    def on_backward_end(self, state: RunState) -> None:
        """Before each optimizer steps: its gradients are complete, unscaled and unclipped."""

    def on_skip(self, state: RunState) -> None:
        """When an optimizer was not stepped because its gradients were Inf or NaN. On CUDA it may come a step late."""

    def on_split(self, state: RunState) -> None:
        """When memory ran out and the step is about to be repeated in micro-batches of `state.micro_batch_size`.

        `state.exception` is the error: look at it, and keep nothing of it.
        """

    def on_step_end(self, state: RunState) -> None:
        """After the optimizer (or the decision to skip it) and the schedule."""

    def on_epoch_end(self, state: RunState) -> None:
        """After the last step of an epoch, `state.epoch` counting it, before the evaluation that may follow."""

    def on_log(self, state: RunState) -> None:
        """On logging steps, and after each evaluation: `state.row` holds numbers to add to or write."""

    def on_eval_start(self, state: RunState) -> None:
        """Before evaluation, gradients already freed, model still in the mode training left it in."""

    def on_eval_end(self, state: RunState) -> None:
        """After evaluation, modes and RNG restored; `state.eval_metrics` holds the result."""

    def on_checkpoint_saved(self, state: RunState) -> None:
        """After `state.checkpoint_path` was written and renamed into place."""

    def on_exception(self, state: RunState) -> None:
        """When a step or an evaluation raised; `state.exception` is what is about to be re-raised."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume: tensors and plain containers only. Empty when there is nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


HOOKS: tuple[str, ...] = tuple(name for name in vars(Callback) if name.startswith("on_"))
_REACH_ALL = ("on_fit_end", "on_exception")


def _nothing(state: RunState) -> None:
    """What an event costs when nobody listens."""


class Listeners:
    """Sends each event to those that override its hook. Worked out once, at construction.

    `listeners.on_step_end(state)` calls the overriding hooks in list order. `watch(hook, callback, bound)` may wrap.
    Those of the callbacks that are `guards` must not harm a run: one that fails is switched off, with a warning.
    A driver calls `choose(state)` at the start of a step: which listeners hear of it.
    """

    on_fit_start: Hook
    on_fit_end: Hook
    on_step_start: Hook
    on_backward_start: Hook
    on_backward_end: Hook
    on_skip: Hook
    on_split: Hook
    on_step_end: Hook
    on_epoch_end: Hook
    on_log: Hook
    on_eval_start: Hook
    on_eval_end: Hook
    on_checkpoint_saved: Hook
    on_exception: Hook

    def __init__(
        self,
        callbacks: Iterable[Callback] = (),
        *,
        guards: Iterable[Callback] = (),
        watch: Callable[[str, Callback, Hook], Hook] | None = None,
    ) -> None:
        self.callbacks = list(callbacks)
        self._guards = _Guards(guards)
        self._watch = watch
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks: {callback!r} is not a safetrain.Callback; subclass it and override the hooks you need"
                )
        self._sampled = {hook: self._fan_out(hook, sampled=True) for hook in HOOKS}
        self._unsampled = {hook: self._fan_out(hook, sampled=False) for hook in STEP_HOOKS}
        vars(self).update(self._sampled)
        self._is_sampled = True

    def choose(self, state: RunState) -> None:
        """The hooks of this step: all, or those that hear of every step."""
        if state.is_sampled is not self._is_sampled:
            self._is_sampled = state.is_sampled
            vars(self).update(self._sampled if state.is_sampled else self._unsampled)

    def with_callbacks(self, callbacks: Iterable[Callback]) -> Listeners:
        """Other listeners, watched as these are."""
        return Listeners(callbacks, guards=self._guards.guards, watch=self._watch)

    def _fan_out(self, hook: str, *, sampled: bool) -> Hook:
        listening = [c for c in self.callbacks if overrides(c, hook) and (sampled or hook not in c.sampled_hooks)]
        bound: list[Hook] = [getattr(c, hook) for c in listening]
        if self._watch is not None:
            bound = [self._watch(hook, c, call) for c, call in zip(listening, bound, strict=True)]
        if not bound:
            return _nothing
        if len(bound) == 1 and not self._guards.include(listening[0]):
            return bound[0]
        self._guards.calls.append((hook, bound))
        return functools.partial(_call_all if hook in _REACH_ALL else _call_each, self._guards, bound)


class _Guards:
    """Listeners that watch over a run, which must not suffer from a fault of theirs."""

    def __init__(self, guards: Iterable[Callback]) -> None:
        self.guards = list(guards)
        self.calls: list[tuple[str, list[Hook]]] = []
        """What is called at each event, by hook: a guard that fails is replaced there by nothing."""

    def include(self, listener: Any) -> bool:
        """Whether it is one of them, whatever it says of equality."""
        return any(listener is guard for guard in self.guards)

    def switch_off(self, call: Hook) -> bool:
        """Whether `call`, which has just raised, is a guard's: then none of its hooks is called again.

        But for `on_fit_end`, where it takes its hooks off the model; what it still finds there is told to nobody.
        """
        guard = getattr(call, "__self__", None)
        if not self.include(guard):
            return False
        for hook, calls in self.calls:
            for place, other in enumerate(calls):
                if getattr(other, "__self__", None) is guard and (hook != "on_fit_end" or other is call):
                    calls[place] = _nothing
        for name, value in vars(guard).items():
            if isinstance(value, Report):
                setattr(guard, name, Report())
        warnings.warn(
            f"{type(guard).__name__} failed and is off for the rest of the run, which goes on. That is a fault of "
            f"safetrain, not of yours; please report it:\n{traceback.format_exc()}",
            RuntimeWarning,
            stacklevel=3,
        )
        return True


def overrides(callback: Callback, hook: str) -> bool:
    """Whether it listens to `hook`."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def _call_each(guards: _Guards, calls: list[Hook], state: RunState) -> None:
    for call in calls:
        try:
            call(state)
        except Exception:
            if not guards.switch_off(call):
                raise


def _call_all(guards: _Guards, calls: list[Hook], state: RunState) -> None:
    """Every hook is called; the first error is raised afterwards. Signal handlers and files must be put back."""
    first: Exception | None = None
    for call in calls:
        try:
            _call_each(guards, [call], state)
        except Exception as error:  # a warning that was turned into one, too
            first = first or error
    if first is not None:
        raise first
