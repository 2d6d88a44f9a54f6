"""Trainings that leak a kilobyte or two a step. The leaking line ends with `# leak`; `holder` is what must be named."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import io
import logging
import queue
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from safetrain import Callback, Trainer

KB = 256
"""Elements of a kilobyte of float32."""


class Host(Trainer):
    """Regression on random rows; `keep` sees the hidden layer of each step, without its graph."""

    holder: ClassVar[str] = ""
    steps: ClassVar[int] = 200
    """Within how many it must be told."""
    callbacks_of: ClassVar[tuple[type[Callback], ...]] = ()

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.model[0](batch))
        self.keep(hidden.detach())
        return self.model[1](hidden).square().mean()

    def keep(self, hidden: Tensor) -> None:
        """What a leak overrides."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        """A trainer with its training and evaluation data."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        callbacks = [kind() for kind in cls.callbacks_of]
        trainer = cls(model, optimizer, max_steps=steps, callbacks=callbacks)
        return trainer, cls.data(steps), None

    @classmethod
    def data(cls, steps: int) -> Any:
        """Batches [4, 8]."""
        return [torch.randn(4, 8) for _ in range(64)] * (steps // 64 + 1)


class Tensors(Host):
    holder = "features"

    def keep(self, hidden: Tensor) -> None:
        self.__dict__.setdefault("features", []).append(hidden.repeat(4, 1))  # leak


class Floats(Host):
    holder = "activations"
    steps = 400  # a sweep of Python's collector, early in the run, may hide small objects for a while
    activations: ClassVar[list[float]] = []

    def keep(self, hidden: Tensor) -> None:
        self.activations.extend(hidden.flatten().tolist())  # leak


class Bytes(Host):
    holder = "frames"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frames: list[bytes] = []

    def keep(self, hidden: Tensor) -> None:
        self.frames.append(hidden.repeat(4, 1).numpy().tobytes())  # leak


class CacheByStep(Host):
    holder = "cache"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache: dict[int, Tensor] = {}

    def keep(self, hidden: Tensor) -> None:
        if self.state.step not in self.cache:
            self.cache[self.state.step] = torch.ones(KB)  # leak


class NumpyCopies(Host):
    holder = "COPIES"

    def keep(self, hidden: Tensor) -> None:
        COPIES.append(np.array(hidden.repeat(4, 1)))  # leak


COPIES: list[np.ndarray] = []


class DequeWithoutEnd(Host):
    holder = "recent"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recent: collections.deque[Tensor] = collections.deque()

    def keep(self, hidden: Tensor) -> None:
        self.recent.append(hidden.repeat(4, 1))  # leak


class Closures(Host):
    holder = "later"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later: list[Callable[[], float]] = []

    def keep(self, hidden: Tensor) -> None:
        scratch = torch.zeros(KB)
        self.later.append(lambda: float(scratch.sum()))  # leak


class Records(logging.Handler):
    """Keeps what is logged, to show it later."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)  # leak


class LoggingHandler(Host):
    holder = "records"
    steps = 400  # as Floats
    source: ClassVar[type] = Records

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_to = logging.Logger("growth")
        self.log_to.addHandler(Records())

    def keep(self, hidden: Tensor) -> None:
        self.log_to.warning("step %d: %s", self.state.step, hidden.tolist())


class Samples(Dataset[Tensor]):
    """Remembers each decoded sample of a data set that has no end in sight."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.decoded: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.decoded[index] = torch.full((KB,), float(index))  # leak
        return self.decoded[index][:8] / self.count


class DatasetCache(Host):
    holder = "decoded"
    source: ClassVar[type] = Samples

    @classmethod
    def data(cls, steps: int) -> Any:
        return DataLoader(Samples(4 * steps), batch_size=4, shuffle=True)


class ModuleAttribute(Host):
    holder = "seen"

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.model[1].seen = []

    def keep(self, hidden: Tensor) -> None:
        self.model[1].seen.append(hidden.repeat(4, 1))  # leak


class CtypesBuffers(Host):
    holder = "buffers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffers: list[Any] = []

    def keep(self, hidden: Tensor) -> None:
        self.buffers.append(ctypes.create_string_buffer(2048))  # leak


class Strings(Host):
    holder = "lines"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines: list[str] = []

    def keep(self, hidden: Tensor) -> None:
        self.lines.append(f"{self.state.step}: {hidden.tolist()}")  # leak


class OneLongBytearray(Host):
    holder = "written"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written = bytearray()

    def keep(self, hidden: Tensor) -> None:
        self.written += hidden.repeat(4, 1).numpy().tobytes()  # leak


class OneLongText(Host):
    holder = "transcript"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transcript = ""

    def keep(self, hidden: Tensor) -> None:
        self.transcript += f"{self.state.step}: {hidden.tolist()}\n"  # leak


class StreamInMemory(Host):
    holder = "stream"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stream = io.BytesIO()

    def keep(self, hidden: Tensor) -> None:
        self.stream.write(hidden.repeat(4, 1).numpy().tobytes())  # leak


class ArrayOfNumbers(Host):
    holder = "samples"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.samples = array.array("d")

    def keep(self, hidden: Tensor) -> None:
        self.samples.extend(hidden.repeat(2, 1).flatten().tolist())  # leak


class EndlessLruCache(Host):
    holder = "window"

    @staticmethod
    @functools.cache  # leak
    def window(step: int) -> Tensor:
        return torch.hann_window(KB + step)

    def keep(self, hidden: Tensor) -> None:
        self.window(self.state.step)


class ViewOfBigStorage(Host):
    holder = "corners"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.corners: list[Tensor] = []

    def keep(self, hidden: Tensor) -> None:
        self.corners.append(hidden.repeat(4, 1)[0, :2])  # leak


class GrowingBank(Host):
    holder = "bank"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bank = torch.zeros(0, 16)

    def keep(self, hidden: Tensor) -> None:
        self.bank = torch.cat([self.bank, hidden, hidden, hidden, hidden])  # leak


class GrowingArray(Host):
    holder = "table"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = np.zeros((0, 16))

    def keep(self, hidden: Tensor) -> None:
        self.table = np.concatenate([self.table, hidden.numpy(), hidden.numpy()])  # leak


class HookOutputs(Host):
    holder = "captured"

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self.captured: list[Tensor] = []

        def capture(module: nn.Module, args: Any, output: Tensor) -> None:
            self.captured.append(output.detach().repeat(4, 1))  # leak

        model[0].register_forward_hook(capture)


class KeepsBatches(Callback):
    """Keeps batches to look at them later."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_backward_start(self, state: Any) -> None:
        self.batches.append(state.batch.repeat(8, 1))  # leak


class CallbackState(Host):
    holder = "batches"
    callbacks_of = (KeepsBatches,)
    source: ClassVar[type] = KeepsBatches


class QueueNobodyReads(Host):
    holder = "pending"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pending: queue.Queue[Tensor] = queue.Queue()

    def keep(self, hidden: Tensor) -> None:
        self.pending.put(hidden.repeat(4, 1))  # leak


class ListsByName(Host):
    holder = "outputs"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs: dict[str, list[Tensor]] = collections.defaultdict(list)

    def keep(self, hidden: Tensor) -> None:
        self.outputs["hidden"].append(hidden.repeat(4, 1))  # leak


class LinkedList(Host):
    holder = "trail"
    trail: Any = None

    def keep(self, hidden: Tensor) -> None:
        self.trail = (bytes(2048), self.trail)  # leak


class WrappedEachStep(Host):
    holder = "transform"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transform: Callable[[Tensor], Tensor] = torch.neg

    def keep(self, hidden: Tensor) -> None:
        scale = torch.ones(KB)
        self.transform = functools.partial(_scaled, self.transform, scale)  # leak


def _scaled(inner: Callable[[Tensor], Tensor], scale: Tensor, x: Tensor) -> Tensor:
    return inner(x) * scale[0]


class Checks(Callback):
    """An exception keeps its traceback, and that the variables of every call on it."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []

    def on_step_end(self, state: Any) -> None:
        try:
            _check(torch.ones(KB))
        except ValueError as error:
            self.failures.append(error)  # leak


def _check(values: Tensor) -> None:
    doubled = values * 2
    raise ValueError(f"sum {doubled.sum()}")


class Exceptions(Host):
    holder = "failures"
    callbacks_of = (Checks,)
    source: ClassVar[type] = Checks


LEAKS: dict[str, type[Host]] = {
    kind.__name__: kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, Host) and kind.holder
}
