"""Wrong results that raise no error: planted and found in the first step; and innocent programs that look like them."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autopsy_cases import KINDS, MLP, line_of, mse, regression, run
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from safetrain.autopsy import Screen
from safetrain.recording.recorder import Recorder, Watcher

# ---------------------------------------------------------------------- G129

needs_columns = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell which expression runs")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Residual(nn.Module):
    """A block that begins with an activation; `inplace` makes the skip path carry the activated value."""

    def __init__(self, branch: nn.Module, how: str) -> None:
        super().__init__()
        self.branch, self.how = branch, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "two lines":
            out = self.branch(x)  # skip-two-lines
            return out + x
        if self.how == "one line":
            return x + self.branch(x)  # skip-one-line
        if self.how == "rebound":
            x = x + self.branch(x)  # skip-rebound
            return x
        x += self.branch(x)  # skip-augmented
        return x


@needs_columns
@pytest.mark.parametrize("how", ["two lines", "one line", "rebound", "augmented"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_an_inplace_activation_that_changes_the_skip_input(how: str, options: dict[str, Any]) -> None:
    def model(inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        branch = nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        if how == "augmented" and not inplace:
            branch[0] = nn.Tanh()  # which saves its result and not its input, as the addition to it is in place
        return nn.Sequential(nn.Linear(6, 8), Residual(branch, how), nn.Linear(8, 1))

    outcome = run(model(True), mse, regression(2), **options)
    if how == "augmented":
        assert outcome.codes == ["G129", "G122"]  # here torch notices as well
        outcome.findings.pop()
    finding = outcome.only("G129")
    assert finding.source is not None and finding.source.line == line_of(f"skip-{how.replace(' ', '-')}")
    assert finding.module == "1.branch.0" and finding.op == "relu_"
    assert run(model(False), mse, regression(2), **options).codes == []


@needs_columns
def test_a_preactivation_unit_of_a_conv_net() -> None:
    class Unit(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(4), nn.LeakyReLU(0.1, inplace=inplace)
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            skip = self.norm(x)
            out = self.act(skip)  # unit-changed
            out = self.conv(out)
            return out + skip

    def model(inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), Unit(inplace), nn.Flatten(), nn.LazyLinear(1))

    batches = [torch.randn(2, 1, 5, 5)]
    bad, good = model(True), model(False)
    for m in (bad, good):
        m(batches[0])
    finding = run(bad, lambda m, x: m(x).mean(), batches).only("G129")
    assert finding.source is not None and finding.source.line == line_of("unit-changed")
    assert run(good, lambda m, x: m(x).mean(), batches).codes == []


@needs_columns
def test_features_kept_in_a_list_and_then_activated_in_place() -> None:
    """Taps of a feature extractor: what is kept is not the layer's output any more."""

    class Taps(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Linear(6, 8), nn.ELU(inplace=inplace), nn.Linear(8, 8), nn.ELU(inplace=inplace)]
            )

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.layers:
                x = layer(x)  # taps-changed
                if isinstance(layer, nn.Linear):
                    kept.append(x)
            return torch.cat(kept, 1)

    finding = run(Taps(True), lambda m, b: m(b[0]).mean(), regression(1)).only("G129")
    assert finding.source is not None and finding.source.line == line_of("taps-changed")
    assert "kept" in (finding.holder or "")
    assert run(Taps(False), lambda m, b: m(b[0]).mean(), regression(1)).codes == []


@needs_columns
def test_two_forwards_of_an_input_that_the_first_one_overwrites() -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        first = m(x)  # input-changed
        second = m(x)
        return (first - second).pow(2).mean() + first.mean()

    class Noisy(MLP):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=inplace)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x) * 1.0)

    finding = run(Noisy(True), loss_of, regression(1)).only("G129")
    assert finding.source is not None and finding.source.line == line_of("input-changed")
    assert run(Noisy(False), loss_of, regression(1)).codes == []


@needs_columns
def test_attention_scores_scaled_in_place_and_returned_unscaled() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, -1)
            raw = q @ k.transpose(1, 2)
            scaled = raw.div_(8**0.5)  # scores-changed
            return scaled.softmax(-1) @ x + raw.mean()

    finding = run(Attention(), lambda m, x: m(x).mean(), [torch.randn(2, 4, 8)]).only("G129")
    assert finding.source is not None and finding.source.line == line_of("scores-changed")


# ---------------------------------------------------------------------- innocent in-place code


def _relu_chain(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h = F.relu(h, inplace=True)
    return h + h.mean()  # h means the activated value: it was bound again


def _bare_statement(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h.relu_()
    return h + h.mean()


def _fresh_sum(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    total = torch.zeros_like(h)
    total += h
    total.add_(h)
    return total * h


def _positions(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h += torch.linspace(0, 1, h.shape[1])
    return h * 2


def _masked(x: Tensor, w: Tensor) -> Tensor:
    scores = x @ w
    scores.masked_fill_(scores < 0, -1e9)
    return scores.softmax(-1)


def _nested(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.dropout(x @ w, 0.2, inplace=True), inplace=True)


def _helper(t: Tensor) -> Tensor:
    return t.clamp_(-3, 3)


def _called_twice(x: Tensor, w: Tensor) -> Tensor:
    h = _helper(x @ w)
    h = _helper(h + 1)
    return h * h.mean()


def _branches(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    outs = [h.clamp_(-1, 1) * k for k in range(3)]  # each branch begins with the same idempotent operation
    return torch.stack(outs).sum(0)


def _unchanged_value(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).pow(2)
    out = F.relu(h, inplace=True) * 1.0  # h had no negative value: nothing changed
    return out + h


def _conditional(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h = h.tanh_() if h.shape[0] > 100 else F.leaky_relu(h, 0.1, inplace=True)
    return h * 2 + h


def _lists(x: Tensor, w: Tensor) -> Tensor:
    states = []
    h = x @ w
    for _ in range(3):
        h = F.relu(h, inplace=True)
        states.append(h)
        h = h @ w.T @ w
    return torch.stack(states).sum(0)


def _shape_of_the_old_name(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    out = F.relu(h, inplace=True)
    return out.view(h.shape[0], h.size(1)) * torch.ones(h.shape)


def _data_noise(x: Tensor, w: Tensor) -> Tensor:
    noisy = x.add_(0.01)
    return noisy @ w + x.mean()


@pytest.mark.parametrize(
    "body",
    [
        _relu_chain, _bare_statement, _fresh_sum, _positions, _masked, _nested, _called_twice, _branches,
        _unchanged_value, _conditional, _lists, _shape_of_the_old_name, _data_noise,
    ],
)  # fmt: skip
def test_inplace_code_that_is_right_is_not_accused(body: Any) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return body(x, self.w)

    outcome = run(Body(), lambda m, b: m(b[0]).pow(2).mean(), regression(2))
    assert outcome.error is None and outcome.codes == [], [f.message for f in outcome.findings]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"precision": "bf16"}])
def test_healthy_models_are_not_accused(kind: str, options: dict[str, Any]) -> None:
    make, data, loss_of = KINDS[kind]
    outcome = run(make(), loss_of, data(), **options)
    assert outcome.error is None and outcome.codes == []


def test_stop_gradients_by_design_are_not_accused() -> None:
    """A self-supervised target, a straight-through estimate, a detached advantage, an accuracy beside the loss."""

    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = m.body(batch[0])  # type: ignore[operator, union-attr]
        hard = z.round() + z - z.detach()
        advantage = (batch[1] - m.head(hard)).detach()  # type: ignore[operator, union-attr]
        accuracy = (m(batch[0]).argmax(1) == 0).float().mean()
        assert accuracy.grad_fn is None
        return F.mse_loss(m.head(hard), batch[1]) + (z * z.flip(0).detach()).mean() + (advantage * m(batch[0])).mean()  # type: ignore[operator, union-attr]

    assert run(MLP(), loss_of, regression()).codes == []


# ---------------------------------------------------------------------- G128


@pytest.mark.parametrize("how", ["data", "assigned"])
def test_weights_changed_behind_autograd_between_forward_and_backward(how: str) -> None:
    def loss_of(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = mse(m, batch)
        if how == "data":
            m.head.weight.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr, operator]  # silent-data
        else:
            m.head.weight.data = m.head.weight.data * 0.5  # type: ignore[union-attr, operator]
        return loss

    outcome = run(MLP(), loss_of, regression(2))
    finding = outcome.only("G128")
    assert finding.params == ["head.weight"]
    if how == "data":
        assert finding.source is not None and finding.source.line == line_of("silent-data")


def test_an_activation_changed_through_data() -> None:
    class Bad(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            out = self.head(h * h)
            h.data.mul_(0.5)  # silent-activation
            return out

    finding = run(Bad(), mse, regression(2)).only("G128")
    assert finding.source is not None and finding.source.line == line_of("silent-activation")


def test_writes_before_the_forward_or_after_backward_are_fine() -> None:
    class Clipped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.head.weight.data.clamp_(-1, 1)
            return super().forward(x)

    assert run(Clipped(), mse, regression(3)).codes == []


def test_buffers_moved_by_the_forward_are_fine() -> None:
    """BatchNorm in two forwards, a power iteration that clones, an EMA teacher: none of it is a silent write."""

    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Linear(8, 1)
            )
            self.teacher = copy.deepcopy(self.net[2]).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.net[2].parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            return self.net(x) - self.net(x + 1)

    assert run(Busy(), mse, regression(3)).codes == []


# ---------------------------------------------------------------------- G126


class Dropped(nn.Module):
    def __init__(self, keep: bool, reentrant: bool = False, functional: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.keep, self.reentrant, self.functional = keep, reentrant, functional

    def _noisy(self, h: Tensor) -> Tensor:
        return F.dropout(self.block[0](h), 0.5) * 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        run_block = self._noisy if self.functional else self.block
        h = checkpoint(run_block, h, use_reentrant=self.reentrant, preserve_rng_state=self.keep)  # rng-lost
        return self.head(h)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_a_recomputation_with_other_dropout_masks(reentrant: bool, functional: bool, options: dict[str, Any]) -> None:
    finding = run(Dropped(False, reentrant, functional), mse, regression(), **options).only("G126")
    assert finding.source is not None and finding.source.line == line_of("rng-lost") and finding.severity == "warning"
    assert run(Dropped(True, reentrant, functional), mse, regression(), **options).codes == []


class HandWritten(torch.autograd.Function):
    """Recomputes in backward and forgets the generator."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)  # hand-forward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        grads = torch.autograd.grad(out, (x, *ctx.block.parameters()), grad)
        return None, *grads


def test_a_hand_written_recomputation_with_other_masks() -> None:
    class Net(nn.Module):
        def __init__(self, drop: float) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(drop))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(HandWritten.apply(self.block, self.stem(x), *self.block.parameters()))

    finding = run(Net(0.5), mse, regression(2)).only("G126")
    assert finding.module == "block.1"
    assert run(Net(0.0), mse, regression(2)).codes == []


def test_gradient_noise_in_a_hook_is_not_a_recomputation() -> None:
    model = MLP()
    model.body.weight.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
    assert run(model, mse, regression(2)).codes == []


@pytest.mark.parametrize("how", ["another layer", "another factor", "the same"])
def test_a_recomputation_that_does_something_else_unnoticed(how: str) -> None:
    """Same number and shapes of saved tensors, so torch says nothing; gradients are those of other values."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = torch.tanh(self.a(x))
            if how == "another factor":
                h = h * self.calls  # other-factor
            if how == "another layer" and self.calls % 2 == 0:
                return self.c(torch.tanh(self.b(h)))  # other-layer
            return self.b(torch.tanh(self.c(h)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(6, 6), Sometimes(), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))

    outcome = run(Net(), mse, regression(2))
    if how == "the same":
        assert outcome.codes == []
        return
    finding = outcome.only("G126")
    assert finding.source is not None and finding.source.line == line_of(
        how.replace("another", "other").replace(" ", "-")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_models_are_not_accused(kind: str) -> None:
    make, data, loss_of = KINDS[kind]

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    for options in ({}, {"precision": "bf16"}):
        outcome = run(Wrapped(), loss_of, data(), **options)
        assert outcome.error is None and outcome.codes == [], [f.message for f in outcome.findings]


# ---------------------------------------------------------------------- the screen itself


def _one_step(model: nn.Module, loss_of: Any, batch: Any, *, screened: bool, amp: bool = False) -> list[Tensor]:
    torch.manual_seed(3)
    screen = Screen(model) if screened else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if screen is not None:
        screen.start()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = loss_of(model, batch)
    if screen is not None:
        screen.before_backward(loss)
    loss.backward()
    optimizer.step()
    if screen is not None:
        assert screen.stop()
        assert screen.findings() == []
        assert len(screen.record.ops) > 5
    return [
        loss.detach(),
        *model.state_dict().values(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amp", [False, True])
def test_a_screened_step_gives_the_same_bits(kind: str, amp: bool) -> None:
    make, data, loss_of = KINDS[kind]
    torch.manual_seed(0)
    first = make()
    second, batch = copy.deepcopy(first), data()[0]
    bare = _one_step(first, loss_of, batch, screened=False, amp=amp)
    screened = _one_step(second, loss_of, batch, screened=True, amp=amp)
    assert len(bare) == len(screened)
    assert all(torch.equal(a, b) for a, b in zip(bare, screened, strict=True))


def test_a_record_keeps_no_tensor_alive() -> None:
    made: list[weakref.ref[Tensor]] = []

    class Watched(MLP):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            made.append(weakref.ref(h))
            return self.head(h)

    model = Watched()
    screen = Screen(model)
    screen.start()
    loss = mse(model, regression(1)[0])
    screen.before_backward(loss)
    loss.backward()
    screen.stop()
    screen.findings()
    del loss
    gc.collect()
    assert made[0]() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_stays_compiled_through_a_screened_step() -> None:
    model = nn.Sequential(nn.Linear(6, 6), MLP())
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model[1].compile(backend=backend)
    outcome = run(model, mse, regression(3))
    assert outcome.error is None and outcome.codes == [] and compiled


def test_another_dispatch_mode_left_on_does_not_break_the_stack() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = MLP(), regression(1)[0]
    screen = Screen(model)
    screen.start()
    counter = FlopCounterMode(display=False)
    counter.__enter__()
    mse(model, batch).backward()
    assert not screen.stop()
    counter.__exit__(None, None, None)
    assert screen.stop()
    assert counter.get_total_flops() > 0


def test_a_fault_of_the_record_is_not_one_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Watcher):
        def before(self, *args: Any) -> None:
            raise ValueError("a bug of ours")

    model, batch = MLP(), regression(1)[0]
    with Recorder(model, watchers=[Broken()]) as record:
        mse(model, batch).backward()
    assert record.failed and model.body.weight.grad is not None
    assert "a bug of ours" in caplog.text


def test_the_screen_is_over_when_the_first_step_breaks_off() -> None:
    def loss_of(m: nn.Module, batch: Any) -> Tensor:
        raise KeyError("the user's own")

    outcome = run(MLP(), loss_of, regression(1))
    assert isinstance(outcome.error, KeyError) and outcome.codes == []
    assert _get_current_dispatch_mode() is None
