"""G129: an in-place operation changed a value that the same forward reads again under its old name."""

from __future__ import annotations

import ast
import weakref
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from safetrain.findings import Finding
from safetrain.recording.recorder import Op, OpInfo, Recorder, Watcher
from safetrain.rules.autopsy.catalogue import INPLACE_ALIAS
from safetrain.source import USER, frame_locals, grade, syntax

_IDEMPOTENT = frozenset(
    {"relu_", "clamp_", "clamp_min_", "clamp_max_", "hardtanh_", "abs_", "sign_", "ceil_", "floor_", "round_"}
)
"""Doing these twice changes nothing: branches that each begin with one on a shared input are right."""


@dataclass(slots=True)
class _Suspect:
    """A name that still means the value before a write. Holds no frame and no tensor."""

    write: Op
    tensor: weakref.ref[Tensor]
    module: str | None
    frame: int
    code: CodeType
    instruction: int
    statement: ast.stmt
    name: str
    in_container: bool
    innocent_names: frozenset[str] = frozenset()
    changed: Tensor | None = None
    reads: list[tuple[Op, int]] = field(default_factory=list)


class AliasWatcher(Watcher):
    """Watches in-place writes to values that a name of a running user frame holds, and later reads through that name.

    `x = relu_(x)` rebinds the name, so reading `x` afterwards is what was meant; `out = relu_(x)` followed by a read of
    `x` is not. Which name a statement reads is taken from its syntax tree. Each suspected value is copied around its
    write, to see whether that changed it.
    """

    def __init__(self, record: Recorder | None = None) -> None:
        self.record = record
        self._suspects: dict[int, list[_Suspect]] = {}
        self._pending: list[tuple[list[_Suspect], Tensor, Tensor]] = []

    def before(self, op: Op, info: OpInfo, read: list[Tensor], written: list[Tensor], frame: FrameType) -> None:
        """See the class."""
        if op.in_backward:
            return
        if self._suspects:
            for tensor in read:
                for suspect in self._suspects.get(id(tensor), ()):
                    self._judge_read(suspect, op, tensor, frame)
        for tensor in written:
            if tensor.is_floating_point() and not (tensor.is_leaf and tensor.requires_grad):
                self._judge_write(op, tensor, frame)

    def after(self, op: Op, written: list[Tensor]) -> None:
        """Whether the write changed anything, left on the device."""
        pending, self._pending = self._pending, []
        for suspects, tensor, before in pending:
            changed = (tensor.detach() != before).any()
            for suspect in suspects:
                suspect.changed = changed

    def _judge_write(self, op: Op, tensor: Tensor, frame: FrameType) -> None:
        if not tensor.requires_grad and not _written_by_layer(frame):
            return  # the user's own in-place preparation of data
        suspects = []
        here: FrameType | None = frame
        while here is not None:
            if grade(here.f_code.co_filename) == USER:
                suspects += self._suspects_in(here, op, tensor, frame)
            here = here.f_back
        if suspects:
            self._suspects.setdefault(id(tensor), []).extend(suspects)
            self._pending.append((suspects, tensor, tensor.detach().clone()))

    def _suspects_in(self, here: FrameType, op: Op, tensor: Tensor, frame: FrameType) -> list[_Suspect]:
        statement = syntax.running_statement(here)
        if statement is None or isinstance(statement, ast.Expr):
            return []  # `x.relu_()` alone on a line is meant to change x
        names, containers = _names_of(tensor, frame_locals(here))
        meant = syntax.names_stored_into(statement)  # `out[mask] = y` says that it changes `out`
        names, containers = names - meant, containers - meant
        if not names and not containers:
            return []
        module = self.record.module_at(frame) if self.record is not None else None
        rebound = frozenset(syntax.assigned_names(statement) | names)

        def suspect(name: str, in_container: bool) -> _Suspect:
            return _Suspect(
                op,
                weakref.ref(tensor),
                module,
                id(here),
                here.f_code,
                here.f_lasti,
                statement,
                name,
                in_container,
                rebound if in_container else frozenset(),
            )

        return [suspect(n, False) for n in names] + [suspect(n, True) for n in containers]

    def _judge_read(self, suspect: _Suspect, op: Op, tensor: Tensor, frame: FrameType) -> None:
        if suspect.tensor() is not tensor:  # another one that was given the same address
            return
        if op.name == suspect.write.name and op.short_name in _IDEMPOTENT:
            return
        here: FrameType | None = frame
        while here is not None and (id(here) != suspect.frame or here.f_code is not suspect.code):
            here = here.f_back
        if here is None or here.f_lasti <= suspect.instruction:
            return
        node = syntax.running_node(here)
        statement = syntax.running_statement(here)
        if node is None or statement is None:
            return
        used = syntax.operand_names(node)
        local = frame_locals(here)
        if suspect.in_container:
            holds = tensor_in(local.get(suspect.name), tensor)
            meant = any(n in suspect.innocent_names and local.get(n) is tensor for n in used)
            guilty = holds and not meant
        else:
            same_statement = statement is suspect.statement
            rebound = suspect.name in syntax.assigned_names(suspect.statement) and not same_statement
            guilty = suspect.name in used and local.get(suspect.name) is tensor and not rebound
        if guilty:
            suspect.reads.append((op, here.f_lineno))

    def findings(self) -> list[Finding]:
        """One for each write that was read again under an old name and did change the value. A host sync each."""
        found: dict[int, Finding] = {}
        for suspects in self._suspects.values():
            for suspect in suspects:
                if suspect.reads and suspect.changed is not None and bool(suspect.changed):
                    found.setdefault(suspect.write.index, _finding(suspect))
        unique: dict[Any, Finding] = {}
        for finding in found.values():
            unique.setdefault((finding.source, finding.op), finding)
        return list(unique.values())


def _written_by_layer(frame: FrameType) -> bool:
    """Whether torch's own layers made the write: nn.ReLU(inplace=True) and its like, called for their result."""
    here: FrameType | None = frame
    while here is not None and grade(here.f_code.co_filename) != USER:
        if str(here.f_globals.get("__name__", "")).startswith(("torch.nn.modules.", "torch.nn.functional")):
            return True
        here = here.f_back
    return False


def _names_of(tensor: Tensor, local: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    """(names bound to the tensor, names of containers that hold it)."""
    names = frozenset(name for name, value in local.items() if value is tensor)
    containers = frozenset(
        name for name, value in local.items() if type(value) in (list, tuple, dict) and tensor_in(value, tensor)
    )
    return names, containers


def tensor_in(container: Any, tensor: Tensor) -> bool:
    """Whether a list, tuple or dict holds this very tensor."""
    if type(container) is dict:
        return any(value is tensor for value in list(container.values())[:256])
    return type(container) in (list, tuple) and any(value is tensor for value in container[:256])


def _finding(suspect: _Suspect) -> Finding:
    write = suspect.write
    line = suspect.statement.lineno
    filename = suspect.code.co_filename
    read_line = suspect.reads[0][1]
    from safetrain.findings import SourceLine
    from safetrain.source import line_text

    source = SourceLine(filename, line, line_text(filename, line))
    by = f"module `{suspect.module}`" if suspect.module else write.short_name
    held = f"a value kept in `{suspect.name}`" if suspect.in_container else f"`{suspect.name}`"
    return INPLACE_ALIAS.finding(
        f"{by} ({write.short_name}) changed {held} in place on line {line}, and line {read_line} "
        f"(`{line_text(filename, read_line)}`) reads it as if it were unchanged",
        source=source,
        module=suspect.module,
        op=write.short_name,
        holder=f"`{suspect.name}` in {suspect.code.co_name}()",
        cause=f"{write.short_name} overwrote {held}, so the later read sees its result: another function than "
        "written, and no error",
        fix="make that operation out of place (`nn.ReLU()` without inplace=True, `x + y` for `x += y`), or hand it a "
        "`.clone()`",
    )
