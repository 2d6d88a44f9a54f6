"""Compiling in place: what the model looks like, what a failing compiler costs, and how a wrong artifact is found."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from safetrain import Trainer, activation_checkpoint, compile
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.compile import CompileOptions
from safetrain.errors import ConfigError

# The compiler's own sources warn; under warnings-as-errors that alone would make it fail.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

AOT = CompileOptions(backend="aot_eager")
"""Everything but the C++ code: traced, functionalised, forward and backward split. Fast to build."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(drop))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _net(drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(drop)


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


X = torch.linspace(-1, 1, 48).reshape(8, 6)


def _close(first: nn.Module, second: nn.Module, tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(a, b, atol=tolerance) for a, b in zip(_step(first, X), _step(second, X), strict=True))


# ---- in place --------------------------------------------------------------------------------------------------------


def test_the_model_stays_the_object_it_was() -> None:
    plain = _net()
    model = copy.deepcopy(plain)
    assert compile.apply(model, AOT) == [""]
    assert _close(plain, model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert type(model) is Net
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    assert compile.compiled(copy.deepcopy(model)) == []
    compile.undo(model)
    assert compile.compiled(model) == [] and _close(plain, model)


@pytest.mark.slow
def test_inductor_trains_like_eager() -> None:
    plain = _net()
    model = copy.deepcopy(plain)
    compile.apply(model, CompileOptions())
    for _ in range(3):
        assert _close(plain, model, tolerance=1e-5)
    assert compile.compiled(model) == [""]


@pytest.mark.parametrize("whole", [True, False])
def test_modules_whose_forward_is_torchs_own_are_compiled_too(whole: bool) -> None:
    parts: list[nn.Module] = [nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1)]
    model = nn.Sequential(*parts)
    plain = copy.deepcopy(model)
    assert compile.apply(model, CompileOptions(backend="aot_eager", modules=() if whole else ("*",)))
    assert _close(plain, model)
    assert "Compiled" in type(model(X).grad_fn).__name__


def test_blocks_of_one_structure_share_what_was_compiled_and_others_count_for_themselves() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)], *[nn.Linear(6, 6) for _ in range(3)]
    )
    compile.apply(model, CompileOptions(backend="aot_eager", modules=("?",)))
    before = len(torch._dynamo.utils.get_compilation_metrics())
    model(X)
    names = [metric.co_name for metric in torch._dynamo.utils.get_compilation_metrics()[before:]]
    assert sorted(set(names)) == ["Linear", "Sequential"]
    assert len(names) < 7


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_budget_for_activations_keeps_fewer_of_them_and_trains_alike(backend: str) -> None:
    """The first backend divides forward from backward as inductor does, and needs no C++ compiler."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 6)) for _ in range(4)])
    kept = {}
    for share in (1.0, 0.1):
        torch._dynamo.reset()
        model = copy.deepcopy(plain)
        compile.apply(model, CompileOptions(backend=backend, activation_memory_budget=share))
        assert _close(plain, model)
        kept[share] = _bytes_saved(model)
        assert compile.compiled(model) == [""]
    assert kept[0.1] < 0.7 * kept[1.0]


def _bytes_saved(model: nn.Module) -> int:
    """What the compiled function keeps for backward, without the weights."""
    weights = {p.data_ptr() for p in model.parameters()}
    saved: tuple[torch.Tensor, ...] = model(X).grad_fn.saved_tensors
    return sum(t.nbytes for t in saved if t.data_ptr() not in weights)


def test_excluded_modules_run_eagerly_inside_the_compiled_model() -> None:
    class Spy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return super().forward(x)

    seen: list[bool] = []
    model = nn.Sequential(nn.Linear(6, 6), Spy(6, 6), nn.Linear(6, 1))
    compile.apply(model, CompileOptions(backend="aot_eager", exclude=("1",)))
    plain = copy.deepcopy(model)
    assert _close(plain, model)
    assert seen and not any(seen)
    compile.undo(model)
    assert "forward" not in vars(model[1])


def test_chosen_modules_compile_one_by_one() -> None:
    model = _net()
    assert compile.apply(model, CompileOptions(backend="aot_eager", modules=("body", "head"))) == ["body", "head"]
    assert _close(_net(), model)


def test_a_container_that_is_never_called_has_its_children_compiled() -> None:
    gan = nn.ModuleDict({"generator": nn.Linear(6, 6), "critics": nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])})
    assert compile.apply(gan, AOT) == ["generator", "critics.0", "critics.1"]
    gan["critics"][0](gan["generator"](X)).sum().backward()
    assert compile.uncalled(gan) == ["critics.1"]
    assert compile.apply(gan, CompileOptions(backend="aot_eager", exclude=("critics.*",))) == ["generator"]


def test_a_model_of_which_only_parts_are_called_is_said_to_run_eagerly() -> None:
    model = _net()
    compile.apply(model, AOT)
    model.head(model.body(X)).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"no step called the model \(Net\).*children: body, head.*compile.modules"):
        compile.warn_if_uncalled(model)
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile.warn_if_uncalled(model)


# ---- a compiler that fails -------------------------------------------------------------------------------------------


def _failing_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    raise RuntimeError("no such thing as a compiler")


def test_a_failing_backend_warns_once_and_loses_no_step() -> None:
    plain, model = _net(drop=0.5), _net(drop=0.5)
    compile.apply(model, CompileOptions(backend=_failing_backend))  # type: ignore[arg-type]
    torch.manual_seed(5)
    expected = [g.clone() for g in _step(plain, X)]
    torch.manual_seed(5)
    with pytest.warns(
        RuntimeWarning, match=r"torch.compile failed on the model \(Net\) with BackendCompilerFailed"
    ) as seen:
        actual = _step(model, X)
    assert len(seen) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))
    assert compile.compiled(model) == []
    _step(model, X)  # a second warning would be an error here


def test_a_failure_after_a_graph_break_does_not_run_the_first_half_twice() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(self.norm(x))
            torch._dynamo.graph_break()
            return self.head(x)

    def second_half_fails(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        if any(node.target is torch.nn.functional.dropout for node in graph.graph.nodes):
            return graph.forward
        raise RuntimeError("cannot do this part")

    torch.manual_seed(0)
    plain = Broken()
    model = copy.deepcopy(plain)
    compile.apply(model, CompileOptions(backend=second_half_fails))  # type: ignore[arg-type]
    torch.manual_seed(5)
    expected = plain(X)
    torch.manual_seed(5)
    with pytest.warns(RuntimeWarning, match="cannot do this part"):
        actual = model(X)
    assert torch.equal(expected, actual)
    assert int(model.norm.num_batches_tracked) == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))


@pytest.mark.slow
def test_without_a_cpp_compiler_training_goes_on_eagerly(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # an artifact of an earlier run would hide it
    plain, model = _net(), _net()
    compile.apply(model, CompileOptions())
    with inductor.patch({"cpp.cxx": ("/nonexistent/c++",)}):
        with pytest.warns(RuntimeWarning, match=r"failed on the model \(Net\).*runs eagerly from here"):
            actual = _step(model, X)
    assert all(torch.equal(a, b) for a, b in zip(_step(plain, X), actual, strict=True))


def test_a_failing_backward_compiler_is_met_in_the_forward_call() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(fail, RuntimeError("no backward here"), None)

    plain, model = _net(), _net()
    compile.apply(model, CompileOptions(backend=aot_autograd(fw_compiler=lambda g, _: g.forward, bw_compiler=fail)))
    with pytest.warns(RuntimeWarning, match="no backward here"):
        actual = _step(model, X)
    assert all(torch.equal(a, b) for a, b in zip(_step(plain, X), actual, strict=True))


def test_fullgraph_names_the_break_and_falls_back() -> None:
    class Breaks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Breaks(6, 1)
    compile.apply(model, CompileOptions(backend="aot_eager", fullgraph=True))
    with pytest.warns(RuntimeWarning, match="graph_break"):
        model(X).sum().backward()
    assert model.weight.grad is not None


def test_the_users_own_errors_pass_through_unchanged() -> None:
    class Wrong(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("tokens")

    model = Wrong(6, 1)
    compile.apply(model, AOT)
    with pytest.raises(KeyError, match="tokens"):
        model(X)


# ---- verify ----------------------------------------------------------------------------------------------------------


class Schedule:
    strength = 1.0


class Reverse(torch.autograd.Function):
    """Gradient reversal whose strength is read in backward: eager sees the newest value, compiled code the first."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return -Schedule.strength * gradient


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.domain = nn.Linear(6, 8), nn.Linear(8, 1)
        self.reverse = Reversal()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.domain(self.reverse(self.features(x)))


class Reversal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reverse.apply(x)


def _adversarial_loss(model: nn.Module) -> torch.Tensor:
    Schedule.strength = 1.0
    loss = model(X).square().mean()
    Schedule.strength = 0.1  # the schedule moves on between forward and backward
    return loss


def test_a_function_whose_compiled_backward_differs_is_refused() -> None:
    model = Adversarial()
    compile.apply(model, AOT)
    with pytest.raises(
        ConfigError, match=r"(?s)differs from the eager one.*features\.weight: off by.*compile\.exclude"
    ):
        compile.verify(model, lambda: _adversarial_loss(model), AOT)


def test_or_training_falls_back_to_eager() -> None:
    options = CompileOptions(backend="aot_eager", on_mismatch="fallback")
    model = Adversarial()
    compile.apply(model, options)
    with pytest.warns(RuntimeWarning, match=r"(?s)features\.weight.*goes on eagerly"):
        deviations = compile.verify(model, lambda: _adversarial_loss(model), options)
    assert {d.name for d in deviations} == {"features.weight", "features.bias"}
    assert compile.compiled(model) == []


def test_leaving_the_function_out_by_pattern_makes_it_right() -> None:
    options = CompileOptions(backend="aot_eager", exclude=("reverse",))
    model = Adversarial()
    compile.apply(model, options)
    assert compile.verify(model, lambda: _adversarial_loss(model), options) == []
    assert compile.compiled(model) == [""]


def test_verify_leaves_the_run_as_it_was() -> None:
    model = _net(drop=0.5)
    compile.apply(model, AOT)
    _step(model, X)
    gradients = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    generator = torch.get_rng_state()
    assert compile.verify(model, lambda: model(X).square().mean(), AOT) == []
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_inductor_with_dropout_passes_and_still_trains_afterwards(recompute: bool) -> None:
    options = CompileOptions()
    model = _net(drop=0.5)
    if recompute:
        activation_checkpoint.apply(model, CheckpointOptions(("body",)))
    compile.apply(model, options)
    assert compile.verify(model, lambda: model(X).square().mean(), options) == []
    _step(model, X)
    assert compile.compiled(model) == [""]
    assert int(model.body[1].num_batches_tracked) == 1


def test_a_gradient_that_is_zero_but_for_rounding_passes() -> None:
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
    )  # BatchNorm cancels that bias
    compile.apply(model, AOT)
    assert compile.verify(model, lambda: 1e3 * model(X * 7).square().mean(), AOT) == []


def test_a_missing_gradient_is_a_deviation() -> None:
    model = _net()
    compile.apply(model, AOT)

    def loss() -> torch.Tensor:
        hidden = model(X)
        return (hidden if compile.compiled(model) else hidden + model.body(X).sum()).square().mean()

    with pytest.raises(ConfigError, match="loss: off by"):
        compile.verify(model, loss, AOT)


def test_nothing_is_compared_with_a_loss_that_is_not_finite() -> None:
    model = _net()
    compile.apply(model, AOT)
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert compile.verify(model, lambda: model(X).sum() * float("inf"), AOT) == []


# ---- together with recomputation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_recomputed_modules_inside_a_compiled_model_give_eager_gradients(backend: str) -> None:
    plain, model = _net(), _net()
    activation_checkpoint.apply(model, CheckpointOptions(("body",)))
    compile.apply(model, CompileOptions(backend=backend, fullgraph=True))
    for _ in range(2):
        assert _close(plain, model)
    assert compile.compiled(model) == [""]
    for expected, actual in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.allclose(expected, actual, atol=1e-6)


def test_a_recomputed_module_can_be_excluded_and_both_undone_in_any_order() -> None:
    plain, model = _net(), _net()
    activation_checkpoint.apply(model, CheckpointOptions(("body",)))
    compile.apply(model, CompileOptions(backend="aot_eager", exclude=("body",)))
    assert _close(plain, model)
    activation_checkpoint.undo(model)
    assert _close(plain, model)
    compile.undo(model)
    assert "forward" not in vars(model.body) and _close(plain, model)


# ---- in the Trainer --------------------------------------------------------------------------------------------------


class Regression(Trainer):
    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.model(batch[0]).square().mean()


def _trained(cls: type[Trainer] = Regression, model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = _net(drop=0.2) if model is None else model
    trainer = cls(model, torch.optim.SGD(model.parameters(), lr=0.1), max_steps=4, seed=3, guards="off", **settings)
    trainer.fit([[X + step] for step in range(4)])
    return trainer


def _same_state(first: Trainer, second: Trainer, **tolerance: float) -> bool:
    one, two = first.model.state_dict(), second.model.state_dict()
    return list(one) == list(two) and all(torch.allclose(one[name], two[name], **tolerance) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_compiled_training_ends_where_the_eager_one_does(precision: str) -> None:
    eager = _trained(precision=precision)
    compiled = _trained(precision=precision, compile=CompileOptions(backend="aot_eager", verify=True))
    assert compile.compiled(compiled.model) == [""]
    assert _same_state(eager, compiled, atol=1e-6 if precision == "fp32" else 2e-2)


def test_a_training_whose_compiler_fails_ends_in_the_bits_of_the_eager_one() -> None:
    eager = _trained()
    with pytest.warns(RuntimeWarning, match="no such thing as a compiler"):
        fallen_back = _trained(compile=CompileOptions(backend=_failing_backend))  # type: ignore[arg-type]
    assert _same_state(eager, fallen_back, rtol=0, atol=0)


def test_the_trainer_refuses_before_a_wrong_gradient_reaches_the_weights() -> None:
    class Domain(Trainer):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return _adversarial_loss(self.model)

    torch.manual_seed(0)
    model = Adversarial()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="differs from the eager one"):
        _trained(Domain, model, compile=CompileOptions(backend="aot_eager", verify=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_trainer_says_when_compiling_has_no_effect() -> None:
    class PartByPart(Trainer):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.model.head(self.model.body(batch[0])).square().mean()

    with pytest.warns(RuntimeWarning, match="no step called the model"):
        _trained(PartByPart, compile=AOT)


def test_verify_without_a_training_step_is_refused() -> None:
    class Own(Trainer):
        def train_step(self, window: Sequence[Any]) -> None:
            self.zero_grad()
            self.backward(self.model(window[0][0]).sum())
            self.optimizer_step()

    _trained(Own, compile=AOT)
    with pytest.raises(ConfigError, match="which Own has not"):
        _trained(Own, compile=CompileOptions(backend="aot_eager", verify=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_recomputing_training_ends_in_the_bits_of_the_plain_one(precision: str) -> None:
    plain = _trained(precision=precision)
    recomputing = _trained(precision=precision, activation_checkpoint="body")
    assert activation_checkpoint.applied(recomputing.model) == ["body"]
    assert _same_state(plain, recomputing, rtol=0, atol=0)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "reduce_overhead"}, "did you mean 'reduce-overhead'"),
        ({"mode": "max-autotune", "backend": "aot_eager"}, "has no modes"),
        ({"fullgraph": True, "exclude": ("body",)}, "fullgraph forbids graph breaks"),
        ({"on_mismatch": "ignore"}, "neither 'refuse' nor 'fallback'"),
        ({"tolerance": 0.0}, "between 0 and 1"),
        ({"activation_memory_budget": 40.0}, "between 0 and 1; it is a share"),
        ({"activation_memory_budget": 0.5, "backend": "aot_eager"}, "keeps what eager keeps; use inductor"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompileOptions(**settings)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_names_near_modules() -> None:
    with pytest.raises(ConfigError, match=r"compile\.exclude: `boddy` matches no module of Net; near names: `body`"):
        compile.apply(_net(), CompileOptions(exclude=("boddy",)))
