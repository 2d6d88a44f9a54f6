"""Inf or NaN in a loop of one's own whose steps call modules several times: the operation, the module, the line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import line_of
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import safetrain
from safetrain.findings import Finding
from safetrain.rules.autopsy.first_bad import find_origin, name_of

FAULT_AT = 4
"""The step, counted from 0, in which the fault comes."""

Step = Callable[[int], Tensor]


def watched(step: Step, *modules: nn.Module) -> list[Finding]:
    """Seven steps of a bare loop; what the rules of finite numbers found."""
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], 1e-3)
    with safetrain.watch(modules[0] if len(modules) == 1 else None, optimizer, stream=None) as w:
        for i in range(7):
            loss = step(i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            w.step()
    assert not w.trouble, w.trouble[0]
    assert not _get_current_function_mode_stack()  # no look at a step that will not come
    return [finding for finding in w.findings if finding.code in ("P206", "P211")]


def only(step: Step, *modules: nn.Module, code: str = "P211") -> Finding:
    (finding,) = watched(step, *modules)
    assert finding.code == code
    assert finding.first_step == FAULT_AT + 1
    return finding


def at(finding: Finding) -> int | None:
    return finding.source.line if finding.source is not None else None


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = torch.exp(hidden.abs() * self.sharpness)  # exp-inside
        return self.second(hidden)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.relu(self.body(x))
        return torch.log(share + 1e-3)


class Sharp(Critic):
    """No epsilon where a share may be zero."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.relu(self.body(x))
        return torch.log(share)  # log-inside


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------------- inside a module


def test_two_views_of_which_the_second_overflows() -> None:
    model = Encoder()

    def step(i: int) -> Tensor:
        x = torch.randn(5, 6)
        y = x + 0.1
        one = model(x)
        model.sharpness = 1e3 if i == FAULT_AT else 1.0
        other = model(y)  # second-view
        model.sharpness = 1.0 if i != FAULT_AT else 1e3
        return F.mse_loss(one, other)

    finding = only(step, model)
    assert finding.op == "exp" and at(finding) == line_of("exp-inside")


def test_a_critic_on_real_and_on_made_up_samples() -> None:
    critic, maker = Sharp(), nn.Linear(2, 6)
    with torch.no_grad():
        critic.body.bias.fill_(20.0)

    def step(i: int) -> Tensor:
        real, made = torch.randn(5, 6), maker(torch.randn(5, 2))
        if i == FAULT_AT:
            made = made - 1e4 * critic.body.weight.sign().detach()
        on_real = critic(real)
        on_made = critic(made)  # made-up
        return on_made.mean() - on_real.mean()

    finding = only(step, critic, maker)
    assert finding.op == "log" and at(finding) == line_of("log-inside")
    assert f"line {line_of('made-up')}" in finding.message
    assert "the loss is Inf" not in finding.message.split(",")[0]


def test_a_recurrent_cell_that_grows_over_time() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out, self.gain = nn.Linear(3, 4), nn.Linear(4, 2), 0.1

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.exp((self.mix(x) + state).abs() * self.gain)  # exp-of-cell
            return self.out(state), state

    cell = Cell()

    def step(i: int) -> Tensor:
        cell.gain = 3.0 if i == FAULT_AT else 0.1
        state, losses = torch.zeros(5, 4), []
        for _ in range(6):
            out, state = cell(torch.randn(5, 3), state)
            losses.append(F.cross_entropy(out, torch.randint(0, 2, (5,))))
        return torch.stack(losses).mean()

    finding = only(step, cell)
    assert finding.op == "exp" and at(finding) == line_of("exp-of-cell")


def test_an_infinite_derivative_in_one_of_two_calls() -> None:
    class Length(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).pow(2).sum(1).sqrt()  # sqrt-of-sum

    model = Length()
    held: list[Tensor] = []  # as a loop's own names would

    def step(i: int) -> Tensor:
        x = torch.randn(5, 6)
        y = torch.zeros(5, 6) if i == FAULT_AT else x + 1.0
        held[:] = [x, y]
        return model(x).mean() + model(y).mean()

    finding = only(step, model, code="P206")
    assert at(finding) == line_of("sqrt-of-sum") and finding.params == ["body.weight"]


# ---------------------------------------------------------------------- outside of all modules


def test_a_logarithm_in_the_loop() -> None:
    critic = Critic()
    with torch.no_grad():
        critic.body.bias.fill_(5.0)

    def step(i: int) -> Tensor:
        left, right = critic(torch.randn(5, 6)), critic(torch.randn(5, 6))
        apart = (left - right).abs() * (0.0 if i == FAULT_AT else 1.0)
        return -apart.log().mean() + left.pow(2).mean()  # log-in-the-loop

    finding = only(step, critic)
    assert finding.op == "log"
    assert at(finding) in (None, line_of("log-in-the-loop"))
    assert finding.module is None


def test_a_batch_that_came_with_nan_is_told_by_the_call_that_got_it() -> None:
    model = Encoder()

    def step(i: int) -> Tensor:
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        if i == FAULT_AT:
            y[0, 0] = float("nan")
        one = model(x)
        other = model(y)  # got-nan
        return F.mse_loss(one, other)

    finding = only(step, model)
    assert at(finding) == line_of("got-nan")
    assert "came with the batch" in finding.message


# ---------------------------------------------------------------------- never a wrong line


class Masked(nn.Module):
    """Scores of which some are put at minus infinity on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.tensor([True, True, True, False])
        return self.body(x).masked_fill(~allowed, float("-inf"))


def test_infinities_on_purpose_are_not_blamed() -> None:
    model = Masked()

    def step(i: int) -> Tensor:
        first = F.cross_entropy(model(torch.randn(5, 6)), torch.randint(0, 3, (5,)))
        second = F.cross_entropy(model(torch.randn(5, 6)), torch.randint(0, 3, (5,)))
        gap = (first - first) if i == FAULT_AT else (first - second)
        return (gap / gap.detach()) * first  # zero-by-zero

    finding = only(step, model)
    assert "masked_fill" not in finding.message
    assert at(finding) in (None, line_of("zero-by-zero"))


@pytest.mark.parametrize("model", [Encoder(), Critic(), Masked()], ids=lambda m: type(m).__name__)
def test_several_calls_with_finite_numbers(model: nn.Module) -> None:
    def step(i: int) -> Tensor:
        outs = [model(torch.randn(5, 6)).softmax(-1) for _ in range(3)]
        return sum((out.pow(2).mean() for out in outs), torch.zeros(()))

    assert watched(step, model) == []


def test_the_state_of_a_script_is_left_alone_by_the_replays() -> None:
    """A replay goes through arguments whose graphs the script has yet to differentiate, and draws random numbers."""
    torch.manual_seed(1)
    cell = nn.GRUCell(3, 4)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))
    drawn: list[float] = []

    def step(i: int) -> Tensor:
        state = torch.zeros(5, 4)
        for _ in range(3):
            state = cell(torch.randn(5, 3), state)
        out = head(state)
        drawn.append(float(torch.rand(())))
        return (out * (float("nan") if i == FAULT_AT else 1.0)).mean()

    (finding,) = watched(step, cell, head)
    assert finding.code == "P211"
    assert finding.source is None or 'float("nan")' in finding.source.text
    with_replays, drawn[:] = list(drawn), []
    torch.manual_seed(1)
    nn.GRUCell(3, 4), nn.Linear(4, 1)  # the same numbers again
    for i in range(7):
        step(i)
    assert drawn == with_replays


def test_an_argument_that_was_written_to_afterwards_is_not_replayed() -> None:
    class Shifted(nn.Module):
        """Saves nothing of what it is given, so that may be written over."""

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.full((6,), 20.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.relu(x + self.shift))  # log-of-shifted

    model = Shifted()

    def step(i: int) -> Tensor:
        x = torch.randn(5, 6)
        y = x.clone()
        out = model(x) + model(y)
        y.fill_(-20.0)  # only now would its logarithm be infinite
        return out.mean() * (float("inf") if i == FAULT_AT else 1.0)

    assert at(only(step, model)) != line_of("log-of-shifted")


@dataclass
class Batch:
    """What only a user's own class knows how to take apart."""

    values: Tensor


def test_objects_of_the_script_live_no_longer_for_it() -> None:
    class Takes(Encoder):
        def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
            return super().forward(batch.values)

    model, alive = Takes(), []
    import weakref

    def step(i: int) -> Tensor:
        first = Batch(torch.randn(5, 6))
        ref = weakref.ref(first)
        out = model(first)
        del first
        out = out + model(Batch(torch.randn(5, 6)))
        alive.append(ref() is not None)
        return out.pow(2).mean()

    assert watched(step, model) == []
    assert not any(alive)


# ---------------------------------------------------------------------- what a graph tells by itself


def test_the_origin_in_a_graph_is_what_made_it_out_of_finite_values() -> None:
    x = torch.zeros(3, requires_grad=True)
    inner = (x * 2.0).sigmoid() * 0.0
    loss = -(inner.log().mean()) + x.sum()
    origin = find_origin(loss)
    assert origin is not None and name_of(origin.node) == "Log"
    assert find_origin(torch.tensor(float("nan"))) is None
