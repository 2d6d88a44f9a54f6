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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain import patches
from safetrain.callbacks.base import HOOKS, Callback, Hook
from safetrain.events import EventKind, LoopEvent
from safetrain.findings import Finding, SourceLine
from safetrain.foreign import active_layers, batch_order, checkpoint_parts, loader_facts, target_of
from safetrain.losses import divisor_of, leaves_of
from safetrain.naming import find_models, find_optimizer_names, inner_optimizer, unwrap
from safetrain.source import user_line
from safetrain.state import RunState

_EVAL_AFTER = 2
"""So many gradient-free forwards in a row, in train mode, are an evaluation: one alone may choose an action or a label."""
_EVAL_AFTER_WITH_GRAPH = 3
"""The same for forwards in eval mode that build graphs: one or two may be a training that runs in eval mode."""
_ORDER_BATCHES = 8
_MAX_WINDOW_EVENTS = 1024
_REDISCOVERIES = 32
_IDLE_STEPS = 50
"""An optimizer that has not stepped for so long is not the one in use."""


EventJudge = Callable[[LoopEvent], "Iterable[Finding] | None"]


class StopRun(SystemExit):
    """Ends the script after the wanted number of steps, as a plain `sys.exit()` would."""


class Models(nn.Module):
    """Several models of one training under the user's names. Never called; filled only while listeners run."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """The last outermost module call, for an explanation. Tensors of its arguments are held weakly."""

    module: weakref.ref[nn.Module]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    grad_enabled: bool
    training: bool
    source: SourceLine | None


@dataclass(slots=True, eq=False)
class _Epoch:
    """One pass over a loader."""

    event: LoopEvent
    forwards: int
    backwards: int
    batches: int = 0
    root_training: bool = True
    order: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Tracked:
    """An optimizer that was seen."""

    ref: weakref.ref[Optimizer]
    name: str
    source: SourceLine | None
    made_at: int
    stepped_at: int = 0
    superseded: bool = False
    named: bool = False

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself, of a record that was just asked for."""
        found = self.ref()
        assert found is not None
        return found


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
        self.window: list[LoopEvent] = []
        self.last_call: ModuleCall | None = None
        self.gradients_off_at: SourceLine | None = None
        self.in_backward = 0
        self.started = False
        self.evaluations = 0
        self.other_threads = 0
        self._nothing = self.state.model
        self._callbacks = list(callbacks)
        self._calls: dict[str, list[Hook]] = {hook: [] for hook in HOOKS}
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
        self._idle_forwards = 0  # evaluation-like forwards in a row
        self._total_forwards = 0
        self._total_backwards = 0
        self._trains_in_eval_mode = False
        self._last_training = True  # mode of the model in the last training forward
        self._last_batch_size: int | None = None
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._trainable: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Tensor] | None, int]] = {}
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self._optimizers: dict[int, _Tracked] = {}
        self._pretrained: set[int] = set()
        self._pending_backward: dict[str, Any] | None = None
        self._leaves: list[weakref.ref[Tensor]] = []
        self._dirty = True
        self._discoveries = 0
        self._epochs: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        self._by_hand: list[tuple[weakref.ref[Tensor], int, int | None, int]] = []

    # ------------------------------------------------------------------ life

    def attach(self) -> None:
        """Start watching. Undone by `finish`."""
        for callback in self._callbacks:
            for hook in HOOKS:
                if getattr(type(callback), hook) is not getattr(Callback, hook):
                    self._calls[hook].append(getattr(callback, hook))
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
        if self._stepped:
            self._close()
        self._end_eval()
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
            self._add_root(model)
        for optimizer in optimizers:
            self._track(optimizer)

    def step_done(self) -> None:
        """The loop says that its step is over."""
        self._arrive()

    def failed(self, exception: BaseException) -> None:
        """Let listeners explain what is about to end the script."""
        self.in_backward = 0
        if not self._active or not self.started:
            return
        state = self.state
        state.exception, state.replay, state.gradients_off_at = exception, self._replay(), self.gradients_off_at
        try:
            self._emit("on_exception")
        finally:
            state.exception = state.replay = None

    def _replay(self) -> Callable[[], Tensor] | None:
        """The module call of this step again, when there was a single one and its arguments are still there.

        Nothing else of the script is run: what it does around the call may not bear doing twice.
        """
        call = self.last_call
        module = call.module() if call is not None else None
        if call is None or module is None or self._window_forwards != 1:
            return None
        args, kwargs = _fasten(call.arguments), _fasten(call.keywords)
        if args is _GONE or kwargs is _GONE:
            return None

        def replay() -> Tensor:
            output = _any_tensor(module(*args, **kwargs))
            if output is None:
                raise TypeError("the module returned no tensor")
            return output

        return replay

    def watches(self) -> bool:
        """Whether a call on this thread, now, is part of the loop."""
        return self._active and not self._muted and (self._owner is None or self._owner == threading.get_ident())

    def watches_forward(self) -> bool:
        """`watches`, outside backward: what runs inside it is a recomputation."""
        return self._active and not self._muted and not self.in_backward and (
            self._owner is None or self._owner == threading.get_ident()
        )

    # ------------------------------------------------------------------ forward

    def forward_started(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is about to run."""
        trains = self._is_trainable(module)
        if trains is None:
            return
        grad = torch.is_grad_enabled()
        self.last_call = ModuleCall(
            weakref.ref(module), _loosen(args), {k: _loosen(v) for k, v in kwargs.items()}, grad, module.training, user_line()
        )
        if not trains:
            return
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
        self._add_root(module)
        self._begin()
        self._window_forwards += 1
        self._last_training = module.training
        self._last_batch_size = _batch_size(args, kwargs)

    def forward_ended(self, module: nn.Module, output: Any) -> None:
        """An outermost module has returned. Listeners with an `outputs_made(state, module, output)` see what."""
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
            self._add_root(module)
            self._last_training = False
            self._last_batch_size = None
        if self._open or self._in_eval:
            return
        self._idle_forwards += 1
        needed = _EVAL_AFTER_WITH_GRAPH if grad else _EVAL_AFTER if module.training else 1
        if self._idle_forwards >= needed:
            self._begin_eval()

    def _add_root(self, module: nn.Module) -> None:
        if id(module) not in self._roots:
            self._roots[id(module)] = weakref.ref(module, lambda _, key=id(module): self._roots.pop(key, None))
            self._dirty = True

    def _is_trainable(self, module: nn.Module) -> bool | None:
        """None without parameters; looked at again now and then, as layers are made late and frozen or thawed."""
        known = self._trainable.get(id(module))
        if known is not None:
            ref, witness, ttl = known
            if ref() is module:
                parameter = witness() if witness is not None else None
                if parameter is not None and parameter.requires_grad:
                    return True
                if ttl > 0:
                    self._trainable[id(module)] = (ref, witness, ttl - 1)
                    return None if witness is None else False
        found: Tensor | None = None
        for parameter in module.parameters():
            found = parameter
            if parameter.requires_grad:
                break
        ref = weakref.ref(module, lambda _, key=id(module): self._trainable.pop(key, None))
        self._trainable[id(module)] = (ref, weakref.ref(found) if found is not None else None, 8)
        return None if found is None else found.requires_grad

    # ------------------------------------------------------------------ backward

    def backward_started(self, tensors: Any, retain_graph: bool, create_graph: bool) -> None:
        """`backward` is about to run on a loss (a tensor, or a sequence of them)."""
        loss = _first_tensor(tensors)
        self._before_gradients()
        self._pending_backward = None
        if loss is not None:
            self._pending_backward = dict(
                retain_graph=retain_graph,
                create_graph=create_graph,
                scaled=self._scaled_losses > 0,
                divided_by=divisor_of(loss),
                batch_size=self._last_batch_size,
                grad_mode_eval=not self._last_training,
                loss_node=loss.grad_fn.name() if loss.grad_fn is not None else None,
            )
            if self._scaled_losses:
                self._scaled_losses -= 1
                self._grads_scaled = True
            self._loss_is(loss)
        self.in_backward += 1

    def grad_started(self, outputs: Any, inputs: Any, create_graph: bool) -> bool:
        """`autograd.grad` is about to run. True when it computes gradients to step with, which ends in `backward_ended`."""
        given = [inputs] if isinstance(inputs, Tensor) else inputs
        if create_graph or (
            isinstance(given, list | tuple) and not any(isinstance(p, nn.Parameter) and p.requires_grad for p in given)
        ):
            return False
        loss = _first_tensor(outputs)
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
        self._total_backwards += 1
        if self._pending_backward is not None:
            self._record("backward", **self._pending_backward)
            self._pending_backward = None
        if not self._live_optimizers():
            self._watch_by_hand()
            self._ready("")

    def _before_gradients(self) -> None:
        self._owner = self._owner or threading.get_ident()
        self._arrive()
        if self._in_eval or (self._idle_forwards and not self._last_training):
            # Its outputs are being differentiated: this model trains in eval mode.
            self._trains_in_eval_mode = True
        self._idle_forwards = 0
        self._end_eval()
        self._begin()
        self._discover()
        self._announced.clear()

    def _loss_is(self, loss: Tensor) -> None:
        if not self._models and not self._optimizers:
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
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for known in self._optimizers.values():
            other = known.ref()
            if other is not None and known.stepped_at and any(id(p) in params for g in other.param_groups for p in g["params"]):
                known.superseded = True
        self._track(optimizer)
        self._record("optimizer_made", optimizer=id(optimizer), name=type(optimizer).__name__)

    def zero_grad(self, owner: Optimizer | nn.Module, set_to_none: bool) -> None:
        """Gradients are about to be cleared."""
        if isinstance(owner, Optimizer):
            owner = self._track(owner).optimizer
            params = [p for group in owner.param_groups for p in group["params"]]
        else:
            params = list(owner.parameters())
        self._record(
            "zero_grad",
            optimizer=id(owner) if isinstance(owner, Optimizer) else None,
            params=tuple(id(p) for p in params if p.grad is not None),
            set_to_none=set_to_none,
        )

    def optimizer_step_started(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An optimizer is about to step. With a closure, gradients are ready when that returns."""
        if not self.watches():
            return None
        self._owner = self._owner or threading.get_ident()
        self._track(optimizer)
        if id(optimizer) in self._stepped:
            self._close()
        self._end_eval()
        self._begin()
        self._discover()
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
        used = tuple(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self._record("optimizer_step", optimizer=id(optimizer), taken=True, params=used)
        self._stepped.add(id(optimizer))
        self._taken.add(id(optimizer))
        tracked = self._track(optimizer)
        tracked.stepped_at, tracked.superseded = self.state.step + 1, False
        self._grads_scaled = False

    def scheduler_step(self, scheduler: Any) -> None:
        """A schedule is about to move."""
        optimizer = getattr(scheduler, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            optimizer = self._track(optimizer).optimizer
        self._record(
            "scheduler_step",
            scheduler=type(scheduler).__name__,
            optimizer=id(optimizer),
            position=getattr(scheduler, "last_epoch", None),
        )
        if isinstance(optimizer, Optimizer):
            self.state.schedulers.setdefault(self._track(optimizer).name, weakref.proxy(scheduler))

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
            self._track(optimizer)
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
            for optimizer in self._live_optimizers().values():
                if any(id(p) in given for group in optimizer.param_groups for p in group["params"]):
                    self._ready_for(optimizer)

    # ------------------------------------------------------------------ modes, loaders, checkpoints

    def mode_changed(self, module: nn.Module, mode: bool) -> None:
        """`train()` or `eval()` was called on a module from outside."""
        root = id(module) in self._roots or any(ref() is unwrap(module) for ref in self._models.values())
        if root:
            self._arrive()
        self._record("train_mode" if mode else "eval_mode", module=type(module).__name__, module_id=id(module), root=root)

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
            active=active_layers(self._live_models().items()) if idle and epoch.root_training else (),
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
            self._pretrained.update(id(module) for module in owner.modules())
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
        self._scaled_losses = 0
        self._grads_scaled = False
        self._in_scaler_step = False

    def _begin(self) -> None:
        """Open the window of a new step, unless one is open."""
        if self._open:
            return
        if self._dirty and self._optimizers:
            self._discover()
        self._open = self.state.in_step = True
        self.state.phase = "train"
        if self.started:
            self._emit("on_step_start")

    def _arrive(self) -> None:
        """The loop goes on to something that belongs to no step that has been taken: close that one."""
        if self._stepped or (self._by_hand and self._stepped_by_hand()):
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
        self.evaluations += 1
        self.state.phase = "eval"
        self._emit("on_eval_start")

    def _end_eval(self) -> None:
        if not self._in_eval:
            return
        self._in_eval = False
        self._emit("on_eval_end")
        self.state.phase = "train"

    def _ready_for(self, optimizer: Optimizer) -> None:
        self._ready(self._track(optimizer).name)

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

    def _watch_by_hand(self) -> None:
        """Without an optimizer, remember what the script would change if it stepped by hand."""
        tensors: Iterable[Any] = (
            (leaf() for leaf in self._leaves) if not self._models else (p for m in self._live_models().values() for p in m.parameters())
        )
        self._by_hand = [
            (weakref.ref(p), p._version, id(p.grad) if p.grad is not None else None, p.grad._version if p.grad is not None else 0)
            for p in tensors
            if p is not None and p.requires_grad
        ]

    def _stepped_by_hand(self) -> bool:
        """Whether a parameter was written to, or its gradient dropped or zeroed, since the last backward."""
        moved = False
        for ref, version, grad, grad_version in self._by_hand:
            p = ref()
            if p is None or (
                p._version != version
                or (id(p.grad) if p.grad is not None else None) != grad
                or (p.grad is not None and p.grad._version != grad_version)
            ):
                moved = True
                break
        if moved:
            self._by_hand = []
        return moved

    # ------------------------------------------------------------------ models, optimizers, names

    def _track(self, optimizer: Optimizer) -> _Tracked:
        known = self._optimizers.get(id(optimizer))
        if known is not None and known.ref() is optimizer:
            return known
        inner = inner_optimizer(optimizer)
        if inner is not optimizer:
            return self._track(inner)
        name = _free_name(type(optimizer).__name__.lower(), {t.name for t in self._optimizers.values()})
        ref = weakref.ref(optimizer, lambda _, key=id(optimizer): self._optimizers.pop(key, None))
        known = self._optimizers[id(optimizer)] = _Tracked(ref, name, user_line(), self.state.step)
        self._dirty = True
        return known

    def _live_optimizers(self) -> dict[str, Optimizer]:
        """Those in use: not replaced by a newer one over the same parameters, and not idle for long."""
        found: dict[str, Optimizer] = {}
        step = self.state.step
        for tracked in list(self._optimizers.values()):
            optimizer = tracked.ref()
            if optimizer is None or tracked.superseded:
                continue
            if step - max(tracked.stepped_at, tracked.made_at) <= _IDLE_STEPS:
                found[tracked.name] = optimizer
        return found

    def optimizer_lines(self) -> dict[str, SourceLine | None]:
        """Where each optimizer was built, by name."""
        return {tracked.name: tracked.source for tracked in self._optimizers.values()}

    def _live_models(self) -> dict[str, nn.Module]:
        return {name: module for name, ref in self._models.items() if (module := ref()) is not None}

    def _discover(self) -> None:
        """Find the models and the user's names for them, at the start and when a new one shows up."""
        if not self._dirty or self._discoveries > _REDISCOVERIES:
            return
        self._dirty = False
        self._discoveries += 1
        self._muted = True
        try:
            self._name_things(sys._getframe(1))
        except Exception:
            self._on_trouble(traceback.format_exc())
        finally:
            self._muted = False
        if not self.started:
            self.started = True
            self._emit("on_fit_start")
            if self._open:
                self._emit("on_step_start")

    def _name_things(self, frame: Any) -> None:
        for key, tracked in list(self._optimizers.items()):
            optimizer = tracked.ref()
            if optimizer is not None and inner_optimizer(optimizer) is not optimizer:
                del self._optimizers[key]  # it got the one inside after it was made
        optimizers = list(self._live_optimizers().values())
        called = [module for ref in list(self._roots.values()) if (module := ref()) is not None]
        before = {id(module): name for name, module in self._live_models().items()}
        found: dict[str, nn.Module] = {}
        for name, module in find_models(frame, called, optimizers, self._pretrained).items():
            found[before.get(id(module), name)] = module
        self._models = {name: weakref.ref(module) for name, module in found.items()}
        names = find_optimizer_names(frame, optimizers)
        for key, tracked in self._optimizers.items():
            if key in names and not tracked.named:  # once: listeners know it by its name
                others = {t.name for t in self._optimizers.values() if t is not tracked}
                tracked.name, tracked.named = _free_name(names[key], others), True
        self.state.device = next((p.device for m in found.values() for p in m.parameters()), None)

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
        calls = self._calls[hook]
        if not calls:
            return
        state = self.state
        self._muted = True
        models = self._live_models()
        if len(models) == 1:
            state.model = next(iter(models.values()))
        elif models:
            self._nothing._modules.update(models)
            self._nothing.training = next(iter(models.values())).training
        state.optimizers = self._live_optimizers()
        try:
            for call in list(calls):
                try:
                    call(state)
                except Exception:
                    # The script must not suffer from a judge: drop the listener's hook, and say so once.
                    calls.remove(call)
                    self._on_trouble(traceback.format_exc())
        finally:
            self._nothing._modules.clear()
            state.model, state.optimizers = self._nothing, {}
            self._muted = False


_attached: weakref.WeakSet[Observer] = weakref.WeakSet()


def _silence_in_child() -> None:
    """A forked worker is no part of the loop, and must not report."""
    for observer in list(_attached):
        observer._active = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_silence_in_child)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((item for item in value if isinstance(item, Tensor)), None)
    return None


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return None


def _keys(obj: Any) -> tuple[str, ...]:
    return tuple([str(key) for key in obj][:256]) if isinstance(obj, dict) else ()


def _loosen(value: Any) -> Any:
    """The same arguments with tensors held weakly: an explanation may need them, and must not keep them."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    if type(value) in (list, tuple):
        return type(value)(_loosen(item) for item in value)
    if type(value) is dict:
        return {key: _loosen(item) for key, item in value.items()}
    return value


_GONE = object()


def _fasten(value: Any) -> Any:
    """The arguments that `_loosen` took apart, or `_GONE` when a tensor among them is dead."""
    if isinstance(value, weakref.ref):
        tensor = value()
        return _GONE if tensor is None else tensor
    if type(value) in (list, tuple):
        items = [_fasten(item) for item in value]
        return _GONE if any(item is _GONE for item in items) else type(value)(items)
    if type(value) is dict:
        pairs = {key: _fasten(item) for key, item in value.items()}
        return _GONE if any(item is _GONE for item in pairs.values()) else pairs
    return value


def _any_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    inner: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for item in inner if (found := _any_tensor(item)) is not None), None)


def _free_name(name: str, taken: set[str]) -> str:
    free, n = name, 2
    while free in taken:
        free, n = f"{name}_{n}", n + 1
    return free
