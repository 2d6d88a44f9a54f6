"""Readable names for the way from one object to another."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType, TracebackType
from typing import Any

from torch import Tensor, nn

from safetrain.graph.marks import is_graph_node
from safetrain.source import frame_locals

_TRANSPARENT_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def describe(label: str, path: Sequence[Any]) -> str:
    """The path as text. Of a container at its end, where in it graphs hang is told as a range."""
    steps = [label, *edges(path)]
    last = path[-1]
    if isinstance(last, Tensor) or is_graph_node(type(last)):
        return " → ".join(steps)
    inside = _contents(last)
    if inside:
        steps.append(inside)
    return " → ".join(steps)


def edges(path: Sequence[Any]) -> list[str]:
    """How each object on the path holds the next, where that has a name or a position."""
    out = []
    owner = None  # of an instance dict or a cell, which have no name of their own
    for above, below in itertools.pairwise(path):
        if _is_transparent(above, below):
            owner = owner if owner is not None else above
            continue
        out.append(edge(owner if owner is not None else above, below))
        owner = None
    return [step for step in out if step]


def _is_transparent(above: Any, below: Any) -> bool:
    kind = type(below)
    if kind is dict and _instance_dict(above) is below:
        return True
    if kind is dict and isinstance(above, dict) and any(above.get(name) is below for name in _TRANSPARENT_MODULE_DICTS):
        return True
    return kind in (CellType, TracebackType, FrameType)


def edge(above: Any, below: Any) -> str:
    """How `above` holds `below`: `.name`, `[3]`, `['loss']`, ``closure variable `x` of f()``."""
    for naming in (_of_function, _of_frame, _of_instance, _of_container):
        name = naming(above, below)
        if name is not None:
            return name
    return type(above).__name__


def _of_function(above: Any, below: Any) -> str | None:
    if isinstance(above, MethodType):
        return f"method {above.__func__.__qualname__}" if below is above.__self__ else ""
    if isinstance(above, FunctionType):
        for name, cell in zip(above.__code__.co_freevars, above.__closure__ or (), strict=True):
            if cell is below or _cell_content(cell) is below:
                return f"closure variable `{name}` of {above.__qualname__}()"
        defaults = [*_defaults(above), *(above.__kwdefaults__ or {}).items()]
        return next((f"default argument `{n}` of {above.__qualname__}()" for n, v in defaults if v is below), None)
    if isinstance(above, functools.partial):
        return "functools.partial"
    if type(above).__name__ == "_lru_cache_wrapper":
        return f"functools.lru_cache of {above.__qualname__}()"
    return None


def _defaults(function: FunctionType) -> Iterable[tuple[str, Any]]:
    """The positional parameters that have a default, with it."""
    code, values = function.__code__, function.__defaults__ or ()
    return zip(code.co_varnames[code.co_argcount - len(values) : code.co_argcount], values, strict=True)


def _of_frame(above: Any, below: Any) -> str | None:
    if isinstance(above, BaseException):
        if below is above.args:
            return f"arguments of {type(above).__name__}"
        return f"{type(above).__name__}.__traceback__" + _traceback_local(above.__traceback__, below)
    frame = None
    if isinstance(above, GeneratorType):
        frame = above.gi_frame
    elif isinstance(above, CoroutineType):
        frame = above.cr_frame
    elif isinstance(above, FrameType):
        frame = above
    elif isinstance(above, TracebackType):
        return _traceback_local(above, below).removeprefix(" → ")
    if frame is None:
        return None
    kind = "generator " if isinstance(above, GeneratorType) else ""
    return next(
        (f"local `{n}` of {kind}{frame.f_code.co_name}()" for n, v in frame_locals(frame).items() if v is below), None
    )


def _traceback_local(tb: TracebackType | None, below: Any) -> str:
    while tb is not None:
        for name, value in frame_locals(tb.tb_frame).items():
            if value is below:
                return f" → local `{name}` in {tb.tb_frame.f_code.co_name}()"
        tb = tb.tb_next
    return ""


def _of_instance(above: Any, below: Any) -> str | None:
    if isinstance(above, Tensor):
        if above.is_leaf and above.grad is below:
            return ".grad"
        node_name = next((type(above.grad_fn).__name__ for _ in (0,) if above.grad_fn is not None), "")
        return _attribute(above, below) or (f"ctx of {node_name}" if node_name else None)
    if isinstance(above, (list, tuple, dict, set, frozenset, deque)):
        return None
    if isinstance(above, nn.Module):
        for space in _TRANSPARENT_MODULE_DICTS:
            for name, value in vars(above).get(space, {}).items():
                if value is below:
                    return f".{name}"
    if isinstance(above, type):
        return next((f".{name}" for name, value in vars(above).items() if value is below), None)
    return _attribute(above, below)


def _attribute(above: Any, below: Any) -> str | None:
    for name, value in (_instance_dict(above) or {}).items():
        if value is below:
            return f".{name}"
    for kind in type(above).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            try:
                if descriptor is not None and descriptor.__get__(above) is below:
                    return f".{name}"
            except AttributeError:  # an empty slot
                continue
    return None


def _of_container(above: Any, below: Any) -> str | None:
    if isinstance(above, dict):
        for key, value in dict.items(above):
            if value is below:
                return f"[{_key(key)}]"
        return "a key"
    if isinstance(above, (list, tuple, deque)):
        return next((f"[{i}]" for i, value in enumerate(above) if value is below), None)
    if isinstance(above, (set, frozenset)):
        return "an element"
    return None


def _contents(container: Any) -> str:
    """`list[0..41]`: where in the container its graph-carrying tensors (or what holds them) stand."""
    kind = type(container).__name__
    if type(container).__name__ == "_lru_cache_wrapper":
        return f"functools.lru_cache ({container.cache_info().currsize} entries)"
    if isinstance(container, (list, tuple, deque)):
        at = [i for i, value in enumerate(container) if _carries_graph(value)]
        if not at:
            return f"{kind} of {len(container)}"
        return f"{kind}[{at[0]}]" if at[0] == at[-1] else f"{kind}[{at[0]}..{at[-1]}]"
    if isinstance(container, dict):
        keys = [key for key, value in dict.items(container) if _carries_graph(value)] or list(container)
        shown = ", ".join(_key(key) for key in keys[:3]) + (", …" if len(keys) > 3 else "")
        return f"{kind}[{shown}] ({len(container)} entries)"
    if isinstance(container, (set, frozenset)):
        return f"{kind} of {len(container)}"
    names = sorted({name for name, value in (_instance_dict(container) or {}).items() if _carries_graph(value)})
    return ", ".join(f".{name}" for name in names[:3])


def _carries_graph(value: Any) -> bool:
    """Whether a value is a tensor with a graph, a node, or a shallow container of some."""
    if issubclass(type(value), Tensor):
        return bool(value.requires_grad and not value.is_leaf)
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return is_graph_node(type(value)) or any(
        v.requires_grad if issubclass(type(v), Tensor) else is_graph_node(type(v)) for v in inside[:16]
    )


def named_edges(path: Sequence[Any]) -> list[str]:
    """The edges that are names, not positions."""
    return [step for step in edges(path) if not step.startswith("[")]


def last_name(root: str, path: Sequence[Any]) -> tuple[str, bool]:
    """The last proper name on the path, or the root's, and whether it is that of an attribute."""
    name, is_attribute = root, False
    for step in edges(path):
        if step.startswith("."):
            name, is_attribute = step[1:].split(".")[-1], True
        elif "`" in step:
            name, is_attribute = step.split("`")[1], False
    return name, is_attribute


def _key(key: Any) -> str:
    if issubclass(type(key), Tensor):
        return "tensor"
    text = repr(key) if isinstance(key, (str, int, float, bool, bytes)) else type(key).__name__
    return text if len(text) <= 24 else text[:23] + "…"


def _instance_dict(obj: Any) -> Mapping[str, Any] | None:
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _cell_content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
