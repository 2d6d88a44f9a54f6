"""Family G, graphs: who keeps an autograd graph alive longer than its step, and graphs that were built for nothing.

Each judge is a function that can be called in anyone's loop, notebook or test. The guards in `safetrain.guards` call
them when a death token says that something is held.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn

from safetrain.findings import Finding, Rule, SourceLine, rule
from safetrain.graph import (
    Holder,
    Pinned,
    StoreTrace,
    bound_of,
    files_of,
    find_holders,
    format_bytes,
    grad_fn_of,
    graph_owners,
    is_freed,
    mark_of,
    marks_reached,
    only_rebinds,
    owned_tensors,
    pinned,
    storing_line,
    walk,
)
from safetrain.graph.holders import Wanted, climb
from safetrain.source import LIBRARY, USER, frame_locals, grade, line_text, user_frame, with_text
from safetrain.source.syntax import carried_names, is_call_of, lines_where, scope_of, statement_at

RETAINED = rule(
    "G101", "graph-retained", "warning", "a graph built in an earlier step is still reachable after the next step ended"
)
METRIC = rule(
    "G102",
    "metric-holds-graph",
    "note",
    "a value given to log() or returned as a metric carries a graph (it is detached for you)",
)
EVAL = rule(
    "G103", "eval-builds-graph", "warning", "evaluation builds graphs: gradients are on, and what it computes is kept"
)
RETAIN = rule("G104", "retain-graph", "warning", "backward(retain_graph=True) on a graph that nothing uses again")
GRAD = rule("G105", "grad-holds-graph", "warning", "p.grad itself carries a graph (create_graph=True without use)")
CYCLE = rule("G106", "graph-cycle", "warning", "a graph refers to itself and dies only when the cycle collector runs")
CARRIED = rule(
    "G107",
    "carried-state",
    "warning",
    "this step's loss reaches into an earlier step's graph (state carried over without detach)",
)
STALE = rule(
    "G108", "stale-output", "note", "the last step's big outputs live on through the next forward and raise its peak"
)
EXCEPTION = rule(
    "G110",
    "exception-holds-graph",
    "warning",
    "a caught exception's traceback keeps the failed attempt's tensors alive",
)

MAX_WINDOW = 32
"""A holder that lets go again after at most so many graphs is a window, not a leak."""
STALE_BYTES = 32_000_000
"""An output smaller than this is not worth a note when it lives on through the next forward."""


class Growth:
    """Tells a leak from a window by the number of earlier steps with a living graph, looked at once a step.

    A carry-over of two steps never counts. `suspicious` after two rises without a fall, `certain` after three.
    """

    __slots__ = ("count", "rises")

    def __init__(self) -> None:
        self.count = 0
        self.rises = 0

    def update(self, count: int) -> bool:
        """`count` graphs of earlier steps are alive at the end of this step. True when that is more than before."""
        rose = count > self.count
        if rose:
            self.rises += 1
        elif count < self.count:
            self.rises = 0
        self.count = count
        return rose

    @property
    def suspicious(self) -> bool:
        """Worth a search for the holder, not yet worth a word."""
        return self.rises >= 2 and self.count >= 2

    @property
    def certain(self) -> bool:
        """One more graph in each of three steps."""
        return self.rises >= 3 and self.count >= 3


class Told:
    """The leaks that were reported: a holder on the same way, or on a part of it, is the same leak."""

    __slots__ = ("_ways",)

    def __init__(self) -> None:
        self._ways: list[tuple[str, ...]] = []

    def knows(self, holder: Holder) -> bool:
        """Whether this leak was told; from now on it was."""
        way = holder.way
        if any(
            way[: len(known)] == known[: len(way)] and min(len(way), len(known)) >= min(2, len(known))
            for known in self._ways
        ):
            return True
        self._ways.append(way)
        return False


# ---------------------------------------------------------------------- G101, G103, G105, G110: something holds


def find_retained_graphs(
    wanted: Wanted | None = None,
    *,
    model: nn.Module | None = None,
    given: Mapping[str, Any] | None = None,
    lines: Mapping[str, tuple[SourceLine | None, SourceLine | None]] | None = None,
    at_least: int = 1,
    budget_s: float = 0.5,
) -> list[Finding]:
    """Who keeps autograd graphs alive now: one finding for each holder, the worst first.

    Call it between steps, when no graph should be left. `wanted` says which tensors are of interest and which
    earlier steps each one keeps (see `graph.reaches`); by default every tensor that carries a graph. `given` are
    objects to search first, by the names to report; live frames, user modules and global hooks are searched anyway.
    `lines` maps a holder's label to the lines that stored and made what it holds, where a trace saw them. Holders of
    fewer than `at_least` steps are left out. Reads the heap for at most `budget_s` seconds, no host sync.

    A holder that is bounded to MAX_WINDOW graphs or fewer is not reported.
    """
    every = wanted or (lambda tensor: frozenset((id(tensor),)))
    given = dict(given or {})
    if model is not None:
        given.setdefault("model", model)
    holders = find_holders(every, given, budget_s=budget_s)
    return findings_of(holders, model, lines=lines or {}, at_least=at_least)


def findings_of(
    holders: Sequence[Holder],
    model: nn.Module | None,
    *,
    lines: Mapping[str, tuple[SourceLine | None, SourceLine | None]],
    at_least: int = 1,
    entry: Rule = RETAINED,
    told: Told | None = None,
) -> list[Finding]:
    """Findings for holders, without those that are bounded or were `told` before."""
    files = files_of(model)
    findings = []
    for holder in _without_views(holders, files):
        if len(holder.steps) < at_least or is_window(holder, files) or (told is not None and told.knows(holder)):
            continue
        stored, made = lines.get(holder.root.label + holder.name, (None, None))
        findings.append(_retained(holder, files, model, stored, made, entry))
    return findings


def _without_views(holders: Sequence[Holder], files: Sequence[str]) -> list[Holder]:
    """Without variables that are bound anew each time and show only what another holder keeps, or a turn or two.

    A loss of two turns (a GAN's) reaches graphs of two steps for as long as it has its name, and keeps no more.
    """
    views = [holder for holder in holders if only_rebinds(holder, files)]
    keepers = [holder for holder in holders if holder not in views]
    return [
        h
        for h in holders
        if h not in views or not (len(h.steps) <= 2 or any(h.steps <= keeper.steps for keeper in keepers))
    ]


def is_window(holder: Holder, files: Sequence[str] = ()) -> bool:
    """Whether the holder lets go by itself after at most MAX_WINDOW graphs, as its type or its source says."""
    bound = bound_of(holder, files, visible_values())
    return bound is not None and max(bound, len(holder.steps) - 2) <= MAX_WINDOW


def visible_values() -> dict[str, Any]:
    """What the user's running frames can see, the nearest last word: for numbers that the source names."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if grade(frame.f_code.co_filename) == USER:
            frames.append(frame)
        frame = frame.f_back
    seen: dict[str, Any] = {}
    for frame in reversed(frames):
        seen.update(frame.f_globals)
        seen.update(frame_locals(frame))
    return seen


def _retained(
    holder: Holder,
    files: Sequence[str],
    model: nn.Module | None,
    stored: SourceLine | None,
    made: SourceLine | None,
    entry: Rule,
) -> Finding:
    size = measure(holder.tensors, model)
    kept = len(holder.steps)
    holds = holder.describe()
    source = stored or storing_line(holder.name, files, attribute=holder.is_attribute)
    per_step = size.bytes / max(1, kept)
    what = f"{kept} graphs of earlier steps" if kept > 1 else "the graph of an earlier step"
    by_node = not any(isinstance(end, Tensor) for end in holder.tensors)
    if holder.through_exception:
        entry = EXCEPTION
    elif holder.through_grad:
        entry = GRAD
    return entry.finding(
        f"{holds} keeps {what} alive {'through their nodes, without any tensor ' if by_node else ''}"
        f"({size.describe()})" + (f", about {format_bytes(per_step)} more each step" if kept > 1 else ""),
        source=source,
        holder=holds,
        op=type(grad_fn_of(holder.tensors[-1])).__name__,
        pinned_bytes=size.bytes,
        growth_bytes_per_step=per_step if kept > 1 else None,
        cause=None if made is None else f"the tensor was made at {made.file}:{made.line}: {made.text}",
        fix=_FIXES.get(entry.code) or (_KEEP_NO_NODE if by_node else detach_fix(source)),
    )


_FIXES = {
    "G105": "call zero_grad(set_to_none=True) before each backward, or take the gradients with "
    "torch.autograd.grad(..., create_graph=True) instead of backward(create_graph=True)",
    "G110": "leave the `except` block before going on, and keep `str(error)` instead of the exception "
    "(`error.__traceback__ = None` drops the tensors)",
    "G103": "run evaluation under `with torch.no_grad():` (or decorate it with @torch.no_grad())",
}


_KEEP_NO_NODE = (
    "keep what is needed of the node (`node.name()`, a number), not the node: it keeps all of the graph behind it"
)


def measure(tensors: Iterable[Tensor | Any], model: nn.Module | None) -> Pinned:
    """What the graphs behind `tensors` (or nodes) pin, parameters and buffers apart."""
    nodes = walk([grad_fn_of(tensor) for tensor in tensors], limit=50_000).nodes
    return pinned(nodes, owned_tensors(model))


_STORE_DETACHED = "store it without its graph: `.detach()` for a tensor, `.item()` for a number that is logged"


def detach_fix(source: SourceLine | None, advice: str = _STORE_DETACHED) -> str:
    """The line with a detach where it belongs, or advice in words."""
    if source is None or not source.text:
        return advice
    try:
        statement = ast.parse(source.text).body[0]
    except (SyntaxError, IndexError):
        return advice
    value = None
    if isinstance(statement, ast.AugAssign):
        value = statement.value
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and len(statement.value.args) == 1:
        value = statement.value.args[0]
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Name, ast.Attribute)):
        value = statement.value
    if not isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
        return advice
    old = ast.get_source_segment(source.text, value) or ""
    start = source.text.rfind(old) if old else -1
    return advice if start < 0 else f"{source.text[:start]}{old}.detach(){source.text[start + len(old) :]}"


# ---------------------------------------------------------------------- G102


def find_attached_metrics(names: Iterable[str], source: SourceLine | None = None) -> list[Finding]:
    """A note for each metric that carried a graph when it was logged."""
    return [
        METRIC.finding(
            f"the metric `{name}` carries a graph when it is logged; it is detached here, but whatever else keeps it "
            "keeps the graph",
            source=source,
            holder=f"metric `{name}`",
            fix=f"log `{name}.detach()`",
        )
        for name in sorted(names)
    ]


# ---------------------------------------------------------------------- G103


def find_eval_graphs(holders: Sequence[Holder], model: nn.Module | None, *, told: Told | None = None) -> list[Finding]:
    """Holders of what an evaluation computed with gradients on, apart from a variable that its last batch left over."""
    kept = [holder for holder in holders if not _is_left_over(holder)]
    return findings_of(kept, model, lines={}, entry=EVAL, told=told)


def _is_left_over(holder: Holder) -> bool:
    if len(holder.path) > 1 or not isinstance(holder.path[0], Tensor):
        return False
    return sum(mark.kind == "eval" for mark in marks_reached(holder.path[0], limit=4_000)) <= 1


def eval_built_graphs(output: Tensor, model: nn.Module | None, source: SourceLine | None) -> Finding:
    """A note: gradients were on during evaluation, though nothing of it was kept."""
    size = measure([output], model)
    return EVAL.finding(
        f"evaluation ran with gradients on: each forward builds a graph that nobody uses ({size.describe()} at a time)",
        severity="note",
        source=source and with_text(source),
        pinned_bytes=size.bytes,
        fix=_FIXES["G103"],
    )


# ---------------------------------------------------------------------- G104


def unused_retain(source: SourceLine, count_bytes: int) -> Finding:
    """The graph was kept for another backward, and none came."""
    return RETAIN.finding(
        "retain_graph=True keeps the graph after its last backward, and nothing goes through it again: "
        f"{format_bytes(count_bytes)} of activations stay alive until the loss is rebound",
        source=source,
        pinned_bytes=count_bytes,
        op="backward",
        cause="saved tensors were still there when the step ended, and died without a further backward",
        fix="drop retain_graph=True from the last backward of the step, or add the losses and call backward once",
    )


# ---------------------------------------------------------------------- G105


def find_attached_grads(named_parameters: Iterable[tuple[str, Tensor]], *, unused: bool = False) -> list[Finding]:
    """Parameters whose `.grad` carries a graph. One finding for all of them.

    Looked at before a step's first backward, such a gradient chains this step's graph to the next one's. Looked at
    after the step (`unused`), only those count whose graph no backward has gone through: it was built for nothing.
    """
    found = [(name, p.grad) for name, p in named_parameters if p.grad is not None and p.grad.requires_grad]
    nodes = walk([grad_fn_of(g) for _, g in found], limit=5_000).nodes
    if not nodes or (unused and any(is_freed(node) for node in nodes)):
        return []
    names = [name for name, _ in found]
    what = "is never differentiated again" if unused else "is carried into the next backward, where it grows"
    size = pinned(nodes)
    return [
        GRAD.finding(
            f"{len(names)} gradients carry a graph that {what}: `{names[0]}.grad` was made with create_graph=True",
            params=names,
            source=_line_of_create_graph(),
            holder=f"`{names[0]}.grad`",
            pinned_bytes=size.bytes,
            cause="a gradient with a graph and its parameter keep each other alive; no collector frees them",
            fix=_FIXES["G105"],
        )
    ]


def _line_of_create_graph() -> SourceLine | None:
    """The one `….backward(create_graph=…)` of a running function, else of the files, if there is one only."""

    def asks(node: ast.AST) -> bool:
        return is_call_of(node, "backward") and any(
            keyword.arg == "create_graph" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
            for keyword in node.keywords  # type: ignore[attr-defined]
        )

    for frame in _running_frames():
        filename = frame.f_code.co_filename
        statement = statement_at(filename, frame.f_lineno) if grade(filename) == USER else None
        lines = lines_where(filename, asks, inside=scope_of(statement)) if statement is not None else []
        if lines:
            return lines[0] if len(lines) == 1 else None
    lines = [line for filename in files_of(None) for line in lines_where(filename, asks)]
    return lines[0] if len(lines) == 1 else None


# ---------------------------------------------------------------------- G106


def find_cycle(wanted: Wanted) -> tuple[list[Any], list[str]]:
    """Tensors or nodes that keep the marked graphs alive though no name leads to them; who refers to the first one."""
    owners = graph_owners(wanted)
    return owners, climb(owners[0], apart_from=[owners]) if owners else []


def graph_cycle(
    owners: Sequence[Any],
    chain: Sequence[str],
    model: nn.Module | None,
    *,
    collected: bool = True,
    searched: bool = True,
) -> Finding:
    """No name was found for these graphs: they died when the cycle collector ran, or (not `collected`) not even then.

    Without `searched` the search for a name ran out of time, so what does not die by a collection may well have one.
    """
    size = measure(owners, model).describe()
    if collected:
        message = f"graphs of earlier steps die only when Python's cycle collector runs ({size} until then)"
    elif searched:
        message = f"graphs of earlier steps stay alive; no name leads to them, and a collection frees none ({size})"
    else:
        message = f"graphs of earlier steps stay alive ({size}); the search for what holds them ran out of time"
    in_a_cycle = "an object that holds a tensor is reachable from that tensor's own graph (ctx, hook or closure)"
    return (CYCLE if collected else RETAINED).finding(
        message,
        holder=" → ".join(chain) or None,
        op=type(grad_fn_of(owners[0])).__name__ if owners else None,
        pinned_bytes=measure(owners, model).bytes,
        cause=in_a_cycle if collected else None,
        fix="use ctx.save_for_backward in a Function; in a hook, do not refer to the tensor that it is registered on"
        if searched
        else _STORE_DETACHED,
    )


# ---------------------------------------------------------------------- G107


def find_carried_state(
    loss: Tensor, step: int, *, given: Mapping[str, Any] | None = None, limit: int = 5_000
) -> list[Finding]:
    """Whether `loss` of `step` reaches marked graphs of earlier steps which a backward has freed, or several of them.

    One unfreed graph of the step before is not a finding: a GAN's generator may be differentiated after the
    discriminator has stepped.
    """
    nodes = walk([grad_fn_of(loss)], limit).nodes
    older = [
        node for node in nodes if (mark := mark_of(node)) is not None and mark.step < step and mark.kind == "train"
    ]
    if not older:
        return []
    beneath = walk(older, limit=300).nodes
    steps = {mark.step for node in older if (mark := mark_of(node)) is not None}
    freed = any(is_freed(node) for node in beneath)
    if not freed and len(steps) < 2:
        return []
    behind = set(map(id, beneath))
    own = grad_fn_of(loss)

    def wanted(end: Any) -> frozenset[int]:
        node = grad_fn_of(end)
        if node is own:
            return frozenset()
        if id(node) in behind:
            return frozenset(steps)
        found = walk([node], 300).nodes
        return frozenset(steps) if any(id(n) in behind for n in found) else frozenset()

    holders = [h for h in find_holders(wanted, given, budget_s=0.3) if len(h.path) > 0]
    carried = _carried_names()
    chosen = _carrier(holders, carried)
    source = None
    holds = None
    if chosen is not None:
        holds = chosen.describe()
        source = carried.get(chosen.name) or storing_line(
            chosen.name, [*files_of(None), *_files_of_path(chosen)], attribute=chosen.is_attribute
        )
    names = f"`{chosen.name}`" if chosen is not None else "a tensor of an earlier step"
    return [
        CARRIED.finding(
            f"the loss of step {step} reaches back into the graph of step {max(steps)} through {names}"
            + (
                ": its backward will fail, that graph is freed"
                if freed
                else f"; {len(steps)} earlier graphs hang on it, one more each step"
            ),
            source=source,
            holder=holds,
            op=type(older[0]).__name__,
            pinned_bytes=pinned(beneath).bytes,
            cause="state is carried from one step to the next together with its graph",
            fix=detach_fix(source, "detach what is carried over where it is stored"),
        )
    ]


def _carrier(holders: Sequence[Holder], carried: Mapping[str, SourceLine]) -> Holder | None:
    """What outlives a step: a name that the loop reads before it binds it, else a place in an object."""

    def rank(holder: Holder) -> int:
        if holder.root.name in carried:
            return 0
        outlives = len(holder.path) > 1 and holder.root.code is None
        return 1 if outlives or len(holder.path) > 2 else 2

    return min(holders, key=rank, default=None)


def _carried_names() -> dict[str, SourceLine]:
    """Names that the running loops carry from turn to turn, with the line that binds them for the next one."""
    found: dict[str, SourceLine] = {}
    frame = user_frame()
    while frame is not None:
        filename = frame.f_code.co_filename
        if grade(filename) == USER:
            for name, statement in carried_names(filename, frame.f_lineno):
                found.setdefault(name, SourceLine(filename, statement.lineno, line_text(filename, statement.lineno)))
        frame = frame.f_back
    return found


def _files_of_path(holder: Holder) -> list[str]:
    files = []
    for obj in holder.path:
        filename = getattr(sys.modules.get(type(obj).__module__), "__file__", None)
        if isinstance(filename, str) and grade(filename) == USER:
            files.append(filename)
    return files


# ---------------------------------------------------------------------- G108


def stale_output(count_bytes: int, source: SourceLine | None) -> Finding:
    """The last step's outputs were still alive when the next forward had ended."""
    return STALE.finding(
        f"{format_bytes(count_bytes)} of the last step's outputs live on through the next forward and raise its peak",
        source=source and with_text(source),
        pinned_bytes=count_bytes,
        fix="`del` the outputs at the end of the step, or compute them inside a function that returns only the loss",
    )


# ---------------------------------------------------------------------- G110


def find_exception_holders(error: BaseException | None, model: nn.Module | None = None) -> list[Finding]:
    """Whether the traceback of a caught exception keeps tensors with a graph alive in frames that have ended.

    Called while an `except` block runs (a retry after out-of-memory), with `sys.exc_info()[1]`.
    """
    held: list[tuple[str, str, Tensor]] = []
    seen: set[int] = set()
    running = {id(frame) for frame in _running_frames()}
    catcher = error.__traceback__.tb_frame if error is not None and error.__traceback__ is not None else None
    if catcher is not None and (id(catcher) not in running or grade(catcher.f_code.co_filename) != USER):
        catcher = None
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        tb: TracebackType | None = error.__traceback__
        while tb is not None:
            if id(tb.tb_frame) not in running and grade(tb.tb_frame.f_code.co_filename) >= LIBRARY:
                for name, value in frame_locals(tb.tb_frame).items():
                    if issubclass(type(value), Tensor) and value.requires_grad and not value.is_leaf:
                        held.append((name, tb.tb_frame.f_code.co_name, value))
            tb = tb.tb_next
        error = error.__cause__ or error.__context__
    if not held:
        return []
    name, function, _ = held[0]
    size = measure([tensor for _, _, tensor in held], model)
    frame = catcher or user_frame()
    source = (
        SourceLine(frame.f_code.co_filename, frame.f_lineno, line_text(frame.f_code.co_filename, frame.f_lineno))
        if frame
        else None
    )
    return [
        EXCEPTION.finding(
            "training goes on inside an `except` block, whose traceback keeps the failed attempt alive "
            f"({size.describe()})",
            source=source,
            holder=f"traceback → local `{name}` in {function}()",
            pinned_bytes=size.bytes,
            cause="an exception refers to the frames it passed through, and they to their local tensors",
            fix=_FIXES["G110"],
        )
    ]


def _running_frames() -> Iterable[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def start_trace(holder: Holder) -> StoreTrace | None:
    """Trace the next step for the line that stores into `holder`; None when nothing can be traced.

    Only this thread is traced: of a local variable of another one it would see a change, and name a line of its own.
    """
    code = holder.root.code
    if code is not None and not any(frame.f_code is code for frame in _running_frames()):
        return None
    trace = StoreTrace(holder)
    return trace if trace.start() else None
