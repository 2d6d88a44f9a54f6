"""Find modules by name pattern, and wrap a module's forward so that copies, pickles and state dicts stay right."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from safetrain.errors import ConfigError

Forward = Callable[..., Any]
"""A forward as a class defines it: called with the module first."""

_LAYERS = "_forward_layers"
_BASE = "_forward_base"


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all; `nn.ModuleList` and its like only hold others."""
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether this very module was given to `torch.compile`, in place or not."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def as_patterns(value: object) -> tuple[str, ...]:
    """One pattern or several, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(cast("Iterable[str]", value))


def match_modules(model: nn.Module, patterns: Iterable[str], *, setting: str) -> dict[str, nn.Module]:
    """The callable modules inside `model` whose name matches a pattern of `fnmatch` (`*` spans dots), in model order.

    Containers that are never called (`nn.ModuleList`) do not count, nor does `model` itself.
    Raises `ConfigError`, naming `setting`, when a pattern matches none.
    """
    named = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for pattern in patterns:
        names = [name for name in named if fnmatchcase(name, pattern)]
        callable_names = [name for name in names if has_forward(named[name])]
        if not callable_names:
            raise ConfigError(_no_match(pattern, names, named, setting, type(model).__name__))
        chosen.update(callable_names)
    return {name: module for name, module in named.items() if name in chosen}


def _no_match(pattern: str, containers: list[str], named: dict[str, nn.Module], setting: str, model: str) -> str:
    if containers:
        kind = type(named[containers[0]]).__name__
        return (
            f"{setting}: `{pattern}` matches `{containers[0]}`, a {kind}, which only holds modules and is never "
            f"called; name its children: `{containers[0]}.*`"
        )
    near = difflib.get_close_matches(pattern, named, n=3, cutoff=0.5) or list(named)[:5]
    listed = ", ".join(f"`{name}`" for name in near) or "none: it has no inner modules"
    return f"{setting}: `{pattern}` matches no module of {model}; near names: {listed}"


def outermost(matched: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """`matched` without the modules that lie inside another matched one."""
    kept: dict[str, nn.Module] = {}
    for name, module in matched.items():
        parents = name.split(".")[:-1]
        if not any(".".join(parents[: i + 1]) in matched for i in range(len(parents))):
            kept[name] = module
    return kept


def wrap_forward(module: nn.Module, owner: str, wrap: Callable[[Forward], Forward]) -> None:
    """Put `wrap(inner)` in front of the module's forward, under the name `owner`; `unwrap_forward` takes it off.

    The forward becomes a bound method of the instance, not a closure over it: `copy.deepcopy` rebinds bound methods,
    so a copy (an EMA model, say) runs its own parameters. `wrap` must be importable for a pickle of the whole module.
    """
    if _LAYERS not in vars(module):
        vars(module)[_LAYERS] = []
        vars(module)[_BASE] = vars(module).get("forward")
    vars(module)[_LAYERS].append((owner, wrap))
    _rebuild(module)


def unwrap_forward(module: nn.Module, owner: str) -> bool:
    """Take off what `owner` put on, whatever else was put on since. False when there was nothing."""
    layers = vars(module).get(_LAYERS, [])
    kept = [layer for layer in layers if layer[0] != owner]
    if len(kept) == len(layers):
        return False
    vars(module)[_LAYERS] = kept
    _rebuild(module)
    return True


def is_wrapped(module: nn.Module, owner: str) -> bool:
    """Whether `owner` has wrapped this module's forward."""
    return any(layer[0] == owner for layer in vars(module).get(_LAYERS, []))


def _rebuild(module: nn.Module) -> None:
    base = vars(module)[_BASE]
    layers = vars(module)[_LAYERS]
    vars(module).pop("forward", None)
    if base is not None:
        vars(module)["forward"] = base
    if not layers:
        del vars(module)[_LAYERS], vars(module)[_BASE]
        return
    forward = _as_function(module, base)
    for _, wrap in layers:
        forward = wrap(forward)
    vars(module)["forward"] = types.MethodType(forward, module)


def _as_function(module: nn.Module, base: Any) -> Forward:
    if base is None:
        return type(module).forward
    if isinstance(base, types.MethodType) and base.__self__ is module:
        return base.__func__
    # Somebody set a plain function on the instance: it is called without the module.
    return lambda _module, *args, **kwargs: base(*args, **kwargs)


def sets_modes_itself(module: nn.Module) -> bool:
    """It overrides `train`: to keep a frozen part in eval mode, or to merge its weights for evaluation."""
    return type(module).train is not nn.Module.train


def set_training(module: nn.Module, training: bool) -> None:
    """Put one module, not those inside it, into a mode, unless it does that itself."""
    if sets_modes_itself(module):
        module.train(training)
    else:
        module.training = training
