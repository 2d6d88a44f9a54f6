"""The memory of a step that has not run: the Trainer's own step on fake tensors, watched operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from safetrain import compile as compiling
from safetrain.accounting.ownership import AllocationLog, Block, OwnershipProbe, StepMemory
from safetrain.callbacks import EMA
from safetrain.callbacks.base import Listeners
from safetrain.data.batch import tensors_in
from safetrain.graph import grad_fn_of, walk
from safetrain.graph.walk import NODE_BYTES
from safetrain.loop import Trainer
from safetrain.memory import Meter
from safetrain.planner.cost import Cost
from safetrain.planner.faking import Held, Unforecastable, compiles_inside, fake, fake_trainer, faking

if TYPE_CHECKING:
    from safetrain.state import RunState

PHASES = ("forward", "backward", "step")
_WATCHED = 2  # the first step makes the optimizer's state
_CUDA_BLOCK = 512  # its allocator gives multiples of it


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one steady step will take, in bytes of tensors."""

    memory: StepMemory = field(repr=False)
    peaks: dict[str, tuple[int, int]]
    """By phase (`PHASES`): the highest bytes, and the clock of that moment."""
    cost: Cost = field(repr=False)
    """What the step computes and moves."""

    @property
    def peak_bytes(self) -> int:
        """The highest bytes of the step: tensors, as the device's allocator counts them. Workspaces that kernels take
        for themselves are not in it, nor is what the process needs without the run."""
        return self.memory.peak_bytes

    def owners(self, phase: str) -> dict[str, int]:
        """Bytes by owner at the highest moment of a phase."""
        return self.memory.owners_at(self.peaks[phase][1])


def forecast(trainer: Trainer, window: Sequence[Any], mode: FakeTensorMode) -> Forecast:
    """Forecast a step of `trainer` over a window of batches. Nothing is allocated, and neither argument is changed.

    The step is `trainer`'s own `train_step`, run twice on a fake copy; of its listeners only averages of weights take
    part. A compiled model is taken as it is without compiling, which needs more; but for a switch that compiles it.

    Raises:
        Unforecastable: the reason in words.
    """
    with faking(mode):
        return run_steps(*fake_trainer(trainer, mode), fake(list(window), mode)[0])


def run_steps(trainer: Trainer, held: Held, window: Sequence[Any], num_steps: int = _WATCHED) -> Forecast:
    """The same for a fake Trainer, the tensors it holds, and a fake window. The Trainer has stepped afterwards."""
    compiled = compiling.compiled(trainer.model)
    averages = [fake_average(callback) for callback in trainer.callbacks if isinstance(callback, EMA)]
    probe = _Probe(trainer.state.step + num_steps, window, held, averages)
    trainer.listeners = Listeners([probe, *averages])
    trainer.compile_options = None
    trainer._find_outside()
    trainer.state.phase = "train"
    if not trainer.model.training:
        trainer.model.train()
    for average in averages:
        average.on_fit_start(trainer.state)
    try:
        for _ in range(num_steps):
            trainer._run_step(window)
    except BaseException:
        probe.on_exception(trainer.state)
        raise
    if probe.result is None or probe.log is None:
        raise Unforecastable("the step did not run")
    if compiling.compiled(trainer.model) != compiled:
        raise Unforecastable("torch.compile fails on the model")
    return Forecast(probe.result, probe.log.peaks, probe.log.cost)


def fake_average(callback: EMA) -> EMA:
    """A fresh one with the same settings: it copies the weights when it starts."""
    return EMA(callback.decay, warmup=callback.warmup)


class _NoMeter:
    """Fake tensors leave no trace in any allocator."""

    name = "none"

    def read(self) -> int:
        return 0

    def peak(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return None


class _FakeLog(AllocationLog):  # type: ignore[no-untyped-call]
    """Also notes the highest moment of each phase, and what the operations cost."""

    counts_fakes = True
    ignore_compile_internals = classmethod(compiles_inside)

    def __init__(self, device: torch.device) -> None:
        super().__init__(_NoMeter())
        self._device_type = device.type
        self.stage = "forward"
        self.peaks: dict[str, tuple[int, int]] = {}
        self.cost = Cost()
        self._phase = "forward"
        self._graph: Block | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = torch._C._current_autograd_node() is not None
        self._phase = "backward" if in_backward else self.stage
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.cost.add(func, args, kwargs or {}, result)
        return result

    def begin(self, stage: str) -> None:
        """What the Trainer does from now on, outside of backward."""
        self.stage = self._phase = stage
        self._note_peak()

    def add(self, tensor: Tensor, owner: str, holder: str = "") -> None:
        if isinstance(tensor, FakeTensor) and tensor.device.type == self._device_type:
            super().add(tensor, owner, holder)

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device_type and super()._is_new(tensor)

    def bytes_of(self, tensor: Tensor) -> int:
        size = tensor.untyped_storage().nbytes()
        return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if tensor.device.type == "cuda" else size

    def set_graph(self, num_nodes: int) -> None:
        """How many autograd nodes there are. They are host memory, which is the device's own on a CPU."""
        if self._graph is not None:
            self.clock += 1
            self._graph.died = self.clock
            self.live_bytes -= self._graph.num_bytes
            self._graph = None
        if num_nodes:
            self.clock += 1
            self._graph = Block(num_nodes * NODE_BYTES, self.clock, "the graph", owner="activations")
            self.blocks.append(self._graph)
            self.live_bytes += self._graph.num_bytes
            self._note_peak()

    def _note(self, tensor: Tensor, op: str, *place: Any, **more: Any) -> None:
        super()._note(tensor, op, *place, **more)
        self._note_peak()

    def _note_peak(self) -> None:
        if self.live_bytes > self.peaks.get(self._phase, (-1, 0))[0]:
            self.peaks[self._phase] = (self.live_bytes, self.clock)


class _Probe(OwnershipProbe):
    """Watches a fake step."""

    def __init__(self, step: int, window: Sequence[Any], held: Held, averages: Sequence[EMA]) -> None:
        super().__init__(step)
        self.log: _FakeLog | None = None
        self._window, self._retained, self._averages = window, held, averages

    def on_step_start(self, state: RunState) -> None:
        """The whole window is there from the start."""
        super().on_step_start(state)
        if self.log is not None:
            for tensor in tensors_in(self._window):
                self.log.add(tensor, "inputs")
            self.log.begin("forward")

    def on_backward_start(self, state: RunState) -> None:
        """The graph is complete; that of the micro-batch before is gone."""
        super().on_backward_start(state)
        on_cpu = state.device is not None and state.device.type == "cpu"
        if self.log is not None and state.micro_loss is not None and on_cpu:
            self.log.set_graph(len(walk([grad_fn_of(state.micro_loss)], limit=1_000_000).nodes))

    def on_backward_end(self, state: RunState) -> None:
        """Clipping and stepping begin."""
        super().on_backward_end(state)
        if self.log is not None:
            self.log.set_graph(0)
            self.log.begin("step")

    def _make_log(self, state: RunState) -> tuple[Meter, AllocationLog]:
        self.log = _FakeLog(state.device or torch.device("cpu"))
        return _NoMeter(), self.log

    def _claim_held(self, log: AllocationLog, state: RunState) -> None:
        for reference in self._retained:
            held = reference()
            if held is not None:
                log.add(held, "retained", "the Trainer")
        for average in self._averages:
            for tensor in average.weights().values():
                log.add(tensor, "retained", "averaged weights")
