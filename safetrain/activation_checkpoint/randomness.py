"""Random numbers of a recomputation: the first forward's again, wherever that drew any.

Whether it drew is not guessed from the kinds of modules: the generators are compared before and after each forward.
Their states are kept only where they moved. Seen are torch's own generators of the CPU and of the devices that the
module's inputs and weights are on. Python's and NumPy's, which take 0.1 ms to read, are looked at in the first forwards
of a module, and from then on where one of these moved them. A `torch.Generator` of the user's is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from safetrain.data.batch import tensors_in
from safetrain.errors import ConfigError
from safetrain.rng import HostGenerators

_State = dict[torch.device, Tensor]
_CPU = torch.device("cpu")
_FIRST_FORWARDS = 4
HOST = "_host_randomness"
"""Where a module keeps in how many forwards Python's and NumPy's generators were looked at; `inf`: they moved."""


def random_contexts(module: nn.Module, inputs: Any, *, refuse: bool = False) -> tuple[Drawing, Redrawing]:
    """What to enter around the first forward of a call, and around each recomputation of it.

    `refuse`: a forward that draws raises `ConfigError` instead.
    """
    tensors = [*tensors_in(inputs), *(p for p in [next(module.parameters(), None)] if p is not None)]
    redrawing = Redrawing()
    if any(isinstance(t, FakeTensor) for t in tensors):
        return Drawing({}, redrawing, module), redrawing  # a forecast: there are no numbers to repeat
    devices = {_CPU, *(t.device for t in tensors if t.device.type != "meta")}
    return Drawing(_states(devices), redrawing, module, refuse=refuse), redrawing


def _states(devices: Iterable[torch.device]) -> _State:
    return {device: _generator(device, "get_rng_state") for device in devices}


def _restore(states: _State) -> None:
    for device, state in states.items():
        _generator(device, "set_rng_state", state)


def _generator(device: torch.device, function: str, *args: Any) -> Any:
    if device.type == "cpu":
        return getattr(torch, function)(*args)
    call = getattr(torch.get_device_module(device), function)
    return call(*args) if device.type == "mps" else call(*args, device)


class Drawing:
    """Around a first forward: notes the generators, and forgets them again where it drew nothing."""

    def __init__(self, before: _State, redrawing: Redrawing, module: nn.Module, *, refuse: bool = False) -> None:
        self._before = before
        self._redrawing = redrawing
        self._refuse = refuse
        self._module = module
        looked = vars(module).get(HOST, 0)
        looks = bool(before) and (looked < _FIRST_FORWARDS or looked == math.inf)
        self._host = HostGenerators() if looks else None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        before, self._before = self._before, {}
        after = _states(before)
        moved = any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in zip(before.values(), after.values()))  # noqa: B905 (same keys)
        if moved:
            self._redrawing.states = before
        host, self._host = self._host, None
        if host is not None:
            host_moved = host.have_moved()
            vars(self._module)[HOST] = math.inf if host_moved else vars(self._module).get(HOST, 0) + 1
            if host_moved:
                self._redrawing.host, moved = host, True
        if moved and self._refuse and kind is None:
            raise ConfigError(
                f"activation_checkpoint.preserve_rng_state is false, but the forward of {type(self._module).__name__} "
                "draws random numbers: backward would recompute with others and gradients would be wrong; leave it auto"
            )


class Redrawing:
    """Around a recomputation: generators stand where the first forward found them, if it moved them."""

    def __init__(self) -> None:
        self.states: _State = {}
        self.host: HostGenerators | None = None
        self._now: _State = {}
        self._host_now: HostGenerators | None = None

    def __enter__(self) -> None:
        if self.states:
            self._now = _states(self.states)
            _restore(self.states)
        if self.host is not None:
            self._host_now = HostGenerators()
            self.host.restore()

    def __exit__(self, *exc: object) -> None:
        if self._now:
            _restore(self._now)
            self._now = {}
        if self._host_now is not None:
            self._host_now.restore()
            self._host_now = None
