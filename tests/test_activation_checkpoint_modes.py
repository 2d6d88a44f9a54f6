"""Every n-th block, selective, offloaded; random numbers only where they are drawn; in-place writes are seen."""

from __future__ import annotations

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from safetrain import Trainer, activation_checkpoint
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.activation_checkpoint.offload import Offload
from safetrain.config import ActivationCheckpointConfig, Config, LoopConfig
from safetrain.errors import ConfigError
from safetrain.memory import HeapMeter
from safetrain.recording.regions import Clock, RegionWatch
from safetrain.sizes import parse_bytes


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout of both kinds."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop, self.dropout = nn.Dropout(dropout), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.drop(self.mix(attended.transpose(1, 2).flatten(2)))
        return x + F.dropout(self.feed(self.norm2(x)), self.dropout)


class Model(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model(**options: float) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def _gradients(model: nn.Module, *, bf16: bool = False, shape: tuple[int, ...] = (4, 16, 8)) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model(torch.randn(shape)).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _bytes_kept(model: nn.Module) -> int:
    """What stays on the heap between forward and backward."""
    meter = HeapMeter()
    x = torch.randn(8, 64, 8)
    model(x).sum().backward()
    model.zero_grad()
    before = meter.read()
    loss = model(x).sum()
    kept = meter.read() - before
    loss.backward()
    return kept


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["recompute", "selective"])
def test_gradients_are_bit_equal_with_dropout_inside_and_beside_kept_products(mode: str, bf16: bool) -> None:
    plain = _model()
    checkpointed = copy.deepcopy(plain)
    assert activation_checkpoint.apply(checkpointed, CheckpointOptions(mode=mode)) == [f"blocks.{i}" for i in range(4)]
    assert _equal(_gradients(plain, bf16=bf16), _gradients(checkpointed, bf16=bf16))


def test_each_mode_keeps_less_than_the_one_before() -> None:
    kept = {}
    for mode in ("none", "selective", "recompute"):
        model = _model(dropout=0.0)
        if mode != "none":
            activation_checkpoint.apply(model, CheckpointOptions(mode=mode))
        kept[mode] = _bytes_kept(model)
    assert kept["recompute"] < 0.25 * kept["none"]
    assert 1.5 * kept["recompute"] < kept["selective"] < 0.8 * kept["none"]


def test_selective_computes_no_product_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for mode in ("none", "selective", "recompute"):
        model = _model(dropout=0.0)
        if mode != "none":
            activation_checkpoint.apply(model, CheckpointOptions(mode=mode))
        with FlopCounterMode(display=False) as counter:
            _gradients(model)
        flops[mode] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["recompute"]


def test_selective_modules_that_share_weights_work_under_autocast() -> None:
    """A cast that autocast finds in its cache is an operation less, and operations are counted."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = Block(32, 0.1)
            self.stem = nn.Linear(8, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(self.a(self.stem(x))))

    torch.manual_seed(0)
    plain = Shared()
    selective = copy.deepcopy(plain)
    activation_checkpoint.apply(selective, CheckpointOptions(("a",), mode="selective"))
    # Cast once for each use: the gradients of the uses add up in fp32, and not in bf16 as where one cast is shared.
    for expected, actual in zip(_gradients(plain, bf16=True), _gradients(selective, bf16=True), strict=True):
        assert torch.allclose(expected, actual, rtol=0.05, atol=2e-3)


def test_selective_refuses_a_product_that_is_written_over() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), nn.Linear(8, 1))
    activation_checkpoint.apply(model, CheckpointOptions(("0",), mode="selective"))
    with pytest.raises(ConfigError, match=r"keeps the result of aten.addmm.default in Sequential, and aten.relu_"):
        model(torch.randn(4, 8))
    activation_checkpoint.apply(model, CheckpointOptions(("0",)))
    model(torch.randn(4, 8)).sum().backward()  # recomputed as a whole it is right


def test_every_second_block() -> None:
    plain = _model(depth=5)
    model = copy.deepcopy(plain)
    assert activation_checkpoint.apply(model, CheckpointOptions(every=2)) == ["blocks.0", "blocks.2", "blocks.4"]
    assert _equal(_gradients(plain), _gradients(model))


def test_blocks_are_found_inside_containers_and_as_attributes() -> None:
    transformer = nn.Transformer(8, 2, 2, 3, dim_feedforward=8, batch_first=True)
    assert list(activation_checkpoint.find_blocks(transformer)) == [
        *(f"encoder.layers.{i}" for i in range(2)),
        *(f"decoder.layers.{i}" for i in range(3)),
    ]
    towers = nn.Module()
    towers.left, towers.right = Block(8, 0.0), Block(8, 0.0)
    assert list(activation_checkpoint.find_blocks(towers)) == ["left", "right"]
    with pytest.raises(ConfigError, match="Sequential has no repeated blocks to be found; name modules by"):
        activation_checkpoint.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), CheckpointOptions())


# ---- random numbers --------------------------------------------------------------------------------------------------


class SometimesRandom(nn.Module):
    """Draws in some calls only, in a way that no list of modules and no first look can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        if self.calls > 2:
            y = y * torch.rand_like(y)
        return torch.tanh(y)


def test_a_module_that_begins_to_draw_later_is_recomputed_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(SometimesRandom(), nn.Linear(8, 1))
    checkpointed = copy.deepcopy(plain)
    activation_checkpoint.apply(checkpointed, CheckpointOptions(("0",)))
    for _ in range(4):
        assert _equal(_gradients(plain, shape=(4, 8)), _gradients(checkpointed, shape=(4, 8)))
    assert float(torch.rand(())) == float(_after_gradients(plain))


def _after_gradients(model: nn.Module) -> torch.Tensor:
    """The next random number after a step: a recomputation must not have moved the generator."""
    _gradients(model, shape=(4, 8))
    return torch.rand(())


def test_generator_states_are_kept_only_where_numbers_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []
    original = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda state: (restored.append(1), original(state))[1])
    for dropout in (0.0, 0.2):
        model = _model(dropout=dropout)
        activation_checkpoint.apply(model, CheckpointOptions())
        restored.clear()
        _gradients(model)
        assert len(restored) == (2 * len(model.blocks) if dropout else 0)


def test_functional_dropout_is_refused_without_the_random_state() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), 0.5)

    model = nn.Sequential(Functional(), nn.Linear(8, 1))
    activation_checkpoint.apply(model, CheckpointOptions(("0",), preserve_rng_state=False))
    with pytest.raises(ConfigError, match="the forward of Functional draws random numbers"):
        model(torch.randn(4, 8))


# ---- in-place writes -------------------------------------------------------------------------------------------------


class WritesOver(nn.Module):
    """Autograd refuses its backward: exp's result, which exp needs, is written over. Torch's checkpoint is silent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).exp()
        y.mul_(2)
        return y.sin()


@pytest.mark.parametrize("mode", ["recompute", "selective", "offload"])
@pytest.mark.filterwarnings("ignore:activation_checkpoint.mode")
def test_a_saved_value_written_over_is_an_error_as_without_checkpointing(mode: str) -> None:
    model = nn.Sequential(WritesOver(), nn.Linear(8, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(4, 8)).sum().backward()
    activation_checkpoint.apply(model, CheckpointOptions(("0",), mode=mode))
    told = r"test_activation_checkpoint_modes\.py:\d+, is at version 1; expected version 0" if mode == "offload" else (
        r"modified by an inplace operation: \[torch\.FloatTensor \[4, 8\]\], saved inside a checkpointed module"
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=told):
        model(torch.randn(4, 8)).sum().backward()


# ---- offload ---------------------------------------------------------------------------------------------------------


def test_offload_on_the_cpu_says_that_it_moves_nothing_and_changes_no_bit() -> None:
    plain = _model()
    model = copy.deepcopy(plain)
    with pytest.warns(UserWarning, match="offload moves nothing: Model is on the CPU already"):
        activation_checkpoint.apply(model, CheckpointOptions(mode="offload"))
    assert _equal(_gradients(plain), _gradients(model))


def test_a_graph_with_offloaded_values_dies_with_its_loss() -> None:
    """A result that its own node saves must not hold the graph in a cycle."""
    import gc
    import weakref

    block = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    gc.disable()
    try:
        with Offload(block):
            out = block(torch.randn(4, 8))
        dies = weakref.ref(out.untyped_storage())
        del out
        assert dies() is None
    finally:
        gc.enable()


# ---- regions ---------------------------------------------------------------------------------------------------------


def test_what_a_region_leaves_out_is_what_the_heap_gains_when_it_runs_again() -> None:
    model = _model(dropout=0.0)
    activation_checkpoint.apply(model, CheckpointOptions())
    x = torch.randn(16, 64, 8)
    model(x).sum().backward()
    watch = RegionWatch(model, HeapMeter(), Clock(None))
    watch.start()
    model(x).sum().backward()
    watch.stop()
    assert [call.module() for call in watch.calls if call.module] == list(model.blocks)
    for call in watch.calls:
        gained = call.used_after_recompute - call.used_before_recompute
        assert gained == pytest.approx(call.left_out_bytes, rel=0.02)
        assert sum(call.kept.values()) == 16 * 64 * 32 * 4
    assert torch.utils.checkpoint._checkpoint_hook.__name__ == "_checkpoint_hook"


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "auto"}, "mode is auto but there is no budget"),
        ({"budget": "1GB"}, "budget would be ignored with mode: recompute"),
        ({"mode": "auto", "budget": "many"}, "budget: 'many' is no size; write bytes, or such as 24GB"),
        ({"mode": "auto", "budget": 0}, "budget: 0 is no size"),
        ({"mode": "auto", "budget": "1GB", "every": 2}, "every and budget both say"),
        ({"mode": "full"}, "mode: 'full'; it is one of recompute, selective, offload, auto"),
        ({"every": 0}, "every: 0; it is a whole number from 1"),
        ({"preserve_rng_state": "yes"}, "preserve_rng_state: 'yes'; it is true, false or auto"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointOptions(**options)


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"24GB": 24 * 10**9, "512 MiB": 2**29, "1.5 kB": 1500, 4096: 4096, "7700": 7700}
    assert {size: parse_bytes(size) for size in sizes} == sizes


def test_auto_and_compile_exclude_each_other() -> None:
    options = CheckpointOptions(mode="auto", budget="1GB")
    with pytest.raises(ConfigError, match=r"compile and activation_checkpoint\.mode: auto exclude each other"):
        model = _model()
        Trainer(model, torch.optim.SGD(model.parameters()), max_steps=1, activation_checkpoint=options, compile=True)


class LayerDrop(nn.Module):
    """Draws from Python's and NumPy's generators, `quiet` calls after the first."""

    def __init__(self, quiet: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.quiet, self.calls = quiet, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.quiet:
            return torch.tanh(self.linear(x))
        x = x * (1 + np.random.rand())
        return torch.tanh(self.linear(x)) if random.random() < 0.5 else torch.tanh(self.linear(x) ** 2 + x)


def test_python_and_numpy_randomness_is_repeated_in_the_recomputation() -> None:
    plain = nn.Sequential(LayerDrop(), LayerDrop(), nn.Linear(8, 1))
    recomputing = copy.deepcopy(plain)
    activation_checkpoint.apply(recomputing, CheckpointOptions(("0", "1")))
    runs = []
    for model in (plain, recomputing):
        random.seed(0)
        np.random.seed(0)
        gradients = [_gradients(model, shape=(4, 8)) for _ in range(10)]
        runs.append((gradients, random.random(), np.random.rand()))
    for expected, actual in zip(runs[0][0], runs[1][0], strict=True):
        assert _equal(expected, actual)
    assert runs[0][1:] == runs[1][1:]


def test_python_randomness_that_begins_late_is_an_error_where_it_changes_the_recomputation() -> None:
    random.seed(0)
    model = nn.Sequential(LayerDrop(quiet=5), nn.Linear(8, 1))
    activation_checkpoint.apply(model, CheckpointOptions(("0",)))
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        for _ in range(30):
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_the_config_has_the_same_settings_with_the_same_defaults_and_refusals() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(CheckpointOptions)}
    assert {name: field.default for name, field in ActivationCheckpointConfig.model_fields.items()} == defaults
    assert Config(trainer="a:B", loop=LoopConfig(max_steps=1), activation_checkpoint=True).activation_checkpoint
    for wrong, message in (
        ({"mode": "auto"}, "mode: auto needs a budget"),
        ({"budget": "24GB"}, "budget would be ignored with mode: recompute"),
        ({"mode": "auto", "budget": "lots"}, "'lots' is no size"),
        ({"mode": "auto", "budget": "1GB", "every": 3}, "every and budget both say"),
    ):
        with pytest.raises(ValidationError, match=message):
            ActivationCheckpointConfig(**wrong)
    with pytest.raises(ValidationError, match=r"compile and activation_checkpoint\.mode: offload exclude each other"):
        Config(trainer="a:B", loop=LoopConfig(max_steps=1), compile=True, activation_checkpoint={"mode": "offload"})
