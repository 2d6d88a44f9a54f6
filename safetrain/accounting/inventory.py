"""What can be reached from the user's names, weighed: which containers got longer, and how many bytes came with that.

An inventory holds sizes and weak references only, so that it may be kept from one step to the next.
"""

from __future__ import annotations

import array
import ctypes
import gc
import io
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data.dataloader import _BaseDataLoaderIter

from safetrain.graph import Holder, Survey, storage_key
from safetrain.source import ended_calls, frame_locals

_MAX_WEIGHED = 4_000
"""Objects looked into while one holder's newest elements are weighed."""
_MAX_WAYS = 4_000
"""Tensors, arrays and strings of one inventory whose names are noted."""
_LONG = 64
"""Elements of a dict that is a container and no object's attributes."""
_SURVIVED = 3
"""Steps after which a new tensor counts as kept: outputs and states of a step may live through the next one or two."""
_SMALL_TENSOR = 16
"""A tensor of so few elements is a number in a history, not data."""
_TENSOR_OVERHEAD, _VIEW_OVERHEAD = 360, 510
"""Bytes of heap that a tensor takes beside its storage (measured, torch 2.13)."""
_LRU = "_lru_cache_wrapper"
_PAYLOADS = (Tensor, np.ndarray, str, bytes)
"""What cannot grow in place: made anew, it may come out bigger."""
BUFFERS = (bytearray, array.array, io.BytesIO)
"""Flat memory that grows in place."""
_CTYPES = (ctypes.Array, ctypes.Structure, ctypes.Union)
_SHARED = (type, ModuleType, CodeType, FrameType, nn.Module)
"""What an object refers to without having brought it."""


@dataclass(slots=True)
class Weight:
    """What some objects keep alive."""

    held_bytes: int = 0
    """Storages, arrays, strings, each once."""
    shown_bytes: int = 0
    """The same as the objects' own shapes say: less where a small view keeps a big storage."""
    attached: bool = False
    """A tensor among them carries a graph."""
    numbers_only: bool = True
    """Nothing but numbers, short strings and one-number tensors."""
    overhead_bytes: int = 0
    """What the objects take besides: tensors have a head of some hundred bytes."""
    by_device: dict[str, int] = field(default_factory=dict)
    widest: str = ""
    """The view that pins most beyond its own size, in words."""
    _most: int = 0

    @property
    def pins_views(self) -> bool:
        """Whether most of it is storage behind views that show a part only."""
        return self.held_bytes > 2 * self.shown_bytes and bool(self.widest)


@dataclass(slots=True)
class Suspect:
    """A place that grows. Its holder refers to live objects: use it at once."""

    holder: Holder
    bytes_per_step: float
    weight: Weight
    count_per_step: float
    """Elements that it gains a step; 0 for a tensor or array that itself gets bigger."""
    length: int
    overhead_per_step: float = 0.0
    """Bytes that the objects take beside what they keep."""


class Inventory:
    """Lengths of containers, and which storages there are, at the end of one step."""

    def __init__(self, survey: Survey, step: int, before: Inventory | None = None) -> None:
        self.step = step
        self.lengths: dict[int, tuple[type, int]] = {}
        self.storages: dict[int, StorageWeakRef] = {}
        self.by_way: dict[tuple[str, ...], int] = {}
        """Bytes of what is new since `before`, by the names on the way to it."""
        self.fresh: set[int] = set()
        """Storages that are new since `before`."""
        self._ways = _Ways()
        self._noted = 0
        self.totals: dict[tuple[str, ...], int] = {}
        """Bytes of all tensors, by the first two names on the way to them."""
        for obj in survey.objects():
            length = length_of(obj)
            if length is not None:
                self.lengths[id(obj)] = (type(obj), length)
            elif issubclass(type(obj), _PAYLOADS):
                self._note(obj, survey, before)
        self._ways = _Ways()  # ids are good for as long as the survey holds the objects

    def _note(self, obj: Any, survey: Survey, before: Inventory | None) -> None:
        key = _payload_key(obj)
        if key is None:
            return
        known = before is not None and before.has(key)
        is_first = key not in self.storages
        if isinstance(obj, Tensor):
            self.storages[key] = StorageWeakRef(obj.untyped_storage())  # type: ignore[no-untyped-call]
        if self._noted >= _MAX_WAYS or not is_first:
            return
        self._noted += 1
        way, size = self._ways.of(survey.holder(obj)), _payload_bytes(obj)
        self.totals[way[:2]] = self.totals.get(way[:2], 0) + size
        if before is not None and not known and key not in self.fresh:
            self.fresh.add(key)
            self.by_way[way] = self.by_way.get(way, 0) + size

    def has(self, key: int) -> bool:
        """Whether the storage was there and still is: its place may have been given to another since."""
        ref = self.storages.get(key)
        return ref is not None and not ref.expired()  # type: ignore[no-untyped-call]


class _Ways:
    """Ways of many holders. An element's position in a long container takes time to find, and is no part of its way."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, ...]] = {}

    def of(self, holder: Holder) -> tuple[str, ...]:
        """`holder.way`."""
        parent = holder.path[-2] if len(holder.path) > 1 else None
        long = length_of(parent) if type(parent) in (list, dict, set, deque) else None
        if long is None or (long < _LONG and type(parent) is dict):
            return holder.way
        way = self._known.get(id(parent))
        if way is None:
            way = Holder(holder.root, holder.path[:-1], [], holder.steps, []).way
            self._known[id(parent)] = way
        return way


def length_of(obj: Any) -> int | None:
    """Elements of a container that can grow, None for anything else."""
    kind = type(obj)
    for base in (list, dict, set, deque):
        if issubclass(kind, base):
            return int(base.__len__(obj))  # not len(): a subclass may count by side effects
    if issubclass(kind, (bytearray, array.array)):
        return len(obj)
    if issubclass(kind, io.BytesIO):
        return None if obj.closed else obj.getbuffer().nbytes
    return int(obj.cache_info().currsize) if kind.__name__ == _LRU else None


def find_growing(survey: Survey, first: Inventory, second: Inventory, now: Inventory) -> list[Suspect]:
    """Places that grew from the first inventory to the second and again to this one, the fastest first.

    `survey` is the one that `now` was made of.
    """
    found = list(_containers(survey, first, second, now))
    inside = {id(suspect.holder.path[-1]) for suspect in found}
    found += [
        suspect
        for suspect in (*_bigger_ones(survey, second, now), *_survivors(survey, first, second, now))
        if not any(id(obj) in inside for obj in suspect.holder.path)
    ]
    best: dict[tuple[str, ...], Suspect] = {}
    for suspect in sorted(found, key=lambda s: (-s.bytes_per_step, len(s.holder.path))):
        best.setdefault(suspect.holder.way, suspect)
    return list(best.values())


def _containers(survey: Survey, first: Inventory, second: Inventory, now: Inventory) -> Iterator[Suspect]:
    steps = now.step - second.step
    for obj in survey.objects():
        kind_and_length = now.lengths.get(id(obj))
        if kind_and_length is None:
            continue
        kind, length = kind_and_length
        earlier, earliest = second.lengths.get(id(obj)), first.lengths.get(id(obj))
        if earlier is None or earliest is None or earlier[0] is not kind or not length > earlier[1] > earliest[1]:
            continue
        holder = survey.holder(obj)
        if is_ours(holder) or any(type(above).__name__ == _LRU for above in holder.path[:-1]):
            continue
        added = length - earlier[1]
        items = list(newest(obj, added))
        weight = weigh(items, apart_from=first)
        own_bytes = round(sys.getsizeof(obj) * added / length)  # of the container itself
        weight.held_bytes += own_bytes
        weight.shown_bytes += own_bytes
        weight.numbers_only &= not issubclass(kind, (bytearray, io.BytesIO))
        holder.tensors.extend(item for item in items if issubclass(type(item), Tensor))
        yield Suspect(holder, weight.held_bytes / steps, weight, added / steps, length, weight.overhead_bytes / steps)


def _bigger_ones(survey: Survey, second: Inventory, now: Inventory) -> Iterator[Suspect]:
    """What is rebuilt bigger each time: `bank = torch.cat([bank, x])`."""
    steps = now.step - second.step
    grown = {way: size - second.by_way[way] for way, size in now.by_way.items() if size > second.by_way.get(way, size)}
    seen: set[tuple[str, ...]] = set()
    ways = _Ways()
    for obj in survey.objects() if grown else ():
        if not issubclass(type(obj), _PAYLOADS) or _payload_key(obj) not in now.fresh:
            continue
        holder = survey.holder(obj)
        way = ways.of(holder)
        if way in grown and way not in seen and not is_ours(holder):
            seen.add(way)
            weight = weigh([obj])
            if isinstance(obj, Tensor):
                holder.tensors.append(obj)
            holder.watched[:] = []
            yield Suspect(holder, grown[way] / steps, weight, 0.0, 1)


def _survivors(survey: Survey, first: Inventory, second: Inventory, now: Inventory) -> Iterator[Suspect]:
    """New tensors that stay, wherever they are: in a chain, or in a list that is rebuilt each time."""
    steps = second.step - first.step
    if min(steps, now.step - second.step) < _SURVIVED:
        return
    groups: dict[tuple[str, ...], list[Holder]] = {}
    ways = _Ways()
    for obj in survey.objects():
        key = storage_key(obj) if issubclass(type(obj), Tensor) else None
        if key is not None and key in second.fresh and second.has(key):
            holder = survey.holder(obj)
            if not is_ours(holder):
                groups.setdefault(ways.of(holder)[:2], []).append(holder)
    for way, holders in groups.items():
        tensors = [holder.path[-1] for holder in holders]
        weight = weigh(tensors)
        if now.totals.get(way, 0) - first.totals.get(way, 0) < weight.held_bytes:
            continue  # they came in the place of others
        path = _common_start([holder.path for holder in holders])
        holder = Holder(holders[0].root, path, tensors, frozenset(), path[-1:])
        yield Suspect(holder, weight.held_bytes / steps, weight, len(tensors) / steps, len(tensors))


def _common_start(paths: list[list[Any]]) -> list[Any]:
    """The way that all have in common, up to the first link of a chain."""
    shortest = min(map(len, paths))
    common = [paths[0][i] for i in range(shortest) if all(path[i] is paths[0][i] for path in paths)]
    instances = [i for i, obj in enumerate(common) if length_of(obj) is None and not issubclass(type(obj), Tensor)]
    link = next((i for i, j in itertools.pairwise(instances) if type(common[i]) is type(common[j])), None)
    return common if link is None else common[: link + 1]


def newest(container: Any, count: int) -> Iterator[Any]:
    """The last `count` elements; of a set, some; of flat memory none."""
    kind = type(container)
    if issubclass(kind, BUFFERS):
        return iter(())
    if kind.__name__ == _LRU:
        inner = next((r for r in gc.get_referents(container) if type(r) is dict and len(r) == length_of(container)), {})
        return newest(inner, count)
    if issubclass(kind, dict):
        return itertools.islice(reversed(list(dict.values(container))), count)
    if issubclass(kind, (list, deque)):
        base = list if issubclass(kind, list) else deque
        return itertools.islice(base.__reversed__(container), count)
    return itertools.islice(set.__iter__(container), count)


def weigh(objects: Iterable[Any], apart_from: Inventory | None = None) -> Weight:
    """Bytes behind `objects`: each storage, array and string once, those that `apart_from` knew of left out."""
    weight = Weight()
    seen: set[int] = set()
    todo = deque(objects)
    alive = []  # an object made here must not give its id to the next one
    while todo and len(seen) < _MAX_WEIGHED:
        obj = todo.popleft()
        alive.append(obj)
        if id(obj) in seen or (apart_from is not None and id(obj) in apart_from.lengths):
            continue
        seen.add(id(obj))
        kind = type(obj)
        if issubclass(kind, Tensor):
            _weigh_tensor(obj, weight, seen, apart_from)
        elif issubclass(kind, np.ndarray):
            _weigh_array(obj, weight, seen)
            if obj.dtype.hasobject and obj.dtype.names is None:
                todo.extend(obj.ravel()[:_MAX_WEIGHED].tolist())
        elif issubclass(kind, (str, bytes, bytearray)):
            weight.held_bytes += sys.getsizeof(obj)
            weight.shown_bytes += sys.getsizeof(obj)
            weight.numbers_only &= len(obj) <= 256
        elif length_of(obj) is not None or issubclass(kind, (tuple, frozenset)):
            weight.held_bytes += sys.getsizeof(obj)
            weight.shown_bytes += sys.getsizeof(obj)
            todo.extend(itertools.chain(dict.keys(obj), dict.values(obj)) if issubclass(kind, dict) else _elements(obj))
        elif issubclass(kind, (int, float, complex, np.generic)):
            size = (
                0 if kind is bool or (kind is int and -5 <= obj <= 256) else sys.getsizeof(obj)
            )  # small ones are shared
            weight.held_bytes += size
            weight.shown_bytes += size
        elif not issubclass(kind, (type(None), type, ModuleType)):
            size = max(sys.getsizeof(obj), ctypes.sizeof(obj) if issubclass(kind, _CTYPES) else 0)
            weight.held_bytes += size
            weight.shown_bytes += size
            weight.numbers_only &= not issubclass(kind, _CTYPES)
            todo.extend(_inside(obj))
    return weight


def _elements(obj: Any) -> Iterable[Any]:
    return newest(obj, length_of(obj) or 0) if length_of(obj) is not None else tuple(obj)


def _inside(obj: Any) -> Iterable[Any]:
    if type(obj) is FunctionType:
        return [*(obj.__closure__ or ()), *(obj.__defaults__ or ())]
    if type(obj) is TracebackType:  # it keeps the variables of calls that have ended
        local = [value for frame in ended_calls(obj.tb_frame) for value in frame_locals(frame).values()]
        return [
            obj.tb_next,
            *(value for value in local if length_of(value) is not None or isinstance(value, _PAYLOADS)),
        ]
    return [inner for inner in gc.get_referents(obj) if not isinstance(inner, _SHARED)]


def _weigh_tensor(tensor: Tensor, weight: Weight, seen: set[int], apart_from: Inventory | None) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        weight.attached = True
    key = storage_key(tensor)
    if key is None:
        return
    shown = tensor.numel() * tensor.element_size()
    known = -key in seen
    if not known and (apart_from is None or not apart_from.has(key)):
        held = tensor.untyped_storage().nbytes()
        weight.held_bytes += held
        weight.overhead_bytes += _TENSOR_OVERHEAD + (_VIEW_OVERHEAD if tensor._is_view() else 0)
        weight.by_device[tensor.device.type] = weight.by_device.get(tensor.device.type, 0) + held
        weight.numbers_only &= held <= _SMALL_TENSOR * tensor.element_size()
        if held - shown > weight._most:
            weight._most = held - shown
            weight.widest = f"a view of shape {list(tensor.shape)}"
        weight.shown_bytes += min(shown, held)
    seen.add(-key)  # ids are positive: storages are kept apart from objects by their sign


def _weigh_array(array: np.ndarray, weight: Weight, seen: set[int]) -> None:
    base = _base_of(array)
    if base is not array and id(base) in seen:
        return
    seen.add(id(base))
    held = int(base.nbytes)
    weight.held_bytes += held
    weight.shown_bytes += min(int(array.nbytes), held)
    weight.by_device["cpu"] = weight.by_device.get("cpu", 0) + held
    weight.numbers_only &= base.size <= _SMALL_TENSOR
    if held - array.nbytes > weight._most:
        weight._most = held - int(array.nbytes)
        weight.widest = f"a view of shape {list(array.shape)}"


def _base_of(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _payload_key(obj: Any) -> int | None:
    if isinstance(obj, Tensor):
        return storage_key(obj)
    return id(_base_of(obj) if isinstance(obj, np.ndarray) else obj)


def _payload_bytes(obj: Any) -> int:
    if isinstance(obj, Tensor):
        return int(obj.untyped_storage().nbytes())
    return int(_base_of(obj).nbytes) if isinstance(obj, np.ndarray) else sys.getsizeof(obj)


def is_ours(holder: Holder) -> bool:
    """Whether the container belongs to this package: its books are bounded, and not the user's business."""
    for obj in reversed(holder.path[:-1]):
        kind = type(obj)
        if length_of(obj) is None and kind is not CellType and not issubclass(kind, tuple):
            return kind.__module__.startswith("safetrain.")
    return False


def names_of(model: nn.Module, optimizers: Mapping[str, Any], loaders: Iterable[Any] = ()) -> dict[str, Any]:
    """What a survey is given to start from, by the names to report."""
    given = {"model": model, **{f"optimizer `{name}`": optimizer for name, optimizer in optimizers.items()}}
    for iterator in loaders:
        dataset = getattr(iterator, "_dataset", None)
        given[f"data set {type(dataset).__name__}"] = dataset
    return given


def running_loaders() -> list[Any]:
    """Iterators over data loaders that are alive: `for x in DataLoader(…)` gives the loader no name to be found by.

    Reads the whole heap once (0.1 s for a million objects).
    """
    return [obj for obj in gc.get_objects() if issubclass(type(obj), _BaseDataLoaderIter)]
