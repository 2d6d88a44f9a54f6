"""What is wrapped in torch to watch a foreign loop, and how all of it is put back.

Each wrapper calls what it wraps with the same arguments and returns its result; it only tells an `Observer`. While
nobody observes it is one attribute test. Code under `torch.compile` never sees one.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from safetrain.source import MACHINERY, grade

if TYPE_CHECKING:
    from safetrain.foreign.observe import Observer

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """Attributes that were replaced, and the way back. Removing leaves alone what somebody else has wrapped since."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: _Wrap) -> None:
        """Replace `owner.name` by `make(original)`, under the original's name and signature."""
        found = getattr(owner, name)
        self.put(owner, name, functools.wraps(found)(make(found)))

    def put(self, owner: Any, name: str, wrapper: Any) -> None:
        """Replace `owner.name` by `wrapper`."""
        original = vars(owner).get(name, _MISSING)
        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is not wrapper:
                return
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

        self._undo.append(undo)

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Run this when the patches are taken off."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()


_MISSING = object()


class _Depth(threading.local):
    """How deep this thread is inside calls that were already reported: only the outermost one counts."""

    forward = 0
    mode = 0
    schedule = 0


def install(observer: Observer) -> Patches:
    """Wrap torch for one observer. `Patches.undo` takes everything off again."""
    patches, depth = Patches(), _Depth()
    _forward(observer, patches, depth)
    _backward(observer, patches)
    _optimizers(observer, patches)
    _schedulers(observer, patches, depth)
    _scaler(observer, patches)
    _clipping(observer, patches)
    _modes(observer, patches, depth)
    _loaders(observer, patches)
    _state_dicts(observer, patches)
    return patches


def _forward(observer: Observer, patches: Patches, depth: _Depth) -> None:
    """Outermost module calls. Not a global hook: those make every inner call slower and `torch.compile` warn."""
    is_compiling = torch.compiler.is_compiling

    def make(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or depth.forward or not observer.watches_forward():
                return inner(module, *args, **kwargs)
            depth.forward = 1
            try:
                observer.forward_started(module, args, kwargs)
                output = inner(module, *args, **kwargs)
            finally:
                depth.forward = 0
            observer.forward_ended(module, output)
            return output

        return call

    patches.wrap(nn.Module, "__call__", make)
    _hide_from_compile(patches, nn.Module.__call__)


def _hide_from_compile(patches: Patches, wrapper: Callable[..., Any]) -> None:
    """Let `torch.compile` take the wrapper for the original, as it goes straight to `forward` past that one."""
    _skip_frame(wrapper.__code__)
    original = wrapper.__wrapped__  # type: ignore[attr-defined]
    modules = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")
    for name in modules:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "unpatched_nn_module_call", None) is original:
            module.unpatched_nn_module_call = wrapper  # type: ignore[attr-defined]

    def undo() -> None:
        for name in modules:
            module = sys.modules.get(name)
            if module is not None and getattr(module, "unpatched_nn_module_call", None) is wrapper:
                module.unpatched_nn_module_call = original  # type: ignore[attr-defined]

    patches.on_undo(undo)


def _skip_frame(code: Any) -> None:
    """Never compile this frame, but what it calls. By the C functions: importing dynamo takes a second."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # until 2.7
        frames.skip_code(code)
    else:
        frames.set_code_exec_strategy(
            code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        )


def _backward(observer: Observer, patches: Patches) -> None:
    """`Tensor.backward` ends in `torch.autograd.backward`, so one wrapper sees both."""

    def backward(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if observer.in_backward or not observer.watches():
                return inner(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            observer.backward_started(tensors, bool(retain_graph), create_graph)
            done = False
            try:
                result = inner(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
                done = True
            finally:
                observer.backward_ended(done)
            return result

        return call

    def grad(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            outputs: Any,
            inputs: Any,
            grad_outputs: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if (
                observer.in_backward
                or not observer.watches()
                or not observer.grad_started(outputs, inputs, create_graph)
            ):
                return inner(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)
            done = False
            try:
                result = inner(outputs, inputs, grad_outputs, retain_graph, create_graph, *args, **kwargs)
                done = True
            finally:
                observer.backward_ended(done)
            return result

        return call

    patches.wrap(torch.autograd, "backward", backward)
    patches.wrap(torch.autograd, "grad", grad)


def _optimizers(observer: Observer, patches: Patches) -> None:
    def init(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            inner(optimizer, *args, **kwargs)
            observer.optimizer_made(optimizer)

        return call

    def zero_grad(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, set_to_none: bool = True) -> None:
            if observer.watches():
                observer.zero_grad(owner, set_to_none)
            inner(owner, set_to_none)

        return call

    patches.wrap(Optimizer, "__init__", init)
    patches.wrap(Optimizer, "zero_grad", zero_grad)
    patches.wrap(nn.Module, "zero_grad", zero_grad)
    for handle in (
        register_optimizer_step_pre_hook(observer.optimizer_step_started),
        register_optimizer_step_post_hook(observer.optimizer_step_ended),
    ):
        patches.on_undo(handle.remove)


def _schedulers(observer: Observer, patches: Patches, depth: _Depth) -> None:
    def step(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            # The first step is taken by the constructor, before there is anything to order.
            first = sys._getframe(1).f_code.co_name == "_initial_step"
            if depth.schedule or first or not observer.watches():
                return inner(scheduler, *args, **kwargs)
            depth.schedule = 1
            try:
                observer.scheduler_step(scheduler)
                return inner(scheduler, *args, **kwargs)
            finally:
                depth.schedule = 0

        return call

    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind):
            patches.wrap(kind, "step", step)


def _scaler(observer: Observer, patches: Patches) -> None:
    def tell(before: Callable[[Any, Any], None] | None, after: Callable[[Any, Any], None] | None) -> _Wrap:
        def make(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                watched = observer.watches() and scaler.is_enabled()
                argument = args[0] if args else next(iter(kwargs.values()), None)
                if watched and before is not None:
                    before(scaler, argument)
                result = inner(scaler, *args, **kwargs)
                if watched and after is not None:
                    after(scaler, argument)
                return result

            return call

        return make

    kind = torch.amp.GradScaler
    patches.wrap(kind, "scale", tell(observer.scaler_scale, None))
    patches.wrap(kind, "unscale_", tell(observer.scaler_unscale, observer.scaler_unscaled))
    patches.wrap(kind, "step", tell(observer.scaler_step_started, observer.scaler_step_ended))
    patches.wrap(kind, "update", tell(None, observer.scaler_updated))


def _clipping(observer: Observer, patches: Patches) -> None:
    def make(inner: Callable[..., Any]) -> Callable[..., Any]:
        name = inner.__name__

        def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if not observer.watches():
                return inner(parameters, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor | list | tuple):
                # An iterator can be walked once: take it into a list, as torch itself does first of all. An exhausted
                # generator is passed on, because torch warns about it.
                taken = list(parameters)
                observer.clip(name, taken)
                return inner(taken if taken else parameters, *args, **kwargs)
            observer.clip(name, [parameters] if isinstance(parameters, torch.Tensor) else parameters)
            return inner(parameters, *args, **kwargs)

        return call

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patches.wrap(torch.nn.utils.clip_grad, name, make)
        patches.put(torch.nn.utils, name, getattr(torch.nn.utils.clip_grad, name))


def _modes(observer: Observer, patches: Patches, depth: _Depth) -> None:
    """Train and eval mode (`eval` calls `train`), and who switched gradients off."""

    def train(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, mode: bool = True) -> nn.Module:
            if depth.mode or torch.compiler.is_compiling() or not observer.watches():
                return inner(module, mode)  # type: ignore[no-any-return]
            depth.mode = 1
            try:
                observer.mode_changed(module, mode)
                return inner(module, mode)  # type: ignore[no-any-return]
            finally:
                depth.mode = 0

        return call

    def switch(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(switcher: Any, mode: bool) -> None:
            if not mode and grade(sys._getframe(1).f_code.co_filename) != MACHINERY and observer.watches():
                observer.gradients_switched_off()
            inner(switcher, mode)

        return call

    patches.wrap(nn.Module, "train", train)
    patches.wrap(torch.set_grad_enabled, "__init__", switch)


def _loaders(observer: Observer, patches: Patches) -> None:
    def start(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(loader: Any) -> Any:
            iterator = inner(loader)
            if observer.watches():
                observer.loader_started(loader, iterator)
            return iterator

        return call

    def following(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(iterator: Any) -> Any:
            if not observer.watches():
                return inner(iterator)
            observer.batch_asked(iterator)
            try:
                batch = inner(iterator)
            except StopIteration:
                observer.loader_ended(iterator)
                raise
            observer.batch_given(iterator)
            return batch

        return call

    def indices(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(iterator: Any) -> Any:
            index = inner(iterator)
            if observer.watches():
                observer.order_seen(iterator, index)
            return index

        return call

    patches.wrap(DataLoader, "__iter__", start)
    patches.wrap(_BaseDataLoaderIter, "__next__", following)
    patches.wrap(_BaseDataLoaderIter, "_next_index", indices)


def _state_dicts(observer: Observer, patches: Patches) -> None:
    """What a checkpoint takes and gives back."""

    def load_state(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if observer.watches():
                observer.state_loaded(owner)
            return inner(owner, *args, **kwargs)

        return call

    def save(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(obj: Any, *args: Any, **kwargs: Any) -> Any:
            if observer.watches():
                observer.saved(obj)
            return inner(obj, *args, **kwargs)

        return call

    def load(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if observer.watches():
                observer.loaded(result)
            return result

        return call

    def set_rng(which: str) -> _Wrap:
        def make(inner: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                # `fork_rng` and checkpointing put states back too, from inside torch.
                if grade(sys._getframe(1).f_code.co_filename) != MACHINERY and observer.watches():
                    observer.rng_restored(which)
                return inner(*args, **kwargs)

            return call

        return make

    for kind in (nn.Module, Optimizer, torch.amp.GradScaler):
        patches.wrap(kind, "load_state_dict", load_state)
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "load_state_dict" in vars(kind):
            patches.wrap(kind, "load_state_dict", load_state)
    patches.wrap(torch, "save", save)
    patches.wrap(torch, "load", load)
    patches.wrap(torch.cuda, "set_rng_state", set_rng("cuda"))
    patches.wrap(torch.cuda, "set_rng_state_all", set_rng("cuda"))
    patches.wrap(random, "setstate", set_rng("python"))
    if "numpy" in sys.modules:
        patches.wrap(sys.modules["numpy"].random, "set_state", set_rng("numpy"))
    patches.wrap(torch.random, "set_rng_state", set_rng("torch"))
    patches.put(torch, "set_rng_state", torch.random.set_rng_state)
