"""Unusual ways to keep a graph and to let go of it: each fault beside the program that only looks like it."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graph_programs import batches, make_model, of_graphs, train, watched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain import Trainer
from safetrain.findings import Finding
from safetrain.graph import find_holders
from safetrain.rules.functions import find_function_faults
from safetrain.rules.graph import graph_cycle


def loud(program: Callable[[], object]) -> list[Finding]:
    with watched() as report:
        program()
    return of_graphs(report, notes=False)


def only(program: Callable[[], object], code: str = "G101") -> Finding:
    (finding,) = loud(program)
    assert finding.code == code
    return finding


def line_of(finding: Finding) -> str:
    assert finding.source is not None
    return finding.source.text


# ---------------------------------------------------------------------- places that are written over


def ring_by_modulo() -> None:
    ring: list[Any] = [None] * 8
    step = iter(range(1_000))

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        ring[next(step) % 8] = loss

    train("mlp", keep, steps=40)


def ring_by_position() -> None:
    ring = np.empty(6, dtype=object)
    at = [0]

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        ring[at[0]] = loss
        at[0] = 0 if at[0] == 5 else at[0] + 1

    train("mlp", keep, steps=40)


def bounded_cache() -> None:
    shown: dict[str, Tensor] = {}
    step = iter(range(1_000))

    @functools.lru_cache(maxsize=4)
    def norm(number: int) -> Tensor:
        return shown["out"].norm()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        shown["out"] = out
        norm(next(step))

    train("mlp", keep, steps=40)


def bounded_queue() -> None:
    waiting: queue.Queue[Tensor] = queue.Queue(maxsize=5)

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if waiting.full():
            waiting.get()
        waiting.put(loss)

    train("mlp", keep, steps=40)


def losses_of_one_epoch() -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 4)
    for _ in range(4):
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        torch.stack(losses).mean().item()


def copies_of_a_short_window() -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    recent: collections.deque[Tensor] = collections.deque(maxlen=4)
    for x, y in batches("mlp", 40):
        others = list(recent)
        out = model(x)
        loss = F.cross_entropy(out, y) + sum((out @ old.detach().T).exp().mean() for old in others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(out)


@pytest.mark.parametrize(
    "program",
    [
        ring_by_modulo, ring_by_position, bounded_cache, bounded_queue, losses_of_one_epoch, copies_of_a_short_window,
    ],
    ids=lambda p: p.__name__,
)  # fmt: skip
def test_what_is_written_over_or_starts_afresh_is_no_leak(program: Callable[[], None]) -> None:
    assert loud(program) == []


def table_of_all_steps() -> None:
    kept = np.empty(40, dtype=object)
    step = iter(range(40))

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept[next(step)] = loss

    train("mlp", keep, steps=40)


def list_that_starts_with_places() -> None:
    kept: list[Any] = [None] * 8

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(loss)

    train("mlp", keep, steps=12)


def cache_without_end() -> None:
    shown: dict[str, Tensor] = {}
    step = iter(range(1_000))

    @functools.cache
    def kept(number: int) -> Tensor:
        return shown["out"].norm()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        shown["out"] = out
        kept(next(step))

    train("mlp", keep, steps=12)


def losses_of_all_epochs() -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 4)
    kept = []
    for _ in range(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(loss)


@pytest.mark.parametrize(
    "program",
    [table_of_all_steps, list_that_starts_with_places, cache_without_end, losses_of_all_epochs],
    ids=lambda p: p.__name__,
)
def test_their_likes_without_an_end_are_told(program: Callable[[], None]) -> None:
    finding = only(program)
    assert finding.first_step == 4
    assert "kept" in (finding.holder or "")


@pytest.mark.parametrize("leak", [False, True])
def test_a_loop_that_calls_the_collector_hides_nothing(leak: bool) -> None:
    def program() -> None:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        kept = []
        for x, y in batches("mlp", 8):
            out = model(x)
            kept.append(out.mean() if leak else out.mean().detach())
            gc.collect(1)  # moves what is young to where a census does not look
            optimizer.zero_grad()
            (F.cross_entropy(out, y) * 2).backward()
            optimizer.step()

    callbacks = list(gc.callbacks)
    if leak:
        finding = only(program)
        assert finding.first_step == 4 and "kept" in (finding.holder or "")
    else:
        assert loud(program) == []
    assert gc.callbacks == callbacks


# ---------------------------------------------------------------------- who is named

so_far: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("so_far", default=None)


def test_a_variable_that_only_shows_it_is_not_named() -> None:
    def program() -> None:
        model = make_model("rnn")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in batches("rnn", 8):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            before = so_far.get()
            so_far.set(loss if before is None else before + loss)

    assert (only(program).holder or "").startswith("ContextVar `so_far`")
    so_far.set(None)


def test_a_list_of_graphs_that_span_two_steps_is_named_as_a_whole() -> None:
    def program() -> None:
        make, judge = nn.Linear(3, 6), nn.Linear(6, 1)
        optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (make, judge)]
        kept = []
        for _ in range(12):
            fake = make(torch.randn(4, 3))
            optimizers[1].zero_grad()
            F.softplus(judge(fake.detach())).mean().backward()
            optimizers[1].step()
            loss = F.softplus(-judge(fake)).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            kept.append(loss)

    finding = only(program)
    assert "`kept`" in (finding.holder or "") and "list[0.." in (finding.holder or "")


@pytest.mark.parametrize("kept", [True, False])
def test_the_loss_of_several_turns_is_not_the_holder(kept: bool) -> None:
    """Three updates on one graph of the generator: its loss, a variable, reaches graphs of two steps at any time."""

    def program() -> None:
        make, judge = nn.Linear(3, 6), nn.Linear(6, 1)
        optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (make, judge)]
        curve = []
        for i in range(40):
            fake, real = make(torch.randn(4, 3)), torch.randn(4, 6)
            for term in (F.softplus(judge(fake.detach())), judge(real).pow(2))[: 2 if i % 16 == 0 else 1]:
                optimizers[1].zero_grad()
                term.mean().backward()
                optimizers[1].step()
            loss = F.softplus(-judge(fake)).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            if kept and i % 2:
                curve.append(loss)

    if kept:
        assert "`curve`" in (only(program).holder or "")
    else:
        assert loud(program) == []


def log_row(row: dict[str, Any], rows: list[Any] = []) -> None:  # noqa: B006 - the fault
    rows.append(row)


def test_a_default_argument_is_named() -> None:
    finding = only(lambda: train("mlp", lambda loss, out, model: log_row({"loss": loss}), steps=8))
    assert "default argument `rows` of log_row()" in (finding.holder or "")
    assert line_of(finding) == "rows.append(row)"
    log_row.__defaults__[0].clear()


def test_what_another_thread_keeps_is_told_by_its_line_not_by_ours() -> None:
    handed: queue.Queue[Tensor | None] = queue.Queue()

    def writer() -> None:
        got = []
        while (loss := handed.get()) is not None:
            got.append(loss)
            del loss
            handed.task_done()

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        handed.put(loss)
        handed.join()

    thread = threading.Thread(target=writer)
    thread.start()
    try:
        finding = only(lambda: train("mlp", keep, steps=8))
    finally:
        handed.put(None)
        thread.join()
    assert "local `got` in writer()" in (finding.holder or "")
    assert line_of(finding) == "got.append(loss)"


def test_an_exception_that_carries_a_tensor_is_told_with_what_keeps_it() -> None:
    class Collects(Trainer):
        errors: list[Exception]

        def training_step(self, batch: Any) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            try:
                raise ValueError(loss)
            except ValueError as error:
                self.errors.append(error)
            return loss

    model = make_model("mlp")
    trainer = Collects(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=8)
    trainer.errors = []
    trainer.fit(list(batches("mlp", 8)))
    finding = next(f for f in trainer.report.findings if f.code == "G110")
    assert ".errors" in (finding.holder or "")
    assert line_of(finding) == "self.errors.append(error)"
    trainer.errors.clear()


class Remembers(Trainer):
    """Carries an LSTM's state through a pair of targets."""

    state_of_before: Any = None
    detach = False

    def training_step(self, batch: Any) -> Tensor:
        before = self.state_of_before
        if self.detach and before is not None:
            before = tuple(part.detach() for part in before)
        out, self.state_of_before = self.model["rnn"](batch[0], before)
        return F.cross_entropy(self.model["head"](out[:, -1]), batch[1])


@pytest.mark.parametrize("detach", [False, True])
def test_state_that_one_of_two_targets_carries_over(detach: bool) -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(5, 8, batch_first=True), "head": nn.Linear(8, 3)})
    trainer = Remembers(model, torch.optim.SGD(model.parameters(), 0.01), max_steps=8)
    trainer.detach = detach
    if detach:
        trainer.fit(list(batches("rnn", 8)))
        assert trainer.report.findings == []
        return
    with pytest.raises(RuntimeError, match="second time"):
        trainer.fit(list(batches("rnn", 8)))
    finding = next(f for f in trainer.report.findings if f.code == "G107")
    assert "state_of_before" in finding.message
    assert line_of(finding).startswith("out, self.state_of_before = ")


def test_the_name_that_is_read_before_it_is_bound_is_the_carrier() -> None:
    def program() -> None:
        policy = make_model("mlp")
        optimizer = torch.optim.SGD(policy.parameters(), 0.01)
        baseline: Any = 0.0
        for x, _ in batches("mlp", 4):
            chosen = torch.distributions.Categorical(logits=policy(x)); taken = chosen.log_prob(chosen.sample())  # fmt: skip  # noqa: E702, E501
            reward = torch.randn(4) + taken.exp()
            optimizer.zero_grad()
            (-(reward - baseline) * taken).mean().backward()
            optimizer.step()
            baseline = 0.9 * baseline + 0.1 * reward.mean()

    with watched() as report, pytest.raises(RuntimeError, match="second time"):
        program()
    finding = next(f for f in of_graphs(report) if f.code == "G107")
    assert "baseline" in (finding.holder or "")


# ---------------------------------------------------------------------- a search that found nothing


def test_a_search_says_whether_it_came_to_its_end() -> None:
    assert find_holders(lambda tensor: frozenset()).is_complete
    assert not find_holders(lambda tensor: frozenset(), budget_s=-1.0).is_complete


def test_a_search_that_was_cut_short_accuses_no_cycle() -> None:
    owners = [nn.Linear(2, 2)(torch.randn(1, 2))]
    cut = graph_cycle(owners, ["list"], None, collected=False, searched=False)
    assert "cycle" not in cut.message and "ran out of time" in cut.message and cut.cause is None
    done = graph_cycle(owners, ["list"], None, collected=False)
    assert "no name leads to them" in done.message and cut.code == done.code == "G101"
    assert graph_cycle(owners, [], None, collected=True, searched=False).code == "G106"


# ---------------------------------------------------------------------- evaluation with gradients on


def attacks(keep_all: bool) -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = []
    for _ in range(3):
        model.train()
        for x, y in batches("mlp", 5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        for x, _ in batches("mlp", 8):
            out = model(x.requires_grad_())
            torch.autograd.grad(out.max(1)[0].sum(), x)
            if keep_all:
                kept.append(out)


def test_what_the_last_batch_of_an_attack_leaves_in_a_variable_is_no_leak() -> None:
    with watched() as report:
        attacks(keep_all=False)
    assert of_graphs(report) == []


def test_outputs_of_all_attacks_that_are_kept_are_told() -> None:
    assert any("`kept`" in (finding.holder or "") for finding in loud(lambda: attacks(keep_all=True)))


# ---------------------------------------------------------------------- lines


def test_retain_graph_is_seen_though_the_data_set_keeps_the_batches() -> None:
    data = list(batches("mlp", 6))

    def program(retain: bool) -> None:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward(retain_graph=retain)
            optimizer.step()

    assert line_of(only(lambda: program(True), "G104")) == "loss.backward(retain_graph=retain)"
    assert loud(lambda: program(False)) == []


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_the_line_that_asked_for_a_graph_of_the_gradients() -> None:
    def program() -> None:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in batches("mlp", 4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()

    assert line_of(only(program, "G105")) == "F.cross_entropy(model(x), y).backward(create_graph=True)"


def test_a_retry_is_shown_where_the_exception_is_being_handled() -> None:
    def program() -> None:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def attempt(x: Tensor, fail: bool) -> None:
            out = model(x)
            if fail:
                raise MemoryError(len(out))
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()

        for i, (x, _) in enumerate(batches("mlp", 6)):
            try:
                attempt(x, i == 3)
            except MemoryError:
                attempt(x[:2], False)

    assert line_of(only(program, "G110")) == "attempt(x[:2], False)"


class Matmul(torch.autograd.Function):
    """Keeps its inputs by one assignment to two attributes."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.x, ctx.w = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.w.T, ctx.x.T @ grad


class ReadsByIndex(torch.autograd.Function):
    """Saves three tensors and reads two, by their positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, b)
        return x @ w + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        saved = ctx.saved_tensors
        return grad @ saved[1].T, saved[0].T @ grad, grad.sum(0)


class ReadsAll(torch.autograd.Function):
    """The same without the one that is not needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad @ ctx.saved_tensors[-1].T, ctx.saved_tensors[0].T @ grad, grad.sum(0)


def faults_of(function: Any, count: int) -> list[Finding]:
    inputs = [torch.randn(3, 3, requires_grad=True) * 1 for _ in range(2)] + [torch.zeros(3, requires_grad=True) * 1]
    return find_function_faults(function.apply(*inputs[:count]).sum())


def test_two_attributes_bound_at_once_have_their_line() -> None:
    findings = faults_of(Matmul, 2)
    assert [(f.code, line_of(f)) for f in findings] == [("G112", "ctx.x, ctx.w = inputs")] * 2


def test_saved_tensors_that_are_read_by_their_position() -> None:
    (finding,) = faults_of(ReadsByIndex, 3)
    assert finding.code == "G111" and "number 3" in finding.message
    assert faults_of(ReadsAll, 3) == []
