"""A position inside an epoch, saved and found again: the batches that follow are the same, to the bit."""

from __future__ import annotations

import functools
import io
import multiprocessing
import random
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from safetrain import rng
from safetrain.data.generators import find_generators
from safetrain.data.loader import EpochLoader, make_loader
from safetrain.errors import BatchError, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise from every global generator, and from generators of its own."""

    def __init__(self, size: int = 22) -> None:
        self.size = size
        self.own = np.random.default_rng(5)
        self.transforms = [functools.partial(self._jitter, random.Random(6))]

    def _jitter(self, source: random.Random) -> float:
        return source.random()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [torch.rand(()).item(), random.random(), np.random.rand(), self.own.random(), self.transforms[0]()]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """Split among workers, with noise."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for i in range(first, 22, stride):
            yield torch.tensor([i, torch.rand(()).item()], dtype=torch.float64)


class OwnProtocol:
    """A user's loader that knows its place and keeps its own permutation from epoch to epoch."""

    def __init__(self) -> None:
        self.seed, self.at = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(11, generator=torch.Generator().manual_seed(self.seed)).tolist()
        while self.at < len(order):
            self.at += 1
            yield torch.tensor([order[self.at - 1], torch.rand(()).item()])
        self.seed, self.at = self.seed + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.at = state["seed"], state["at"]


def _stateful(num_workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=num_workers)


def _shared_generator() -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    data = Augmented()
    sampler = BatchSampler(RandomSampler(data, generator=generator), batch_size=2, drop_last=True)
    return DataLoader(data, batch_sampler=sampler, generator=generator)


def _factory() -> Callable[[], Iterator[torch.Tensor]]:
    source = np.random.default_rng(9)

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(11):
            yield torch.tensor([source.random(), random.random(), torch.rand(()).item()])

    return batches


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "two workers": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
    "weighted": lambda: DataLoader(Augmented(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 22, 22)),
    "own generator": _shared_generator,
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=2),
    "iterable dataset, two workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
    "list": lambda: [torch.tensor([float(i)]) for i in range(11)],
    "function": _factory,
    "own protocol": OwnProtocol,
    "StatefulDataLoader": lambda: _stateful(0),
    "StatefulDataLoader, two workers": lambda: _stateful(2),
}


def _draws() -> torch.Tensor:
    """What a training step draws: from every global generator."""
    return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def _seed(seed: int) -> None:
    rng.seed_everything(seed)


def _epochs(loader: EpochLoader, start: int, stop: int, limit: int | None = None) -> Iterator[torch.Tensor]:
    """A loop in small: batches, and the step's own draws between them."""
    for epoch in range(start, stop):
        iterator = loader.start_epoch(epoch)
        while limit is None or loader.batches_done < limit:
            batch = next(iterator, None)
            if batch is None:
                break
            yield batch
            yield _draws()


def _through_disk(state: dict[str, Any]) -> dict[str, Any]:
    from safetrain.checkpoint.plain import pack, unpack

    file = io.BytesIO()
    torch.save(pack(state, "loader"), file)
    file.seek(0)
    return unpack(torch.load(file, weights_only=True))


@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_epoch_gives_the_same_batches_to_the_bit(kind: str) -> None:
    _seed(0)
    loader = EpochLoader(LOADERS[kind]())
    whole = list(_epochs(loader, 0, 3))
    for position in (0, 1, 5, 10, 11, 12, 22, 26) if "two" not in kind else (0, 6, 11, 15):
        _seed(0)
        loader = EpochLoader(LOADERS[kind]())
        stream = _epochs(loader, 0, 3)
        seen = [next(stream) for _ in range(2 * position)]
        state = _through_disk({"loader": loader.state_dict(), "rng": rng.capture()})
        _seed(99)  # a fresh process starts from other seeds
        resumed = EpochLoader(LOADERS[kind]())
        resumed.load_state_dict(state["loader"])
        rng.restore(state["rng"])
        rest = list(_epochs(resumed, position // 11 if position % 11 else max(0, position // 11 - 1), 3))
        together = seen + rest
        assert len(together) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(together, whole, strict=True)), f"saved after {position} batches"


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "function", "StatefulDataLoader", "list"])
def test_an_epoch_that_was_cut_short_is_followed_by_the_next_one(kind: str) -> None:
    """limit_batches=7, saved after the epoch was counted and before the next began."""
    _seed(0)
    whole = list(_epochs(EpochLoader(LOADERS[kind]()), 0, 3, limit=7))
    _seed(0)
    loader = EpochLoader(LOADERS[kind]())
    seen = list(_epochs(loader, 0, 1, limit=7))
    state = _through_disk({"loader": loader.state_dict()})
    _seed(99)
    resumed = EpochLoader(LOADERS[kind]())
    resumed.load_state_dict(state["loader"])
    together = seen + list(_epochs(resumed, 1, 3, limit=7))
    assert len(together) == len(whole)
    assert all(torch.equal(a, b) for a, b in zip(together, whole, strict=True))


def test_saving_a_position_changes_nothing() -> None:
    for kind in ("shuffled", "own protocol", "StatefulDataLoader"):
        _seed(0)
        whole = list(_epochs(EpochLoader(LOADERS[kind]()), 0, 2))
        _seed(0)
        loader = EpochLoader(LOADERS[kind]())
        loader.state_dict()
        for mine, theirs in zip(_epochs(loader, 0, 2), whole, strict=True):
            loader.state_dict()
            assert torch.equal(mine, theirs), kind


def test_a_loaded_position_can_be_saved_again_before_it_is_used() -> None:
    loader = EpochLoader(LOADERS["shuffled"]())
    next(loader.start_epoch(0))
    state = loader.state_dict()
    resumed = EpochLoader(LOADERS["shuffled"]())
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_a_generator_object_serves_one_epoch_and_says_so() -> None:
    loader = EpochLoader(torch.zeros(2) for _ in range(3))
    assert len(list(loader.start_epoch(0))) == 3
    with pytest.raises(BatchError, match=r"generator object was used up in epoch 0 .* give a function"):
        loader.start_epoch(1)


def test_an_endless_stream_goes_on_from_epoch_to_epoch_and_across_a_resume() -> None:
    def numbers() -> Iterator[float]:
        while True:
            yield random.random()

    def consume(loader: EpochLoader, epoch: int, count: int) -> list[float]:
        iterator = loader.start_epoch(epoch)
        return [next(iterator) for _ in range(count - loader.batches_done)]

    _seed(0)
    whole = [random.random() for _ in range(9)]
    _seed(0)
    loader = EpochLoader(numbers())
    seen = consume(loader, 0, 4) + consume(loader, 1, 2)
    state = loader.state_dict()
    _seed(99)
    resumed = EpochLoader(numbers())
    resumed.load_state_dict(state)
    assert seen + consume(resumed, 1, 3) + consume(resumed, 2, 2) == whole[:6] + whole[6:9]


def test_samplers_and_datasets_are_told_the_epoch_once() -> None:
    told: list[tuple[str, int]] = []

    class Sampler(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(("sampler", epoch))

    class Told(Augmented):
        def set_epoch(self, epoch: int) -> None:
            told.append(("dataset", epoch))

    data = Told()
    loader = EpochLoader(DataLoader(data, batch_size=2, sampler=Sampler(data)))
    loader.start_epoch(0)
    loader.start_epoch(1)
    assert told == [("sampler", 0), ("dataset", 0), ("sampler", 1), ("dataset", 1)]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "the list is empty"),
        (
            DataLoader(TensorDataset(torch.zeros(7)), batch_size=16, drop_last=True),
            "7 samples do not fill one batch of 16",
        ),
        (DataLoader(TensorDataset(torch.zeros(0)), batch_size=16), "TensorDataset has 0 samples"),
        (DataLoader(TensorDataset(torch.zeros(4)), sampler=[]), "sampler chose no sample"),
        (lambda: iter(()), "function is empty"),
    ],
    ids=["list", "drop_last", "no samples", "sampler", "function"],
)
def test_an_empty_loader_is_named_with_its_remedy(source: Any, says: str) -> None:
    with pytest.raises(BatchError, match=f"train loader gave no batch in epoch 0: .*{says}"):
        list(EpochLoader(source).start_epoch(0))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (TensorDataset(torch.zeros(4)), "TensorDataset is a dataset and gives single samples"),
        (torch.zeros(4, 2), "Tensor is no loader"),
        ({"x": torch.zeros(4)}, "dict is no loader"),
        (17, "int is no loader"),
    ],
    ids=["dataset", "tensor", "dict", "number"],
)
def test_what_is_no_loader_is_refused_at_once(source: Any, says: str) -> None:
    with pytest.raises(BatchError, match=says):
        EpochLoader(source)


def test_a_function_that_makes_no_iterable_is_refused() -> None:
    with pytest.raises(BatchError, match="returned int, not an iterable"):
        EpochLoader(lambda: 3).start_epoch(0)


def test_a_position_in_other_data_is_refused_and_between_epochs_allowed() -> None:
    loader = EpochLoader(DataLoader(Augmented(22), batch_size=2))
    iterator = loader.start_epoch(0)
    next(iterator)
    with pytest.raises(CheckpointError, match="batch 1 of 11, but this loader has 10 batches"):
        EpochLoader(DataLoader(Augmented(20), batch_size=2)).load_state_dict(loader.state_dict())
    list(iterator)
    grown = EpochLoader(DataLoader(Augmented(24), batch_size=2))
    grown.load_state_dict(loader.state_dict())
    assert len(list(grown.start_epoch(1))) == 12


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    loader = EpochLoader(OwnProtocol())
    next(loader.start_epoch(0))
    with pytest.raises(CheckpointError, match=r"saved from OwnProtocol \(protocol\), this run has list \(replay\)"):
        EpochLoader([1, 2]).load_state_dict(loader.state_dict())


def test_a_stream_that_became_shorter_is_noticed_while_reading_again() -> None:
    loader = EpochLoader(lambda: iter(range(9)))
    iterator = loader.start_epoch(0)
    for _ in range(6):
        next(iterator)
    resumed = EpochLoader(lambda: iter(range(4)))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match="batch 6, but the loader ended after 4"):
        resumed.start_epoch(0)


def test_persistent_workers_keep_the_order_and_warn_about_their_noise() -> None:
    def make() -> EpochLoader:
        return EpochLoader(DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True))

    _seed(0)
    loader = make()
    list(loader.start_epoch(0))
    iterator = loader.start_epoch(1)
    next(iterator)
    state = loader.state_dict()
    order = [batch[:, 0].tolist() for batch in iterator]
    _seed(99)
    resumed = make()
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="persistent workers keep random state"):
        rest = list(resumed.start_epoch(1))
    assert [batch[:, 0].tolist() for batch in rest] == order


def test_torchdata_restores_order_but_not_the_noise_of_workers() -> None:
    """Why "auto" reads again there. Should this fail, torchdata has become exact and its protocol can be used."""
    _seed(0)
    loader = EpochLoader(_stateful(2), resume="protocol")
    iterator = loader.start_epoch(0)
    for _ in range(6):
        next(iterator)
    state = loader.state_dict()
    expected = list(iterator)
    resumed = EpochLoader(_stateful(2), resume="protocol")
    resumed.load_state_dict(state)
    got = list(resumed.start_epoch(0))
    assert [b[:, 0].tolist() for b in got] == [b[:, 0].tolist() for b in expected]
    assert not any(torch.equal(a[:, 1], b[:, 1]) for a, b in zip(got, expected, strict=True))


def test_own_generators_are_found_by_name() -> None:
    loader = DataLoader(Augmented(), shuffle=True, generator=torch.Generator())
    found = find_generators(loader)
    assert {"dataset.own", "dataset.transforms.0.args.0"} <= set(found)
    assert any(isinstance(generator, torch.Generator) for generator in found.values())


_MODULE_GENERATOR = np.random.default_rng(1)


def test_a_generator_of_the_module_is_found_through_the_function_that_names_it() -> None:
    class Uses:
        def draw(self) -> float:
            return float(_MODULE_GENERATOR.random())

    assert list(find_generators([Uses()]).values()) == [_MODULE_GENERATOR]


def test_big_datasets_are_not_searched_sample_by_sample() -> None:
    samples = [{"x": torch.zeros(1), "meta": {"i": i}} for i in range(20_000)]
    data = [samples, {i: [i] for i in range(20_000)}]
    assert min(timeit.repeat(lambda: find_generators(data), number=1, repeat=3)) < 0.01


def test_counting_costs_next_to_nothing_per_batch() -> None:
    batches = [torch.zeros(1)] * 20_000
    loader = EpochLoader(batches)

    def bare() -> None:
        for _ in batches:
            pass

    def counted() -> None:
        for _ in loader.start_epoch(0):
            pass

    extra_s = min(timeit.repeat(counted, number=1, repeat=7)) - min(timeit.repeat(bare, number=1, repeat=7))
    assert extra_s / len(batches) < 0.5e-6


def test_config_users_get_a_loader_and_keep_their_own() -> None:
    made = make_loader(Augmented(), batch_size=4, shuffle=True, num_workers=0, drop_last=True, pin_memory=False)
    assert len(made) == 5 and made.drop_last
    assert (
        len(list(make_loader(Stream(), batch_size=4, shuffle=True))) == 6
    )  # shuffling a stream is the stream's business
    own = [torch.zeros(1)]
    assert make_loader(own, batch_size=4) is own


def test_the_loader_needs_no_torchdata() -> None:
    code = "import safetrain.data.loader, sys; assert 'torchdata' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_closing_ends_the_workers_and_keeps_the_position() -> None:

    _seed(0)
    loader = EpochLoader(LOADERS["two workers"]())
    iterator = loader.start_epoch(0)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    expected = [next(iterator) for _ in range(3)]
    _seed(0)
    loader = EpochLoader(LOADERS["two workers"]())
    iterator = loader.start_epoch(0)
    for _ in range(3):
        next(iterator)
    del iterator
    loader.close()
    assert multiprocessing.active_children() == []
    assert loader.state_dict()["batches_done"] == 3
    _seed(99)
    loader.load_state_dict(state)
    iterator = loader.start_epoch(0)
    assert all(torch.equal(next(iterator), batch) for batch in expected)
    loader.close()
