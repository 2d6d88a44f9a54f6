"""The guards together: what they hear of, what they miss by it (nothing), and that they hold nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_training import make_data, make_model, make_trainer
from torch import Tensor, nn

from safetrain import Callback, Trainer
from safetrain.callbacks.base import STEP_HOOKS, Listeners
from safetrain.findings import Finding, Report
from safetrain.memory import HeapMeter, heap_is_readable
from safetrain.state import RunState

LATE = 150
"""A step that is not sampled, nor are the next forty."""


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 16, 8, generator=generator)
    return list(zip(x, x[..., :3].argmax(2), strict=True))


class Late(Trainer):
    """Trains well until step `LATE`."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        output = self.model(x)
        loss = F.cross_entropy(output, y)
        if self.state.current_step >= LATE:
            self.go_wrong(output, loss)
        return loss

    def go_wrong(self, output: Tensor, loss: Tensor) -> None:
        """What begins late."""


def late(trainer: type[Late], *, steps: int = LATE + 8, callbacks: list[Callback] | None = None) -> Late:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    made = trainer(model, optimizer, max_steps=steps, callbacks=callbacks or [])
    made.fit(batches(steps))
    return made


def test_sampled_hooks_hear_of_the_first_steps_of_a_run_and_of_five_in_64_later() -> None:
    class Rare(Callback):
        sampled_hooks = STEP_HOOKS

        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_start(self, state: RunState) -> None:
            self.steps.append(state.current_step)

    class Often(Rare):
        sampled_hooks = frozenset()

    rare, often = Rare(), Often()
    state = RunState(model=nn.Linear(1, 1), optimizers={}, step=400)
    listeners = Listeners([rare, often])
    state.request_samples(10)
    for _ in range(250):
        state.begin_step()
        listeners.choose(state)
        listeners.on_step_start(state)
        state.step += 1
    assert often.steps == list(range(401, 651))
    assert rare.steps == [*range(401, 411), *range(448, 453), *range(512, 517)]


@pytest.mark.parametrize("kept", ["loss", "output", "part of the output"])
def test_a_leak_that_begins_late_is_told_by_its_third_step(kept: str) -> None:
    class Leaks(Late):
        def go_wrong(self, output: Tensor, loss: Tensor) -> None:
            history.append({"loss": loss, "output": output}.get(kept, output[0]))

    history: list[Tensor] = []
    findings = late(Leaks).report.findings
    assert [f.code for f in findings] == ["G101"]
    assert findings[0].first_step <= LATE + 3
    assert "history" in (findings[0].holder or "")


def test_a_metric_with_a_graph_is_told_whenever_it_is_logged() -> None:
    class Logs(Late):
        def go_wrong(self, output: Tensor, loss: Tensor) -> None:
            self.log("loss", loss)

    assert [(f.code, f.first_step) for f in late(Logs).report.findings] == [("G102", LATE)]


def test_a_model_left_in_eval_mode_by_a_late_evaluation_is_told() -> None:
    class Forgets(Callback):
        def on_eval_end(self, state: RunState) -> None:
            if state.step > 100:
                for module in state.model.modules():  # a hook of its own mind: modes are put back before it runs
                    module.training = False

    trainer = make_trainer(Forgets(), guards="default", max_steps=160, eval_every=40)
    trainer.fit(make_data(), make_data())
    assert {f.code for f in trainer.report.findings} & {"L501", "L515"}


def test_a_parameter_that_is_used_once_in_many_steps_is_no_finding() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(8))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            rare = 1 + self.calls // 12 % 7 if self.calls % 12 == 11 else 0
            out: Tensor = self.experts[rare](x)
            return out

    class Routed(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

    model = Mixture()
    trainer = Routed(model, torch.optim.AdamW(model.parameters(), 1e-3), max_steps=220)
    trainer.fit(batches(220))
    assert not trainer.report.findings


def test_guards_keep_no_tensor_alive() -> None:
    refs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watched(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            hidden = self.model[0](batch[0])
            output = self.model[1:](hidden)
            refs.extend(map(weakref.ref, (hidden, output)))
            loss = F.cross_entropy(output, batch[1])
            refs.append(weakref.ref(loss))
            return loss

    class Counts(Callback):  # the last listener: all guards have seen the step
        def on_step_end(self, state: RunState) -> None:
            alive.append(sum(ref() is not None for ref in refs))
            refs.clear()

    gc.disable()  # nothing may need the collector
    try:
        model = make_model()
        trainer = Watched(model, torch.optim.SGD(model.parameters(), 0.01), callbacks=[Counts()], max_steps=140)
        trainer.fit(batches(140))
    finally:
        gc.enable()
    assert not trainer.report.findings
    assert alive[5:] == [0] * len(alive[5:])


@pytest.mark.slow
@pytest.mark.skipif(not heap_is_readable(), reason="the heap's size can be read with glibc only")
def test_memory_is_flat_over_two_thousand_steps() -> None:
    readings: dict[int, int] = {}

    class Reads(Callback):
        def on_step_end(self, state: RunState) -> None:
            if state.step % 100 == 0:
                gc.collect()
                readings[state.step] = meter.read()

    meter = HeapMeter(slow_ns=10**12)
    trainer = make_trainer(Reads(), guards="default", max_steps=2000)
    trainer.fit(make_data())
    assert not trainer.report.findings
    assert readings[2000] - readings[400] < 40_000  # 25 bytes a step: the readings' own dict, the report's nothing


# ---- a guard must not harm a run ------------------------------------------------------------------------------------


class Breaks(Callback):
    """A guard with a fault of its own."""

    def __init__(self, hook: str) -> None:
        self.hook, self.heard = hook, list[str]()

    def _hear(self, hook: str) -> None:
        self.heard.append(hook)
        if hook == self.hook:
            raise ZeroDivisionError("of the guard")

    def on_step_start(self, state: RunState) -> None:
        self._hear("on_step_start")

    def on_backward_end(self, state: RunState) -> None:
        self._hear("on_backward_end")

    def on_step_end(self, state: RunState) -> None:
        self._hear("on_step_end")

    def on_exception(self, state: RunState) -> None:
        self._hear("on_exception")

    def on_fit_end(self, state: RunState) -> None:
        self._hear("on_fit_end")


class Hears(Callback):
    def __init__(self) -> None:
        self.steps, self.ended = 0, False

    def on_step_start(self, state: RunState) -> None:
        self.steps += 1

    def on_step_end(self, state: RunState) -> None:
        self.steps += 1

    def on_fit_end(self, state: RunState) -> None:
        self.ended = True


@pytest.mark.parametrize("hook", ["on_step_start", "on_backward_end", "on_step_end", "on_fit_end"])
def test_a_guard_that_fails_is_switched_off_and_the_run_goes_on(hook: str) -> None:
    guard, hears = Breaks(hook), Hears()
    trainer = make_trainer(max_steps=5)
    trainer.listeners = Listeners([guard, hears], guards=[guard])
    with pytest.warns(RuntimeWarning, match=r"(?s)Breaks failed and is off.*of the guard"):
        trainer.fit(make_data(5))
    assert trainer.state.step == 5 and hears.steps == 10 and hears.ended
    assert guard.heard.count(hook) == 1 and guard.heard[-1] == "on_fit_end"
    assert len(guard.heard) <= 4 or hook == "on_fit_end"


def test_a_guard_that_fails_over_an_error_does_not_hide_it() -> None:
    class Wrong(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            raise KeyError("the user's own")

    model = make_model()
    trainer = Wrong(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=5)
    guard, hears = Breaks("on_exception"), Hears()
    trainer.listeners = Listeners([guard, hears], guards=[guard])
    with pytest.warns(RuntimeWarning, match="Breaks failed"), pytest.raises(KeyError, match="the user's own"):
        trainer.fit(make_data(5))
    assert hears.ended


def test_the_end_reaches_everybody_though_warnings_are_errors() -> None:
    guard, hears = Breaks("on_fit_end"), Hears()
    trainer = make_trainer(max_steps=2)
    trainer.listeners = Listeners([guard, hears], guards=[guard])
    with pytest.raises(RuntimeWarning, match="Breaks failed"):  # pytest makes them errors
        trainer.fit(make_data(2))
    assert hears.ended


def test_a_callback_may_have_an_equality_of_its_own() -> None:
    class Odd(Hears):
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

        __hash__ = None  # type: ignore[assignment]

    hears = Odd()
    trainer = make_trainer(max_steps=2)
    trainer.listeners = Listeners([hears], guards=[Breaks("on_log")])
    trainer.fit(make_data(2))
    assert hears.ended


def test_what_a_guard_that_failed_finds_at_the_end_is_told_to_nobody() -> None:
    class Judges(Breaks):
        def __init__(self, report: Report) -> None:
            super().__init__("on_step_end")
            self._report = report

        def on_fit_end(self, state: RunState) -> None:
            super().on_fit_end(state)
            self._report.add(Finding("G101", "not to be trusted"), step=state.step)

    trainer = make_trainer(max_steps=5)
    guard = Judges(trainer.report)
    trainer.listeners = Listeners([guard], guards=[guard])
    with pytest.warns(RuntimeWarning, match="Judges failed"):
        trainer.fit(make_data(5))
    assert "on_fit_end" in guard.heard and trainer.report.findings == []


def test_an_error_in_a_callback_of_the_user_ends_the_run() -> None:
    trainer = make_trainer(max_steps=5)
    trainer.listeners = Listeners([Breaks("on_step_end"), Hears()], guards=[])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(make_data(5))


class Odd(nn.Module):
    """Parameters of every kind that a guard may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.strided = nn.Parameter(torch.ones(3, 6)[:, ::2])
        self.counts = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.tied = self.linear.weight
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        bent = self.strided.sum(0) + self.waves.abs() + self.precise.float() + self.coarse.float()
        return self.linear(x) * self.scalar + bent + self.empty.sum(0) + self.table(torch.arange(3)).sum(0)


def test_parameters_of_any_kind_are_met_without_a_fault_or_a_finding() -> None:
    class Step(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = Odd()
    dense = [p for name, p in model.named_parameters() if p.requires_grad and name != "table.weight"]
    optimizers = {"dense": torch.optim.SGD(dense, 0.1), "table": torch.optim.SparseAdam(model.table.parameters(), 1e-2)}
    trainer = Step(model, optimizers, max_steps=140, log_every=10)
    trainer.fit(batches(140))
    assert trainer.report.findings == []


class Steps(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


def test_gradients_of_complex_numbers_are_read_without_the_gate() -> None:
    class Waves(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.ones(*shape, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :3] * self.waves * 1j).abs()

    for shape in ((3,), (1, 3)):
        model = Waves(*shape)
        trainer = Steps(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=12, check_finite=False)
        trainer.fit(batches(12))
        assert trainer.report.findings == []


def lazily_made() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))


def scripted() -> nn.Module:
    return torch.jit.script(make_model())  # type: ignore[no-any-return]


def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(8, 3)), torch.randn(4, 8))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("make", [lazily_made, scripted, traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*Lazy modules are a new feature")
def test_modules_of_other_kinds_are_met_without_a_fault_or_a_finding(make: Any, caplog: Any) -> None:
    model = make()
    trainer = Steps(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=24, eval_every=8)
    trainer.fit(batches(24), batches(2))
    assert trainer.report.findings == [] and not caplog.records


def test_a_look_follows_what_runs_inside_torch_func() -> None:
    class Smooth(Steps):
        def training_step(self, batch: Any) -> Tensor:
            jacobians = torch.func.vmap(torch.func.jacrev(self.model))(batch[0])
            return super().training_step(batch) + 0.01 * jacobians.pow(2).mean()

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model.unused = nn.Parameter(torch.ones(3))
    trainer = Smooth(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=40)
    trainer.fit(batches(40))
    assert [(f.code, f.params) for f in trainer.report.findings] == [("P201", ["unused"])]


def test_a_fault_of_a_look_is_none_of_the_run(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("safetrain.recording.path_look._address", lambda tensor: 1 / 0)
    model = nn.Sequential(nn.Linear(8, 3))
    model.unused = nn.Parameter(torch.ones(3))
    guards = {"G101": "ignore"}  # pytest keeps what is logged, with its frames
    trainer = Steps(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=40, guards=guards)
    trainer.fit(batches(40))
    assert [(f.code, f.params) for f in trainer.report.findings] == [("P201", ["unused"])]
    assert "stopped following this step" in caplog.text
