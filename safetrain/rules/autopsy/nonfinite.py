"""P206 and P211: the first operation, module and parameter where a step stopped being finite."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from safetrain.findings import Finding
from safetrain.foreign.module_call import ModuleCall
from safetrain.recording.recorder import Op, Recorder
from safetrain.recording.replay import unchanged
from safetrain.rules.autopsy.catalogue import NONFINITE_GRAD, NONFINITE_LOSS
from safetrain.rules.autopsy.first_bad import is_bad

_DELIBERATE = frozenset(
    {
        "masked_fill", "masked_fill_", "full", "full_like", "fill_", "where", "scalar_tensor", "lift_fresh",
        "new_full", "index_put_", "index_fill_", "triu_", "triu", "detach",
    }
)  # fmt: skip
"""Operations that put an infinity where the user asked for one (attention masks)."""


def explain_nonfinite(
    model: nn.Module,
    replay: Callable[[], Tensor],
    *,
    scale: float = 1.0,
    of_call: ModuleCall | None = None,
    backward: bool = True,
) -> Finding | None:
    """Run a micro-batch again, reading every result, and name where Inf or NaN began. None when it stays finite.

    Forward first (P211); when the loss is finite, backward with the loss multiplied by `scale` (P206). The model is put
    back as it was. Costs one step with a host sync an operation. `of_call`: what is replayed is this one call of
    several, whose output may hold infinities on purpose (masked scores).
    """
    with unchanged(model), torch.enable_grad():
        record = Recorder(model, check_finite=True, replay=True)
        with record:
            loss = replay()
        weights = bad_weights(model)
        if is_bad(loss):
            if weights:
                return bad_weights_finding(weights)
            return (
                None if of_call is not None and _is_on_purpose(record, loss) else _loss_finding(record, loss, of_call)
            )
        if loss.grad_fn is None or not backward:
            return None
        start = len(record.ops)
        with record:
            torch.autograd.backward(loss.sum() * scale)
        return _gradient_finding(record, model, start, of_call)


def call_text(call: ModuleCall) -> str:
    """``the call of Critic on line 12: `score = critic(x)` ``."""
    line = call.line
    return f"the call of {type(call.module).__name__}" + (f" on line {line.line}: `{line.text}`" if line else "")


def explain_nonfinite_calls(model: nn.Module, calls: Sequence[ModuleCall], *, code: str) -> Finding | None:
    """Run each of a step's module calls again by itself, oldest first, until one shows P211 or P206, whichever `code`.

    A call whose arguments are gone, were written to since, or hold NaN or Inf, shows nothing of its own. For P206 its
    parameters must be among those whose gradients are not finite now. Nothing is run where processes train together:
    the others would not take part.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    known = set(_bad_gradients(model))
    deadline = time.perf_counter() + _REPLAYS_S
    for call in calls:
        replay = call.replay()
        if replay is None or any(is_bad(tensor) for tensor in call.floats()):
            continue
        finding = explain_nonfinite(model, replay, of_call=call, backward=code == NONFINITE_GRAD.code)
        is_it = finding is not None and finding.code == code and finding.source is not None
        if is_it and (code == NONFINITE_LOSS.code or known.issuperset(finding.params)):  # type: ignore[union-attr]
            return finding
        if time.perf_counter() > deadline:
            break
    return None


_REPLAYS_S = 20.0
"""Time for the replays of one step."""


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


def bad_weights_finding(weights: list[str]) -> Finding:
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
    bad = _bad_gradients(model)
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


def _bad_gradients(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.grad is not None and is_bad(p.grad)]


def bad_weights(model: nn.Module) -> list[str]:
    return [
        name
        for name, p in model.named_parameters()
        if p.is_floating_point() and not bool(torch.isfinite(p.detach()).all())
    ]


def _loss_finding(record: Recorder, loss: Tensor, of_call: ModuleCall | None = None) -> Finding:
    what = "the loss" if of_call is None else f"the loss is not finite, and the result of {call_text(of_call)}"
    value = "NaN" if bool(torch.isnan(loss.detach()).any()) else "Inf"
    index = record.producer(loss)
    if index < 0:
        return NONFINITE_LOSS.finding(f"{what} is {value}; it was not computed in the replayed code")
    first, hint = _origin(record, record.ops[index])
    source = first.source
    module = first.module
    where = f" on line {source.line}: `{source.text}`" if source else ""
    inside = f" in module `{module}`" if module else ""
    fed = _inputs_were(record, first)
    return NONFINITE_LOSS.finding(
        f"{what} is {value}: the first result that was not finite came from {first.short_name}{inside}{where}; {fed}",
        source=source,
        module=module,
        op=first.short_name,
        cause=f"{first.short_name}{inside} gave {'NaN' if first.has_nan else 'Inf'}; {fed}{hint}",
        fix=FROM_OUTSIDE if first.fed_bad else remedy_for(first.short_name, masked=bool(hint)),
    )


def _is_on_purpose(record: Recorder, output: Tensor) -> bool:
    """Whether infinities in a module's output were put there, or made from such, and may well be meant."""
    index = record.producer(output)
    if index < 0:
        return True
    origin, hint = _origin(record, record.ops[index])
    return not bool(torch.isnan(output.detach()).any()) and (origin.short_name in _DELIBERATE or bool(hint))


FROM_OUTSIDE = "look at the data (and at what was prepared before the forward): print(torch.isfinite(x).all()) for it"


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


def remedy_for(name: str, *, masked: bool) -> str:
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


def _gradient_finding(
    record: Recorder, model: nn.Module, start: int, of_call: ModuleCall | None = None
) -> Finding | None:
    bad = _bad_gradients(model)
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
        f"{backward_of}" + (f", in {call_text(of_call)}" if of_call is not None else ""),
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
