"""Hand-written loops under the guards of gradients, precision and loop order, on models of four kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain.findings import Finding, Report
from safetrain.foreign.observe import Observer
from safetrain.guarding.gradient import gradient_guards
from safetrain.guarding.loop import loop_guards
from safetrain.rules.loop import loop_judges
from safetrain.rules.precision import precision_judges

KINDS = ("mlp", "conv", "transformer", "rnn")
CLASSES = 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 6)


class Conv(Mlp):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 16)
        )
        self.head = nn.Linear(16, CLASSES)

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 1, 4, 4)


class Transformer(Mlp):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed = nn.Linear(5, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(self.embed(x)).mean(1)

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 4, 5)


class Rnn(Mlp):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.body = nn.GRU(5, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)[0][:, -1]

    @staticmethod
    def inputs(n: int) -> Tensor:
        return torch.randn(n, 4, 5)


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return {"mlp": Mlp, "conv": Conv, "transformer": Transformer, "rnn": Rnn}[kind]()


def batch(model: Any, n: int = 8) -> tuple[Tensor, Tensor]:
    return model.inputs(n), torch.randint(0, CLASSES, (n,))


@contextmanager
def watched(**options: Any) -> Iterator[Report]:
    """Run the block as a script under the guards of these families; findings are in the report afterwards."""
    report = Report()
    trouble: list[str] = []
    guards = [*gradient_guards(report, **options), *loop_guards(report)]
    observer = Observer(
        guards,
        judges=[judge.see for judge in (*guards, *loop_judges(), *precision_judges()) if hasattr(judge, "see")],
        on_finding=lambda finding, event: report.add(finding, step=event.step, phase=finding.phase),
        on_trouble=trouble.append,
    )
    observer.attach()
    try:
        yield report
    finally:
        observer.finish()
    assert not trouble, trouble[0]


def train(
    model: Any,
    optimizer: Any = None,
    *,
    steps: int = 12,
    loss_fn: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
    each: Callable[[int], None] | None = None,
    accumulate: int = 1,
    n: int = 8,
) -> None:
    """The plain loop that everybody writes."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = loss_fn or (lambda m, x, y: F.cross_entropy(m(x), y))
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = batch(model, n)
            (loss_fn(model, x, y) / accumulate).backward()
        optimizer.step()
        if each is not None:
            each(step)


def loud(report: Report) -> list[str]:
    """Codes of warnings and errors."""
    return sorted({f.code for f in report.findings if f.severity != "note"})


def only(report: Report, code: str) -> Finding:
    """The one loud finding, which must have this code."""
    found = [f for f in report.findings if f.severity != "note"]
    assert [f.code for f in found] == [code], [(f.code, f.message) for f in found]
    return found[0]
