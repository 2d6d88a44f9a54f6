"""Programs that hold graphs or tensors on purpose and within bounds: not one word about them."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graph_programs import KINDS, batches, make_model, of_graphs, train, watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 40


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def plain_loop() -> None:
    train("mlp", steps=STEPS)


def detached_loss_history() -> None:
    history: list[Tensor] = []
    train("mlp", lambda loss, out, model: history.append(loss.detach()), steps=STEPS)


def two_steps_in_locals() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last = before_last = None
    for _ in range(STEPS):
        out = model(torch.randn(4, 4))
        out.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        before_last, last = last, out
    assert before_last is not None


def short_deque_of_losses() -> None:
    recent: deque[Tensor] = deque(maxlen=8)
    train("mlp", lambda loss, out, model: recent.append(loss), steps=STEPS)


def window_trimmed_by_hand() -> None:
    recent: list[Tensor] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        recent.append(loss)
        if len(recent) > 6:
            recent.pop(0)

    train("mlp", keep, steps=STEPS)


def losses_cleared_every_few_steps() -> None:
    window: list[Tensor] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        window.append(loss)
        if len(window) == 10:
            torch.stack(window).mean().item()
            window.clear()

    train("mlp", keep, steps=STEPS)


def sum_reset_every_few_steps() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    running: Tensor | float = 0.0
    every = 5
    for i in range(STEPS):
        loss = model(torch.randn(4, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = running + loss
        if (i + 1) % every == 0:
            running = 0.0


def replay_to_its_cap() -> None:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    buffer: deque[tuple[Tensor, Tensor]] = deque(maxlen=30)
    for _ in range(STEPS):
        obs = torch.randn(8, 4)
        with torch.no_grad():
            action = model(obs).argmax(1)
        buffer.append((obs, action))
        x, a = random.choice(buffer)
        loss = F.mse_loss(model(x).gather(1, a[:, None]).squeeze(1), x[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def averaged_weights_without_grad() -> None:
    model = small()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = (model(torch.randn(4, 4)) - average(torch.randn(4, 4)).detach()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.05)


def gradient_penalty() -> None:
    critic = small()
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    for _ in range(STEPS):
        mix = torch.randn(8, 4).requires_grad_()
        (grad,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
        loss = critic(torch.randn(8, 4)).mean() + (grad.norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def double_backward_through_parameter_gradients() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(STEPS):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        optimizer.zero_grad()
        (loss + 0.1 * sum(g.pow(2).sum() for g in grads)).backward()
        optimizer.step()


def penalty_on_grad_attributes() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean()
        loss.backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()


def deep_supervision_with_one_retain_too_few() -> None:
    model = small()
    head = nn.Linear(16, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.05)
    for _ in range(STEPS):
        hidden = model[1](model[0](torch.randn(8, 4)))
        first, second = head(hidden).pow(2).mean(), model[2](hidden).pow(2).mean()
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()


def truncated_windows() -> None:
    cell, head = nn.GRUCell(3, 6), nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.05)
    state = torch.zeros(4, 6)
    for _ in range(STEPS):
        state = state.detach()
        loss = torch.zeros(())
        for _ in range(5):
            state = cell(torch.randn(4, 3), state)
            loss = loss + head(state).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def momentum_contrast_queue() -> None:
    encoder = small()
    keys = copy.deepcopy(encoder).requires_grad_(False)
    queue = F.normalize(torch.randn(32, 2), dim=1)
    optimizer = torch.optim.SGD(encoder.parameters(), 0.05)
    for i in range(STEPS):
        x = torch.randn(4, 4)
        q = F.normalize(encoder(x), dim=1)
        with torch.no_grad():
            for k, p in zip(keys.parameters(), encoder.parameters(), strict=True):
                k.lerp_(p, 0.01)
            k_out = F.normalize(keys(x), dim=1)
        logits = torch.cat([(q * k_out).sum(1, keepdim=True), q @ queue.clone().T], 1)
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[(4 * i) % 32 : (4 * i) % 32 + 4] = k_out


def line_search_with_history() -> None:
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=10)
    x = torch.randn(16, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(STEPS // 2):
        optimizer.step(closure)


def window_loss_differentiated_once() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS // 4):
        total = torch.zeros(())
        for _ in range(8):
            total = total + model(torch.randn(4, 4)).pow(2).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


def policy_gradient_over_an_episode() -> None:
    policy = small()
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    for _ in range(STEPS // 4):
        saved: list[Tensor] = []
        for _ in range(12):
            distribution = torch.distributions.Categorical(logits=policy(torch.randn(1, 4)))
            saved.append(distribution.log_prob(distribution.sample()))
        loss = -torch.stack(saved).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def rollout_used_for_several_steps() -> None:
    policy = small()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(4):
        obs = torch.randn(16, 4)
        old = policy(obs).log_softmax(1)  # attached, though only its value is used
        for _ in range(STEPS // 4):
            ratio = (policy(obs).log_softmax(1) - old.detach()).exp()
            optimizer.zero_grad()
            (-ratio.mean()).backward()
            optimizer.step()


def exceptions_caught_and_dropped() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(fail: bool) -> None:
        loss = model(torch.randn(4, 4)).pow(2).mean()
        if fail:
            raise RuntimeError("out of memory, say")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for i in range(STEPS):
        try:
            step(i % 3 == 1)
        except RuntimeError as error:
            str(error)


def best_output_kept() -> None:
    best: list[Tensor | float] = [float("inf")]

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if loss < best[0]:
            best[0] = loss

    train("mlp", keep, steps=STEPS)


def adversarial_pair() -> None:
    gen, disc = small(), nn.Linear(2, 1)
    opt_g, opt_d = torch.optim.Adam(gen.parameters(), 1e-3), torch.optim.Adam(disc.parameters(), 1e-3)
    for _ in range(STEPS):
        fake = gen(torch.randn(8, 4))
        d_loss = F.softplus(disc(fake.detach())).mean() + F.softplus(-disc(torch.randn(8, 2))).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        g_loss = F.softplus(-disc(fake)).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()


def checkpointed_forward() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        loss = checkpoint(model, torch.randn(4, 4), use_reentrant=False).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluation_without_no_grad_that_keeps_numbers() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        model.train()
        for _ in range(6):
            loss = model(torch.randn(4, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [model(torch.randn(4, 4)).pow(2).mean() for _ in range(5)]
            torch.stack(losses).mean().item()


def weight_norm_attributes() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def unrolled_inner_loop() -> None:
    meta = torch.randn(2, 4, requires_grad=True)
    optimizer = torch.optim.SGD([meta], 0.05)
    for _ in range(STEPS // 4):
        fast = meta
        for _ in range(5):
            inner = F.mse_loss(torch.randn(8, 4) @ fast.T, torch.randn(8, 2))
            (grad,) = torch.autograd.grad(inner, fast, create_graph=True)
            fast = fast - 0.1 * grad
        loss = (torch.randn(8, 4) @ fast.T).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def training_in_eval_mode() -> None:
    model = make_model("conv").eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(STEPS // 5):
        optimizer.zero_grad()
        for x, y in batches("conv", 5):
            (F.cross_entropy(model(x), y) / 5).backward()
        optimizer.step()


PROGRAMS: list[Callable[[], None]] = [
    plain_loop, detached_loss_history, two_steps_in_locals, short_deque_of_losses, window_trimmed_by_hand,
    losses_cleared_every_few_steps, sum_reset_every_few_steps, replay_to_its_cap, averaged_weights_without_grad,
    gradient_penalty, double_backward_through_parameter_gradients, penalty_on_grad_attributes,
    deep_supervision_with_one_retain_too_few, truncated_windows, momentum_contrast_queue, line_search_with_history,
    window_loss_differentiated_once, policy_gradient_over_an_episode, rollout_used_for_several_steps,
    exceptions_caught_and_dropped, best_output_kept, adversarial_pair, checkpointed_forward,
    evaluation_without_no_grad_that_keeps_numbers, weight_norm_attributes, unrolled_inner_loop, training_in_eval_mode,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_an_innocent_program_hears_nothing(program: Callable[[], None]) -> None:
    with watched() as report:
        program()
    assert not of_graphs(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"amp": True}], ids=["eager", "accumulate", "amp"])
def test_a_plain_loop_hears_nothing(kind: str, options: dict[str, object]) -> None:
    with watched() as report:
        train(kind, steps=12, **options)  # type: ignore[arg-type]
    assert not of_graphs(report)
