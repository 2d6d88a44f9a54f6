"""Out of memory in forward or backward: the step is repeated in smaller micro-batches, and nothing else shows."""

from __future__ import annotations

import random
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import BatchError, Callback, ConfigError, RunState, StepOutput, Trainer
from safetrain.data.cutting import cut

TOLD = "out of memory with micro-batches of"


def no_memory(num_bytes: int = 1 << 30) -> RuntimeError:
    """What the CPU's allocator says."""
    return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {num_bytes} bytes.")


class Full(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise no_memory()


class Limited(nn.Module):
    """A layer that does not fit more than `fits` samples, from a call on."""

    def __init__(self, fits: int = 10_000, phase: str = "forward", from_call: int = 1) -> None:
        super().__init__()
        self.fits, self.phase, self.from_call = fits, phase, from_call
        self.calls: list[int] = []  # changed in place: a list of ours that keeps the failed attempts, too

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        if not self.training or len(x) <= self.fits or len(self.calls) < self.from_call:
            return x
        if self.phase == "backward":
            return Full.apply(x)
        raise no_memory()


class Net(nn.Module):
    """Everything that a forward can move: BatchNorm's statistics, dropout, a big buffer, a counter, a queue."""

    def __init__(self, limit: Limited, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.limit = limit
        self.last = nn.Linear(32, 4)
        self.register_buffer("mask", torch.ones(200, 200))
        self.register_buffer("queue", torch.zeros(300, 64))
        self.rows_seen = 0
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows_seen += len(x)
            self.queue[self.rows_seen % 300, 0] += 1
        h = self.drop(torch.relu(self.norm(self.first(x))))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean()
        return self.last(self.limit(h))


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Any:
        x, y = batch
        noise = random.random() + float(np.random.rand())
        self.log("noise", noise)
        logits = self.model(x * (1 + 0.01 * noise))
        return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}


class Tokens(Trainer):
    def training_step(self, batch: Any) -> StepOutput:
        x, y = batch
        loss, keep = F.cross_entropy(self.model(x), y, reduction="none"), y != 0
        return StepOutput((loss * keep).sum(), keep.sum())


class Rows(Callback):
    """The rows of the log, and the splits."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.splits: list[tuple[int, int | None]] = []

    def on_log(self, state: RunState) -> None:
        self.rows.append(dict(state.row))

    def on_split(self, state: RunState) -> None:
        assert state.exception is not None
        self.splits.append((state.current_step, state.micro_batch_size))


def make_data(batch_size: int, samples: int = 100) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randint(4, (samples,), generator=generator)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def make_trainer(kind: type[Trainer], limit: Limited, *, norm: bool = True, **settings: Any) -> tuple[Trainer, Rows]:
    model, rows = Net(limit, norm), Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    settings = {"max_epochs": 3, "seed": 7, "log_every": 1, "guards": "off", **settings}
    return kind(model, optimizer, callbacks=[rows], **settings), rows


def assert_same(mine: Trainer, theirs: Trainer) -> None:
    """To the bit: weights, buffers, optimizer, attributes, counters."""
    assert isinstance(mine.model, Net) and isinstance(theirs.model, Net)
    other = theirs.model.state_dict()
    for name, value in mine.model.state_dict().items():
        assert torch.equal(value, other[name]), name
    assert mine.model.rows_seen == theirs.model.rows_seen
    assert torch.equal(mine.model.mean, theirs.model.mean)
    for name in ("step", "micro_step", "num_samples", "epoch", "skipped_steps"):
        assert getattr(mine.state, name) == getattr(theirs.state, name), name
    for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        a, b = mine.state.optimizers["main"].state[p], theirs.state.optimizers["main"].state[q]
        assert all(torch.equal(a[key], b[key]) for key in b)


def without_splits(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "memory/oom_splits"} for row in rows]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", [Classifier, Tokens])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_that_never_fitted_equals_one_started_at_that_size(
    phase: str, kind: type[Trainer], precision: Any
) -> None:
    """32 samples do not fit, nor 16: from the first step on the run is that of a loader with batches of 8."""
    split, rows = make_trainer(kind, Limited(fits=8, phase=phase), oom="split", precision=precision)
    with pytest.warns(RuntimeWarning, match=TOLD):
        split.fit(make_data(32))
    assert rows.splits == [(1, 16), (1, 8)]
    assert (split.state.micro_batch_size, split.state.oom_splits) == (8, 2)
    started, started_rows = make_trainer(kind, Limited(), accumulate=4, precision=precision)
    started.fit(make_data(8))
    assert_same(split, started)
    assert without_splits(rows.rows) == started_rows.rows
    assert [row["memory/oom_splits"] for row in rows.rows] == [2.0] * len(rows.rows)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_from_the_repeated_step_on_it_is_a_run_started_there_at_that_size(
    phase: str, step: int, tmp_path: Path
) -> None:
    """Windows of two batches; the second one fails, after a backward of the first has added up gradients."""
    call = 2 * step
    split, rows = make_trainer(Classifier, Limited(fits=16, phase=phase, from_call=call), accumulate=2, oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD):
        split.fit(make_data(32))
    assert rows.splits == [(step, 16)]
    before, before_rows = make_trainer(Classifier, Limited(), accumulate=2, max_steps=step - 1 or None)
    after, after_rows = make_trainer(Classifier, Limited(), accumulate=2, micro_batch_size=16)
    if step > 1:
        before.fit(make_data(32))
        after.model.rows_seen, after.model.mean = before.model.rows_seen, before.model.mean  # type: ignore[assignment]
    after.fit(make_data(32), resume=before.save(tmp_path) if step > 1 else None)
    assert_same(split, after)
    first = before_rows.rows if step > 1 else []
    assert without_splits(rows.rows) == first + after_rows.rows


def test_the_size_is_kept_in_the_checkpoint(tmp_path: Path) -> None:
    """A resumed run goes on with it, so that it ends in the same bits, and does not run out of memory once more."""
    whole, _ = make_trainer(Classifier, Limited(fits=16), oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD):
        whole.fit(make_data(32))
    part, _ = make_trainer(Classifier, Limited(fits=16), oom="split", max_steps=5)
    with pytest.warns(RuntimeWarning, match=TOLD):
        part.fit(make_data(32))
    rest, rows = make_trainer(Classifier, Limited(fits=16), oom="split")
    rest.model.rows_seen, rest.model.mean = part.model.rows_seen, part.model.mean
    rest.fit(make_data(32), resume=part.save(tmp_path))
    assert not rows.splits
    assert_same(rest, whole)
    given, _ = make_trainer(Classifier, Limited(), micro_batch_size=4)
    given.load(tmp_path / "step_00000005")
    assert given.state.micro_batch_size == 4


def test_an_optimizer_that_evaluates_a_closure_is_split_too() -> None:
    runs = []
    for settings in ({"oom": "split"}, {"micro_batch_size": 16}):
        model = Net(Limited(fits=16))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        trainer = Classifier(model, optimizer, max_steps=4, seed=7, guards="off", **settings)  # type: ignore[arg-type]
        with pytest.warns(RuntimeWarning, match=TOLD) if "oom" in settings else nullcontext():
            trainer.fit(make_data(32))
        runs.append(trainer.model.state_dict())
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


def test_gradients_that_were_there_before_are_kept() -> None:
    """A trainer that calls forward_backward twice in a step: the second call fails and keeps what the first gave."""

    class Twice(Classifier):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            self.forward_backward(window)
            self.forward_backward(window)
            self.optimizer_step()

    split, rows = make_trainer(Twice, Limited(fits=16, phase="backward", from_call=4), max_steps=2, oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD):
        split.fit(make_data(32))
    assert rows.splits == [(2, 16)]
    assert torch.equal(split.model.first.weight, _two_steps_by_hand())


def _two_steps_by_hand() -> Tensor:
    class Half(Classifier):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            self.forward_backward(window)
            if self.state.step == 1:
                self.state.micro_batch_size = 16
            self.forward_backward(window)
            self.optimizer_step()

    trainer, _ = make_trainer(Half, Limited(), max_steps=2)
    trainer.fit(make_data(32))
    weight: Tensor = trainer.model.first.weight
    return weight


# ---------------------------------------------------------------- what cannot be split


def test_a_single_sample_that_does_not_fit_ends_the_run_with_the_allocators_error() -> None:
    split, rows = make_trainer(Classifier, Limited(fits=0), norm=False, oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD), pytest.raises(RuntimeError, match="allocate memory") as raised:
        split.fit(make_data(32))
    assert [size for _, size in rows.splits] == [16, 8, 4, 2, 1]
    assert "a micro-batch of a single sample does not fit either" in "".join(raised.value.__notes__)
    assert split.state.step == 0


class Reads(Trainer):
    """Takes whatever the batch holds."""

    def training_step(self, batch: Any) -> Tensor:
        x: Tensor = batch["x"]
        return self.model(x).square().mean()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"lengths": torch.zeros(7, 2)}, r"batch\['lengths'\] has shape \(7, 2\)"),
        ({"graph": object()}, r"batch\['graph'\] is a object"),
        ({"graph": torch.eye(32).to_sparse()}, r"batch\['graph'\] is sparse or nested"),
        ({"parts": [torch.zeros(32, 1)] * 32}, r"batch\['parts'\] has 32 entries of 32 samples each"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_named(extra: dict[str, Any], says: str) -> None:
    split, _ = make_trainer(Reads, Limited(fits=16), oom="split")
    with pytest.raises(BatchError, match=f"step 1: out of memory, and the batch cannot be split: {says}.*split_batch"):
        split.fit([{"x": torch.randn(32, 8), **extra}])


def test_a_batch_without_a_batch_dimension_is_one_sample() -> None:
    class Constant(Trainer):
        def training_step(self, batch: Any) -> Tensor:
            return self.model(torch.ones(4, 8)).mean() * batch

    split, _ = make_trainer(Constant, Limited(fits=1), oom="split")
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        split.fit([torch.tensor(1.0)])
    assert "single sample" in "".join(raised.value.__notes__)


def test_a_split_batch_of_ones_own_cuts_what_the_default_cannot() -> None:
    """Time-major sequences: the samples are the second dimension."""

    class TimeMajor(Reads):
        def batch_size(self, batch: Any) -> int:
            return int(batch["x"].shape[1])

        def split_batch(self, batch: Any, size: int) -> list[Any]:
            return [{"x": piece} for piece in batch["x"].split(size, dim=1)]

        def training_step(self, batch: Any) -> Tensor:
            return super().training_step({"x": batch["x"].sum(0)})

    split, rows = make_trainer(TimeMajor, Limited(fits=8), oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD):
        split.fit([{"x": torch.randn(5, 32, 8)}])
    assert rows.splits == [(1, 16), (1, 8)]

    class Stubborn(TimeMajor):
        def split_batch(self, batch: Any, size: int) -> list[Any]:
            return [batch]

    split, rows = make_trainer(Stubborn, Limited(fits=8), oom="split")
    with pytest.warns(RuntimeWarning, match=TOLD), pytest.raises(RuntimeError) as raised:
        split.fit([{"x": torch.randn(5, 32, 8)}])
    assert "split_batch gave a piece of 32 samples where at most 16 were asked for" in "".join(raised.value.__notes__)


def test_a_step_that_writes_into_its_batch_is_not_run_twice_on_it() -> None:
    class Writes(Reads):
        def training_step(self, batch: Any) -> Tensor:
            batch["x"].mul_(2.0)
            return super().training_step(batch)

    split, rows = make_trainer(Writes, Limited(fits=16), oom="split")
    with pytest.raises(RuntimeError) as raised:
        split.fit([{"x": torch.randn(32, 8)}])
    assert "training_step changes its batch in place" in "".join(raised.value.__notes__)
    assert not rows.splits


def test_batchnorm_is_split_and_the_other_statistics_are_told() -> None:
    with pytest.warns(RuntimeWarning, match="but for BatchNorm: 1 layers take their statistics over 16 samples"):
        make_trainer(Classifier, Limited(fits=16), oom="split")[0].fit(make_data(32))
    with pytest.warns(RuntimeWarning, match="16 and the same gradients"):
        make_trainer(Classifier, Limited(fits=16), norm=False, oom="split")[0].fit(make_data(32))


def test_a_buffer_first_written_in_the_failed_step_is_named() -> None:
    """A big buffer that rested through the steps before has no copy; it is not guessed at."""

    class Late(Classifier):
        def training_step(self, batch: Any) -> Any:
            if self.state.step == 3:
                self.model.mask.add_(1.0)
            return super().training_step(batch)

    split, _ = make_trainer(Late, Limited(fits=16, from_call=4), oom="split")
    with pytest.raises(RuntimeError) as raised:
        split.fit(make_data(32, samples=128))
    assert "`mask` was changed for the first time in this step" in "".join(raised.value.__notes__)
    kept, _ = make_trainer(Late, Limited(fits=16, from_call=5), oom="split", max_epochs=4)
    with pytest.warns(RuntimeWarning, match=TOLD):
        kept.fit(make_data(32, samples=128))
    assert float(kept.model.mask[0, 0]) == 2.0


def test_a_generator_first_used_in_the_failed_step_is_told() -> None:
    class Late(Reads):
        def training_step(self, batch: Any) -> Tensor:
            if self.state.step == 8:
                random.random()
            return super().training_step(batch)

    split, _ = make_trainer(Late, Limited(fits=16, from_call=9), oom="split", max_epochs=10)
    with pytest.warns(RuntimeWarning) as told:
        split.fit([{"x": torch.randn(32, 8)}])
    assert any("draws from Python's or NumPy's generator for the first time" in str(w.message) for w in told)


def test_a_trainer_that_goes_its_own_way_is_told_that_nothing_is_repeated() -> None:
    class Own(Classifier):
        def train_step(self, window: Any) -> None:
            self.zero_grad()
            for batch in window:
                self.backward(self.training_step(batch)[0])
            self.optimizer_step()

    with pytest.warns(RuntimeWarning, match="oom='split' has no effect: Own.train_step does not call forward_backward"):
        make_trainer(Own, Limited(), oom="split", max_steps=2)[0].fit(make_data(32))


def test_other_errors_and_other_places_are_left_alone() -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any) -> Any:
            raise RuntimeError("expected scalar type Float")

    with pytest.raises(RuntimeError, match="expected scalar type"):
        make_trainer(Wrong, Limited(), oom="split")[0].fit(make_data(32))

    class FullStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise no_memory()

    model = Net(Limited())
    trainer = Classifier(model, FullStep(model.parameters(), 0.1), max_steps=2, oom="split", guards="off")
    with pytest.raises(RuntimeError, match="allocate memory"):
        trainer.fit(make_data(32))
    assert trainer.state.oom_splits == 0


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="oom='retry'; it is 'raise' or 'split'"):
        make_trainer(Classifier, Limited(), oom="retry")
    with pytest.raises(ConfigError, match="micro_batch_size=0; it must be above zero"):
        make_trainer(Classifier, Limited(), micro_batch_size=0)


def test_the_failed_attempt_is_gone_before_the_next_begins() -> None:
    """A caught error holds the frames that it went through, and they hold activations: the reason for the retry to
    begin outside of the `except`."""
    alive: list[Any] = []

    class Watches(Classifier):
        def training_step(self, batch: Any) -> Any:
            activations = batch[0] * 2.0
            if len(batch[0]) == 16 and alive[0]() is not None:
                raise AssertionError("the failed attempt's tensors are still there")
            alive.append(weakref.ref(activations.untyped_storage()))
            self.model(activations)
            return super().training_step(batch)

    split, _ = make_trainer(Watches, Limited(fits=16), oom="split", max_steps=2)
    with pytest.warns(RuntimeWarning, match=TOLD):
        split.fit(make_data(32))


# ---------------------------------------------------------------- cutting


@dataclass
class Pair:
    image: Tensor
    name: str


class Named(NamedTuple):
    x: Tensor
    scale: float


def test_batches_of_any_structure_are_cut_along_their_samples() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    batch = {
        "x": x,
        "named": Named(x, 0.5),
        "pair": Pair(x, "a"),
        "texts": ["a", "b", "c", "d", "e"],
        "boxes": [torch.zeros(i, 4) for i in range(5)],
        "array": np.arange(5),
        "epoch": torch.tensor(3),
        "mode": None,
    }
    first, second, third = cut(batch, 2, 5)
    assert [len(piece["x"]) for piece in (first, second, third)] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["named"].x for piece in (first, second, third)]), x)
    assert second["named"].scale == 0.5 and torch.equal(second["pair"].image, x[2:4])
    assert second["texts"] == ["c", "d"] and third["array"].tolist() == [4]
    assert [len(boxes) for boxes in second["boxes"]] == [2, 3]
    assert second["epoch"] == 3 and second["mode"] is None
    assert cut(batch, 5, 5)[0] is batch


def test_a_pair_of_two_samples_is_a_pair() -> None:
    (x, y), (x2, _) = cut([torch.zeros(2, 3), torch.ones(2)], 1, 2)
    assert x.shape == x2.shape == (1, 3) and y.tolist() == [1.0]


def test_pieces_begin_where_tensors_of_their_own_would() -> None:
    assert all(piece.data_ptr() % 64 == 0 for piece in cut(torch.zeros(30, 3), 7, 30))
