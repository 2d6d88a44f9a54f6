"""Every byte of a step has an owner, and the owners add up to what the meter says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain import Trainer, memory
from safetrain.accounting.ownership import OwnershipProbe, StepMemory
from safetrain.accounting.page import page
from safetrain.accounting.report import table
from safetrain.cli import EXIT_REFUSED, main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
needs_glibc = pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here")
FLOAT = 4


class Regression(Trainer):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).pow(2).mean()


LINE = f"test_ownership.py:{Regression.training_step.__code__.co_firstlineno + 1}"


def watch(model: nn.Module, *, batch: int = 32, callbacks: tuple[Any, ...] = (), probe: bool = True) -> StepMemory:
    """The third step of a small regression under AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watcher = OwnershipProbe(3)
    listeners = [watcher, *callbacks] if probe else list(callbacks)
    trainer = Regression(model, optimizer, max_steps=3, guards="off", callbacks=listeners)
    generator = torch.Generator().manual_seed(1)
    trainer.fit(torch.randn(batch, 8, generator=generator) for _ in range(3))
    return watcher.result


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def test_each_owner_has_exactly_its_bytes() -> None:
    step = watch(make_model())
    params = (8 * 64 + 64 + 64 + 1) * FLOAT
    forward = step.owners_at(step.phases["forward"])
    assert forward["parameters"] == params
    assert forward["optimizer state"] == 2 * params + 4 * FLOAT  # two moments and a step count for each of four
    assert forward["inputs"] == 32 * 8 * FLOAT
    assert forward["gradients"] == 0
    # tanh's output, and the output that `pow` saves; the first Linear's own output died with its use.
    assert forward["activations"] == (32 * 64 + 32) * FLOAT
    assert step.owners_at(step.phases["backward"])["gradients"] == params
    assert step.owners_at(step.phases["optimizer"])["activations"] == 0


def test_activations_are_told_by_module_and_by_line() -> None:
    step = watch(make_model())
    by_module, by_line = step.activations_by("module"), step.activations_by("line")
    assert by_module["1 (Tanh)"] == 32 * 64 * FLOAT
    assert by_module["2 (Linear)"] == 32 * FLOAT
    assert list(by_line) == [f"{LINE}: return self.model(batch).pow(2).mean()"]


def test_what_the_user_keeps_is_retained_and_its_holder_named() -> None:
    model = make_model()
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    step = watch(model)
    after = step.owners_at(step.clock)
    assert after["retained"] >= 3 * 32 * 64 * FLOAT
    assert any("`kept`" in block.holder for block in step.alive_at(step.clock) if block.owner == "retained")


def test_a_checkpointed_module_saves_its_input_only_and_recomputes() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    class Net(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inside, self.block, self.recompute = nn.Linear(8, 64), Block(), recompute

        def forward(self, x: Tensor) -> Tensor:
            x = self.inside(x)
            return checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)

    plain, recomputed = watch(Net(False)), watch(Net(True))
    saved = [m.owners_at(m.phases["forward"])["activations"] for m in (plain, recomputed)]
    assert saved[0] - saved[1] == 32 * 256 * FLOAT
    during = max(recomputed.owners_at(clock)["activations"] for clock in range(recomputed.clock))
    assert during >= saved[0]


def test_watching_changes_no_bit() -> None:
    watched, plain = make_model(), make_model()
    watch(watched)
    watch(plain, probe=False)
    for mine, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@needs_glibc
def test_the_peak_is_where_the_meter_sees_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
    step = watch(model, batch=2048)
    assert step.phase_of(step.peak_clock) == "backward"
    assert step.peak_block.module in ("2 (Linear)", "3 (Tanh)", "4 (Linear)")
    assert step.accounted == pytest.approx(1, abs=0.005)
    assert step.accounted_growth() == pytest.approx(1, abs=0.02)


@needs_glibc
@pytest.mark.slow
@pytest.mark.parametrize("config", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_owners_add_up_on_each_example(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "safetrain", "memory", str(config), "--html", str(tmp_path / "memory.html")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=EXAMPLES.parent, timeout=120).stdout
    share = float(re.search(r"owners add up to ([\d.]+)% of it", told)[1])
    assert abs(share - 100) < 2


def test_the_table_and_the_page_say_the_same() -> None:
    step = watch(make_model(), batch=512)
    text, web = table(step), page(step, "Memory of a <test>")
    for wanted in ("parameters", "1 (Tanh)", "biggest tensors", "in backward", LINE):
        assert wanted in text
        assert wanted.replace("biggest", "Biggest") in web
    assert "Memory of a &lt;test&gt;" in web
    assert not re.search(r"(src|href)=|https?:", web)  # it needs nothing from elsewhere
    assert web.count("<polygon") == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_snapshot_without_cuda_is_refused_in_plain_words(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, target = str(EXAMPLES / "configs" / "digits.yaml"), tmp_path / "snapshot.pickle"
    assert main(["memory", config, "--snapshot", str(target), f"device={device}"]) == EXIT_REFUSED
    told = capsys.readouterr().err
    if device == "cuda":
        assert "device: 'cuda' cannot be used here" in told
    else:
        assert (
            "--snapshot records what CUDA's allocator does, and this run is on cpu; run it where there is a GPU" in told
        )
    assert not target.exists()


def test_the_command_refuses_a_step_that_never_comes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "safetrain", "memory", str(EXAMPLES / "configs" / "digits.yaml"), "--step", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ended.returncode == 2
    assert "counted from 1" in ended.stderr
