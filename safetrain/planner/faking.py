"""Tensors without bytes: models, optimizers and batches that have shapes and no numbers, in a Trainer that runs them.

Everything that a step does is run for real by the Trainer itself, only the kernels are not (`FakeTensorMode`). What
cannot be known without numbers is refused with the reason, `Unforecastable`.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain import rng
from safetrain.errors import SafetrainError
from safetrain.findings import SourceLine
from safetrain.loop import Trainer
from safetrain.planner.workspaces import RNN_LAYER, with_workspace
from safetrain.source import traceback_line, user_line, with_text

_READ = torch.ops.aten._local_scalar_dense.default


Held = list[weakref.ref[Tensor]]
"""Tensors, which live only as long as their holder keeps them."""


class Unforecastable(SafetrainError):
    """What a step would do cannot be known without running it."""


def make_mode() -> FakeTensorMode:
    """A fake mode in which a number that is read is unknown, and using it to decide anything is an error."""
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True)


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, every tensor that is made has no bytes. Generators are put back; torch's remarks are not shown.

    Raises:
        Unforecastable: something inside needs the numbers of a tensor, or an operator that torch cannot do without.
    """
    try:
        with rng.preserved(), warnings.catch_warnings(), _modules_move_fakes(), mode, _Answers():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            yield
    except (GuardOnDataDependentSymNode, UnsupportedOperatorException) as error:
        raise Unforecastable(_reason(error)) from error
    except RuntimeError as error:
        if "fake" not in str(error).lower():
            raise
        raise Unforecastable(_reason(error)) from error


def fake(value: Any, mode: FakeTensorMode, shared: Iterable[Any] = ()) -> tuple[Any, Held]:
    """A deep copy of anything whose tensors are fake, and these tensors. What is `shared` is not copied.

    Raises:
        Unforecastable: a part of it cannot be copied.
    """
    memo = {id(thing): thing for thing in shared}
    try:
        with FakeCopyMode(mode):
            copied = copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise Unforecastable(f"the {type(value).__name__} cannot be copied: {error}") from error
    return copied, [weakref.ref(thing) for thing in memo.values() if isinstance(thing, FakeTensor)]


def fake_trainer(trainer: Trainer, mode: FakeTensorMode) -> tuple[Trainer, Held]:
    """A copy of a Trainer that trains a fake model, and all tensors that it holds. The Trainer itself stays as it is.

    Loaders, listeners and reports are shared, not copied: the copy must not run them. Raises `Unforecastable`.
    """
    shared = (trainer.report, trainer.listeners, trainer.train_loader, trainer.state.replay, *trainer.callbacks)
    return fake(trainer, mode, shared)


def why(error: BaseException) -> str:
    """What a step on fake tensors failed with, and at which line of the user's."""
    told = str(error) if isinstance(error, SafetrainError) else f"{type(error).__name__}: {error}"
    return told if isinstance(error, SafetrainError) else told + _at(traceback_line(error.__traceback__))


def _at(source: SourceLine | None) -> str:
    if source is None:
        return ""
    source = with_text(source)
    return f" at {source.file.rsplit('/', 1)[-1]}:{source.line}: `{source.text}`"


def _reason(error: BaseException) -> str:
    place = _at(traceback_line(error.__traceback__))
    if isinstance(error, GuardOnDataDependentSymNode):
        return f"the step depends on the numbers in a tensor{place}"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} has no fake implementation (`torch.library.register_fake`){place}"
    return f"{str(error).strip().splitlines()[0]}{place}"


def compiles_inside(mode: type[TorchDispatchMode]) -> bool:
    """For a dispatch mode's `ignore_compile_internals`: torch compiles under it, and what then runs is seen."""
    return True


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the loop and the optimizers the numbers they read, and leaves out what writes and returns nothing.

    The loop is told 0 (a finite norm, no Inf found), an optimizer 1 (its step count). What the user's code reads stays
    unknown: its value may be logged, not decided upon.
    """

    ignore_compile_internals = classmethod(compiles_inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and isinstance(args[0], FakeTensor):
            answer = _answer(sys._getframe(1))
            if answer is not None:
                return answer
        if not func._schema.returns:
            return None  # fused and foreach optimizers: no memory, and some have no fake implementation
        result = func(*args, **(kwargs or {}))
        if func is RNN_LAYER:
            return with_workspace(result, args)
        known = torch.Tag.dynamic_output_shape not in func.tags or not isinstance(result, Tensor)
        if not known and not all(isinstance(size, int) for size in result.shape):
            raise Unforecastable(f"the shape of a tensor depends on the numbers in another{_at(user_line())}")
        return result


def _answer(frame: FrameType | None) -> float | None:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim"):
            return 1.0
        if module == "torch.amp.grad_scaler":
            return 0.0
        own = module.startswith("safetrain.")
        if own and not module.startswith(("safetrain.planner", "safetrain.accounting")):
            return 0.0
        if not own and not module.startswith("torch."):
            return None
        frame = frame.f_back
    return None


@contextmanager
def _modules_move_fakes() -> Iterator[None]:
    """`model.to(...)` for fake parameters: torch would swap their contents, which the fake mode's own books forbid."""
    original = nn.Module._apply
    made: dict[tuple[int, int], tuple[Any, ...]] = {}  # tied tensors stay tied; the keys' owners are held

    def moved(fn: Callable[[Tensor], Tensor], old: Tensor) -> Tensor:
        key = (id(fn), id(old))
        if key not in made:
            with torch.no_grad():
                new = fn(old)
            if new is not old and isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            made[key] = (new, fn, old)
        result: Tensor = made[key][0]
        return result

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in tables:
            for name, tensor in slots.items():
                if tensor is not None:
                    slots[name] = moved(fn, tensor)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
