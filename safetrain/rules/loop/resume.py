"""L510 and L514: state that a resumed run or a kept snapshot misses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
from safetrain.source.syntax import is_call_of, lines_where


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


def find_aliased_snapshots(model: nn.Module, holders: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Kept dicts of tensors that share memory with the model's own, as path → id, looking two levels into `holders`.

    A dict that is found again after the model has trained is a fault (see `aliased_finding`): what was kept as the best
    weights are the current ones. No host sync.
    """
    live = {
        t.untyped_storage().data_ptr()
        for t in (*model.parameters(), *model.buffers())
        if t.device.type != "meta" and t.layout is torch.strided and t.numel()
    }
    found: dict[str, int] = {}
    for path, holder in holders:
        _search_aliases(path, holder, live, found, 2)
    return found


def _search_aliases(path: str, value: Any, live: set[int], found: dict[str, int], depth: int) -> None:
    if issubclass(type(value), dict):
        tensors = [t for t in list(value.values())[:8] if type(t) is Tensor]
        if tensors and all(_shares(t, live) for t in tensors):
            found[path] = id(value)
        elif depth and len(value) <= 64:
            for key, item in list(value.items()):
                _search_aliases(f"{path}[{key!r}]", item, live, found, depth - 1)
    elif depth and type(value) in (list, tuple):
        for i, item in enumerate(value[:16]):
            _search_aliases(f"{path}[{i}]", item, live, found, depth - 1)
    elif depth and hasattr(value, "__dict__") and not issubclass(type(value), (nn.Module, type)):
        for key, item in list(vars(value).items())[:64]:
            _search_aliases(f"{path}.{key}", item, live, found, depth - 1)


def line_of_snapshot(path: str) -> SourceLine | None:
    """The one statement of the user's files that binds the path's last name to a `state_dict()` or named tensors."""
    names_of_path = re.findall(r"(\.?)([A-Za-z_]\w*)", re.sub(r"\[.*?\]", "", path))
    if not names_of_path:
        return None
    dot, name = names_of_path[-1]

    def binds(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Assign)
            and any(names(target, name, bool(dot)) for target in flat_targets(node.targets))
            and any(is_call_of(inner, "state_dict", "named_parameters", "named_buffers") for inner in ast.walk(node))
        )

    lines = [line for filename in user_files() for line in lines_where(filename, binds)]
    return lines[0] if len(lines) == 1 else None


def _shares(tensor: Tensor, live: set[int]) -> bool:
    try:
        return not tensor.requires_grad and tensor.untyped_storage().data_ptr() in live
    except (RuntimeError, NotImplementedError):
        return False


_KEPT = re.compile(r"best|snap|keep|kept|back|init|start|orig|prev|old|ema|swa|ckpt|checkpoint|save|weights|history|\[")


def aliased_finding(path: str, source: SourceLine | None = None) -> Finding:
    """L514 for a kept snapshot at `path`. A note when the name does not say that it is meant to last."""
    return ALIASED_SNAPSHOT.finding(
        f"`{path}` was kept as a snapshot of the model, but its tensors are the live ones: state_dict() does not "
        "copy, so it "
        "changes with every step and restores nothing.",
        severity="warning" if _KEPT.search(path.rpartition(".")[2].lower()) else "note",
        source=text_of(source),
        holder=path,
        cause="state_dict() kept without a copy",
        fix="best = copy.deepcopy(model.state_dict())",
    )
