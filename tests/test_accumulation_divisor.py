"""L503 for a loss divided by accumulation steps that are not the window's: faults, and what only looks like them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import batch, loud, make, watched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain.findings import Finding

STEP_EVERY = 4


def world() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = make("mlp")
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(*batch(model, 128)), batch_size=4)
    return model, torch.optim.SGD(model.parameters(), 0.01), data


def turn(optimizer: torch.optim.Optimizer, i: int, every: int = STEP_EVERY) -> None:
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()


def findings(program: Callable[[], None]) -> list[Finding]:
    with watched() as report:
        program()
    return [f for f in report.findings if f.code in loud(report)]


# ---------------------------------------------------------------------- divided by another number


def by_a_name() -> None:
    accumulation_steps = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        loss = loss / accumulation_steps  # fault
        loss.backward()
        turn(optimizer, i)


def by_an_argument() -> None:
    args = Namespace(accum_iter=2)
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / args.accum_iter).backward()  # fault
        turn(optimizer, i)


def in_place_by_an_entry() -> None:
    config = {"grad_accum": 16}
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), torch.randn(len(y), 3))
        loss /= config["grad_accum"]  # fault
        loss.backward()
        turn(optimizer, i)


def scaled_and_clipped() -> None:
    accum_steps = 8
    model, optimizer, data = world()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / accum_steps  # fault
        scaler.scale(loss).backward()
        if (i + 1) % STEP_EVERY == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


class Run:
    """The loop in a method, the number on the object."""

    def __init__(self) -> None:
        self.num_micro = 8

    def __call__(self) -> None:
        model, optimizer, data = world()
        for i, (x, y) in enumerate(data):
            loss = self.loss_of(model, x, y)
            (loss / self.num_micro).backward()  # fault
            turn(optimizer, i)

    def loss_of(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    ("program", "numbers"),
    [
        (by_a_name, "4/8"),
        (by_an_argument, "4/2"),
        (in_place_by_an_entry, "4/16"),
        (scaled_and_clipped, "4/8"),
        (Run(), "4/8"),
    ],
    ids=["name", "argument", "entry", "scaled", "attribute"],
)
def test_another_number_than_the_windows(program: Callable[[], None], numbers: str) -> None:
    (finding,) = (f for f in findings(program) if f.code != "A303")
    assert finding.code == "L503" and numbers in finding.message
    assert finding.source is not None and finding.source.text.endswith("# fault")
    assert finding.first_step <= 3


# ---------------------------------------------------------------------- divided twice


def gradients_too() -> None:
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= accum  # fault
            optimizer.step()
            optimizer.zero_grad()


def gradients_too_by_a_call() -> None:
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / accum
        loss.backward()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                p.grad.div_(accum)  # fault
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("program", [gradients_too, gradients_too_by_a_call])
def test_the_loss_and_the_gradients_are_divided(program: Callable[[], None]) -> None:
    (finding,) = findings(program)
    assert finding.code == "L503" and "once more" in finding.message
    assert finding.source is not None and finding.source.text.endswith("# fault")


def gradients_only() -> None:
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        F.cross_entropy(model(x), y, reduction="sum").div(len(y)).backward()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                p.grad.div_(accum)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def gradients_by_another_number() -> None:
    accum, copies = STEP_EVERY, 4
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                p.grad.div_(copies)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def gradients_under_a_switch() -> None:
    accum, losses_are_whole = STEP_EVERY, False
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            if losses_are_whole:
                for p in model.parameters():
                    p.grad.div_(accum)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def gradients_where_no_step_is_taken() -> None:
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
        elif i < 0:
            for p in model.parameters():
                p.grad.div_(accum)  # type: ignore[union-attr]


# ---------------------------------------------------------------------- what only looks like it


def one_number() -> None:
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        turn(optimizer, i, accum)


def weighed_and_divided() -> None:
    """Half the loss on purpose: 1/8 in all, and no division by a wrong number."""
    accum = STEP_EVERY
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (0.5 * F.cross_entropy(model(x), y) / accum).backward()
        turn(optimizer, i, accum)


def a_temperature() -> None:
    temperature = 2.0
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / temperature).backward()
        turn(optimizer, i)


def two_batches_to_a_backward() -> None:
    accum = 8
    model, optimizer, data = world()
    stream = iter(data)
    for i in range(16):
        loss = torch.zeros(())
        for _ in range(2):
            x, y = next(stream)
            loss = loss + F.cross_entropy(model(x), y)
        (loss / accum).backward()
        turn(optimizer, i)


def heads_of_one_batch() -> None:
    """As many backwards as heads: four to a step, over two batches."""
    accum = 2
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        for _ in range(2):
            (F.cross_entropy(model(x), y) / accum).backward()
        turn(optimizer, i, accum)


def a_fast_and_a_slow_optimizer() -> None:
    accum = 4
    model, slow, data = world()
    fast = torch.optim.SGD(list(model.parameters())[:1], 0.01)
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % 2 == 0:
            fast.step()
            fast.zero_grad()
        turn(slow, i, accum)


def gradients_that_go_on() -> None:
    """Stepped twice on what is cleared once."""
    accum = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                p.grad = None


def windows_of_growing_length() -> None:
    accum, done = 2, 0
    model, optimizer, data = world()
    for x, y in data:
        (F.cross_entropy(model(x), y) / accum).backward()
        done += 1
        if done == accum:
            optimizer.step()
            optimizer.zero_grad()
            accum, done = accum + 1, 0


def sums_over_elements() -> None:
    accum = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y, reduction="sum") / accum).backward()
        turn(optimizer, i)


def a_size_of_micro_batches() -> None:
    micro_batch_size = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / micro_batch_size).backward()
        turn(optimizer, i)


def two_divisions() -> None:
    """Which of them it was is not known."""
    accum_pretraining, accum_tuning = 8, 4
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y)
        loss = loss / accum_pretraining if i < 64 else loss / accum_tuning
        loss.backward()
        turn(optimizer, i)


def made_up_for_by_a_weight() -> None:
    accum = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (2 * F.cross_entropy(model(x), y) / accum).backward()
        turn(optimizer, i)


def made_up_for_in_the_gradients() -> None:
    accum = 8
    model, optimizer, data = world()
    for i, (x, y) in enumerate(data):
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % STEP_EVERY == 0:
            for p in model.parameters():
                p.grad.mul_(2)  # type: ignore[union-attr]
        turn(optimizer, i)


@pytest.mark.parametrize(
    "program",
    [
        gradients_only,
        gradients_by_another_number,
        gradients_under_a_switch,
        gradients_where_no_step_is_taken,
        made_up_for_by_a_weight,
        made_up_for_in_the_gradients,
        one_number,
        weighed_and_divided,
        a_temperature,
        two_batches_to_a_backward,
        heads_of_one_batch,
        a_fast_and_a_slow_optimizer,
        gradients_that_go_on,
        windows_of_growing_length,
        sums_over_elements,
        a_size_of_micro_batches,
        two_divisions,
    ],
)
def test_what_is_meant_or_not_proved_is_left_alone(program: Callable[[], None]) -> None:
    assert [f for f in findings(program) if f.op == "div"] == []


def test_a_clean_window_has_no_finding_at_all() -> None:
    assert findings(one_number) == []
