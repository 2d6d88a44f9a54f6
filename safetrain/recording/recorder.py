"""A record of one step's operations: what each read and wrote, on whose line, and where its inputs came from.

A dispatch mode below autograd, so it changes no result. It costs about 50 µs an operation, which is for one step or a
replay, never for a run. It keeps names, lines and numbers, and no tensor: storages and tensors are known by weak
references, so nothing lives longer because it was recorded.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from safetrain.findings import SourceLine
from safetrain.source import USER, frame_locals, grade, line_text

_log = logging.getLogger("safetrain")

_next_sequence_nr = torch._C._autograd._get_sequence_nr
_current_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node

_CHECKPOINT_CODES: frozenset[CodeType] = frozenset({inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__})
_CHECKPOINT_FILE = next(iter(_CHECKPOINT_CODES)).co_filename
_SELECTIVE_CODES: frozenset[CodeType] = frozenset(
    inspect.unwrap(mode.__torch_dispatch__).__code__
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if (mode := getattr(torch.utils.checkpoint, name, None)) is not None
)
_READ_NUMBER = torch.ops.aten._local_scalar_dense.default
_MODULE_CALL: CodeType = nn.Module._call_impl.__code__

_MAX_STACK = 8

Where = tuple[str, int]
"""A user line before its text is read: file and line number."""


Region = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""Part of a storage: offset, shape and strides in elements, and bytes an element."""


def region_of(tensor: Tensor) -> Region:
    """Which part of its storage a tensor covers."""
    if tensor.layout is not torch.strided:
        return (0, tuple(tensor.shape), (), tensor.element_size())
    return (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.element_size())


def regions_overlap(a: Region, b: Region) -> bool:
    """Whether two parts of one storage share an element. Where bounds do not decide, elements are marked in a mask."""
    bounds = [(o, o + sum((n - 1) * s for n, s in zip(shape, stride, strict=False))) for o, shape, stride, _ in (a, b)]
    if 0 in a[1] or 0 in b[1] or a[3] != b[3]:
        return 0 not in a[1] and 0 not in b[1]
    if bounds[0][1] < bounds[1][0] or bounds[1][1] < bounds[0][0]:
        return False
    low = min(bounds[0][0], bounds[1][0])
    mask = torch.zeros(max(bounds[0][1], bounds[1][1]) + 1 - low, dtype=torch.bool)
    mask.as_strided(a[1], a[2], a[0] - low).fill_(True)
    return bool(mask.as_strided(b[1], b[2], b[0] - low).any())


class Input:
    """One tensor that an operation read."""

    __slots__ = ("producer", "requires_grad", "shape", "storage", "version")

    def __init__(self, producer: int, storage: int, requires_grad: bool, version: int, shape: tuple[int, ...]) -> None:
        self.producer = producer
        """Index of the operation that made or last changed the value; -1 when it came from outside the record."""
        self.storage = storage
        self.requires_grad = requires_grad
        self.version = version
        self.shape = shape


class Op:
    """One recorded operation. `inputs` and `outputs` list tensors in schema order."""

    __slots__ = (
        "backward_of", "checkpoint", "fed_bad", "grad_enabled", "has_inf", "has_nan", "in_backward", "index", "inputs",
        "module", "name", "next_node", "outputs", "recomputed", "regions", "scalars", "selective", "stack", "task",
        "writes",
    )  # fmt: skip

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.stack: tuple[Where, ...] = ()
        """The user's lines, innermost first."""
        self.checkpoint: Where | None = None
        """Line of the `checkpoint(...)` call around it, when it ran inside one."""
        self.selective = False
        """It ran under selective checkpointing, which recomputes only some operations."""
        self.recomputed = False
        """It ran because backward asked a (not reentrant) checkpoint for what that had thrown away."""
        self.inputs: tuple[Input, ...] = ()
        self.outputs: tuple[int, ...] = ()
        """Storages of the results."""
        self.writes: tuple[int, ...] = ()
        """Storages changed in place."""
        self.regions: tuple[Region, ...] = ()
        """Which part of each, in the order of `writes`."""
        self.scalars: tuple[float, ...] = ()
        """Python numbers among the arguments, or the number taken out by `item()`."""
        self.grad_enabled = False
        self.in_backward = False
        self.task = -1
        """Which backward, as autograd counts them; -1 outside."""
        self.backward_of: int | None = None
        """In backward: sequence number of the node being run."""
        self.next_node = 0
        """Sequence number that autograd gives next: a node numbered below it was made before this operation ended."""
        self.has_nan: bool | None = None
        self.has_inf: bool | None = None
        self.fed_bad: str | None = None
        """NaN or Inf in what it read that no recorded operation made (the batch, a buffer): which."""
        self.module: str | None = None

    @property
    def where(self) -> Where | None:
        """The user's line."""
        return self.stack[0] if self.stack else None

    @property
    def source(self) -> SourceLine | None:
        """The user's line, with its text."""
        return as_source(self.where)

    @property
    def short_name(self) -> str:
        """`relu_` of `aten.relu_.default`."""
        return short_name(self.name)


def short_name(op: str) -> str:
    """`relu_` of `aten::relu_`."""
    return op.rsplit("::", 1)[-1]


def as_source(where: Where | None) -> SourceLine | None:
    """A place with its text read."""
    return None if where is None else SourceLine(where[0], where[1], line_text(*where))


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What an operation's schema says."""

    name: str
    random: bool
    """It draws from a generator."""
    writes: frozenset[int]
    """Positions of the arguments (counted over args, then keyword-only ones) that are changed."""
    written_names: frozenset[str]


_info: dict[Any, OpInfo] = {}


def _info_of(func: Any) -> OpInfo:
    known = _info.get(func)
    if known is None:
        arguments = func._schema.arguments
        written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        known = _info[func] = OpInfo(
            name=func._schema.name,
            random=torch.Tag.nondeterministic_seeded in func.tags,
            writes=frozenset(written),
            written_names=frozenset(arguments[i].name for i in written),
        )
    return known


def can_leave(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode that is on may be taken off now; when not, ask again later.

    Not under a mode that was put on top of it. And not inside `torch.inference_mode()`, whose end puts the dispatcher
    back as it was at its beginning: it would look for a mode that is gone, and the user's next operation would fail.
    """
    stack = _get_current_dispatch_mode_stack()
    return bool(stack) and stack[-1] is mode and not torch.is_inference_mode_enabled()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation while active: `with Recorder(model) as record: …`.

    `check_finite` reads each result for NaN and Inf (a host sync an operation) and notes the module that ran it: for
    replays. `replay`: lines of the code around the `with` block are no part of what runs, so they are not noted.
    Watchers (see `Watcher`) get each operation before and after it runs.
    Code under `torch.compile` stays compiled and shows only the operations it hands to the dispatcher.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        check_finite: bool = False,
        replay: bool = False,
        watchers: Iterable[Watcher] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = weakref.ref(model) if model is not None else None  # a record must not keep a deleted model
        self.ops: list[Op] = []
        self.first_node = _next_sequence_nr()
        """Nodes numbered from here on were made during the record."""
        self.op_of_node: dict[int, int] = {}
        """Sequence number of a node → index of the operation that made it."""
        self.suspended = False
        self.failed = False
        """Something went wrong while recording: the record ends there, and shows nothing reliable."""
        self._check_finite = check_finite
        self._replay = replay
        self._outside: FrameType | None = None
        self._watchers = list(watchers)
        self._tensors: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._storages: dict[int, tuple[Any, int]] = {}
        self._module_names: dict[int, str] = {}
        if check_finite and model is not None:
            self._module_names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}

    @property
    def model(self) -> nn.Module | None:
        """The model whose modules are named, while it lives."""
        return self._model() if self._model is not None else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled: without this, dynamo gives up a frame for good once it met the mode."""
        return True

    def __enter__(self) -> Recorder:
        self._outside = sys._getframe(1) if self._replay else None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._outside = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _READ_NUMBER and not isinstance(args[0], Tensor):
            return args[0]  # a number that autograd had saved as a tensor arrives as itself; torch cannot read it again
        if self.suspended or any(issubclass(t, FakeTensor) for t in types) or _is_capturing():
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        try:
            op, written = self._before(func, args, kwargs, frame)
        except Exception:
            self._give_up()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            self._after(op, result, written, frame)
        except Exception:
            self._give_up()
        return result

    def _give_up(self) -> None:
        """A fault of the record must not become one of the run."""
        self.suspended = self.failed = True
        _log.warning("safetrain stopped recording this step; the run is not affected", exc_info=True)

    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> tuple[Op, list[Tensor]]:
        """Note what an operation is about to read and write. Returns it with the tensors that it writes."""
        info = _info_of(func)
        op = Op(len(self.ops), info.name)
        read, written, op.scalars = _arguments(info, args, kwargs)
        op.stack, op.checkpoint, op.selective, op.recomputed = _where(frame, self._outside)
        op.grad_enabled = torch.is_grad_enabled()
        op.task = _current_graph_task()
        op.in_backward = op.task != -1
        if op.in_backward:
            node = _current_node()
            op.backward_of = node._sequence_nr() if node is not None else None
        op.next_node = _next_sequence_nr()
        op.inputs = tuple([self._input(t) for t in read])
        op.writes = tuple([_storage_key(t) for t in written])
        op.regions = tuple([region_of(t) for t in written])
        if self._check_finite:
            op.fed_bad = _bad_among([t for t, i in zip(read, op.inputs, strict=True) if i.producer < 0])
        self.ops.append(op)
        for watcher in self._watchers:
            watcher.before(op, info, read, written, frame)
        return op, written

    def _after(self, op: Op, result: Any, written: list[Tensor], frame: FrameType) -> None:
        """Note what it made."""
        self._note_results(op, result, written)
        if self._check_finite:
            self._note_finite(op, result, frame)
        for watcher in self._watchers:
            watcher.after(op, written)

    def _input(self, tensor: Tensor) -> Input:
        storage = _storage_key(tensor)
        return Input(
            self._producer(tensor, storage), storage, tensor.requires_grad, _version(tensor), tuple(tensor.shape)
        )

    def _producer(self, tensor: Tensor, storage: int) -> int:
        made = -1
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor:
            made = known[1]
        written = self._storages.get(storage)
        return made if written is None else max(made, written[1])

    def producer(self, tensor: Tensor) -> int:
        """Index of the operation that made or last changed `tensor`; -1 when it came from outside."""
        return self._producer(tensor, _storage_key(tensor))

    def _note_results(self, op: Op, result: Any, written: list[Tensor]) -> None:
        results = _tensors_in(result)
        op.outputs = tuple([_storage_key(t) for t in results])
        if not op.in_backward and op.next_node - 1 >= self.first_node:
            self.op_of_node.setdefault(op.next_node - 1, op.index)
        for tensor in results:
            self._tensors[id(tensor)] = (weakref.ref(tensor), op.index)
        for tensor in written:
            self._write(tensor, op.index)
        if op.name == "aten::_local_scalar_dense" and isinstance(result, (int, float)):
            op.scalars = (float(result),)

    def _write(self, tensor: Tensor, index: int) -> None:
        if tensor.layout is not torch.strided:
            return  # sparse and opaque layouts have no single storage
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being used again while it is a key here; it holds no memory.
        self._storages[storage._cdata] = (StorageWeakRef(storage), index)  # type: ignore[no-untyped-call]

    def _note_finite(self, op: Op, result: Any, frame: FrameType) -> None:
        op.has_nan = op.has_inf = False
        for tensor in _with_fractions(_tensors_in(result)):
            op.has_nan = op.has_nan or bool(torch.isnan(tensor).any())
            op.has_inf = op.has_inf or bool(torch.isinf(tensor).any())
        if (op.has_nan or op.has_inf) and not op.in_backward:
            op.module = self.module_at(frame)

    def module_at(self, frame: FrameType | None) -> str | None:
        """Name of the innermost module of the model whose forward is running above `frame`."""
        model = self.model
        if not self._module_names and model is not None:
            self._module_names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        here = frame
        while here is not None:
            if here.f_code is _MODULE_CALL:
                name = self._module_names.get(id(frame_locals(here).get("self")))
                if name is not None:
                    return name
            here = here.f_back
        return None

    def maker(self, node: Any) -> Op | None:
        """The operation that made an autograd node, when it was recorded."""
        index = self.op_of_node.get(node._sequence_nr())
        return None if index is None else self.ops[index]

    def nodes_run(self) -> dict[int, int]:
        """Sequence number of each node that a recorded backward ran → the first backward that did."""
        run: dict[int, int] = {}
        for op in self.ops:
            if op.backward_of is not None:
                run.setdefault(op.backward_of, op.task)
        return run


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing of ours may become part of it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class Watcher:
    """Looks at operations while their tensors are alive. What it keeps must be names, numbers or small copies."""

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """Before the operation runs."""

    def after(self, op: Op, written: list[Tensor]) -> None:
        """After it ran."""


def _arguments(
    info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], tuple[float, ...]]:
    """(tensors read or written, tensors written, numbers) among the arguments."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    scalars: list[float] = []
    for i, value in enumerate(args):
        found = _tensors_in(value)
        read += found
        if i in info.writes:
            written += found
        elif type(value) in (int, float):
            scalars.append(float(value))
    for name, value in kwargs.items():
        found = _tensors_in(value)
        read += found
        if name in info.written_names:
            written += found
    return read, written, tuple(scalars)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [] if is_lazy(value) else [value]  # a lazy module's parameter has nothing to tell before it is made
    if isinstance(value, (list, tuple)):
        return [t for t in value if isinstance(t, Tensor)]
    return []


def _with_fractions(tensors: list[Tensor]) -> list[Tensor]:
    """Those that may hold NaN. Forward-mode differentiation makes zeros and others that have no memory to read."""
    return [
        t
        for t in tensors
        if (t.is_floating_point() or t.is_complex()) and not t._is_zerotensor() and t.device.type != "meta"
    ]


def _bad_among(tensors: list[Tensor]) -> str | None:
    floating = _with_fractions(tensors)
    if any(bool(torch.isnan(t).any()) for t in floating):
        return "NaN"
    return "infinities" if any(bool(torch.isinf(t).any()) for t in floating) else None


def _storage_key(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -id(tensor)  # sparse and opaque layouts have no single storage
    key: int = tensor.untyped_storage()._cdata
    return key


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _where(frame: FrameType, outside: FrameType | None) -> tuple[tuple[Where, ...], Where | None, bool, bool]:
    """(User lines, innermost first; line of the innermost `checkpoint` call; is that selective; is it done again)."""
    stack: list[Where] = []
    checkpoint: Where | None = None
    in_checkpoint = selective = recomputed = False
    here: FrameType | None = frame
    while here is not None and here is not outside:
        code = here.f_code
        if grade(code.co_filename) == USER:
            stack.append((code.co_filename, here.f_lineno))
            if in_checkpoint and checkpoint is None:
                checkpoint = stack[-1]
        elif code in _CHECKPOINT_CODES:
            in_checkpoint = True
        elif code in _SELECTIVE_CODES:
            selective = True
        elif code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINT_FILE:
            recomputed = True
        here = here.f_back
    return tuple(stack[:_MAX_STACK]), checkpoint, selective, recomputed
