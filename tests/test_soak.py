"""Precision over hundreds of steps: right trainings of many kinds run on and on, all rules on, and hear nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_graph_innocents as bare_loops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import Trainer
from safetrain.callbacks import Callback
from safetrain.config.build import build
from safetrain.config.file import load
from safetrain.findings import Finding
from safetrain.foreign.watching import Watch
from safetrain.state import RunState

pytestmark = pytest.mark.slow

STEPS = 500
CONFIGS = sorted((Path(__file__).parent.parent / "examples" / "configs").glob("*.yaml"))


def loud(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.code, f.message) for f in findings if f.severity != "note"]


# ---------------------------------------------------------------------- the examples


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_an_example_runs_on(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    small = {"char_gpt": ["params.width=32", "params.length=32", "params.limit_chars=60000"]}.get(config.stem, [])
    if config.stem == "tbptt":
        small = ["params.width=32", "params.limit_chars=60000"]
    length = [f"loop.max_steps={STEPS}", "loop.max_epochs=null", "loop.eval_every=100", "callbacks.progress=false"]
    job = build(load(config, [*length, *small]), tmp_path)
    state = job.trainer.fit(job.train, job.val)
    assert state.step == STEPS
    assert loud(job.trainer.report.findings) == []


# ---------------------------------------------------------------------- loops written by hand


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("program", bare_loops.PROGRAMS, ids=lambda p: p.__name__)
def test_a_loop_written_by_hand_runs_on(program: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_loops, "STEPS", STEPS)
    torch.manual_seed(0)
    random.seed(0)
    trouble: list[str] = []
    watch = Watch(on_trouble=trouble.append)
    try:
        program()
    finally:
        watch.finish()
    assert not trouble, trouble[0]
    assert loud(watch.report.findings) == []


# ---------------------------------------------------------------------- trainers

Batch = tuple[Tensor, Tensor]


def perceptron(out: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, out))


def data(steps: int = STEPS, size: int = 16) -> list[Batch]:
    return [(torch.randn(size, 6), torch.randint(0, 3, (size,))) for _ in range(steps)]


class Classifies(Trainer):
    def training_step(self, batch: Batch) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1])


def trainer_of(kind: type[Trainer], model: nn.Module, **options: Any) -> Trainer:
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"eval_every": 50, "max_steps": STEPS, **options}
    return kind(model, options.pop("optimizer", None) or torch.optim.AdamW(trained, 1e-3), **options)


def two_views_and_a_slow_copy() -> Trainer:
    """Self-supervised: the target is a moving average, frozen, and called under no_grad."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.head = perceptron(8), nn.Linear(8, 8)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            with torch.no_grad():
                of_a, of_b = self.target(a), self.target(b)
            return -F.cosine_similarity(self.head(self.online(a)), of_b).mean() - (
                F.cosine_similarity(self.head(self.online(b)), of_a).mean()
            )

    class Learns(Trainer):
        def training_step(self, batch: Batch) -> Any:
            return self.model(batch[0], batch[0] + 0.1 * torch.randn_like(batch[0]))

        def train_step(self, window: Any) -> None:
            super().train_step(window)
            with torch.no_grad():
                for slow, fast in zip(self.model.target.parameters(), self.model.online.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)

    return trainer_of(Learns, Views())


def a_layer_thawed_later() -> Trainer:
    class Thaws(Callback):
        def on_step_end(self, state: RunState) -> None:
            if state.step == 200:
                state.model[0].requires_grad_(True)
                state.optimizers["main"].add_param_group({"params": list(state.model[0].parameters()), "lr": 1e-4})

    model = perceptron()
    model[0].requires_grad_(False)
    return trainer_of(Classifies, model, callbacks=[Thaws()])


def experts_that_are_rarely_asked() -> Trainer:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(1).topk(2)
            out = torch.zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                asked = (chosen == number).any(1)
                if asked.any():
                    part = expert(x[asked]) * weights[chosen == number][:, None]
                    out = out.index_put((asked.nonzero()[:, 0],), part, accumulate=True)
            return out

    return trainer_of(Classifies, Experts(), accumulate=2, max_steps=STEPS // 2)


def layers_that_are_skipped_at_random() -> Trainer:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                if not self.training or random.random() < 0.5:
                    x = x + block(x).relu()
            return self.head(x)

    return trainer_of(Classifies, Skips(), precision="bf16")


def an_attack_as_evaluation() -> Trainer:
    class Attacked(Classifies):
        def evaluation_step(self, batch: Batch) -> Any:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                (grad,) = torch.autograd.grad(F.cross_entropy(self.model(x), batch[1]), x)
            return {"loss": F.cross_entropy(self.model(x.detach() + 0.1 * grad.sign()), batch[1])}

    return trainer_of(Attacked, perceptron())


def dropout_left_on_to_sample() -> Trainer:
    class Samples(Classifies):
        def evaluation_step(self, batch: Batch) -> Any:
            dropout = self.model[3].train()
            out = torch.stack([self.model(batch[0]) for _ in range(4)]).mean(0)
            dropout.eval()
            return {"loss": F.cross_entropy(out, batch[1])}

    return trainer_of(Samples, perceptron())


def a_penalty_on_the_slope() -> Trainer:
    class Smooth(Trainer):
        def training_step(self, batch: Batch) -> Any:
            x = batch[0].clone().requires_grad_()
            out = self.model(x)
            loss = F.cross_entropy(out, batch[1])
            if self.state.phase == "eval":
                return loss
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return loss + 0.1 * grad.pow(2).sum(1).mean()

    return trainer_of(Smooth, nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), clip_norm=1.0)


def a_line_search() -> Trainer:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    return trainer_of(Classifies, model, optimizer=optimizer)


def optimizers_in_turn() -> Trainer:
    class InTurn(Classifies):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            self.forward_backward(window)
            self.optimizer_step("even" if self.state.current_step % 2 else "odd")

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizers = {"even": torch.optim.SGD(model[0].parameters(), 0.01), "odd": torch.optim.Adam(model[2].parameters())}
    return InTurn(model, optimizers, max_steps=STEPS, eval_every=50)


def outputs_kept_for_one_step_on_the_module() -> Trainer:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shown = perceptron(), {}

        def forward(self, x: Tensor) -> Tensor:
            self.shown["out"] = out = self.body(x)
            self.shown["size"] = out.norm()
            return out

    class Penalised(Trainer):
        moving: float | None = None

        def training_step(self, batch: Batch) -> Any:
            loss = F.cross_entropy(self.model(batch[0]), batch[1]) + 1e-3 * self.model.shown["size"]
            self.moving = loss.item() if self.moving is None else 0.9 * self.moving + 0.1 * loss.item()
            return loss, {"moving": self.moving}

    return trainer_of(Penalised, Shows())


TRAINERS = [
    two_views_and_a_slow_copy, a_layer_thawed_later, experts_that_are_rarely_asked, layers_that_are_skipped_at_random,
    an_attack_as_evaluation, dropout_left_on_to_sample, a_penalty_on_the_slope, a_line_search, optimizers_in_turn,
    outputs_kept_for_one_step_on_the_module,
]  # fmt: skip


@pytest.mark.parametrize("make", TRAINERS, ids=lambda f: f.__name__)
def test_a_trainer_runs_on(make: Callable[[], Trainer]) -> None:
    torch.manual_seed(0)
    random.seed(0)
    trainer = make()
    trainer.fit(data(), data(6))
    assert loud(trainer.report.findings) == []
