"""P206 and P211: the first operation, module and parameter where a step stopped being finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from safetrain.findings import Finding
from safetrain.recorder import Op, Recorder
from safetrain.replay import unchanged
from safetrain.rules.autopsy.catalogue import NONFINITE_GRAD, NONFINITE_LOSS

_DELIBERATE = frozenset("masked_fill masked_fill_ full full_like fill_ where scalar_tensor lift_fresh new_full index_put_ index_fill_ triu_ triu detach".split())
"""Operations that put an infinity where the user asked for one (attention masks)."""


def explain_nonfinite(model: nn.Module, replay: Callable[[], Tensor], *, scale: float = 1.0) -> Finding | None:
    """Run a micro-batch again, reading every result, and name where Inf or NaN began. None when it stays finite.

    Forward first (P211); when the loss is finite, backward with the loss multiplied by `scale` (P206). The model is put
    back as it was. Costs one step with a host sync an operation.
    """
    with unchanged(model), torch.enable_grad():
        record = Recorder(model, check_finite=True)
        with record:
            loss = replay()
        weights = _bad_weights(model)
        if not bool(torch.isfinite(loss.detach()).all()):
            return _loss_finding(record, loss, weights)
        if loss.grad_fn is None or loss.numel() != 1:
            return None
        start = len(record.ops)
        with record:
            (loss * scale).backward()
        return _gradient_finding(record, model, start)


def _bad_weights(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.is_floating_point() and not bool(torch.isfinite(p.detach()).all())]


def _loss_finding(record: Recorder, loss: Tensor, weights: list[str]) -> Finding:
    value = "NaN" if bool(torch.isnan(loss.detach()).any()) else "Inf"
    if weights:
        return NONFINITE_LOSS.finding(
            f"the loss is {value} because the weights are not finite: first `{weights[0]}` ({len(weights)} in all)",
            params=weights[:5],
            cause="an earlier step wrote Inf or NaN into the weights",
            fix="go back to a checkpoint with finite weights; keep non-finite gradients from the optimizer (check_finite, GradScaler)",
        )
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
        fix=_remedy(first, hint),
    )


def _origin(record: Recorder, op: Op) -> tuple[Op, str]:
    """Follow a non-finite value back to the operation whose inputs were fine. Inputs from masks are named, not blamed."""
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
    if any(o.has_nan for o in held):
        return "its input held NaN"
    if any(o.has_inf for o in held):
        return "its input held infinities"
    return "its input was finite"


def _remedy(op: Op, hint: str) -> str:
    name = op.short_name
    if "softmax" in name and hint:
        return "a row that is masked everywhere has no softmax: mask with `torch.finfo(scores.dtype).min` instead of -inf, or skip empty rows"
    if name in ("log", "log2", "log10", "div", "reciprocal", "rsqrt", "sqrt", "pow", "div_", "acos", "asin", "atanh"):
        return f"keep the input of {name} away from its pole: clamp it, or add an epsilon inside"
    if name in ("exp", "mul", "matmul", "addmm", "mm", "bmm", "_to_copy", "pow", "sum"):
        return "the values left the range of their dtype: use bf16 or fp32 there, scale down, or clip the input (log-space for exp)"
    return f"look at the input of {name} on that line"


def _gradient_finding(record: Recorder, model: nn.Module, start: int) -> Finding | None:
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
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
        f"the loss is finite but gradients are not: {len(bad)} of the parameters, first `{bad[0]}`; it began in {backward_of}",
        params=bad[:5],
        source=source,
        module=maker.module if maker is not None else None,
        op=name,
        cause=f"{backward_of} gave {'NaN' if first is not None and first.has_nan else 'Inf'} out of finite inputs",
        fix=_gradient_remedy(name),
    )


def _gradient_remedy(name: str | None) -> str:
    if name in ("sqrt", "norm", "linalg_vector_norm", "pow", "div", "log", "acos", "asin", "atan2", "_cdist_forward"):
        return f"the derivative of {name} is infinite there (a zero input): add an epsilon inside it; torch.where does not protect, because both branches are differentiated"
    return "the gradient left the range of its dtype, or a derivative has a pole there: lower the loss scale, use bf16, or keep the input away from it"
