"""Assertions for people's own tests: right and complete gradients, graphs that die, steps without silent faults.

from safetrain.testing import check_function, assert_all_params_get_grad, assert_no_retained_graph
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain.autopsy import Screen
from safetrain.findings import Finding
from safetrain.graph import Census, Marks, grad_fn_of, put_mark
from safetrain.graph.walk import marks_reached
from safetrain.recording.path_look import PathLook
from safetrain.recording.replay import unchanged
from safetrain.rules.gradient import find_missing_grads, find_optimizer_mismatches
from safetrain.rules.graph import find_retained_graphs

__all__ = [
    "Check",
    "FunctionReport",
    "assert_all_params_get_grad",
    "assert_no_retained_graph",
    "assert_no_silent_fault",
    "assert_optimizer_covers",
    "check_function",
]

# ---------------------------------------------------------------------- hand-written functions


@dataclass(frozen=True, slots=True)
class Check:
    """One property that was checked. `deviation` is relative, where there is one to state."""

    name: str
    passed: bool
    detail: str = ""
    deviation: float | None = None

    def __str__(self) -> str:
        by = f" (off by {self.deviation:.2g}, relative)" if self.deviation is not None and not self.passed else ""
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}{by}" + (f": {self.detail}" if self.detail else "")


@dataclass(slots=True)
class FunctionReport:
    """All checks of one function, in order."""

    function: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        return f"{self.function}:\n" + "\n".join(f"  {check}" for check in self.checks)


def check_function(
    function: type[torch.autograd.Function] | Callable[..., Any],
    *inputs: Any,
    second_order: bool = False,
    compiled: bool = True,
    backend: str = "inductor",
    tolerance: float = 1e-3,
    seed: int = 0,
) -> FunctionReport:
    """Check a hand-written `autograd.Function` (or any differentiable callable) and say what is wrong and by how much.

    Args:
        inputs: arguments as the function takes them, small ones. Floating tensors that require grad are differentiated;
            when none does, all floating tensors are. Their values are used as given, and scaled to be near zero
            (1e-4) and very large (1e4).
        second_order: check the gradient of the gradient as well.
        compiled: compare with the function under `torch.compile(backend=…)`, in the dtype given. Takes seconds.
        tolerance: largest accepted relative deviation; ten times that for compiled float32.

    Checks: gradients against central differences in float64 (as given, near zero, large, and by `gradcheck`); that
    gradients are finite wherever the output is; each input differentiated alone (`needs_input_grad`); inputs that are
    not contiguous; inputs left as they were.

    Returns the report. Raises AssertionError with the whole report when a check failed.
    """
    apply: Callable[..., Any] = getattr(function, "apply", function)
    report = FunctionReport(getattr(function, "__name__", repr(function)))
    case = _Case(apply, inputs, torch.Generator().manual_seed(seed), tolerance)
    checks: list[tuple[str, Callable[[str], Check]]] = [
        ("gradient", lambda name: _check_gradient(case, name, 1.0)),
        ("gradient near zero", lambda name: _check_gradient(case, name, 1e-4)),
        ("gradient of very large inputs", lambda name: _check_gradient(case, name, 1e4)),
        ("gradcheck", lambda name: _check_gradcheck(case, name, torch.autograd.gradcheck)),
        ("finite gradients where the output is finite", lambda name: _check_finite(case, name)),
        ("each input alone", lambda name: _check_alone(case, name)),
        ("inputs that are not contiguous", lambda name: _check_not_contiguous(case, name)),
        ("inputs left as they were", lambda name: _check_untouched(case, name)),
    ]
    if second_order:
        checks.insert(4, ("gradgradcheck", lambda name: _check_gradcheck(case, name, torch.autograd.gradgradcheck)))
    if compiled:
        checks.append((f"compiled ({backend}) against eager", lambda name: _check_compiled(case, name, backend)))
    for name, check in checks:
        try:
            report.checks.append(check(name))
        except Exception as error:  # whatever the function or the compiler raises is the result of this check
            report.checks.append(Check(name, False, f"{type(error).__name__}: {_first_line(error)}"))
    if not report.passed:
        raise AssertionError(str(report))
    return report


@dataclass(slots=True)
class _Case:
    apply: Callable[..., Any]
    inputs: tuple[Any, ...]
    generator: torch.Generator
    tolerance: float

    @property
    def differentiable(self) -> list[int]:
        """Positions of the inputs that are differentiated."""
        floating = [i for i, x in enumerate(self.inputs) if isinstance(x, Tensor) and x.is_floating_point()]
        return [i for i in floating if self.inputs[i].requires_grad] or floating

    def make(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = torch.float64, only: int | None = None
    ) -> list[Any]:
        """Fresh leaves, as copies of the inputs times `scale`."""
        made = []
        for i, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and value.is_floating_point():
                value = value.detach().clone().to(dtype or value.dtype) * scale
                value.requires_grad_(i in self.differentiable and only in (None, i))
            elif isinstance(value, Tensor):
                value = value.detach().clone()
            made.append(value)
        return made

    def outputs(self, inputs: list[Any]) -> list[Tensor]:
        """The differentiable results of a call."""
        result = self.apply(*inputs)
        results = result if isinstance(result, (tuple, list)) else [result]
        return [t for t in results if isinstance(t, Tensor) and t.is_floating_point()]

    def random_like(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """A direction, the same at each run."""
        return [torch.randn(t.shape, generator=self.generator, dtype=torch.float64).to(t.dtype) for t in tensors]

    def gradients(
        self, inputs: list[Any], weights: list[Tensor] | None = None
    ) -> tuple[list[Tensor], dict[int, Tensor | None]]:
        """(outputs, gradient by position) for outputs weighted by `weights` (default: ones)."""
        outputs = self.outputs(inputs)
        wanted = [i for i in self.differentiable if inputs[i].requires_grad]
        attached = [
            (o, w)
            for o, w in zip(outputs, weights or [torch.ones_like(o) for o in outputs], strict=True)
            if o.requires_grad
        ]
        if not attached:
            return outputs, dict.fromkeys(wanted)
        grads = torch.autograd.grad(
            [o for o, _ in attached],
            [inputs[i] for i in wanted],
            [w.to(o.dtype) for o, w in attached],
            allow_unused=True,
        )
        return outputs, dict(zip(wanted, grads, strict=True))


_DIRECTIONS = 4


def _check_gradient(case: _Case, name: str, scale: float) -> Check:
    """Directional derivatives against central differences, input by input."""
    worst, where = 0.0, ""
    inputs = case.make(scale=scale)
    with torch.no_grad():
        finite = all(bool(torch.isfinite(o).all()) for o in case.outputs(case.make(scale=scale)))
    if not finite:
        return Check(name, True, "the output is not finite there, so there is nothing to compare")
    for _ in range(_DIRECTIONS):
        weights = case.random_like(case.outputs(inputs))
        _, grads = case.gradients(inputs, weights)
        for i, grad in grads.items():
            (direction,) = case.random_like([inputs[i]])
            analytic = 0.0 if grad is None else float((grad * direction).sum())
            numeric = _difference(case, inputs, i, direction, weights, 1e-6 * scale)
            size = max(abs(analytic), abs(numeric), 1e-9 * max(1.0, scale))
            deviation = abs(analytic - numeric) / size if abs(analytic - numeric) > 1e-7 else 0.0
            deviation = math.inf if math.isnan(deviation) else deviation
            if deviation > worst:
                worst, where = deviation, f"input {i}: backward gives {analytic:.6g}, central differences {numeric:.6g}"
    passed = worst <= case.tolerance
    return Check(name, passed, "" if passed else where, worst)


def _difference(case: _Case, inputs: list[Any], at: int, direction: Tensor, weights: list[Tensor], eps: float) -> float:
    values = []
    for sign in (1.0, -1.0):
        moved = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
        moved[at] = moved[at] + sign * eps * direction
        with torch.no_grad():
            values.append(sum(float((o * w).sum()) for o, w in zip(case.outputs(moved), weights, strict=True)))
    return (values[0] - values[1]) / (2 * eps)


def _check_gradcheck(case: _Case, name: str, check: Callable[..., bool]) -> Check:
    check(case.apply, tuple(case.make()), rtol=case.tolerance, atol=1e-5)
    return Check(name, True)


def _check_finite(case: _Case, name: str) -> Check:
    """Finite outputs have finite gradients: at zero, near it, and far out, in the dtype given."""
    for scale, word in ((0.0, "at zero"), (1e-30, "at 1e-30 of the inputs"), (1e4, "at 10,000 times the inputs")):
        outputs, grads = case.gradients(case.make(scale=scale, dtype=None))
        if not all(bool(torch.isfinite(o).all()) for o in outputs):
            continue
        bad = [i for i, g in grads.items() if g is not None and not bool(torch.isfinite(g).all())]
        if bad:
            return Check(name, False, f"the gradient of input {bad[0]} is not finite {word}, though the output is")
    return Check(name, True)


def _check_alone(case: _Case, name: str) -> Check:
    """Each input differentiated alone gets the gradient that it gets among the others."""
    if len(case.differentiable) < 2:
        return Check(name, True, "there is only one")
    _, together = case.gradients(case.make())
    for i in case.differentiable:
        _, alone = case.gradients(case.make(only=i))
        deviation = _deviation(alone.get(i), together[i])
        if deviation > case.tolerance:
            return Check(name, False, f"input {i} gets another gradient when no other input needs one", deviation)
    return Check(name, True)


def _check_not_contiguous(case: _Case, name: str) -> Check:
    """A transposed layout gives the same outputs and gradients."""
    expected, grads = case.gradients(case.make())
    strided = case.make()
    for i, value in enumerate(strided):
        if isinstance(value, Tensor) and value.dim() >= 2:
            strided[i] = value.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(value.requires_grad)
    outputs, strided_grads = case.gradients(strided)
    worst = max(
        [_deviation(a, b) for a, b in zip(outputs, expected, strict=True)]
        + [_deviation(strided_grads[i], grads[i]) for i in grads],
        default=0.0,
    )
    return Check(
        name,
        worst <= case.tolerance,
        "" if worst <= case.tolerance else "the result depends on the memory layout",
        worst,
    )


def _check_untouched(case: _Case, name: str) -> Check:
    """The call does not write to its inputs, unless it says so (`mark_dirty` makes it return them)."""
    inputs = case.make()
    for i in case.differentiable:
        inputs[i] = inputs[i].detach()
    before = [x.clone() if isinstance(x, Tensor) else None for x in inputs]
    result = case.apply(*inputs)
    returned = {id(t) for t in (result if isinstance(result, (tuple, list)) else [result])}
    changed = [
        i for i, (now, was) in enumerate(zip(inputs, before, strict=True))
        if was is not None and id(now) not in returned and not torch.equal(now, was)
    ]  # fmt: skip
    return Check(name, not changed, f"input {changed[0]} was overwritten" if changed else "")


def _check_compiled(case: _Case, name: str, backend: str) -> Check:
    expected, grads = case.gradients(case.make(dtype=None))
    fast = _Case(torch.compile(case.apply, backend=backend), case.inputs, case.generator, case.tolerance)
    outputs, fast_grads = fast.gradients(fast.make(dtype=None))
    parts: list[tuple[str, Tensor | None, Tensor | None]] = [
        (f"output {i}", a, b) for i, (a, b) in enumerate(zip(outputs, expected, strict=True))
    ]
    parts += [(f"the gradient of input {i}", fast_grads[i], grads[i]) for i in grads]
    worst = max(parts, key=lambda part: _deviation(part[1], part[2]))
    deviation = _deviation(worst[1], worst[2])
    limit = case.tolerance if all(o.dtype == torch.float64 for o in expected) else 10 * case.tolerance
    return Check(name, deviation <= limit, "" if deviation <= limit else worst[0], deviation)


def _deviation(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest deviation, relative to the largest entry expected."""
    if found is None and expected is None:
        return 0.0
    found = torch.zeros_like(expected) if found is None else found  # type: ignore[arg-type]
    expected = torch.zeros_like(found) if expected is None else expected
    if found.shape != expected.shape:
        return math.inf
    gap = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    size = expected.double().abs().max().item() if found.numel() else 0.0
    return math.inf if math.isnan(gap) else gap / max(size, 1e-12)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


# ---------------------------------------------------------------------- models and steps


def assert_all_params_get_grad(
    model: nn.Module, loss_fn: Callable[[], Tensor], *, apart_from: Iterable[str] = (), nonzero: bool = False
) -> None:
    """Fail when a trainable parameter gets no gradient from `loss_fn()`, and say where its path was cut.

    `apart_from`: `fnmatch` patterns of parameters that may go without. `nonzero`: a gradient of exactly zero fails too.
    The model is left as it was: buffers, gradients, generators.
    """
    patterns = list(apart_from)
    look = PathLook(dict(model.named_parameters()))
    with unchanged(model), torch.enable_grad():
        look.start()
        try:
            loss = loss_fn()
            look.loss(loss)
        finally:
            look.stop()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        findings = [_without(f, patterns) for f in find_missing_grads(model, look=look)]
        dead = [
            name
            for name, p in model.named_parameters()
            if nonzero and p.grad is not None and not _matches(name, patterns) and not bool(p.grad.any())
        ]
    messages = [_describe(f) for f in findings if f.params]
    messages += [f"gradients that are exactly zero: {', '.join(dead)}"] if dead else []
    if messages:
        raise AssertionError("\n".join(messages))


def _without(finding: Finding, patterns: list[str]) -> Finding:
    finding.params = [name for name in finding.params if not _matches(name, patterns)]
    return finding


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def assert_optimizer_covers(model: nn.Module, optimizers: Optimizer | Mapping[str, Optimizer]) -> None:
    """Fail when trainable parameters are in no optimizer, or in two, or an optimizer holds tensors of no model."""
    loud = [f for f in find_optimizer_mismatches(model, optimizers) if f.severity != "note"]
    if loud:
        raise AssertionError("\n".join(_describe(f) for f in loud))


def assert_no_silent_fault(model: nn.Module, loss_fn: Callable[[], Tensor]) -> None:
    """Fail when one forward and backward of `loss_fn()` computes something else than it says, with no error.

    That is: an in-place operation that changed a value read again (G129), a saved tensor written behind autograd's back
    (G128), a recomputation that is not the forward over again (G126). The model is left as it was.
    """
    with unchanged(model), torch.enable_grad():
        screen = Screen(model)
        screen.start()
        try:
            loss = loss_fn()
            screen.before_backward(loss)
            torch.autograd.backward(loss)
        finally:
            screen.stop()
        findings = screen.findings()
    if findings:
        raise AssertionError("\n".join(_describe(f) for f in findings))


class StepWatch:
    """Told of each step's end, it knows which graphs should be dead by now."""

    def __init__(self) -> None:
        self.steps = 0
        self._marks = Marks()
        self._census = Census()
        self._mark = self._marks.new(1)

    def step(self) -> None:
        """A step has ended: everything with a graph that is alive now belongs to it."""
        mark = self._mark
        self._census.visit(lambda tensor: put_mark(tensor, mark))
        self.steps += 1
        self._mark = self._marks.new(self.steps + 1)

    def overdue(self) -> dict[int, Any]:
        """Marks of steps before the last one whose graphs live on, by id."""
        return {id(mark): mark for mark in self._marks.alive_before(self.steps)}


@contextmanager
def assert_no_retained_graph(model: nn.Module | None = None) -> Iterator[StepWatch]:
    """Fail when autograd graphs built in the block outlive it (or, with `watch.step()`, outlive the next step).

        with assert_no_retained_graph(model) as watch:
            for batch in batches:
                train_one(batch)
                watch.step()

    With `watch.step()` at the end of each step, graphs of the last step may live (a loop's own names hold them), all
    earlier ones must be dead. Without it, what a container, an attribute or a closure holds at the end fails; plain
    local names do not. The message names who holds them.
    """
    gc.collect()
    before = {id(t) for t in _attached_tensors()}
    watch = StepWatch()
    yield watch
    gc.collect()
    if watch.steps:
        overdue = watch.overdue()
        found = find_retained_graphs(lambda t: _overdue_steps(t, overdue), model=model) if overdue else []
        alive = len({mark.step for mark in overdue.values()})
    else:
        leaked = {id(t) for t in _attached_tensors()} - before
        found = find_retained_graphs(lambda t: frozenset((id(t),)) & leaked, model=model) if leaked else []
        found = [f for f in found if not _is_plain_name(f)]
        alive = len(leaked) if found else 0
    if alive:
        what = "\n".join(_describe(f) for f in found) or "who holds them could not be found"
        word = "steps' graphs" if watch.steps else "tensors with a graph"
        raise AssertionError(f"{alive} earlier {word} are still alive:\n{what}")


def _attached_tensors() -> list[Tensor]:
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and grad_fn_of(o) is not None]


def _overdue_steps(tensor: Tensor, overdue: Mapping[int, Any]) -> frozenset[int]:
    return frozenset(mark.step for mark in marks_reached(tensor, 4_000) if id(mark) in overdue)


def _is_plain_name(finding: Finding) -> bool:
    """A local name that holds a tensor itself, and no container: it is bound anew, or ends with its function."""
    holder = finding.holder or ""
    return holder.startswith("local ") and not any(sign in holder for sign in ("→", "[", "."))


def _describe(finding: Finding) -> str:
    at = (
        f"\n  at {finding.source.file}:{finding.source.line}: {finding.source.text}"
        if finding.source is not None
        else ""
    )
    fix = f"\n  fix: {finding.fix}" if finding.fix else ""
    return f"{finding.code} {finding.name}: {finding.message}{at}{fix}"
