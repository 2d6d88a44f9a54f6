"""G113: hooks registered in every step are told by the fourth, with their line; hooks made once or removed are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from safetrain import Finding, Trainer
from safetrain.rules.hooks import count_hooks, find_piling_hooks


class Tap:
    """Keeps a layer's output of the last call."""

    def __init__(self, layer: nn.Module) -> None:
        self.output: Any = None
        self.handle = layer.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 6)
    )


def recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 6)

        def forward(self, x: Any) -> Any:
            return self.head(self.cell(x))

    return Recurrent()


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten())


def findings_of(
    step: Callable[[Trainer, Any], Any], model: nn.Module, steps: int = 12, **options: Any
) -> list[Finding]:
    class Written(Trainer):
        def training_step(self, batch: Any) -> Any:
            return step(self, batch)

    trainer = Written(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=steps, **options)
    trainer.fit([torch.randn(4, 6) for _ in range(steps * options.get("accumulate", 1))])
    return [f for f in trainer.report.findings if f.code == "G113"]


def piles(trainer: Trainer, x: Any) -> Any:
    tap = Tap([m for m in trainer.model.modules() if isinstance(m, nn.Linear)][-1])
    return (trainer.model(x) - x).square().mean() + 0 * tap.output.mean()


@pytest.mark.parametrize("make", [perceptron, convolutional, recurrent, attentive])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_a_hook_a_step_is_told_with_its_line(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    (finding,) = findings_of(piles, make(), **options)
    assert finding.first_step == 4
    assert finding.source is not None
    assert finding.source.text == "self.handle = layer.register_forward_hook(self)"
    assert finding.holder is not None
    assert finding.holder.endswith("._forward_hooks")


def of_parameters(trainer: Trainer) -> list[Any]:
    return [p.register_hook(lambda grad: grad.clamp(-1, 1)) for p in trainer.model.parameters()]


def after_accumulation(trainer: Trainer) -> list[Any]:
    return [p.register_post_accumulate_grad_hook(lambda p: None) for p in trainer.model.parameters()]


def of_the_optimizer(trainer: Trainer) -> list[Any]:
    return [trainer.state.optimizers["main"].register_step_post_hook(lambda *_: None)]


def of_all_modules(trainer: Trainer) -> list[Any]:
    return [nn.modules.module.register_module_forward_hook(lambda *_: None)]


@pytest.mark.parametrize(
    ("register", "told", "has_line"),
    [
        (of_parameters, "model.0.weight._backward_hooks", True),
        (after_accumulation, "model.0.weight._post_accumulate_grad_hooks", True),
        (of_the_optimizer, "optimizer main._optimizer_step_post_hooks", True),
        (of_all_modules, "torch._global_forward_hooks", False),
    ],
)
def test_hooks_of_parameters_optimizers_and_all_modules_pile_up_too(
    register: Callable[[Trainer], list[Any]], told: str, has_line: bool
) -> None:
    made: list[Any] = []

    def step(trainer: Trainer, x: Any, *, keep: bool) -> Any:
        if not keep:
            while made:
                made.pop().remove()
        made.extend(register(trainer))
        return (trainer.model(x) - x).square().mean()

    try:
        found = findings_of(functools.partial(step, keep=True), perceptron())
        finding = next(f for f in found if f.holder == told)
        assert finding.first_step == 4
        assert (finding.source is not None and "register_" in finding.source.text) is has_line
    finally:
        while made:
            made.pop().remove()
    assert findings_of(functools.partial(step, keep=False), perceptron(), steps=80) == []


def removes(trainer: Trainer, x: Any) -> Any:
    tap = Tap(trainer.model[0])
    try:
        return (trainer.model(x) - x).square().mean()
    finally:
        tap.handle.remove()


def once(trainer: Trainer, x: Any) -> Any:
    if trainer.state.step == 2:
        Tap(trainer.model[0])
        Tap(trainer.model[2])
    return (trainer.model(x) - x).square().mean()


def every_few_steps_then_never(trainer: Trainer, x: Any) -> Any:
    if trainer.state.step in (0, 1):
        Tap(trainer.model[0])
    return (trainer.model(x) - x).square().mean()


@pytest.mark.parametrize("step", [removes, once, every_few_steps_then_never])
def test_hooks_removed_or_made_once_are_not_accused(step: Callable[[Trainer, Any], Any]) -> None:
    assert findings_of(step, perceptron(), steps=80) == []


def test_torch_gets_its_methods_back() -> None:
    before = nn.Module.register_forward_hook
    findings_of(piles, perceptron())
    assert nn.Module.register_forward_hook is before


def test_the_judge_works_in_a_bare_loop() -> None:
    model = perceptron()
    samples = []
    for step in range(1, 4):
        Tap(model[0])
        samples.append((step, count_hooks(model)))
    (finding,) = find_piling_hooks(samples)
    assert finding.holder == "model.0._forward_hooks"
