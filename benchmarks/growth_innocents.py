"""Trainings whose memory moves and does not leak. Each is to run for 2,000 steps without an alarm."""

from __future__ import annotations

import collections
import functools
import io
import random
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from growth_leaks import KB, Host
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from safetrain.callbacks import EMA, Callback, JsonlMetrics, MemoryMonitor, Saving, TensorBoard
from safetrain.compile import CompileOptions


class Plain(Host):
    pass


class HistoryOfLosses(Host):
    """A number a step, and a row of them every tenth."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history: list[float] = []
        self.rows: list[dict[str, float]] = []

    def keep(self, hidden: Tensor) -> None:
        self.history.append(hidden.mean().item())
        if self.state.step % 10 == 0:
            self.rows.append({f"unit{i}": value for i, value in enumerate(hidden[0].tolist())})


class ReplayToCap(Host):
    """Fills for 1,500 steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay: collections.deque[Tensor] = collections.deque(maxlen=1500)

    def keep(self, hidden: Tensor) -> None:
        self.replay.append(hidden.repeat(4, 1))


class RingBuffer(Host):
    """A reservoir by hand: filled up, then overwritten."""

    capacity = 1200

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ring: list[Tensor] = []

    def keep(self, hidden: Tensor) -> None:
        if len(self.ring) < self.capacity:
            self.ring.append(hidden.repeat(4, 1))
        else:
            self.ring[self.state.step % self.capacity] = hidden.repeat(4, 1)


class LruByHand(Host):
    """Drops the oldest entry when it has 700."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache: collections.OrderedDict[int, Tensor] = collections.OrderedDict()

    def keep(self, hidden: Tensor) -> None:
        self.cache[self.state.step] = hidden.repeat(4, 1)
        if len(self.cache) > 700:
            self.cache.popitem(last=False)


class BoundedLruCache(Host):
    @staticmethod
    @functools.lru_cache(maxsize=1000)
    def window(step: int) -> Tensor:
        return torch.hann_window(KB)

    def keep(self, hidden: Tensor) -> None:
        self.window(self.state.step)


class MasksByLength(Host):
    """A cache that knows all its keys after a while."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masks: dict[int, Tensor] = {}

    def keep(self, hidden: Tensor) -> None:
        length = min(int(random.Random(self.state.step).expovariate(1 / 60)) + 1, 400)
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length).tril()


class VariableLengths(Host):
    @classmethod
    def data(cls, steps: int) -> Any:
        return [torch.randn(random.Random(i).randint(1, 400), 8) for i in range(steps)]


class ShortToLong(Host):
    """A curriculum: batches get longer all the time."""

    @classmethod
    def data(cls, steps: int) -> Any:
        return (torch.randn(4 + i // 2, 8) for i in range(steps))


class LateOptimizerState(Host):
    """Layers are thawed one after the other, and get their moments then."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(12)), nn.Linear(16, 1))
        for layer in model[1:-1]:
            layer.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return cls(model, optimizer, max_steps=steps), cls.data(steps), None

    def training_step(self, batch: Tensor) -> Tensor:
        if self.state.step % 150 == 149:
            self.model[1 + min(self.state.step // 150, 11)].requires_grad_(True)
        return self.model(batch).square().mean()


class EvaluationPeaks(Host):
    """Large evaluations between small steps, whose outputs are gathered and dropped."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        trainer, train, _ = super().make(steps)
        trainer.eval_every = 50
        return trainer, train, [torch.randn(512, 8) for _ in range(12)]

    def evaluation_step(self, batch: Tensor) -> dict[str, Tensor]:
        outputs = [self.model(batch) for _ in range(4)]
        return {"loss": torch.cat(outputs).square().mean()}


class Recompiles(Host):
    """Compiled without dynamic shapes: each new length compiles anew."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        options = CompileOptions(backend="aot_eager", dynamic=False)
        return cls(model, optimizer, max_steps=steps, compile=options), cls.data(steps), None

    @classmethod
    def data(cls, steps: int) -> Any:
        return (torch.randn(2 + min(i // 400, 4), 8) for i in range(steps))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()


class Schedule(Host):
    """Warm-up and decay, momentum that moves."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
        return cls(model, optimizer, schedule, max_steps=steps), cls.data(steps), None


class WarmUp(Host):
    """Work areas are made over the first 120 steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.areas: list[Tensor] = []
        self.max_areas = 120

    def keep(self, hidden: Tensor) -> None:
        if len(self.areas) < self.max_areas:
            self.areas.append(torch.zeros(4 * KB))
        self.areas[self.state.step % len(self.areas)].zero_()


class AverageOfWeights(Host):
    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        trainer = cls(model, optimizer, max_steps=steps, eval_every=100, callbacks=[EMA(decay=0.99)])
        return trainer, cls.data(steps), cls.data(64)[:8]


class AllTheLogs(Host):
    """TensorBoard, rows as JSON, memory and checkpoints, a row every fifth step."""

    folder: ClassVar[Any] = None

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        cls.folder = tempfile.TemporaryDirectory()
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        listeners: list[Callback] = [MemoryMonitor(), Saving(every_steps=100), TensorBoard(), JsonlMetrics()]
        trainer = cls(model, optimizer, max_steps=steps, log_every=5, callbacks=listeners, run_dir=cls.folder.name)
        return trainer, cls.data(steps), None


class Scaled(Host):
    """fp16 with loss scaling and ragged accumulation."""

    @classmethod
    def make(cls, steps: int) -> tuple[Host, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        trainer = cls(model, optimizer, max_steps=steps, precision="fp16", accumulate=3, clip_norm=1.0)
        return trainer, [torch.randn(1 + i % 7, 8) for i in range(100)], None


class Decoded(Dataset[Tensor]):
    """Remembers its 1,200 samples."""

    def __init__(self) -> None:
        self.decoded: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.decoded:
            self.decoded[index] = torch.full((KB,), index / 1200)
        return self.decoded[index][:8]


class CacheOfADataset(Host):
    """Full after the first epoch of 300 steps."""

    @classmethod
    def data(cls, steps: int) -> Any:
        return DataLoader(Decoded(), batch_size=4, shuffle=True)


class OutputsOfAnEpoch(Host):
    """Kept for a metric, and emptied at each end of an epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs: list[Tensor] = []
        self.epoch_seen = 0

    def keep(self, hidden: Tensor) -> None:
        if self.state.epoch != self.epoch_seen:
            torch.cat(self.outputs).std()
            self.outputs.clear()
            self.epoch_seen = self.state.epoch
        self.outputs.append(hidden.repeat(4, 1))

    @classmethod
    def data(cls, steps: int) -> Any:
        return DataLoader(TensorDataset(torch.randn(1600, 8)), batch_size=4, shuffle=True, collate_fn=_stacked)


def _stacked(rows: Any) -> Tensor:
    return torch.stack([row for (row,) in rows])


class Workers(Host):
    """Two worker processes that start anew each epoch."""

    @classmethod
    def data(cls, steps: int) -> Any:
        return DataLoader(TensorDataset(torch.randn(3200, 8)), batch_size=4, num_workers=2, collate_fn=_stacked)


class Stream(IterableDataset[Tensor]):
    """An endless stream that shuffles within a buffer of 500."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        generator = random.Random(0)
        while True:
            buffer.append(torch.randn(8))
            if len(buffer) > 500:
                yield buffer.pop(generator.randrange(len(buffer)))


class ShuffleBuffer(Host):
    @classmethod
    def data(cls, steps: int) -> Any:
        return DataLoader(Stream(), batch_size=4)


class BestOfTen(Host):
    """Copies of the weights, of which the ten best are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.best: list[tuple[float, dict[str, Tensor]]] = []

    def keep(self, hidden: Tensor) -> None:
        score = hidden.mean().item()
        copy = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.best = sorted([*self.best, (score, copy)], key=lambda pair: pair[0])[-10:]


class GrowingNetwork(Host):
    """A layer more every 250 steps."""

    def training_step(self, batch: Tensor) -> Tensor:
        if self.state.step % 250 == 249:
            layer = nn.Linear(16, 16)
            self.model[0] = nn.Sequential(self.model[0], layer)
            self.state.optimizers["main"].add_param_group({"params": layer.parameters()})
        return super().training_step(batch)


class FilledArray(Host):
    """Preallocated, filled in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = np.zeros((2500, KB), dtype=np.float32)

    def keep(self, hidden: Tensor) -> None:
        self.table[self.state.step] = hidden.repeat(4, 1).flatten()


class RotatedText(Host):
    """A text in memory that starts afresh when it is long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.text = io.BytesIO()

    def keep(self, hidden: Tensor) -> None:
        if self.text.tell() > 400_000:
            self.text = io.BytesIO()
        self.text.write(f"{hidden.tolist()}\n".encode())


class Vocabulary(Host):
    """Words are met ever more rarely."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vectors: dict[str, Tensor] = {}

    def keep(self, hidden: Tensor) -> None:
        generator = random.Random(self.state.step)
        for _ in range(5):
            word = f"word{int(generator.paretovariate(0.9))}"
            if word not in self.vectors:
                self.vectors[word] = torch.zeros(32)


class Carried(Host):
    """A hidden state that goes from step to step, detached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = torch.zeros(4, 16)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.model[0](batch) + self.memory)
        self.memory = hidden.detach()
        return self.model[1](hidden).square().mean()


INNOCENTS: dict[str, type[Host]] = {
    kind.__name__: kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, Host) and kind is not Host
}
