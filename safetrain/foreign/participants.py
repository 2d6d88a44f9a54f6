"""Who takes part in a foreign loop: models and optimizers, held weakly, under the user's own names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.foreign.naming import find_models, find_optimizer_names, find_tensor_names, inner_optimizer, unwrap

_T = TypeVar("_T")

_IDLE_STEPS = 50
"""An optimizer that has not stepped for so long is not the one in use."""
_NAMINGS = 32
"""Looks for names are taken so many times in a run; a loop that makes new modules in every step would ask for ever."""
_FROZEN_CALLS = 8
"""A module without a trainable parameter is looked at again after so many calls: layers are made late, or thawed."""


class Models(nn.Module):
    """Several models of one training under the user's names. Never called; filled only while listeners run."""


@dataclass(slots=True, eq=False)
class Tracked:
    """An optimizer that was seen."""

    ref: weakref.ref[Optimizer]
    name: str
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


@dataclass(slots=True)
class _Look:
    """Whether a module trains: a trainable parameter of it if it has one, else any."""

    module: weakref.ref[nn.Module]
    witness: weakref.ref[Tensor] | None
    calls_left: int


class Participants:
    """The models that train and the optimizers in use."""

    def __init__(self) -> None:
        self.pretrained: set[int] = set()
        """Ids of modules whose weights were loaded."""
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._looks: dict[int, _Look] = {}
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self._loose: dict[str, weakref.ref[Tensor]] = {}
        self._optimizers: dict[int, Tracked] = {}
        self._changed = True
        self._namings = 0

    # ------------------------------------------------------------------ models

    def trains(self, module: nn.Module) -> bool | None:
        """Whether a module has a trainable parameter; None when it has no parameter at all."""
        look = self._looks.get(id(module))
        if look is not None and look.module() is module:
            witness = look.witness() if look.witness is not None else None
            if witness is not None and witness.requires_grad:
                return True
            if look.calls_left > 0:
                look.calls_left -= 1
                return None if look.witness is None else False
        found: Tensor | None = None
        for parameter in module.parameters():
            found = parameter
            if parameter.requires_grad:
                break
        ref = weakref.ref(module, _forget(self._looks, id(module)))
        self._looks[id(module)] = _Look(ref, weakref.ref(found) if found is not None else None, _FROZEN_CALLS)
        return None if found is None else found.requires_grad

    def add_root(self, module: nn.Module) -> None:
        """A module was called from outside with gradients on."""
        if id(module) not in self._roots:
            self._roots[id(module)] = weakref.ref(module, _forget(self._roots, id(module)))
            self._changed = True

    def is_root(self, module: nn.Module) -> bool:
        """Whether it is a model, not an inner module of one."""
        return id(module) in self._roots or any(ref() is unwrap(module) for ref in self._models.values())

    def models(self) -> dict[str, nn.Module]:
        """Those that train and are alive, by name."""
        return {name: module for name, ref in self._models.items() if (module := ref()) is not None}

    def loose_parameters(self) -> dict[str, Tensor]:
        """What the optimizers of a loop without modules hold, by name."""
        return {name: tensor for name, ref in self._loose.items() if (tensor := ref()) is not None}

    @property
    def any_model(self) -> bool:
        """Whether a model was ever found."""
        return bool(self._models)

    # ------------------------------------------------------------------ optimizers

    def track(self, optimizer: Optimizer, step: int) -> Tracked:
        """The record of an optimizer, or of the one that it wraps. `step`: steps done."""
        known = self._optimizers.get(id(optimizer))
        if known is not None and known.ref() is optimizer:
            return known
        inner = inner_optimizer(optimizer)
        if inner is not optimizer:
            return self.track(inner, step)
        name = free_name(type(optimizer).__name__.lower(), {t.name for t in self._optimizers.values()})
        ref = weakref.ref(optimizer, _forget(self._optimizers, id(optimizer)))
        known = self._optimizers[id(optimizer)] = Tracked(ref, name, step)
        self._changed = True
        return known

    def made(self, optimizer: Optimizer, step: int) -> None:
        """A new optimizer: one that has stepped the same parameters before is replaced, until it steps again."""
        params = _params(optimizer)
        for known in self._optimizers.values():
            other = known.ref()
            if other is not None and known.stepped_at and not params.isdisjoint(_params(other)):
                known.superseded = True
        self.track(optimizer, step)

    def stepped(self, optimizer: Optimizer, step: int) -> None:
        """An optimizer has made its step number `step`."""
        tracked = self.track(optimizer, step)
        tracked.stepped_at, tracked.superseded = step, False

    def optimizers(self, step: int) -> dict[str, Optimizer]:
        """Those in use, by name: alive, not replaced, not idle for long."""
        found: dict[str, Optimizer] = {}
        for tracked in list(self._optimizers.values()):
            optimizer = tracked.ref()
            if optimizer is None or tracked.superseded:
                continue
            if step - max(tracked.stepped_at, tracked.made_at) <= _IDLE_STEPS:
                found[tracked.name] = optimizer
        return found

    @property
    def any_optimizer(self) -> bool:
        """Whether an optimizer is known and alive."""
        return bool(self._optimizers)

    # ------------------------------------------------------------------ names

    @property
    def changed(self) -> bool:
        """Whether somebody came in since names were last looked for."""
        return self._changed and self._namings <= _NAMINGS

    def name_all(self, frame: FrameType, step: int) -> None:
        """Look for the user's names from `frame` outwards. A name once given stays: listeners know things by it."""
        self._changed = False
        self._namings += 1
        for key, tracked in list(self._optimizers.items()):
            optimizer = tracked.ref()
            if optimizer is not None and inner_optimizer(optimizer) is not optimizer:
                del self._optimizers[key]  # it got the one inside after it was made
        optimizers = list(self.optimizers(step).values())
        called = [module for ref in list(self._roots.values()) if (module := ref()) is not None]
        before = {id(module): name for name, module in self.models().items()}
        found: dict[str, nn.Module] = {}
        for name, module in find_models(frame, called, optimizers, self.pretrained).items():
            found[before.get(id(module), name)] = module
        self._models = {name: weakref.ref(module) for name, module in found.items()}
        self._loose = {}
        if not found:
            held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            self._loose = {name: weakref.ref(p) for name, p in find_tensor_names(frame, held).items()}
        names = find_optimizer_names(frame, optimizers)
        for key, tracked in self._optimizers.items():
            if key in names and not tracked.named:
                others = {t.name for t in self._optimizers.values() if t is not tracked}
                tracked.name, tracked.named = free_name(names[key], others), True


def free_name(name: str, taken: Iterable[str]) -> str:
    """`name`, or `name_2` and so on when it is taken."""
    taken, free, n = set(taken), name, 2
    while free in taken:
        free, n = f"{name}_{n}", n + 1
    return free


def _params(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _forget(table: MutableMapping[int, _T], key: int) -> Callable[[object], None]:
    def gone(_: object) -> None:
        table.pop(key, None)

    return gone
