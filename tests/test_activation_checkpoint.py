"""Recomputing modules: the same gradients bit for bit, buffers updated once, clear words for a wrong pattern."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from safetrain import activation_checkpoint
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.errors import ConfigError


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = norm(2 * width)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(torch.relu(self.norm(self.up(x)))))


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(8, norm) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def _net(seed: int = 0, norm: type[nn.Module] = nn.BatchNorm1d) -> Net:
    torch.manual_seed(seed)
    return Net(norm)


def _twins(patterns: tuple[str, ...] = ("blocks.*",), **options: bool) -> tuple[Net, Net]:
    plain = _net()
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(patterns, **options))
    return plain, recomputing


def _train(model: nn.Module, steps: int = 4, precision: torch.dtype | None = None) -> list[torch.Tensor]:
    """Every gradient of every step, in order; weights move, so that a wrong step shows later too."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == torch.float16)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            loss = model(torch.randn(16, 6)).square().mean()
        scaler.scale(loss).backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
    return gradients


def _saved_bytes(model: nn.Module) -> int:
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(64, 6))
    return sum(sizes)


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_gradients_and_statistics_are_bit_equal_under_dropout_and_batchnorm(precision: torch.dtype | None) -> None:
    plain, recomputing = _twins()
    for expected, actual in zip(
        _train(plain, precision=precision), _train(recomputing, precision=precision), strict=True
    ):
        assert torch.equal(expected, actual)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, recomputing.get_buffer(name)), name
    assert int(recomputing.blocks[0].norm.num_batches_tracked) == 4


def test_activations_inside_are_not_kept() -> None:
    plain, recomputing = _twins()
    assert _saved_bytes(recomputing) < 0.5 * _saved_bytes(plain)


def test_evaluation_without_gradients_runs_the_module_as_it_is() -> None:
    plain, recomputing = _twins()
    x = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), recomputing.eval()(x))


def test_a_module_in_eval_mode_still_recomputes_when_gradients_flow_through_it() -> None:
    plain, recomputing = _twins()
    plain.eval(), recomputing.eval()
    assert _saved_bytes(recomputing) < 0.6 * _saved_bytes(plain)
    for expected, actual in zip(_train(plain), _train(recomputing), strict=True):
        assert torch.equal(expected, actual)


def test_state_dict_names_do_not_change_and_load_both_ways() -> None:
    plain, recomputing = _twins()
    assert list(plain.state_dict()) == list(recomputing.state_dict())
    plain.load_state_dict(recomputing.state_dict())
    recomputing.load_state_dict(plain.state_dict())


def test_a_copy_runs_its_own_parameters() -> None:
    _, recomputing = _twins()
    _train(recomputing, steps=1)
    twin = copy.deepcopy(recomputing)
    with torch.no_grad():
        for parameter in recomputing.blocks.parameters():
            parameter.zero_()
    twin(torch.randn(4, 6)).sum().backward()
    assert twin.blocks[0].up.weight.grad.abs().sum() > 0
    assert recomputing.blocks[0].up.weight.grad is not twin.blocks[0].up.weight.grad
    assert activation_checkpoint.applied(twin) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_whole_model_can_be_pickled() -> None:
    _, recomputing = _twins()
    file = io.BytesIO()
    torch.save(recomputing, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    x = torch.randn(4, 6)
    assert torch.equal(back.eval()(x), recomputing.eval()(x))
    pickle.dumps(back)


def test_undo_restores_the_plain_forward() -> None:
    plain, recomputing = _twins()
    activation_checkpoint.undo(recomputing)
    assert activation_checkpoint.applied(recomputing) == []
    assert _saved_bytes(recomputing) == _saved_bytes(plain)
    assert "forward" not in vars(recomputing.blocks[0])


def test_a_forward_that_was_set_on_the_instance_comes_back() -> None:
    net = _net()
    net.blocks[0].forward = lambda x, scale: x * scale  # type: ignore[method-assign]
    patched = net.blocks[0].forward
    activation_checkpoint.apply(net, CheckpointOptions(("blocks.0",)))
    x = torch.randn(4, 8, requires_grad=True)
    assert torch.equal(net.blocks[0](x, scale=2.0), 2 * x)
    activation_checkpoint.undo(net)
    assert net.blocks[0].forward is patched


def test_nested_matches_recompute_once_at_the_outermost() -> None:
    net = _net()
    assert activation_checkpoint.apply(net, CheckpointOptions(("blocks*", "stem"))) == [
        "stem",
        "blocks.0",
        "blocks.1",
        "blocks.2",
    ]


def test_a_retained_graph_can_be_differentiated_twice() -> None:
    plain, recomputing = _twins()
    results = []
    for model in (plain, recomputing):
        torch.manual_seed(3)
        loss = model(torch.randn(8, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_gradient_penalty_through_recomputed_modules_is_bit_equal() -> None:
    plain, recomputing = _twins()
    results = []
    for model in (plain, recomputing):
        torch.manual_seed(3)
        x = torch.randn(8, 6, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Counter(nn.Module):
    """Its output depends on a buffer that every training forward replaces or writes."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls.add_(1)
        return torch.tanh(self.linear(x) * self.calls * self.mask)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_the_forward_reads_and_updates_is_rewound_for_recomputation(replaces: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Counter(replaces), nn.Linear(4, 1))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("0",)))
    x = torch.randn(3, 4)
    for _ in range(3):
        for model in (plain, recomputing):
            model(x).sum().backward()
    assert float(recomputing[0].calls) == 3
    for expected, actual in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(expected.grad, actual.grad)


class Annealed(nn.Module):
    """Counts its calls in an attribute, keeps a tensor in another, and computes from both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.layer(x) * (1 + 0.1 * self.calls)
        self.mean = 0.9 * getattr(self, "mean", torch.zeros(())) + h.detach().mean()
        return torch.tanh(h - self.mean)


@pytest.mark.parametrize("mode", ["recompute", "selective"])
def test_attributes_that_the_forward_reads_and_sets_are_rewound_for_recomputation(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), Annealed(), nn.Sequential(Annealed(), nn.Linear(6, 6)), nn.Linear(6, 2))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("1", "2"), mode=mode))
    for expected, actual in zip(_train(plain), _train(recomputing), strict=True):
        assert torch.equal(expected, actual)
    assert (plain[1].calls, plain[2][0].calls) == (recomputing[1].calls, recomputing[2][0].calls) == (4, 4)
    assert torch.equal(plain[1].mean, recomputing[1].mean)


@pytest.mark.parametrize("mode", ["recompute", "selective"])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_random_numbers_that_are_drawn_after_they_are_saved_are_repeated(shape: tuple[int, ...], mode: str) -> None:
    """RReLU is the last operation of the module that needs anything saved."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.RReLU(), nn.Unflatten(1, shape), nn.Flatten())
    plain = nn.Sequential(nn.Linear(6, 8), part, nn.Linear(8, 2))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("1",), mode=mode))  # type: ignore[arg-type]
    for expected, actual in zip(_train(plain), _train(recomputing), strict=True):
        assert torch.equal(expected, actual)


def test_a_buffer_that_an_evaluation_replaced_under_inference_mode() -> None:
    plain = nn.Sequential(nn.Linear(6, 4), Counter(replaces=True), nn.Linear(4, 2))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("1",)))
    for model in (plain, recomputing):
        with torch.inference_mode():
            model(torch.ones(2, 6))
    for expected, actual in zip(_train(plain), _train(recomputing), strict=True):
        assert torch.equal(expected, actual)


def test_spectral_norm_takes_one_power_iteration_a_step() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()), nn.Linear(4, 1))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("0",)))
    x = torch.randn(3, 4)
    for _ in range(3):
        for model in (plain, recomputing):
            model(x).sum().backward()
    expected, actual = ([*m.buffers(), *(p.grad for p in m.parameters())] for m in (plain, recomputing))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_a_module_called_twice_in_a_forward_updates_its_statistics_twice() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleDict({"tower": Block(6)})
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("tower",)))
    for model in (plain, recomputing):
        torch.manual_seed(1)
        tower = model["tower"]
        (tower(torch.randn(5, 6)) * tower(torch.randn(5, 6))).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), recomputing.buffers(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True))


def test_wrong_patterns_and_settings_say_what_to_write() -> None:
    net = _net()
    with pytest.raises(ConfigError, match=r"`block\.0` matches no module of Net; near names: `blocks\.0`"):
        activation_checkpoint.apply(net, CheckpointOptions(("block.0",)))
    with pytest.raises(ConfigError, match=r"`blocks` matches `blocks`, a ModuleList.*`blocks\.\*`"):
        activation_checkpoint.apply(net, CheckpointOptions("blocks"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no pattern given"):
        activation_checkpoint.as_options([])
    with pytest.raises(ConfigError, match=r"`blocks\.0\.drop` \(Dropout\) drops at random"):
        activation_checkpoint.apply(net, CheckpointOptions(("blocks.*",), preserve_rng_state=False))
    assert activation_checkpoint.applied(net) == []


def test_without_dropout_the_random_state_need_not_be_kept() -> None:
    net = _net(norm=nn.LayerNorm)
    for block in net.blocks:
        block.drop = nn.Identity()
    plain = copy.deepcopy(net)
    activation_checkpoint.apply(net, CheckpointOptions(("blocks.*",), preserve_rng_state=False))
    assert all(torch.equal(a, b) for a, b in zip(_train(plain), _train(net), strict=True))
