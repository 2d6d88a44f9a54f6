"""Failures whose cause lies where no frame of the traceback shows it, and errors that are not ours to explain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import MLP, line_of, mse, regression, run
from torch import Tensor, nn

import safetrain
from safetrain import Finding, Trainer

# ---------------------------------------------------------------------- G121: state that a function carries over

STORE: dict[str, Tensor] = {}
TOTAL: dict[str, Tensor] = {}
LOSSES: list[Tensor] = []


def into_a_dict(model: MLP, batch: tuple[Tensor, Tensor]) -> Tensor:
    h = torch.tanh(model.body(batch[0]) + STORE.get("h", torch.zeros(8)))
    STORE["h"] = h  # into_a_dict
    return F.mse_loss(model.head(h), batch[1])


def into_a_total(model: MLP, batch: tuple[Tensor, Tensor]) -> Tensor:
    TOTAL["loss"] = TOTAL.get("loss", 0) + mse(model, batch)  # into_a_total
    return TOTAL["loss"]


def into_a_list(model: MLP, batch: tuple[Tensor, Tensor]) -> Tensor:
    LOSSES.append(mse(model, batch))  # into_a_list
    return torch.stack(LOSSES).mean()


def detached(model: MLP, batch: tuple[Tensor, Tensor]) -> Tensor:
    h = torch.tanh(model.body(batch[0]) + STORE.get("h", torch.zeros(8)))
    STORE["h"] = h.detach()
    return F.mse_loss(model.head(h), batch[1])


@pytest.fixture(autouse=True)
def _empty() -> None:
    for kept in (STORE, TOTAL, LOSSES):
        kept.clear()


@pytest.mark.parametrize("carry", [into_a_dict, into_a_total, into_a_list], ids=lambda f: f.__name__)
def test_state_carried_by_a_function_that_has_returned(carry: Callable[..., Tensor]) -> None:
    outcome = run(MLP(), carry, regression(3))
    finding = outcome.only("G121")
    lines = {"into_a_dict": line_of("into_a_dict"), "into_a_total": line_of("into_a_total")}
    expected = lines.get(carry.__name__) or line_of("into_a_list")
    assert finding.source is not None and finding.source.line == expected
    assert "differentiated already" not in finding.message  # that is another fault
    assert "a second time" in str(outcome.error)


def test_detached_state_is_fine() -> None:
    outcome = run(MLP(), detached, regression(3))
    assert outcome.error is None and outcome.codes == []


def test_a_value_made_in_the_constructor_of_one_of_two_classes_by_that_name() -> None:
    def first() -> type[nn.Module]:
        class Net(MLP):
            def __init__(self) -> None:
                super().__init__()
                self.derived = self.body.weight / self.body.weight.norm()  # DERIVED

            def forward(self, x: Tensor) -> Tensor:
                return self.head(torch.tanh(x @ self.derived.t()))

        return Net

    def second() -> type[nn.Module]:
        class Net(MLP):
            def __init__(self) -> None:
                super().__init__()
                self.derived = torch.ones(1)

        return Net

    second()
    finding = run(first()(), mse, regression(3)).only("G121")
    assert finding.source is not None and finding.source.line == line_of("DERIVED")


# ---------------------------------------------------------------------- P211


def constant_nan(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    target = (batch[1] > 0).float()
    entropy = (target * target.log()).sum()  # CONSTANT
    return F.binary_cross_entropy_with_logits(model(batch[0]), target) + entropy


def guarded(model: nn.Module, loss_of: Callable[..., Tensor], batches: list[Any]) -> list[Finding]:
    """What all default guards say, the gate that keeps such gradients from the weights included."""

    class Small(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return loss_of(self.model, batch)

    trainer = Small(model, torch.optim.SGD(model.parameters(), lr=0.01), max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a skipped step is said so, and meant here
        trainer.fit(batches)
    return trainer.report.findings


def test_a_loss_that_is_nan_while_its_gradients_are_not() -> None:
    [finding] = guarded(MLP(), constant_nan, regression(3))
    assert finding.code == "P211"
    assert finding.source is not None and finding.source.line == line_of("CONSTANT")


class Counting(MLP):
    """Divides by zero at its third call, whatever the batch."""

    calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x) / (0.0 if len(self.calls) == 3 else 1.0)


def test_a_nan_that_does_not_come_again_is_told_as_the_losses() -> None:
    Counting.calls.clear()
    [finding] = guarded(Counting(), mse, regression(5))
    assert (finding.code, finding.first_step, finding.source) == ("P211", 3, None)
    assert "did not" in finding.message


@pytest.mark.parametrize("part", ["input", "target"])
def test_a_batch_with_nan_is_not_blamed_on_the_operation_that_reads_it(part: str) -> None:
    def poisoned() -> list[tuple[Tensor, Tensor]]:
        batches = regression(4)
        batches[2][part == "target"][1, 0] = float("nan")
        return batches

    assert "came with the batch" in run(MLP(), mse, poisoned()).only("P211").message

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with safetrain.watch(model, optimizer, stream=None) as w:
        for x, y in poisoned():
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            w.step()
    [told] = [f for f in w.findings if f.code == "P211"]
    assert "came with" in told.message
    assert told.source is None or "self.body(x)" in told.source.text  # no line of the loop made it


def no_rows(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y) + out[y > 100].mean()  # NO ROWS


def unrelated(a: float, b: float) -> float:
    return a - b + a  # looks like it, is never called


def test_the_line_of_a_loss_function_is_found_below_the_loop_that_calls_it() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with safetrain.watch(model, optimizer, stream=None) as w:
        for x, y in regression(2):
            optimizer.zero_grad()
            no_rows(model(x), y).backward()
            optimizer.step()
            w.step()
    [told] = [f for f in w.findings if f.code == "P211"]
    assert told.source is not None and told.source.line == line_of("NO ROWS")


# ---------------------------------------------------------------------- not ours


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError])
def test_an_error_of_the_users_own_words_is_left_alone(error: type[Exception]) -> None:
    def raising(model: nn.Module, batch: Any) -> Tensor:
        raise error("modified by an inplace operation, says my own check")

    outcome = run(MLP(), raising, regression(2))
    assert type(outcome.error) is error and outcome.codes == []
    assert getattr(outcome.error, "__notes__", []) == []


# ---------------------------------------------------------------------- G129


def test_statements_that_share_a_line_are_told_apart() -> None:
    class Short(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x)) + 0
            h += 1; h = h * 2; h.mul_(2); h[:, 0] = 0  # fmt: skip  # noqa: E702
            return self.head(h)

    outcome = run(Short(), mse, regression(2))
    assert outcome.error is None and outcome.codes == []
