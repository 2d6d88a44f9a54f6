"""Death tokens: a small object in a graph node's `metadata` lives exactly as long as the node.

Nodes take no weak references themselves, but the token does, so whether a graph of an earlier step is still alive is
known with certainty, without a scan and without holding anything. One mark a step serves all its nodes; it dies with
the last of them.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

KEY = "safetrain.mark"
"""Where a mark stands in `grad_fn.metadata`."""

MarkKind = Literal["train", "eval"]


class Mark:
    """The graphs built in one step (or by one forward of an evaluation). `step` counts optimizer steps from 1."""

    __slots__ = ("__weakref__", "kind", "step")

    def __init__(self, step: int, kind: MarkKind = "train") -> None:
        self.step = step
        self.kind = kind


def put_mark(tensor: Tensor, mark: Mark) -> bool:
    """Mark the node that made `tensor`, unless it has a mark already. False when nothing was marked. 0.3 µs."""
    node = tensor.grad_fn
    if node is None:
        return False
    metadata: Any = node.metadata
    if KEY in metadata:
        return False
    metadata[KEY] = mark
    return True


def mark_of(node: Any) -> Mark | None:
    """The mark of a graph node."""
    found: Mark | None = node.metadata.get(KEY)
    return found


_MOST_COUNTED = 256


class _Owner:
    """Counts the references to a mark that no graph holds, with calls of the same shape as those of `Marks.next`."""

    def __init__(self) -> None:
        self._mark = Mark(0)

    def count(self) -> int:
        return self._references(self._mark, 1)

    def _references(self, mark: Mark, step: int) -> int:
        return sys.getrefcount(mark)


_UNSHARED = _Owner().count()
"""The owner's own, the argument's, `getrefcount`'s: it depends on the interpreter."""


class Marks:
    """The marks that may still be alive, known weakly."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Mark]] = []

    def new(self, step: int, kind: MarkKind = "train") -> Mark:
        """A mark to put on the graphs of `step`. Keep it only while the step runs.

        When very many are alive already, a new one is not counted: a leak of a million steps must not slow each down.
        """
        mark = Mark(step, kind)
        if len(self._refs) < _MOST_COUNTED:
            self._refs.append(weakref.ref(mark))
        return mark

    def next(self, mark: Mark, step: int) -> Mark:
        """The mark for `step` after `mark`: the same one again when no graph holds it, so a clean step costs little.

        The caller's one reference to `mark` is the only one allowed.
        """
        if sys.getrefcount(mark) > _UNSHARED:
            return self.new(step)
        mark.step = step
        return mark

    def alive_before(self, step: int) -> list[Mark]:
        """Marks of steps before `step` whose graph lives, oldest first. Hold them no longer than a call."""
        living, marks = [], []
        for ref in self._refs:
            mark = ref()
            if mark is not None:
                living.append(ref)
                if mark.step < step:
                    marks.append(mark)
        self._refs = living
        return marks

    def __len__(self) -> int:
        """Marks that were alive at the last `alive_before`, and those made since."""
        return len(self._refs)


_OLD_GENERATION_IS_SPLIT = sys.version_info >= (3, 14)
_MOST_SKIPPED = 16
_BIG_YOUNG_GENERATION = 5_000
"""Young objects above which a look costs more than a few microseconds: with `gc.disable()` the young are the heap."""


class Census:
    """The tensors with a graph that were made since the last look and are alive now.

    The collector keeps objects in order of creation, youngest last: reading its young generation backwards up to a
    sentinel left by the last look costs 3–6 µs, whatever the size of the heap. Objects in the oldest generation are
    not seen; `before_collections` looks right before the collector moves them there, as `gc.collect()` in a loop does.
    Nothing is frozen, and the collector's state is untouched.

    A step that leaves as many objects behind as clean steps do (by the collector's counter) is not even looked at, up
    to 16 in a row: what keeps a tensor of each step leaves at least one more. One that leaves fewer is looked at: loops
    settle, and against a count of their first steps one more would not show.
    """

    __slots__ = ("_before", "_count", "_growth", "_pause", "_sentinel", "_skipped", "_usable", "_usual")

    def __init__(self) -> None:
        self._sentinel: list[None] = []
        self._pause = 0
        self._skipped = 0
        self._count: tuple[int, int, int] = (0, 0, 0)
        self._growth: int | None = None  # of the last step, if it was looked at and clean
        self._usual: int | None = None  # of two of them in a row
        self._usable: bool = getattr(sys, "_is_gil_enabled", lambda: True)()  # free-threaded Python has no generations
        self._before: Callable[[str, dict[str, int]], None] | None = None

    def reset(self) -> None:
        """Forget what is older than now."""
        self._sentinel = []

    def before_collections(self, see: Callable[[Tensor], object] | None) -> None:
        """Also `visit` right before objects leave the young generations, until called with None.

        `see` is a bound method that is held weakly. Costs a look in each collection that is not of the youngest alone.
        """
        if self._before is not None:
            _forget_callback(self._before)
            self._before = None
        if see is None or not self._usable:
            return
        method = weakref.WeakMethod(see)

        def before(phase: str, info: dict[str, int]) -> None:
            living = method()
            if living is None:
                _forget_callback(before)
            elif phase == "start" and (info["generation"] > 0 or _OLD_GENERATION_IS_SPLIT):
                self.visit(living)

        self._before = before
        gc.callbacks.append(before)

    def visit_step(self, see: Callable[[Tensor], object]) -> None:
        """`visit`, at the end of each step, unless the step left nothing behind."""
        before, self._count = self._count, gc.get_count()
        count = self._count
        growth = count[0] - before[0]
        # A collection in between starts the counter again.
        is_comparable = count[1] == before[1] and count[2] == before[2]
        if is_comparable and growth == self._usual and self._skipped < _MOST_SKIPPED:
            self._skipped += 1
            self._growth = None
            return
        self._skipped = 0
        is_clean = self.visit(see) == 0
        if is_clean and is_comparable:
            self._usual = growth if growth == self._growth else self._usual
            self._growth = growth
        self._count = gc.get_count()

    def visit(self, see: Callable[[Tensor], object]) -> int:
        """Call `see` with each tensor that carries a graph, none of which is held afterwards. Returns their number."""
        if not self._usable or self._skip():
            return 0
        sentinel = self._sentinel
        count, met = _visit_backwards(gc.get_objects(generation=0), sentinel, see)
        if not met and not _OLD_GENERATION_IS_SPLIT:
            count += _visit_backwards(gc.get_objects(generation=1), sentinel, see)[0]
        self._sentinel = []
        return count

    def _skip(self) -> bool:
        young = gc.get_count()[0]
        if young < _BIG_YOUNG_GENERATION:
            return False
        if self._pause > 0:
            self._pause -= 1
            return True
        self._pause = young // _BIG_YOUNG_GENERATION
        return False


def _forget_callback(callback: Callable[[str, dict[str, int]], None]) -> None:
    if callback in gc.callbacks:
        gc.callbacks.remove(callback)


def _visit_backwards(objects: list[Any], sentinel: object, see: Callable[[Tensor], object]) -> tuple[int, bool]:
    """Visit the objects younger than `sentinel`; how many carry a graph, and whether it was met."""
    tensor_type, count = Tensor, 0
    for obj in reversed(objects):
        if type(obj) is tensor_type:
            if obj.requires_grad and not obj.is_leaf:
                see(obj)
                count += 1
        elif obj is sentinel:
            return count, True
    return count, False


def is_graph_node(kind: type) -> bool:
    """Whether objects of this type are nodes, which keep the graph behind them. A leaf's keeps none."""
    return hasattr(kind, "next_functions") and hasattr(kind, "_sequence_nr") and kind.__name__ != "AccumulateGrad"


def grad_fn_of(tensor: Any) -> Any:
    """`tensor.grad_fn` without the detour through a subclass's `__torch_function__`; None where autograd refuses it.

    A node stands for itself; None for the `ctx` of a hand-written Function whose node is gone.
    """
    if not issubclass(type(tensor), Tensor):
        try:
            return tensor if tensor.next_functions else None
        except RuntimeError:
            return None
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.grad_fn
        except RuntimeError:  # a view of several outputs that was changed in place has no node any more
            return None
