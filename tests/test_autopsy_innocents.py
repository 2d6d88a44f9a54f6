"""Unusual but right programs: the screen of the first step accuses none of them and changes none of their bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from safetrain.autopsy import Screen

Program = Callable[[Callable[[Tensor], None]], Any]
"""Runs one step; calls its argument before each backward and returns what must not change."""


def _params(*modules: nn.Module) -> list[Tensor]:
    return [t for m in modules for t in m.state_dict().values()]


class BasicBlock(nn.Module):
    """ResNet: in-place activations after BatchNorm and after the addition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


def resnet(before: Any) -> Any:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), BasicBlock(4), BasicBlock(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = model(torch.randn(3, 1, 8, 8)).pow(2).mean()
    before(loss)
    loss.backward()
    opt.step()
    return _params(model)


def densenet(before: Any) -> Any:
    class Layer(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.norm, self.act, self.conv = nn.BatchNorm2d(n), nn.ReLU(inplace=True), nn.Conv2d(n, 2, 3, padding=1)

        def forward(self, features: list[Tensor]) -> Tensor:
            return self.conv(self.act(self.norm(torch.cat(features, 1))))

    layers = nn.ModuleList(Layer(2 + 2 * i) for i in range(3))
    features = [torch.randn(2, 2, 6, 6)]
    for layer in layers:
        features.append(layer(features))
    loss = torch.cat(features, 1).mean()
    before(loss)
    loss.backward()
    return [p.grad for p in layers.parameters()]


def unet(before: Any) -> Any:
    down = nn.ModuleList([nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.SiLU(inplace=True)) for _ in range(1)])
    up = nn.Conv1d(6, 2, 3, padding=1)
    x = torch.randn(2, 2, 8)
    skips = []
    h = x
    for block in down:
        skips.append(h)
        h = block(h)
    h = torch.cat([h, skips.pop()], 1)
    loss = F.mse_loss(up(h), x)
    before(loss)
    loss.backward()
    return [p.grad for p in (*down.parameters(), *up.parameters())]


def vq_vae(before: Any) -> Any:
    enc, dec = nn.Linear(6, 4), nn.Linear(4, 6)
    codes, counts = torch.randn(8, 4), torch.ones(8)
    x = torch.randn(16, 6)
    z = enc(x)
    index = torch.cdist(z, codes).argmin(1)
    q = codes[index]
    with torch.no_grad():
        hot = F.one_hot(index, 8).float()
        counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        codes.mul_(0.9).add_((hot.T @ z) / (hot.sum(0)[:, None] + 1e-5), alpha=0.1)
    straight = z + (q - z).detach()
    loss = F.mse_loss(dec(straight), x) + 0.25 * F.mse_loss(z, q.detach())
    before(loss)
    loss.backward()
    return [*_params(enc, dec), codes, counts, enc.weight.grad]


def gan(before: Any) -> Any:
    gen, disc = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1))
    opt_g, opt_d = torch.optim.Adam(gen.parameters()), torch.optim.Adam(disc.parameters())
    real, fake = torch.randn(5, 4), gen(torch.randn(5, 3))
    d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
    before(d_loss)
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    g_loss = F.softplus(-disc(fake)).mean()
    before(g_loss)
    g_loss.backward()
    opt_g.step()
    for p in disc.parameters():
        p.data.clamp_(-0.5, 0.5)
    return _params(gen, disc)


def gradient_penalty(before: Any) -> Any:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    mix = torch.randn(6, 4).requires_grad_()
    (g,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    loss = (g.norm(dim=1) - 1).pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for p in critic.parameters()]


def truncated_backprop(before: Any) -> Any:
    rnn, head = nn.LSTM(3, 5), nn.Linear(5, 1)
    opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
    state: Any = None
    for _ in range(3):
        out, state = rnn(torch.randn(4, 2, 3), state)
        state = tuple(s.detach() for s in state)
        loss = head(out).pow(2).mean()
        before(loss)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return _params(rnn, head)


def checkpointed_batchnorm_held_still(before: Any) -> Any:
    class Held(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() == -1:
                return super().forward(x)
            keep, self.momentum = self.momentum, 0.0
            out = super().forward(x)
            self.momentum = keep
            self.num_batches_tracked -= 1
            return out

    block, head = nn.Sequential(nn.Linear(4, 8), Held(8), nn.ReLU(inplace=True), nn.Dropout(0.3)), nn.Linear(8, 1)
    x = torch.randn(6, 4)
    loss = head(checkpoint(block, x, use_reentrant=False)).pow(2).mean()
    before(loss)
    loss.backward()
    return [*_params(block, head), block[0].weight.grad]


def nested_and_autocast_checkpoints(before: Any) -> Any:
    inner, outer, head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def outer_fn(h: Tensor) -> Tensor:
        h = checkpoint(lambda t: F.gelu(inner(t)), h, use_reentrant=False)
        return F.dropout(outer(h), 0.2)

    with torch.autocast("cpu", torch.bfloat16):
        h = checkpoint(outer_fn, torch.randn(4, 8).requires_grad_(), use_reentrant=False)
        loss = head(h).float().pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for m in (inner, outer, head) for p in m.parameters()]


def selective_checkpoint(before: Any) -> Any:
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Tanh())
    x = torch.randn(3, 6).requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    loss = checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum()
    before(loss)
    loss.backward()
    return [p.grad for p in block.parameters()]


def function_transforms(before: Any) -> Any:
    model = nn.Linear(4, 1)
    params = dict(model.named_parameters())

    def loss_of(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, p, (x[None],)).pow(2).sum()

    per_sample = vmap(grad(loss_of), in_dims=(None, 0))(params, torch.randn(5, 4))
    loss = model(torch.randn(5, 4)).mean()
    before(loss)
    loss.backward()
    return [*per_sample.values(), model.weight.grad]


def meta_learning(before: Any) -> Any:
    model = nn.Linear(3, 1)
    fast = dict(model.named_parameters())
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    for _ in range(2):
        inner = F.mse_loss(functional_call(model, fast, (x,)), y)
        grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
    loss = F.mse_loss(functional_call(model, fast, (x,)), y)
    before(loss)
    loss.backward()
    return [model.weight.grad]


def lbfgs(before: Any) -> Any:
    model = nn.Linear(4, 1)
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x, y = torch.randn(9, 4), torch.randn(9, 1)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        before(loss)
        loss.backward()
        return loss

    opt.step(closure)  # type: ignore[arg-type]
    return _params(model)


def sharpness_aware(before: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(9, 4), torch.randn(9, 1)
    loss = F.mse_loss(model(x), y)
    before(loss)
    loss.backward()
    steps = []
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            steps.append(0.05 * p.grad / (p.grad.norm() + 1e-12))
            p.add_(steps[-1])
    model.zero_grad()
    again = F.mse_loss(model(x), y)
    before(again)
    again.backward()
    with torch.no_grad():
        for p, step in zip(model.parameters(), steps, strict=True):
            p.sub_(step).sub_(0.1 * p.grad)  # type: ignore[operator]
    return _params(model)


def binarised_weights(before: Any) -> Any:
    """Weights are swapped before the forward and put back after backward."""
    model = nn.Linear(4, 1)
    kept = model.weight.data.clone()
    model.weight.data.sign_()
    loss = model(torch.randn(5, 4)).pow(2).mean()
    before(loss)
    loss.backward()
    model.weight.data.copy_(kept)
    return [model.weight.grad, model.weight.detach()]


def graph_network(before: Any) -> Any:
    node, edge = nn.Linear(4, 4), nn.Linear(8, 4)
    x, src, dst = torch.randn(6, 4), torch.randint(0, 6, (12,)), torch.randint(0, 6, (12,))
    h = torch.relu(node(x))
    messages = edge(torch.cat([h[src], h[dst]], 1))
    gathered = torch.zeros_like(h)
    gathered.index_add_(0, dst, messages)
    loss = (h + gathered).pow(2).mean()
    before(loss)
    loss.backward()
    return [node.weight.grad, edge.weight.grad]


def sparse_embedding(before: Any) -> Any:
    bag = nn.EmbeddingBag(20, 4, sparse=True)
    normed = nn.Embedding(20, 4, max_norm=1.0)
    opt = torch.optim.SparseAdam(list(bag.parameters()))
    index = torch.randint(0, 20, (6, 3))
    loss = bag(index).pow(2).mean() + normed(index).sum()
    before(loss)
    loss.backward()
    opt.step()
    return [*_params(bag, normed), normed.weight.grad]


def mark_dirty_function(before: Any) -> Any:
    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.add_(1.0)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> Tensor:
            return grad_out

    lin = nn.Linear(4, 4)
    h = AddOne.apply(lin(torch.randn(3, 4)))
    loss = h.mean()
    before(loss)
    loss.backward()
    return [lin.weight.grad]


def decoding_with_a_preallocated_cache(before: Any) -> Any:
    proj = nn.Linear(4, 4)
    cache = torch.zeros(5, 4)
    outs = []
    for t in range(5):
        with torch.no_grad():
            cache[t] = proj(torch.randn(4))
        outs.append(cache[: t + 1].clone().sum() * proj.bias.sum())
    loss = torch.stack(outs).sum()
    before(loss)
    loss.backward()
    return [proj.bias.grad, cache]


def distillation(before: Any) -> Any:
    student = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.2, inplace=False), nn.Linear(8, 3))
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
    with torch.inference_mode():
        soft = teacher(x).softmax(1)
    out = student(x)
    loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), soft.clone(), reduction="batchmean")
    before(loss)
    loss.backward()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.lerp_(s, 0.01)
    return [p.grad for p in student.parameters()]


def noisy_layers(before: Any) -> Any:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x) * 0.1 if self.training else x

    block = nn.Sequential(nn.Linear(4, 4), Noise(), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(4, 1))
    loss = checkpoint(block, torch.randn(6, 4).requires_grad_(), use_reentrant=False).pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for p in block.parameters()]


def stochastic_depth(before: Any) -> Any:
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(4))
    x = torch.randn(3, 4).requires_grad_()
    h = x
    for block in blocks:
        if torch.rand(()) < 0.8:
            h = h + checkpoint(block, h, use_reentrant=True)
    loss = h.pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for p in blocks.parameters()] + [x.grad]


def several_kinds_of_recomputation(before: Any) -> Any:
    """Reentrant, not reentrant, and a hand-written Function that runs its block again in backward."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, block: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.block(x)
            return None, *torch.autograd.grad(out, (x, *ctx.block.parameters()), grad_out)

    a, b, c = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    h = checkpoint(a, torch.randn(3, 4).requires_grad_(), use_reentrant=False)
    h = checkpoint(b, h, use_reentrant=True)
    h = Again.apply(c, h, *c.parameters())
    loss = checkpoint(a, h, use_reentrant=False).pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for m in (a, b, c) for p in m.parameters()]


def complex_and_views(before: Any) -> Any:
    w = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    z = torch.fft.fft(torch.randn(3, 4)) @ w
    re, im = torch.view_as_real(z).unbind(-1)
    re = re * 2
    loss = (re.pow(2) + im.pow(2)).sum()
    before(loss)
    loss.backward()
    return [w.grad]


def retained_terms_by_one_graph(before: Any) -> Any:
    body, a, b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    h = torch.tanh(body(torch.randn(5, 4)))
    first, second = a(h).pow(2).mean(), b(h).mean()
    before(first)
    first.backward(retain_graph=True)
    before(second)
    second.backward()
    return [p.grad for m in (body, a, b) for p in m.parameters()]


def weight_norms(before: Any) -> Any:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
        nn.Linear(6, 1),
    )
    loss = model(torch.randn(5, 4)).mean() - model(torch.randn(5, 4)).mean()
    before(loss)
    loss.backward()
    return [*_params(model), *(p.grad for p in model.parameters())]


def offloaded_activations(before: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.autograd.graph.save_on_cpu():
        loss = model(torch.randn(5, 4)).pow(2).mean()
    before(loss)
    loss.backward()
    return [p.grad for p in model.parameters()]


def experts_that_fill_one_output(before: Any) -> Any:
    """Each writes its rows into a tensor that is read as a whole afterwards."""
    gate, experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(12, 8)
    weight, chosen = gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for index, expert in enumerate(experts):
        rows = chosen == index
        out[rows] = weight[rows, None] * expert(x[rows])
    loss = (x + out).pow(2).mean()
    before(loss)
    loss.backward()
    return [*_params(gate, experts), gate.weight.grad]


def attack_that_replaces_data(before: Any) -> Any:
    """Each loss of the attack reads what the leaf holds by then; the loss before had read something else."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 6)
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = model(x + delta).pow(2).mean()
        before(loss)
        loss.backward()
        assert delta.grad is not None
        delta.data = (delta + 0.1 * delta.grad.sign()).clamp(-0.3, 0.3)
        delta.grad.zero_()
    return [delta.detach(), *_params(model)]


PROGRAMS: list[Program] = [
    resnet, densenet, unet, vq_vae, gan, gradient_penalty, truncated_backprop, checkpointed_batchnorm_held_still,
    nested_and_autocast_checkpoints, selective_checkpoint, function_transforms, meta_learning, lbfgs, sharpness_aware,
    binarised_weights, graph_network, sparse_embedding, mark_dirty_function, decoding_with_a_preallocated_cache,
    distillation, noisy_layers, stochastic_depth, several_kinds_of_recomputation, complex_and_views,
    retained_terms_by_one_graph, weight_norms, offloaded_activations, experts_that_fill_one_output,
    attack_that_replaces_data,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_an_innocent_program_is_neither_accused_nor_changed(program: Program) -> None:
    torch.manual_seed(1)
    bare = program(lambda loss: None)
    torch.manual_seed(1)
    screen = Screen(nn.Module())
    screen.start()
    try:
        screened = program(screen.before_backward)
    finally:
        assert screen.stop()
    assert [f"{f.code}: {f.message}" for f in screen.findings()] == []
    assert len(bare) == len(screened) and len(screen.record.ops) > 3
    for a, b in zip(bare, screened, strict=True):
        assert (a is None and b is None) or torch.equal(_dense(a), _dense(b))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
