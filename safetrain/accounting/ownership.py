"""Whose bytes are they? Every tensor of one step, from its birth at an operation to its death, with its owner.

An `AllocationLog` watches each operation of a step (some twenty times slower: for a single step only). An
`OwnershipProbe` is the callback that has it watch a step of a Trainer and makes a `StepMemory` of it.
"""

from __future__ import annotations

import bisect
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain.callbacks.base import Callback
from safetrain.data.batch import tensors_in
from safetrain.findings import SourceLine
from safetrain.graph import SavedFreed, Survey, grad_fn_of, saved_tensors, storage_key, walk
from safetrain.memory import Meter, meter_for
from safetrain.rules.memory import describe
from safetrain.source import user_line, with_text

if TYPE_CHECKING:
    from safetrain.state import RunState

OWNERS = (
    "parameters",
    "buffers",
    "optimizer state",
    "retained",
    "inputs",
    "gradients",
    "activations",
    "temporaries",
)
"""Who may own a tensor: the model, the optimizers, the graph (`activations`), the batch, the user's other names
(`retained`), or nobody for long (`temporaries`)."""

_sequence_nr = torch._C._autograd._get_sequence_nr


@dataclass(slots=True, eq=False)
class Block:
    """One storage."""

    num_bytes: int
    born: int
    op: str = ""
    died: int | None = None
    source: SourceLine | None = None
    module: str = ""
    recomputed: bool = False
    """Made by a module that ran again during backward, under activation checkpointing."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    owner: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What one step did with memory. Clocks count allocations and deaths, from 0 at its start."""

    step: int
    device: str
    blocks: list[Block]
    clock: int
    """The clock at the end of the step."""
    phases: dict[str, int]
    """Clock at the end of each phase."""
    peak_clock: int
    meter: str
    used_at_start: int
    used_at_peak: int
    """What the meter said."""

    def owners_at(self, clock: int) -> dict[str, int]:
        """Bytes by owner at a moment."""
        total = dict.fromkeys(OWNERS, 0)
        for block in self.alive_at(clock):
            total[block.owner] += block.num_bytes
        return total

    def alive_at(self, clock: int) -> list[Block]:
        """Blocks there at a moment, the biggest first."""
        alive = [b for b in self.blocks if b.born <= clock and (b.died is None or b.died > clock)]
        return sorted(alive, key=lambda block: -block.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak."""
        return sum(self.owners_at(self.peak_clock).values())

    @property
    def peak_block(self) -> Block | None:
        """The last block of some size that was made before the peak; None when the step began with it."""
        enough = self.peak_bytes / 100
        made = [block for block in self.alive_at(self.peak_clock) if block.op and block.num_bytes >= enough]
        return max(made, key=lambda block: block.born, default=None)

    def phase_of(self, clock: int) -> str:
        """The phase in which a moment lies."""
        return next((name for name, end in self.phases.items() if clock <= end), "step")

    @property
    def other_bytes(self) -> int:
        """What the meter counted at the start beside tensors: Python, libraries, what kernels keep."""
        return self.used_at_start - sum(self.owners_at(0).values())

    @property
    def accounted(self) -> float:
        """The owners' bytes at the peak, with `other_bytes`, as a share of what the meter said there."""
        return (self.peak_bytes + self.other_bytes) / self.used_at_peak if self.used_at_peak else 1.0

    def accounted_growth(self) -> float | None:
        """What tensors added up to the peak, as a share of what the meter saw added; None where it saw nothing."""
        added = self.used_at_peak - self.used_at_start
        return (self.peak_bytes - sum(self.owners_at(0).values())) / added if added > 0 else None

    def activations_by(self, what: str) -> dict[str, int]:
        """Bytes of activations at the end of forward by `module` or by `line`, the biggest first."""
        clock = self.phases.get("forward", self.peak_clock)
        total: dict[str, int] = {}
        for block in self.alive_at(clock):
            if block.owner == "activations":
                key = (block.module or "outside of modules") if what == "module" else place(block.source) or "no line"
                total[key] = total.get(key, 0) + block.num_bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def place(source: SourceLine | None) -> str:
    """`file.py:12: text` of a line, for a table."""
    if source is None:
        return ""
    source = with_text(source)
    return f"{source.file.rsplit('/', 1)[-1]}:{source.line}: {source.text}"


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storage of every tensor that an operation returns, and when it dies.

    Results of the operations are what they would be without it. It does not see what kernels use inside, nor memory
    that is no tensor's.
    """

    supports_higher_order_operators = True
    counts_fakes = False
    """Whether fake tensors count with the bytes that they would have."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.clock = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_clock = 0
        self.peak_used = 0
        """The meter at the peak."""
        self.modules: list[str] = []
        """Names of the modules that are running, the outermost first."""
        self._meter = meter
        self._alive: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._forward: list[tuple[int, SourceLine | None, str]] = []  # (number of the newest node, line, module)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        newest = _sequence_nr() - 1  # autograd has made the operation's node already
        result = func(*args, **(kwargs or {}))
        made = [tensor for tensor in _outputs(result) if self._is_new(tensor)]
        node = torch._C._current_autograd_node()
        source, module = user_line(), self.modules[-1] if self.modules else ""
        if node is not None and not self.modules:
            source, module = self._forward_place(node)
        elif not self._forward or newest > self._forward[-1][0]:
            self._forward.append((newest, source, module))
        for tensor in made:
            self._note(tensor, str(func), source, module, recomputed=node is not None and bool(self.modules))
        return result

    def add(self, tensor: Tensor, owner: str, holder: str = "") -> None:
        """Tell the owner of a tensor that is alive. The first word counts; one that is not known came from outside.

        What the user still keeps when the step is over was never just an activation.
        """
        key = storage_key(tensor, fakes=self.counts_fakes)
        if key is None:
            return
        if key not in self._alive:
            self._note(tensor, "", None, "")
        block = self._alive[key][1]
        if not block.owner or (owner == "retained" and block.owner == "activations"):
            block.owner, block.holder = owner, holder

    def alive(self) -> list[tuple[int, Block]]:
        """The storages that are there now, by their keys."""
        return [(key, block) for key, (_, block) in self._alive.items()]

    def used(self) -> int:
        """The meter without this log's own lists."""
        return self._meter.read() - sum(map(sys.getsizeof, (self.blocks, self._alive, self._forward)))

    def bytes_of(self, tensor: Tensor) -> int:
        """What a tensor's storage takes."""
        return tensor.untyped_storage().nbytes()

    def _is_new(self, tensor: Tensor) -> bool:
        key = storage_key(tensor, fakes=self.counts_fakes)
        if key is None or tensor.device.type == "meta":
            return False
        known = self._alive.get(key)
        if known is None:
            return True
        size = self.bytes_of(tensor)
        if size > known[1].num_bytes:  # resized: an `out=` that began empty
            self.live_bytes += size - known[1].num_bytes
            known[1].num_bytes = size
        return False

    def _note(
        self, tensor: Tensor, op: str, source: SourceLine | None, module: str, *, recomputed: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.clock += bool(op)
        block = Block(
            self.bytes_of(tensor),
            self.clock,
            op,
            None,
            source,
            module,
            recomputed,
            tuple(tensor.shape),
            str(tensor.dtype),
        )
        self.blocks.append(block)
        self._alive[key] = (weakref.ref(storage, partial(self._died, key)), block)
        self.live_bytes += block.num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_clock, self.peak_used = self.live_bytes, self.clock, self.used()

    def _died(self, key: int, _: Any) -> None:
        _, block = self._alive.pop(key)
        self.clock += 1
        block.died = self.clock
        self.live_bytes -= block.num_bytes

    def _forward_place(self, node: Any) -> tuple[SourceLine | None, str]:
        """Where in forward the node was made that is being differentiated."""
        at = bisect.bisect_right(self._forward, node._sequence_nr(), key=lambda entry: entry[0]) - 1
        return self._forward[at][1:] if at >= 0 else (None, "")


def _outputs(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in _outputs(part)]
    return ()


class OwnershipProbe(Callback):
    """Watches one step of a run; afterwards `result` says whose bytes were where.

    Args:
        step: which optimizer step, counted from 1. The third has every optimizer state and warm kernels.

    Put it first among the listeners. Not for compiled models, whose operations cannot be watched: nothing is
    recorded for what runs compiled.
    """

    def __init__(self, step: int = 3) -> None:
        self.step = step
        self.result: StepMemory | None = None
        self._held: dict[str, Any] = {}
        self._log: AllocationLog | None = None
        self._phases: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._used = 0
        self._meter: Meter | None = None

    def hold(self, objects: Mapping[str, Any]) -> None:
        """Search these, too, for tensors that are kept, by the names to report."""
        self._held.update(objects)

    def on_step_start(self, state: RunState) -> None:
        """Begin, when it is this step's turn."""
        if state.step + 1 != self.step:
            return
        self._meter, log = self._make_log(state)
        self._phases = {}
        _claim_known(log, state)
        self._claim_held(log, state)
        log.peak_bytes, log.peak_clock = log.live_bytes, 0
        self._watch_modules(log, state.model)
        self._log = log
        self._used = log.peak_used = log.used()
        log.__enter__()  # type: ignore[no-untyped-call]

    def on_backward_start(self, state: RunState) -> None:
        """What the graph saved is known now."""
        log = self._log
        if log is None or state.micro_loss is None:
            return
        self._phases["forward"] = log.clock
        for tensor in tensors_in(state.batch):
            log.add(tensor, "inputs")
        for node in walk([grad_fn_of(state.micro_loss)], limit=1_000_000).nodes:
            try:
                for tensor in saved_tensors(node, fakes=log.counts_fakes):
                    log.add(tensor, "activations")
            except SavedFreed:
                continue

    def on_backward_end(self, state: RunState) -> None:
        """Gradients are complete."""
        if self._log is not None:
            self._phases["backward"] = self._log.clock
            _claim_known(self._log, state)

    def on_step_end(self, state: RunState) -> None:
        """Done: settle who owns what is left."""
        log = self._log
        if log is None:
            return
        self._phases["optimizer"] = log.clock
        self._stop()
        _claim_known(log, state)
        self._claim_held(log, state)
        for block in log.blocks:
            if not block.owner:
                kept = block.recomputed or self._lived_for_backward(block)
                block.owner = "activations" if kept else "temporaries"
        assert self._meter is not None
        self.result = StepMemory(
            step=self.step,
            device=str(state.device or "cpu"),
            blocks=log.blocks,
            clock=log.clock,
            phases=self._phases,
            peak_clock=log.peak_clock,
            meter=self._meter.name,
            used_at_start=self._used,
            used_at_peak=log.peak_used,
        )

    def on_exception(self, state: RunState) -> None:
        """The mode must not outlive the step."""
        self._stop()

    def _make_log(self, state: RunState) -> tuple[Meter, AllocationLog]:
        meter = meter_for(state.device)
        return meter, AllocationLog(meter)

    def _lived_for_backward(self, block: Block) -> bool:
        """Kept by the graph without being a saved tensor: the input of a checkpointed module, what a Function holds."""
        forward, backward = self._phases.get("forward", 0), self._phases.get("backward", 0)
        return block.born <= forward and block.died is not None and forward < block.died <= backward

    def _stop(self) -> None:
        if self._log is not None:
            self._log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._log = None
        while self._hooks:
            self._hooks.pop().remove()

    def _watch_modules(self, log: AllocationLog, model: nn.Module) -> None:
        kinds = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            log.modules.append(kinds.get(id(module), type(module).__name__).lstrip())

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            log.modules.pop()

        self._hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]

    def _claim_held(self, log: AllocationLog, state: RunState) -> None:
        survey = Survey({"model": state.model, **self._held}, budget_s=5.0)
        for obj in survey.objects():
            if issubclass(type(obj), Tensor):
                log.add(obj, "retained", describe(survey.holder(obj)))


def _claim_known(log: AllocationLog, state: RunState) -> None:
    """Tensors of the model and of the optimizers."""
    for name, param in state.model.named_parameters():
        log.add(param, "parameters", name)
        if param.grad is not None:
            log.add(param.grad, "gradients", name)
    for name, buffer in state.model.named_buffers():
        log.add(buffer, "buffers", name)
    names = {id(p): name for name, p in state.model.named_parameters()}
    for optimizer in state.optimizers.values():
        for owner, values in optimizer.state.items():
            for key, value in values.items() if isinstance(values, dict) else ():
                for inner in tensors_in(value):
                    log.add(inner, "optimizer state", f"{key} of {names.get(id(owner), 'a parameter')}")
