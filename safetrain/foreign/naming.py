"""The user's own names for the models and optimizers of a foreign loop, read from the running frames."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.source import MACHINERY, USER, frame_locals, grade

_MAX_ITEMS = 64
"""Attributes or items looked at in one object of the user's: enough for a trainer class, short for a data set."""


def visible_names(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Names and values that the user's frames can see: locals, attributes of the objects among them, then globals.

    Nearest frame first. Nothing of torch, safetrain or the standard library.
    """
    seen_globals: set[int] = set()
    here = frame
    while here is not None:
        if grade(here.f_code.co_filename) != MACHINERY:
            local = frame_locals(here)
            yield from local.items()
            for name, value in local.items():
                yield from _inside(name, value)
            if grade(here.f_code.co_filename) == USER and id(here.f_globals) not in seen_globals:
                seen_globals.add(id(here.f_globals))
                names = list(here.f_globals.items())
                yield from names
                for name, value in names:
                    yield from _inside(name, value)
        here = here.f_back


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """One level into a container or into an object of a user's class."""
    kind = type(value)
    if kind in (list, tuple):
        for index, item in enumerate(value[:_MAX_ITEMS]):
            yield f"{name}[{index}]", item
    elif kind is dict:
        for key, item in list(value.items())[:_MAX_ITEMS]:
            yield f"{name}[{key!r}]", item
    elif not issubclass(kind, nn.Module | ModuleType | type) and _of_a_user_class(kind):
        for key, item in list(getattr(value, "__dict__", {}).items())[:_MAX_ITEMS]:
            yield (key if name == "self" else f"{name}.{key}"), item


def _of_a_user_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (filename is not None and grade(filename) != MACHINERY)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers, whose parameter names the user knows."""
    while True:
        children: Any = module._modules
        if not isinstance(children, dict):  # a scripted module keeps its own kind of mapping
            return module
        inner = children.get("_orig_mod") or (children.get("module") if type(module).__name__ in _WRAPPERS else None)
        if inner is None:
            return module
        module = inner


_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel"})


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that does the work, inside a wrapper such as accelerate's that shows its parameter groups."""
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value.param_groups is optimizer.param_groups:
            return value
    return optimizer


def find_models(
    frame: FrameType | None,
    called: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    pretrained: Collection[int] = (),
) -> dict[str, nn.Module]:
    """The outermost modules that train, by the user's names.

    A module counts when it shares a parameter with an optimizer. One that shares none, but was called with gradients
    on, counts too: when no module shares any or an optimizer holds parameters of no module at all (the model may have
    been rebuilt behind the optimizer's back), and when it is in train mode with weights that were never loaded
    (`pretrained` has the ids of modules that were): nobody keeps an untrained network as it is on purpose.
    """
    called = [unwrap(module) for module in called if not isinstance(module, torch.jit.ScriptModule)]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    candidates: dict[int, tuple[str, nn.Module]] = {}
    for name, value in visible_names(frame):
        if issubclass(type(value), nn.Module) and not issubclass(type(value), torch.jit.ScriptModule):
            module = unwrap(value)
            if id(module) not in candidates or (_is_item(name) and not _is_item(candidates[id(module)][0])):
                candidates[id(module)] = (name, module)
    for module in called:
        candidates.setdefault(id(module), (type(module).__name__.lower(), module))
    called_ids = {id(module) for module in called}
    matched: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    owned: set[int] = set()
    for name, module in _outermost(candidates):
        parameters = {id(p) for p in module.parameters()}
        if parameters & held:
            _put(matched, name, module)
            owned |= parameters
        elif any(p.requires_grad for p in module.parameters()) and any(id(m) in called_ids for m in module.modules()):
            _put(others, name, module)
    rebuilt = not matched or bool(held - owned)
    for name, module in others.items():
        if rebuilt or (module.training and not any(id(m) in pretrained for m in module.modules())):
            _put(matched, name, module)
    return matched


def _outermost(candidates: dict[int, tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Those that are not part of another one."""
    inner: set[int] = set()
    for _, module in candidates.values():
        if id(module) not in inner:
            inner.update(id(child) for child in module.modules() if child is not module)
    return [(name, module) for key, (name, module) in candidates.items() if key not in inner]


def _put(found: dict[str, nn.Module], name: str, module: nn.Module) -> None:
    key, n = name.replace(".", "_"), 2
    while key in found:
        key, n = f"{name}_{n}".replace(".", "_"), n + 1
    found[key] = module


def find_optimizer_names(frame: FrameType | None, optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """The user's name of each optimizer, by id; those without one are missing."""
    wanted = {id(optimizer) for optimizer in optimizers}
    names: dict[int, str] = {}
    for name, value in visible_names(frame):
        key = id(value)
        if key in wanted and (key not in names or (_is_item(name) and not _is_item(names[key]))):
            names[key] = name
    return names


def find_tensor_names(frame: FrameType | None, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Each tensor under the user's name, or `param_3` by its place."""
    wanted = {id(tensor): tensor for tensor in tensors}
    names: dict[int, str] = {}
    for name, value in visible_names(frame):
        if id(value) in wanted and id(value) not in names:
            names[id(value)] = name
    found: dict[str, Tensor] = {}
    for index, (key, tensor) in enumerate(wanted.items()):
        name = names.get(key, f"param_{index}").replace(".", "_")
        found[name if name not in found else f"param_{index}"] = tensor
    return found


def _is_item(name: str) -> bool:
    """A place in a container: it names one thing for good, where `for net in nets` gives each the same name in turn."""
    return name.endswith("]")
