"""Small trainings that leak a kilobyte or two a step, and innocent ones that only look as if they did."""

from __future__ import annotations

import copy
import functools
import gc
import queue
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from safetrain.findings import Finding, Report
from safetrain.foreign.observe import Observer
from safetrain.guarding.memory import MemoryGuard
from safetrain.guarding.retention import retention_guards

KB = 256
"""Elements of a kilobyte of float32."""


@contextmanager
def watched() -> Iterator[Report]:
    """The memory guard, behind those of graphs, on whatever loop runs inside; an error of a guard fails the test."""
    report, trouble = Report(), []
    observer = Observer([*retention_guards(report), MemoryGuard(report)], on_trouble=trouble.append)
    observer.attach()
    try:
        yield report
    finally:
        observer.finish()
    assert not trouble, trouble[0]


def of_memory(report: Report) -> list[Finding]:
    """Warnings and errors of the rules under test."""
    return [f for f in report.findings if f.code.startswith("M") and f.severity != "note"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


Each = Callable[[int, Tensor, Tensor, Net], Any]
"""Called in each step with its number, the loss, the output and the model."""


def train(
    each: Each | None = None, *, steps: int, length: Callable[[int], int] = lambda i: 4, model: Net | None = None
) -> None:
    """A bare loop on random batches."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i in range(steps):
        out = model(torch.randn(length(i), 8))
        loss = out.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if each is not None:
            each(i, loss, out, model)


# ---------------------------------------------------------------- leaks: each runs `steps` steps and names its holder


def list_of_tensors(steps: int) -> None:
    kept: list[Tensor] = []
    train(lambda i, loss, out, model: kept.append(torch.randn(KB)), steps=steps)


def dict_by_step(steps: int) -> None:
    results: dict[int, Tensor] = {}
    train(lambda i, loss, out, model: results.update({i: torch.zeros(KB)}), steps=steps)


def view_that_pins(steps: int) -> None:
    corners: list[Tensor] = []
    train(lambda i, loss, out, model: corners.append(torch.randn(16, 32)[0, :2]), steps=steps)


def list_of_arrays(steps: int) -> None:
    arrays: list[np.ndarray] = []
    train(lambda i, loss, out, model: arrays.append(np.ones(KB, dtype=np.float32)), steps=steps)


def view_of_an_array(steps: int) -> None:
    rows: list[np.ndarray] = []
    train(lambda i, loss, out, model: rows.append(np.ones((64, 16), dtype=np.float32)[3]), steps=steps)


def endless_deque(steps: int) -> None:
    recent: deque[Tensor] = deque()
    train(lambda i, loss, out, model: recent.append(torch.zeros(KB)), steps=steps)


def on_the_module(steps: int) -> None:
    train(lambda i, loss, out, model: model.seen.append(torch.zeros(KB)), steps=steps)


def activations_of_a_hook(steps: int) -> None:
    model = Net()
    captured: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, out: captured.append(args[0].detach().repeat(4, 1)))
    train(steps=steps, model=model)


def hook_each_step(steps: int) -> None:
    def add(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        scratch = torch.zeros(KB)

        def note(module: nn.Module, args: Any, out: Tensor) -> None:
            scratch[0] += 1

        model.head.register_forward_hook(note)

    train(add, steps=steps)


def endless_cache(steps: int) -> None:
    @functools.cache
    def window(i: int) -> Tensor:
        return torch.hann_window(KB + i)

    train(lambda i, loss, out, model: window(i), steps=steps)


def growing_bank(steps: int) -> None:
    class Bank:
        rows = torch.zeros(0, 64)

    bank = Bank()

    def add(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        bank.rows = torch.cat([bank.rows, torch.randn(4, 64)])

    train(add, steps=steps)


def chain(steps: int) -> None:
    class Node:
        def __init__(self, value: Tensor, before: Any) -> None:
            self.value, self.before = value, before

    class Trail:
        last: Node | None = None

    trail = Trail()

    def add(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        trail.last = Node(torch.zeros(KB), trail.last)

    train(add, steps=steps)


class Registry:
    entries: list[Tensor] = []


def on_a_class(steps: int) -> None:
    Registry.entries.clear()
    train(lambda i, loss, out, model: Registry.entries.append(torch.zeros(KB)), steps=steps)


def list_of_bytes(steps: int) -> None:
    frames: list[bytes] = []
    train(lambda i, loss, out, model: frames.append(bytes(2048)), steps=steps)


def lists_by_name(steps: int) -> None:
    logs: dict[str, list[Tensor]] = defaultdict(list)
    train(lambda i, loss, out, model: logs["outputs"].append(torch.zeros(KB)), steps=steps)


def rebuilt_tuple(steps: int) -> None:
    class Keeper:
        outputs: tuple[Tensor, ...] = ()

    keeper = Keeper()

    def add(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        keeper.outputs = (*keeper.outputs, torch.zeros(KB))

    train(add, steps=steps)


def records(steps: int) -> None:
    class Record:
        def __init__(self, out: Tensor) -> None:
            self.out = out

    trace: list[Record] = []
    train(lambda i, loss, out, model: trace.append(Record(torch.zeros(KB))), steps=steps)


def queue_nobody_reads(steps: int) -> None:
    pending: queue.Queue[Tensor] = queue.Queue()
    train(lambda i, loss, out, model: pending.put(torch.zeros(KB)), steps=steps)


def deferred_calls(steps: int) -> None:
    later: list[Callable[[], Tensor]] = []
    train(lambda i, loss, out, model: later.append(functools.partial(torch.neg, torch.zeros(KB))), steps=steps)


def buffer_each_step(steps: int) -> None:
    train(lambda i, loss, out, model: model.register_buffer(f"snapshot{i}", torch.zeros(KB)), steps=steps)


class Samples(Dataset[Tensor]):
    """Remembers every decoded sample of a data set that has no end in sight."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.decoded: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        self.decoded[i] = torch.full((KB,), float(i))
        return self.decoded[i][:8].clone()


def dataset_remembers(steps: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x in DataLoader(Samples(2 * steps), batch_size=2, shuffle=True):
        loss = model(x / 1000).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def snapshot_each_epoch(steps: int) -> None:
    snapshots: list[dict[str, Tensor]] = []

    def keep(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if i % 10 == 9:
            snapshots.append({"weights": torch.zeros(100, KB)})

    train(keep, steps=steps)


def gradients_kept(steps: int) -> None:
    grads: list[Tensor] = []

    def keep(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        assert model.body.weight.grad is not None
        grads.append(model.body.weight.grad.repeat(2, 2))

    train(keep, steps=steps)


LEAKS: dict[Callable[[int], None], str] = {
    list_of_tensors: "kept",
    dict_by_step: "results",
    view_that_pins: "corners",
    list_of_arrays: "arrays",
    view_of_an_array: "rows",
    endless_deque: "recent",
    on_the_module: "seen",
    activations_of_a_hook: "captured",
    hook_each_step: "hooks",
    endless_cache: "window",
    growing_bank: "rows",
    chain: "trail",
    on_a_class: "entries",
    list_of_bytes: "frames",
    lists_by_name: "logs",
    rebuilt_tuple: "outputs",
    records: "trace",
    queue_nobody_reads: "pending",
    deferred_calls: "later",
    buffer_each_step: "snapshot",
    dataset_remembers: "decoded",
    snapshot_each_epoch: "snapshots",
    gradients_kept: "grads",
}


# ---------------------------------------------------------------- innocents


def plain(steps: int) -> None:
    train(steps=steps)


def replay_to_cap(steps: int) -> None:
    buffer: deque[Any] = deque(maxlen=300)
    train(lambda i, loss, out, model: buffer.append((torch.randn(KB), out.detach())), steps=steps)


def replay_ring(steps: int) -> None:
    class Replay:
        def __init__(self, capacity: int) -> None:
            self.capacity = capacity
            self.items: list[Tensor] = []
            self.at = 0

        def push(self, item: Tensor) -> None:
            if len(self.items) < self.capacity:
                self.items.append(item)
            else:
                self.items[self.at] = item
            self.at = (self.at + 1) % self.capacity

    replay = Replay(400)
    train(lambda i, loss, out, model: replay.push(torch.randn(KB)), steps=steps)


def masks_by_length(steps: int) -> None:
    masks: dict[int, Tensor] = {}

    def mask(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        n = len(out)
        if n not in masks:
            masks[n] = torch.ones(n, n).tril()

    train(mask, steps=steps, length=lambda i: random.Random(i).randint(4, 90))


def bounded_cache(steps: int) -> None:
    @functools.lru_cache(maxsize=512)
    def window(i: int) -> Tensor:
        return torch.hann_window(KB + i)

    train(lambda i, loss, out, model: window(i), steps=steps)


def random_lengths(steps: int) -> None:
    train(steps=steps, length=lambda i: random.Random(i).randint(1, 300))


def short_to_long(steps: int) -> None:
    train(steps=steps, length=lambda i: 4 + i // 2)


def late_optimizer_state(steps: int) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
    for i in range(steps):
        x = torch.randn(4, 8)
        for layer in layers[: 1 + i // 20]:
            x = layer(x)
        optimizer.zero_grad()
        x.pow(2).mean().backward()
        optimizer.step()


def evaluation_peaks(steps: int) -> None:
    def evaluate(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if i % 40 == 39:
            model.eval()
            with torch.no_grad():
                outputs = [model(torch.randn(64, 8)) for _ in range(20)]
                assert len(torch.cat(outputs)) == 1280
            model.train()

    train(evaluate, steps=steps)


def average_of_weights(steps: int) -> None:
    shadow: dict[str, Tensor] = {}

    def update(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        for name, value in model.state_dict().items():
            shadow[name] = value.clone() if name not in shadow else shadow[name].lerp(value, 0.01)

    train(update, steps=steps)


def history_of_floats(steps: int) -> None:
    history: list[float] = []
    train(lambda i, loss, out, model: history.append(loss.item()), steps=steps)


def history_of_losses(steps: int) -> None:
    history: list[Tensor] = []
    train(lambda i, loss, out, model: history.append(loss.detach()), steps=steps)


def rows_of_numbers(steps: int) -> None:
    rows: list[dict[str, Any]] = []

    def log(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        rows.append({"step": i, "time": "12:00", **{f"metric/{k}": loss.item() + k for k in range(20)}})

    train(log, steps=steps)


def several_tensor_metrics(steps: int) -> None:
    history: dict[str, list[Tensor]] = {name: [] for name in ("loss", "mean", "norm", "max")}

    def log(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        for values in history.values():
            values.append(out.detach().mean())

    train(log, steps=steps)


def list_of_small_integers(steps: int) -> None:
    order: list[int] = []
    train(lambda i, loss, out, model: order.extend(range(20)), steps=steps)


class Score:
    """Collects for an epoch, is reset at its start."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, out: Tensor) -> None:
        self.outputs.append(out.detach().repeat(64, 4))

    def compute(self) -> float:
        return torch.cat(self.outputs).mean().item()

    def reset(self) -> None:
        self.outputs = []


def metric_reset_each_epoch(steps: int) -> None:
    score = Score()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.randn(400 * 4, 8)
    for _ in range(steps // 400):
        score.reset()
        for x in DataLoader(data, batch_size=4, shuffle=True):
            out = model(x)
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()
            score.update(out)
        score.compute()


def collected_for_the_end(steps: int) -> None:
    outputs = []
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        out = model(torch.randn(64, 8))
        optimizer.zero_grad()
        out.pow(2).mean().backward()
        optimizer.step()
        outputs.append(out.detach().repeat(1, 8))
    assert len(torch.cat(outputs)) == 64 * steps


def best_weights(steps: int) -> None:
    best: dict[str, Any] = {}

    def keep(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if i % 5 == 0:
            best["weights"] = copy.deepcopy(model.state_dict())

    train(keep, steps=steps)


def prefetch(steps: int) -> None:
    ahead: queue.Queue[Tensor] = queue.Queue(maxsize=200)

    def turn(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if ahead.full():
            ahead.get()
        ahead.put(torch.zeros(KB))

    train(turn, steps=steps)


def cache_of_a_whole_dataset(steps: int) -> None:
    slots: list[Tensor | None] = [None] * 350

    def use(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if slots[i % 350] is None:
            slots[i % 350] = torch.zeros(KB)

    train(use, steps=steps)


def newest_outputs_as_arrays(steps: int) -> None:
    """Full after twenty steps: what is recorded afterwards is alive some steps later, as it was meant to be."""
    arrays: list[np.ndarray] = []

    def keep(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        arrays.append(out.detach().repeat(1, 4096).numpy())
        if len(arrays) > 20:
            arrays.pop(0)

    train(keep, steps=steps)


def growing_network(steps: int) -> None:
    def grow(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        if i % 300 == 299:
            model.body = nn.Sequential(model.body, nn.Linear(16, 16))

    train(grow, steps=steps)


INNOCENTS: tuple[Callable[[int], None], ...] = (
    plain,
    replay_to_cap,
    replay_ring,
    masks_by_length,
    bounded_cache,
    random_lengths,
    short_to_long,
    late_optimizer_state,
    evaluation_peaks,
    average_of_weights,
    history_of_floats,
    history_of_losses,
    rows_of_numbers,
    several_tensor_metrics,
    list_of_small_integers,
    metric_reset_each_epoch,
    collected_for_the_end,
    best_weights,
    prefetch,
    cache_of_a_whole_dataset,
    newest_outputs_as_arrays,
    growing_network,
)


# ---------------------------------------------------------------- leaks that no name leads to


class _Pair:
    other: _Pair

    def __init__(self, value: Tensor) -> None:
        self.value = value


def cycles_that_nobody_collects(steps: int) -> None:
    def tie(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        a, b = _Pair(torch.randn(64, 256)), _Pair(loss.detach())
        a.other, b.other = b, a

    gc.disable()
    try:
        train(tie, steps=steps)
    finally:
        gc.enable()


def finalizers_that_wait(steps: int) -> None:
    anchor = Net()

    def register(i: int, loss: Tensor, out: Tensor, model: Net) -> None:
        weakref.finalize(anchor, print, torch.randn(64, 256))

    train(register, steps=steps)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()


UNNAMED: tuple[Callable[[int], None], ...] = (cycles_that_nobody_collects, finalizers_that_wait)
