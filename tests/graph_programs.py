"""Small trainings and ways to keep their graphs, for the tests of the retention rules."""

from __future__ import annotations

import contextvars
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain.callbacks.base import Callback
from safetrain.findings import Finding, Report
from safetrain.foreign.observe import Observer
from safetrain.guarding.retention import retention_guards

KINDS = ("mlp", "conv", "transformer", "rnn")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)).mean(1))


class Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"mlp": Mlp, "conv": Conv, "transformer": Transformer, "rnn": Rnn}[kind]()


def batches(kind: str, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Four samples each: inputs of the kind, labels of three classes."""
    for _ in range(steps):
        x = {
            "mlp": lambda: torch.randn(4, 6),
            "conv": lambda: torch.randn(4, 1, 6, 6),
            "transformer": lambda: torch.randint(0, 11, (4, 5)),
            "rnn": lambda: torch.randn(4, 6, 5),
        }[kind]()
        yield x, torch.randint(0, 3, (4,))


@contextmanager
def watched(*more: Callback) -> Iterator[Report]:
    """The retention guards on whatever loop runs inside; an error of a guard fails the test."""
    report, trouble = Report(), []
    observer = Observer([*retention_guards(report), *more], on_trouble=trouble.append)
    observer.attach()
    try:
        yield report
    finally:
        observer.finish()
    assert not trouble, trouble[0]


def of_graphs(report: Report, *, notes: bool = True) -> list[Finding]:
    """The findings of the rules under test."""
    return [f for f in report.findings if f.code in OURS and (notes or f.severity != "note")]


OURS = {"G101", "G102", "G103", "G104", "G105", "G106", "G107", "G108", "G110", "G111", "G112"}

Keep = Callable[[Tensor, Tensor, nn.Module], None]
"""Called after each step with the loss, the output and the model."""


def train(kind: str, keep: Keep | None = None, *, steps: int = 6, accumulate: int = 1, amp: bool = False) -> None:
    """A bare loop as people write it: the loss and the output stay in its locals until the next turn."""
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for i, (x, y) in enumerate(batches(kind, steps * accumulate)):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = model(x)
            loss = F.cross_entropy(out, y)
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if keep is not None:
                keep(loss, out, model)


# ---------------------------------------------------------------- ways to keep a graph; each returns `keep`


def clean(value: Tensor, leak: bool) -> Tensor:
    return value if leak else value.detach()


def loss_list(leak: bool) -> Keep:
    history: list[Tensor] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        history.append(clean(loss, leak))

    return keep


def rows_of_a_logger(leak: bool) -> Keep:
    class Logger:
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    logger = Logger()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        logger.log({"loss": clean(loss, leak), "lr": 0.1})

    return keep


def running_sum(leak: bool) -> Keep:
    total: Any = 0.0

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        nonlocal total
        total = total + clean(loss, leak)

    return keep


def smoothed(leak: bool) -> Keep:
    class Meter:
        value: Tensor | None = None

        def update(self, loss: Tensor) -> None:
            self.value = loss if self.value is None else 0.9 * self.value + 0.1 * loss

    meter = Meter()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        meter.update(clean(loss, leak))

    return keep


def buffer_of_the_model(leak: bool) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        old = model._buffers.get("running", None)
        new = clean(out.mean(0), leak)
        model.register_buffer("running", new if old is None else 0.9 * old + 0.1 * new)

    return keep


def captured_activations(leak: bool) -> Keep:
    captured: list[Tensor] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if not model.head._forward_pre_hooks:
            model.head.register_forward_pre_hook(lambda module, args: captured.append(clean(args[0], leak)))

    return keep


def cached_by_tensor(leak: bool) -> Keep:
    @functools.cache
    def ramp(key: Any) -> Tensor:
        return torch.linspace(0.0, 1.0, 4)

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        ramp(out if leak else out.shape)

    return keep


def suspended_generator(leak: bool) -> Keep:
    def averager() -> Iterator[Any]:
        seen: list[Tensor] = []
        while True:
            value = yield len(seen)
            seen.append(value)

    running: Any = averager()
    next(running)

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        running.send(clean(loss, leak))

    return keep


def long_deque(leak: bool) -> Keep:
    recent: deque[Tensor] = deque(maxlen=1000)

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        recent.append(clean(loss, leak))

    return keep


def object_array(leak: bool) -> Keep:
    table = np.empty(64, dtype=object)
    at = itertools.count()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        table[next(at)] = clean(loss, leak)

    return keep


_seen: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("losses_seen")


def context_variable(leak: bool) -> Keep:
    _seen.set([])

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        _seen.get().append(clean(loss, leak))

    return keep


def averaged_weights(leak: bool) -> Keep:
    shadow: dict[str, Tensor] = {}

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow.get(name, 0.0) + 0.1 * clean(p, leak)

    return keep


class Registry:
    entries: list[Tensor] = []


def class_attribute(leak: bool) -> Keep:
    Registry.entries = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        Registry.entries.append(clean(loss, leak))

    return keep


def default_argument(leak: bool) -> Keep:
    def keep(loss: Tensor, out: Tensor, model: nn.Module, memory: list[Tensor] = []) -> None:  # noqa: B006 - the fault
        memory.append(clean(loss, leak))

    return keep


def kept_clone(leak: bool) -> Keep:
    copies: list[Tensor] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        copies.append(clean(out, leak).clone())

    return keep


def priorities(leak: bool) -> Keep:
    scores = [torch.tensor(1.0) for _ in range(200)]
    at = itertools.count()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        for value in clean(out, leak):
            scores[next(at) % 200] = value.abs().sum()

    return keep


def hook_per_step(leak: bool) -> Keep:
    class Tap:
        def __init__(self, layer: nn.Module) -> None:
            self.seen: Tensor | None = None
            self.handle = layer.register_forward_hook(self)

        def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
            self.seen = args[0]

    taps: list[Tap] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        tap = Tap(model.head)
        model.head(torch.randn(2, model.head.in_features, requires_grad=True) * 1.0)
        if not leak:
            tap.handle.remove()
        else:
            taps.append(tap)

    return keep


LEAKS: dict[Callable[[bool], Keep], str] = {
    loss_list: "history",
    rows_of_a_logger: "rows",
    running_sum: "total",
    smoothed: "value",
    buffer_of_the_model: "running",
    captured_activations: "captured",
    cached_by_tensor: "ramp",
    suspended_generator: "seen",
    long_deque: "recent",
    object_array: "table",
    context_variable: "losses_seen",
    averaged_weights: "shadow",
    class_attribute: "entries",
    default_argument: "keep",
    kept_clone: "copies",
    priorities: "scores",
}
"""Ways to keep a graph, with a name that the finding must tell."""
