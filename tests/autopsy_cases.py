"""What the autopsy tests share: a run under its guards, marked lines, and small models of four kinds."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain.autopsy import AutopsyGuard
from safetrain.findings import Finding, Report
from safetrain.guarding.finite import FiniteGuard
from safetrain.loop import Trainer


class Outcome:
    """What a run left behind."""

    def __init__(self, report: Report, error: BaseException | None, trainer: Trainer) -> None:
        self.findings = report.findings
        self.error = error
        self.trainer = trainer

    @property
    def codes(self) -> list[str]:
        return [f.code for f in self.findings]

    def only(self, code: str) -> Finding:
        """The one finding, of that code."""
        assert self.codes == [code], (self.codes, [f.message for f in self.findings], self.error)
        return self.findings[0]


def run(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Any],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Outcome:
    """Train with the autopsy's guards and nothing else; an error that ends the run is kept, not raised."""

    class Small(Trainer):
        def training_step(self, batch: Any) -> Any:
            return loss_of(self.model, batch)

    report = Report()
    trainer = Small(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=0.01),
        max_epochs=1,
        guards="off",
        callbacks=[AutopsyGuard(report), FiniteGuard(report)],
        **options,
    )
    error: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a skipped step is said so, and meant here
        try:
            trainer.fit(list(batches))
        except Exception as caught:
            error = caught
    return Outcome(report, error, trainer)


def line_of(marker: str) -> int:
    """The line of the calling test file that carries a marker comment."""
    filename = inspect.stack()[1].filename
    lines = Path(filename).read_text(encoding="utf-8").splitlines()
    found = [n for n, text in enumerate(lines, 1) if text.rstrip().endswith(f"# {marker}")]
    assert len(found) == 1, f"marker {marker}: {found}"
    return found[0]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 7, batch_first=True)
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def regression(n: int = 4, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 6), torch.randn(size, 1)) for _ in range(n)]


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def images(n: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 1, 8, 8), torch.randint(0, 2, (4,))) for _ in range(n)]


def tokens(n: int = 3) -> list[Tensor]:
    return [torch.randint(0, 11, (3, 6)) for _ in range(n)]


def series(n: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 5, 5), torch.randint(0, 2, (4,))) for _ in range(n)]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def predict_next(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], Callable[[nn.Module, Any], Tensor]]] = {
    "mlp": (MLP, regression, mse),
    "conv": (ConvNet, images, classify),
    "transformer": (Transformer, tokens, predict_next),
    "rnn": (Recurrent, series, classify),
}
