"""G128: a tensor that backward needs was changed where autograd does not count writes."""

from __future__ import annotations

import ast
import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import Finding, SourceLine
from safetrain.recording.recorder import Op, OpInfo, Recorder, Region, Watcher, region_of, regions_overlap
from safetrain.recording.saved import nodes_of, saved_by
from safetrain.rules.autopsy.catalogue import SILENT_WRITE
from safetrain.source import USER, grade, syntax

_UNUSED_SAVES = frozenset({"running_mean", "running_var"})
"""Saved by batch norm and, in train mode, not read by its backward."""
_MOST_READS = 256
"""Of one leaf that are kept."""


class LeafWatcher(Watcher):
    """Notes the storage of each trainable leaf when operations read it, so that `.data = new` shows later."""

    def __init__(self) -> None:
        self.reads: dict[int, tuple[weakref.ref[Tensor], list[tuple[int, int, Op]]]] = {}
        """By id of the leaf: (storage, version, operation) of each read."""

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """See the class."""
        if op.in_backward or not op.grad_enabled:
            return
        for tensor, source in zip(read, op.inputs, strict=True):
            if source.requires_grad and tensor.is_leaf:
                known = self.reads.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    known = self.reads[id(tensor)] = weakref.ref(tensor), []
                if len(known[1]) < _MOST_READS:
                    known[1].append((source.storage, source.version, op))


def find_silent_writes(
    record: Recorder, loss: Tensor, model: nn.Module, leaves: LeafWatcher | None = None
) -> list[Finding]:
    """Tensors saved for this loss that were written afterwards without autograd counting it. Call just before backward.

    Reads what nodes saved, except where hooks (checkpointing, offloading) stand in between.
    """
    if loss.grad_fn is None:
        return []
    named = [*model.named_buffers(), *model.named_parameters()]
    names = {t.untyped_storage()._cdata: name for name, t in named if t.layout is torch.strided}
    writes: dict[int, list[tuple[Op, Region]]] = {}
    for op in record.ops:
        for storage, region in zip(op.writes, op.regions, strict=True):
            writes.setdefault(storage, []).append((op, region))
    nodes = nodes_of(loss.grad_fn)
    found: dict[int, Finding] = {}
    for node in nodes if writes else ():
        maker = record.maker(node)
        if maker is None or maker.checkpoint is not None:
            continue
        for saved in saved_by(node):
            if saved.tensor is None or saved.field in _UNUSED_SAVES or saved.tensor.layout is not torch.strided:
                continue
            storage = saved.tensor.untyped_storage()._cdata
            if storage in found or storage not in writes:
                continue
            # Chunks of one storage count their writes apart: a write to another chunk is no fault.
            mine = region_of(saved.tensor)
            late = next(
                (w for w, region in writes[storage] if w.index > maker.index and regions_overlap(mine, region)), None
            )
            if late is not None:
                found[storage] = _finding(maker, late, names.get(storage), "changed in place through `.data` (or set_)")
    if leaves is not None:
        found.update(_replaced(record, nodes, leaves, model))
    return list(found.values())


def _replaced(record: Recorder, nodes: list[Any], leaves: LeafWatcher, model: nn.Module) -> dict[int, Finding]:
    """Leaves that got other data after this loss read them: an earlier loss may have read what they held before."""
    names = {id(p): name for name, p in model.named_parameters()}
    mine = {maker.index for node in nodes if (maker := record.maker(node)) is not None}
    found = {}
    for node in nodes:
        leaf = getattr(node, "variable", None)
        known = leaves.reads.get(id(leaf))
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or known is None or known[0]() is not leaf:
            continue
        now = leaf.untyped_storage()._cdata
        for storage, version, reader in known[1]:
            # A write that is counted raises by itself.
            if reader.index in mine and storage != now and leaf._version == version:
                found[storage] = _finding(reader, None, names.get(id(leaf)), "given other data (`.data = …`)")
                break
    return found


def _finding(saver: Op, write: Op | None, name: str | None, how: str) -> Finding:
    what = f"`{name}`" if name else f"a tensor that {saver.short_name} saved"
    saved_at = saver.source
    written_at = write.source if write is not None else _data_assignment()
    saved_on = f" (line {saved_at.line}: `{saved_at.text}`)" if saved_at else ""
    where = f" on line {written_at.line}: `{written_at.text}`" if written_at else ""
    return SILENT_WRITE.finding(
        f"{what} was saved for backward by {saver.short_name}{saved_on} and then {how}{where}: "
        "gradients are computed from the new value, with no error",
        source=written_at or saved_at,
        params=[name] if name else [],
        op=write.short_name if write is not None else "data",
        cause=f"a write that autograd does not count, between forward and backward{where}",
        fix="make the change after backward (or before the forward), under torch.no_grad() and without `.data`",
    )


def _data_assignment() -> SourceLine | None:
    """The only line of the user's loaded code that assigns to `.data`, when there is just one."""
    files = {getattr(m, "__file__", None) for m in list(sys.modules.values())}
    lines = [
        line
        for name in files
        if name is not None and name.endswith(".py") and grade(name) == USER
        for line in syntax.lines_where(name, _assigns_data)
    ]
    return lines[0] if len(lines) == 1 else None


def _assigns_data(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store)
