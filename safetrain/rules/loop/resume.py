"""L510 and L514: state that a resumed run or a kept snapshot misses."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from safetrain.findings import Finding, SourceLine
from safetrain.foreign.events import LoopEvent
from safetrain.foreign.facts import POSITION_KEYS
from safetrain.graph.storing import flat_targets, names
from safetrain.rules.loop.catalogue import (
    ALIASED_SNAPSHOT,
    RESUME_INCOMPLETE,
    text_of,
)
from safetrain.source.reading import reads_key, user_files
from safetrain.source.syntax import called_name, is_call_of, lines_where, mentions


class Alias(NamedTuple):
    """Something kept that is the live model's: identity, and whether it is the model itself."""

    id: int
    is_model: bool = False


class ResumeGaps:
    """L510: a run goes on from a checkpoint's model, and other state of it starts afresh.

    It goes on when the optimizer, schedule, scaler or generators were restored too, or when the code around
    `torch.load` reads the epoch or step out of the file. An optimizer that had stepped before the load is rolled back,
    not resumed.
    """

    def __init__(self) -> None:
        self._saved: LoopEvent | None = None
        self._loaded: LoopEvent | None = None
        self._parts: set[str] = set()
        self._restored: set[str] = set()
        self._present: dict[str, LoopEvent] = {}
        self._positions: dict[str, Any] = {}
        self._stepped: set[Any] = set()
        self._fresh = False
        self._told: set[str] = set()

    def see(self, event: LoopEvent) -> Iterator[Finding]:
        """Take the next event."""
        kind, data = event.kind, event.data
        if kind == "checkpoint_saved":
            self._saved = event
        elif kind == "optimizer_made":
            self._stepped.discard(data.get("optimizer"))  # an id may be used again
        elif kind == "checkpoint_loaded":
            self._load(event)
        elif kind == "optimizer_step":
            if self._loaded is not None and data.get("optimizer") not in self._stepped:
                self._fresh = True
            if self._loaded is None or self._present or self._fresh:
                self._stepped.add(data.get("optimizer"))
        elif self._loaded is None:
            return
        elif kind == "state_loaded":
            self._restored.add(data.get("target", ""))
        elif kind == "rng_restored":
            self._restored.add("rng")
        elif kind == "scheduler_step":
            if "scheduler" not in self._present:
                self._positions["scheduler"] = data.get("position")
            self._present.setdefault("scheduler", event)
        elif kind == "scaler_step":
            self._present.setdefault("scaler", event)
        if self._fresh and self._loaded is not None:
            yield from self._judge(self._loaded)

    def _load(self, event: LoopEvent) -> None:
        """Several loads without a step in between are one: a file for each part."""
        if self._loaded is None or self._fresh:
            self._parts, self._restored, self._present, self._positions = set(), set(), {}, {}
            self._loaded, self._fresh = event, False
        self._parts |= set(event.data.get("parts") or ())

    def _judge(self, loaded: LoopEvent) -> Iterator[Finding]:
        parts, restored = self._parts, self._restored
        if "model" not in restored or not (
            restored & {"optimizer", "scheduler", "scaler", "rng"} or self._by_position()
        ):
            return  # weights to start from, not a run to go on with
        for part, event in self._present.items():
            if (
                part not in restored
                and part not in self._told
                and not (part == "scheduler" and self._positions.get(part))
            ):
                self._told.add(part)
                name = event.data.get("scheduler")
                yield resume_finding(part, loaded, self._saved, name=name, in_file=part in parts)
        if "optimizer" not in restored and "optimizer" not in self._told:
            self._told.add("optimizer")
            yield resume_finding("optimizer", loaded, self._saved, in_file="optimizer" in parts)
        if "rng" in parts and "rng" not in restored and "rng" not in self._told:
            self._told.add("rng")
            yield resume_finding("rng", loaded, self._saved, in_file=True)

    def _by_position(self) -> bool:
        """The file holds an optimizer and a position, and the code that loads it reads the position."""
        source = self._loaded.source if self._loaded is not None else None
        return (
            {"optimizer", "epoch"} <= self._parts
            and "optimizer" not in self._told
            and source is not None
            and reads_key(source, POSITION_KEYS)
        )


_RESUME = {
    "scheduler": "the schedule ({name}, last_epoch 0) starts again from its first learning rate",
    "scaler": "the GradScaler starts again from its first scale, which costs a run of skipped steps",
    "optimizer": "the optimizer starts without its momentum and step counts",
    "rng": "the random number generators (rng) go on from wherever they are: dropout, noise and shuffling differ from "
    "an uninterrupted run",
}


def resume_finding(
    part: str, loaded: LoopEvent, saved: LoopEvent | None, *, name: str | None = None, in_file: bool
) -> Finding:
    """L510 for one part of a run's state."""
    harm = _RESUME[part].format(name=name or "lr_scheduler")
    fix = "torch.set_rng_state(ckpt['rng'])" if part == "rng" else f"{part}.load_state_dict(ckpt['{part}'])"
    where = "it is in the checkpoint but was not loaded" if in_file else "the checkpoint does not hold it"
    missing_in_save = not in_file and saved is not None and saved.source is not None
    source = saved.source if missing_in_save and saved is not None else loaded.source
    return RESUME_INCOMPLETE.finding(
        f"the resumed run misses its {part}: {where}. So {harm}.",
        source=text_of(source),
        op="torch.save" if missing_in_save else "torch.load",
        cause=f"{part} state not restored: {where}",
        fix=fix if in_file else f"save its state_dict() too, and {fix}",
    )


def find_aliased_snapshots(model: nn.Module, holders: Iterable[tuple[str, Any]]) -> dict[str, Alias]:
    """Kept tensors that share memory with the model's own, by path, looking two levels into `holders`.

    They are dicts of tensors, lists of them by a name like `backup`, and the model by a name like `best_model`.
    What is found again after the model has trained is a fault (see `aliased_finding`): what was kept as the best
    weights are the current ones. No host sync.
    """
    live = {
        t.untyped_storage().data_ptr()
        for t in (*model.parameters(), *model.buffers())
        if not is_lazy(t) and t.device.type != "meta" and t.layout is torch.strided and t.numel()
    }
    found: dict[str, Alias] = {}
    for path, holder in holders:
        _search_aliases(path, holder, live, found, 2)
    return found


def _search_aliases(path: str, value: Any, live: set[int], found: dict[str, Alias], depth: int) -> None:
    if issubclass(type(value), nn.Module):
        parameters = list(itertools.islice(value.parameters(), 4))
        if "best" in _words(path) and _are_live(parameters, live) and _line_of_kept_model(path) is not None:
            found[path] = Alias(id(value), is_model=True)
    elif issubclass(type(value), dict):
        tensors = [t for t in list(value.values())[:8] if isinstance(t, Tensor)]
        if _are_kept(path, tensors, live):
            found[path] = Alias(id(value))
        elif depth and len(value) <= 64:
            for key, item in list(value.items()):
                _search_aliases(f"{path}[{key!r}]", item, live, found, depth - 1)
    elif depth and type(value) in (list, tuple):
        if value and _words(path) & _KEPT_VALUES and all(type(t) is Tensor for t in value[:8]):
            if _are_live(list(value[:8]), live):
                found[path] = Alias(id(value))
            return
        for i, item in enumerate(value[:16]):
            _search_aliases(f"{path}[{i}]", item, live, found, depth - 1)
    elif depth and hasattr(value, "__dict__") and not issubclass(type(value), type):
        for key, item in list(vars(value).items())[:64]:
            _search_aliases(f"{path}.{key}", item, live, found, depth - 1)


_KEPT_PARAMETERS = frozenset({"best", "backup", "snapshot"})
_KEPT_VALUES = _KEPT_PARAMETERS | {"shadow", "saved", "prev", "previous", "original", "initial"}
"""Words of a name whose values are not meant to move. Parameters by the name `old` may be a group for an optimizer."""


def _words(path: str) -> set[str]:
    """Those of a path's last name, subscripts left out: {"best", "params"} for ``keeper.best_params[0]``."""
    name = re.sub(r"\[.*?\]", "", path).rpartition(".")[2]
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))


def _are_kept(path: str, tensors: list[Tensor], live: set[int]) -> bool:
    """Whether a dict's tensors are the live ones: those of a `state_dict()`, or parameters by a name that says kept."""
    is_state = all(type(t) is Tensor and not t.requires_grad for t in tensors)
    return (is_state or bool(_words(path) & _KEPT_PARAMETERS)) and _are_live(tensors, live)


def _are_live(tensors: list[Tensor], live: set[int]) -> bool:
    return bool(tensors) and all(_shares(t, live) for t in tensors)


def line_of_snapshot(path: str) -> SourceLine | None:
    """The one statement of the user's files that binds the path's last name to a `state_dict()` or named tensors."""
    last = _last_name(path)
    if last is None:
        return None

    def binds(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Assign)
            and any(names(target, *last) for target in flat_targets(node.targets))
            and any(is_call_of(inner, *_GIVE_LIVE_TENSORS) for inner in ast.walk(node))
        )

    lines = _lines_that_name(last[0], binds)
    return lines[0] if len(lines) == 1 else _line_of_kept_model(path)


def _lines_that_name(name: str, test: Callable[[ast.AST], bool]) -> list[SourceLine]:
    """Lines of the user's files whose nodes pass a test; only files that have the name in them are parsed."""
    return [line for file in user_files() if mentions(file, name) for line in lines_where(file, test)]


def _last_name(path: str) -> tuple[str, bool] | None:
    """Of a path: its last name, and whether that is an attribute."""
    names_of_path = re.findall(r"(\.?)([A-Za-z_]\w*)", re.sub(r"\[.*?\]", "", path))
    return (names_of_path[-1][1], bool(names_of_path[-1][0])) if names_of_path else None


def _line_of_kept_model(path: str) -> SourceLine | None:
    """The statement that binds the path's last name to a plain name under an `if`: `best_model = model`.

    Not one beside which something is saved: a file is the copy then.
    """
    last = _last_name(path)

    def binds(statement: ast.Assign) -> bool:
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        pairs = zip(flat_targets(statement.targets), values, strict=False)
        return last is not None and any(names(t, *last) and isinstance(v, (ast.Name, ast.Attribute)) for t, v in pairs)

    def keeps(node: ast.AST) -> bool:
        around = getattr(node, "parent", None)
        return (
            isinstance(node, ast.Assign)
            and isinstance(around, ast.If)
            and binds(node)
            and any(isinstance(inner, ast.Compare) for inner in ast.walk(around.test))
            and not any("save" in called_name(call) for call in ast.walk(around) if isinstance(call, ast.Call))
        )

    lines = _lines_that_name(last[0], keeps) if last is not None else []
    return lines[0] if lines else None


_GIVE_LIVE_TENSORS = ("state_dict", "named_parameters", "named_buffers", "parameters", "buffers")


def _shares(tensor: Tensor, live: set[int]) -> bool:
    try:
        return not is_lazy(tensor) and tensor.untyped_storage().data_ptr() in live
    except (RuntimeError, NotImplementedError):
        return False


_KEPT = re.compile(
    r"best|snap|keep|kept|back|init|start|orig|prev|old|ema|swa|shadow|ckpt|checkpoint|save|weights|history|\["
)


def aliased_finding(path: str, source: SourceLine | None = None, *, is_model: bool = False) -> Finding:
    """L514 for what is kept at `path`. A note when the name does not say that it is meant to last."""
    what = (
        "is kept as the best model, but it is the live one: assigning does not copy"
        if is_model
        else "was kept as a snapshot of the model, but its tensors are the live ones: state_dict() does not copy"
    )
    return ALIASED_SNAPSHOT.finding(
        f"`{path}` {what}, so it changes with every step and restores nothing.",
        severity="warning" if _KEPT.search(path.rpartition(".")[2].lower()) else "note",
        source=text_of(source),
        holder=path,
        cause="the model kept without a copy" if is_model else "state_dict() kept without a copy",
        fix="best_model = copy.deepcopy(model)" if is_model else "best = copy.deepcopy(model.state_dict())",
    )
