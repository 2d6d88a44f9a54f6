"""G122 and G125: what was saved, and who changed it in place."""

from __future__ import annotations

import ast
import re
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.findings import Finding, SourceLine
from safetrain.recording.recorder import Op, Recorder
from safetrain.recording.saved import SavedTensor, nodes_of, saved_by
from safetrain.rules.autopsy.carried import file_of_class, find_carrier, older_nodes
from safetrain.rules.autopsy.catalogue import INPLACE_MODIFIED, LEAF_INPLACE
from safetrain.rules.autopsy.failure import Failure, names_in, tensor_in_message
from safetrain.source import syntax

_FIX = (
    "use the out-of-place form there (`x = x + y` for `x += y`, `x.clone()` before the change), "
    "or make the change after backward"
)


def explain_inplace_modified(failure: Failure) -> Finding:
    """The finding for “… needed for gradient computation has been modified by an inplace operation”."""
    changed = _first_changed(failure)
    if changed is not None and failure.record is not None:
        exact = _from_record(failure, failure.record, changed)
        if exact is not None:
            return exact
    owner = _changed_parameter(failure, changed)
    if owner is not None:
        return _parameter_changed(failure, owner, changed)
    buffer = _changed_buffer(failure)
    if buffer is not None:
        return _buffer_changed(failure, *buffer)
    return _from_source(failure, changed)


def _first_changed(failure: Failure) -> SavedTensor | None:
    """The changed tensor that backward met first (it runs nodes from the newest to the oldest)."""
    if failure.loss is None or failure.loss.grad_fn is None:
        return None
    nodes = nodes_of(failure.loss.grad_fn)
    changed = [s for node in nodes for s in saved_by(node) if s.condition == "changed"]
    named_in_error = [s for s in changed if s.error[:200] == failure.text[:200]]
    return max(named_in_error or changed, key=lambda s: s.node._sequence_nr(), default=None)


def _from_record(failure: Failure, record: Recorder, changed: SavedTensor) -> Finding | None:
    """Both lines, exactly: the operation that saved the tensor and the first one that wrote to it afterwards."""
    saver = record.maker(changed.node)
    if saver is None:
        return None
    shape, _, _, expected = tensor_in_message(changed.error)
    storages = {
        i.storage for i in saver.inputs if shape is None or i.shape == shape or sorted(i.shape) == sorted(shape)
    }
    exact = {i.storage for i in saver.inputs if i.shape == shape and i.version == expected}
    if changed.field in ("result", "output", "hy", "cy"):
        exact = set(saver.outputs)
    for candidates in (exact, storages | set(saver.outputs)):
        write = next((op for op in record.ops[saver.index + 1 :] if not candidates.isdisjoint(op.writes)), None)
        if write is not None:
            storage = next(s for s in write.writes if s in candidates)
            return _exact_finding(failure, saver, write, storage)
    return None


def _exact_finding(failure: Failure, saver: Op, write: Op, storage: int) -> Finding:
    name = failure.storage_names().get(storage)
    what = f"`{name}`" if name else "a tensor"
    saved_at, written_at = saver.source, write.source
    where_saved = f" (line {saved_at.line}: `{saved_at.text}`)" if saved_at else ""
    where = f" on line {written_at.line}: `{written_at.text}`" if written_at else ""
    stepping = _steps_optimizer(written_at)
    op = f"{stepping}.step()" if stepping else write.short_name
    kind = "" if name is None else "buffer " if failure.is_buffer(name) else "parameter "
    return INPLACE_MODIFIED.finding(
        f"{kind}{what} was saved for backward by {saver.short_name}{where_saved}, then changed in place by {op}{where}",
        source=written_at or failure.source,
        params=[name] if name and kind == "parameter " else [],
        module=name.rsplit(".", 1)[0] if name and "." in name else None,
        holder=f"{kind}`{name}`" if name else None,
        op=write.short_name,
        cause=f"saved by {saver.short_name}{where_saved}; changed by {op}{where}",
        fix=_fix_for(stepping, name, kind),
    )


def _fix_for(optimizer: str | None, name: str | None, kind: str) -> str:
    if optimizer:
        return (
            f"call backward on every loss that uses these weights before `{optimizer}.step()`, or compute the "
            "second loss after it"
        )
    if kind == "buffer " and name:
        attribute = name.rsplit(".", 1)[-1]
        return (
            f"read a copy in the forward (`self.{attribute}.clone()`), or rebind it (`self.{attribute} = new`) "
            "instead of writing into it"
        )
    return _FIX


def _steps_optimizer(source: SourceLine | None) -> str | None:
    """`opt` when the line reads `opt.step()`."""
    match = re.search(r"([\w.\[\]'\"]+)\.step\(", source.text) if source is not None else None
    return match[1] if match else None


def _changed_parameter(failure: Failure, changed: SavedTensor | None) -> str | None:
    """The parameter that was changed: one that the failed node reads, at the version that the error names."""
    shape, _, version, _ = tensor_in_message(changed.error if changed is not None else failure.text)
    if shape is None or version is None:
        return None
    near = (
        {id(n.variable) for n in _close_nodes(changed.node) if hasattr(n, "variable")} if changed is not None else set()
    )
    fitting = [
        (name, p)
        for name, p in failure.model.named_parameters()
        if sorted(p.shape) == sorted(shape) and p._version == version and (changed is None or id(p) in near)
    ]
    return fitting[0][0] if fitting else None


def _close_nodes(node: Any) -> list[Any]:
    """The nodes that feed one, through views only."""
    found, stack = [], [child for child, _ in node.next_functions if child is not None]
    while stack:
        here = stack.pop()
        found.append(here)
        if any(
            word in here.name()
            for word in ("TBackward", "View", "Transpose", "Permute", "Expand", "AsStrided", "ToCopy")
        ):
            stack += [child for child, _ in here.next_functions if child is not None]
    return found


def _parameter_changed(failure: Failure, name: str, changed: SavedTensor | None) -> Finding:
    """A weight changed between the forward that saved it and this backward: by an optimizer's step, nearly always."""
    parameter = dict(failure.model.named_parameters())[name]
    holding = [key for key, opt in failure.optimizers.items() if _holds(opt, parameter)]
    step_line, step_text = _step_before_backward(failure, parameter)
    nodes = nodes_of(failure.loss.grad_fn) if failure.loss is not None else []
    old = older_nodes(failure, nodes)
    module = name.rsplit(".", 1)[0] if "." in name else None
    common: dict[str, Any] = {"params": [name], "module": module, "op": "optimizer.step"}
    # In a loop, a step that stands below the failed backward in the source was an earlier turn's.
    if step_line is None and changed is not None and changed.node in old:
        carrier = find_carrier(failure, nodes, old)
        retained = "retain_graph" in (failure.source.text if failure.source else "")
        label = carrier.label if carrier else "a tensor kept from an earlier step"
        return INPLACE_MODIFIED.finding(
            f"backward runs through an earlier step's graph, which {label} carries into this one; `{name}` has been "
            "stepped since",
            source=(carrier.source if carrier else None) or failure.source,
            holder=carrier.label if carrier else None,
            cause=f"{label} still hangs on an earlier step's graph"
            + ("; retain_graph=True kept that graph from being freed, which hides the first error" if retained else ""),
            fix="detach what is carried from step to step where it is stored, and drop retain_graph",
            **common,
        )
    who = step_text or (f"the step of optimizer `{holding[0]}`" if holding else "an in-place write")
    return INPLACE_MODIFIED.finding(
        f"parameter `{name}` was saved by a forward and changed by {who} before that loss was differentiated",
        source=step_line or failure.source,
        holder=f"optimizer `{holding[0]}`" if holding else None,
        cause=f"{who} changed `{name}` between the forward and this backward (inferred from versions and source)",
        fix=_fix_for(step_text.split(".step")[0] if step_text else "the optimizer", name, "parameter "),
        **common,
    )


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


def _step_before_backward(failure: Failure, parameter: Tensor) -> tuple[SourceLine | None, str | None]:
    """The last `.step()` above the failed backward, in the same function, of an optimizer that holds the parameter."""
    for frame, line in failure.user_frames:
        filename = frame.f_code.co_filename
        statement = syntax.statement_at(filename, line)
        if statement is None:
            continue
        scope = syntax.scope_of(statement)

        def steps(node: ast.AST, scope: ast.AST = scope) -> bool:  # a function defined above is not run above
            return syntax.is_call_of(node, "step", "optimizer_step") and syntax.scope_of(node) is scope

        lines = syntax.lines_where(filename, steps, inside=scope)
        before = [s for s in lines if s.line < line and _steps_parameter(s, frame, parameter)]
        if before:
            called = re.search(r"[\w.\[\]'\"]+\.(?:step|optimizer_step)\([^)]*\)", before[-1].text)
            return before[-1], f"`{called[0]}`" if called else f"`{before[-1].text}`"
    return None, None


def _steps_parameter(source: SourceLine, frame: FrameType, parameter: Tensor) -> bool:
    """Whether the object before `.step()` is an optimizer of this parameter; yes where it cannot be looked up."""
    name = _steps_optimizer(source)
    value = {**frame.f_globals, **names_in(frame)}.get(name or "")
    return _holds(value, parameter) if isinstance(value, Optimizer) else not hasattr(value, "get_last_lr")


def _changed_buffer(failure: Failure) -> tuple[str, nn.Module, str] | None:
    """(name, module, attribute) of the buffer or tensor attribute at the version and shape that the error names."""
    shape, _, version, _ = tensor_in_message(failure.text)
    if shape is None:
        return None
    for path, module in failure.model.named_modules():
        held = {**module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, Tensor)}}
        for attribute, value in held.items():
            if (
                value is not None
                and not value.is_inference()
                and tuple(value.shape) == shape
                and value._version == version
            ):
                return (f"{path}.{attribute}" if path else attribute), module, attribute
    return None


def _buffer_changed(failure: Failure, name: str, module: nn.Module, attribute: str) -> Finding:
    source = _attribute_write(module, attribute)
    return INPLACE_MODIFIED.finding(
        f"buffer `{name}` ({type(module).__name__}) was saved by a forward and changed in place before backward",
        source=source or failure.source,
        module=name.rsplit(".", 1)[0] if "." in name else None,
        holder=f"buffer `{name}`",
        cause=f"`self.{attribute}` is written in place by a later forward (inferred from its version)",
        fix=_fix_for(None, name, "buffer "),
    )


def _attribute_write(module: nn.Module, attribute: str) -> SourceLine | None:
    """The line of the module's class that writes into `self.<attribute>`."""
    filename = file_of_class(type(module))
    if filename is None:
        return None

    def writes(node: ast.AST) -> bool:
        target: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            target = node.func.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            target = node.value
        while isinstance(target, ast.Subscript):
            target = target.value
        return isinstance(target, ast.Attribute) and target.attr == attribute

    found = syntax.lines_where(filename, writes)
    return found[0] if found else None


def _from_source(failure: Failure, changed: SavedTensor | None) -> Finding:
    """Neither record nor name: say what autograd knows, and list in-place statements of the failed frames."""
    shape, made_by, version, _ = tensor_in_message(failure.text)
    writes, matching = _writes_near(failure, shape, version)
    node = changed.node.name() if changed is not None else "an operation"
    op = (made_by or "").removesuffix("0").removesuffix("Backward") or None
    place = matching[0] if matching else writes[0] if len(writes) == 1 else failure.source
    near = "; in-place statements near it: " + "; ".join(f"line {w.line} `{w.text}`" for w in writes[:5])
    where = f" on line {place.line}: `{place.text}`" if matching and place is not None else ""
    return INPLACE_MODIFIED.finding(
        f"a tensor of shape {list(shape) if shape is not None else '?'} that {node} saved was changed in place "
        f"before backward{where}",
        source=place,
        op=op,
        cause=(f"the value now there was made by {op}; " if op else "")
        + "inferred without a replay"
        + (near if writes else ""),
        fix=_FIX,
    )


def _writes_near(
    failure: Failure, shape: tuple[int, ...] | None, version: int | None
) -> tuple[list[SourceLine], list[SourceLine]]:
    """(In-place statements of the failed functions, those among them that write to a tensor like the one named)."""
    writes: list[SourceLine] = []
    matching: list[SourceLine] = []
    for frame, line in failure.user_frames:
        filename = frame.f_code.co_filename
        statement = syntax.statement_at(filename, line)
        if statement is None:
            continue

        def fits(node: ast.AST, frame: FrameType = frame) -> bool:
            value = _value_of(_target(node), frame) if _writes_in_place(node) else None
            if not isinstance(value, Tensor) or value.is_inference() or shape is None:
                return False
            return sorted(value.shape) == sorted(shape) and value._version == version

        scope = syntax.scope_of(statement)
        writes += syntax.lines_where(filename, _writes_in_place, inside=scope)
        matching += syntax.lines_where(filename, fits, inside=scope)
    return writes, matching


def _target(node: ast.AST) -> ast.expr:
    """What an in-place statement writes to."""
    target = node.target if isinstance(node, ast.AugAssign) else node.func.value  # type: ignore[attr-defined]
    while isinstance(target, ast.Subscript):
        target = target.value
    assert isinstance(target, ast.expr)
    return target


def _writes_in_place(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return not isinstance(node.value, ast.Constant)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and not node.func.attr.startswith("_")
        and node.func.attr not in {"clip_grad_norm_", "clip_grad_value_", "requires_grad_"}
    )


def explain_leaf_inplace(failure: Failure) -> Finding:
    """The finding for “a leaf Variable that requires grad is being used in an in-place operation”."""
    source = failure.source
    name, op = _leaf_on_line(failure)
    what = f"parameter `{name}`" if name else "a parameter"
    return LEAF_INPLACE.finding(
        f"{what} is changed in place while gradients are recorded" + (f" by {op}" if op else ""),
        source=source,
        params=[name] if name else [],
        op=op,
        cause="autograd cannot give a gradient for a leaf that is overwritten by a recorded operation",
        fix="wrap the update in `with torch.no_grad():` (initialisation, clamping, EMA), or work on a new tensor: `w "
        "= self.weight + delta`",
    )


def _leaf_on_line(failure: Failure) -> tuple[str | None, str | None]:
    """(name of the leaf, in-place op) of the failed line."""
    for frame, line in failure.user_frames[:1]:
        statement = syntax.statement_at(frame.f_code.co_filename, line)
        if statement is None:
            return None, None
        op: str | None = None
        if isinstance(statement, ast.AugAssign):
            op = f"`{ast.unparse(statement.target)} {_symbol(statement)}= …`"
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            op = f"`{ast.unparse(statement.targets[0])} = …`"
        else:
            calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call) and syntax.called_name(n).endswith("_")]
            op = syntax.called_name(calls[0]) if calls else None
        for node in ast.walk(statement):
            if isinstance(node, (ast.Name, ast.Attribute)):
                value = _value_of(node, frame)
                if isinstance(value, Tensor) and value.requires_grad and (value.is_leaf or value._base is not None):
                    leaf = value if value.is_leaf or value._base is None else value._base
                    return failure.parameter_name(leaf) or ast.unparse(node), op
        return None, op
    return None, None


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """What a dotted name stands for in a frame, properties not run; None when it stands for nothing."""
    if isinstance(node, ast.Name):
        return {**frame.f_globals, **names_in(frame)}.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        if isinstance(owner, nn.Module):
            for held in (owner._parameters, owner._buffers, owner._modules):
                if node.attr in held:
                    return held[node.attr]
        return vars(owner).get(node.attr) if hasattr(owner, "__dict__") else None
    return None


_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}


def _symbol(statement: ast.AugAssign) -> str:
    return _SYMBOLS.get(type(statement.op), "")
