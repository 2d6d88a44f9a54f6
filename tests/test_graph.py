"""The instruments: marks die with their graphs, a census sees the young, pinned bytes are right, paths are readable."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_programs import KINDS, batches, make_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain.graph import (
    Census,
    Holder,
    Marks,
    StoreTrace,
    bound_of,
    find_holders,
    format_bytes,
    is_freed,
    mark_of,
    owned_tensors,
    pinned,
    put_mark,
    reachable_parameters,
    storing_line,
    walk,
)
from safetrain.graph.roots import Root
from safetrain.source import other_threads_run

reads_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not tell what a node saved"
)


def any_graph(tensor: Tensor) -> frozenset[int]:
    return frozenset((id(tensor),))


# ---------------------------------------------------------------------- marks and census


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_lives_as_long_as_its_graph(kind: str) -> None:
    marks = Marks()
    model = make_model(kind)
    x, y = next(batches(kind, 1))
    loss = F.cross_entropy(model(x), y)
    put_mark(loss, marks.new(1))
    assert [m.step for m in marks.alive_before(2)] == [1]
    total = loss * 2
    loss.backward()
    del loss
    assert [m.step for m in marks.alive_before(2)] == [1], "the sum still holds it"
    del total
    assert not marks.alive_before(2)


def test_an_older_mark_stays() -> None:
    marks = Marks()
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    first, second = marks.new(1), marks.new(2)
    assert put_mark(loss, first)
    assert not put_mark(loss, second)
    assert mark_of(loss.grad_fn) is first


def test_a_leaf_is_not_marked() -> None:
    assert not put_mark(torch.ones(2, requires_grad=True), Marks().new(1))


def census_of(census: Census) -> list[Tensor]:
    seen: list[Tensor] = []
    census.visit(seen.append)
    return seen


def test_a_census_sees_each_new_tensor_with_a_graph_once() -> None:
    weight = torch.ones(3, requires_grad=True)
    census = Census()
    a, plain = weight * 2, torch.ones(3)
    b = a.sum()
    seen = census_of(census)
    assert any(t is a for t in seen) and any(t is b for t in seen)
    assert not any(t is plain or t is weight for t in seen)
    c = weight * 3
    seen = census_of(census)
    assert len(seen) == 1 and seen[0] is c


def test_a_census_sees_what_the_collector_moved_one_generation_up() -> None:
    weight = torch.ones(3, requires_grad=True)
    census = Census()
    kept = weight * 2
    gc.collect(0)
    assert any(t is kept for t in census_of(census))


@pytest.mark.slow
def test_a_census_does_not_get_slower_on_a_big_heap() -> None:
    def cost() -> float:
        census = Census()
        times = []
        for _ in range(200):
            started = time.perf_counter()
            census.visit(lambda tensor: None)
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]

    small = cost()
    heap = [[i] for i in range(2_000_000)]
    assert cost() < 5 * small + 20e-6
    del heap


def test_a_census_pauses_when_the_young_generation_is_the_heap() -> None:
    gc.disable()
    try:
        census = Census()
        heap = [[i] for i in range(60_000)]
        kept = torch.ones(2, requires_grad=True) * 2
        looks = [any(t is kept for t in census_of(census)) for _ in range(30)]
        assert sum(looks) < 5
        del heap
    finally:
        gc.enable()


# ---------------------------------------------------------------------- walks and bytes


@pytest.mark.parametrize("kind", KINDS)
def test_reachable_parameters_are_those_that_get_a_gradient(kind: str) -> None:
    model = make_model(kind)
    model.spare = nn.Linear(2, 2)
    x, y = next(batches(kind, 1))
    loss = F.cross_entropy(model(x), y)
    reached = {id(p) for p in reachable_parameters(loss)}
    loss.backward()
    assert reached == {id(p) for p in model.parameters() if p.grad is not None}


def test_a_walk_is_bounded_and_says_so() -> None:
    x = torch.ones(1, requires_grad=True)
    for _ in range(50_000):
        x = x + 1
    found = walk([x.grad_fn], limit=1000)
    assert len(found.nodes) == 1000 and not found.complete


@reads_saved
def test_pinned_bytes_of_a_linear_layer_are_its_input() -> None:
    layer = nn.Linear(256, 128, bias=False)
    hidden = torch.randn(512, 256, requires_grad=True) + 0
    out = layer(hidden)
    found = pinned(walk([out.grad_fn]).nodes, owned_tensors(layer))
    assert found.saved_bytes == 512 * 256 * 4
    assert not found.freed and "activations" in found.describe()
    out.sum().backward()
    found = pinned(walk([out.grad_fn]).nodes, owned_tensors(layer))
    assert found.saved_bytes == 0
    assert found.freed and "skeleton" in found.describe()
    assert is_freed(out.grad_fn)


@reads_saved
def test_a_storage_that_two_nodes_save_counts_once() -> None:
    x = torch.randn(1000, requires_grad=True) + 0
    both = x.sin() + x.cos()
    assert pinned(walk([both.grad_fn]).nodes).saved_bytes == 4000


def test_reading_a_checkpointed_graph_recomputes_nothing() -> None:
    calls = [0]

    def block(x: Tensor) -> Tensor:
        calls[0] += 1
        return x.sin().cos()

    out = checkpoint(block, torch.randn(8, requires_grad=True), use_reentrant=False)
    pinned(walk([out.grad_fn]).nodes)
    assert calls[0] == 1


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 B"), (1_536, "1.5 kB"), (18_200_000, "18.2 MB"), (3e9, "3.0 GB")]
)
def test_bytes_read_well(count: float, text: str) -> None:
    assert format_bytes(count) == text


# ---------------------------------------------------------------------- holders


def holders_of(value: Any, name: str = "thing") -> list[Holder]:
    return [h for h in find_holders(any_graph, {name: value}) if h.root.label == name]


def graphs(n: int = 3) -> list[Tensor]:
    weight = torch.ones(2, requires_grad=True)
    return [weight * i for i in range(1, n + 1)]


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


class Plain:
    def __init__(self, kept: Any) -> None:
        self.kept = kept


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: t, "thing → list[0..2]"),
        (lambda t: {"a": {"b": t}}, "thing → ['a'] → ['b'] → list[0..2]"),
        (lambda t: deque(t), "thing → deque[0..2]"),
        (lambda t: Plain(t), "thing → .kept → list[0..2]"),
        (lambda t: Slotted(t), "thing → .kept → list[0..2]"),
        (lambda t: functools.partial(print, t), "thing → functools.partial"),
        (lambda t: lambda: t, "closure variable `t` of"),
        (lambda t: dict(zip("abc", t, strict=True)), "thing → dict['a', 'b', 'c'] (3 entries)"),
    ],
)
def test_the_way_to_a_tensor_is_readable(make: Any, text: str) -> None:
    (holder,) = holders_of(make(graphs()))
    assert text in holder.describe()
    assert len(holder.steps) == 3


def test_a_module_is_described_by_its_own_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_buffer("seen", graphs(1)[0])
    (holder,) = holders_of(model, "model")
    assert holder.describe() == "model → .1 → .seen"
    assert holder.name == "seen" and holder.is_attribute


def test_a_container_is_not_hidden_by_a_local_name_of_its_element() -> None:
    kept = graphs(1)
    newest = kept[0]
    found = [h.describe() for h in find_holders(any_graph)]
    assert any("`kept`" in text for text in found) and any("`newest`" in text for text in found)
    assert newest is kept[0]


def test_locals_of_other_threads_and_suspended_generators_are_seen() -> None:
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        held_by_a_thread = graphs(2)
        ready.set()
        done.wait()
        assert held_by_a_thread

    def generate() -> Any:
        held_by_a_generator = graphs(2)
        yield
        assert held_by_a_generator

    thread = threading.Thread(target=work)
    running = generate()
    next(running)
    thread.start()
    ready.wait()
    try:
        text = " ".join(h.describe() for h in find_holders(any_graph, {"gen": running}))
    finally:
        done.set()
        thread.join()
        running.close()
    assert "local `held_by_a_thread` in work()" in text
    assert "local `held_by_a_generator` of generator generate()" in text


def test_the_search_is_bounded_in_time_on_a_big_heap() -> None:
    heap = {"rows": [[i, [i]] for i in range(300_000)], "kept": graphs()}
    started = time.perf_counter()
    found = holders_of(heap)
    assert time.perf_counter() - started < 3
    assert "['kept'] → list[0..2]" in found[0].describe()


def test_a_search_leaves_no_reference_behind() -> None:
    kept = graphs()
    before = [sys.getrefcount(t) for t in kept]
    gc.disable()
    try:
        find_holders(any_graph, {"kept": kept})
        assert [sys.getrefcount(t) for t in kept] == before
    finally:
        gc.enable()


# ---------------------------------------------------------------------- which line


def test_the_trace_finds_the_line_that_stored_and_the_line_that_made() -> None:
    weight = torch.ones(2, requires_grad=True)
    log: list[Tensor] = [weight * 1]
    holder = next(h for h in find_holders(any_graph, {"log": log}) if h.root.label == "log")
    trace = StoreTrace(holder)
    del holder

    def one_step() -> None:
        value = weight * 2
        unrelated = [value.detach()]
        log.append(value)
        unrelated.clear()

    if sys.gettrace() is not None:
        pytest.skip("another tool is tracing")
    assert trace.start()
    one_step()
    trace.stop()
    assert trace.stored_at is not None and trace.stored_at.text == "log.append(value)"
    assert trace.made_at is not None and trace.made_at.text == "value = weight * 2"
    assert sys.gettrace() is None


def test_a_trace_is_not_set_where_a_debugger_has_its_own() -> None:
    log = graphs()
    holder = holders_of(log)[0]
    before = sys.gettrace()
    sys.settrace(lambda *args: None)
    try:
        assert not StoreTrace(holder).start()
    finally:
        sys.settrace(before)


SOURCE = """
class Meter:
    def __init__(self):
        self.values = []
        self.total = None

    def update(self, loss):
        self.values.append(loss)
        self.total = loss if self.total is None else self.total + loss

def loop(values):
    total = 0
    window = []
    recent = []
    for i in range(100):
        total += i
        window.append(i)
        if len(window) > LIMIT:
            window.pop(0)
        recent.append(i)
        recent = recent[-12:]
"""


@pytest.fixture
def source_file(tmp_path: Any) -> str:
    path = tmp_path / "user_code.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize(
    ("name", "attribute", "text"),
    [
        ("values", True, "self.values.append(loss)"),
        ("total", True, "self.total = loss if self.total is None else self.total + loss"),
        ("total", False, "total += i"),
        ("window", None, "window.append(i)"),
        ("missing", None, None),
    ],
)
def test_the_source_is_read_for_the_storing_statement(source_file: str, name: str, attribute: Any, text: Any) -> None:
    found = storing_line(name, [source_file], attribute=attribute)
    assert (found and found.text) == text


@pytest.mark.parametrize(("name", "bound"), [("window", 8), ("recent", 12), ("values", None), ("total", None)])
def test_the_source_says_how_long_a_window_is(source_file: str, name: str, bound: Any) -> None:
    holder = Holder(Root(f"global `{name}`", name, [], namespace={}), [[]], [], frozenset())
    assert bound_of(holder, [source_file], {"LIMIT": 8}) == bound


def test_a_deque_says_its_own_bound() -> None:
    (holder,) = holders_of(deque(graphs(), maxlen=5))
    assert bound_of(holder, [], {}) == 5


def test_a_trace_gives_up_on_a_step_with_too_many_lines_and_still_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetrain.graph.storing._MAX_LINES", 100)
    log = graphs()
    trace = StoreTrace(holders_of(log)[0])

    def long_step() -> int:
        total = 0
        for i in range(1000):
            total += i
        return total

    if sys.gettrace() is not None:
        pytest.skip("another tool is tracing")
    assert trace.start()
    long_step()
    assert sys.gettrace() is None
    trace.stop()
    assert sys._getframe().f_trace is None


def test_a_thread_that_waits_is_told_from_one_at_work() -> None:
    stop, stopped = threading.Event(), list[bool]()

    def spin() -> None:
        while not stopped:
            pass

    def runs_beside(work: Any) -> bool:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        try:
            return other_threads_run()
        finally:
            stop.set()
            stopped.append(True)
            thread.join()

    assert not runs_beside(stop.wait)
    stopped.clear()
    assert runs_beside(spin)
