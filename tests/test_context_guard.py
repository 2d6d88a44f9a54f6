"""What a user's hook leaves switched on or off is put back, and the hook is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_loops import make
from torch import nn

from safetrain import Callback, Trainer
from safetrain.findings import Report
from safetrain.guarding.context import ContextGuard
from safetrain.state import RunState


def run(hook: Callable[[nn.Module], object], *, calls: int = 1, may_freeze: bool = True) -> tuple[Report, nn.Module]:
    model, report = make("conv"), Report()
    state = RunState(model=model, optimizers={})
    watched = ContextGuard(model, report).watch(
        lambda state: hook(state.model) and None, "Mine.on_step_end", may_freeze=may_freeze
    )
    for _ in range(calls):
        watched(state)
    return report, model


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (lambda m: torch.set_grad_enabled(False), "gradients off"),
        (lambda m: torch.set_autocast_enabled("cpu", True), "autocast on"),
        (lambda m: torch.set_default_dtype(torch.float64), "float64"),
        (lambda m: m.eval(), "in eval mode"),
        (lambda m: m.body[1].eval(), "`body.1` in eval mode"),
    ],
    ids=["grad", "autocast", "dtype", "eval", "part"],
)
def test_what_a_hook_leaves_is_restored_and_the_hook_named(hook: Callable[[nn.Module], object], told: str) -> None:
    report, model = run(hook)
    [finding] = report.findings
    assert finding.code == "L515" and told in finding.message and finding.holder == "Mine.on_step_end"
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() is torch.float32
    assert all(m.training for m in model.modules())


def test_hooks_that_clean_up_are_not_named() -> None:
    def tidy(model: nn.Module) -> None:
        was = model.training
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(model.inputs(4))
        model.train(was)

    report, _ = run(tidy, calls=3)
    assert report.findings == []


def test_unfreezing_in_a_training_hook_is_right_and_in_an_evaluation_hook_is_not() -> None:
    report, model = run(lambda m: m.body.requires_grad_(False))
    assert report.findings == [] and not model.body[0].weight.requires_grad
    report, model = run(lambda m: m.body.requires_grad_(False), may_freeze=False)
    assert "frozen" in report.findings[0].message and model.body[0].weight.requires_grad


def test_a_hook_that_leaks_in_each_call_is_one_finding() -> None:
    report, _ = run(lambda m: torch.set_grad_enabled(False), calls=5)
    assert [f.count for f in report.findings] == [5]


def test_a_hook_that_was_caught_once_is_put_right_in_each_call() -> None:
    report, model = run(lambda m: m.eval(), calls=7)
    assert model.training
    assert [f.count for f in report.findings] == [7]


def test_watching_costs_microseconds() -> None:
    model = make("mlp")
    state = RunState(model=model, optimizers={})
    watched = ContextGuard(model, Report()).watch(lambda state: None, "Mine.on_step_end")
    started = time.perf_counter()
    for _ in range(2000):
        watched(state)
    assert (time.perf_counter() - started) / 2000 < 50e-6


def test_a_trainers_callbacks_are_watched_and_may_set_a_run_up() -> None:
    """Grad mode left off is put back and the hook named; a backbone put into eval mode on purpose stays so."""

    class LeavesGradientsOff(Callback):
        def on_step_end(self, state: RunState) -> None:
            if state.step == 2:
                torch.set_grad_enabled(False)

    class SetsUp(Callback):
        def on_step_start(self, state: RunState) -> None:
            state.model[1].eval()

    class SamplesInEvalMode(Callback):
        def on_eval_end(self, state: RunState) -> None:
            state.model.eval()

    class Written(Trainer):
        def training_step(self, x: Any) -> Any:
            return self.model(x).square().mean()

    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    callbacks = [LeavesGradientsOff(), SetsUp(), SamplesInEvalMode()]
    trainer = Written(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=6, eval_every=3, callbacks=callbacks)
    data = [torch.randn(4, 3) for _ in range(6)]
    trainer.fit(data, data[:2])
    assert torch.is_grad_enabled()
    assert model.training
    assert not model[1].training
    leaks = [f for f in trainer.report.findings if f.code == "L515"]
    assert {f.holder for f in leaks} == {"LeavesGradientsOff.on_step_end", "SamplesInEvalMode.on_eval_end"}
