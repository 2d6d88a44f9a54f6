"""Memory that runs out for real (a limit on the address space) is explained: phase, owners, names, what would fit."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from safetrain import CheckpointError, Trainer, memory
from safetrain.rules.memory import find_fragmentation
from safetrain.rules.out_of_memory import find_out_of_memory, is_out_of_memory, requested_bytes

needs_limit = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS and /proc")
needs_glibc = pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here")

SCRIPT = """
import json, resource, sys
import torch
from torch import nn
from safetrain import Trainer

SAMPLES, ROOM, KEEP, FIRST, SETTINGS = {samples}, {room}, {keep}, {first}, {settings}


def limit():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


class Big(Trainer):
    kept = []

    def training_step(self, batch):
        if self.state.step == FIRST:
            limit()
        out = self.model(batch)
        if KEEP:
            self.kept.append(out.detach().repeat(1, 256))
        return out.pow(2).mean()


torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1))
trainer = Big(model, torch.optim.{optimizer}, **{{"max_steps": 400, **SETTINGS}})
try:
    trainer.fit([torch.randn(10, 100)] * FIRST + [torch.randn(SAMPLES, 100)] * 398)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for finding in trainer.report.findings:
    print(finding.to_json())
"""


SGD = "SGD(model.parameters(), 0.01)"


def run_out(
    *, samples: int, room: int, keep: bool = False, optimizer: str = SGD, first: int = 2, **settings: Any
) -> list[dict[str, Any]]:
    """Findings of a training that has `room` bytes of address space left from its third step on."""
    script = SCRIPT.format(samples=samples, room=room, keep=keep, optimizer=optimizer, first=first, settings=settings)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@needs_limit
@needs_glibc
def test_a_batch_too_big_is_explained_with_the_module_and_a_smaller_micro_batch() -> None:
    (finding,) = run_out(samples=8000, room=50_000_000)
    assert (finding["code"], finding["severity"], finding["first_step"]) == ("M404", "error", 3)
    assert finding["message"].startswith("out of memory in forward of ")
    assert "32.0 MB more did not fit beside" in finding["message"]
    assert "parameters 4.4 MB" in finding["message"]
    told = re.search(r"micro-batches of (\d+) instead of 8000: 8000 are forecast to need", finding["fix"])
    assert told is not None and 500 < int(told[1]) <= 4000
    assert not run_out(samples=8000, room=50_000_000, max_steps=6, micro_batch_size=int(told[1]))


@needs_limit
@needs_glibc
def test_a_leak_that_ate_the_memory_is_named_as_the_cause() -> None:
    leak, end = run_out(samples=500, room=90_000_000, keep=True)
    assert (leak["code"], end["code"]) == ("M402", "M404")
    assert leak["first_step"] < end["first_step"]
    assert "kept" in end["cause"]
    assert "stop the growth first (M402)" in end["fix"]


def test_the_allocators_words_are_understood() -> None:
    cpu = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 128000000 bytes."
    )
    cuda = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 24 GiB"
    )
    assert (requested_bytes(cpu), requested_bytes(cuda)) == (128_000_000, 5 << 29)
    assert is_out_of_memory(cpu) and is_out_of_memory(cuda) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("element 0 of tensors does not require grad"))
    assert not find_out_of_memory(ValueError("no"), nn.Linear(1, 1), {}, used_bytes=0)


def test_the_optimizers_step_gets_advice_about_the_optimizer() -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    Greedy.step.__code__ = Greedy.step.__code__.replace(co_filename=str(Path(torch.optim.__file__).with_name("sgd.py")))
    model = nn.Linear(4, 4)
    optimizer = Greedy(model.parameters(), 0.1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        optimizer.step()
    (finding,) = find_out_of_memory(raised.value, model, {"main": optimizer}, used_bytes=10**9)
    assert finding.message.startswith("out of memory in the optimizer's step: 21.0 MB more")
    assert "fused=True" in finding.fix


# ---------------------------------------------------------------- fragmentation


def books(reserved: float, peak: float, *, retries: int = 0, pieces: float = 0.0) -> dict[str, float]:
    """What CUDA's allocator says, in GB."""
    return {
        "reserved_bytes.all.peak": int(reserved * 1e9),
        "allocated_bytes.all.peak": int(peak * 1e9),
        "num_alloc_retries": retries,
        "inactive_split_bytes.all.current": int(pieces * 1e9),
    }


def test_a_fragmented_cache_is_told_with_the_shapes_and_the_setting() -> None:
    shapes = {((8, length),) for length in range(100, 120)}
    (finding,) = find_fragmentation(books(20, 9, retries=3, pieces=8), shapes)
    assert finding.code == "M403"
    assert "holds 20.0 GB for a peak of 9.0 GB" in finding.message
    assert "20 shapes: [8, 100..119]" in finding.message
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.fix and "pad batches" in finding.fix


def test_a_setting_that_is_on_already_is_not_recommended() -> None:
    settings = "max_split_size_mb:64,expandable_segments:True"
    (finding,) = find_fragmentation(books(20, 9, retries=3, pieces=8), settings=settings)
    assert "expandable" not in finding.fix


def test_shapes_that_differ_in_kind_are_shown_one_by_one() -> None:
    shapes = {((8, 3),), ((8, 3, 2),), ((9, 4),)}
    (finding,) = find_fragmentation(books(20, 9, retries=3), shapes)
    assert "3 shapes: [8, 3], [8, 3, 2], [9, 4], …" in finding.message


@pytest.mark.parametrize(
    "stats",
    [{}, books(10, 9.5, retries=1), books(0.3, 0.1, pieces=0.2), books(20, 9)],
    ids=["no CUDA", "nearly full", "small", "a cache that nobody needed since"],
)
def test_a_cache_that_is_merely_big_is_no_fault(stats: dict[str, float]) -> None:
    assert not find_fragmentation(stats)


@needs_limit
@needs_glibc
def test_the_first_forward_of_a_run_is_explained_too() -> None:
    (finding,) = run_out(samples=8000, room=50_000_000, first=0)
    assert (finding["code"], finding["first_step"]) == ("M404", 1)
    assert re.search(r"instead of 8000: 8000 (are forecast to need|save 64.0 MB for backward)", finding["fix"])


class Keeps(Trainer):
    """Something of every owner, when memory runs out in the second layer."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.model[0](batch)
        doubled = hidden * 2
        if self.state.step == 1 and not isinstance(hidden, FakeTensor):  # those take no memory
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000000 bytes.")
        return self.model[1](torch.tanh(doubled)).mean()


def test_the_report_names_owners_lines_and_what_user_code_kept() -> None:
    model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 1))
    trainer = Keeps(model, torch.optim.Adam(model.parameters()), max_steps=2)
    trainer.outputs = [torch.zeros(500, 1000)]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        trainer.fit([torch.randn(2000, 100) for _ in range(2)])
    (finding,) = (f for f in trainer.report.findings if f.code == "M404")
    line = Keeps.training_step.__code__.co_firstlineno + 2
    assert finding.message.startswith("out of memory in forward: 1.0 MB more did not fit beside ")
    assert "parameters 408.0 kB, optimizer state 816.0 kB, batch 800.0 kB, saved for backward" in finding.message
    assert f"`doubled` [2000, 1000] in training_step() (test_out_of_memory.py:{line}) 8.0 MB" in finding.message
    assert re.search(r"Kept by: .*outputs.* 2.0 MB", finding.message)
    assert finding.message in "".join(raised.value.__notes__)
    assert trainer.__dict__.keys() >= {"outputs"}


def test_an_error_raised_for_want_of_memory_is_one() -> None:
    with pytest.raises(CheckpointError) as raised:
        try:
            raise MemoryError
        except MemoryError as error:
            raise CheckpointError("could not write") from error
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


class DecidesOnValues(Keeps):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().training_step(batch)
        return loss if loss < 1e9 else loss * 0


def test_a_step_that_cannot_be_forecast_is_advised_by_what_it_saves() -> None:
    for kind, reason in ((Keeps, "500 are forecast to need"), (DecidesOnValues, "instead of 500 (in a Trainer")):
        model = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 1))
        trainer = kind(model, torch.optim.Adam(model.parameters()), max_steps=2)
        with pytest.raises(RuntimeError, match="allocate memory"):
            trainer.fit([torch.randn(500, 100) for _ in range(2)])
        (finding,) = (f for f in trainer.report.findings if f.code == "M404")
        assert finding.fix is not None and "instead of 500" in finding.fix and reason in finding.fix
        assert all(not isinstance(p, FakeTensor) and p.grad is None for p in model.parameters())
