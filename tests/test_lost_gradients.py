"""P201 late in a run: gradients that were there and stop coming, and the many trainings in which they come and go."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import Mlp, batch, loud, make, only, train, watched
from torch import Tensor, nn

from safetrain import Trainer
from safetrain.findings import Finding, Report

LossFn = Callable[[Mlp, Tensor, Tensor, int], Tensor]


def counted(loss_fn: LossFn) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """`loss_fn` with the number of its call, from 1."""
    calls = 0

    def call(model: Any, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss_fn(model, x, y, calls)

    return call


def in_a_trainer(loss_fn: LossFn, model: nn.Module, steps: int, **options: Any) -> list[Finding]:
    counting = counted(loss_fn)

    class Written(Trainer):
        def training_step(self, given: Any) -> Any:
            return counting(self.model, *given)

    trainer = Written(model, torch.optim.Adam(model.parameters(), 1e-3), max_steps=steps, **options)
    trainer.fit([batch(model) for _ in range(min(steps, 200))])
    return trainer.report.findings


# ---------------------------------------------------------------------- the faults


def detached_after(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
    h = m.features(x)
    if step > 30:
        h = h.detach()  # CUT
    return F.cross_entropy(m.head(h), y)


def switched_to_no_grad(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
    if step <= 30:
        h = m.features(x)
    else:
        with torch.no_grad():  # CUT
            h = m.features(x)
    return F.cross_entropy(m.head(h), y)


def rebuilt_after(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
    h = m.features(x)
    if step > 30:
        h = torch.tensor(h.tolist())  # CUT
    return F.cross_entropy(m.head(h), y)


def a_flag_that_stays(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
    if step == 31:
        m.frozen_path = True
    h = m.features(x)
    if getattr(m, "frozen_path", False):
        h = h.detach()  # CUT
    return F.cross_entropy(m.head(h), y)


FAULTS = [detached_after, switched_to_no_grad, rebuilt_after, a_flag_that_stays]


def cut_line(function: Callable[..., Any]) -> int:
    code = function.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    return next(i for i in range(code.co_firstlineno, len(lines) + 1) if "# CUT" in lines[i - 1])


def is_the_cut(finding: Finding, fault: LossFn, model: nn.Module) -> None:
    assert finding.severity == "warning"
    assert finding.first_step == 31
    assert finding.source is not None and finding.source.line == cut_line(fault), finding.message
    assert set(finding.params) == {n for n, _ in model.named_parameters() if not n.startswith("head")}
    assert "until step 30 and in none since step 31" in finding.message


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["mlp", "conv", "rnn"])
def test_a_path_that_is_cut_late_is_named_by_its_line(kind: str, fault: LossFn) -> None:
    model = make(kind)
    with watched() as report:
        train(model, steps=140, loss_fn=counted(fault))
        is_the_cut(only(report, "P201"), fault, model)  # told in the run, not at its end only
    assert len(report.findings) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_path_that_is_cut_late_in_a_trainer(fault: LossFn) -> None:
    model = make("mlp")
    (finding,) = in_a_trainer(fault, model, 60)
    is_the_cut(finding, fault, model)


def test_a_cut_between_two_sampled_steps_is_told_all_the_same() -> None:
    def loss_fn(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        return F.cross_entropy(m.head(h.detach() if step > 300 else h), y)

    (finding,) = in_a_trainer(loss_fn, make("mlp"), 700, max_epochs=None)
    assert finding.severity == "warning" and finding.first_step == 320
    assert "until step 260 and in none since step 320" in finding.message
    assert finding.last_step < 700


def test_one_optimizer_of_two_steps_on_nothing() -> None:
    """From step 40 on the generator's own turn detaches what it made."""
    generator, critic = nn.Linear(3, 6), nn.Linear(6, 1)
    of_generator, of_critic = (torch.optim.Adam(m.parameters(), 1e-3) for m in (generator, critic))
    with watched() as report:
        for step in range(200):
            fake = generator(torch.randn(8, 3))
            of_critic.zero_grad()
            (critic(fake.detach()).mean() - critic(torch.randn(8, 6)).mean()).backward()
            of_critic.step()
            if step % 2:
                made = generator(torch.randn(8, 3))
                if step > 80:
                    made = made.data
                of_generator.zero_grad()
                (-critic(made).mean()).backward()
                of_generator.step()
    finding = only(report, "P201")
    assert finding.op == "data" and finding.source is not None and finding.source.text == "made = made.data"
    assert all("generator" in name or name in ("weight", "bias") for name in finding.params)


# ---------------------------------------------------------------------- only observed: notes


def test_a_term_that_was_annealed_away_is_a_note() -> None:
    model = make("mlp")
    model.aux = nn.Linear(16, 3)
    logged = []

    def loss_fn(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        loss, aux = F.cross_entropy(m.head(h), y), F.cross_entropy(m.aux(h), y)
        logged.append(aux.item())
        weight = max(0.0, 1 - step / 40)
        return loss + weight * aux if weight else loss

    with watched() as report:
        train(model, steps=160, loss_fn=counted(loss_fn))
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("P201", "note")
    assert finding.params == ["aux.weight", "aux.bias"] and "not used by any loss" in (finding.cause or "")
    assert finding.fix == "if it is done training, say so by aux.requires_grad_(False)"


def test_heads_of_tasks_learnt_one_after_another_give_one_note() -> None:
    model = make("mlp")
    model.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(3))

    def loss_fn(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        return F.cross_entropy(m.heads[min(2, step // 120)](m.head.weight.new_zeros(()) + m.features(x)), y)

    del model.head
    model.head = nn.Linear(1, 1).requires_grad_(False)
    with watched() as report:
        train(model, steps=380, loss_fn=counted(loss_fn), optimizer=torch.optim.SGD(model.parameters(), 0.01))
    late = [f for f in report.findings if "none since" in f.message]
    assert len(late) == 1 and late[0].severity == "note" and late[0].module == "heads.0"


# ---------------------------------------------------------------------- innocent


def experts() -> Report:
    """Hard routing by a rule that favours one expert at first and forgets the others for long."""
    model = make("mlp")
    model.experts = nn.ModuleList(nn.Linear(16, 3) for _ in range(4))

    def loss_fn(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        chosen = 0 if step <= 25 else random.Random(step).randrange(4)
        return F.cross_entropy(m.head(m.features(x)) + m.experts[chosen](m.features(x)), y)

    with watched() as report:
        train(model, steps=220, loss_fn=counted(loss_fn))
    return report


def stochastic_depth() -> Report:
    model = make("mlp")
    model.extra = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def loss_fn(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        for layer in m.extra:
            h = h + layer(h) if torch.rand(()) > 0.2 + step / 400 else h
        return F.cross_entropy(m.head(h), y)

    with watched() as report:
        train(model, steps=300, loss_fn=counted(loss_fn))
    return report


def one_optimizer_in_phases() -> Report:
    """Everything for 40 steps, the head alone for 40, and so on."""

    def loss_fn(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
        if (step - 1) // 40 % 2:
            with torch.no_grad():
                h = m.features(x)
        else:
            h = m.features(x)
        return F.cross_entropy(m.head(h), y)

    with watched() as report:
        train(make("mlp"), steps=330, loss_fn=counted(loss_fn))
    return report


def head_off_for_some_time() -> Report:
    model = make("mlp")
    model.aux = nn.Linear(16, 3)

    def loss_fn(m: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        loss = F.cross_entropy(m.head(h), y)
        return loss if 50 < step <= 110 else loss + F.cross_entropy(m.aux(h.detach() if step < 20 else h), y)

    with watched() as report:
        train(model, steps=200, loss_fn=counted(loss_fn))
    return report


def frozen_by_the_user() -> Report:
    model = make("mlp")

    def freeze(step: int) -> None:
        if step == 40:
            model.body.requires_grad_(False)

    with watched() as report:
        train(model, steps=200, each=freeze)
    return report


def taken_out_of_the_optimizer() -> Report:
    model = make("mlp")
    optimizer = torch.optim.Adam([{"params": model.body.parameters()}, {"params": model.head.parameters()}], 1e-3)

    def loss_fn(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        return F.cross_entropy(m.head(h.detach() if step > 40 else h), y)

    def drop(step: int) -> None:
        if step == 39:
            del optimizer.param_groups[0]

    with watched() as report:
        train(model, optimizer, steps=200, loss_fn=counted(loss_fn), each=drop)
    return report


def optimizer_that_rests() -> Report:
    """From step 60 on the second optimizer makes no step any more, nor does its part get gradients."""
    model = make("mlp")
    of_body, of_head = torch.optim.Adam(model.body.parameters(), 1e-3), torch.optim.Adam(model.head.parameters(), 1e-3)
    with watched() as report:
        for step in range(220):
            x, y = batch(model)
            of_body.zero_grad()
            of_head.zero_grad()
            h = model.features(x)
            F.cross_entropy(model.head(h.detach() if step > 60 else h), y).backward()
            of_head.step()
            if step <= 60:
                of_body.step()
    return report


def critic_of_many_turns() -> Report:
    generator, critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_critic = (torch.optim.RMSprop(m.parameters(), 1e-3) for m in (generator, critic))
    with watched() as report:
        for step in range(260):
            turns = 2 if step < 60 else 30  # the critic catches up
            of_critic.zero_grad()
            (critic(generator(torch.randn(8, 3)).detach()).mean() - critic(torch.randn(8, 6)).mean()).backward()
            of_critic.step()
            if step % turns == turns - 1:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(8, 3))).mean()).backward()
                of_generator.step()
    return report


def gradients_cancelled_by_hand() -> Report:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watched() as report:
        for step in range(200):
            x, y = batch(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if step > 40:
                for p in model.body.parameters():
                    p.grad = None
            optimizer.step()
    return report


def moved_by_an_average_instead() -> Report:
    """From step 40 on the body follows a moving average of another one."""
    model, other = make("mlp"), make("mlp", seed=1)

    def loss_fn(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        return F.cross_entropy(m.head(h.detach() if step > 40 else h), y)

    def follow(step: int) -> None:
        if step >= 40:
            with torch.no_grad():
                for p, q in zip(model.body.parameters(), other.body.parameters(), strict=True):
                    p.lerp_(q, 0.01)

    with watched() as report:
        train(model, steps=200, loss_fn=counted(loss_fn), each=follow)
    return report


def special_batches_at_the_end_of_epochs() -> Report:
    def loss_fn(m: Mlp, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m.features(x)
        return F.cross_entropy(m.head(h.detach() if step % 60 > 45 else h), y)

    with watched() as report:
        train(make("mlp"), steps=178, loss_fn=counted(loss_fn))
    return report


def steps_without_backward() -> Report:
    """What was not finite is cleared, and stepped on all the same."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with watched() as report:
        for step in range(160):
            optimizer.zero_grad()
            if not 50 < step < 100:
                x, y = batch(model)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return report


def shared_by_two_optimizers() -> Report:
    """The body is in both: the first loss stops reading it, the second trains it on."""
    model, other = make("mlp"), nn.Linear(16, 3)
    first = torch.optim.SGD(model.parameters(), 0.01)
    second = torch.optim.SGD([*model.body.parameters(), *other.parameters()], 0.01)
    with watched() as report:
        for step in range(200):
            x, y = batch(model)
            first.zero_grad()
            h = model.features(x)
            F.cross_entropy(model.head(h.detach() if step > 50 else h), y).backward()
            first.step()
            second.zero_grad()
            F.cross_entropy(other(model.features(x)), y).backward()
            second.step()
    return report


def frozen_for_the_turn_of_the_other() -> Report:
    """A critic that the generator's turn freezes, until that turn is given up for a while."""
    generator, critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_critic = (torch.optim.RMSprop(m.parameters(), 1e-3) for m in (generator, critic))
    with watched() as report:
        for step in range(160):
            if not 60 < step < 130:
                critic.requires_grad_(False)
                of_generator.zero_grad()
                (-critic(generator(torch.randn(8, 3))).mean()).backward()
                of_generator.step()
                critic.requires_grad_(True)
            of_critic.zero_grad()
            (critic(generator(torch.randn(8, 3)).detach()).mean() - critic(torch.randn(8, 6)).mean()).backward()
            of_critic.step()
    return report


def the_head_alone_in_the_last_epoch() -> Report:
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = torch.utils.data.DataLoader([batch(model, 1) for _ in range(200)], batch_size=4)
    with watched() as report:
        for epoch in range(3):
            for x, y in data:
                h = model.features(x[:, 0])
                optimizer.zero_grad()
                F.cross_entropy(model.head(h.detach() if epoch == 2 else h), y[:, 0]).backward()
                optimizer.step()
    return report


INNOCENT = [
    shared_by_two_optimizers,
    frozen_for_the_turn_of_the_other,
    the_head_alone_in_the_last_epoch,
    experts,
    stochastic_depth,
    one_optimizer_in_phases,
    head_off_for_some_time,
    frozen_by_the_user,
    taken_out_of_the_optimizer,
    optimizer_that_rests,
    critic_of_many_turns,
    gradients_cancelled_by_hand,
    moved_by_an_average_instead,
    special_batches_at_the_end_of_epochs,
    steps_without_backward,
]


@pytest.mark.parametrize("program", INNOCENT, ids=lambda f: f.__name__)
def test_gradients_that_come_and_go_or_are_given_up_are_no_finding(program: Callable[[], Report]) -> None:
    torch.manual_seed(0)
    report = program()
    assert [c for c in loud(report) if c != "P205"] == []  # a parameter in two optimizers
    assert [f.message for f in report.findings if f.code == "P201"] == []


def test_a_schedule_by_epochs_may_come_back_after_two() -> None:
    """Odd epochs train the head alone: 120 steps a phase, longer than the patience for a cut."""
    model = make("mlp")

    class Alternating(Trainer):
        def training_step(self, given: Any) -> Any:
            h = self.model.features(given[0])
            return F.cross_entropy(self.model.head(h.detach() if self.state.epoch % 2 else h), given[1])

    data = [batch(model) for _ in range(120)]
    trainer = Alternating(model, torch.optim.Adam(model.parameters(), 1e-3), max_epochs=3)
    trainer.fit(data)
    assert [f.code for f in trainer.report.findings if f.severity != "note"] == []
    stays = copy.deepcopy(model)

    class Staying(Trainer):
        def training_step(self, given: Any) -> Any:
            h = self.model.features(given[0])
            return F.cross_entropy(self.model.head(h.detach() if self.state.epoch >= 1 else h), given[1])

    trainer = Staying(stays, torch.optim.Adam(stays.parameters(), 1e-3), max_epochs=4)
    trainer.fit(data)
    (finding,) = [f for f in trainer.report.findings if f.severity != "note"]
    assert finding.code == "P201" and finding.first_step in range(121, 129)
