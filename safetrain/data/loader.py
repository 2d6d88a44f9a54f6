"""Where a run is inside its data: batches counted, and the position saved and found again exactly."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safetrain import rng
from safetrain.data.generators import find_generators, load_generators, save_generators
from safetrain.errors import BatchError, CheckpointError

Resume = Literal["auto", "replay", "protocol"]

_log = logging.getLogger("safetrain")


class EpochLoader:
    """Batches of one loader, epoch by epoch, with a position that can be saved between any two of them.

    `source` may be a DataLoader (map-style or iterable), any other re-iterable of batches, a function without arguments
    that makes an iterable for each epoch, an iterator that is used up once, or an object with
    `state_dict`/`load_state_dict` such as torchdata's StatefulDataLoader.

    How a position is found again (`resume`):

    - "replay": put the generators back to where the epoch's iterator was made, make it, fetch and drop the batches
      already used, then set the generators to where the run was saved. Exact for shuffling, for the seeds of worker
      processes and for random augmentation, whatever the loader is; takes as long as loading those batches.
    - "protocol": ask the source's own `load_state_dict`. Fast, and as exact as the source is.
    - "auto": protocol where the source has one, except a StatefulDataLoader with worker processes over a dataset
      without state: it restarts the workers' generators, so their random augmentation would differ (the order of
      samples would not). Replay is used there.

    What no method can bring back: random state inside persistent workers after their first epoch (a warning says so),
    and what `find_generators` cannot see.

    Raises:
        BatchError: the source is no loader, gives no batch, or is an iterator that was already used up.
    """

    def __init__(self, source: Any, name: str = "train", *, resume: Resume = "auto") -> None:
        _check_source(source, name)
        self.source = source
        self.name = name
        self.epoch = 0
        self.batches_done = 0
        """Batches of the running epoch that were handed out."""
        self.uses_protocol = _choose_protocol(source, resume, name)
        self._once = iter(source) is source if hasattr(source, "__next__") else False
        self._persistent = bool(getattr(source, "persistent_workers", False)) and getattr(source, "num_workers", 0) > 0
        self._iterator: Iterator[Any] | None = None
        self._finished = False
        self._before = 0  # batches of earlier epochs, where one iterator serves them all
        self._start: dict[str, Any] | None = None  # generators as they were when the iterator was made
        self._position: dict[str, Any] | None = None  # loaded, to be taken up by the next `start_epoch`

    @classmethod
    def of(cls, source: Any, name: str = "train") -> EpochLoader:
        """`source` itself when it is an EpochLoader already, else one around it."""
        return source if isinstance(source, cls) else cls(source, name)

    def __iter__(self) -> Iterator[Any]:
        """One pass over the source that is not counted."""
        return self._make_iterator()

    def __len__(self) -> int:
        """Batches an epoch. Raises TypeError where the source does not know."""
        return len(self.source)

    @property
    def num_batches(self) -> int | None:
        """Batches an epoch, where the source knows."""
        try:
            return len(self)
        except TypeError:
            return None

    def start_epoch(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch; those that are left of it when a position inside it was loaded.

        After a load, the generators stand where they were saved when this returns.
        """
        position, self._position = self._position, None
        if position is None:
            self._begin(epoch)
        elif position["started"]:
            self._take_up(epoch, position)
        else:
            self._restore_generators(position["now"], final=True)
            self._begin(epoch)
        return _Counted(self)

    def _begin(self, epoch: int) -> None:
        if self._once and self._iterator is not None:
            if self._finished:
                raise BatchError(
                    f"{self.name} loader: {type(self.source).__name__} object was used up in epoch {self.epoch} and "
                    "has nothing "
                    f"for epoch {epoch}; give a function that makes a new one (the generator function itself, without "
                    "calling it), a list or a DataLoader, or stop with max_epochs=1"
                )
            self._before += self.batches_done
        else:
            self._iterator = None  # workers of an epoch that was left early end before new ones start
            self._finished = False
        self.epoch, self.batches_done = epoch, 0
        if self._once and self._iterator is not None:
            return
        self._start = None if self.uses_protocol else self._generators(warm=self._is_warm())
        _set_epoch(self.source, epoch)
        self._iterator = self._make_iterator()

    def _make_iterator(self) -> Iterator[Any]:
        source = self.source() if not hasattr(self.source, "__iter__") and callable(self.source) else self.source
        try:
            return iter(source)
        except TypeError as error:
            raise BatchError(
                f"{self.name} loader: the function given returned {type(source).__name__}, not an iterable of batches"
            ) from error

    def close(self) -> None:
        """Let go of the running iterator, so that its worker processes end. The position is kept for `state_dict`."""
        if not self._once and self._iterator is not None:
            self._position = self.state_dict()
            self._iterator = None

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """The position: plain containers and tensors. Valid between any two batches; it moves no generator."""
        if self._position is not None:
            return self._position
        state = {
            "method": "protocol" if self.uses_protocol else "replay",
            "kind": type(self.source).__name__,
            "num_batches": self.num_batches,
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "before": self._before,
            "started": self._iterator is not None,
            "finished": self._finished,
            "start": self._start,
            "source": None,
            "now": self._generators(),
        }
        if self.uses_protocol and self._iterator is not None:
            # Not before the first epoch: a StatefulDataLoader would make its iterator early and draw a seed for it.
            with rng.preserved():
                state["source"] = self.source.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next `start_epoch` take up this position. Nothing is read from the source yet.

        Raises:
            CheckpointError: the position is of another kind of loader, or lies inside an epoch of another length.
        """
        mine = {"method": "protocol" if self.uses_protocol else "replay", "kind": type(self.source).__name__}
        for key, value in mine.items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"{self.name} loader: the position was saved from {state.get('kind')} ({state.get('method')}), "
                    "this run has "
                    f"{mine['kind']} ({mine['method']}); use the same kind of loader to resume"
                )
        inside = state["started"] and not state["finished"]
        if inside and self.num_batches is not None and state["num_batches"] != self.num_batches:
            raise CheckpointError(
                f"{self.name} loader: the position is batch {state['batches_done']} of {state['num_batches']}, but "
                "this loader has "
                f"{self.num_batches} batches an epoch; resume with the same data and batch size, or start a new run "
                "from the weights"
            )
        self._position = dict(state)

    def forget_position(self) -> None:
        """Drop a loaded position that was not taken up."""
        self._position = None

    def _take_up(self, epoch: int, position: dict[str, Any]) -> None:
        """Continue the saved epoch at its position, or begin the one after it as the saved run would have."""
        same_epoch = epoch == position["epoch"]
        exhausted = same_epoch and position["finished"] and not self._once
        if self._once or (same_epoch and not exhausted and not self.uses_protocol):
            self._replay(position)
        elif self.uses_protocol and (same_epoch or position["finished"]):
            self.source.load_state_dict(position["source"])
        elif self._persistent:
            self._warm_up()
        if exhausted:
            self._iterator = iter(())
        elif self.uses_protocol and same_epoch:
            _set_epoch(self.source, epoch)
            self._iterator = self._make_iterator()  # draws a worker seed that the saved run had drawn before
        self.epoch, self.batches_done = position["epoch"], position["batches_done"]
        self._before, self._finished = position["before"], position["finished"]
        self._restore_generators(position["now"], final=True)
        if not same_epoch:
            self._begin(epoch)

    def _replay(self, position: dict[str, Any]) -> None:
        count = position["before"] + position["batches_done"]
        if count:
            _log.info("%s loader: reading %d batches again to reach the saved position", self.name, count)
        start = position["start"]
        if start["warm"]:
            self._warm_up()
        self._restore_generators(start)
        _set_epoch(self.source, position["epoch"])
        self._start = start
        self._iterator = iterator = self._make_iterator()
        for done in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise CheckpointError(
                    f"{self.name} loader: the saved position is batch {count}, but the loader ended after {done}; "
                    "resume with the "
                    "same data and batch size, or start a new run from the weights"
                ) from None

    def _generators(self, **more: Any) -> dict[str, Any]:
        return {"rng": rng.capture(), "own": save_generators(find_generators(self.source)), **more}

    def _restore_generators(self, saved: Mapping[str, Any], *, final: bool = False) -> None:
        missing = load_generators(find_generators(self.source), saved["own"])
        rng.restore(saved["rng"])
        if missing and final:  # only then: a dataset may make its generator when it is first read
            warnings.warn(
                f"{self.name} loader: the checkpoint holds the state of {', '.join(missing)}, which this loader does "
                "not have; "
                "its random draws will differ from the saved run's",
                stacklevel=4,
            )

    def _is_warm(self) -> bool:
        return self._persistent and getattr(self.source, "_iterator", None) is not None

    def _warm_up(self) -> None:
        """Start persistent workers as the saved run had them, which from then on only resets them."""
        warnings.warn(
            f"{self.name} loader: persistent workers keep random state that cannot be saved, so random augmentation "
            "after this "
            "resume differs from the uninterrupted run (the order of samples does not); set persistent_workers=False "
            "where that matters",
            stacklevel=4,
        )
        iter(self.source)

    # ------------------------------------------------------------------ end of an epoch

    def _ended(self) -> None:
        """The iterator has no more batches.

        Raises:
            BatchError: it never had any.
        """
        self._finished = True
        if self.batches_done == 0:
            self.refuse_empty(f" in epoch {self.epoch}")

    def refuse_empty(self, when: str = "") -> NoReturn:
        """Say that there was no batch, and why. Raises BatchError."""
        raise BatchError(f"{self.name} loader gave no batch{when}: {_why_empty(self.source)}")


class _Counted:
    """Hands batches through and counts them. Not a generator: its frame would keep the last batch alive."""

    __slots__ = ("_loader", "_next")

    def __init__(self, loader: EpochLoader) -> None:
        assert loader._iterator is not None
        self._loader = loader
        self._next: Callable[[], Any] = loader._iterator.__next__

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = self._next()
        except StopIteration:
            self._next = iter(()).__next__  # some loaders misbehave when asked again
            self._loader._ended()
            raise
        self._loader.batches_done += 1
        return batch


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool = True,
    num_workers: int = 0,
    drop_last: bool = False,
    pin_memory: bool = False,
) -> Any:
    """A DataLoader over a dataset; anything that already gives batches is returned as it is.

    `shuffle` counts for map-style data only.

    A plain DataLoader, not torchdata's: with workers that one does not restore random augmentation exactly, and its
    sampler shuffles in another order than a hand-written loop at the same seed. `EpochLoader` finds positions in both.
    """
    if not isinstance(dataset, Dataset):
        return dataset
    iterable = isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=None if iterable else shuffle,
        num_workers=num_workers,
        drop_last=drop_last,
        pin_memory=pin_memory,
    )


def _check_source(source: Any, name: str) -> None:
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise BatchError(
            f"{name} loader: {type(source).__name__} is a dataset and gives single samples; wrap it: "
            "DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    if isinstance(source, (torch.Tensor, Mapping, str, bytes)) or not (
        hasattr(source, "__iter__") or hasattr(source, "__getitem__") or callable(source)
    ):
        raise BatchError(
            f"{name} loader: {type(source).__name__} is no loader; give a DataLoader, a list of batches, "
            "or a function that makes an iterable of batches"
        )


def _choose_protocol(source: Any, resume: Resume, name: str) -> bool:
    has_protocol = callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
    if resume == "replay" or not has_protocol:
        if resume == "protocol":
            raise BatchError(
                f"{name} loader: resume='protocol' needs state_dict and load_state_dict, which "
                f"{type(source).__name__} lacks"
            )
        return False
    # Tried with torchdata 0.11, two workers and random augmentation: after load_state_dict the order of samples was
    # exact, but each worker's generators started again from the epoch's seed. Without workers it was exact.
    workers = isinstance(source, DataLoader) and source.num_workers > 0
    return resume == "protocol" or not workers or hasattr(source.dataset, "load_state_dict")


def _set_epoch(source: Any, epoch: int) -> None:
    """Tell the loader, its samplers and its dataset which epoch this is, where they want to know."""
    batch_sampler = getattr(source, "batch_sampler", None)
    candidates = (
        source,
        getattr(source, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(source, "dataset", None),
    )
    told: set[int] = set()
    for candidate in candidates:
        set_epoch = getattr(candidate, "set_epoch", None)
        if id(candidate) not in told and callable(set_epoch):
            set_epoch(epoch)
        told.add(id(candidate))


def _why_empty(source: Any) -> str:
    if hasattr(source, "__next__"):
        return (
            f"the {type(source).__name__} object is empty, or was used up before; give a function that makes a new one "
            "(the generator function itself, without calling it), a list or a DataLoader"
        )
    if not isinstance(source, DataLoader):
        return f"the {type(source).__name__} is empty; check what it reads"
    if isinstance(source.dataset, IterableDataset):
        return (
            f"its {type(source.dataset).__name__} yielded nothing; check what it reads and how it splits among workers"
        )
    samples = len(source.dataset)  # type: ignore[arg-type]
    if samples and source.drop_last:
        return (
            f"{samples} samples do not fill one batch of {source.batch_size} and drop_last=True drops the rest; "
            "lower batch_size or set drop_last=False"
        )
    if samples:
        return "its sampler chose no sample; check the sampler"
    return f"its {type(source.dataset).__name__} has 0 samples; check the path or filter that fills it"
