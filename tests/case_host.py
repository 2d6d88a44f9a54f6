"""Hosts the parts of a real bug (`case.py` of a folder of cases) in a Trainer, as its author would have written it.

A case offers `build(fixed)` -> dict with `model`, `data`, `optimizer_factory` or `optimizer`, and
`loss_fn(model, batch)` or, where the fault is in the loop, `train_step(model, optimizer, batch)`; optional
`eval_fn(model, batches)`, `on_step_end(loss)`, `accumulate`, `compile`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from safetrain import Callback, Finding, RunState, Trainer

CASES = Path(os.environ.get("SAFETRAIN_CASES", Path(__file__).resolve().parents[2] / "shared" / "cases"))
STEPS = 24


class HostedTrainer(Trainer):
    """A user's Trainer around the parts of a case."""

    def __init__(self, parts: dict[str, Any], **options: Any) -> None:
        self.parts = parts
        self.kept_loss: Any = None
        model = parts["model"]
        made = parts["optimizer"] if "optimizer" in parts else parts["optimizer_factory"](model)
        for group in (group for o in (made if isinstance(made, (list, tuple)) else [made]) for group in o.param_groups):
            group["lr"] = group["lr"] or 1e-3  # a case that only reads gradients leaves its weights alone
        optimizers = {f"optimizer{i}": o for i, o in enumerate(made)} if isinstance(made, (list, tuple)) else made
        super().__init__(
            model,
            optimizers,
            max_steps=STEPS,
            eval_every=4,
            accumulate=parts.get("accumulate", 1),
            compile=parts.get("compile"),
            callbacks=[OnStepEnd(self)],
            **options,
        )

    def training_step(self, batch: Any) -> Any:
        loss = self.parts["loss_fn"](self.model, batch)
        if "on_step_end" in self.parts:
            self.kept_loss = loss  # so that the author's callback gets what it got in a loop of its own
        return loss

    def evaluation_step(self, batch: Any) -> Any:
        return {"score": self.parts["eval_fn"](self.model, [batch])}

    def train_step(self, window: Any) -> None:
        if "loss_fn" in self.parts:
            return super().train_step(window)
        optimizers = list(self.state.optimizers.values())
        self.parts["train_step"](self.model, optimizers if len(optimizers) > 1 else optimizers[0], window[0])


class OnStepEnd(Callback):
    """Calls the author's `on_step_end` with the loss of the step."""

    def __init__(self, trainer: HostedTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, state: RunState) -> None:
        if "on_step_end" in self.trainer.parts:
            loss, self.trainer.kept_loss = self.trainer.kept_loss, None
            self.trainer.parts["on_step_end"](loss)


@dataclass
class Outcome:
    """What hosting one version of a case gave."""

    findings: list[Finding]
    error: BaseException | None

    @property
    def loud(self) -> list[Finding]:
        return [f for f in self.findings if f.severity != "note"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hosted_{name}", CASES / name / "case.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes of the case are looked up there
    spec.loader.exec_module(module)
    return module


def host(name: str, **build: Any) -> Outcome:
    """Build a case, run it in a Trainer, and return what the guards found and how the run ended."""
    parts = load(name).build(**build)
    trainer = HostedTrainer(parts)
    val = list(parts["data"])[:2] if "eval_fn" in parts else None
    try:
        if val is not None:
            trainer.evaluate(val)  # as a sanity check before training
        trainer.fit(parts["data"], val)
    except Exception as error:
        return Outcome(trainer.report.findings, error)
    finally:
        torch.set_grad_enabled(True)  # a case may switch it off for good
    return Outcome(trainer.report.findings, None)


def expectation(name: str) -> dict[str, Any]:
    """`codes`, `names` and `line` (in case.py) that a right answer has."""
    folder = CASES / name
    expected = json.loads((folder / "expect.json").read_text())
    hosted = json.loads((folder / "case.json").read_text())["expected_detection"]
    return {"codes": expected["codes"], "names": [*expected["names"], *hosted["names"]], "line": hosted["line"]}


def is_localised(finding: Finding, expected: dict[str, Any]) -> bool:
    """Right line, or one of the expected objects named."""
    source = finding.source
    if source is not None and Path(source.file).name == "case.py" and abs(source.line - expected["line"]) <= 1:
        return True
    said = " ".join(
        str(x or "")
        for x in (finding.holder, finding.params, finding.module, finding.op, finding.cause, finding.message)
    )
    return any(name and name in said for name in expected["names"])


def with_codes(findings: Iterable[Finding], codes: Iterable[str]) -> list[Finding]:
    return [f for f in findings if f.code in set(codes)]
