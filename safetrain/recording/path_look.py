"""Where a gradient's path is cut: follows what is computed from parameters through one step, op by op.

A look is precise and slow (some microseconds an operation), so it is taken for single steps only, once something is
suspect. It changes no result: every operation runs as it is and is only watched.
"""

from __future__ import annotations

import bisect
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from safetrain.findings import SourceLine
from safetrain.source import USER, grade, user_frame, with_text

CutKind = Literal["reentrant", "no_grad", "rebuilt", "number", "detached", "grad", "no_derivative", "branch"]

_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__complex__", "__array__"})
_DETACHES = frozenset({"detach", "detach_", "data"})
_REBUILDS = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "from_numpy", "nn.Parameter"})
_SUMS = frozenset(
    {"add", "add_", "sub", "sub_", "rsub", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "stack", "cat"}
)
_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_RANK: dict[CutKind, int] = {
    "reentrant": 0, "no_grad": 1, "rebuilt": 2, "detached": 3, "number": 4, "grad": 5, "no_derivative": 6, "branch": 9,
}  # fmt: skip
_HARD = frozenset({"reentrant", "rebuilt", "number", "no_derivative"})
_log = logging.getLogger("safetrain")
_next_node = torch._C._autograd._get_sequence_nr
_MAX_NUMBERS = 4096
_MAX_LIST = 64

_CHECKPOINT = "torch/utils/checkpoint.py"


@dataclass(slots=True, eq=False)
class Cut:
    """A place where the path from some parameters ends: `op` at `source`."""

    kind: CutKind
    op: str
    source: SourceLine | None
    mask: int = 0
    region: SourceLine | None = None
    """Where gradients were switched off, for `no_grad`."""
    places: tuple[tuple[str, int], ...] = ()
    """The user's lines that were running, innermost first, for `no_grad`."""
    loss_uses_it: bool = False
    revoked: bool = False

    @property
    def is_hard(self) -> bool:
        """No schedule switches it off again; the others may be a late start and need patience."""
        return self.kind in _HARD or self.op == "data"


@dataclass(slots=True)
class Term:
    """A scalar that was added to the loss and that carries no graph, though it came from parameters."""

    cut: Cut
    source: SourceLine | None


@dataclass(slots=True)
class _Trace:
    """What is known of one tensor: parameters it depends on by the graph, cuts on other ways to it, constant terms."""

    mask: int = 0
    cuts: frozenset[Cut] = frozenset()
    terms: tuple[Term, ...] = ()


@dataclass(slots=True)
class WhyNoGradient:
    """The verdict on one parameter after a look."""

    kind: Literal["never_used", "cut", "result_unused", "backward_gave_none"]
    cut: Cut | None = None
    tip: tuple[str, SourceLine | None] | None = None
    """The last operation on what was computed from it, when that is unused."""
    function: type | None = None
    """The hand-written Function that takes it and gave no gradient back."""


@dataclass(slots=True)
class _State:
    traces: dict[int, tuple[weakref.ref[Any], _Trace]] = field(default_factory=dict)
    numbers: dict[float, Cut] = field(default_factory=dict)
    arrays: dict[int, frozenset[Cut]] = field(default_factory=dict)
    """Memory of NumPy arrays that came from tensors, by address: what is made from it shares it."""
    memory: dict[int, int] = field(default_factory=dict)
    """Parameters that a result in the graph depends on, by the result's address."""
    used: int = 0
    reached: int = 0
    tips: dict[int, tuple[str, SourceLine | None]] = field(default_factory=dict)
    cuts: dict[tuple[str, str, int], Cut] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)
    spans: list[tuple[int, SourceLine | None]] = field(default_factory=list)
    """Autograd's counter after each operation on what came from parameters, with the operation's line."""
    losses: int = 0
    functions: dict[int, type] = field(default_factory=dict)
    """Hand-written Functions by the id of a parameter that they take."""


class PathLook(TorchFunctionMode):
    """Watches one step. `start()` before its forward, `loss(tensor)` before each backward, `stop()` after the step.

    It holds no tensor alive and makes no host sync. What runs inside `torch.compile` or a hand-written
    `autograd.Function` counts as one operation at most.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = list(params)
        self._bits = {id(p): 1 << i for i, p in enumerate(params.values())}
        self._held = [weakref.ref(p) for p in params.values()]
        self._s = _State()
        self._grad_off: tuple[CodeType, SourceLine] | None = None
        self._failed = False
        self.active = False

    # ------------------------------------------------------------------ taking the look

    def start(self) -> None:
        """Begin to watch."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self.active = True

    def forget(self) -> None:
        """Start over: what was seen so far belonged to no training step (an evaluation)."""
        self._s = _State()

    def stop(self) -> bool:
        """End. False when the user is inside a mode of their own just now; call again later."""
        if self.active:
            if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]
                return False
            self.__exit__(None, None, None)
            self.active = False
            self._s.traces.clear()
        return True

    def loss(self, loss: Tensor) -> None:
        """A loss is about to be differentiated: what reaches it counts."""
        s = self._s
        s.losses += 1
        trace = self._trace(loss)
        if trace is None:
            return
        if loss.grad_fn is not None:
            s.functions.update(functions_on_parameters(loss))
            s.reached |= trace.mask
            s.terms.extend(trace.terms)
        for cut in trace.cuts:
            cut.loss_uses_it = True

    # ------------------------------------------------------------------ the verdict

    def why(self, name: str) -> WhyNoGradient:
        """Why the parameter got no gradient in the step that was watched."""
        bit = 1 << self.names.index(name)
        s = self._s
        if s.reached & bit:
            parameter = self._held[self.names.index(name)]()
            return WhyNoGradient("backward_gave_none", function=self._s.functions.get(id(parameter)))
        cuts = [c for c in s.cuts.values() if c.mask & bit and not c.revoked]
        if cuts:
            best = min(
                cuts, key=lambda c: (not c.loss_uses_it and c.kind not in ("number", "reentrant"), _RANK[c.kind])
            )
            if best.loss_uses_it or best.kind not in ("branch", "no_derivative"):
                return WhyNoGradient("cut", best)
        if s.used & bit:
            return WhyNoGradient("result_unused", tip=s.tips.get(bit.bit_length() - 1))
        return WhyNoGradient("never_used")

    @property
    def saw_a_loss(self) -> bool:
        """A backward ran while it watched, without a fault of its own; else there is no verdict."""
        return self._s.losses > 0 and not self._failed

    @property
    def terms(self) -> list[Term]:
        """Constant terms of the losses that were differentiated."""
        return [] if self._failed else [term for term in self._s.terms if not term.cut.revoked]

    def line_of_node(self, number: int) -> SourceLine | None:
        """The line of the operation that made an autograd node, by the node's number."""
        spans = self._s.spans
        at = bisect.bisect_right(spans, number, key=lambda span: span[0])
        return spans[at][1] if at < len(spans) and (at == 0 or spans[at - 1][0] <= number) else None

    # ------------------------------------------------------------------ following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._failed:
            try:
                self._see(func, args, kwargs or {}, result)
            except Exception:  # a fault of the look must not become one of the run
                self._failed = True
                _log.warning("safetrain stopped following this step; the run is not affected", exc_info=True)
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _name_of(func)
        if type(result) is str:
            return  # `tensor.type()` asks; `tensor.type(torch.LongTensor)` converts
        if name == "_set_grad_enabled":
            self._note_switch(bool(args[0]))
        elif name is not None and torch._C._current_graph_task_id() == -1:
            self._follow(name, args, kwargs, result)

    def _note_switch(self, enabled: bool) -> None:
        frame = user_frame(sys._getframe(1))
        if enabled or frame is None:
            self._grad_off = None
        else:
            code = frame.f_code
            self._grad_off = (code, SourceLine(code.co_filename, frame.f_lineno))

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        s = self._s
        mask, found = 0, False
        cuts: frozenset[Cut] = frozenset()
        terms: tuple[Term, ...] = ()
        dead_scalars: list[Cut] = []
        for tensor in _tensors(args, kwargs):
            trace = self._trace(tensor)
            if trace is None:
                continue
            found = True
            if self._alive(tensor):
                mask |= trace.mask or self._revive(trace)
                terms += tuple(t for t in trace.terms if t not in terms)
            elif trace.cuts and tensor.numel() == 1:
                dead_scalars.extend(trace.cuts)
            cuts |= trace.cuts
        number_cuts = self._from_numbers(name, args)
        if number_cuts:
            dead_scalars.extend(number_cuts)
            cuts |= frozenset(number_cuts)
        elif not found:
            return
        s.used |= mask
        outputs = list(_tensors((result,), {}))
        if (name[-1] == "_" and name[-2:] != "__") or name in (
            "__setitem__",
            "__iadd__",
            "__isub__",
            "__imul__",
            "__itruediv__",
        ):
            outputs = [args[0]] if args and isinstance(args[0], Tensor) else outputs
        alive = [t for t in outputs if self._alive(t)]
        if alive:
            self._keep_alive(name, alive, mask, cuts, terms, dead_scalars)
        if mask and (not alive or (len(alive) < len(outputs) and name in _SUMS)):
            cut = self._cut(name, mask)
            cuts |= {cut}
            self._remember_numbers(cut, result)
        if cuts and type(result).__name__ == "ndarray":
            self._s.arrays[result.__array_interface__["data"][0]] = cuts
        for tensor in outputs:
            if not self._alive(tensor):
                self._put(tensor, _Trace(0, cuts))

    def _keep_alive(
        self, name: str, alive: list[Tensor], mask: int, cuts: frozenset[Cut], terms: tuple[Term, ...], dead: list[Cut]
    ) -> None:
        s = self._s
        here = None
        if mask or name in _SUMS:
            here = _line()
        if name in _SUMS and dead and mask and alive[0].numel() <= max(len(dead) + 1, 2):
            known = {id(t.cut) for t in terms}
            terms += tuple(Term(cut, here) for cut in dead if id(cut) not in known)
        if mask:
            s.spans.append((_next_node(), here))
        rest = mask
        while rest:
            low = rest & -rest
            s.tips[low.bit_length() - 1] = (name, here)
            rest ^= low
        for tensor in alive:
            self._put(tensor, _Trace(mask, cuts, terms))
            if mask and (address := _address(tensor)):
                s.memory[address] = mask

    def _revive(self, trace: _Trace) -> int:
        """A tensor made inside a hand-written Function under no_grad got its node afterwards: it was no cut."""
        mask = 0
        for cut in trace.cuts:
            if cut.kind == "no_grad":
                cut.revoked = True
                mask |= cut.mask
        return mask

    def _cut(self, name: str, mask: int) -> Cut:
        kind, frame = _kind_of(name)
        source = SourceLine(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
        region = None
        if kind == "no_grad" and frame is not None and self._grad_off is not None:
            region = self._grad_off[1] if self._grad_off[0] is frame.f_code else None
        key = (name, source.file if source else "", source.line if source else 0)
        cut = self._s.cuts.get(key)
        if cut is None:
            places = _user_lines(sys._getframe(1)) if kind == "no_grad" and region is None else ()
            cut = self._s.cuts[key] = Cut(kind, name, source, region=region, places=places)
        cut.mask |= mask
        return cut

    def _from_numbers(self, name: str, args: Any) -> list[Cut]:
        """Cuts whose number came back as an argument: `torch.tensor([x.item(), …])`, `loss + reg.item()`."""
        numbers = self._s.numbers
        if not numbers or (name not in _REBUILDS and name not in _SUMS):
            return []
        found: dict[int, Cut] = {}
        for value in _floats(args):
            cut = numbers.get(value)
            if cut is not None:
                found[id(cut)] = cut
        return list(found.values())

    def _remember_numbers(self, cut: Cut, result: Any) -> None:
        if cut.kind == "number" and len(self._s.numbers) < _MAX_NUMBERS:
            for value in _floats((result,)):
                if value != int(value):  # whole numbers are too common to tell anything
                    self._s.numbers[value] = cut

    # ------------------------------------------------------------------ what is known of a tensor

    def _alive(self, tensor: Tensor) -> bool:
        return tensor.grad_fn is not None or (id(tensor) in self._bits and tensor.requires_grad)

    def _trace(self, tensor: Tensor) -> _Trace | None:
        bit = self._bits.get(id(tensor))
        if bit is not None and self._held[bit.bit_length() - 1]() is tensor:
            return _Trace(bit)
        known = self._s.traces.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if type(tensor) is nn.Parameter:
            return self._rewrapped(tensor)
        if self._s.arrays and tensor.grad_fn is None and tensor.is_cpu:
            cuts = self._s.arrays.get(_address(tensor))
            return _Trace(0, cuts) if cuts else None
        return None

    def _rewrapped(self, parameter: nn.Parameter) -> _Trace | None:
        """An `nn.Parameter` that is not the model's: made around the result of an operation of this step?"""
        mask = self._s.memory.get(_address(parameter), 0)
        if not mask:
            return None
        self._put(parameter, _Trace(0, frozenset({self._cut("nn.Parameter", mask)})))
        return self._s.traces[id(parameter)][1]

    def _put(self, tensor: Tensor, trace: _Trace) -> None:
        if id(tensor) not in self._bits:
            self._s.traces[id(tensor)] = (weakref.ref(tensor), trace)


def functions_on_parameters(loss: Tensor, limit: int = 200_000) -> dict[int, type]:
    """The hand-written Functions in a graph that take a parameter itself, by the parameter's id."""
    found: dict[int, type] = {}
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack and len(seen) < limit:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        for child, _ in node.next_functions:
            if function is not None and hasattr(child, "variable"):
                found[id(child.variable)] = function
            stack.append(child)
    return found


def _address(tensor: Tensor) -> int:
    """Where its memory begins; 0 for layouts and wrappers (of `torch.func`) without any of their own."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # the latter of a lazy module's parameter
        return 0


_names: dict[Any, str | None] = {}


def _name_of(func: Any) -> str | None:
    """The operation's name; None for properties and queries that compute nothing."""
    try:
        return _names[func]
    except (KeyError, TypeError):
        name: str | None = getattr(func, "__name__", type(func).__name__)
        if name in ("__get__", "__set__"):
            owner = getattr(getattr(func, "__self__", None), "__name__", "")
            name = owner if name == "__get__" and owner in _PROPERTIES else None
        elif name in _QUERIES:
            name = None
        try:
            _names[func] = name
        except TypeError:  # an unhashable callable: asked again next time
            return name
        return name


_QUERIES = frozenset(
    [
        "size",
        "dim",
        "numel",
        "element_size",
        "stride",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "data_ptr",
        "storage_offset",
        "__len__",
        "__hash__",
        "__repr__",
        "__str__",
        "__format__",
        "requires_grad_",
        "retain_grad",
        "register_hook",
        "untyped_storage",
        "get_device",
        "backward",
        "__deepcopy__",
        "__reduce_ex__",
        "__dir__",
        "is_inference",
        "nelement",
        "ndimension",
    ]
)


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments, two containers deep."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item
                elif isinstance(item, (list, tuple)):
                    yield from (inner for inner in item if isinstance(inner, Tensor))
        elif isinstance(value, dict):
            yield from (item for item in value.values() if isinstance(item, Tensor))


def _floats(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if type(value) is float:
            if value == value and abs(value) != float("inf"):
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _floats(value[:_MAX_LIST])


def _kind_of(name: str) -> tuple[CutKind, FrameType | None]:
    """What kind of cut an operation made here is, and the user's frame that answers for it."""
    frame = user_frame(sys._getframe(2))
    if name in _NUMBERS:
        return "number", frame
    if name == "__bool__":
        return "branch", frame
    if not torch.is_grad_enabled():
        outside = _outside_checkpoint(sys._getframe(2))
        return ("reentrant", outside) if outside is not None else ("no_grad", frame)
    if name in _DETACHES:
        return "detached", frame
    if name in _REBUILDS:
        return "rebuilt", frame
    return ("grad" if name == "grad" else "no_derivative"), frame


def _user_lines(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < 12:
        if grade(frame.f_code.co_filename) == USER:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _outside_checkpoint(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called `checkpoint(..., use_reentrant=True)`, when running inside one."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_filename.replace("\\", "/").endswith(_CHECKPOINT):
            return user_frame(frame)
        if grade(code.co_filename) == USER and code.co_name == "<module>":
            return None
        frame = frame.f_back
    return None


def _line() -> SourceLine | None:
    frame = user_frame(sys._getframe(2))
    return None if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)


def written(source: SourceLine | None) -> str:
    """`file.py:12 `text``, for a message."""
    if source is None:
        return "an unknown line"
    full = with_text(source)
    name = full.file.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{name}:{full.line} `{full.text}`" if full.text else f"{name}:{full.line}"
