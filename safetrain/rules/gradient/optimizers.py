"""P202 to P205: which parameters the optimizers hold, and which they should."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType

from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.findings import Finding, SourceLine
from safetrain.guarding.coverage import Coverage, Held, read_coverage
from safetrain.rules.gradient.catalogue import (
    DUPLICATE,
    FROZEN_IN_OPTIMIZER,
    NOT_IN_OPTIMIZER,
    STALE_IN_OPTIMIZER,
    as_mapping,
    by_module,
    common_module,
    listed,
    module_at,
)
from safetrain.source import frame_locals, with_text
from safetrain.source.called import is_users_class


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
    coverage = read_coverage(model, as_mapping(optimizers))
    with_grad = {id(p) for p in model.parameters() if p.grad is not None}
    evidence = GradientEvidence(with_grad or {id(h.tensor) for h in coverage.uncovered})
    return [
        *judge_coverage(coverage, evidence, model),
        *judge_frozen(coverage),
        *judge_duplicates(coverage),
    ]


def judge_coverage(
    coverage: Coverage,
    evidence: GradientEvidence,
    model: nn.Module,
    lines: Mapping[str, SourceLine | None] | None = None,
) -> list[Finding]:
    """P204 and P202: trainable parameters with gradients that no optimizer holds, and optimizer entries of no model.

    `lines` are the lines that made the optimizers, by name. Silent when no optimizer holds any of the model and none
    holds a forgotten `nn.Parameter`: then inputs are being optimised, not the model.
    """
    lost = [h for h in coverage.uncovered if id(h.tensor) in evidence.had]
    if not lost:
        return []
    stale = [
        h
        for h in coverage.strays
        if isinstance(h.tensor, nn.Parameter) and h.tensor.grad is None and id(h.tensor) not in evidence.had
    ]
    if not coverage.any_trained and not stale:
        return []
    findings: list[Finding] = []
    line = next(iter((lines or {}).values()), None)
    if stale:
        paired = _pairs(lost, [h.tensor for h in stale if h.tensor is not None])
        names = [h.name for h in (paired or lost)]
        findings.append(
            STALE_IN_OPTIMIZER.finding(
                f"the optimizer holds {len(stale)} parameters that are not the model's (such as {stale[0].name}), "
                "while "
                f"{listed(names)} of the model are in no optimizer. The model was rebuilt, converted or partly "
                "replaced "
                "after `optimizer = ...(model.parameters())`, so its weights never change.",
                source=with_text(line) if line else None,
                params=names,
                module=common_module(names),
                cause="the optimizer was built before the model's parameters were replaced",
                fix="build the optimizer last: optimizer = ...(model.parameters())",
            )
        )
        if len(paired) == len(lost):
            return findings
        lost = [h for h in lost if h not in paired]
    for module, names in by_module(model, [h.name for h in lost]).items():
        findings.append(_not_held(model, module, names, {h.name: id(h.tensor) for h in lost}, evidence, line))
    return findings


def _not_held(
    model: nn.Module,
    module: str,
    names: list[str],
    ids: Mapping[str, int],
    evidence: GradientEvidence,
    line: SourceLine | None,
) -> Finding:
    keys = {ids[n] for n in names}
    if keys & evidence.thawed_late:
        cause = "it was frozen when the optimizer was built and unfrozen later"
        fix = (
            f"optimizer.add_param_group({{'params': model.{module}.parameters()}})"
            if module
            else "add it to the optimizer"
        )
    elif keys & evidence.made_late:
        cause = "it was created after the optimizer was built"
        fix = "create it in __init__ (or run one forward first), then build the optimizer"
    else:
        cause = "it was not given to any optimizer"
        fix = "give it to the optimizer, or freeze it with requires_grad_(False)"
    quiet = not module_at(model, module).training and model.training
    what = f"`{module}` ({listed(names)})" if module else listed(names)
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
    model: nn.Module,
    met: Iterable[nn.Parameter],
    held: set[int],
    name_of: Callable[[nn.Parameter], str | None] | None = None,
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
            place, bracket, _ = label.partition("[")
            by_place[place if bracket else label.rpartition(".")[0] or label].append(label)
    return [
        NOT_IN_OPTIMIZER.finding(
            f"`{place}` holds parameters that the model does not know ({listed(labels)}): the loss uses them, "
            "but model.parameters() misses them, so they are not trained, moved or saved.",
            params=labels,
            module=place,
            holder=place,
            cause="not registered: modules in a plain list, dict or object are invisible to the model",
            fix="use nn.ModuleList, nn.ModuleDict or nn.ParameterList inside the model; what is kept beside it (a loss "
            "with weights of its own) goes to the optimizer: optimizer.add_param_group(...)",
        )
        for place, labels in by_place.items()
    ]


def parameters_of_drivers(frame: FrameType | None) -> dict[int, str]:
    """Parameters that objects of the user's classes keep whose methods run in `frame` or above it, by id.

    A Trainer subclass is one: `self.criterion`, `self.log_vars`. Modules in eval mode (a fixed feature network) do not
    count.
    """
    found: dict[int, str] = {}
    while frame is not None:
        owner = frame_locals(frame).get("self") if "self" in frame.f_code.co_varnames[:1] else None
        kind = type(owner)
        if owner is not None and not isinstance(owner, (nn.Module, type)) and is_users_class(kind):
            for name, value in list(vars(owner).items()):
                if not isinstance(value, nn.Module) or value.training:
                    _collect_hidden(f"{kind.__name__}.{name}", value, found, depth=2)
        frame = frame.f_back
    return found


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
    elif depth and kind is FunctionType:
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):  # type: ignore[attr-defined]
            with contextlib.suppress(ValueError):  # a name that has no value yet
                _collect_hidden(f"{path}.{name}", cell.cell_contents, found, depth - 1)
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
    """P203: frozen parameters that an optimizer holds: a note; for those in `moved`, which still change, a warning."""
    if moved:
        return [
            FROZEN_IN_OPTIMIZER.finding(
                f"{listed(moved)} is frozen, but the optimizer still changes it: an old gradient was left in "
                "`.grad`, and "
                "momentum or weight decay act on it at every step.",
                severity="warning",
                params=list(moved),
                module=common_module(moved),
                cause="frozen after a backward had filled `.grad`",
                fix="p.grad = None when freezing, and leave it out of the optimizer",
            )
        ]
    # Some are frozen for a turn of another optimizer only: those that can train again by now do not count.
    names = [h.name for h in coverage.frozen_held if (t := h.tensor) is not None and not t.requires_grad]
    if not names:
        return []
    return [
        FROZEN_IN_OPTIMIZER.finding(
            f"the optimizer holds {len(names)} frozen parameters ({listed(names)}). They do not train; the "
            "optimizer skips them.",
            params=names,
            module=common_module(names),
            cause="requires_grad is False",
            fix="optimizer = ...(p for p in model.parameters() if p.requires_grad)",
        )
    ]


def judge_duplicates(coverage: Coverage) -> list[Finding]:
    """P205: a parameter twice in one optimizer (a warning), or in several (a note until it is stepped twice)."""
    findings = [
        DUPLICATE.finding(
            f"{listed([h.name])} is twice in optimizer `{opt}`: it is stepped twice for each gradient.",
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
    harm = (
        "both step on the same gradient, so it moves twice"
        if proved
        else "that is right only if each steps on its own loss"
    )
    return DUPLICATE.finding(
        f"{listed(names)} is in {both}: {harm}.",
        severity="warning" if proved else "note",
        params=list(names),
        module=common_module(names),
        op="step" if proved else None,
        cause=f"held by {both}",
        fix="give each parameter to one optimizer",
    )


def _pairs(lost: Sequence[Held], stale: Sequence[Tensor]) -> list[Held]:
    """Those of `lost` with a counterpart among `stale`: of their shape, else of as many dimensions (a new head)."""
    left = [tuple(t.shape) for t in stale]
    paired: list[Held] = []
    for alike in (lambda a, b: a == b, lambda a, b: len(a) == len(b)):
        for held in lost:
            tensor = held.tensor
            match = next((s for s in left if tensor is not None and alike(tuple(tensor.shape), s)), None)
            if match is not None and held not in paired:
                left.remove(match)
                paired.append(held)
    return [held for held in lost if held in paired]
