"""`torch.compile` in place: the model stays the object it was, and a failing compiler costs speed, never the step."""

from __future__ import annotations

import difflib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from safetrain import rng
from safetrain.errors import ConfigError
from safetrain.modules import as_patterns, has_forward, match_modules, outermost, unwrap_forward, wrap_forward

_OWNER = "compile"
_KEEP_ALL = ("eager", "aot_eager")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile, and whether to check the result. Raises `ConfigError` for contradictions."""

    mode: str = "default"
    """Mode of `torch.compile`: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs."""
    dynamic: bool | None = None
    """True: one artifact for all shapes; False: one per shape; null: turn dynamic when shapes change."""
    fullgraph: bool = False
    """Refuse graph breaks: a break then means eager, with a warning that names it."""
    backend: str = "inductor"
    """Backend of `torch.compile`; `aot_eager` needs no C++ compiler and helps to find which stage is at fault."""
    modules: tuple[str, ...] = ()
    """`fnmatch` patterns of the modules to compile one by one. Empty: the model itself, or, where it only holds others
    (it has no forward of its own), each of its children."""
    exclude: tuple[str, ...] = ()
    """`fnmatch` patterns of modules that stay eager inside what is compiled; each costs a graph break."""
    activation_memory_budget: float | None = None
    """Share, from 0 to 1, of the activations that compiled code may keep for backward; the rest it computes again.
    null: what the compiler thinks best, which is torch's setting of the same name (usually 1). `plan` forecasts it."""
    verify: bool = False
    """Compare loss and every gradient of the first window with eager."""
    tolerance: float | None = None
    """Largest deviation that `verify` accepts, relative to the largest entry of that gradient. null: 1e-3, or 5e-2
    under reduced precision, where fused kernels round less often than eager ones."""
    on_mismatch: Literal["refuse", "fallback"] = "refuse"
    """When `verify` finds a difference: raise `ConfigError`, or warn and train eagerly."""

    def __post_init__(self) -> None:
        for field in ("modules", "exclude"):
            object.__setattr__(self, field, as_patterns(getattr(self, field)))
        if self.mode not in _MODES:
            near = difflib.get_close_matches(self.mode, _MODES, n=1) or _MODES
            raise ConfigError(f"compile.mode: no mode {self.mode!r}; did you mean {near[0]!r}?")
        if self.mode != "default" and self.backend != "inductor":
            raise ConfigError(
                f"compile.mode {self.mode!r} is inductor's; compile.backend {self.backend!r} has no modes"
            )
        if self.fullgraph and self.exclude:
            raise ConfigError("compile.fullgraph forbids graph breaks, and each of compile.exclude is one; drop one")
        if self.on_mismatch not in ("refuse", "fallback"):
            raise ConfigError(f"compile.on_mismatch: {self.on_mismatch!r} is neither 'refuse' nor 'fallback'")
        if self.activation_memory_budget is not None:
            if not 0 <= self.activation_memory_budget <= 1:
                raise ConfigError(
                    f"compile.activation_memory_budget: {self.activation_memory_budget} must be between 0 and 1; it is "
                    "a share of the activations"
                )
            if self.backend in _KEEP_ALL:
                raise ConfigError(
                    f"compile.activation_memory_budget: backend {self.backend!r} keeps what eager keeps; use inductor"
                )
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise ConfigError(f"compile.tolerance: {self.tolerance} must be between 0 and 1; it is relative")


def apply(model: nn.Module, options: CompileOptions) -> list[str]:
    """Compile `model` in place and return the names of what is compiled (`""` is the model itself). `undo` reverts it.

    Compilation happens in the first calls. Where the compiler fails there, that module warns once and stays eager, and
    the call is made again eagerly with RNG and buffers as they were, so no step is lost. The first call in each mode
    compiles its backward too, so that a failure there is met while the step can still be made. Calls that compile
    anew later (another shape) fall back as well, but a graph break before the failure may have updated buffers.

    State dict, copies and `isinstance` see the model as it was; a copy is eager. Only calls of the module itself are
    compiled: `model.encode(x)` is not, see `uncalled`. Raises `ConfigError` for a pattern that matches nothing.
    """
    undo(model)
    excluded = match_modules(model, options.exclude, setting="compile.exclude")
    if options.modules:
        targets = outermost(match_modules(model, options.modules, setting="compile.modules"))
    else:
        targets = _callable_parts(model)
    targets = {name: module for name, module in targets.items() if name not in excluded}
    for module in excluded.values():
        wrap_forward(module, _OWNER, torch.compiler.disable)
    for name, module in targets.items():
        module._compiled_call_impl = _Compiled(name, module, options)
    return list(targets)


def undo(model: nn.Module) -> None:
    """Every module of `model` runs eagerly again."""
    for module in model.modules():
        unwrap_forward(module, _OWNER)
        if isinstance(module._compiled_call_impl, _Compiled):
            module._compiled_call_impl = None


def compiled(model: nn.Module) -> list[str]:
    """Names of the modules that are compiled now (`""` is the model itself), without those that fell back."""
    return [name for name, module in model.named_modules() if isinstance(module._compiled_call_impl, _Compiled)]


def uncalled(model: nn.Module) -> list[str]:
    """Names of compiled modules that nobody has called so far. After a step this means: their parts run eagerly."""
    return [name for name, module in model.named_modules() if _is_uncalled(module._compiled_call_impl)]


def warn_if_uncalled(model: nn.Module) -> None:
    """After the first step: say when compiling had no effect because the step calls only parts of a compiled module."""
    for name in uncalled(model):
        module = model.get_submodule(name)
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        warnings.warn(
            f"compile: no step called {_describe(name, module)}, so it runs eagerly. The step must have called a "
            f"method or parts of it (children: {children}): call the module itself, or name those in compile.modules",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_uncalled(impl: object) -> bool:
    return isinstance(impl, _Compiled) and not impl.settled


def _callable_parts(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    if has_forward(model):
        return {prefix: model}
    parts: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        parts |= _callable_parts(child, f"{prefix}.{name}" if prefix else name)
    return parts


def _describe(name: str, module: nn.Module) -> str:
    return f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


# ---- calling ---------------------------------------------------------------------------------------------------------


class _Compiled:
    """Stands in a module's `_compiled_call_impl`, where `nn.Module.__call__` looks first."""

    def __init__(self, name: str, module: nn.Module, options: CompileOptions) -> None:
        self.name = name
        self.module = module
        self.options = options
        self.call = self.build()
        self.settled: set[tuple[bool, bool]] = set()
        """The (training, grad enabled) pairs that have run once."""

    def build(self, **inductor: Any) -> Callable[..., Any]:
        """A compiled call; `inductor` settings are added to those of the mode."""
        options = self.options
        how: dict[str, Any] = {"dynamic": options.dynamic, "fullgraph": options.fullgraph, "backend": options.backend}
        if options.backend == "inductor":
            mode = {} if options.mode == "default" else torch._inductor.list_mode_options(options.mode, options.dynamic)
            how["options"] = {**mode, **inductor} or None
        call = torch.compile(_traced(self.module), **how)
        share = options.activation_memory_budget
        return call if share is None else _keeping(share, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = (self.module.training, torch.is_grad_enabled())
        first_time = kind not in self.settled
        try:
            if not first_time:
                return self.call(*args, **kwargs)
            with _undone_on_error(self.module), _backward_now():
                result = self.call(*args, **kwargs)
            self.settled.add(kind)
            return result
        except Exception as error:
            if not _from_compiler(error):
                raise
            self.fall_back(error)
        # Outside the handler: its traceback would hold the failed attempt's tensors through this call.
        return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def fall_back(self, error: Exception) -> None:
        """Stay eager from now on, and say why."""
        self.module._compiled_call_impl = None
        reason = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        warnings.warn(
            f"torch.compile failed on {_describe(self.name, self.module)} with {type(error).__name__}: "
            f"{reason[:300]}. It runs eagerly from here: same results, less speed. To silence this, set compile to "
            f"null or leave the part out with compile.exclude",
            RuntimeWarning,
            stacklevel=4,
        )


def _traced(module: nn.Module) -> Callable[..., Any]:
    """What to compile of a module. Torch leaves forwards of its own (`nn.Sequential`) alone when they come first."""
    call: Callable[..., Any] = module._call_impl
    if not str(getattr(type(module).forward, "__module__", "")).startswith("torch."):
        return call

    def traced(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    traced.__code__ = _code_of(traced.__code__, type(module).__name__, repr(module))
    return traced


@functools.cache
def _code_of(code: CodeType, name: str, structure: str) -> CodeType:
    """Under the module's name, and one for each structure: torch counts compilations, and shares them, by code."""
    return code.replace(co_name=name)


def _keeping(share: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with torch's budget set around it, since any call may compile anew: some 20 µs a call."""
    import torch._functorch.config as functorch_config

    def keeping(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=share):
            return call(*args, **kwargs)

    return keeping


def _from_compiler(error: Exception) -> bool:
    """Whether the compiler raised, rather than the user's code or the machine."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _backward_now() -> AbstractContextManager[Any]:
    """Compile backward together with forward, where torch can: else it may first fail inside `loss.backward()`."""
    import torch._functorch.config as functorch_config

    if not hasattr(functorch_config, "force_non_lazy_backward_lowering"):
        return nullcontext()
    patched: AbstractContextManager[Any] = functorch_config.patch(force_non_lazy_backward_lowering=True)
    return patched


@contextmanager
def _undone_on_error(module: nn.Module) -> Iterator[None]:
    """If the block raises, leave generators and buffers as they were found."""
    generators, buffers = rng.capture(), _Buffers(module)
    try:
        yield
    except BaseException:
        rng.restore(generators)
        buffers.restore()
        raise


class _Buffers:
    """The values of a model's buffers at construction."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in model.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the same tensors back, with the same values."""
        for owner, name, buffer, value in self._saved:
            buffer.copy_(value)
            owner._buffers[name] = buffer


# ---- checking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one compiled result is from the eager one."""

    name: str
    """`loss`, or the name of the parameter whose gradient it is."""
    largest: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute entry of the eager one."""
    allowed: float
    """What would have passed."""

    def __str__(self) -> str:
        return f"{self.name}: off by {self.largest:.3g} where eager has {self.scale:.3g} (allowed {self.allowed:.3g})"


def verify(
    model: nn.Module,
    compute_loss: Callable[[], Tensor],
    options: CompileOptions,
    *,
    reduced_precision: bool = False,
) -> list[Deviation]:
    """Compare the compiled model's loss and gradients with eager ones on one input; return what deviates too much.

    `compute_loss` runs forward on the first window and returns its scalar loss with the graph. It is called twice, once
    eagerly; RNG, buffers and `.grad` are left as they were. A gradient passes when its largest deviation is at most
    `tolerance` times its own largest entry plus 1 % of that of the largest gradient anywhere (so that gradients that
    are zero but for rounding pass). With a difference, raises `ConfigError` or, under `on_mismatch="fallback"`, warns
    and undoes compilation. A compiler failure meanwhile falls back as it would in training. Costs host syncs and, for
    the moment, one more copy of the gradients.

    Cannot see: other inputs and shapes, artifacts compiled later, what the optimizer or Python side effects do. When
    the model draws random numbers, a variant that draws them as eager does is compiled and compared in its place,
    since the artifact that trains draws others: the draws themselves are not checked.
    """
    targets = [m._compiled_call_impl for m in model.modules() if isinstance(m._compiled_call_impl, _Compiled)]
    if not targets:
        return []
    with _left_alone(model) as generators, _eagerly(targets):
        expected = _loss_and_gradients(model, compute_loss)
        draws = _moved(generators)
    try:
        with _left_alone(model), _drawing_as_eager(targets) if draws else nullcontext():
            actual = _loss_and_gradients(model, compute_loss)
    except Exception as error:  # raised inside backward, past what the call itself catches
        if not _from_compiler(error):
            raise
        for target in targets:
            target.fall_back(error)
        return []
    if not all(value.isfinite().all() for value in expected.values() if value is not None):
        warnings.warn("compile.verify: the first window is not finite; nothing compared", RuntimeWarning, stacklevel=2)
        return []
    deviations = _compare(expected, actual, options.tolerance or (5e-2 if reduced_precision else 1e-3))
    if deviations:
        _report(model, deviations, options)
    return deviations


_Results = dict[str, Tensor | None]
"""`loss` and the gradient of each trainable parameter by name; None where there is none."""


def _loss_and_gradients(model: nn.Module, compute_loss: Callable[[], Tensor]) -> _Results:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = compute_loss()
    # autograd.grad: leaves `.grad` alone and runs no accumulation hooks.
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return {"loss": loss.detach(), **dict(zip(trainable, gradients, strict=True))}


def _compare(expected: _Results, actual: _Results, tolerance: float) -> list[Deviation]:
    """What lies outside the tolerance, worst first."""
    scales = {name: 0.0 if v is None or not v.numel() else float(v.abs().max()) for name, v in expected.items()}
    largest_gradient = max((scale for name, scale in scales.items() if name != "loss"), default=0.0)
    deviations = []
    for name, eager in expected.items():
        found = actual[name]
        if eager is None and found is None:
            continue
        allowed = tolerance * (scales[name] + (1e-2 if name == "loss" else 1e-2 * largest_gradient))
        zero = torch.zeros(())
        difference = (zero if found is None else found).double() - (zero if eager is None else eager).double()
        largest = float(difference.abs().max()) if difference.numel() else 0.0
        if not largest <= allowed:  # `not <=`: a NaN is a deviation
            deviations.append(Deviation(name, largest, scales[name], allowed))
    return sorted(deviations, key=lambda d: d.allowed / d.largest if d.largest == d.largest else 0.0)


def _report(model: nn.Module, deviations: list[Deviation], options: CompileOptions) -> None:
    worst = "\n".join(f"  {deviation}" for deviation in deviations[:5])
    more = f"\n  and {len(deviations) - 5} more" if len(deviations) > 5 else ""
    message = (
        f"compile.verify: the compiled {type(model).__name__} differs from the eager one in the first window:\n"
        f"{worst}{more}\n"
        "The usual reason is a hand-written autograd.Function whose backward reads what changes after forward: "
        "compiling fixes its value. Leave that module out with compile.exclude, or set compile to null"
    )
    if options.on_mismatch == "refuse":
        raise ConfigError(message)
    undo(model)
    warnings.warn(f"{message}. Training goes on eagerly, as compile.on_mismatch says", RuntimeWarning, stacklevel=3)


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Leave generators and buffers as they were found; gives the generators' states."""
    generators, buffers = rng.capture(), _Buffers(model)
    try:
        yield generators
    finally:
        rng.restore(generators)
        buffers.restore()


def _moved(before: dict[str, Any]) -> bool:
    """Whether torch's generators, on any device, were drawn from."""
    now = rng.capture()
    pairs = zip(before.get("accelerator", []), now.get("accelerator", []), strict=False)
    return not torch.equal(before["torch"], now["torch"]) or any(not torch.equal(old, new) for old, new in pairs)


@contextmanager
def _eagerly(targets: list[_Compiled]) -> Iterator[None]:
    for target in targets:
        target.module._compiled_call_impl = None
    try:
        yield
    finally:
        for target in targets:
            target.module._compiled_call_impl = target


@contextmanager
def _drawing_as_eager(targets: list[_Compiled]) -> Iterator[None]:
    """Compile a variant whose random numbers are eager's, for a comparison that dropout would otherwise fail."""
    trained = [target.call for target in targets]
    for target in targets:
        target.call = target.build(fallback_random=True)
    try:
        yield
    finally:
        for target, call in zip(targets, trained, strict=True):
            target.call = call
            # The artifact that trains has not been compiled yet: its first call is still one that may fail.
            target.settled.clear()
