"""Graphs that outlive their step, or were built for nothing: found, named, and told once; the clean twin is silent."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_programs import KINDS, LEAKS, batches, loss_list, make_model, of_graphs, train, watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain.findings import Finding, Report
from safetrain.guarding.retention import retention_guards
from safetrain.loop import Trainer
from safetrain.rules.graph import find_attached_grads, find_retained_graphs

create_graph_warning = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


def only(report: Report) -> Finding:
    (finding,) = of_graphs(report)
    return finding


# ---------------------------------------------------------------------- G101


@pytest.mark.parametrize("plant", LEAKS, ids=lambda p: p.__name__)
def test_a_kept_graph_is_reported_with_its_holder_by_the_third_step_after(plant: Any) -> None:
    with watched() as report:
        train("mlp", plant(True))
    finding = only(report)
    first_kept = 2 if plant.__name__ == "captured_activations" else 1
    assert finding.code == "G101"
    assert finding.first_step <= first_kept + 3
    assert LEAKS[plant] in (finding.holder or "")
    assert finding.pinned_bytes and finding.growth_bytes_per_step


@pytest.mark.parametrize("plant", LEAKS, ids=lambda p: p.__name__)
def test_the_detached_twin_is_silent(plant: Any) -> None:
    with watched() as report:
        train("mlp", plant(False), steps=12)
    assert not of_graphs(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"amp": True}], ids=["eager", "accumulate", "amp"])
def test_every_kind_of_model_and_loop(kind: str, options: dict[str, Any]) -> None:
    with watched() as report:
        train(kind, loss_list(True), **options)
    finding = only(report)
    assert finding.code == "G101"
    assert finding.first_step in (4, 5)  # the third step after it began; one later where the traced step took too long
    assert "history" in (finding.holder or "")
    assert finding.source is not None and "history.append" in finding.source.text


def test_a_leak_that_starts_late_is_found_as_soon() -> None:
    history: list[Tensor] = []
    count = iter(range(100))

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if next(count) >= 20:
            history.append(loss)

    with watched() as report:
        train("mlp", keep, steps=30)
    assert 21 <= only(report).first_step <= 24


def test_a_leak_of_every_fifth_step_is_found() -> None:
    rows: list[Tensor] = []
    count = iter(range(100))

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        if next(count) % 5 == 0:
            rows.append(loss)

    with watched() as report:
        train("mlp", keep, steps=30)
    finding = only(report)
    assert "rows" in (finding.holder or "") and finding.first_step <= 17


def test_two_leaks_are_two_findings() -> None:
    losses: list[Tensor] = []
    outputs: dict[int, Tensor] = {}

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        losses.append(loss)
        outputs[len(outputs)] = out * 2

    with watched() as report:
        train("mlp", keep, steps=14)
    holders = " ".join(f.holder or "" for f in of_graphs(report))
    assert len(of_graphs(report)) == 2
    assert "losses" in holders and "outputs" in holders


def test_it_says_whether_activations_are_held_or_only_the_skeleton() -> None:
    kept: list[Tensor] = []

    def forward_only(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        kept.append(model(torch.randn(512, 6)))

    with watched() as report:
        train("mlp", forward_only)
    assert "of activations" in only(report).message
    with watched() as report:
        train("mlp", loss_list(True))
    assert "skeleton" in only(report).message


def test_a_deque_that_is_too_long_to_be_a_window_is_reported() -> None:
    from collections import deque

    recent: deque[Tensor] = deque(maxlen=33)
    with watched() as report:
        train("mlp", lambda loss, out, model: recent.append(loss))
    assert only(report).code == "G101"


def test_the_line_that_made_the_tensor_is_told_beside_the_line_that_stored_it() -> None:
    history: list[Tensor] = []
    with watched() as report:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in batches("mlp", 6):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss)
    finding = only(report)
    assert finding.source is not None and finding.source.text == "history.append(loss)"
    assert "loss = F.cross_entropy(model(x), y)" in (finding.cause or "")
    assert finding.fix == "history.append(loss.detach())"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "rnn"])
@pytest.mark.parametrize("leak", [True, False])
def test_a_compiled_model(kind: str, leak: bool) -> None:
    keep = loss_list(leak)
    model = make_model(kind)
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as report:
        for x, y in batches(kind, 8):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keep(loss, loss, model)
    assert [f.code for f in of_graphs(report)] == (["G101"] if leak else [])


@pytest.mark.parametrize("leak", [True, False])
def test_under_activation_checkpointing_nothing_is_recomputed_for_the_report(leak: bool) -> None:
    calls = [0]
    outputs: list[Tensor] = []
    body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))

    def block(x: Tensor) -> Tensor:
        calls[0] += 1
        return body(x)

    optimizer = torch.optim.SGD(body.parameters(), 0.01)
    with watched() as report:
        for x, y in batches("mlp", 6):
            out = checkpoint(block, x, use_reentrant=False)
            outputs.append(out.sum() if leak else out.sum().detach())
            optimizer.zero_grad()
            F.cross_entropy(out, y).backward()
            optimizer.step()
    assert calls[0] == 12
    assert [f.code for f in of_graphs(report)] == (["G101"] if leak else [])


class Keeper(Trainer):
    """Keeps its losses on itself, or their values."""

    leak = True

    def training_step(self, batch: Any) -> Tensor:
        if not hasattr(self, "history"):
            self.history: list[Tensor] = []
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.history.append(loss if self.leak else loss.detach())
        return loss


class LateKeeper(Trainer):
    """Begins to keep something after `begin` steps: what begins late in a run is seen as soon as what begins early."""

    begin, how, leak = 0, "", True

    def training_step(self, batch: Any) -> Tensor:
        if not hasattr(self, "total"):
            self.total, self.curve, self.outputs = torch.zeros(()), torch.zeros(200), list[Tensor]()
        out = self.model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        if self.state.step >= self.begin:
            self.keep(loss if self.leak else loss.detach(), out.max() if self.leak else out.max().detach())
        return loss

    def keep(self, loss: Tensor, top: Tensor) -> None:
        if self.how == "total +=":
            self.total += loss
        elif self.how == "total = total +":
            self.total = self.total + loss
        elif self.how == "curve[i] =":
            self.curve[self.state.step] = loss
        else:
            self.outputs.append(top)


@pytest.mark.parametrize("leak", [True, False])
@pytest.mark.parametrize("begin", [70, 101])
@pytest.mark.parametrize("how", ["total +=", "total = total +", "curve[i] =", "outputs.append"])
def test_what_begins_late_in_a_run_is_told_by_the_third_step(how: str, begin: int, leak: bool) -> None:
    model = make_model("transformer")
    trainer = LateKeeper(model, torch.optim.AdamW(model.parameters(), fused=True), max_steps=begin + 6)
    trainer.how, trainer.begin, trainer.leak = how, begin, leak
    trainer.fit(list(batches("transformer", begin + 6)))
    told = of_graphs(trainer.report)
    assert [f.code for f in told] == (["G101"] if leak else [])
    assert all(begin < f.first_step <= begin + 4 for f in told)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leak", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_a_trainer(kind: str, leak: bool, accumulate: int) -> None:
    report = Report()
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = Keeper(
        model, optimizer, max_steps=6, accumulate=accumulate, guards="off", callbacks=retention_guards(report)
    )
    trainer.leak = leak
    trainer.fit(list(batches(kind, 6 * accumulate)))
    findings = of_graphs(report)
    assert [f.code for f in findings] == (["G101"] if leak else [])
    if leak:
        assert findings[0].first_step <= 5  # one step later where the traced step took too long
        assert findings[0].source is not None and "self.history.append" in findings[0].source.text
        assert "history" in (findings[0].holder or "")


def test_nothing_is_held_by_the_guards() -> None:
    gone: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        alive.append(sum(ref() is not None for ref in gone))
        gone.extend((weakref.ref(loss), weakref.ref(out)))

    gc.disable()
    try:
        with watched():
            train("mlp", keep, steps=20)
        assert alive == [0] * 20, "tensors of the step before were alive at the end of the next"
        assert not any(ref() is not None for ref in gone)
    finally:
        gc.enable()


def test_a_search_and_a_trace_leave_nothing_behind_in_the_frames() -> None:
    history: list[Tensor] = []
    freed: list[weakref.ref[Tensor]] = []

    def keep(loss: Tensor, out: Tensor, model: nn.Module) -> None:
        history.append(loss)
        freed.append(weakref.ref(out))

    gc.disable()
    try:
        with watched() as report:
            train("mlp", keep, steps=8)
        assert of_graphs(report)
        assert not any(ref() is not None for ref in freed)
    finally:
        gc.enable()


def test_the_judge_alone_says_what_is_held_now() -> None:
    model = make_model("mlp")
    meters = {"loss": [model(torch.randn(2, 6)).sum() for _ in range(5)]}
    findings = [f for f in find_retained_graphs(model=model) if "meters" in (f.holder or "")]
    assert findings and "list[0..4]" in (findings[0].holder or "")
    meters["loss"] = [t.detach() for t in meters["loss"]]
    assert not [f for f in find_retained_graphs(model=model) if "meters" in (f.holder or "")]


# ---------------------------------------------------------------------- G103


def evaluating(keep: bool, no_grad: bool) -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    results: list[Tensor] = []
    for _ in range(3):
        model.train()
        for x, y in batches("mlp", 5):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.set_grad_enabled(not no_grad):
            result = validate(model)
        results.append(result if keep else result.detach())


def validate(model: nn.Module) -> Tensor:
    return torch.stack([F.cross_entropy(model(x), y) for x, y in batches("mlp", 4)]).mean()


def test_evaluation_results_kept_with_their_graphs() -> None:
    with watched() as report:
        evaluating(keep=True, no_grad=False)
    finding = only(report)
    assert (finding.code, finding.severity) == ("G103", "warning")
    assert finding.first_step <= 8
    assert "results" in (finding.holder or "")


def test_evaluation_without_graphs_is_silent() -> None:
    with watched() as report:
        evaluating(keep=True, no_grad=True)
    assert not of_graphs(report)


class EvaluatesWithGraphs(Trainer):
    """Switches gradients on in its evaluation and keeps what it computed, or its value."""

    keeps = True

    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def evaluation_step(self, batch: Any) -> dict[str, Tensor]:
        with torch.enable_grad():
            loss = self.training_step(batch)
        self.results = [*getattr(self, "results", []), loss if self.keeps else loss.detach()]
        return {"loss": loss.detach()}


@pytest.mark.parametrize("keeps", [True, False])
def test_evaluation_with_graphs_in_a_trainer(keeps: bool) -> None:
    report = Report()
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    trainer = EvaluatesWithGraphs(
        model, optimizer, max_steps=12, eval_every=4, guards="off", callbacks=retention_guards(report)
    )
    trainer.keeps = keeps
    trainer.fit(list(batches("mlp", 12)), list(batches("mlp", 3)))
    assert [f.code for f in of_graphs(report)] == (["G103"] if keeps else [])
    if keeps:
        assert only(report).first_step <= 6
        assert "results" in (only(report).holder or "")


# ---------------------------------------------------------------------- G104


@pytest.mark.parametrize("last_retains", [True, False])
def test_retain_graph_on_the_last_term(last_retains: bool) -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as report:
        for x, y in batches("mlp", 5):
            out = model(x)
            terms = [F.cross_entropy(out, y), out.pow(2).mean()]
            optimizer.zero_grad()
            for i, term in enumerate(terms):
                term.backward(retain_graph=i == 0 or last_retains)
            optimizer.step()
    assert [f.code for f in of_graphs(report)] == (["G104"] if last_retains else [])
    if last_retains:
        finding = only(report)
        assert finding.first_step <= 3
        assert finding.source is not None and "retain_graph" in finding.source.text


@pytest.mark.parametrize("terms_wanted", [1, 2])
def test_a_gradient_of_each_term_retains_for_the_next(terms_wanted: int) -> None:
    """As GradNorm weighs tasks: only the last of the calls on one line could do without. One call alone could."""
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    weight = next(model.parameters())
    with watched() as report:
        for x, y in batches("mlp", 6):
            out = model(x)
            terms = [F.cross_entropy(out, y), out.pow(2).mean()][:terms_wanted]
            optimizer.zero_grad()
            sum(terms).backward(retain_graph=True)
            norms = [torch.autograd.grad(term, weight, retain_graph=True)[0].norm() for term in terms]
            assert len(norms) == terms_wanted
            optimizer.step()
    assert [f.code for f in of_graphs(report)] == (["G104"] if terms_wanted == 1 else [])


def test_retain_graph_that_a_second_model_uses_is_fine() -> None:
    gen, disc = make_model("mlp"), nn.Linear(3, 1)
    opt_g, opt_d = torch.optim.SGD(gen.parameters(), 0.01), torch.optim.SGD(disc.parameters(), 0.0)
    with watched() as report:
        for x, _ in batches("mlp", 6):
            fake = gen(x)
            opt_d.zero_grad()
            F.softplus(disc(fake)).mean().backward(retain_graph=True)
            opt_g.zero_grad()
            fake.pow(2).mean().backward()
            opt_d.step()
            opt_g.step()
    assert not of_graphs(report)


# ---------------------------------------------------------------------- G105


@create_graph_warning
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_carry_a_graph_into_the_next_backward(kind: str) -> None:
    if kind == "rnn":
        pytest.skip("torch has no second derivative of a fused GRU")
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    with watched() as report:
        for x, y in batches(kind, 5):
            F.cross_entropy(model(x), y).backward(create_graph=True)
            optimizer.step()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.zero_()
    assert {f.code for f in of_graphs(report)} == {"G105"}
    for p in model.parameters():
        p.grad = None


@create_graph_warning
def test_create_graph_that_nobody_uses() -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as report:
        for x, y in batches("mlp", 5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward(create_graph=True)
            optimizer.step()
    assert only(report).code == "G105"
    found = find_attached_grads(model.named_parameters())
    assert found[0].params[0] == "body.0.weight"
    optimizer.zero_grad()
    assert not find_attached_grads(model.named_parameters())


# ---------------------------------------------------------------------- G106, G111, G112


class OwnOutput(torch.autograd.Function):
    """Keeps its own output on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 - ctx.y.pow(2))


class OwnInput(torch.autograd.Function):
    """Keeps its input on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.x > 0)


class Unread(torch.autograd.Function):
    """Saves two tensors and reads one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors  # noqa: RUF059 - the fault
        return grad * y


class Right(torch.autograd.Function):
    """Saves what it needs, and a mask on ctx as torch allows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.slope = slope
        y = x.tanh()
        ctx.save_for_backward(y)
        return y * slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * (1 - y.pow(2)) * ctx.slope, None


def with_function(function: Any, *args: Any) -> Report:
    layer = nn.Linear(6, 8)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    with watched() as report:
        for x, _ in batches("mlp", 6):
            optimizer.zero_grad()
            function.apply(layer(x), *args).pow(2).mean().backward()
            optimizer.step()
    return report


def test_a_function_that_keeps_its_own_output_is_a_cycle() -> None:
    finding = only(with_function(OwnOutput))
    assert (finding.code, finding.first_step) == ("G106", 1)
    assert finding.source is not None and finding.source.text == "ctx.y = y"
    assert "OwnOutput" in (finding.holder or "")
    gc.collect()


def test_a_function_that_keeps_its_input() -> None:
    finding = only(with_function(OwnInput))
    assert (finding.code, finding.severity) == ("G112", "warning")
    assert finding.source is not None and finding.source.text == "ctx.x = x"


def test_a_function_that_saves_what_it_never_reads() -> None:
    finding = only(with_function(Unread))
    assert (finding.code, finding.severity) == ("G111", "note")
    assert "number 1" in finding.message


def test_a_right_function_is_silent() -> None:
    assert not of_graphs(with_function(Right, 2.0))


class Loop:
    """An object that refers to itself, and to a tensor."""

    def __init__(self, loss: Tensor) -> None:
        self.loss, self.me = loss, self


@pytest.mark.parametrize("through_hook", [True, False])
def test_a_cycle_is_found_and_it_says_whether_the_collector_frees_it(through_hook: bool) -> None:
    def step(layer: nn.Linear, x: Tensor) -> Tensor:
        hidden = layer(x)
        loss: Tensor = hidden.pow(2).mean()
        if through_hook:
            hidden.register_hook(lambda grad, hidden=hidden: grad * hidden.detach().sign())
        else:
            Loop(loss)
        return loss

    layer = nn.Linear(6, 8)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    gc.collect()
    gc.disable()
    try:
        with watched() as report:
            for x, _ in batches("mlp", 8):
                optimizer.zero_grad()
                step(layer, x).backward()
                optimizer.step()
    finally:
        gc.enable()
    finding = only(report)
    assert finding.code == ("G101" if through_hook else "G106")
    assert ("function" if through_hook else "Loop") in (finding.holder or "")


# ---------------------------------------------------------------------- G107


class Stateful(nn.Module):
    """A cell that keeps its hidden state between calls."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.detach = detach
        self.cell, self.head = nn.GRUCell(3, 6), nn.Linear(6, 1)
        self.hidden = torch.zeros(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach() if self.detach else hidden
        return self.head(hidden)


@pytest.mark.parametrize("detach", [False, True])
def test_hidden_state_on_the_module(detach: bool) -> None:
    model = Stateful(detach)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as report:
        try:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).pow(2).mean().backward()
                optimizer.step()
        except RuntimeError as error:
            assert "second time" in str(error)
    assert [f.code for f in of_graphs(report)] == ([] if detach else ["G107"])
    if not detach:
        finding = only(report)
        assert finding.first_step == 2
        assert "hidden" in (finding.holder or "")
        assert finding.source is not None and "self.hidden = " in finding.source.text


def test_state_in_a_local_name_kept_alive_with_retain_graph() -> None:
    cell, head = nn.LSTMCell(3, 6), nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], 0.01)
    state = (torch.zeros(4, 6), torch.zeros(4, 6))
    with watched() as report:
        try:
            for _ in range(5):
                h, c = cell(torch.randn(4, 3), state)
                state = (h, c)
                loss = head(h).pow(2).mean()
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                optimizer.step()
        except RuntimeError as error:
            assert "inplace" in str(error)
    finding = next(f for f in of_graphs(report) if f.code == "G107")
    assert finding.first_step <= 3
    assert "state" in (finding.holder or "")
    assert finding.source is not None and finding.source.text == "state = (h, c)"


def test_features_computed_once_before_the_loop() -> None:
    encoder, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    x = torch.randn(16, 6)
    with watched() as report:
        features = encoder(x)
        try:
            for _ in range(3):
                optimizer.zero_grad()
                head(features).pow(2).mean().backward()
                optimizer.step()
        except RuntimeError as error:
            assert "second time" in str(error)
    finding = only(report)
    assert (finding.code, finding.first_step) == ("G107", 2)
    assert "features" in (finding.holder or "")
    assert finding.source is not None and finding.source.text == "features = encoder(x)"


# ---------------------------------------------------------------------- G110


class TooLong(RuntimeError):
    """Stands for an out-of-memory error."""


def attempts(retry_inside: bool) -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def attempt(x: Tensor, fail: bool) -> None:
        optimizer.zero_grad()
        out = model(x)
        if fail:
            raise TooLong(f"{len(out)} rows are too many")
        out.pow(2).mean().backward()
        optimizer.step()

    for i, (x, _) in enumerate(batches("mlp", 8)):
        try:
            attempt(x, i % 4 == 1)
        except TooLong:
            if retry_inside:
                attempt(x[:2], False)
                continue
        else:
            continue
        attempt(x[:2], False)


def test_a_retry_inside_the_except_block() -> None:
    with watched() as report:
        attempts(retry_inside=True)
    finding = only(report)
    assert finding.code == "G110"
    assert "local `out` in attempt()" in (finding.holder or "")


def test_a_retry_after_the_except_block_is_silent() -> None:
    with watched() as report:
        attempts(retry_inside=False)
    assert not of_graphs(report)


def test_an_exception_that_was_kept() -> None:
    model = make_model("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    last_error: list[Exception] = []

    def attempt(x: Tensor, y: Tensor, fail: bool) -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if fail:
            raise TooLong
        optimizer.step()

    with watched() as report:
        for i, (x, y) in enumerate(batches("mlp", 12)):
            try:
                attempt(x, y, i == 3)
            except TooLong as error:
                last_error.append(error)
    finding = only(report)
    assert finding.code == "G110"
    assert "last_error" in (finding.holder or "") and "`loss`" in (finding.holder or "")
    last_error.clear()


# ---------------------------------------------------------------------- G102


class Logs(Trainer):
    attached = True

    def training_step(self, batch: Any) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("my_loss", loss if self.attached else loss.detach())
        return loss


@pytest.mark.parametrize("attached", [True, False])
def test_a_metric_with_a_graph_is_a_note(attached: bool) -> None:
    report = Report()
    model = make_model("mlp")
    trainer = Logs(
        model, torch.optim.SGD(model.parameters(), 0.01), max_steps=4, guards="off", callbacks=retention_guards(report)
    )
    trainer.attached = attached
    trainer.fit(list(batches("mlp", 4)))
    assert [(f.code, f.severity) for f in of_graphs(report)] == ([("G102", "note")] if attached else [])


# ---------------------------------------------------------------------- forwards that the driver sees


def test_outputs_collected_over_an_evaluation_that_builds_graphs() -> None:
    def validate(model: nn.Module) -> float:
        predictions = []
        for x, _ in batches("mlp", 8):
            predictions.append(model(x))
        return torch.cat(predictions).mean().item()

    with watched() as report:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            model.train()
            for x, y in batches("mlp", 4):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            validate(model.eval())
    finding = only(report)
    assert (finding.code, finding.severity) == ("G103", "warning")
    assert "local `predictions` in validate()" in (finding.holder or "")


def test_an_evaluation_that_builds_graphs_and_drops_them_is_a_note() -> None:
    with watched() as report:
        model = make_model("mlp")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            model.train()
            for x, y in batches("mlp", 4):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            model.eval()
            for x, _ in batches("mlp", 8):
                model(x).argmax(1).sum().item()
    finding = only(report)
    assert (finding.code, finding.severity) == ("G103", "note")
    assert finding.source is not None and "model(x)" in finding.source.text


@pytest.mark.parametrize("in_a_function", [False, True])
def test_big_outputs_that_outlive_the_next_forward(in_a_function: bool) -> None:
    layer = nn.Linear(4, 4096)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)

    def step() -> Tensor:
        out = layer(torch.randn(2048, 4))
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        return out

    with watched() as report:
        for _ in range(4):
            if in_a_function:
                step()
            else:
                logits = step()
        if not in_a_function:
            del logits
    assert [(f.code, f.severity) for f in of_graphs(report)] == ([] if in_a_function else [("G108", "note")])
