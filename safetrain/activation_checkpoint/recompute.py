"""The forward of a module that recomputes, and that of one which offloads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from safetrain.activation_checkpoint.attributes import attribute_contexts
from safetrain.activation_checkpoint.buffers import buffer_contexts
from safetrain.activation_checkpoint.offload import Offload
from safetrain.activation_checkpoint.randomness import random_contexts
from safetrain.activation_checkpoint.selective import selective_contexts
from safetrain.data.batch import tensors_in
from safetrain.modules import Forward

CHECKED = "_checked_for_randomness"
"""Where a module notes that its forward was seen to draw nothing."""
STOPS_EARLY = "_recomputation_stops_early"
"""Where a module notes whether its recomputation may end with the last value that backward needs."""


def recomputing(inner: Forward, *, selective: bool, preserve_rng_state: bool | Literal["auto"]) -> Forward:
    """A forward around `inner` that keeps its inputs (`selective`: and costly results) and runs again in backward."""

    # `forward` by name: a pickled bound method is looked up by its function's name, and must find the class's own.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(self, *args, **kwargs)
        run = functools.partial(inner, self, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler plans recomputation itself and moves buffer updates and random numbers out of it.
            context: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
            return checkpoint(
                run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state is not False, **context
            )
        # Until an output was seen, a recomputation runs to its end.
        with nullcontext() if vars(self).get(STOPS_EARLY) else set_checkpoint_early_stop(False):
            output = checkpoint(
                run,
                *args,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=functools.partial(_contexts, self, (args, kwargs), selective, preserve_rng_state),
                determinism_check=_DETERMINISM,
            )
        if STOPS_EARLY not in vars(self):
            vars(self)[STOPS_EARLY] = not any(map(_saves_what_it_fills, tensors_in(output)))
        return output

    return forward


def _saves_what_it_fills(output: Tensor) -> bool:
    """Made by an operation that hands over its random numbers to be saved and draws them afterwards: only RReLU.

    To stop a recomputation at the last value to be saved, as torch does, would leave them as they lay in memory.
    """
    nodes: list[Any] = [output.grad_fn]
    for _ in range(4):  # reshaping may come after it
        if any(node is not None and node.name().startswith("RreluWithNoise") for node in nodes):
            return True
        nodes = [before for node in nodes if node is not None for before, _ in node.next_functions]
    return False


def offloading(inner: Forward) -> Forward:
    """A forward around `inner` whose saved tensors wait in host memory."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        with Offload(self):
            return inner(self, *args, **kwargs)

    return forward


def _contexts(
    module: nn.Module, inputs: Any, selective: bool, preserve_rng_state: bool | Literal["auto"]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What `checkpoint` enters around the first forward of a call, and around each recomputation of it."""
    pairs: list[tuple[Any, Any]] = [buffer_contexts(module), attribute_contexts(module)]
    if preserve_rng_state is not False:
        pairs.append(random_contexts(module, inputs))
    elif CHECKED not in vars(module):
        pairs.append(random_contexts(module, inputs, refuse=True))
        vars(module)[CHECKED] = True
    if selective:  # innermost: it counts operations, and those of the others are none of the module's
        pairs += [(_NoCastCache(), _NoCastCache()), selective_contexts(type(module).__name__)]
    return _Nested([first for first, _ in pairs]), _Nested([again for _, again in pairs])


class _Nested:
    """Several context managers as one that can be entered again."""

    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exc)


class _NoCastCache:
    """Autocast casts a weight at each use: a cast that is found in its cache is an operation less, and they count.

    A weight that is used several times gets gradients that add up in its own precision, not in that of the cast.
    """

    def __enter__(self) -> None:
        self._enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *exc: object) -> None:
        torch.set_autocast_cache_enabled(self._enabled)


# ---- in-place operations inside -------------------------------------------------------------------------------------
#
# Autograd refuses a backward whose saved values were changed in place. Under checkpointing values are saved again while
# recomputing, through hooks, and for those autograd does not look: exp, then mul_ on its result, gives silently wrong
# gradients. So the version of each saved value is among the facts that checkpoint compares after a recomputation.


class _Facts:
    """What must be the same about a saved value after the forward and after its recomputation.

    A different number of in-place writes raises autograd's own error when they are compared.
    """

    __slots__ = ("_plain", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version = None if tensor.is_inference() else tensor._version
        self._plain = (tensor.shape, tensor.dtype, tensor.device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Facts):
            return NotImplemented
        if self._version != other._version:
            shape, dtype, _ = self._plain
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{torch.empty(0, dtype=dtype).type()} {list(shape)}], saved inside a checkpointed module, is at "
                f"version {other._version} after that ran again; expected version {self._version} instead"
            )
        return self._plain == other._plain

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(dict(zip(("shape", "dtype", "device"), self._plain, strict=True)))


def _register_facts() -> str:
    """The name by which `checkpoint` finds `_Facts`; its own check where this torch keeps no table of them."""
    known: dict[str, Callable[[Tensor], Any]] | None = getattr(
        torch_checkpoint, "_allowed_determinism_checks_to_fns", None
    )
    if known is None:
        return "default"
    known["safetrain"] = _Facts
    return "safetrain"


_DETERMINISM = _register_facts()
