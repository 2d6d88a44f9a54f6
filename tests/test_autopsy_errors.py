"""Errors of autograd, planted for real and explained down to the line that made them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import MLP, Outcome, line_of, mse, regression, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain.autopsy import explain
from safetrain.loop import Trainer


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.manual_seed(0)
    yield
    torch.set_grad_enabled(True)


# ---------------------------------------------------------------------- G122


class Gate(nn.Module):
    """An MLP whose gate is changed in place after its derivative was noted."""

    def __init__(self, from_step: int = 1, fixed: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.calls, self.from_step, self.fixed = 0, from_step, fixed

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        gate = torch.sigmoid(self.body(x))  # gate-saved
        if self.fixed:
            gate = gate + 1
        elif self.calls >= self.from_step:
            gate += 1  # gate-changed
        return self.head(gate * gate)


@pytest.mark.parametrize("from_step", [1, 3])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_an_activation_changed_in_place_is_traced_to_both_lines(from_step: int, options: dict[str, Any]) -> None:
    finding = run(Gate(from_step), mse, regression(), **options).only("G122")
    assert finding.source is not None and finding.source.line == line_of("gate-changed")
    assert finding.op == "add_"
    assert f"line {line_of('gate-saved')}" in (finding.cause or "")


def test_the_out_of_place_twin_trains() -> None:
    outcome = run(Gate(fixed=True), mse, regression())
    assert outcome.error is None and outcome.codes == []


def test_an_inplace_layer_after_one_that_saved_its_result() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Hardtanh(0.2, 0.8, inplace=True)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)  # conv-changed

    batches = [torch.randn(2, 1, 6, 6) for _ in range(2)]
    finding = run(Bad(), lambda model, x: model(x).mean(), batches).only("G122")
    assert finding.op == "hardtanh_" and finding.source is not None and finding.source.line == line_of("conv-changed")


def test_attention_weights_masked_in_place() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.transpose(1, 2)).softmax(-1)  # attention-saved
            weights *= torch.tril(torch.ones(x.shape[1], x.shape[1]))  # attention-changed
            return weights @ v

    finding = run(Attention(), lambda model, x: model(x).pow(2).mean(), [torch.randn(2, 5, 8)]).only("G122")
    assert finding.source is not None and finding.source.line == line_of("attention-changed")
    assert str(line_of("attention-saved")) in finding.message


def test_a_state_buffer_filled_time_step_by_time_step() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            states = torch.zeros(3, 5, 4)
            for t in range(1, 5):
                states[:, t] = torch.tanh(self.w(states[:, t - 1]) + x[:, t])  # rnn-changed
            return states

    finding = run(Cell(), lambda model, x: model(x).pow(2).mean(), [torch.randn(3, 5, 4)]).only("G122")
    assert finding.source is not None and finding.source.line == line_of("rnn-changed")


def test_an_optimizer_step_between_two_backwards_of_one_forward() -> None:
    class Gan(Trainer):
        def train_step(self, window: Any) -> None:
            for real in window:
                fake = self.model["gen"](torch.randn(len(real), 3))
                critic_loss = self.model["critic"](fake.detach()).mean() - self.model["critic"](real).mean()
                gen_loss = -self.model["critic"](fake).mean()
                self.zero_grad()
                self.backward(critic_loss)
                self.optimizer_step("critic")  # gan-step
                self.backward(gen_loss)
                self.optimizer_step("gen")

    for first_bad in (1, 3):
        outcome = _gan(Gan, first_bad)
        finding = outcome.only("G122")
        assert "critic." in finding.params[0], finding
        assert finding.source is not None and finding.source.line == line_of("gan-step"), (first_bad, finding)


def _gan(kind: type[Trainer], first_bad: int) -> Outcome:
    from safetrain.autopsy import AutopsyGuard
    from safetrain.findings import Report

    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"gen": nn.Linear(3, 4), "critic": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))}
    )
    optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3) for name, part in model.items()}
    report = Report()
    guard = AutopsyGuard(report, screen=first_bad == 1)  # without a record the step is found in the source
    trainer = kind(model, optimizers, max_epochs=1, guards="off", callbacks=[guard])
    error = None
    try:
        trainer.fit([torch.randn(5, 4) for _ in range(3)])
    except RuntimeError as caught:
        error = caught
    return Outcome(report, error, trainer)


def test_a_buffer_that_the_second_forward_updates() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6))
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(x.pow(2).mean(0), alpha=0.1)  # buffer-changed
            return (x * self.w.sum(0)) / self.scale

    model = Normed()
    both = lambda m, b: m(b[0]).mean() - m(b[0] + 1).mean()  # noqa: E731
    finding = run(model, both, regression()).only("G122")
    assert (
        finding.holder == "buffer `scale`"
        and finding.source is not None
        and finding.source.line == line_of("buffer-changed")
    )
    assert run(model, lambda m, b: m(b[0]).mean(), regression()).codes == []


def test_without_record_or_replay_the_cause_is_inferred_and_says_so() -> None:
    model, x = Gate(), torch.randn(8, 6)
    loss = model(x).mean()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    finding = explain(caught.value, model=model)
    assert finding is not None and finding.code == "G122" and "inferred" in (finding.cause or "")


# ---------------------------------------------------------------------- G121


class Stateful(nn.Module):
    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 1)
        self.memory: Tensor | None = None
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        out, memory = self.rnn(x, self.memory)
        self.memory = memory  # memory-kept
        if self.fixed:
            self.memory = memory.detach()
        return self.head(out[:, -1])


def test_a_hidden_state_kept_on_the_module() -> None:
    batches = [torch.randn(2, 4, 3) for _ in range(3)]
    finding = run(Stateful(), lambda m, x: m(x).mean(), batches).only("G121")
    assert finding.first_step == 2 and "memory" in (finding.holder or "")
    assert finding.source is not None and finding.source.line == line_of("memory-kept")
    assert run(Stateful(fixed=True), lambda m, x: m(x).mean(), batches).codes == []


def test_features_computed_once_before_the_loop() -> None:
    model = MLP()
    x = torch.randn(20, 6)
    features = torch.tanh(model.body(x))  # features-made

    def loss_of(m: nn.Module, index: Tensor) -> Tensor:
        return m.head(features[index]).mean()  # type: ignore[operator, union-attr]

    finding = run(model, loss_of, [torch.randperm(20)[:5] for _ in range(3)]).only("G121")
    assert finding.first_step == 2
    assert finding.source is not None and finding.source.line == line_of("features-made")
    assert "features" in (finding.holder or "")


def test_one_loss_differentiated_twice_by_hand() -> None:
    model = MLP()
    loss = mse(model, regression(1)[0])
    loss.backward()  # first-backward
    with pytest.raises(RuntimeError) as caught:
        loss.backward()  # second-backward
    finding = explain(caught.value, model=model)
    assert finding is not None and finding.code == "G121"
    assert finding.source is not None and finding.source.line == line_of("second-backward")
    assert f"line {line_of('first-backward')}" in finding.message


def test_two_losses_that_share_their_features() -> None:
    model = MLP()
    hidden = torch.tanh(model.body(torch.randn(4, 6)))  # shared-features
    first, second = model.head(hidden).mean(), model.head(hidden * 2).pow(2).mean()
    first.backward()
    with pytest.raises(RuntimeError) as caught:
        second.backward()
    finding = explain(caught.value, model=model)
    assert finding is not None and finding.code == "G121" and "hidden" in (finding.holder or "")
    assert finding.source is not None and finding.source.line == line_of("shared-features")


# ---------------------------------------------------------------------- G123, G124


@pytest.mark.parametrize("from_step", [1, 2])
def test_a_loss_from_argmax_has_its_cut_named(from_step: int) -> None:
    calls = []

    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        scores = m(batch[0])
        if len(calls) < from_step:
            return scores.mean()
        best = scores.argmax(1)  # argmax-cut
        return (best.float() - batch[1][:, 0]).pow(2).mean()

    finding = run(MLP(), loss_of, regression()).only("G123")
    assert finding.op == "argmax" and finding.source is not None and finding.source.line == line_of("argmax-cut")


def test_a_loss_from_a_detached_output() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = m(batch[0]).detach()  # detach-cut
        return F.mse_loss(out, batch[1])

    finding = run(MLP(), loss_of, regression()).only("G123")
    assert finding.source is not None and finding.source.line == line_of("detach-cut")


def test_a_loss_rebuilt_from_numbers() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = sum(F.mse_loss(m(x), y).item() for x, y in [batch])  # item-cut
        return torch.tensor(total, requires_grad=False)

    finding = run(MLP(), loss_of, regression()).only("G123")
    assert finding.source is not None and finding.source.line == line_of("item-cut")


def test_a_forward_inside_a_no_grad_block() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():  # no-grad-block
            out = m(batch[0])
        return F.mse_loss(out, batch[1])

    finding = run(MLP(), loss_of, regression()).only("G123")
    assert finding.source is not None and finding.source.line == line_of("no-grad-block")


def _normalise(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)  # switched-off
    return x - x.mean(0)


def test_a_helper_that_switches_gradients_off_for_good() -> None:
    finding = run(MLP(), lambda m, b: F.mse_loss(m(_normalise(b[0])), b[1]), regression()).only("G123")
    assert finding.source is not None and finding.source.line == line_of("switched-off")


def test_a_model_that_is_frozen_throughout() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    finding = run(model, mse, regression(), optimizer).only("G123")
    assert "no parameter" in finding.message


def test_a_loss_that_was_never_reduced() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0]), batch[1], reduction="none")  # unreduced

    finding = run(MLP(), loss_of, regression()).only("G124")
    assert finding.source is not None and finding.source.line == line_of("unreduced")
    assert "[8, 1]" in finding.message


# ---------------------------------------------------------------------- G125


@pytest.mark.parametrize("kind", ["method", "operator", "index"])
def test_a_parameter_written_while_gradients_are_recorded(kind: str) -> None:
    class Clamped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "method":
                self.body.weight.clamp_(-1, 1)  # leaf-method
            elif kind == "operator":
                self.body.weight *= 0.9  # leaf-operator
            else:
                self.body.weight[0] = 0.0  # leaf-index
            return super().forward(x)

    finding = run(Clamped(), mse, regression()).only("G125")
    assert finding.params == ["body.weight"]
    assert finding.source is not None and finding.source.line == line_of(f"leaf-{kind}")


def test_clamping_under_no_grad_is_fine() -> None:
    class Clamped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.body.weight.clamp_(-1, 1)
            return super().forward(x)

    assert run(Clamped(), mse, regression()).codes == []


# ---------------------------------------------------------------------- G126


class Counting(nn.Module):
    """Does something else at every second call, so a recomputation is not the forward over again."""

    def __init__(self, extra: nn.Module) -> None:
        super().__init__()
        self.first, self.extra, self.last, self.calls = nn.Linear(6, 6), extra, nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        if self.calls % 2:
            return self.last(x)
        return self.last(self.extra(x))  # other-branch


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 6), block, nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))


def test_a_checkpointed_block_whose_recomputation_saves_other_shapes() -> None:
    wider = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    finding = run(Checkpointed(Counting(wider)), mse, regression()).only("G126")
    assert finding.severity == "error" and finding.module == "block"
    assert finding.source is not None and finding.source.line == line_of("other-branch")


# ---------------------------------------------------------------------- G127


def test_a_cache_filled_by_an_evaluation_in_inference_mode() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(6, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, 6)  # cache-filled
            return self.lin(x) * self.table[:1]

    model = Positions()
    with torch.inference_mode():
        model(torch.randn(2, 6))
    finding = run(model, mse, regression()).only("G127")
    assert finding.source is not None and finding.source.line == line_of("cache-filled")
    assert "table" in (finding.holder or "")


# ---------------------------------------------------------------------- the error itself


def test_the_error_is_the_users_own_with_the_explanation_attached() -> None:
    error = run(Gate(), mse, regression()).error
    assert isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
    if sys.version_info >= (3, 11):
        assert any("G122" in note for note in error.__notes__)
    else:
        assert "G122" in str(error)


def test_errors_of_another_kind_are_left_alone() -> None:
    outcome = run(MLP(), lambda m, b: m(b[1]), regression())
    assert outcome.codes == [] and "shapes" in str(outcome.error)
    assert not getattr(outcome.error, "__notes__", [])


def test_explaining_leaves_the_model_as_it_was() -> None:
    model = Gate(from_step=3)
    outcome = run(model, mse, regression(6))
    assert outcome.codes == ["G122"] and model.calls == 3
    assert all(p._version == 3 for p in model.parameters())  # made, and two steps were taken
    assert model.body.weight.grad is None  # the failed backward never came so far, and neither did the replay


def test_an_explanation_that_fails_still_names_rule_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.rules.autopsy.inplace._first_changed", lambda failure: 1 / 0)
    model = Gate()
    with pytest.raises(RuntimeError) as caught:
        mse(model, regression(1)[0]).backward()  # unexplained
    finding = explain(caught.value, model=model)
    assert finding is not None and finding.code == "G122" and "ZeroDivisionError" in (finding.cause or "")
    assert finding.source is not None and finding.source.line == line_of("unexplained")
