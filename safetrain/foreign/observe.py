"""Watch a training loop that knows nothing of this package, and drive the same listeners as the Trainer.

The loop's calls (see `patches`) tell an `Observer` what happens. It infers windows (one optimizer step each), phases
and names, writes them into one `RunState`, emits the hooks of `Callback`, and records `LoopEvent`s for the judges of
loop faults. It holds models and optimizers weakly, takes no random number, and lets no error of a listener reach the
script.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.callbacks.base import HOOKS, STEP_HOOKS, Callback, Hook, overrides
from safetrain.findings import Finding, SourceLine
from safetrain.foreign import patches
from safetrain.foreign.events import EventKind, LoopEvent
from safetrain.foreign.facts import (
    active_layers,
    any_nonzero,
    batch_order,
    checkpoint_parts,
    loader_facts,
    optimizer_facts,
    target_of,
)
from safetrain.foreign.hand_steps import HandSteps
from safetrain.foreign.losses import divisor_of, leaves_of
from safetrain.foreign.module_call import ModuleCall, batch_size, first_tensor
from safetrain.foreign.naming import find_tensor_names
from safetrain.foreign.participants import Models, Participants
from safetrain.graph import grad_fn_of, walk
from safetrain.source import user_line
from safetrain.state import FIRST_STEPS, RunState

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_EVAL_AFTER = 2
"""So many gradient-free forwards in a row, in train mode, are an evaluation: one may choose an action or a label."""
_EVAL_AFTER_WITH_GRAPH = 3
"""The same for forwards in eval mode that build graphs: one or two may be a training that runs in eval mode."""
_ORDER_BATCHES = 8
_MAX_WINDOW_EVENTS = 1024
_FILLINGS = 4
"""Steps on gradients set by the loop itself, after which it is believed to go on so."""


EventJudge = Callable[[LoopEvent], "Iterable[Finding] | None"]


class StopRun(SystemExit):
    """Ends the script after the wanted number of steps, as a plain `sys.exit()` would."""


@dataclass(slots=True, eq=False)
class _Epoch:
    """One pass over a loader."""

    event: LoopEvent
    forwards: int
    backwards: int
    batches: int = 0
    root_training: bool = True
    order: list[int] = field(default_factory=list)


class Observer:
    """Attach to a foreign loop. `attach()`, let the loop run, `finish()`.

    Args:
        callbacks: listeners, in order.
        judges: called with each `LoopEvent` as it is recorded; what they yield goes to `on_finding`.
        on_finding: receives a judge's finding and the event that led to it.
        on_step: called with the number of steps done, after each.
        max_steps: raise `StopRun` in the loop when so many steps are done.
        on_trouble: receives the traceback of a listener that failed; it is not called again.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback] = (),
        *,
        judges: Iterable[EventJudge] = (),
        on_finding: Callable[[Finding, LoopEvent], None] | None = None,
        max_steps: int | None = None,
        on_step: Callable[[int], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.state = RunState(model=Models(), optimizers={})
        self.state.replay = self._replay_now
        self.window: list[LoopEvent] = []
        self.last_call: ModuleCall | None = None
        self._module_calls: list[ModuleCall] = []  # of this window, all but the last
        self.state.module_calls = self._calls_of
        self.gradients_off_at: SourceLine | None = None
        self.in_backward = 0
        self.started = False
        self.who = Participants()
        self._nothing = self.state.model
        self._callbacks = list(callbacks)
        self._calls: dict[str, list[Hook]] = {hook: [] for hook in HOOKS}
        self._calls_in_all_steps: dict[str, list[Hook]] = {hook: [] for hook in STEP_HOOKS}
        self._on_outputs: list[Callable[[RunState, nn.Module, Any], None]] = []
        self._judges = list(judges)
        self._on_finding = on_finding or (lambda finding, event: None)
        self._on_trouble = on_trouble or (lambda text: None)
        self._on_step = on_step
        self._max_steps = max_steps
        self.kinds_seen: set[str] = set()
        self._active = False
        self._muted = False
        self._owner: int | None = None
        self._patches: patches.Patches | None = None
        self._begin_window()
        self._open = False
        self._in_eval = False
        self._idle_forwards = 0  # evaluation-like forwards in a row, of one and the same module
        self._idle_modules: set[int] = set()
        self._total_forwards = 0
        self._total_backwards = 0
        self._trains_in_eval_mode = False
        self._last_training = True  # mode of the model in the last training forward
        self._last_batch_size: int | None = None
        self._pending_backward: dict[str, Any] | None = None
        self._epochs: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        self._by_hand = HandSteps()
        self._fillings = 0
        self._leaves: list[weakref.ref[Tensor]] = []

    # ------------------------------------------------------------------ life

    def attach(self) -> None:
        """Start watching. Undone by `finish`."""
        for callback in self._callbacks:
            for hook in HOOKS:
                if overrides(callback, hook):
                    call = getattr(callback, hook)
                    self._calls[hook].append(call)
                    if hook in STEP_HOOKS and hook not in callback.sampled_hooks:
                        self._calls_in_all_steps[hook].append(call)
            if hasattr(callback, "outputs_made"):
                self._on_outputs.append(callback.outputs_made)
        self._patches = patches.install(self)
        self._active = True
        _attached.add(self)

    def finish(self) -> None:
        """Close what is open, emit `on_fit_end`, take every wrapper off. Safe to call twice."""
        if not self._active:
            return
        self._owner = threading.get_ident()
        self._max_steps = None
        self._arrive()
        self._end_eval()
        self._tell_judges(LoopEvent("run_end", self.state.step + 1))
        if self.started:
            self._emit("on_fit_end")
        self.detach()

    def detach(self) -> None:
        """Take every wrapper off and go silent, without a last word."""
        self._active = False
        if self._patches is not None:
            self._patches.undo()

    def know(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> None:
        """What trains, when it was made before watching began."""
        if model is not None:
            self.who.add_root(model)
        for optimizer in optimizers:
            self.who.track(optimizer, self.state.step)

    def step_done(self) -> None:
        """The loop says that its step is over."""
        self._arrive()

    def failed(self, exception: BaseException) -> None:
        """Let listeners explain what is about to end the script."""
        self.in_backward = 0
        if not self._active:
            return
        state = self.state
        state.exception, state.replay, state.gradients_off_at = exception, self._replay(), self.gradients_off_at
        try:
            if not self.started:  # it never came to a backward
                self._find_out(_innermost_frame(exception))
            self._emit("on_exception")
        finally:
            state.exception, state.replay = None, self._replay_now

    def _replay_now(self) -> Tensor:
        """`_replay`, looked for when it is called: for listeners that find a number gone bad before any error."""
        replay = self._replay()
        if replay is None:
            raise LookupError("this step called several modules, or the arguments are gone")
        return replay()

    def _replay(self) -> Callable[[], Tensor] | None:
        """The module call of this step again, when there was a single one and its arguments are still there.

        Nothing else of the script is run: what it does around the call may not bear doing twice.
        """
        return self.last_call.replay() if self.last_call is not None and self._window_forwards == 1 else None

    def _calls_of(self, loss: Tensor | None) -> list[ModuleCall]:
        """The module calls of this step that `loss` hangs on (None: all), oldest first."""
        calls = list(self._module_calls)
        if self.last_call is not None and self._window_forwards:
            calls.append(self.last_call)
        if loss is None:
            return calls
        numbers = [node._sequence_nr() for node in walk([grad_fn_of(loss)], limit=1_000_000).nodes]
        return [call for call in calls if any(call.first_node <= number < call.next_node for number in numbers)]

    def watches(self) -> bool:
        """Whether a call on this thread, now, is part of the loop."""
        return self._active and not self._muted and (self._owner is None or self._owner == threading.get_ident())

    def watches_forward(self) -> bool:
        """`watches`, outside backward: what runs inside it is a recomputation."""
        return (
            self._active
            and not self._muted
            and not self.in_backward
            and (self._owner is None or self._owner == threading.get_ident())
        )

    # ------------------------------------------------------------------ forward

    def forward_started(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is about to run."""
        if not self.who.trains(module):
            return
        grad = torch.is_grad_enabled()
        earlier = self.last_call
        self.last_call = ModuleCall(module, args, kwargs, sys._getframe(2), _next_node())
        self._total_forwards += 1
        if not module.training:
            for epoch in self._epochs.values():
                epoch.root_training = False
        if not grad or not (module.training or self._trains_in_eval_mode):
            self._eval_forward(module, grad)
            return
        self._arrive()
        self._end_eval()
        self._idle_forwards = 0
        self.who.add_root(module)
        self._begin()
        if self._window_forwards and earlier is not None:
            earlier.let_go()
            self._module_calls.append(earlier)
        self._window_forwards += 1
        self._last_training = module.training
        self._last_batch_size = batch_size(args, kwargs)

    def forward_ended(self, module: nn.Module, output: Any) -> None:
        """An outermost module has returned. Listeners with an `outputs_made(state, module, output)` see what."""
        if self.last_call is not None:
            self.last_call.next_node = _next_node()
        if self._on_outputs and self.started:
            self._muted = True
            try:
                for call in self._on_outputs:
                    call(self.state, module, output)
            except Exception:
                self._on_outputs = []
                self._on_trouble(traceback.format_exc())
            finally:
                self._muted = False

    def _eval_forward(self, module: nn.Module, grad: bool) -> None:
        self._arrive()
        if grad:
            self.who.add_root(module)
            self._last_training = False
            self._last_batch_size = None
        if self._open or self._in_eval:
            return
        if not self._idle_forwards or id(module) in self._idle_modules:
            self._idle_forwards += 1
            self._idle_modules.clear()
        self._idle_modules.add(id(module))
        needed = _EVAL_AFTER_WITH_GRAPH if grad else _EVAL_AFTER if module.training else 1
        if self._idle_forwards >= needed:
            self._begin_eval()

    # ------------------------------------------------------------------ backward

    def backward_started(self, tensors: Any, retain_graph: bool, create_graph: bool) -> None:
        """`backward` is about to run on a loss (a tensor, or a sequence of them)."""
        loss = first_tensor(tensors)
        self._before_gradients()
        self._pending_backward = None
        if loss is not None:
            self._pending_backward = {
                "retain_graph": retain_graph,
                "create_graph": create_graph,
                "scaled": self._scaled_losses > 0,
                "divided_by": divisor_of(loss),
                "batch_size": self._last_batch_size,
                "grad_mode_eval": not self._last_training,
                "loss_node": loss.grad_fn.name() if loss.grad_fn is not None else None,
            }
            uncleared = self._by_hand.take_uncleared()
            if uncleared is not None:
                self._pending_backward["uncleared"] = self._names_of(uncleared)
            if self._scaled_losses:
                self._scaled_losses -= 1
                self._grads_scaled = True
            self._loss_is(loss)
        self.in_backward += 1

    def grad_started(self, outputs: Any, inputs: Any, create_graph: bool) -> bool:
        """`autograd.grad` is about to run. True when they are to step with; `backward_ended` follows."""
        given = [inputs] if isinstance(inputs, Tensor) else inputs
        if create_graph or (
            isinstance(given, list | tuple) and not any(isinstance(p, nn.Parameter) and p.requires_grad for p in given)
        ):
            return False
        loss = first_tensor(outputs)
        if loss is None:
            return False
        self._before_gradients()
        self._pending_backward = None
        self._loss_is(loss)
        self.in_backward += 1
        return True

    def backward_ended(self, done: bool) -> None:
        """Backward has returned, or raised when not `done`."""
        self.in_backward = max(0, self.in_backward - 1)
        if not done:
            return
        self.state.micro_step += 1
        self._backwards += 1
        self._cleared = False
        self._total_backwards += 1
        if self._pending_backward is not None:
            self._record("backward", **self._pending_backward)
            self._pending_backward = None
        if not self.who.optimizers(self.state.step):
            self._by_hand.remember(self._trained_by_hand())
            self._ready("")

    def _before_gradients(self) -> None:
        self._owner = self._owner or threading.get_ident()
        self._arrive()
        if not self._last_training and (self._in_eval or self._idle_forwards):
            # Its outputs are being differentiated: this model trains in eval mode.
            self._trains_in_eval_mode = True
        self._idle_forwards = 0
        self._end_eval()
        self._begin()
        self._find_out()
        self._announced.clear()

    def _loss_is(self, loss: Tensor) -> None:
        if not self.who.any_model and not self.who.any_optimizer:
            self._leaves = [weakref.ref(leaf) for leaf in leaves_of(loss)]
        self.state.micro_loss = loss
        try:
            self._emit("on_backward_start")
        finally:
            self.state.micro_loss = None

    # ------------------------------------------------------------------ optimizers

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer was built."""
        if not self.watches():
            return
        self.who.made(optimizer, self.state.step)
        self._record("optimizer_made", **optimizer_facts(optimizer))

    def zero_grad(self, owner: Optimizer | nn.Module, set_to_none: bool) -> None:
        """Gradients are about to be cleared."""
        if isinstance(owner, Optimizer):
            owner = self.who.track(owner, self.state.step).optimizer
            params = [p for group in owner.param_groups for p in group["params"]]
        else:
            params = list(owner.parameters())
        cleared = tuple(id(p) for p in params if p.grad is not None)
        self._cleared = self._cleared or bool(cleared)
        self._record(
            "zero_grad",
            optimizer=id(owner) if isinstance(owner, Optimizer) else None,
            params=cleared,
            set_to_none=set_to_none,
        )

    def optimizer_step_started(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer is about to step. With a closure, gradients are ready when that returns."""
        if not self.watches():
            return None
        self._owner = self._owner or threading.get_ident()
        self.who.track(optimizer, self.state.step)
        if id(optimizer) in self._stepped:
            self._close()
        self._end_eval()
        self._begin()
        self._find_out()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._ready_for(optimizer)
            return None
        wrapped = self._watched_closure(closure, optimizer)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _watched_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def call() -> Any:
            result = closure()
            if self.watches():
                self._ready_for(optimizer)
            return result

        return call

    def optimizer_step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if not self.watches():
            return
        grads = {id(p): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        filled = self._cleared and self._filled_by_hand(grads.values())
        self._record("optimizer_step", optimizer=id(optimizer), taken=True, params=tuple(grads), filled=filled)
        self._stepped.add(id(optimizer))
        self._taken.add(id(optimizer))
        self.who.stepped(optimizer, self.state.step + 1)
        self._grads_scaled = False

    def _filled_by_hand(self, grads: Iterable[Tensor]) -> bool:
        """Whether cleared gradients were set to something else since. Syncs, a few times a run."""
        if self._fillings < _FILLINGS and any_nonzero(grads):
            self._fillings += 1
            return True
        return self._fillings == _FILLINGS

    def scheduler_step(self, scheduler: Any) -> None:
        """A schedule is about to move."""
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            optimizer = self.who.track(optimizer, self.state.step).optimizer
        self._record(
            "scheduler_step",
            scheduler=type(scheduler).__name__,
            optimizer=id(optimizer),
            position=getattr(scheduler, "last_epoch", None),
        )
        if isinstance(optimizer, Optimizer):
            name = self.who.track(optimizer, self.state.step).name
            self.state.schedulers.setdefault(name, weakref.proxy(scheduler))

    # ------------------------------------------------------------------ loss scaling and clipping

    def scaler_scale(self, scaler: Any, outputs: Any) -> None:
        """A loss is about to be scaled."""
        self.state.scaler = scaler
        self._scaled_losses += 1
        self._record("scale", scaler=id(scaler), scale=None)

    def scaler_unscale(self, scaler: Any, optimizer: Any) -> None:
        """The user asks for unscaled gradients (a scaler does it by itself inside `step`)."""
        if not self._in_scaler_step:
            self._record("unscale", scaler=id(scaler), optimizer=id(optimizer))

    def scaler_unscaled(self, scaler: Any, optimizer: Any) -> None:
        """Gradients are unscaled: complete, and not yet clipped."""
        self._grads_scaled = False
        if isinstance(optimizer, Optimizer):
            self.who.track(optimizer, self.state.step)
            self._begin()
            self._ready_for(optimizer)

    def scaler_step_started(self, scaler: Any, optimizer: Any) -> None:
        """A scaler is about to step an optimizer, or not."""
        if id(optimizer) in self._stepped:
            self._close()
        self._in_scaler_step = True
        self._taken.discard(id(optimizer))

    def scaler_step_ended(self, scaler: Any, optimizer: Any) -> None:
        """A scaler has stepped an optimizer, or skipped it for Inf or NaN."""
        self._in_scaler_step = False
        self._begin()
        taken = id(optimizer) in self._taken
        self._record("scaler_step", scaler=id(scaler), optimizer=id(optimizer), taken=taken)
        if not taken:
            self.state.skipped_steps += 1
            self._stepped.add(id(optimizer))
            self._grads_scaled = False

    def scaler_updated(self, scaler: Any, _: Any) -> None:
        """A scaler has chosen its next scale."""
        scale = scaler._scale
        known = float(scale) if isinstance(scale, Tensor) and scale.device.type == "cpu" else None
        self._record("scaler_update", scaler=id(scaler), scale=known)

    def clip(self, function: str, params: Sequence[Any]) -> None:
        """Gradients are about to be clipped."""
        tensors = [p for p in params if isinstance(p, Tensor)]
        num_grads = sum(p.grad is not None for p in tensors)
        self._record(
            "clip",
            function=function,
            params=tuple(id(p) for p in tensors),
            num_grads=num_grads,
            scaled=self._grads_scaled,
            in_window=False,
        )
        if num_grads and not self._grads_scaled and self._backwards:
            given = {id(p) for p in tensors}
            for optimizer in self.who.optimizers(self.state.step).values():
                if any(id(p) in given for group in optimizer.param_groups for p in group["params"]):
                    self._ready_for(optimizer)

    # ------------------------------------------------------------------ modes, loaders, checkpoints

    def mode_changed(self, module: nn.Module, mode: bool) -> None:
        """`train()` or `eval()` was called on a module from outside."""
        root = self.who.is_root(module)
        if root:
            self._arrive()
        kind: EventKind = "train_mode" if mode else "eval_mode"
        self._record(
            kind,
            module=type(module).__name__,
            module_id=id(module),
            root=root,
            no_grad=not torch.is_grad_enabled(),
        )

    def gradients_switched_off(self) -> None:
        """User code called `torch.set_grad_enabled(False)`."""
        self.gradients_off_at = user_line()

    def loader_started(self, loader: Any, iterator: Any) -> None:
        """A pass over a `DataLoader` begins."""
        self._arrive()
        event = self._record("epoch_start", **loader_facts(loader))
        self._epochs[iterator] = _Epoch(event, self._total_forwards, self._total_backwards)

    def batch_asked(self, iterator: Any) -> None:
        """The loop wants its next batch."""
        self._arrive()

    def batch_given(self, iterator: Any) -> None:
        """It got one."""
        epoch = self._epochs.get(iterator)
        if epoch is None:
            return
        epoch.batches += 1
        self.state.batch_in_epoch = epoch.batches
        self._tell_judges(LoopEvent("batch", self.state.step + 1, None, {"loader": epoch.event.data["loader"]}))

    def order_seen(self, iterator: Any, index: Any) -> None:
        """The sampler has chosen the samples of a batch. The first few batches tell one order from another."""
        epoch = self._epochs.get(iterator)
        if epoch is None or len(epoch.order) >= _ORDER_BATCHES:
            return
        order = batch_order(index)
        if order is not None:
            epoch.order.append(order)
            epoch.event.data["order"] = hash(tuple(epoch.order))

    def loader_ended(self, iterator: Any) -> None:
        """A pass is over. One with forwards and not a single backward was an evaluation, whatever the modes say."""
        epoch = self._epochs.pop(iterator, None)
        if epoch is None:
            return
        forwards, backwards = self._total_forwards - epoch.forwards, self._total_backwards - epoch.backwards
        idle = forwards > 0 and not backwards
        self._record(
            "epoch_end",
            loader=epoch.event.data["loader"],
            batches=epoch.batches,
            forwards=forwards,
            backwards=backwards,
            root_training=forwards > 0 and epoch.root_training,
            active=active_layers(self.who.models().items()) if idle and epoch.root_training else (),
        )
        if backwards:
            self.state.epoch += 1
            self.state.batch_in_epoch = 0
        elif idle and not self._in_eval and not self._backwards:
            self._open = self.state.in_step = False
            self._begin_eval()

    def state_loaded(self, owner: Any) -> None:
        """`load_state_dict` was called on a module, an optimizer, a schedule or a scaler."""
        if isinstance(owner, nn.Module):
            self.who.pretrained.update(id(module) for module in owner.modules())
        self._record("state_loaded", target=target_of(owner), name=type(owner).__name__, id=id(owner))

    def saved(self, obj: Any) -> None:
        """`torch.save` was called."""
        self._record("checkpoint_saved", parts=checkpoint_parts(obj), keys=_keys(obj))

    def loaded(self, obj: Any) -> None:
        """`torch.load` has returned."""
        self._record("checkpoint_loaded", parts=checkpoint_parts(obj), keys=_keys(obj))

    def rng_restored(self, which: str) -> None:
        """A generator's state was set."""
        self._record("rng_restored", which=which)

    # ------------------------------------------------------------------ windows

    def _begin_window(self) -> None:
        self._stepped: set[int] = set()
        self._taken: set[int] = set()
        self._announced: set[str] = set()
        self._backwards = 0
        self._window_forwards = 0
        self._module_calls.clear()
        self._scaled_losses = 0
        self._grads_scaled = False
        self._in_scaler_step = False
        self._cleared = False  # since the last backward

    def _begin(self) -> None:
        """Open the window of a new step, unless one is open."""
        if self._open:
            return
        if self.who.changed and self.who.any_optimizer:
            self._find_out()
        self._open = True
        self.state.begin_step()
        self.state.phase = "train"
        if self.started:
            self._emit("on_step_start")

    def _arrive(self) -> None:
        """The loop goes on to something that belongs to no step that has been taken: close that one."""
        if self._stepped or self._by_hand.taken():
            self._close()

    def _close(self) -> None:
        state = self.state
        later = False
        for event in reversed(self.window):
            if event.kind == "backward":
                later = True
            elif event.kind == "clip":
                event.data["in_window"] = later
        self.window.clear()
        self._begin_window()
        self._open = state.in_step = False
        state.step += 1
        if self.started:
            self._emit("on_step_end")
        if self._on_step is not None:
            self._on_step(state.step)
        if self._max_steps is not None and state.step >= self._max_steps:
            raise StopRun(0)

    def _begin_eval(self) -> None:
        if not self.started:
            return
        self._in_eval = True
        self.state.phase = "eval"
        self._emit("on_eval_start")

    def _end_eval(self) -> None:
        if not self._in_eval:
            return
        self._in_eval = False
        self._emit("on_eval_end")
        self.state.phase = "train"

    def _ready_for(self, optimizer: Optimizer) -> None:
        self._ready(self.who.track(optimizer, self.state.step).name)

    def _ready(self, name: str) -> None:
        """Gradients are complete: tell it once per optimizer and backward."""
        if name in self._announced or not self.started:
            return
        self._announced.add(name)
        self.state.stepping = (name,) if name else ()
        try:
            self._emit("on_backward_end")
        finally:
            self.state.stepping = ()

    def _trained_by_hand(self) -> Iterable[Tensor]:
        """What a loop without an optimizer would step: its models' parameters, or the leaves of its loss."""
        models = self.who.models()
        if models:
            return [p for module in models.values() for p in module.parameters()]
        return [leaf for ref in self._leaves if (leaf := ref()) is not None]

    def _names_of(self, tensors: list[Tensor]) -> tuple[str, ...]:
        """The user's names of what is trained by hand."""
        models = self.who.models()
        named = {id(p): name for module in models.values() for name, p in module.named_parameters()}
        if not named:
            named = {id(p): name for name, p in find_tensor_names(sys._getframe(2), tensors).items()}
        return tuple([named.get(id(p), "a tensor") for p in tensors])

    def _find_out(self, frame: FrameType | None = None) -> None:
        """Look for models and names, at the start and when somebody new has shown up. Default: from the caller out."""
        if not self.who.changed:
            return
        self._muted = True
        try:
            self.who.name_all(frame or sys._getframe(1), self.state.step)
            models = self.who.models()
            self.state.device = next((p.device for m in models.values() for p in m.parameters()), None)
        except Exception:
            self._on_trouble(traceback.format_exc())
        finally:
            self._muted = False
        if not self.started:
            self.started = True
            self.state.request_samples(FIRST_STEPS)
            self._emit("on_fit_start")
            if self._open:
                self._emit("on_step_start")

    # ------------------------------------------------------------------ telling listeners

    def _record(self, kind: EventKind, **data: Any) -> LoopEvent:
        event = LoopEvent(kind, self.state.step + 1, user_line(sys._getframe(1)), data)
        self._tell_judges(event)
        return event

    def _tell_judges(self, event: LoopEvent) -> None:
        # Not longer than the window: a long queue of old records would keep the collector from its young ones.
        if len(self.window) < _MAX_WINDOW_EVENTS:
            self.window.append(event)
        self.kinds_seen.add(event.kind)
        for judge in list(self._judges):
            try:
                for finding in judge(event) or ():
                    self._on_finding(finding, event)
            except Exception:
                self._judges.remove(judge)
                self._on_trouble(traceback.format_exc())

    def _emit(self, hook: str) -> None:
        state = self.state
        is_rare = hook in STEP_HOOKS and not state.is_sampled
        calls = self._calls_in_all_steps[hook] if is_rare else self._calls[hook]
        if not calls:
            return
        self._muted = True
        models = self.who.models()
        if len(models) == 1:
            state.model = next(iter(models.values()))
        elif models:
            self._nothing._modules.update(models)
            self._nothing.training = next(iter(models.values())).training
        else:
            parameters: dict[str, Any] = self._nothing._parameters
            parameters.update(self.who.loose_parameters())
        state.optimizers = self.who.optimizers(self.state.step)
        try:
            for call in list(calls):
                try:
                    call(state)
                except Exception:
                    # The script must not suffer from a judge: drop the listener's hook, and say so once.
                    for listening in (self._calls, self._calls_in_all_steps):
                        if call in listening.get(hook, ()):
                            listening[hook].remove(call)
                    self._on_trouble(traceback.format_exc())
        finally:
            self._nothing._modules.clear()
            self._nothing._parameters.clear()
            state.model, state.optimizers = self._nothing, {}
            self._muted = False


_attached: weakref.WeakSet[Observer] = weakref.WeakSet()


def _silence_in_child() -> None:
    """A forked worker is no part of the loop, and must not report."""
    for observer in list(_attached):
        observer._active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)


def _innermost_frame(error: BaseException) -> FrameType | None:
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb.tb_frame if tb is not None else None


def _keys(obj: Any) -> tuple[str, ...]:
    return tuple([str(key) for key in obj][:256]) if isinstance(obj, dict) else ()
