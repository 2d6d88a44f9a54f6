"""The assertions that people use in their own tests catch what they say, and pass what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import KINDS, MLP, mse, regression
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain.testing import (
    assert_all_params_get_grad,
    assert_no_retained_graph,
    assert_no_silent_fault,
    assert_optimizer_covers,
    check_function,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Softsign(torch.autograd.Function):
    """x / (1 + |x|), right in every way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / (1 + x.abs())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + x.abs()) ** 2


class WrongFactor(Softsign):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + x.abs())


class RootOfSquares(torch.autograd.Function):
    """sqrt(x²): its gradient divides by zero at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x / (x * x).sqrt()


class SaturatesWrongly(torch.autograd.Function):
    """The gradient is right for moderate inputs and keeps going where the function is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-10, 10)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Product(torch.autograd.Function):
    """a * b; `careless` variants forget one rule each."""

    careless = ""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        if Product.careless == "writes":
            a.add_(1.0)
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        if Product.careless == "alone" and not ctx.needs_input_grad[1]:
            return grad, None
        if Product.careless == "layout":
            return grad * torch.as_strided(b, b.shape, b.contiguous().stride()), grad * a
        return grad * b, grad * a


@pytest.fixture
def careless() -> Any:
    yield lambda how: setattr(Product, "careless", how)
    Product.careless = ""


def test_a_function_that_is_right_passes_every_check() -> None:
    report = check_function(Softsign, torch.randn(3, 4), second_order=True, compiled=False)
    assert report.passed and len(report.checks) == 9
    assert "Softsign" in str(report)
    check_function(F.silu, torch.randn(5), compiled=False)
    check_function(Product, torch.randn(3, 4), torch.randn(3, 4), second_order=True, compiled=False)


def test_a_wrong_factor_is_reported_with_its_size() -> None:
    with pytest.raises(AssertionError, match=r"FAIL gradient \(off by .*backward gives .*central differences"):
        check_function(WrongFactor, torch.randn(3, 4), compiled=False)


def test_a_pole_at_zero_is_found() -> None:
    with pytest.raises(AssertionError, match=r"FAIL finite gradients where the output is finite: .*at zero"):
        check_function(RootOfSquares, torch.randn(6) + 2, compiled=False)


def test_a_saturated_range_is_found() -> None:
    with pytest.raises(AssertionError, match="FAIL gradient of very large inputs") as caught:
        check_function(SaturatesWrongly, torch.randn(6), compiled=False)
    assert "ok   gradient near zero" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [("writes", "inputs left as they were: input 0"), ("alone", "each input alone"), ("layout", "not contiguous")],
)
def test_a_careless_function_of_two_inputs(careless: Any, how: str, words: str) -> None:
    careless(how)
    with pytest.raises(AssertionError, match=f"FAIL.*{words}"):
        check_function(Product, torch.randn(3, 4), torch.randn(3, 4), compiled=False)


def test_inputs_that_are_not_to_be_differentiated_are_left_out() -> None:
    check_function(lambda x, i, k: x[i] * k, torch.randn(4, 3), torch.tensor([0, 2]), 2.0, compiled=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_results_are_compared_with_eager() -> None:
    report = check_function(Softsign, torch.randn(3, 4), backend="aot_eager")
    assert report.checks[-1].name.startswith("compiled") and report.checks[-1].passed

    def differs(x: Tensor) -> Tensor:
        return x * 2.0 if torch.compiler.is_compiling() else x * 3.0

    with pytest.raises(AssertionError, match=r"FAIL compiled .*off by 0.33"):
        check_function(differs, torch.randn(3), backend="aot_eager")


# ---------------------------------------------------------------------- models and steps


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_models_pass_all(kind: str) -> None:
    make, data, loss_of = KINDS[kind]
    model, batches = make(), data()
    assert_all_params_get_grad(model, lambda: loss_of(model, batches[0]))
    assert_no_silent_fault(model, lambda: loss_of(model, batches[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_optimizer_covers(model, optimizer)
    with assert_no_retained_graph(model) as watch:
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            watch.step()
    assert all(p.grad is not None for p in model.parameters())


class TwoHeads(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.head(h) + self.other(h).detach()


def test_a_parameter_without_gradient_is_named_with_its_cut() -> None:
    model, batch = TwoHeads(), regression(1)[0]
    with pytest.raises(AssertionError, match=r"P201.*other\.weight(.|\n)*detach"):
        assert_all_params_get_grad(model, lambda: mse(model, batch))
    assert_all_params_get_grad(model, lambda: mse(model, batch), apart_from=["other.*"])
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_of_exactly_zero_can_be_asked_for() -> None:
    model, batch = MLP(), regression(1)[0]
    loss = lambda: (model(batch[0]) * 0.0).mean()  # noqa: E731
    assert_all_params_get_grad(model, loss)
    with pytest.raises(AssertionError, match=r"exactly zero: body\.weight"):
        assert_all_params_get_grad(model, loss, nonzero=True)


def test_an_optimizer_that_misses_parameters() -> None:
    model = MLP()
    with pytest.raises(AssertionError, match=r"P202.*head"):
        assert_optimizer_covers(model, torch.optim.SGD(model.body.parameters(), lr=0.1))


def test_a_silent_fault_is_raised() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    x = torch.randn(4, 6).requires_grad_()

    def lost() -> Tensor:
        return checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).pow(2).mean()

    with pytest.raises(AssertionError, match="G126"):
        assert_no_silent_fault(model, lost)
    assert_no_silent_fault(model, lambda: checkpoint(model, x, use_reentrant=False).pow(2).mean())


def _train(model: nn.Module, keep: Any, watch: Any = None) -> None:
    for batch in regression(4):
        loss = mse(model, batch)
        loss.backward()
        keep(loss)
        if watch is not None:
            watch.step()


HISTORY: list[Tensor] = []


@pytest.mark.parametrize("told", [True, False])
def test_losses_kept_in_a_list_are_named(told: bool) -> None:
    model = MLP()
    HISTORY.clear()
    with pytest.raises(AssertionError, match="HISTORY"), assert_no_retained_graph(model) as watch:
        _train(model, HISTORY.append, watch if told else None)
    HISTORY.clear()
    with assert_no_retained_graph(model) as watch:
        _train(model, lambda loss: HISTORY.append(loss.detach()), watch if told else None)
    HISTORY.clear()


def test_a_running_total_is_found_when_steps_are_told() -> None:
    model = MLP()
    total = torch.zeros(())
    with pytest.raises(AssertionError, match="still alive"), assert_no_retained_graph(model) as watch:
        for batch in regression(4):
            loss = mse(model, batch)
            loss.backward()
            total = total + loss
            watch.step()
