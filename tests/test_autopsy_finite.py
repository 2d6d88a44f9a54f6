"""A loss or gradient that turns Inf or NaN is traced to the operation, the module and the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import KINDS, MLP, line_of, mse, regression, run
from torch import Tensor, nn

from safetrain.recording.replay import unchanged
from safetrain.rules.autopsy import explain_nonfinite, find_nonfinite_loss


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Attention(nn.Module):
    """A row that is masked everywhere has no softmax."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.qkv, self.fill = nn.Linear(8, 24), fill

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask[:, None, :], self.fill)
        weights = scores.softmax(-1)  # masked-softmax
        return (weights @ v) * mask[:, :, None]


def _sequences(lengths: tuple[int, ...] = (5, 3)) -> tuple[Tensor, Tensor]:
    return torch.randn(len(lengths), 5, 8), torch.arange(5)[None] < torch.tensor(lengths)[:, None]


class Classifier(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.attention, self.head = Attention(fill), nn.Linear(8, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, mask)).mean()


def test_a_fully_masked_row_in_the_third_batch() -> None:
    batches = [_sequences(), _sequences(), _sequences((5, 0)), _sequences()]
    finding = run(Classifier(float("-inf")), lambda m, b: m(*b), batches).only("P211")
    assert finding.first_step == 3 and "softmax" in (finding.op or "")
    assert finding.source is not None and finding.source.line == line_of("masked-softmax")
    assert run(Classifier(-1e9), lambda m, b: m(*b), batches).codes == []


def test_a_replay_names_the_module_and_what_fed_it() -> None:
    model = Classifier(float("-inf"))
    finding = explain_nonfinite(model, lambda: model(*_sequences((5, 0))))
    assert finding is not None and finding.code == "P211"
    assert finding.module == "attention" and finding.op == "_softmax"
    assert "infinities" in (finding.cause or "") and "masked" in (finding.fix or "")


def test_a_finite_micro_batch_is_no_finding() -> None:
    model = Classifier(float("-inf"))
    assert explain_nonfinite(model, lambda: model(*_sequences())) is None
    assert find_nonfinite_loss(model, model(*_sequences())) is None


def test_a_logarithm_of_zero_in_the_loss() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        share = torch.relu(m(batch[0])) * 0.0
        return -torch.log(share).mean()  # log-of-zero

    model, batch = MLP(), regression(1)[0]
    finding = explain_nonfinite(model, lambda: loss_of(model, batch))
    assert finding is not None and finding.op == "log"
    assert finding.source is not None and finding.source.line == line_of("log-of-zero")


def test_an_overflowing_exponential_in_a_conv_net() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.conv(x)) * 1000
            return torch.exp(h)  # exp-overflow

    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    finding = explain_nonfinite(model, lambda: model(torch.randn(3, 1, 6, 6)).mean())
    assert finding is not None and finding.op == "exp"
    assert finding.source is not None and finding.source.line == line_of("exp-overflow")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_square_root_at_zero_in_backward(nonfinite: str) -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.sqrt(m(batch[0]) * 0.0).sum()  # sqrt-at-zero

    outcome = run(MLP(), loss_of, regression(2), nonfinite=nonfinite)
    finding = outcome.only("P206")
    assert finding.params[0] == "body.weight" and finding.first_step == 1
    assert finding.op == "sqrt" and finding.source is not None and finding.source.line == line_of("sqrt-at-zero")


def test_a_gradient_of_a_where_that_protects_the_forward_only() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = m(batch[0]) * 0.0
        return torch.where(out > 0, out.sqrt(), torch.zeros_like(out)).sum()  # where-sqrt

    model, batch = MLP(), regression(1)[0]
    finding = explain_nonfinite(model, lambda: loss_of(model, batch))
    assert finding is not None and finding.code == "P206" and finding.op == "sqrt"
    assert finding.source is not None and finding.source.line == line_of("where-sqrt")


def test_weights_that_are_not_finite_any_more_are_said_to_be_the_cause() -> None:
    model = MLP()
    with torch.no_grad():
        model.body.weight[0, 0] = float("nan")
    finding = run(model, mse, regression(1)).only("P206")
    assert finding.params == ["body.weight"]


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_runs_have_finite_numbers(kind: str) -> None:
    make, data, loss_of = KINDS[kind]
    assert run(make(), loss_of, data(), precision="fp16" if kind == "mlp" else "fp32").codes == []


def test_an_overflow_under_loss_scaling_is_left_to_the_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    outcome = run(MLP(), mse, regression(4), precision="fp16", scaler=scaler)
    assert outcome.codes == [] and outcome.trainer.state.skipped_steps > 0


# ---------------------------------------------------------------------- replays


class Everything(nn.Module):
    """Moves whatever a forward can move."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.hidden: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.late = x
        with torch.no_grad():
            self.lin.bias.add_(1.0)
        self.lin.weight.data.mul_(1.01)
        self.hidden = self.drop(self.norm(self.lin(x)))
        self.eval()
        return self.hidden.sum()


def test_a_replay_leaves_nothing_behind() -> None:
    model = Everything()
    grad = torch.ones_like(model.lin.weight)
    model.lin.weight.grad = grad
    state = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    rng = torch.get_rng_state()
    with unchanged(model):
        loss = model(torch.randn(4, 6))
        loss.backward()
        torch.set_grad_enabled(False)
    assert torch.is_grad_enabled() and model.training and model.norm.training
    assert model.calls == 0 and model.hidden is None and not hasattr(model, "late")
    assert model.lin.weight.grad is grad and model.lin.bias.grad is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [t._version for t in (*model.parameters(), *model.buffers())] == versions
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_graph_made_before_a_replay_can_still_be_differentiated() -> None:
    model = MLP()
    batch = regression(1)[0]
    loss = mse(model, batch)
    with unchanged(model):
        with torch.no_grad():
            model.head.weight.add_(1.0)
        F.mse_loss(model(batch[0]), batch[1]).backward()
    loss.backward()
    expected = torch.autograd.grad(mse(model, batch), list(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own forward mode calls it
def test_a_step_with_forward_mode_derivatives_is_replayed() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 8)

    def step() -> Tensor:
        output, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return output.mean() + torch.log(-slope.abs()).mean()  # forward-mode-log

    finding = explain_nonfinite(model, step)
    assert finding is not None and "log" in (finding.op or "")
    assert finding.source is not None and finding.source.line == line_of("forward-mode-log")
