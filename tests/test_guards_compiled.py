"""Guards over compiled models: as quick to tell a fault, and as silent, as over eager ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import Trainer
from safetrain.compile import CompileOptions, compiled
from safetrain.findings import Finding

STEPS = 70
NAN_AT = 20


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.out = (
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1), nn.Linear(8, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.norm(self.conv(x.reshape(-1, 1, 4, 4)))).mean((2, 3))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.embed, self.layers = nn.Linear(4, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(x.reshape(-1, 4, 4))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x.reshape(-1, 4, 4))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)),
    "conv": Conv,
    "recurrent": Recurrent,
    "transformer": Transformer,
}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "accumulating": {"accumulate": 2}, "bf16": {"precision": "bf16"}}
SETTINGS = [
    pytest.param(kind, options, marks=[pytest.mark.slow] if kind == "transformer" else [])
    for kind in MODELS
    for options in OPTIONS
    if (kind, options) != ("transformer", "bf16")  # torch's fused encoder mixes types there, compiled and not by us
]


class Right(Trainer):
    kept: ClassVar[list[Tensor]] = []

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return self.fault(F.cross_entropy(self.model(x), y))

    def fault(self, loss: Tensor) -> Tensor:
        return loss


class Leaking(Right):
    def fault(self, loss: Tensor) -> Tensor:
        self.kept.append(loss)  # HERE
        return loss


class TurningNan(Right):
    def fault(self, loss: Tensor) -> Tensor:
        if self.state.phase == "train" and self.state.current_step == NAN_AT:
            loss = loss * torch.log(-loss.detach())  # HERE
        return loss


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    Right.kept.clear()
    yield
    torch._dynamo.reset()


def findings(kind: str, options: str, trainer: type[Right] = Right) -> list[Finding]:
    torch.manual_seed(0)
    model = MODELS[kind]()
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(2 * STEPS, 16, 16, generator=generator)
    batches = [(x, x[:, :3].argmax(1)) for x in xs]
    run = trainer(
        model, torch.optim.AdamW(model.parameters(), 1e-3), max_steps=STEPS, log_every=10,
        compile=CompileOptions(backend="aot_eager"), **OPTIONS[options],
    )  # fmt: skip
    run.fit(batches, batches[:2])
    assert compiled(model) == [""]
    return [f for f in run.report.findings if f.severity != "note"]


def line_of(trainer: type[Right]) -> int:
    lines, first = inspect.getsourcelines(trainer)
    return first + next(place for place, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize(("kind", "options"), SETTINGS)
def test_right_trainings_of_compiled_models_are_left_alone(kind: str, options: str) -> None:
    assert findings(kind, options) == []


@pytest.mark.parametrize(("kind", "options"), SETTINGS)
def test_a_graph_that_is_kept_is_told_as_soon_as_three_are(kind: str, options: str) -> None:
    (finding,) = findings(kind, options, Leaking)
    assert finding.code == "G101" and finding.source is not None
    assert finding.source.line == line_of(Leaking)
    assert finding.first_step is not None and finding.first_step <= 4


@pytest.mark.filterwarnings("ignore:step 20:RuntimeWarning")
@pytest.mark.parametrize(("kind", "options"), SETTINGS)
def test_nan_is_traced_to_its_line(kind: str, options: str) -> None:
    (finding,) = findings(kind, options, TurningNan)
    assert finding.code == "P211" and finding.source is not None
    assert finding.source.line == line_of(TurningNan)
