"""Who holds it: a bounded search from named roots down to the tensors (or nodes) whose graphs outlived their step.

Top-down first: breadth first over `gc.get_referents`, bounded in time and objects, so the answer is the shortest path
from a name. Only when that finds nothing, `owners` and `climb` look from the tensors upward.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from safetrain.graph import paths
from safetrain.graph.marks import Mark, grad_fn_of, is_graph_node
from safetrain.graph.roots import Root, gather_roots, is_user_class
from safetrain.graph.walk import marks_reached, walk
from safetrain.source import ended_calls, frame_locals, other_threads_run

Wanted = Callable[[Any], frozenset[int]]
"""Which earlier steps a tensor, or a node that is held by itself, keeps alive; empty when it is of no interest."""

_BIG = 20_000
"""Elements of one container above which only both ends are looked at: leaks append."""
_END = 2_000
_LONG_TEXT = 1_024
"""Characters or bytes from which a string is an object to look at."""
_PLAIN, _TENSOR, _NODE, _SKIP, _FUNCTION, _FRAME, _CLASS, _ARRAY = range(8)
_ENDS = (_TENSOR, _NODE)
_ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, slice, type(...), CodeType, ModuleType,
        BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType,
    }
)  # fmt: skip


@dataclass(slots=True)
class Holder:
    """A place that keeps graphs of earlier steps alive. Holds what is on its path: use it at once, never keep it."""

    root: Root
    path: list[Any]
    """Objects from the root's value down to the container (or the tensor) that holds."""
    tensors: list[Any]
    """What is held: tensors, or the nodes themselves (`kept.append(loss.grad_fn)`)."""
    steps: frozenset[int]
    watched: list[Any] = field(default_factory=list)
    """Containers in which another graph would show up."""
    through_exception: bool = False
    """Whether all of it hangs on exceptions: on their tracebacks or their arguments."""

    def describe(self) -> str:
        """``local `history` in main() → list[0..41]``."""
        return paths.describe(self.root.label, self.path)

    @property
    def name(self) -> str:
        """The last proper name on the path: `history` of `self.meters.history[3]`."""
        return paths.last_name(self.root.name, self.path)[0]

    @property
    def is_attribute(self) -> bool:
        """Whether `name` is an attribute of an object, not a variable."""
        return paths.last_name(self.root.name, self.path)[1]

    @property
    def is_named_itself(self) -> bool:
        """Whether `name` is that of the last object on the path, not of something that it is an item of."""
        return paths.named_edges(self.path) == paths.edges(self.path)

    @property
    def way(self) -> tuple[str, ...]:
        """The root and the proper names on the path: one leak keeps its way while its indices move."""
        return (self.root.label, *paths.named_edges(self.path))

    @property
    def through_grad(self) -> bool:
        """Whether a leaf's `.grad` is what holds."""
        return any(
            issubclass(type(a), Tensor) and a.is_leaf and a.grad is b
            for a, b in itertools.pairwise([*self.path, *self.tensors[:1]])
        )


class Holders(list[Holder]):
    """The answer of a search. Without `is_complete` it ran out of time or objects: there may be others."""

    def __init__(self, found: Iterable[Holder], is_complete: bool) -> None:
        super().__init__(found)
        self.is_complete = is_complete


def reaches(marks: Iterable[Mark], limit: int = 4_000) -> Wanted:
    """`Wanted` for marked graphs: the steps of those of `marks` that a tensor's graph reaches back into."""
    own = frozenset(marks)

    def wanted(end: Any) -> frozenset[int]:
        return frozenset(mark.step for mark in marks_reached(end, limit) if mark in own)

    return wanted


def find_holders(
    wanted: Wanted, given: Mapping[str, Any] | None = None, *, budget_s: float = 0.5, max_objects: int = 300_000
) -> Holders:
    """The places that hold tensors which `wanted` asks for, those with the most steps first.

    Searches the `given` objects by their names, then live frames, user modules, global hooks and context variables;
    library frames only when those hold nothing. Gives up at its bounds, as `is_complete` of the answer tells. The
    budget is this thread's own time, so that a busy machine does not cut the search short.
    """
    deadline = time.thread_time() + budget_s
    is_complete = True
    for roots in gather_roots(given):
        search = _Search(wanted, deadline, max_objects)
        search.run(roots)
        is_complete &= search.is_complete
        if search.hits:
            return Holders(_group(search), is_complete)
        if time.thread_time() > deadline:
            return Holders([], False)
    return Holders([], is_complete)


class _Search:
    """Breadth first from the roots. Remembers by which object each one was reached."""

    def __init__(self, wanted: Wanted, deadline: float, max_objects: int) -> None:
        self.parent: dict[int, int] = {}
        self.objects: dict[int, Any] = {}
        self.root_of: dict[int, Root] = {}
        self.hits: list[tuple[Any, frozenset[int]]] = []
        self.is_complete = True
        self._more_parents: dict[int, list[int]] = {}
        self._wanted = wanted
        self._deadline = deadline
        self._max_objects = max_objects

    def run(self, roots: Iterable[Root]) -> None:
        queue: deque[Any] = deque()
        for root in roots:
            kind = type(root.value)
            if (kind in _ATOMS and not _is_long_text(root.value)) or id(root.value) in self.objects:
                continue
            self.objects[id(root.value)] = root.value
            self.root_of[id(root.value)] = root
            queue.append(root.value)
        big: deque[Any] = deque()
        while queue or big:
            if len(self.objects) > self._max_objects or (
                len(self.objects) & 255 == 0 and time.thread_time() > self._deadline
            ):
                self.is_complete = False
                return
            obj = queue.popleft() if queue else big.popleft()
            kind = type(obj)
            category = _category_of(kind)
            if category in _ENDS:
                self._look_at(obj)
            for child in _children(obj, category):
                if _category_of(type(child)) == _SKIP and not _is_long_text(child):
                    continue
                if id(child) in self.objects:
                    if _category_of(type(child)) in _ENDS:
                        self._note_parent(child, obj)
                    continue
                self.objects[id(child)] = child
                self.parent[id(child)] = id(obj)
                (big if _size(child) > _BIG else queue).append(child)

    def _look_at(self, end: Any) -> None:
        if grad_fn_of(end) is not None:
            steps = self._wanted(end)
            if steps:
                self.hits.append((end, steps))

    def _note_parent(self, end: Any, parent: Any) -> None:
        """Another way to a tensor: a loop's own name for it must not hide the container that keeps it."""
        ways = self._more_parents.setdefault(id(end), [])
        if len(ways) < 4 and self.parent.get(id(end)) != id(parent):
            ways.append(id(parent))

    def paths(self, obj: Any) -> Iterator[list[Any]]:
        """Ways from a root's value to `obj`, the shortest first."""
        yield self._path([id(obj)])
        for parent in self._more_parents.get(id(obj), ()):
            yield self._path([id(obj), parent])

    def _path(self, keys: list[int]) -> list[Any]:
        while keys[-1] in self.parent:
            keys.append(self.parent[keys[-1]])
        return [self.objects[key] for key in reversed(keys)]


class Survey:
    """Everything that can be reached from names now, each object once. Holds all of it: use it at once, never keep it.

    Starts from the `given` objects by their names, then live frames, user modules, global hooks and context variables.
    """

    def __init__(
        self, given: Mapping[str, Any] | None = None, *, budget_s: float = 0.5, max_objects: int = 300_000
    ) -> None:
        self._search = _Search(lambda tensor: frozenset(), time.thread_time() + budget_s, max_objects)
        self._search.run(next(gather_roots(given)))

    def objects(self) -> Iterable[Any]:
        """What was reached, nearest to a name first. Numbers, short strings and modules are not looked at."""
        return self._search.objects.values()

    def holder(self, container: Any, tensors: Sequence[Tensor] = ()) -> Holder:
        """The shortest way from a name to a container that was reached, `tensors` being in it."""
        path = next(self._search.paths(container))
        return Holder(self._search.root_of[id(path[0])], path, list(tensors), frozenset(), [container])


_categories: dict[type, int] = {}


def _category_of(kind: type) -> int:
    known = _categories.get(kind)
    if known is None:
        known = _categories[kind] = _judge(kind)
    return known


def _judge(kind: type) -> int:
    if issubclass(kind, FakeTensor):
        return _SKIP
    if issubclass(kind, Tensor):
        return _TENSOR
    if is_graph_node(kind):
        return _NODE
    if kind is FunctionType:
        return _FUNCTION
    if kind is FrameType:
        return _FRAME
    if issubclass(kind, np.ndarray):
        return _ARRAY
    if issubclass(kind, type):
        return _CLASS
    if (
        issubclass(kind, ModuleType)
        or kind in _ATOMS
        or kind.__module__ in ("safetrain.guarding.retention", "safetrain.graph.roots")
    ):
        return _SKIP
    return _PLAIN


def _is_long_text(obj: Any) -> bool:
    return type(obj) in (str, bytes) and len(obj) >= _LONG_TEXT


def _children(obj: Any, category: int) -> Iterable[Any]:
    if category == _PLAIN:
        return gc.get_referents(obj) if _size(obj) <= _BIG else _both_ends(obj)
    if category in _ENDS:
        return _behind(obj)
    if category == _FUNCTION:
        return [*(obj.__closure__ or ()), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values(), obj.__dict__]
    if category == _FRAME:
        return [*frame_locals(obj).values(), *ended_calls(obj.f_back)[:1]]
    if category == _CLASS:
        return list(vars(obj).values()) if is_user_class(obj) else ()
    if category == _ARRAY:
        return obj.ravel()[:_BIG].tolist() if obj.dtype.hasobject and obj.dtype.names is None else ()
    return ()


def _behind(end: Any) -> list[Any]:
    """Its hooks and attributes, its gradient, and what hand-written Functions keep on `ctx`."""
    behind = [obj for obj in gc.get_referents(end) if _category_of(type(obj)) != _NODE]  # its own: no other holder
    if _category_of(type(end)) == _TENSOR and end.is_leaf:
        if not other_threads_run() and end.grad is not None:
            behind.append(end.grad)
    else:
        for node in walk([grad_fn_of(end)], limit=500).nodes:
            if isinstance(getattr(node, "__dict__", None), dict):
                behind += vars(node).values()
    return behind


def _size(obj: Any) -> int:
    kind = type(obj)
    return len(obj) if kind in (list, tuple, dict, set, deque, OrderedDict) else 0


def _both_ends(obj: Any) -> list[Any]:
    items = list(obj.values()) if isinstance(obj, dict) else list(obj)
    return items[:_END] + items[-_END:]


def _group(search: _Search) -> list[Holder]:
    """One holder for each deepest object under which most of its root's steps hang."""
    steps_under: dict[int, set[int]] = {}
    found = [(tensor, steps, path) for tensor, steps in search.hits for path in search.paths(tensor)]
    for _, steps, path in found:
        for obj in path:
            steps_under.setdefault(id(obj), set()).update(steps)
    groups: dict[tuple[int, int], _Group] = {}
    for tensor, steps, path in found:
        enough = max(1, math.ceil(0.6 * len(steps_under[id(path[0])])))
        stem = path[: 1 + max(i for i, obj in enumerate(path) if len(steps_under[id(obj)]) >= enough)]
        if len(stem) > 1 and _is_one_of_several(stem[-1], stem[-2], steps_under):
            stem.pop()
        key = (id(path[0]), id(stem[-1]))
        group = groups.setdefault(key, (stem, [], set()))
        group[1].append((tensor, path))
        group[2].update(steps)
    holders = []
    for stem, members, all_steps in _merged(groups.values()):
        root = search.root_of[id(stem[0])]
        containers = list({id(path[-2]): path[-2] for _, path in members[:16] if len(path) > 1}.values())
        if not _is_end(stem[-1]):
            containers.append(stem[-1])
        by_exception = all(any(issubclass(type(obj), BaseException) for obj in path) for _, path in members)
        tensors = [tensor for tensor, _ in members]
        holders.append(Holder(root, stem, tensors, frozenset(all_steps), containers, by_exception))
    # Of several names for the same graphs, one in a container or an object outlasts a plain local variable.
    return sorted(holders, key=lambda h: (-len(h.steps), len(h.path) == 1 and _is_end(h.path[0]), len(h.path)))


def _is_end(obj: Any) -> bool:
    """Whether a graph hangs on the object itself: a tensor or a node."""
    return _category_of(type(obj)) in _ENDS


def _is_one_of_several(obj: Any, container: Any, steps_under: Mapping[int, set[int]]) -> bool:
    """Whether a tensor of a sequence is only a part of what the sequence keeps: a graph may span two steps."""
    if not _is_end(obj) or not isinstance(container, (list, tuple, set, deque)):
        return False
    return len(steps_under[id(obj)]) < len(steps_under[id(container)])


_Group = tuple[list[Any], list[tuple[Any, list[Any]]], set[int]]


def _merged(groups: Iterable[_Group]) -> Iterator[_Group]:
    """Tensors that each keep everything and stand in one container (an average of all weights) are one holder."""
    by_container: dict[int, list[_Group]] = {}
    for group in groups:
        stem = group[0]
        alone = _is_end(stem[-1]) and len(stem) > 1 and isinstance(stem[-2], (dict, list, tuple))
        by_container.setdefault(id(stem[-2]) if alone else -id(stem), []).append(group)
    for same in by_container.values():
        if len(same) == 1:
            yield same[0]
        else:
            steps = set().union(*[group[2] for group in same])
            yield same[0][0][:-1], [member for group in same for member in group[1]], steps


def graph_owners(wanted: Wanted, *, budget_s: float = 1.0) -> list[Any]:
    """Tensors anywhere in the heap which `wanted` asks for, or nodes where there is no such tensor.

    Reads the whole heap once (0.1 s for a million objects).
    """
    deadline = time.perf_counter() + budget_s
    owners: list[Any] = []
    for index, obj in enumerate(gc.get_objects()):
        if _is_end(obj) and grad_fn_of(obj) is not None and wanted(obj):
            owners.append(obj)
        if index & 4095 == 0 and time.perf_counter() > deadline:
            break
    return [owner for owner in owners if isinstance(owner, Tensor)] or owners


def climb(tensor: Any, *, apart_from: Iterable[Any] = (), levels: int = 6, budget_s: float = 1.0) -> list[str]:
    """Who refers to `tensor`, upward through `gc.get_referrers`, as readable steps. Bounded in levels and time.

    `apart_from` are the caller's own containers.
    """
    deadline = time.perf_counter() + budget_s
    chain: list[Any] = [tensor]
    apart = {id(chain), *map(id, apart_from)}
    labels: list[str] = []
    while len(chain) <= levels and time.perf_counter() < deadline:
        above = _referrer(chain, apart)
        if above is None:
            break
        label = paths.edge(above, chain[-1])
        labels.append(type(above).__name__ + label if label.startswith(".") else label)
        chain.append(above)
    labels.append(type(chain[-1]).__name__)
    return [label for label in reversed(labels) if label]


def _referrer(chain: list[Any], apart: set[int]) -> Any:
    """Something that refers to the last of the chain and is not on it. Running frames hold nothing of their own."""
    known = {id(obj) for obj in chain} | apart
    return next((r for r in gc.get_referrers(chain[-1]) if id(r) not in known and type(r) is not FrameType), None)
