"""What forward and backward of a window change beside gradients, noted before so that the window can be run again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from safetrain import rng
from safetrain.data.batch import tensors_in
from safetrain.recording.replay import restore_plain_attributes
from safetrain.rng import HostGenerators

if TYPE_CHECKING:
    from safetrain.loop import Trainer

_TENSORS = frozenset({Tensor, nn.Parameter})
_SMALL = 1 << 16  # bytes of a buffer that is cheaper to copy than to reason about
_FIRST_WINDOWS, _EVERY = 4, 256  # windows in which it is looked whether Python's and NumPy's generators are used


class Undo:
    """Notes the state before a window and puts it back: generators, buffers, gradients that were there, running sums,
    attributes of the trainer and of the user's modules.

    Made to cost little in the windows that succeed (`benchmarks/oom_split.py`): big buffers that do not move are known
    by their version, Python's and NumPy's generators (whose states take 0.1 ms to read) are copied only in runs whose
    steps use them.

    Not put back: what user code changes in place elsewhere (a list it appends to, a metric object), and generators
    that it made itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = Buffers(model)
        self._generators = Generators()
        self._modules = [m for m in model.modules() if not type(m).__module__.startswith("torch.nn.")]
        self._attributes: dict[str, Any] = {}
        self._plain: list[dict[str, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._averages: Any = None
        self._counters: tuple[int, int, frozenset[str]] = (0, 0, frozenset())
        self._inputs: list[tuple[Tensor, int]] = []

    def note(self, trainer: Trainer, window: Sequence[Any]) -> None:
        """Before the window."""
        state = trainer.state
        self._generators.note()
        self._attributes = dict(vars(trainer))
        self._buffers.note([t for t in self._attributes.values() if type(t) in _TENSORS])  # isinstance is slower
        if self._modules:
            self._plain = [dict(vars(m)) for m in self._modules]
        self._gradients = [
            (p, p.grad.clone())
            for opt in state.optimizers.values()
            for group in opt.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if trainer._averages is not None:  # the step is logged
            self._averages = copy.deepcopy(trainer._averages)
        self._counters = state.num_samples, state.micro_step, frozenset(state.attached_metrics)
        self._inputs = [(t, t._version) for batch in window for t in _tensors_of(batch) if not t.is_inference()]

    def done(self) -> None:
        """After a window that succeeded. A host sync in the first window, where a big buffer's values are compared."""
        self._generators.done()
        self._buffers.done()
        self._forget()

    def obstacle(self) -> str | None:
        """What has changed and cannot be put back, in words."""
        if any(t._version != version for t, version in self._inputs):
            return "training_step changes its batch in place, so it cannot be run again on the same one; clone it there"
        return self._buffers.obstacle()

    def roll_back(self, trainer: Trainer) -> None:
        """After a window that failed, outside of the `except` that caught it."""
        state = trainer.state
        state.batch = state.micro_loss = state.loss = None
        state.num_samples, state.micro_step, attached = self._counters
        state.attached_metrics = set(attached)
        attributes = vars(trainer)
        attributes.clear()
        attributes.update(self._attributes)
        trainer._averages = copy.deepcopy(self._averages)
        for module, plain in zip(self._modules, self._plain, strict=True):
            restore_plain_attributes(module, plain)
        trainer.zero_grad()
        for param, gradient in self._gradients:
            param.grad = gradient.clone()
        self._buffers.roll_back()
        self._generators.roll_back()

    def _forget(self) -> None:
        """A hidden state kept on the trainer must not live longer for it."""
        self._attributes, self._plain, self._gradients, self._inputs, self._averages = {}, [], [], [], None


def _tensors_of(batch: Any) -> Iterable[Tensor]:
    """`tensors_in`, faster where the batch is a plain tuple or list of tensors."""
    if type(batch) in (tuple, list) and all(type(part) is Tensor for part in batch):
        return batch  # type: ignore[no-any-return]
    return tensors_in(batch)


class Buffers:
    """The tensors that a forward may change: buffers of the model, and others that a caller names.

    Small ones are copied each time. A big one is copied until it was seen not to move; from then on its version tells
    whether it did.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if m._buffers]
        self._held: list[dict[str, Tensor | None]] = []
        self._live: list[Tensor] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._resting: list[tuple[Tensor, int]] = []  # with their versions
        self._at_rest: set[int] = set()  # ids of big ones that were seen not to move
        self._restless: set[int] = set()  # and of those that did after that
        self._unsettled = False

    def note(self, others: Sequence[Tensor] = ()) -> None:
        """Copy what may move."""
        if not self._modules and not others and not self._live:
            return
        self._held = [dict(m._buffers) for m in self._modules]
        live = [t for held in self._held for t in held.values() if t is not None]
        live.extend(others)
        if len(live) != len(self._live) or any(a is not b for a, b in zip(live, self._live, strict=True)):
            self._plan(live)
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._copied)
        if self._resting:
            self._resting = [(t, t._version) for t, _ in self._resting]

    def done(self) -> None:
        """See what has moved, where that is not known yet."""
        if not self._resting and not self._unsettled:
            return
        moved = {id(t) for t, version in self._resting if t._version != version}
        if moved:
            self._at_rest -= moved
            self._restless |= moved
            self._live = []  # planned anew
        if self._unsettled:
            self._unsettled = False
            pairs = zip(self._copied, self._copies, strict=True)
            still = {id(t) for t, before in pairs if t.nbytes > _SMALL and torch.equal(t, before)} - self._restless
            if still:
                self._at_rest |= still
                self._live = []

    def obstacle(self) -> str | None:
        """A buffer that was thought to be at rest and has changed, in words."""
        for tensor, version in self._resting:
            if tensor._version != version:
                named = (name for held in self._held for name, t in held.items() if t is tensor)
                return f"`{next(named, 'a tensor')}` was changed for the first time in this step and no copy was kept"
        return None

    def roll_back(self) -> None:
        """Put values and names back."""
        for module, held in zip(self._modules, self._held, strict=True):
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            torch._foreach_copy_(self._copied, self._copies)

    def _plan(self, live: list[Tensor]) -> None:
        known = {id(t) for t in live}
        self._at_rest &= known
        self._restless &= known
        self._live = live
        usable = [t for t in live if t.layout is torch.strided and t.device.type != "meta" and not t.is_inference()]
        self._resting = [(t, t._version) for t in usable if id(t) in self._at_rest]
        self._copied = [t for t in usable if id(t) not in self._at_rest]
        self._copies = [torch.empty_like(t, requires_grad=False) for t in self._copied]
        self._unsettled = any(t.nbytes > _SMALL and id(t) not in self._restless for t in self._copied)


class Generators:
    """States of the generators that a window may draw from.

    torch's are read each time (1 µs). Python's and NumPy's only where a step was seen to move them: that is looked for
    in the first windows and in every 256th. Should a window that is repeated be the first to draw from them, done()
    warns: its draws are then not those that the failed attempt had.
    """

    def __init__(self) -> None:
        self._torch: dict[str, Any] = {}
        self._others: HostGenerators | None = None
        self._windows = 0
        self._others_used = False
        self._noted_late = False

    def note(self) -> None:
        """Before a window."""
        self._torch = rng.capture_torch()
        looks = self._others_used or self._windows < _FIRST_WINDOWS or self._windows % _EVERY == 0
        self._others = HostGenerators() if looks else None
        self._windows += 1
        self._noted_late = False

    def done(self) -> None:
        """After one that succeeded."""
        if self._others is None or self._others_used:
            return
        self._others_used = self._others.have_moved()
        if self._others_used and self._noted_late:
            warnings.warn(
                "the step that was repeated in smaller micro-batches draws from Python's or NumPy's generator for the "
                "first time, and their states before it were not kept: its draws are new ones",
                RuntimeWarning,
                stacklevel=2,
            )

    def roll_back(self) -> None:
        """After one that failed."""
        rng.restore(self._torch)
        if self._others is not None:
            self._others.restore()
        else:
            self._others, self._noted_late = HostGenerators(), True
