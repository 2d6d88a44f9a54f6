"""Which switches make a run fit: each by itself, and the fastest combination within a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from safetrain.loop import Trainer
from safetrain.planner.cost import Machine
from safetrain.planner.faking import fake, fake_trainer, faking, why
from safetrain.planner.forecast import Forecast, run_steps
from safetrain.planner.switches import Switch, available

_MOST_TRIED = 24
_STATIC = ("parameters", "buffers", "gradients", "optimizer state")


@dataclass(frozen=True, slots=True)
class Option:
    """Some switches together, and what a step then takes."""

    switches: tuple[Switch, ...]
    forecast: Forecast
    slowdown: float
    """Estimated seconds of a step (roofline) as a multiple of those without the switches (of `Switch.against`)."""
    extra_flops: float
    """Floating-point operations added, as a share of those without the switches."""

    @property
    def peak_bytes(self) -> int:
        """Of the step."""
        return self.forecast.peak_bytes

    @property
    def changes(self) -> str:
        """What these switches alter in training, in words."""
        return "; ".join(switch.changes for switch in self.switches if switch.changes)


class Planner:
    """Forecasts of one Trainer over one window, with and without switches. Changes neither.

    Raises:
        Unforecastable: the step as it is cannot be forecast.
    """

    def __init__(self, trainer: Trainer, window: Sequence[Any], mode: FakeTensorMode) -> None:
        self._mode = mode
        with faking(mode):
            self._trainer, _ = fake_trainer(trainer, mode)
            self._window, _ = fake(list(window), mode)
            self.switches = available(self._trainer, self._window)
            self._stepped, held = fake_trainer(self._trainer, mode)
            self.base = run_steps(self._stepped, held, self._window)
        self._machine: Machine | None = None
        self._known: dict[tuple[str, ...], Option | None] = {}
        self.failed: dict[str, str] = {}
        """Settings with which the step cannot be run or forecast, and why."""

    def each(self) -> Iterator[Option]:
        """Every switch by itself, in order; without those that a `train_step` of the user's does not heed."""
        for switch in self.switches:
            option = self.option((switch,))
            if option is not None and not self._is_idle(option):
                yield option

    def option(self, switches: Sequence[Switch]) -> Option | None:
        """These switches together; None where the step then cannot be forecast."""
        key = tuple(switch.text for switch in switches)
        if key not in self._known:
            try:
                found = self._run(switches)
                reference = self._reference(switches)
            except Exception as error:  # the user's code may count on the setting, such as on a batch's size
                self._known[key], self.failed[" + ".join(key)] = None, why(error)
            else:
                self._known[key] = Option(tuple(switches), found, *self._prices(found, reference))
        return self._known[key]

    def fastest(self, budget: int) -> Option | None:
        """The fastest combination whose peak is within `budget` bytes; None when none is.

        Combinations that train the same come first, then bf16, then other optimizers. What a combination takes is
        guessed from its parts; then the guesses are forecast, the fastest first, until one fits.
        """
        for allowed in self._stages():
            guesses = sorted(self._guesses(allowed, budget), key=lambda guess: guess[0])
            for _, combination in guesses[:_MOST_TRIED]:
                option = self.option(combination)
                if option is not None and option.peak_bytes <= budget:
                    return option
        return None

    def _is_idle(self, option: Option) -> bool:
        """Whether the step does not change at all by what should change its operations."""
        same = option.forecast.cost.operations == self._reference(option.switches).cost.operations
        return same and option.switches[0].kind in ("micro-batch", "precision", "activations")

    def _stages(self) -> Iterator[list[Switch]]:
        exact = [switch for switch in self.switches if not switch.changes]
        yield exact
        yield [switch for switch in self.switches if not switch.changes or switch.kind != "optimizer"]
        yield self.switches

    def _guesses(self, allowed: Sequence[Switch], budget: int) -> Iterator[tuple[float, tuple[Switch, ...]]]:
        kinds: dict[str, list[Option]] = {}
        for switch in allowed:
            option = self.option((switch,))
            if option is not None and option.peak_bytes < self.base.peak_bytes:
                kinds.setdefault(switch.kind, []).append(option)
        for chosen in itertools.product(*([None, *options] for options in kinds.values())):
            options = [option for option in chosen if option is not None]
            if options and self._guess(options) <= 1.1 * budget:
                yield math.prod(o.slowdown for o in options), tuple(o.switches[0] for o in options)

    def _guess(self, options: Sequence[Option]) -> float:
        """The peak of several switches: what does not depend on the batch shrinks by itself, the rest by shares."""
        static, rest = _split(self.base)
        smallest, share = static, 1.0
        for option in options:
            its_static, its_rest = _split(option.forecast)
            smallest = min(smallest, its_static)
            share *= min(1.0, its_rest / rest) if rest else 1.0
        return smallest + share * rest

    def _reference(self, switches: Sequence[Switch]) -> Forecast:
        against = next((switch.against for switch in switches if switch.against is not None), None)
        option = self.option((against,)) if against is not None else None
        return self.base if option is None else option.forecast

    def _prices(self, found: Forecast, reference: Forecast) -> tuple[float, float]:
        if self._machine is None:
            self._machine = Machine.measure(self._trainer.device)
        seconds = found.cost.seconds(self._machine) / reference.cost.seconds(self._machine)
        flops = found.cost.flops / reference.cost.flops - 1 if reference.cost.flops else 0.0
        return seconds, flops

    def _run(self, switches: Sequence[Switch]) -> Forecast:
        # A first step differs where optimizers make their state or checkpointed modules learn about their buffers.
        lasting = {"optimizer", "activations"}.isdisjoint(switch.kind for switch in switches)
        with faking(self._mode):
            trainer, held = fake_trainer(self._stepped if lasting else self._trainer, self._mode)
            for switch in switches:
                switch.apply(trainer)
            return run_steps(trainer, held, self._window, 1 if lasting else 2)


def _split(found: Forecast) -> tuple[int, int]:
    """Bytes at the peak: of what is there whatever the batch, and of the rest."""
    owners = found.memory.owners_at(found.memory.peak_clock)
    static = sum(owners[owner] for owner in _STATIC)
    return static, found.peak_bytes - static
