"""Memory that grows is named with its holder and line within 200 steps; innocent programs are left in peace."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from memory_programs import INNOCENTS, LEAKS, UNNAMED, of_memory, watched
from torch import Tensor, nn

from safetrain import Trainer
from safetrain.accounting.growth import GrowthSeries, Slope, steps_needed
from safetrain.accounting.inventory import Inventory
from safetrain.accounting.investigation import Investigation
from safetrain.accounting.tracks import Track
from safetrain.graph import Survey
from safetrain.source import with_text


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """What earlier tests left must not be freed while the heap of this one is watched."""
    gc.collect()


@pytest.mark.parametrize("leak", LEAKS, ids=lambda p: p.__name__)
def test_a_leak_of_a_kilobyte_a_step_is_named_within_200_steps(leak: Callable[[int], None]) -> None:
    with watched() as report:
        leak(200)
    (finding,) = of_memory(report)
    assert finding.code == "M402"
    assert LEAKS[leak] in finding.holder
    assert finding.growth_bytes_per_step > 900
    assert leak.__code__.co_firstlineno <= finding.source.line or leak.__name__ == "dataset_remembers"
    assert finding.fix


@pytest.mark.parametrize("leak", UNNAMED, ids=lambda p: p.__name__)
def test_a_leak_that_no_name_leads_to_is_told_by_the_line_that_allocates(leak: Callable[[int], None]) -> None:
    with watched() as report:
        leak(120)
    (finding,) = of_memory(report)
    assert finding.code == "M402"
    assert "torch.randn(64, 256)" in finding.source.text
    assert finding.growth_bytes_per_step == 65_536
    assert finding.holder


@pytest.mark.slow
@pytest.mark.parametrize("program", INNOCENTS, ids=lambda p: p.__name__)
def test_an_innocent_program_of_2000_steps_raises_nothing(program: Callable[[int], None]) -> None:
    with watched() as report:
        program(2000)
    assert not of_memory(report)


@pytest.mark.parametrize("program", INNOCENTS, ids=lambda p: p.__name__)
def test_an_innocent_program_of_200_steps_raises_nothing(program: Callable[[int], None]) -> None:
    with watched() as report:
        program(200)
    assert not of_memory(report)


def test_the_history_of_lbfgs_is_bounded() -> None:
    class Classifier(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(130, 16, 8)]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    trainer = Classifier(model, optimizer, max_steps=130)
    trainer.fit(batches)
    assert len(next(iter(optimizer.state.values()))["old_dirs"]) > 60
    assert trainer.report.findings == []


def test_a_view_is_told_from_what_it_pins() -> None:
    with watched() as report:
        next(leak for leak in LEAKS if leak.__name__ == "view_that_pins")(200)
    (finding,) = of_memory(report)
    assert "a view of shape [2] keeps the whole storage behind it alive" in finding.message
    assert ".clone()" in finding.fix


# ---------------------------------------------------------------- in the Trainer


class Leaky(Trainer):
    """Regression that keeps whatever `keep` says."""

    keep: Callable[[Tensor], Any] = staticmethod(lambda hidden: None)
    keep_in_evaluation: Callable[[Tensor], Any] = staticmethod(lambda hidden: None)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.model[0](batch)
        self.keep(hidden)
        return self.model[1](hidden).pow(2).mean()

    def evaluation_step(self, batch: Tensor) -> dict[str, float]:
        self.keep_in_evaluation(self.model[0](batch))
        return {"score": 0.0}


def make_leaky(**options: Any) -> Leaky:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 1))
    return Leaky(model, torch.optim.SGD(model.parameters(), 0.01, fused=True), **options)


def data(batches: int) -> list[Tensor]:
    return [torch.randn(64, 8) for _ in range(batches)]


def test_the_trainer_names_a_slice_that_pins_its_storage_within_20_steps() -> None:
    trainer = make_leaky(max_steps=24)
    tokens = []
    trainer.keep = lambda hidden: tokens.append(hidden[:, 0].detach())
    trainer.fit(data(24))
    (finding,) = of_memory(trainer.report)
    assert (finding.code, finding.first_step <= 20) == ("M402", True)
    assert "`tokens`" in finding.holder
    assert "tokens.append" in finding.source.text
    assert "[64] keeps the whole storage" in finding.message


def test_what_the_graph_rules_have_told_is_not_told_again() -> None:
    trainer = make_leaky(max_steps=40)
    outputs = []
    trainer.keep = outputs.append  # with its graph, of 131 kB
    trainer.fit(data(40))
    assert {f.code for f in trainer.report.findings} == {"G101"}


def test_growth_from_one_evaluation_to_the_next_is_another_rule() -> None:
    trainer = make_leaky(max_steps=24, eval_every=4)
    outputs = []
    trainer.keep_in_evaluation = outputs.append
    trainer.fit(data(24), data(2))
    (finding,) = of_memory(trainer.report)
    assert (finding.code, finding.phase, finding.first_step) == ("M405", "eval", 16)
    assert "`outputs`" in finding.holder


def test_an_evaluation_that_drops_its_outputs_is_silent() -> None:
    trainer = make_leaky(max_steps=24, eval_every=4)
    outputs: list[Tensor] = []
    trainer.keep_in_evaluation = lambda hidden: outputs.__setitem__(slice(None), [hidden])
    trainer.fit(data(24), data(2))
    assert not of_memory(trainer.report)


def test_an_endless_cache_is_named_at_its_decorator() -> None:
    @functools.cache
    def noise(step: int) -> Tensor:
        return torch.randn(128, 512)

    trainer = make_leaky(max_steps=24)
    trainer.keep = lambda hidden: noise(trainer.state.step)
    trainer.fit(data(24))
    (finding,) = of_memory(trainer.report)
    assert finding.source.text == "@functools.cache"
    assert "maxsize" in finding.fix


def test_a_policy_can_silence_the_rule() -> None:
    trainer = make_leaky(max_steps=24, guards={"M402": "ignore"})
    kept = []
    trainer.keep = lambda hidden: kept.append(hidden.detach())
    trainer.fit(data(24))
    assert not trainer.report.findings


# ---------------------------------------------------------------- the test of the slope


def series(readings: list[int]) -> GrowthSeries:
    made = GrowthSeries()
    for step, used in enumerate(readings):
        if step % made.stride == 0:
            made.add(step, used)
    return made


def test_the_line_that_stores_is_looked_for_in_what_the_user_keeps_not_in_the_trainers_books() -> None:
    class Books:
        def __init__(self) -> None:
            self.entries = [torch.zeros(64)]

    Books.__module__ = "safetrain.books"
    books, kept = Books(), [torch.zeros(64)]

    def survey() -> Survey:
        return Survey({"books": books, "kept": kept})

    slope = cast(Slope, SimpleNamespace(bytes_per_step=2048.0))
    track = cast(Track, SimpleNamespace(meter=SimpleNamespace(read=lambda: 0)))
    case = Investigation(track, slope, Inventory(survey(), 0))
    for step in (6, 12):
        kept.append(torch.zeros(512))
        books.entries.append(torch.zeros(4096))
        now = survey()
        case.look(now, step)
    assert case.go_on(now)
    assert case.trace is not None
    kept.append(torch.zeros(512))
    case.end_trace()
    assert case.stored_at is not None
    assert with_text(case.stored_at).text == "kept.append(torch.zeros(512))"


def test_steady_growth_is_seen_as_soon_as_its_size_allows() -> None:
    for rate in (1_000, 30_000, 1_000_000):
        needed = int(steps_needed(rate)) + 8
        slope = series([rate * step for step in range(needed)]).slope()
        assert slope is not None
        assert slope.bytes_per_step == pytest.approx(rate)
        assert series([rate * step for step in range(needed // 2)]).slope() is None


def test_noise_a_jump_and_a_plateau_are_no_growth() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 60_000, (400,), generator=generator).tolist()
    assert series(noise).slope() is None
    assert series([0] * 100 + [10_000_000] * 100).slope() is None
    assert series([min(step, 60) * 50_000 for step in range(120)]).slope() is None


def test_growth_under_noise_of_sixty_times_its_size_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 60_000, (400,), generator=generator).tolist()
    slope = series([1_000 * step + extra for step, extra in enumerate(noise)]).slope()
    assert slope is not None
    assert 600 < slope.bytes_per_step < 1_500
