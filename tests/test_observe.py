"""What an observer makes of loops it knows nothing about: steps, phases, names, events; and that it leaves no trace."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from safetrain.callbacks.base import HOOKS, Callback
from safetrain.foreign.events import LoopEvent
from safetrain.foreign.observe import Observer
from safetrain.source import with_text
from safetrain.state import RunState


class Diary(Callback):
    """Writes down each hook with what the state said then."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.stepping: list[tuple[str, ...]] = []
        self.models: list[str] = []
        self.parameters: list[str] = []
        self.optimizers: list[tuple[str, ...]] = []
        self.losses: list[float] = []
        self.events: list[LoopEvent] = []

    def write(self, hook: str, state: RunState) -> None:
        self.hooks.append(hook.removeprefix("on_"))
        if hook == "on_backward_end":
            self.stepping.append(state.stepping)
            self.optimizers.append(tuple(state.optimizers))
            self.models.append(type(state.model).__name__)
            self.parameters = [name for name, _ in state.model.named_parameters()]
        if hook == "on_backward_start" and state.micro_loss is not None:
            self.losses.append(float(state.micro_loss.detach().sum()))

    def see(self, event: LoopEvent) -> None:
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def count(self, hook: str) -> int:
        return self.hooks.count(hook)


for _hook in HOOKS:
    setattr(Diary, _hook, lambda self, state, _hook=_hook: self.write(_hook, state))


@contextmanager
def observed() -> Iterator[tuple[Diary, Observer]]:
    diary = Diary()
    trouble: list[str] = []
    observer = Observer([diary], judges=[diary.see], on_trouble=trouble.append)
    observer.attach()
    try:
        yield diary, observer
    finally:
        observer.finish()
    assert not trouble, trouble[0]


def batch(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4)
    return x, x[:, :1]


STEP = ["step_start", "backward_start", "backward_end", "step_end"]


# ---------------------------------------------------------------------- steps


def test_a_plain_loop_gives_one_window_a_step() -> None:
    model = nn.Linear(4, 1)
    with observed() as (diary, observer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, y = batch()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert diary.hooks == ["fit_start", *STEP * 3, "fit_end"]
    assert diary.stepping == [("optimizer",)] * 3
    assert diary.parameters == ["weight", "bias"]
    assert observer.state.step == 3


def test_accumulation_is_one_step_with_several_backwards() -> None:
    model = nn.Linear(4, 1)
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            x, y = batch()
            (F.mse_loss(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert diary.hooks == [
        "fit_start",
        *["step_start", *["backward_start"] * 4, "backward_end", "step_end"] * 2,
        "fit_end",
    ]
    backward = next(event for event in diary.events if event.kind == "backward")
    assert (backward.data["divided_by"], backward.data["batch_size"], backward.data["scaled"]) == (4.0, 8, False)
    assert backward.source is not None and ".backward()" in with_text(backward.source).text


def test_optimizers_that_step_in_turn_and_together() -> None:
    """A GAN's optimizers step in turn, each a step of its own; an encoder's and a decoder's step together."""
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    with observed() as (diary, observer):
        opt_g, opt_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
        for _ in range(2):
            opt_d.zero_grad()
            critic(generator(torch.randn(8, 2)).detach()).mean().backward()
            opt_d.step()
            opt_g.zero_grad()
            critic(generator(torch.randn(8, 2))).mean().backward()
            opt_g.step()
    assert observer.state.step == 4
    assert diary.stepping == [("opt_d",), ("opt_g",)] * 2
    assert set(diary.parameters) == {"generator.weight", "generator.bias", "critic.weight", "critic.bias"}

    with observed() as (diary, observer):
        opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic))
        for _ in range(2):
            critic(generator(torch.randn(8, 2))).mean().backward()
            opt_a.step()
            opt_b.step()
            opt_a.zero_grad()
            opt_b.zero_grad()
    assert observer.state.step == 2
    assert diary.stepping == [("opt_a",), ("opt_b",)] * 2


def test_a_closure_is_part_of_its_step() -> None:
    model = nn.Linear(4, 1)
    x, y = batch(32)
    with observed() as (diary, observer):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert observer.state.step == 2
    assert diary.count("step_end") == 2 and diary.count("backward_start") > 4


@pytest.mark.parametrize("how", ["in_place", "data", "replaced"])
def test_steps_by_hand_are_seen_by_what_they_do(how: str) -> None:
    w = torch.randn(4, 1, requires_grad=True)
    with observed() as (diary, observer):
        for _ in range(3):
            x, y = batch()
            F.mse_loss(x @ w, y).backward()
            if how == "in_place":
                with torch.no_grad():
                    w -= 0.1 * w.grad
                w.grad = None
            elif how == "data":
                w.data.sub_(0.1 * w.grad)
                w.grad.zero_()
            else:
                w = (w - 0.1 * w.grad).detach().requires_grad_()
        x, y = batch()
        F.mse_loss(x @ w, y).backward()
    assert observer.state.step == 3
    assert diary.count("backward_end") == 4


def test_gradients_taken_by_autograd_grad_step_by_hand() -> None:
    model = nn.Linear(4, 1)
    with observed() as (_, observer):
        for _ in range(3):
            x, y = batch()
            grads = torch.autograd.grad(F.mse_loss(model(x), y), model.parameters())
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
        model(batch()[0])
    assert observer.state.step == 3


def test_a_penalty_on_the_gradient_of_an_input_is_no_step() -> None:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(8, 4, requires_grad=True)
            (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            (g.norm(dim=1) - 1).pow(2).mean().backward()
            optimizer.step()
    assert diary.hooks == ["fit_start", *STEP * 3, "fit_end"]


def test_a_skipped_step_counts_and_is_marked() -> None:
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with observed() as (diary, observer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            x, y = batch()
            loss = F.mse_loss(model(x), y) * (float("inf") if i == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert (observer.state.step, observer.state.skipped_steps) == (3, 1)
    assert [e.data["taken"] for e in diary.events if e.kind == "scaler_step"] == [True, False, True]
    assert [e.data["scaled"] for e in diary.events if e.kind == "clip"] == [False] * 3
    assert [e.data["scale"] for e in diary.events if e.kind == "scaler_update"] == [4.0, 2.0, 2.0]
    assert diary.kinds().count("unscale") == 3


# ---------------------------------------------------------------------- phases


def test_an_evaluation_without_gradients_is_a_phase() -> None:
    model = nn.Linear(4, 1)
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model.train()
            x, y = batch()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(batch()[0])
    assert diary.hooks == ["fit_start", *[*STEP, "eval_start", "eval_end"] * 2, "fit_end"]


def test_a_loader_pass_without_a_backward_is_an_evaluation_whatever_the_modes_say() -> None:
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(*batch(32)), batch_size=8)
    with observed() as (diary, observer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            for x, y in loader:
                F.mse_loss(model(x), y).item()
    assert diary.count("eval_start") == diary.count("eval_end") == 2
    assert (observer.state.step, observer.state.epoch) == (8, 2)
    ends = [event.data for event in diary.events if event.kind == "epoch_end"]
    assert [end["backwards"] for end in ends] == [4, 0, 4, 0]
    assert [end["root_training"] for end in ends] == [True] * 4


def test_a_model_that_trains_in_eval_mode_is_not_evaluated() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, y = batch()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    assert diary.count("eval_start") == 0 and diary.count("step_end") == 3


def test_an_action_chosen_without_gradients_is_no_evaluation() -> None:
    model = nn.Linear(4, 2)
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.no_grad():
                action = model(torch.randn(4)).argmax()
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(1, 4)), action[None]).backward()
            optimizer.step()
    assert diary.count("eval_start") == 0


# ---------------------------------------------------------------------- names


class Agent:
    def __init__(self) -> None:
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)
        self.optim = torch.optim.SGD([*self.policy.parameters(), *self.value.parameters()], lr=0.1)

    def update(self) -> None:
        x = torch.randn(8, 4)
        self.optim.zero_grad()
        (self.policy(x).mean() + self.value(x).mean()).backward()
        self.optim.step()


def test_models_and_optimizers_carry_the_users_names() -> None:
    with observed() as (diary, _):
        agent = Agent()
        agent.update()
        agent.update()
    assert diary.stepping[-1] == ("optim",)
    assert diary.parameters == ["policy.weight", "policy.bias", "value.weight", "value.bias"]


def test_members_of_a_list_are_told_apart() -> None:
    """In `for net in nets` each has the same name in turn."""
    nets = [nn.Linear(4, 1) for _ in range(2)]
    with observed() as (diary, _):
        opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(2):
            for net, opt in zip(nets, opts, strict=True):
                opt.zero_grad()
                net(torch.randn(2, 4)).mean().backward()
                opt.step()
    assert diary.stepping == [("opts[0]",), ("opts[1]",)] * 2


def test_a_replaced_optimizer_is_no_longer_in_use() -> None:
    model = nn.Linear(4, 1)
    with observed() as (diary, _):
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch()[0]).mean().backward()
            first.step()
        second = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(batch()[0]).mean().backward()
            second.step()
    assert diary.optimizers == [("first",)] * 2 + [("second",)] * 2


def test_a_teacher_that_only_helps_is_not_the_model() -> None:
    student = nn.Linear(4, 2)
    teacher = copy.deepcopy(student)
    with observed() as (diary, _):
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(8, 4)
            with torch.no_grad():
                target = teacher(x)
            optimizer.zero_grad()
            F.mse_loss(student(x), target).backward()
            optimizer.step()
    assert diary.models[-1] == "Linear" and diary.parameters == ["weight", "bias"]


# ---------------------------------------------------------------------- leaving no trace


def test_everything_is_put_back() -> None:
    watched = [
        (nn.Module, "__call__"), (nn.Module, "train"), (nn.Module, "zero_grad"), (nn.Module, "load_state_dict"),
        (torch.autograd, "backward"), (torch.autograd, "grad"), (Optimizer, "__init__"), (Optimizer, "zero_grad"),
        (Optimizer, "load_state_dict"), (torch.amp.GradScaler, "scale"), (torch.amp.GradScaler, "step"),
        (torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils.clip_grad, "clip_grad_norm_"),
        (lr_scheduler.LRScheduler, "step"), (lr_scheduler.ReduceLROnPlateau, "step"), (DataLoader, "__iter__"),
        (_BaseDataLoaderIter, "__next__"), (torch.set_grad_enabled, "__init__"), (torch, "save"), (torch, "load"),
        (torch, "set_rng_state"),
    ]  # fmt: skip
    optim = sys.modules[Optimizer.__module__]
    hooks = optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks
    before = [vars(owner)[name] for owner, name in watched]
    with observed():
        assert all(vars(owner)[name] is not old for (owner, name), old in zip(watched, before, strict=True))
        assert all(len(table) == 1 for table in hooks)
    assert [vars(owner)[name] for owner, name in watched] == before
    assert not any(hooks)


def test_two_observers_one_inside_the_other_come_off_in_any_order() -> None:
    model = nn.Linear(4, 1)
    call = nn.Module.__call__
    outer, inner = Observer(), Observer()
    outer.attach()
    inner.attach()
    outer.finish()
    model(torch.randn(1, 4)).mean().backward()
    inner.finish()
    outer.finish()
    model(torch.randn(1, 4))
    while nn.Module.__call__ is not call:  # what the outer one could not take off passes through; clean up for others
        nn.Module.__call__ = nn.Module.__call__.__wrapped__
        torch.autograd.backward = getattr(torch.autograd.backward, "__wrapped__", torch.autograd.backward)


def test_compiling_sees_the_same_graphs_and_no_warning() -> None:
    """A wrapped call or a global hook would break the graph, or make torch.compile warn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    def graphs() -> list[int]:
        torch._dynamo.reset()
        sizes: list[int] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> object:
            sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
            return graph.forward

        net = Net()
        compiled = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(8, 4)).mean().backward()
            optimizer.step()
        return sizes

    bare = graphs()
    with warnings.catch_warnings(), observed() as (diary, _):
        warnings.simplefilter("error")
        assert graphs() == bare
    assert len(bare) == 1 and diary.count("step_end") == 3
    assert diary.parameters[0] == "body.0.weight"


def test_only_the_thread_that_trains_is_followed() -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    with observed() as (_, observer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch()[0]).mean().backward()
        optimizer.step()

        def train_other() -> None:
            opt = torch.optim.SGD(other.parameters(), lr=0.1)
            for _ in range(5):
                other(batch()[0]).mean().backward()
                opt.step()

        thread = threading.Thread(target=train_other)
        thread.start()
        thread.join()
        model(batch()[0]).mean().backward()
        optimizer.step()
    assert observer.state.step == 2


def test_an_iterator_given_to_clipping_is_clipped_and_an_exhausted_one_still_warns() -> None:
    model = nn.Linear(4, 1)
    with observed():
        model(batch()[0]).sum().mul(100).backward()
        norm = torch.nn.utils.clip_grad_norm_((p for p in model.parameters()), 1.0)
        assert norm > 1.0
        assert sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt() == pytest.approx(1.0, rel=1e-3)
        used_up = (p for p in [])
        with pytest.warns(UserWarning, match="generator"):
            torch.nn.utils.clip_grad_norm_(used_up, 1.0)
