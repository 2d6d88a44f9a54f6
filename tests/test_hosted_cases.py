"""Real bugs, hosted in a Trainer: each is caught at its line or object, its twin is silent, or the Trainer removes it.

The cases are a folder beside the project, not part of it: `SAFETRAIN_CASES` names it. Without one these tests skip.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from safetrain import BatchError, StepOutput, Trainer
from tests.case_host import CASES, expectation, host, is_localised, load, with_codes

pytestmark = [
    pytest.mark.skipif(not CASES.is_dir(), reason=f"no folder of cases at {CASES}; name one in SAFETRAIN_CASES"),
    pytest.mark.filterwarnings("ignore"),  # the cases are users' scripts, whose warnings are theirs
]

REMOVED = {
    "015_lbfgs_stale_closure": "the Trainer's closure runs the forward itself",
    "021_eval_calls_backward": "evaluation never calls backward, and steps drop what gradients there were",
    "023_retain_graph_per_term": "a step returns one loss, differentiated once",
    "063_accum_token_mean": "StepOutput weighs by tokens",
    "064_accum_last_window_dropped": "the short window is stepped with its right weight",
    "069_zero_grad_before_step": "the Trainer owns zero_grad",
    "071_clip_before_unscale": "the Trainer owns unscale and clip",
    "073_clip_exhausted_iterator": "the Trainer clips what its optimizers hold",
    "075_scheduler_runs_on_skipped_steps": "the Trainer moves the schedule only with a step",
    "076_bf16_with_scaler": "the Trainer scales under fp16 only",
    "100_resume_scheduler_lost": "a checkpoint holds the schedule",
    "102_resume_scaler_lost": "a checkpoint holds the scaler",
    "104_resume_rng_lost": "a checkpoint holds the generators",
    "109_batch_sampler_set_epoch": "the Trainer tells batch samplers the epoch too",
    "013_hook_stack_under_no_grad": "the Trainer evaluates in eval mode",
}
ALSO_RIGHT = {"012_hook_never_removed": ["G113"]}  # each hook holds the newest graph only: it is the hooks that pile up
NOT_CATCHABLE = {"032_teacher_in_optimizer": "a jointly trained branch looks the same"}


def names() -> list[str]:
    return sorted(p.name for p in CASES.iterdir() if (p / "case.py").exists()) if CASES.is_dir() else []


HOSTED = [n for n in names() if n not in {*REMOVED, *NOT_CATCHABLE} and not n.startswith("clean_")]
LOCALISED_SHARE = 0.9


def test_every_case_is_accounted_for() -> None:
    """A case is hosted, removed by the Trainer, or impossible for a stated reason."""
    for name in names():
        expected = json.loads((CASES / name / "expect.json").read_text())
        if not expected["catchable"]:
            assert name in NOT_CATCHABLE or name.startswith("clean_"), name


def test_hosted_bugs_are_caught_and_their_twins_silent(capsys: pytest.CaptureFixture[str]) -> None:
    rows, missed, alarms, localised = [], [], [], 0
    for name in HOSTED:
        expected = expectation(name)
        bug, twin = host(name, fixed=False), host(name, fixed=True)
        hits = with_codes(bug.findings, [*expected["codes"], *ALSO_RIGHT.get(name, [])])
        found = any(is_localised(hit, expected) for hit in hits)
        localised += found
        if not hits:
            missed.append(name)
        if twin.loud or twin.error:
            alarms.append((name, [f.code for f in twin.loud], twin.error))
        rows.append(f"{name:38} {','.join(f.code for f in bug.findings):20} {'line or object' if found else '-'}")
    with capsys.disabled():
        print("\n" + "\n".join(rows))
        print(f"caught {len(HOSTED) - len(missed)}/{len(HOSTED)}, localised {localised}, twins accused {len(alarms)}")
    assert not missed
    assert not alarms
    assert localised >= LOCALISED_SHARE * len(HOSTED)


@pytest.mark.parametrize("name", [n for n in names() if n.startswith("clean_")])
def test_innocent_programs_are_not_accused(name: str) -> None:
    outcome = host(name)
    assert outcome.error is None
    assert outcome.loud == []


# ---------------------------------------------------------------------- what the Trainer removes


def trained(name: str, loss: Any, **options: Any) -> tuple[Trainer, dict[str, Any]]:
    """The case's model and data in a Trainer whose step is `loss(model, batch)`."""
    parts = load(name).build(False)
    made = parts["optimizer"] if "optimizer" in parts else parts["optimizer_factory"](parts["model"])
    scheduler = parts["scheduler_factory"](made) if "scheduler_factory" in parts else None

    class Written(Trainer):
        def training_step(self, batch: Any) -> Any:
            return loss(self.model, batch)

    options = {"max_epochs": 1, "accumulate": parts.get("accumulate", 1), **options}
    trainer = Written(parts["model"], made, scheduler, **options)
    trainer.fit(parts["data"])
    return trainer, parts


def test_evaluation_in_eval_mode_stacks_nothing() -> None:
    parts = load("013_hook_stack_under_no_grad").build(False)

    class Evaluates(Trainer):
        def training_step(self, batch: Any) -> Any:
            return parts["loss_fn"](self.model, batch)

    optimizer = parts["optimizer_factory"](parts["model"])
    trainer = Evaluates(parts["model"], optimizer, max_steps=20, eval_every=5)
    trainer.fit(parts["data"], parts["data"])
    assert parts["model"][0].activations == []
    assert not trainer.report.findings


def mean_squares(model: Any, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1])


def assert_like_the_fixed_loop(name: str, trainer: Trainer, run: Any) -> None:
    """Same weights as the case's own repaired loop, and nothing to report."""
    parts = load(name).build(True)
    optimizer = parts["optimizer"] if "optimizer" in parts else parts["optimizer_factory"](parts["model"])
    run(parts, optimizer)
    for mine, theirs in zip(trainer.model.parameters(), parts["model"].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert [f for f in trainer.report.findings if f.severity != "note"] == []


def by_epoch(parts: dict[str, Any], optimizer: Any) -> None:
    parts["train_epoch"](parts["model"], optimizer, parts["data"])


def by_step(parts: dict[str, Any], optimizer: Any) -> None:
    for batch in parts["data"]:
        parts["train_step"](parts["model"], optimizer, batch)


def test_token_means_under_accumulation() -> None:
    def tokens(model: Any, batch: Any) -> StepOutput:
        x, y = batch
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return StepOutput(loss, (y != -100).sum())

    trainer, _ = trained("063_accum_token_mean", tokens)
    assert_like_the_fixed_loop("063_accum_token_mean", trainer, by_epoch)


def test_the_last_window_is_stepped_with_its_own_weight() -> None:
    trainer, _ = trained("064_accum_last_window_dropped", mean_squares)
    assert trainer.state.step == 3
    assert_like_the_fixed_loop("064_accum_last_window_dropped", trainer, by_epoch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("069_zero_grad_before_step", {}),
        ("071_clip_before_unscale", {"clip_norm": 1.0}),
        ("073_clip_exhausted_iterator", {"clip_norm": 1.0}),
    ],
)
def test_the_order_of_a_step_is_the_trainers(name: str, options: dict[str, Any]) -> None:
    trainer, _ = trained(name, mean_squares, **options)
    assert_like_the_fixed_loop(name, trainer, by_step)


def test_a_schedule_waits_while_steps_are_skipped() -> None:
    parts = load("075_scheduler_runs_on_skipped_steps").build(False)
    optimizer = parts["optimizer_factory"](parts["model"])
    schedule = parts["scheduler_factory"](optimizer)

    class Written(Trainer):
        def training_step(self, batch: Any) -> Any:
            return mean_squares(self.model, batch) * 8

    trainer = Written(parts["model"], optimizer, schedule, precision="fp16", scaler=parts["scaler"], max_epochs=1)
    trainer.fit(parts["data"])
    assert trainer.state.skipped_steps > 0
    assert schedule.last_epoch == trainer.state.step - trainer.state.skipped_steps
    assert [f for f in trainer.report.findings if f.code == "A305"] == []


def test_bf16_runs_without_a_scaler() -> None:
    trainer, _ = trained("076_bf16_with_scaler", lambda m, b: F.mse_loss(m(b[0]).float(), b[1]) * 8, precision="bf16")
    assert trainer.state.scaler is None
    assert trainer.state.skipped_steps == 0


def test_losses_of_several_terms_are_differentiated_once() -> None:
    def terms(model: Any, x: Any) -> Any:
        h = model["trunk"](x)
        return sum(head(h.tanh()).pow(2).mean() for head in model["heads"])

    trainer, _ = trained("023_retain_graph_per_term", terms)
    assert_like_the_fixed_loop("023_retain_graph_per_term", trainer, by_step)


def test_a_closure_runs_its_own_forward() -> None:
    trainer, _ = trained("015_lbfgs_stale_closure", mean_squares)
    assert_like_the_fixed_loop("015_lbfgs_stale_closure", trainer, by_step)


def test_evaluation_leaves_no_gradient() -> None:
    parts = load("021_eval_calls_backward").build(False)

    class Written(Trainer):
        def training_step(self, batch: Any) -> Any:
            return mean_squares(self.model, batch)

    trainer = Written(parts["model"], parts["optimizer_factory"](parts["model"]), max_epochs=1)
    trainer.fit(parts["data"], parts["val_data"])
    assert all(p.grad is None for p in parts["model"].parameters())

    class CallsBackward(Written):
        def evaluation_step(self, batch: Any) -> Any:
            loss = mean_squares(self.model, batch)
            self.backward(loss)
            return loss

    with pytest.raises(BatchError, match="carries no graph"):
        CallsBackward(parts["model"], parts["optimizer_factory"](parts["model"]), max_epochs=1).evaluate(parts["data"])


def test_the_same_order_is_not_replayed() -> None:
    parts = load("109_batch_sampler_set_epoch").build(False)
    seen: list[list[int]] = [[]]

    class Written(Trainer):
        def training_step(self, batch: Any) -> Any:
            if len(seen) <= self.state.epoch:
                seen.append([])
            seen[-1] += batch[0].tolist()
            return parts["loss_fn"](self.model, batch)

    Written(parts["model"], parts["optimizer_factory"](parts["model"]), max_epochs=3).fit(parts["data"])
    assert len({tuple(order) for order in seen}) == 3


@pytest.mark.parametrize("name", ["100_resume_scheduler_lost", "102_resume_scaler_lost", "104_resume_rng_lost"])
def test_a_resumed_run_lacks_nothing(name: str, tmp_path: Any) -> None:
    """Interrupted in the middle and resumed, the run ends in the same bits, schedule and loss scale."""

    def make(max_steps: int) -> Trainer:
        parts = load(name).build(False)
        if "make" in parts:
            model, optimizer, schedule = parts["make"]()
        else:
            model, schedule = parts["model"], None
            optimizer = parts["optimizer_factory"](model)

        class Written(Trainer):
            def training_step(self, x: Any) -> Any:
                return parts["loss_fn"](self.model, x) if "loss_fn" in parts else self.model(x).pow(2).mean() * 300

        scaled = {"precision": "fp16", "scaler": parts["scaler_factory"]()} if "scaler_factory" in parts else {}
        trainer = Written(model, optimizer, schedule, max_steps=max_steps, seed=0, **scaled)
        trainer.data = parts["data"]
        return trainer

    whole = make(8)
    whole.fit(whole.data)
    first = make(5)
    first.fit(first.data)
    saved = first.save(tmp_path)
    resumed = make(8)
    resumed.fit(resumed.data, resume=saved)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    for kind in ("schedulers", "optimizers"):
        for a, b in zip(getattr(whole.state, kind).values(), getattr(resumed.state, kind).values(), strict=True):
            assert (
                copy.deepcopy(a.state_dict())["param_groups" if kind == "optimizers" else "last_epoch"]
                == (b.state_dict()["param_groups" if kind == "optimizers" else "last_epoch"])
            )
    if whole.state.scaler is not None:
        assert resumed.state.scaler is not None
        assert whole.state.scaler.get_scale() == resumed.state.scaler.get_scale()
