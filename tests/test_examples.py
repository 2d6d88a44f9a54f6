"""The examples, through their configs, in short form: they learn, and do what they say."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from safetrain.config.build import Job, build
from safetrain.config.file import load

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = sorted((EXAMPLES / "configs").glob("*.yaml"))

pytest.importorskip("sklearn")

SMALL_TEXT = ["params.limit_chars=60000", "params.width=32"]
SHORT = {
    "char_gpt": [*SMALL_TEXT, "params.length=32", "params.depth=2", "loop.eval_every=40", "schedule.warmup_steps=4"],
    "digits": ["params.width=8"],
    "finetune": ["params.width=8", "loop.eval_every=40"],
    "gan": ["data.batch_size=64", "params.width=32"],
    "gradient_penalty": ["params.width=8", "optim.lr=1e-2"],
    "tbptt": SMALL_TEXT,
}
"""What makes each small enough for a test; all run 40 steps."""


def _job(name: str, run_dir: Path, *overrides: str) -> Job:
    quiet = ["callbacks.progress=false", "callbacks.tensorboard=false", "callbacks.checkpoint=false"]
    config = load(EXAMPLES / "configs" / f"{name}.yaml", [*quiet, *overrides])
    return build(config, run_dir)


def _short(name: str, run_dir: Path, *overrides: str) -> Job:
    length = ["loop.max_steps=40", "loop.max_epochs=null", "loop.log_every=1", "loop.limit_eval_batches=4"]
    return _job(name, run_dir, *length, *SHORT[name], *overrides)


def _losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_every_example_has_a_config_and_every_config_an_example() -> None:
    trainings = {file.stem for file in EXAMPLES.glob("*.py") if "Trainer" in file.read_text()}
    assert trainings == {config.stem for config in CONFIGS} == set(SHORT)


@pytest.mark.parametrize("name", sorted(set(SHORT) - {"gan"}))
def test_the_loss_falls(name: str, tmp_path: Path) -> None:
    job = _short(name, tmp_path)
    state = job.trainer.fit(job.train, job.val)
    losses = _losses(tmp_path)
    assert len(losses) == state.step == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert state.eval_metrics["loss"] < losses[0]
    assert job.trainer.report.findings == []


def test_the_gan_brings_its_points_closer_to_the_real_ones(tmp_path: Path) -> None:
    job = _short("gan", tmp_path, "loop.max_steps=150")
    before = job.trainer.evaluate(job.val)["energy_distance"]
    after = job.trainer.fit(job.train, job.val).eval_metrics["energy_distance"]
    assert after < 0.6 * before
    assert job.trainer.report.findings == []


def test_finetuning_moves_nothing_of_the_backbone(tmp_path: Path) -> None:
    job = _short("finetune", tmp_path)
    backbone, head = job.trainer.model
    before = {name: value.clone() for name, value in job.trainer.model.state_dict().items()}
    job.trainer.fit(job.train, job.val)
    after = job.trainer.model.state_dict()
    moved = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"1"}  # the head
    assert not backbone.training and head.training


def test_the_carried_state_is_cut_from_the_graph_and_read_on(tmp_path: Path) -> None:
    job = _short("tbptt", tmp_path, "loop.max_steps=2")
    state = job.trainer.fit(job.train)
    carried = job.trainer.model.carried.clone()
    assert state.step == 2 and not job.trainer.model.carried.requires_grad and carried.abs().sum() > 0
    job.trainer.evaluate(job.val)
    assert torch.equal(job.trainer.model.carried, carried)  # an evaluation between two steps does not disturb it


def test_the_penalty_makes_the_loss_less_steep(tmp_path: Path) -> None:
    steepness = {}
    for penalty in (0, 3):
        job = _short("gradient_penalty", tmp_path / str(penalty), f"params.penalty={penalty}")
        steepness[penalty] = job.trainer.fit(job.train).metrics["steepness"]
    assert steepness[3] < 0.7 * steepness[0]


def test_the_ngram_baseline_is_a_probability() -> None:
    """Over all next characters of one context the smoothed estimates add up to 1, so its loss can be compared."""
    sys.path.insert(0, str(EXAMPLES))
    from stdlib_text import ALPHABET, ngram_loss

    text = torch.randint(5, (400,), generator=torch.Generator().manual_seed(0))
    for order in (1, 2, 3):
        context = text[7 : 7 + order - 1]
        endings = [torch.cat((context, torch.tensor([code]))) for code in range(len(ALPHABET))]
        total = sum(math.exp(-ngram_loss([text], [ending], order)) for ending in endings)
        assert total == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_what_a_config_offers_in_comments_can_be_switched_on(config: Path) -> None:
    offered = re.findall(r"^# (\w+): (\{.*\})", config.read_text(), re.MULTILINE)
    load(config, [f"{key}={value}" for key, value in offered])


@pytest.mark.slow
def test_digits_reach_98_percent(tmp_path: Path) -> None:
    job = _job("digits", tmp_path)
    metrics = job.trainer.fit(job.train, job.val).eval_metrics
    assert metrics["accuracy"] >= 0.98
    assert job.trainer.report.findings == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own sources
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_gpt_trains_alike_under_both_switches(tmp_path: Path) -> None:
    recompute = "activation_checkpoint.modules=blocks.*"
    switches = {"plain": [], "recomputed": [recompute], "both": [recompute, "compile.verify=true"]}
    losses = {}
    for name, overrides in switches.items():
        job = _short("char_gpt", tmp_path / name, "params.depth=1", "loop.max_steps=10", *overrides)
        job.trainer.fit(job.train)
        losses[name] = _losses(tmp_path / name)
    assert losses["plain"] == losses["recomputed"]
    assert losses["both"] == pytest.approx(losses["plain"], rel=1e-3)
