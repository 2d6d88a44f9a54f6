"""Loss scaling, clipping and schedules in hand-written loops: each wrong order planted, next to the right one."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from foreign_loops import KINDS, batch, loud, make, only, watched
from torch import Tensor, nn

from safetrain import Trainer
from safetrain.findings import Report
from safetrain.foreign.events import LoopEvent
from safetrain.guarding.loop import loop_guards
from safetrain.rules import precision as rules


def half_loss(model: nn.Module, n: int = 8, dtype: torch.dtype | None = torch.float16) -> Tensor:
    x, y = batch(model, n)
    with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
        out = model(x)
    return F.cross_entropy(out.float(), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def scaler(**options: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**8, **options})


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping_before_unscaling(kind: str, unscaled: bool) -> None:
    model = make(kind)
    optimizer, amp = sgd(model), scaler()
    with watched() as report:
        for _ in range(4):
            optimizer.zero_grad()
            amp.scale(half_loss(model, 32)).backward()
            if unscaled:
                amp.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE
            amp.step(optimizer)
            amp.update()
    if unscaled:
        assert loud(report) == []
    else:
        finding = only(report, "A301")
        assert finding.source is not None and "# HERE" in finding.source.text and finding.first_step == 1


def test_clipping_without_a_scaler_is_clipping() -> None:
    model = make("mlp")
    optimizer = sgd(model)
    with watched() as report:
        for _ in range(4):
            optimizer.zero_grad()
            half_loss(model, dtype=None).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
    assert loud(report) == []


def test_a_backward_after_unscale_adds_scaled_to_unscaled() -> None:
    for wrong in (True, False):
        model = make("mlp")
        optimizer, amp = sgd(model), scaler()
        with watched() as report:
            for _ in range(3):
                optimizer.zero_grad()
                for micro in range(2):
                    amp.scale(half_loss(model) / 2).backward()
                    if micro == (0 if wrong else 1):
                        amp.unscale_(optimizer)
                amp.step(optimizer)
                amp.update()
        if wrong:
            assert only(report, "A302").op == "unscale_"
        else:
            assert loud(report) == []


def test_unscaling_twice_is_explained() -> None:
    model = make("mlp")
    optimizer, amp = sgd(model), scaler()
    with watched() as report:
        optimizer.zero_grad()
        amp.scale(half_loss(model)).backward()
        amp.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="unscale_"):
            amp.unscale_(optimizer)
    assert "called twice" in only(report, "A302").message


@pytest.mark.parametrize("dtype", [torch.bfloat16, None, torch.float16], ids=str)
def test_a_scaler_without_half_precision(dtype: torch.dtype | None) -> None:
    model = make("conv")
    optimizer, amp = sgd(model), scaler()
    with watched() as report:
        for _ in range(4):
            optimizer.zero_grad()
            amp.scale(half_loss(model, 32, dtype)).backward()
            amp.step(optimizer)
            amp.update()
    if dtype is torch.float16:
        assert loud(report) == []
    else:
        finding = only(report, "A303")
        assert ("bfloat16" if dtype else "float32") in finding.message and "GradScaler" in finding.message


def test_a_disabled_scaler_is_no_scaler() -> None:
    model = make("mlp")
    optimizer, amp = sgd(model), torch.amp.GradScaler("cpu", enabled=False)
    with watched() as report:
        for _ in range(3):
            optimizer.zero_grad()
            amp.scale(half_loss(model, dtype=torch.bfloat16)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            amp.step(optimizer)
            amp.update()
    assert loud(report) == []


def test_scale_collapse_against_a_scale_being_found() -> None:
    record = rules.SkipRecord()
    assert not [f for step in range(1, 12) for f in record.add(step, taken=False, scale=2.0 ** (16 - step))]
    assert not [f for step in range(12, 400) for f in record.add(step, taken=step % 50 != 0, scale=32.0)]
    record = rules.SkipRecord()
    [finding] = [f for step in range(1, 60) for f in record.add(step, taken=False)]
    assert finding.code == "A304" and finding.first_step == 1
    record = rules.SkipRecord()
    [finding] = [f for step in range(1, 60) for f in record.add(step, taken=False, scale=2.0 ** (8 - step))]
    assert "scale is down to" in finding.message


def schedule_loop(order: str, *, steps: int = 6, overflow: bool = False, per_epoch: int = 1) -> Report:
    model = make("mlp")
    optimizer, amp = sgd(model), scaler(init_scale=2.0**40 if overflow else 2.0**8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    with watched() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if order == "resumed":
            for _ in range(3):
                schedule.step()
        if order == "once before":
            schedule.step()
        for step in range(steps):
            if order == "before" and step % per_epoch == 0:
                schedule.step()
            optimizer.zero_grad()
            amp.scale(half_loss(model)).backward()
            scale = amp.get_scale()
            amp.step(optimizer)
            amp.update()
            if (order != "before" and order != "guarded" and step % per_epoch == per_epoch - 1) or (
                order == "guarded" and amp.get_scale() >= scale
            ):
                schedule.step()
    return report


@pytest.mark.parametrize(
    ("order", "options", "wrong"),
    [
        ("after", {"overflow": True}, True),
        ("guarded", {"overflow": True}, False),
        ("after", {}, False),
        ("after", {"overflow": True, "steps": 9, "per_epoch": 3}, False),
        ("before", {}, True),
        ("before", {"steps": 9, "per_epoch": 3}, True),
        ("resumed", {}, False),
        ("once before", {}, False),
    ],
)
def test_schedules_and_skipped_or_missing_steps(order: str, options: dict[str, int], wrong: bool) -> None:
    report = schedule_loop(order, **options)  # type: ignore[arg-type]
    if wrong:
        assert "LambdaLR" in only(report, "A305").message
    else:
        assert loud(report) == []


def clip_loop(clip: Callable[[nn.Module, str], None], **options: int) -> Report:
    model = make("rnn")
    optimizer = sgd(model)
    with watched() as report, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            optimizer.zero_grad()
            clip(model, "before")
            for _ in range(options.get("accumulate", 1)):
                (half_loss(model, dtype=None) / options.get("accumulate", 1)).backward()
                clip(model, "micro")
            clip(model, "after")
            optimizer.step()
            clip(model, "late")
    return report


@pytest.mark.parametrize("when", ["before", "late"])
def test_clipping_at_the_wrong_time(when: str) -> None:
    report = clip_loop(lambda m, at: nn.utils.clip_grad_norm_(m.parameters(), 1.0) if at == when else None)
    assert only(report, "A306").op == "clip_grad_norm_"


def test_clipping_nothing_and_other_parameters() -> None:
    used_up = iter(())
    report = clip_loop(lambda m, at: nn.utils.clip_grad_norm_(used_up, 1.0) if at == "after" else None)
    assert "no parameters at all" in (only(report, "A306").cause or "")
    other = make("mlp")
    report = clip_loop(lambda m, at: nn.utils.clip_grad_norm_(other.parameters(), 1.0) if at == "after" else None)
    assert "none of the parameters" in (only(report, "A306").cause or "")
    report = clip_loop(lambda m, at: nn.utils.clip_grad_norm_(m.parameters(), 1.0) if at == "after" else None)
    assert loud(report) == []


def test_clipping_per_micro_batch() -> None:
    report = clip_loop(
        lambda m, at: nn.utils.clip_grad_norm_(m.parameters(), 1.0) if at == "micro" else None, accumulate=3
    )
    assert only(report, "A307").first_step == 1
    report = clip_loop(
        lambda m, at: nn.utils.clip_grad_norm_(m.parameters(), 1.0) if at == "after" else None, accumulate=3
    )
    assert loud(report) == []


def test_per_sample_clipping_is_legitimate() -> None:
    model = make("mlp")
    optimizer = sgd(model)
    with watched() as report:
        for _ in range(4):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for _ in range(3):
                model.zero_grad()
                half_loss(model, 1, None).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for t, p in zip(total, model.parameters(), strict=True):
                    t += p.grad / 3
            for t, p in zip(total, model.parameters(), strict=True):
                p.grad = t
            optimizer.step()
    assert loud(report) == []


def test_clipping_generator_and_critic_is_legitimate() -> None:
    gen, critic = nn.Linear(3, 6), make("mlp")
    opt_g, opt_c = sgd(gen), sgd(critic)
    with watched() as report:
        for _ in range(6):
            fake = gen(torch.randn(8, 3))
            opt_c.zero_grad()
            critic(fake.detach()).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            opt_c.step()
            opt_g.zero_grad()
            (-critic(fake)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(gen.parameters(), 1.0)
            opt_g.step()
    assert loud(report) == []


def test_judging_a_plain_record() -> None:
    def event(kind: str, **data: object) -> LoopEvent:
        return LoopEvent(kind, 1, None, data)  # type: ignore[arg-type]

    record = [
        event("backward", scaled=True), event("clip", function="clip_grad_norm_", params=(1,), num_grads=1),
        event("scaler_step", scaler=1, optimizer=2, taken=True),
    ]  # fmt: skip
    assert [f.code for f in rules.find_precision_faults(record)] == ["A301"]
    assert rules.find_precision_faults([record[0], event("unscale", scaler=1, optimizer=2), *record[1:]]) == []


class Plain(Trainer):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x).float(), y)


@pytest.mark.parametrize(
    "options", [{"precision": "fp16"}, {"precision": "fp16", "accumulate": 2}, {"precision": "bf16"}], ids=str
)
def test_the_trainer_makes_none_of_these_faults(options: dict[str, object]) -> None:
    model = make("mlp")
    report = Report()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    data = [batch(model) for _ in range(3)]
    Plain(
        model, optimizer, schedule, max_steps=8, clip_norm=1.0, guards="off", callbacks=loop_guards(report), **options
    ).fit(data)
    assert loud(report) == []
