"""Which optimizer holds which parameter, and noticing cheaply when either side changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(slots=True, frozen=True)
class Held:
    """A parameter by its name, without keeping it alive."""

    name: str
    ref: weakref.ref[Tensor]

    @property
    def tensor(self) -> Tensor | None:
        """The parameter, None once it is gone."""
        return self.ref()


@dataclass(slots=True)
class Coverage:
    """A model's parameters against the optimizers' groups, by identity. Holds nothing alive.

    Uninitialised (lazy) parameters are left out until they have a shape.
    """

    trained: list[Held] = field(default_factory=list)
    """Trainable and held by an optimizer."""
    uncovered: list[Held] = field(default_factory=list)
    """Trainable and held by none."""
    frozen_held: list[Held] = field(default_factory=list)
    """Frozen (`requires_grad=False`) and held by an optimizer."""
    strays: list[Held] = field(default_factory=list)
    """Held by an optimizer and no parameter of the model."""
    repeated: list[tuple[Held, str]] = field(default_factory=list)
    """Twice in one optimizer, with that optimizer's name."""
    shared: list[tuple[Held, tuple[str, ...]]] = field(default_factory=list)
    """In several optimizers, with their names."""
    owner: dict[int, str] = field(default_factory=dict)
    """Name of an optimizer that holds it, by id."""
    any_trained: bool = False
    """Some parameter of the model is held, frozen or not."""


def read_coverage(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Coverage:
    """Compare the two sides now. No host sync; a few microseconds a parameter."""
    found = Coverage()
    owners: dict[int, list[str]] = {}
    tensors: dict[int, tuple[str, Tensor]] = {}
    for opt_name, label, param in held_by(optimizers):
        key = id(param)
        if key in owners and owners[key][-1] == opt_name:
            found.repeated.append((_held(label, param), opt_name))
            continue
        owners.setdefault(key, []).append(opt_name)
        tensors.setdefault(key, (label, param))
    names: dict[int, str] = {}
    for name, param in model.named_parameters():
        names[id(param)] = name
        if _is_lazy(param):
            continue
        opts = owners.get(id(param))
        found.any_trained |= opts is not None
        if opts is None:
            if param.requires_grad:
                found.uncovered.append(_held(name, param))
        else:
            (found.trained if param.requires_grad else found.frozen_held).append(_held(name, param))
            if len(opts) > 1:
                found.shared.append((_held(name, param), tuple(opts)))
    found.strays = [_held(label, param) for key, (label, param) in tensors.items() if key not in names]
    found.repeated = [(Held(names.get(id(h.tensor), h.name), h.ref), opt) for h, opt in found.repeated]
    found.owner = {key: opts[0] for key, opts in owners.items()}
    return found


def held_by(optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, str, Tensor]]:
    """Every entry of every group, as (optimizer, `optimizer[group][index]`, tensor); one that repeats comes again.

    An optimizer's name may itself end in a bracket: `opts[0]`.
    """
    for name, optimizer in optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                yield name, f"{name}[{g}][{i}]", param


def _is_lazy(param: Tensor) -> bool:
    return nn.parameter.is_lazy(param)


def _held(name: str, param: Tensor) -> Held:
    return Held(name, weakref.ref(param))


class ChangeDetector:
    """Tells when the model's modules, its parameters, their `requires_grad` or the optimizers' groups have changed.

    About 0.1 microseconds a parameter and module at each look, which is taken every `interval` steps so that a step
    costs a microsecond or two for models of any size.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self._modules = [weakref.ref(m) for m in model.modules()]
        self._size = len(self._modules) + sum(1 for _ in model.parameters())
        self._groups = {
            name: [(len(g["params"]), id(g["params"][-1]) if g["params"] else 0) for g in opt.param_groups]
            for name, opt in optimizers.items()
        }
        self._model = self._model_now()

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is still the model: the driver of a foreign loop learns of further ones as they are called."""
        return self._modules[0]() is model

    @property
    def interval(self) -> int:
        """Steps between looks."""
        return max(3, self._size // 16)

    def optimizers_changed(self, optimizers: Mapping[str, Optimizer]) -> bool:
        """There are others, or groups were added, removed or refilled. Under a microsecond."""
        if len(optimizers) != len(self._groups):
            return True
        for name, optimizer in optimizers.items():
            known = self._groups.get(name)
            groups = optimizer.param_groups
            if known is None or len(known) != len(groups):
                return True
            for group, (length, last) in zip(groups, known):  # noqa: B905 (the lengths are equal, and this runs in every step)
                params = group["params"]
                if len(params) != length or (length and id(params[-1]) != last):
                    return True
        return False

    def model_changed(self) -> bool:
        """Parameters or modules were added, removed, replaced, frozen or unfrozen, or an attribute was added."""
        return self._model_now() != self._model

    def _model_now(self) -> list[int]:
        mark: list[int] = []
        for ref in self._modules:
            module = ref()
            if module is None:
                mark.append(-1)
                continue
            mark.append(len(module.__dict__))
            for param in module._parameters.values():
                if param is not None:
                    mark.append(id(param))
                    mark.append(param.requires_grad)
            for child in module._modules.values():
                mark.append(id(child))
        return mark
