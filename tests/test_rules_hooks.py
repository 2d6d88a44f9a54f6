"""G113: hooks registered in every step are told by the fourth, with their line; hooks made once or removed are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from safetrain import Finding, Trainer, watch
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


# ---------------------------------------------------------------------- modules outside the model


def frozen_features() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).requires_grad_(False)


KEPT_APART = frozen_features()
"""A module that only this file's globals hold."""


class Perceptual(Trainer):
    """Compares features of a frozen network, which it taps anew in every step."""

    def __init__(self, *args: Any, removes: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vgg, self.removes = frozen_features(), removes

    def training_step(self, x: Any) -> Any:
        tap = Tap(self.vgg[0])
        self.vgg(self.model(x))
        loss = tap.output.square().mean()
        if self.removes:
            tap.handle.remove()
        return loss


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("steps", [6, 80])
def test_a_frozen_network_of_the_trainer_is_tapped_in_every_step(removes: bool, steps: int) -> None:
    model = perceptron()
    trainer = Perceptual(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=steps, removes=removes)
    trainer.fit([torch.randn(4, 6) for _ in range(steps)])
    found = [f for f in trainer.report.findings if f.severity != "note"]
    if removes:
        assert found == []
        return
    (finding,) = found
    assert (finding.code, finding.first_step) == ("G113", 4)
    assert finding.holder == "trainer.vgg.0._forward_hooks" and finding.module is None
    assert finding.source is not None and finding.source.text == "self.handle = layer.register_forward_hook(self)"


def of_a_closure() -> tuple[Callable[[nn.Module, Any], Any], str]:
    teacher = frozen_features()

    def loss(model: nn.Module, x: Any) -> Any:
        tap = Tap(teacher[2])
        teacher(model(x))
        return tap.output.square().mean()

    return loss, "teacher.2._forward_hooks"


def of_a_global() -> tuple[Callable[[nn.Module, Any], Any], str]:
    def loss(model: nn.Module, x: Any) -> Any:
        KEPT_APART[2].register_forward_pre_hook(lambda module, args: None)
        return KEPT_APART(model(x)).square().mean()

    return loss, "KEPT_APART.2._forward_pre_hooks"


def that_begins_late() -> tuple[Callable[[nn.Module, Any], Any], str]:
    steps = iter(range(1000))

    def loss(model: nn.Module, x: Any) -> Any:
        if next(steps) > 20:
            KEPT_APART[0].register_full_backward_hook(lambda *_: None)
        return KEPT_APART(model(x)).square().mean()

    return loss, "KEPT_APART.0._backward_hooks"


def bare_loop(loss: Callable[[nn.Module, Any], Any], steps: int = 80) -> list[Finding]:
    model = perceptron()
    with watch(stream=None) as watched:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, torch.randn(4, 6)).backward()
            optimizer.step()
    assert watched.trouble == []
    return [f for f in watched.findings if f.code == "G113"]


@pytest.mark.parametrize("fault", [of_a_closure, of_a_global, that_begins_late])
def test_in_a_bare_loop_it_is_met_wherever_it_is_kept(fault: Callable[[], Any]) -> None:
    loss, holder = fault()
    (finding,) = bare_loop(loss)
    assert finding.holder == holder and finding.last_step == (68 if fault is that_begins_late else 4)
    assert finding.source is not None and "register_" in finding.source.text


def once_each() -> Callable[[nn.Module, Any], Any]:
    """Each layer of a teacher is tapped when it is first needed, one a step."""
    teacher = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]).requires_grad_(False)
    waiting = list(teacher)

    def loss(model: nn.Module, x: Any) -> Any:
        if waiting:
            Tap(waiting.pop())
        return teacher(model(x)).square().mean()

    return loss


def new_each_step() -> Callable[[nn.Module, Any], Any]:
    def loss(model: nn.Module, x: Any) -> Any:
        teacher = frozen_features()
        tap = Tap(teacher[0])
        return teacher(model(x)).square().mean() + 0 * tap.output.mean()

    return loss


def the_old_one_goes() -> Callable[[nn.Module, Any], Any]:
    teacher, taps = frozen_features(), []

    def loss(model: nn.Module, x: Any) -> Any:
        taps.append(Tap(teacher[0]))
        if len(taps) > 1:
            taps.pop(0).handle.remove()
        return teacher(model(x)).square().mean()

    return loss


def removed_by_a_block() -> Callable[[nn.Module, Any], Any]:
    teacher = frozen_features()

    def loss(model: nn.Module, x: Any) -> Any:
        with teacher[0].register_forward_hook(lambda *_: None):
            return teacher(model(x)).square().mean()

    return loss


def a_copy_each_step() -> Callable[[nn.Module, Any], Any]:
    """The teacher is renewed from the model, hook and all."""
    teacher = [frozen_features()]

    def loss(model: nn.Module, x: Any) -> Any:
        Tap(teacher[0][0])
        loss = teacher[0](model(x)).square().mean()
        teacher[0] = frozen_features()
        return loss

    return loss


def once_at_the_start() -> Callable[[nn.Module, Any], Any]:
    teacher = frozen_features()
    taps = [Tap(layer) for layer in teacher]

    def loss(model: nn.Module, x: Any) -> Any:
        return teacher(model(x)).square().mean() + 0 * taps[0].output.mean()

    return loss


@pytest.mark.parametrize(
    "program", [once_each, new_each_step, the_old_one_goes, removed_by_a_block, a_copy_each_step, once_at_the_start]
)
def test_hooks_of_other_modules_that_do_not_pile_up(program: Callable[[], Any]) -> None:
    assert bare_loop(program()) == []
    loss = program()
    assert findings_of(lambda trainer, x: loss(trainer.model, x), perceptron(), steps=80) == []


@pytest.mark.parametrize("registers", [False, True])
def test_torch_has_its_own_methods_but_for_two_steps_of_loops_that_register(registers: bool) -> None:
    original, seen = nn.Module.register_forward_hook, []

    def step(trainer: Trainer, x: Any) -> Any:
        seen.append(nn.Module.register_forward_hook is original)
        if registers:
            Tap(trainer.model[0]).handle.remove()
        return (trainer.model(x) - x).square().mean()

    assert findings_of(step, perceptron(), steps=80) == []
    assert [i + 1 for i, own in enumerate(seen) if not own] == ([3, 4, 67, 68] if registers else [])
