"""Family P: parameters that do not train as they should, and terms of a loss that cannot teach. Usable in a bare loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.coverage import Coverage, read_coverage
from safetrain.findings import Finding, SourceLine, rule
from safetrain.path_look import Cut, PathLook, Term, WhyNoGradient, written
from safetrain.reading import find_attribute_assignment, find_freeze_of_state_dict, user_files
from safetrain.source import with_text
from safetrain.syntax import no_grad_block

GRAD_NONE = rule("P201", "grad-none", "warning", "a trainable parameter got no gradient")
NOT_IN_OPTIMIZER = rule("P202", "not-in-optimizer", "warning", "a trainable parameter is in no optimizer")
FROZEN_IN_OPTIMIZER = rule("P203", "frozen-in-optimizer", "note", "the optimizer holds a parameter that cannot train")
STALE_IN_OPTIMIZER = rule("P204", "stale-in-optimizer", "warning", "the optimizer holds tensors that are not the model's")
DUPLICATE = rule("P205", "duplicate-param", "warning", "a parameter is in two groups or two optimizers")
ZERO_GRAD = rule("P207", "zero-grad", "warning", "a gradient is exactly zero for many steps")
NO_UPDATE = rule("P208", "no-update", "warning", "a parameter had a gradient and did not change")
STALE_GRAD = rule("P209", "stale-grad", "warning", "gradients of an earlier step were added to this one's")
GRADIENT_SCALE = rule("P210", "gradient-scale", "note", "exploding or vanishing gradients, by layer")
FREEZE_INEFFECTIVE = rule("P212", "freeze-ineffective", "warning", "a freeze had no effect and the parameters still train")
DROPPED_GRAD = rule("P213", "dropped-grad", "warning", "gradients were cleared before any step had used them")
CONSTANT_TERM = rule("G109", "constant-term", "note", "a term of the loss came from parameters but carries no graph")

# ---------------------------------------------------------------------- P201


_CUT_ADVICE: dict[str, tuple[str, str]] = {
    "reentrant": (
        "it runs inside a reentrant checkpoint whose inputs need no gradient, so nothing inside it gets one",
        "checkpoint(..., use_reentrant=False)",
    ),
    "no_grad": ("`{op}` ran while gradients were switched off", "move it out of the no_grad block"),
    "rebuilt": ("`{op}` makes a new tensor, which starts without a graph", "use the tensor itself, or torch.stack(...) for a list"),
    "detached": ("`{op}` cuts the graph", "remove `{op}` from the path to the loss"),
    "number": ("`{op}` turns the tensor into a plain number, which carries no graph", "keep the tensor: drop `{op}` and use torch.stack(...)"),
    "grad": ("`torch.autograd.grad` was called without create_graph", "torch.autograd.grad(..., create_graph=True)"),
    "no_derivative": ("`{op}` has no derivative", "use a differentiable form (softmax for argmax, a margin for a comparison)"),
    "branch": ("it only decides a branch", "make the loss depend on it"),
}


def find_missing_grads(
    model: nn.Module,
    optimizers: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    look: PathLook | None = None,
) -> list[Finding]:
    """P201 for every trainable parameter whose `.grad` is None now, after a backward. Frozen ones never count.

    With `optimizers`, only parameters that one of them holds. With a `look` that watched the step, each finding carries
    a proved cause and its line. No host sync.
    """
    names = _missing(model, optimizers)
    if look is None or not look.saw_a_loss:
        return explain_missing({name: None for name in names}, model)
    return explain_missing({name: look.why(name) for name in names if name in look.names}, model)


def _missing(model: nn.Module, optimizers: Optimizer | Mapping[str, Optimizer] | None) -> list[str]:
    held = None if optimizers is None else {id(p) for _, p in _entries(optimizers)}
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is None and (held is None or id(p) in held)
    ]


def explain_missing(verdicts: Mapping[str, WhyNoGradient | None], model: nn.Module) -> list[Finding]:
    """P201 findings for parameters without gradient, one for each cause: cuts by their line, unused ones by module."""
    by_cut: dict[int, tuple[Cut, list[str]]] = {}
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, verdict in verdicts.items():
        if verdict is not None and verdict.cut is not None:
            by_cut.setdefault(id(verdict.cut), (verdict.cut, []))[1].append(name)
        else:
            by_kind["unknown" if verdict is None else verdict.kind].append(name)
    findings = [_cut_finding(cut, names) for cut, names in by_cut.values()]
    for kind, names in by_kind.items():
        for module, inside in _by_module(model, names).items():
            findings.append(_unused_finding(kind, module, inside, verdicts))
    return findings


def _cut_finding(cut: Cut, names: list[str]) -> Finding:
    why, fix = (text.format(op=cut.op) for text in _CUT_ADVICE[cut.kind])
    switch = cut.region or no_grad_block(cut.places)
    line = switch or cut.source
    source = with_text(line) if line else None
    at = written(cut.source)
    region = f" (switched off at {written(switch)})" if switch else ""
    if cut.kind == "reentrant":
        from safetrain.rules.loop import reentrant_finding  # the fault has a code of its own

        return reentrant_finding(names, source)
    return GRAD_NONE.finding(
        f"{_listed(names)} got no gradient: the path to the loss is cut at {at}, where {why}{region}. "
        "The optimizer steps without ever changing it.",
        source=source,
        params=names,
        module=_common_module(names),
        op=cut.op,
        cause=f"path cut by `{cut.op}` at {at}: {why}{region}",
        fix=fix,
    )


def _unused_finding(kind: str, module: str, names: list[str], verdicts: Mapping[str, WhyNoGradient | None]) -> Finding:
    what = f"`{module}` ({_listed(names)})" if module else _listed(names)
    op: str | None = None
    source: SourceLine | None = None
    if kind == "never_used":
        cause = "module never called: no operation of the step read these parameters"
        fix = f"call it in forward, or freeze it: {module or 'the module'}.requires_grad_(False)"
    elif kind == "result_unused":
        verdict = next((v for n in names if (v := verdicts[n]) is not None and v.tip is not None), None)
        cause = "its result is not used by any loss"
        if verdict is not None and verdict.tip is not None:
            op, line = verdict.tip
            source = with_text(line) if line else None
            cause += f"; the last thing made from it is `{op}` at {written(line)}"
        fix = "use the result in the loss, or freeze the module"
    elif kind == "backward_gave_none":
        cause = "the loss reaches it, but a backward on the way returned None instead of a gradient"
        fix = "return a gradient for that input from the Function's backward"
    else:
        cause = "it is not reachable from the loss"
        fix = "use it in the loss, or freeze it with requires_grad_(False)"
    return GRAD_NONE.finding(
        f"{what} got no gradient: {cause}. It stays as it was initialised.",
        source=source, params=names, module=module or None, op=op, cause=cause, fix=fix,
    )  # fmt: skip


# ---------------------------------------------------------------------- G109


def find_constant_terms(terms: Iterable[Term]) -> list[Finding]:
    """G109 for scalars that were added to a differentiated loss though their graph had been cut before.

    A warning where the cut cannot be meant (argmax, a comparison, `autograd.grad` without `create_graph`, `.item()`),
    a note where it may be (`detach`, no_grad).
    """
    findings = []
    for cut in {id(t.cut): t.cut for t in terms}.values():
        why, fix = (text.format(op=cut.op) for text in _CUT_ADVICE[cut.kind])
        source = with_text(cut.source) if cut.source else None
        added = next((t.source for t in terms if t.cut is cut), None)
        findings.append(
            CONSTANT_TERM.finding(
                f"a term of the loss teaches nothing: it comes from parameters, but its graph ends at {written(cut.source)}, "
                f"where {why}. It is added to the loss at {written(added)} and changes the printed value only.",
                severity="warning" if cut.kind in ("no_derivative", "grad", "number", "rebuilt") else "note",
                source=source,
                op=cut.op,
                cause=f"`{cut.op}` at {written(cut.source)}: {why}",
                fix=fix,
            )
        )
    return findings


def may_have_constant_term(loss: Tensor) -> bool:
    """Whether the sums at the top of a loss have an addend without graph (a number, or a tensor whose graph was cut)."""
    stack, seen = [loss.grad_fn], 0
    while stack and seen < 32:
        node = stack.pop()
        seen += 1
        name = node.name() if node is not None else ""
        following = [n for n, _ in node.next_functions] if node is not None else []
        if name.startswith(("AddBackward", "SubBackward", "RsubBackward", "StackBackward", "CatBackward")):
            if None in following:
                return True
            stack.extend(following)
        elif name.startswith(("MulBackward", "DivBackward", "NegBackward", "MeanBackward", "SumBackward", "ToCopyBackward")):
            stack.extend(n for n in following[:1] if n is not None)
    return False


# ---------------------------------------------------------------------- P202 – P205


@dataclass(slots=True)
class GradientEvidence:
    """What was seen of parameters over some steps, by id: which ever had a gradient, which were made or thawed late."""

    had: set[int] = field(default_factory=set)
    made_late: set[int] = field(default_factory=set)
    thawed_late: set[int] = field(default_factory=set)


def find_optimizer_mismatches(model: nn.Module, optimizers: Optimizer | Mapping[str, Optimizer]) -> list[Finding]:
    """P202 to P205 as things stand, best asked after a backward: only parameters that hold a gradient count for P202.

    Before the first backward, P202 and P204 are judged by `requires_grad` alone. No host sync.
    """
    coverage = read_coverage(model, _as_mapping(optimizers))
    with_grad = {id(p) for p in model.parameters() if p.grad is not None}
    evidence = GradientEvidence(with_grad or {id(h.tensor) for h in coverage.uncovered})
    return [
        *judge_coverage(coverage, evidence, model),
        *judge_frozen(coverage),
        *judge_duplicates(coverage),
    ]


def judge_coverage(
    coverage: Coverage, evidence: GradientEvidence, model: nn.Module, lines: Mapping[str, SourceLine | None] | None = None
) -> list[Finding]:
    """P204 and P202: trainable parameters with gradients that no optimizer holds, and optimizer entries of no model.

    `lines` are the lines that made the optimizers, by name. Silent when no optimizer holds any of the model and none
    holds a forgotten `nn.Parameter`: then inputs are being optimised, not the model.
    """
    lost = [h for h in coverage.uncovered if id(h.tensor) in evidence.had]
    if not lost:
        return []
    stale = [h for h in coverage.strays if isinstance(h.tensor, nn.Parameter) and h.tensor.grad is None and id(h.tensor) not in evidence.had]
    if not coverage.any_trained and not stale:
        return []
    findings: list[Finding] = []
    line = next(iter((lines or {}).values()), None)
    if stale:
        paired = _pair_by_shape(lost, [h.tensor for h in stale if h.tensor is not None])
        names = [h.name for h in (paired or lost)]
        findings.append(
            STALE_IN_OPTIMIZER.finding(
                f"the optimizer holds {len(stale)} parameters that are not the model's (such as {stale[0].name}), while "
                f"{_listed(names)} of the model are in no optimizer. The model was rebuilt, converted or partly replaced "
                "after `optimizer = ...(model.parameters())`, so its weights never change.",
                source=with_text(line) if line else None,
                params=names,
                module=_common_module(names),
                cause="the optimizer was built before the model's parameters were replaced",
                fix="build the optimizer last: optimizer = ...(model.parameters())",
            )
        )
        if len(paired) == len(lost):
            return findings
        lost = [h for h in lost if h not in paired]
    for module, names in _by_module(model, [h.name for h in lost]).items():
        findings.append(_not_held(model, module, names, lost and {h.name: id(h.tensor) for h in lost}, evidence, line))
    return findings


def _not_held(
    model: nn.Module, module: str, names: list[str], ids: Mapping[str, int], evidence: GradientEvidence, line: SourceLine | None
) -> Finding:
    keys = {ids[n] for n in names}
    if keys & evidence.thawed_late:
        cause = "it was frozen when the optimizer was built and unfrozen later"
        fix = f"optimizer.add_param_group({{'params': model.{module}.parameters()}})" if module else "add it to the optimizer"
    elif keys & evidence.made_late:
        cause = "it was created after the optimizer was built"
        fix = "create it in __init__ (or run one forward first), then build the optimizer"
    else:
        cause = "it was not given to any optimizer"
        fix = "give it to the optimizer, or freeze it with requires_grad_(False)"
    quiet = not _module_at(model, module).training and model.training
    what = f"`{module}` ({_listed(names)})" if module else _listed(names)
    return NOT_IN_OPTIMIZER.finding(
        f"{what} gets gradients but is in no optimizer: {cause}. It never changes.",
        severity="note" if quiet else "warning",
        source=with_text(line) if line else None,
        params=names,
        module=module or None,
        cause=cause,
        fix=fix,
    )


def find_unregistered(
    model: nn.Module, met: Iterable[nn.Parameter], held: set[int], name_of: Callable[[nn.Parameter], str | None] | None = None
) -> list[Finding]:
    """P202 for parameters met in the loss's graph that are neither the model's nor any optimizer's.

    `met` must hold those that were met as the same objects in two steps: fast weights and inputs are not. They are
    looked for in the plain lists, dicts and objects among the model's attributes; those not found there are not the
    model's business (a fixed network inside a criterion) and stay unreported.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    lost = [p for p in met if id(p) not in names and id(p) not in held]
    if not lost:
        return []
    found = hidden_parameters(model)
    by_place: dict[str, list[str]] = defaultdict(list)
    for p in lost:
        label = found.get(id(p)) or (name_of(p) if name_of else None)
        if label is not None:
            by_place[label.split("[", 1)[0]].append(label)
    return [
        NOT_IN_OPTIMIZER.finding(
            f"`{place}` holds {len(labels)} parameters that the model does not know ({_listed(labels)}): they are used by the "
            "loss, but model.parameters() misses them, so they are not trained, moved or saved.",
            params=labels,
            module=place,
            holder=place,
            cause="not registered: modules in a plain list, dict or object are invisible to the model",
            fix="use nn.ModuleList, nn.ModuleDict or nn.ParameterList",
        )
        for place, labels in by_place.items()
    ]


def hidden_parameters(model: nn.Module) -> dict[int, str]:
    """Parameters inside plain lists, tuples, dicts and objects of a model's attributes, by id, with a readable path."""
    found: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") or key in ("_layers", "_blocks"):
                _collect_hidden(f"{prefix}.{key}" if prefix else key, value, found, depth=3)
    return found


def _collect_hidden(path: str, value: object, found: dict[int, str], depth: int) -> None:
    kind = type(value)
    if issubclass(kind, nn.Parameter):
        found.setdefault(id(value), path)
    elif issubclass(kind, nn.Module):
        for name, p in value.named_parameters():  # type: ignore[attr-defined]
            found.setdefault(id(p), f"{path}.{name}")
    elif depth and kind in (list, tuple):
        for i, item in enumerate(value[:256]):  # type: ignore[index]
            _collect_hidden(f"{path}[{i}]", item, found, depth - 1)
    elif depth and kind is dict:
        for k, item in list(value.items())[:256]:  # type: ignore[attr-defined]
            _collect_hidden(f"{path}[{k!r}]", item, found, depth - 1)
    elif depth and hasattr(value, "__dict__") and kind.__module__.split(".")[0] not in ("torch", "builtins", "numpy"):
        for k, item in list(vars(value).items())[:64]:
            _collect_hidden(f"{path}.{k}", item, found, 0 if not issubclass(type(item), nn.Module) else 1)


def graph_parameters(loss: Tensor, limit: int = 200_000) -> list[nn.Parameter]:
    """The `nn.Parameter`s that a backward of `loss` would reach. About 0.85 microseconds a node; no host sync."""
    found: list[nn.Parameter] = []
    seen: set[object] = set()
    stack = [loss.grad_fn] if loss.grad_fn is not None else []
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if type(variable) is nn.Parameter:
            found.append(variable)
        stack.extend(n for n, _ in node.next_functions if n is not None and n not in seen)
    return found


def judge_frozen(coverage: Coverage, moved: Sequence[str] = ()) -> list[Finding]:
    """P203: frozen parameters that an optimizer holds. A note; a warning for those in `moved`, which it still changes."""
    if moved:
        return [
            FROZEN_IN_OPTIMIZER.finding(
                f"{_listed(moved)} is frozen, but the optimizer still changes it: an old gradient was left in `.grad`, and "
                "momentum or weight decay act on it at every step.",
                severity="warning",
                params=list(moved),
                module=_common_module(moved),
                cause="frozen after a backward had filled `.grad`",
                fix="p.grad = None when freezing (or optimizer.zero_grad(set_to_none=True)), and leave it out of the optimizer",
            )
        ]
    names = [h.name for h in coverage.frozen_held]
    if not names:
        return []
    return [
        FROZEN_IN_OPTIMIZER.finding(
            f"the optimizer holds {len(names)} frozen parameters ({_listed(names)}). They do not train; the optimizer skips them.",
            params=names,
            module=_common_module(names),
            cause="requires_grad is False",
            fix="optimizer = ...(p for p in model.parameters() if p.requires_grad)",
        )
    ]


def judge_duplicates(coverage: Coverage) -> list[Finding]:
    """P205: a parameter twice in one optimizer (a warning), or in several (a note until it is proved to be stepped twice)."""
    findings = [
        DUPLICATE.finding(
            f"{_listed([h.name])} is twice in optimizer `{opt}`: it is stepped twice for each gradient.",
            params=[h.name],
            cause="listed twice, as happens with tied weights or overlapping parameter lists",
            fix="list(dict.fromkeys(params)) keeps each parameter once",
        )
        for h, opt in coverage.repeated
    ]
    by_owners: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for h, opts in coverage.shared:
        by_owners[opts].append(h.name)
    findings += [shared_finding(names, opts, proved=False) for opts, names in by_owners.items()]
    return findings


def shared_finding(names: Sequence[str], optimizers: Sequence[str], *, proved: bool) -> Finding:
    """P205 for parameters that several optimizers hold; `proved` when they stepped on one and the same gradient."""
    both = " and ".join(f"`{o}`" for o in optimizers)
    harm = "both step on the same gradient, so it moves twice" if proved else "that is right only if each steps on its own loss"
    return DUPLICATE.finding(
        f"{_listed(names)} is in {both}: {harm}.",
        severity="warning" if proved else "note",
        params=list(names),
        module=_common_module(names),
        op="step" if proved else None,
        cause=f"held by {both}",
        fix="give each parameter to one optimizer",
    )


# ---------------------------------------------------------------------- P207, P208, P210

_FLAT_NODES = ("SignBackward", "SgnBackward", "RoundBackward", "FloorBackward", "CeilBackward", "TruncBackward")
_FLAT_NAMES = {"sign": "sign", "sgn": "sgn", "round": "round", "floor": "floor", "ceil": "ceil", "trunc": "trunc"}


@dataclass(slots=True)
class ZeroCause:
    """Why a gradient is exactly zero: an operation, and whether that proves a mistake."""

    op: str
    text: str
    proved: bool


def zero_gradient_causes(loss: Tensor, params: Mapping[str, Tensor], limit: int = 200_000) -> dict[str, ZeroCause]:
    """For parameters whose gradient is zero: the operation on every path from the loss that makes it so.

    Reads saved tensors of activations (a host sync each): only on suspicion.
    """
    dead: dict[object, ZeroCause] = {}
    reached: set[int] = set()
    seen: set[object] = set()
    stack = [loss.grad_fn] if loss.grad_fn is not None else []
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        cause = _stops_gradient(node)
        if cause is not None:
            dead[node] = cause
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        stack.extend(n for n, _ in node.next_functions if n is not None and n not in seen)
    causes: dict[str, ZeroCause] = {}
    for node, cause in dead.items():
        below = _leaves_below(node, limit)
        for name, p in params.items():
            if id(p) in below and id(p) not in reached:
                causes.setdefault(name, cause)
    return causes


def _leaves_below(root: object, limit: int) -> set[int]:
    seen: set[object] = set()
    leaves: set[int] = set()
    stack = [root]
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        stack.extend(n for n, _ in node.next_functions if n is not None)  # type: ignore[attr-defined]
    return leaves


def _stops_gradient(node: object) -> ZeroCause | None:
    name: str = node.name()  # type: ignore[attr-defined]
    if name.startswith(_FLAT_NODES):
        op = name.split("Backward", 1)[0].lower()
        return ZeroCause(op, f"`{op}` is flat: its derivative is zero everywhere", True)
    try:
        if name.startswith(("ReluBackward", "ThresholdBackward")):
            result = getattr(node, "_saved_result", None)
            if result is not None and not bool((result > 0).any()):
                return ZeroCause("relu", "every unit of a `relu` is off for the whole batch (dead)", True)
        elif name.startswith(("SoftmaxBackward", "LogSoftmaxBackward")):
            result = node._saved_result  # type: ignore[attr-defined]
            dim = node._saved_dim  # type: ignore[attr-defined]
            dim = dim - 2**64 if dim > 2**63 else dim
            if result.dim() and result.shape[dim] == 1:
                return ZeroCause("softmax", "`softmax` runs over a dimension of size 1, so it is always 1", True)
        elif name.startswith("MulBackward"):
            other = getattr(node, "_saved_other", None)
            if isinstance(other, Tensor) and not bool(other.any()):
                return ZeroCause("mul", "it is multiplied by zero", False)
        elif name.startswith("ClampBackward"):
            if _all_clamped(node):
                return ZeroCause("clamp", "`clamp` cuts off every value, so its derivative is zero", True)
    except (RuntimeError, AttributeError, IndexError):
        return None  # freed, packed by a hook, or of another version of torch: nothing is proved
    return None


def _all_clamped(node: object) -> bool:
    value = node._saved_self  # type: ignore[attr-defined]
    low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
    inside = torch.ones_like(value, dtype=torch.bool)
    if low is not None:
        inside &= value >= low
    if high is not None:
        inside &= value <= high
    return not bool(inside.any())


def find_zero_grads(
    zeros: Sequence[str],
    causes: Mapping[str, ZeroCause],
    lines: Mapping[str, SourceLine | None],
    *,
    steps: int,
    weights: Sequence[str],
) -> list[Finding]:
    """P207 for parameters whose gradient was exactly zero in every look at `steps` steps.

    A warning where an operation proves it; without a cause a note, and for `weights` (two or more dimensions) only: a
    zero gradient of a bias can be mathematics (a critic's last bias under a gradient penalty, a bias before a norm).
    `lines` are lines of flat operations by name.
    """
    by_cause: dict[str, tuple[ZeroCause, list[str]]] = {}
    rest: list[str] = []
    for name in zeros:
        cause = causes.get(name)
        if cause is not None:
            by_cause.setdefault(cause.text, (cause, []))[1].append(name)
        elif name in weights:
            rest.append(name)
    findings = []
    for cause, names in by_cause.values():
        line = next((src for op, src in lines.items() if op.strip("_") == cause.op and src), None)
        where = f" at {written(line)}" if line else ""
        findings.append(
            ZERO_GRAD.finding(
                f"the gradient of {_listed(names)} is exactly zero, seen over {steps} steps: {cause.text}{where}. It does not learn.",
                severity="warning" if cause.proved else "note",
                source=with_text(line) if line else None,
                params=names,
                module=_common_module(names),
                op=cause.op,
                cause=cause.text + where,
                fix=_ZERO_FIX.get(cause.op, "let the loss depend on it"),
            )
        )
    if rest:
        findings.append(
            ZERO_GRAD.finding(
                f"the gradient of {_listed(rest)} is exactly zero, seen over {steps} steps. It does not learn.",
                severity="note",
                params=rest,
                module=_common_module(rest),
                cause="no operation was found that explains it",
                fix="check masks, loss weights of zero and dead activations on the way to it",
            )
        )
    return findings


_STRAIGHT = "use a straight-through estimator: y = x + (x.{op}() - x).detach()"
_ZERO_FIX = {op: _STRAIGHT.format(op=op) for op in _FLAT_NAMES} | {
    "relu": "a smaller learning rate, another initialisation, or leaky_relu",
    "softmax": "softmax over the class dimension (dim=-1), or sigmoid for one output",
    "clamp": "check the limits; a squashing function keeps a gradient",
}


def find_no_updates(names: Sequence[str], *, steps: int, rates: Mapping[str, float], dtype: str, all_groups: bool) -> list[Finding]:
    """P208 for parameters that had a gradient and were bit for bit the same after the step, in all looks at `steps` steps.

    `rates`: learning rate of each name. A warning when every group's rate is zero, or when the update is below the
    resolution of a 16-bit parameter; a note for a single group at zero, which may be meant.
    """
    zero = [n for n in names if rates.get(n) == 0.0]
    small = [n for n in names if rates.get(n, 1.0) != 0.0]
    findings = []
    if zero:
        findings.append(
            NO_UPDATE.finding(
                f"{_listed(zero)} gets gradients but does not change: its learning rate is 0 (seen over {steps} steps).",
                severity="warning" if all_groups else "note",
                params=zero,
                module=_common_module(zero),
                cause="learning rate 0",
                fix="check the schedule: what it multiplies the rate by, and how long it lasts",
            )
        )
    if small:
        half = dtype in ("bfloat16", "float16")
        findings.append(
            NO_UPDATE.finding(
                f"{_listed(small)} gets gradients but does not change (seen over {steps} steps): the update is smaller than the "
                f"spacing of {dtype} numbers around the weights, so adding it changes nothing.",
                severity="warning" if half else "note",
                params=small,
                module=_common_module(small),
                cause=f"update below the resolution of {dtype}",
                fix="keep the weights in float32 and use autocast for the 16-bit part" if half else "check learning rate and weight scale",
            )
        )
    return findings


def find_gradient_scale(history: Sequence[Mapping[str, float]], *, eps: float | None = None) -> list[Finding]:
    """P210 from the largest absolute gradient of each parameter in a few looks, oldest first.

    Vanishing: a parameter a million times below the median of all, four looks in a row (a warning when also below the
    optimizer's `eps`, where Adam no longer evens it out). Exploding: ten thousand times its earlier median and above a
    million, in two looks.
    """
    findings: list[Finding] = []
    if len(history) >= 4:
        tiny = set.intersection(*(_tiny(look) for look in history[-4:]))
        if tiny:
            names = sorted(tiny)
            below = eps is not None and all(look[n] < eps for look in history[-4:] for n in names)
            findings.append(
                GRADIENT_SCALE.finding(
                    f"gradients vanish: those of {_listed(names)} are below a millionth of the median over all parameters.",
                    severity="warning" if below else "note",
                    params=names,
                    module=_common_module(names),
                    cause="gradients shrink from layer to layer" + (f", below the optimizer's eps of {eps:g}" if below else ""),
                    fix="normalise between layers, add skip connections, or use another activation or initialisation",
                )
            )
    if len(history) >= 5:
        names = [n for n in history[-1] if _exploded(n, history)]
        if names:
            findings.append(
                GRADIENT_SCALE.finding(
                    f"gradients explode: {_listed(names)} reached {max(history[-1][n] for n in names):.3g}.",
                    severity="warning",
                    params=names,
                    module=_common_module(names),
                    cause="gradients grew ten thousand times above what they were",
                    fix="clip by norm, lower the learning rate, or warm up",
                )
            )
    return findings


def _tiny(look: Mapping[str, float]) -> set[str]:
    values = sorted(v for v in look.values() if v > 0)
    if len(values) < 4:
        return set()
    median = values[len(values) // 2]
    return {n for n, v in look.items() if 0 < v < 1e-6 * median}


def _exploded(name: str, history: Sequence[Mapping[str, float]]) -> bool:
    earlier = sorted(look[name] for look in history[:-2] if name in look)
    if not earlier or any(name not in look for look in history[-2:]):
        return False
    floor = max(1e4 * earlier[len(earlier) // 2], 1e6)
    return all(floor < look[name] < float("inf") for look in history[-2:])


# ---------------------------------------------------------------------- P209, P212


def stale_finding(optimizer: str, names: Sequence[str], source: SourceLine | None = None) -> Finding:
    """P209: gradients were never cleared between two steps of an optimizer."""
    return STALE_GRAD.finding(
        f"optimizer `{optimizer}` steps on gradients that still contain those of earlier steps (seen on {_listed(names)}): "
        "nothing cleared them in between, so each step repeats all steps before it.",
        source=with_text(source) if source else None,
        params=list(names),
        cause="no zero_grad between two steps",
        fix="optimizer.zero_grad() before the backward of each step",
    )


_FREEZE_WORDS = {
    "requires_grad": "is no switch of a module: it only sets an attribute that nobody reads",
    "require_grad": "is misspelt (requires_grad)",
    "requires_grads": "is misspelt (requires_grad)",
    "required_grad": "is misspelt (requires_grad)",
    "requires_gradient": "is misspelt (requires_grad)",
    "requires_grad_": "replaces the method instead of calling it",
    "trainable": "is no attribute that torch reads",
}


def find_ineffective_freezes(
    model: nn.Module, *, had_gradient: set[int] | None = None, lines: bool = True
) -> list[Finding]:
    """P212: `module.requires_grad = False` and its like, where the parameters still train.

    `had_gradient`: ids of parameters that got one; without it `requires_grad` alone decides. `lines`: look for the
    statement in the user's source. A class of the user's own
    that sets such an attribute in its own code and freezes accordingly is not reported, as then nothing trains.
    """
    findings: list[Finding] = []
    for name, module in model.named_modules():
        for word in _FREEZE_WORDS.keys() & vars(module).keys():
            if vars(module)[word] is not False or _own_setting(module, word):
                continue
            prefix = f"{name}." if name else ""
            params = {prefix + n: p for n, p in module.named_parameters()}
            findings += _still_trains(name or type(module).__name__, name, word, params, had_gradient, lines)
    for name, p in model.named_parameters():
        for word in (_FREEZE_WORDS.keys() - {"requires_grad"}) & vars(p).keys():
            if vars(p)[word] is False:
                findings += _still_trains(name, "", word, {name: p}, had_gradient, lines)
    return findings


def _still_trains(
    label: str, module: str, word: str, params: Mapping[str, Tensor], had_gradient: set[int] | None, lines: bool
) -> list[Finding]:
    live = [n for n, p in params.items() if p.requires_grad and (had_gradient is None or id(p) in had_gradient)]
    if not live:
        return []
    source = None
    if lines:
        source = find_attribute_assignment(word, label.rsplit(".", 1)[-1]) or find_attribute_assignment(word)
    what = f"{label}.{word} = False"
    return [
        FREEZE_INEFFECTIVE.finding(
            f"`{what}` froze nothing: `{word}` {_FREEZE_WORDS[word]}, and {_listed(live)} still trains.",
            source=source,
            params=live,
            module=module or None,
            cause=f"`{word}` {_FREEZE_WORDS[word]}",
            fix=f"{label}.requires_grad_(False)" if module else "p.requires_grad_(False)",
        )
    ]


def _own_setting(module: nn.Module, word: str) -> bool:
    """The module's own class (not torch's) sets the attribute in its `__init__`: it means something there."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch."):
            break
        init = vars(kind).get("__init__")
        code = getattr(init, "__code__", None)
        if code is not None and word in code.co_names:
            return True
    return False


def find_state_dict_freeze(model: nn.Module, *, had_gradient: set[int], files: list[str] | None = None) -> list[Finding]:
    """P212 for `for v in model.state_dict().values(): v.requires_grad = False`, read from the user's source.

    `state_dict` hands out detached tensors, so this can never freeze anything. Judged only when every trainable
    parameter of the model still gets gradients.
    """
    live = [n for n, p in model.named_parameters() if p.requires_grad]
    if not live or any(id(p) not in had_gradient for p in model.parameters() if p.requires_grad):
        return []
    if any(not p.requires_grad for p in model.parameters()):
        return []
    source = find_freeze_of_state_dict(files=files if files is not None else user_files(model))
    if source is None:
        return []
    return [
        FREEZE_INEFFECTIVE.finding(
            f"{written(source)} froze nothing: state_dict() hands out detached copies of the parameters, and "
            f"{_listed(live)} still trains.",
            source=source,
            params=live,
            cause="requires_grad was set on what state_dict() returned, not on the parameters",
            fix="for p in model.parameters(): p.requires_grad_(False)",
        )
    ]


# ---------------------------------------------------------------------- shared


def _as_mapping(optimizers: Optimizer | Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
    return optimizers if isinstance(optimizers, Mapping) else {"optimizer": optimizers}


def _entries(optimizers: Optimizer | Mapping[str, Optimizer]) -> Iterable[tuple[str, Tensor]]:
    for name, opt in _as_mapping(optimizers).items():
        for group in opt.param_groups:
            for p in group["params"]:
                yield name, p


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _common_module(names: Sequence[str]) -> str | None:
    """The innermost module that holds all of these parameters, None at the top."""
    parts = [n.split(".")[:-1] for n in names]
    common = parts[0] if parts else []
    for other in parts[1:]:
        same = 0
        while same < min(len(common), len(other)) and common[same] == other[same]:
            same += 1
        common = common[:same]
    return ".".join(common) or None


def _by_module(model: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """Names grouped by the outermost module all of whose trainable parameters are among them ("" for the model)."""
    wanted, groups, done = set(names), dict[str, list[str]](), set[str]()
    for prefix, module in model.named_modules():
        inside = [f"{prefix}.{n}" if prefix else n for n, p in module.named_parameters() if p.requires_grad]
        if inside and prefix and all(n in wanted for n in inside) and not any(n in done for n in inside):
            groups[prefix] = inside
            done.update(inside)
    rest = [n for n in names if n not in done]
    for n in rest:
        groups.setdefault(n.rpartition(".")[0], []).append(n)
    return groups


def _module_at(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return model


def _pair_by_shape(lost: list[object], stale: Sequence[Tensor]) -> list[object]:  # type: ignore[type-arg]
    """Those of `lost` that have a counterpart of the same shape among `stale`."""
    shapes = [tuple(t.shape) for t in stale]
    paired = []
    for h in lost:
        shape = tuple(h.tensor.shape)  # type: ignore[attr-defined]
        if shape in shapes:
            shapes.remove(shape)
            paired.append(h)
    return paired
