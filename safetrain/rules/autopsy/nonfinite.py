"""P206 and P211: the first operation, module and parameter where a step stopped being finite."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import Finding, SourceLine
from safetrain.recording.recorder import Op, Recorder
from safetrain.recording.replay import unchanged
from safetrain.recording.saved import nodes_of, saved_by
from safetrain.rules.autopsy.callsite import find_call
from safetrain.rules.autopsy.carried import binding_of
from safetrain.rules.autopsy.catalogue import NONFINITE_GRAD, NONFINITE_LOSS
from safetrain.rules.autopsy.failure import names_in

_DELIBERATE = frozenset(
    {
        "masked_fill", "masked_fill_", "full", "full_like", "fill_", "where", "scalar_tensor", "lift_fresh",
        "new_full", "index_put_", "index_fill_", "triu_", "triu", "detach",
    }
)  # fmt: skip
"""Operations that put an infinity where the user asked for one (attention masks)."""


def explain_nonfinite(model: nn.Module, replay: Callable[[], Tensor], *, scale: float = 1.0) -> Finding | None:
    """Run a micro-batch again, reading every result, and name where Inf or NaN began. None when it stays finite.

    Forward first (P211); when the loss is finite, backward with the loss multiplied by `scale` (P206). The model is put
    back as it was. Costs one step with a host sync an operation.
    """
    with unchanged(model), torch.enable_grad():
        record = Recorder(model, check_finite=True, replay=True)
        with record:
            loss = replay()
        weights = _bad_weights(model)
        if not bool(torch.isfinite(loss.detach()).all()):
            return _bad_weights_finding(weights) if weights else _loss_finding(record, loss)
        if loss.grad_fn is None:
            return None
        start = len(record.ops)
        with record:
            torch.autograd.backward(loss.sum() * scale)
        return _gradient_finding(record, model, start)


def find_nonfinite_loss(model: nn.Module, loss: Tensor, *, frame: FrameType | None = None) -> Finding | None:
    """P211 from the graph of a loss that has not been differentiated yet, where nothing can be run again. Host syncs.

    The first node that saved a NaN (for Inf: an Inf) names the operation; its line is looked for in the source of the
    model's classes and of `frame`, the user's loop. P206 when weights are to blame. None for a finite loss.
    """
    value = loss.detach()
    if bool(torch.isfinite(value).all()):
        return None
    weights = _bad_weights(model)
    if weights:
        return _bad_weights_finding(weights)
    wants_nan = bool(torch.isnan(value).any())
    name, node = _first_bad_node(loss, torch.isnan if wants_nan else torch.isinf)
    word = "NaN" if wants_nan else "Inf"
    if name == _FED:
        return _fed_finding(node, word)
    last = name is None  # nothing that was saved is bad: the last operation made it
    name, node = (_plain_name(loss.grad_fn), loss.grad_fn) if name is None else (name, node)
    place, inside = find_call(model, frame, name, _neighbours(loss, node))
    if place is None and last and frame is not None:
        place = _binding_of_value(frame, loss)
    where = f" on line {place.line}: `{place.text}`" if place is not None else ""
    within = f" in {inside}" if inside else ""
    return NONFINITE_LOSS.finding(
        f"the loss is {word}: the first value in its graph that was not finite came from {name}{within}{where}",
        source=place,
        module=inside,
        op=name,
        cause=f"{name}{within} gave {word} (inferred from what the graph saved and from the source, not replayed)",
        fix=_remedy_for(name, masked=True),
    )


def _fed_finding(node: Any, word: str) -> Finding:
    name = _plain_name(node)
    return NONFINITE_LOSS.finding(
        f"the loss is {word}: {name} was given a tensor that held it already and that carries no graph: it came with "
        "the batch, or was computed before",
        op=name,
        cause=f"{word} in an input of {name} that no operation of this graph made",
        fix=_FROM_OUTSIDE,
    )


def unexplained_loss(loss: Tensor) -> Finding | None:
    """P211 for a loss that a replay does not show again, or nothing can replay. None when it is finite. Host sync."""
    value = loss.detach()
    if bool(torch.isfinite(value).all()):
        return None
    return NONFINITE_LOSS.finding(
        f"the loss is {'NaN' if bool(torch.isnan(value).any()) else 'Inf'}; running the micro-batch again did not "
        "show where it began",
        cause="not reproduced: it hangs on state that a replay does not put back (a counter, a cache, random numbers "
        "of your own), or on another micro-batch of the step",
        fix="torch.autograd.set_detect_anomaly(True) around that step names the operation",
    )


def _first_bad_node(loss: Tensor, is_bad: Callable[[Tensor], Tensor]) -> tuple[str | None, Any]:
    """(operation, its node) that made the first bad value: one that saved it as result, else the one that fed it."""
    nodes = sorted(nodes_of(loss.grad_fn), key=lambda n: n._sequence_nr())
    for node in nodes:
        bad = [
            s
            for s in saved_by(node)
            if s.tensor is not None and s.tensor.is_floating_point() and bool(is_bad(s.tensor).any())
        ]
        if not bad:
            continue
        if any(s.field in ("result", "output") for s in bad):
            return _plain_name(node), node
        made = [n for s in bad if s.tensor is not None and (n := _beneath_views(s.tensor.grad_fn)) is not None]
        if made:
            maker = min(made, key=lambda n: n._sequence_nr())
            return _plain_name(maker), maker
        return _FED, node
    return None, None


_FED = "fed"
"""Stands for an operation's name where the bad value came in with a tensor that no operation of the graph made."""
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Squeeze", "Unsqueeze", "Clone")


def _beneath_views(node: Any) -> Any:
    """The node that made the values which a node only shows in another shape."""
    while node is not None and node.name().split("Backward", 1)[0] in _VIEWS:
        node = node.next_functions[0][0]
    return None if node is None or hasattr(node, "variable") else node


def _binding_of_value(frame: FrameType, value: Tensor) -> SourceLine | None:
    """Where the user's frame bound the name that holds a tensor."""
    for name, held in names_in(frame).items():
        if held is value:
            return binding_of(frame.f_code.co_filename, name, frame.f_lineno)
    return None


def _plain_name(node: Any) -> str:
    """`softmax` of `SoftmaxBackward0`."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _neighbours(loss: Tensor, node: Any) -> set[str]:
    """Names of the operations just before and after a node."""
    near = {child for child, _ in node.next_functions if child is not None}
    near |= {grandchild for child in near for grandchild, _ in child.next_functions if grandchild is not None}
    near |= {parent for parent in nodes_of(loss.grad_fn) if any(child is node for child, _ in parent.next_functions)}
    return {_plain_name(n) for n in near if not hasattr(n, "variable")}


def _bad_weights_finding(weights: list[str]) -> Finding:
    return NONFINITE_GRAD.finding(
        f"the loss is not finite because weights are not: first `{weights[0]}` ({len(weights)} in all). They were not "
        "before this step: a gradient of an earlier one was Inf or NaN and was stepped into them, or they were made or "
        "loaded so",
        params=weights[:5],
        op="optimizer.step",
        cause="weights were not finite before the step",
        fix="go back to a checkpoint with finite weights; step only when `torch.isfinite(clip_grad_norm_(...))`, or "
        "train with a gate for it",
    )


def find_nonfinite_gradients(model: nn.Module) -> list[Finding]:
    """P206 from gradients as they are now: which parameters, in model order. A host sync a parameter."""
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
    if not bad:
        return []
    return [
        NONFINITE_GRAD.finding(
            f"Inf or NaN in the gradients of {len(bad)} parameters, first `{bad[0]}`",
            params=bad[:5],
            cause="backward gave Inf or NaN; which operation is not known without a replay",
            fix="an operation downstream of the last of these has an infinite derivative (sqrt, norm or log at zero, "
            "a division): add an epsilon",
        )
    ]


def _bad_weights(model: nn.Module) -> list[str]:
    return [
        name
        for name, p in model.named_parameters()
        if p.is_floating_point() and not bool(torch.isfinite(p.detach()).all())
    ]


def _loss_finding(record: Recorder, loss: Tensor) -> Finding:
    value = "NaN" if bool(torch.isnan(loss.detach()).any()) else "Inf"
    index = record.producer(loss)
    if index < 0:
        return NONFINITE_LOSS.finding(f"the loss is {value}; it was not computed in the replayed code")
    first, hint = _origin(record, record.ops[index])
    source = first.source
    module = first.module
    where = f" on line {source.line}: `{source.text}`" if source else ""
    inside = f" in module `{module}`" if module else ""
    fed = _inputs_were(record, first)
    return NONFINITE_LOSS.finding(
        f"the loss is {value}: the first result that was not finite came from {first.short_name}{inside}{where}; {fed}",
        source=source,
        module=module,
        op=first.short_name,
        cause=f"{first.short_name}{inside} gave {'NaN' if first.has_nan else 'Inf'}; {fed}{hint}",
        fix=_FROM_OUTSIDE if first.fed_bad else _remedy_for(first.short_name, masked=bool(hint)),
    )


_FROM_OUTSIDE = "look at the data (and at what was prepared before the forward): print(torch.isfinite(x).all()) for it"


def _origin(record: Recorder, op: Op) -> tuple[Op, str]:
    """Follow a non-finite value back to the operation whose inputs were fine. Masks are named, not blamed."""
    while True:
        bad = [record.ops[i.producer] for i in op.inputs if i.producer >= 0 and _is_bad(record.ops[i.producer])]
        if not bad:
            masks = [record.ops[i.producer] for i in op.inputs if i.producer >= 0 and record.ops[i.producer].has_inf]
            source = masks[0].source if masks else None
            return op, f"; its input holds infinities from line {source.line}: `{source.text}`" if source else ""
        op = min(bad, key=lambda o: o.index)


def _is_bad(producer: Op) -> bool:
    if producer.has_nan:
        return True
    if not producer.has_inf:
        return False
    # Infinities are to blame unless somebody put them there on purpose.
    return producer.short_name not in _DELIBERATE


def _inputs_were(record: Recorder, op: Op) -> str:
    held = [record.ops[i.producer] for i in op.inputs if i.producer >= 0]
    if op.fed_bad:
        return (
            f"its input held {op.fed_bad} that no operation of the step made: it came with the batch, or was computed "
            "before"
        )
    if any(o.has_nan for o in held):
        return "its input held NaN"
    if any(o.has_inf for o in held):
        return "its input held infinities"
    return "its input was finite"


def _remedy_for(name: str, *, masked: bool) -> str:
    if "softmax" in name and masked:
        return (
            "a row that is masked everywhere has no softmax: mask with `torch.finfo(scores.dtype).min` instead of "
            "-inf, or skip empty rows"
        )
    if name in ("log", "log2", "log10", "div", "reciprocal", "rsqrt", "sqrt", "pow", "div_", "acos", "asin", "atanh"):
        return f"keep the input of {name} away from its pole: clamp it, or add an epsilon inside"
    if name in ("exp", "mul", "matmul", "addmm", "mm", "bmm", "_to_copy", "pow", "sum"):
        return (
            "the values left the range of their dtype: use bf16 or fp32 there, scale down, or clip the input "
            "(log-space for exp)"
        )
    return f"look at the input of {name} on that line"


def _gradient_finding(record: Recorder, model: nn.Module, start: int) -> Finding | None:
    bad = [
        name for name, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())
    ]
    if not bad:
        return None
    first = next((op for op in record.ops[start:] if op.has_nan or op.has_inf), None)
    maker = None
    if first is not None and first.backward_of is not None:
        index = record.op_of_node.get(first.backward_of)
        maker = record.ops[index] if index is not None else None
    shown = maker or first
    source = shown.source if shown is not None else None
    where = f" on line {source.line}: `{source.text}`" if source else ""
    name = shown.short_name if shown is not None else None
    backward_of = f"the gradient of {name}{where}" if maker is not None else f"{name}{where}"
    return NONFINITE_GRAD.finding(
        f"the loss is finite but gradients are not: {len(bad)} of the parameters, first `{bad[0]}`; it began in "
        f"{backward_of}",
        params=bad[:5],
        source=source,
        module=maker.module if maker is not None else None,
        op=name,
        cause=f"{backward_of} gave {'NaN' if first is not None and first.has_nan else 'Inf'} out of finite inputs",
        fix=_gradient_remedy(name),
    )


def _gradient_remedy(name: str | None) -> str:
    if name in ("sqrt", "norm", "linalg_vector_norm", "pow", "div", "log", "acos", "asin", "atan2", "_cdist_forward"):
        return (
            f"the derivative of {name} is infinite there (a zero input): add an epsilon inside it; torch.where "
            "does not protect, because both branches are differentiated"
        )
    return (
        "the gradient left the range of its dtype, or a derivative has a pole there: lower the loss scale, use "
        "bf16, or keep the input away from it"
    )
