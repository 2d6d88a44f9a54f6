"""Meters count what is really there, cheaply, and say when they count something else."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch

from safetrain import memory
from safetrain.memory import AcceleratorMeter, CudaMeter, HeapMeter, PhaseMemory, PythonMeter, RssMeter, meter_for

MB = 1_000_000
needs_glibc = pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here")
needs_procfs = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no procfs here")


@needs_glibc
def test_heap_meter_sees_a_tensor_come_and_go_to_a_few_kilobytes():
    meter = meter_for("cpu")
    assert isinstance(meter, HeapMeter)
    before = meter.read()
    block = torch.empty(10 * MB)
    assert meter.read() - before == pytest.approx(40 * MB, abs=16_384)
    del block
    assert meter.read() - before == pytest.approx(0, abs=16_384)


@needs_glibc
def test_heap_meter_sees_many_small_tensors_too():
    gc.collect()  # garbage of other tests must not go while this one measures
    meter = HeapMeter()
    before = meter.read()
    blocks = [torch.zeros(256) for _ in range(2000)]
    grown = meter.read() - before
    assert len(blocks) * 1024 <= grown <= len(blocks) * 2048


@needs_glibc
def test_a_reading_of_the_heap_costs_at_most_two_microseconds():
    """In a process of its own: the C library walks its free blocks, and a test run leaves many."""
    code = (
        "import timeit; from safetrain.memory import HeapMeter; read = HeapMeter().read; "
        "print(min(timeit.repeat(read, number=2000, repeat=20)) / 2000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) <= 2e-6


@needs_glibc
def test_heap_meter_reserves_at_least_what_is_in_use():
    meter = HeapMeter()
    assert meter.reserved() >= meter.read() > 0
    assert meter.peak() is None


@needs_glibc
def test_heap_meter_falls_back_to_resident_memory_when_the_heap_is_slow_to_read():
    meter = HeapMeter()
    meter.SLOW_NS = -1  # every call is too slow now
    meter.read()
    meter.read()
    assert meter.name == "CPU heap"
    with pytest.warns(UserWarning, match=r"resident bytes"):
        meter.read()
    assert meter.name == "resident memory"
    assert meter.read() == pytest.approx(RssMeter().read(), rel=0.05)


@needs_glibc
def test_one_slow_reading_does_not_make_the_meter_fall_back():
    meter = HeapMeter()
    for _ in range(5):
        meter.SLOW_NS = -1
        meter.read()
        meter.SLOW_NS = 10**9
        meter.read()
    assert meter.name == "CPU heap"


@needs_procfs
def test_resident_meter_sees_touched_pages():
    meter = RssMeter()
    before = meter.read()
    with mmap.mmap(-1, 64 * MB) as pages:  # fresh pages: a block of the heap may be resident already
        pages.write(b"x" * (64 * MB))
        assert meter.read() - before == pytest.approx(64 * MB, rel=0.1)
        assert meter.peak() >= 64 * MB


@needs_procfs
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_resident_meter_in_a_forked_worker_reads_the_worker():
    meter = RssMeter()
    meter.read()  # opened in the parent
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        before = meter.read()
        with mmap.mmap(-1, 64 * MB) as pages:
            pages.write(b"x" * (64 * MB))
            os.write(write_end, str(meter.read() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    grown_in_child = int(os.read(read_end, 64))
    os.close(read_end)
    os.close(write_end)
    assert grown_in_child == pytest.approx(64 * MB, rel=0.1)


def test_without_procfs_the_resident_meter_says_that_it_knows_only_the_highest(monkeypatch):
    monkeypatch.setattr(memory.os.path, "exists", lambda path: False)
    meter = RssMeter()
    assert "highest" in meter.name
    assert meter.read() == meter.peak() > 0


def test_a_heap_that_cannot_be_read_is_measured_by_residency(monkeypatch):
    monkeypatch.setattr(memory, "_mallinfo2", lambda: None)
    assert isinstance(meter_for("cpu"), RssMeter)
    with pytest.raises(OSError, match="RssMeter"):
        HeapMeter()


def test_a_preloaded_allocator_that_leaves_the_c_heap_at_rest_is_noticed(monkeypatch):
    still = memory._Mallinfo2()
    monkeypatch.setattr(memory, "_mallinfo2", lambda: lambda: still)
    assert not memory.heap_is_readable()


def test_each_device_gets_the_meter_of_its_allocator():
    assert isinstance(meter_for("cuda"), CudaMeter)
    assert isinstance(meter_for("mps"), AcceleratorMeter)
    assert meter_for(None).name == meter_for("cpu").name
    assert "cuda:0" in meter_for("cuda:0").name


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is in use here")
def test_cuda_meter_reads_nothing_before_cuda_is_used():
    meter = CudaMeter()
    assert (meter.read(), meter.peak(), meter.reserved()) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_meter_agrees_with_torch():
    meter = CudaMeter()
    block = torch.empty(10 * MB, device="cuda")
    assert meter.read() == torch.cuda.memory_allocated()
    assert meter.reserved() == torch.cuda.memory_reserved()
    del block
    assert meter.peak() == torch.cuda.max_memory_allocated() >= 40 * MB


def test_python_meter_counts_small_objects_that_the_c_heap_does_not_show():
    meter = PythonMeter()
    before = meter.read()
    kept = [index + 0.5 for index in range(100_000)]
    assert meter.read() - before == pytest.approx(len(kept) * meter.OBJECT_BYTES, rel=0.05)
    assert meter.peak() is None and meter.reserved() is None


class Scripted:
    """A meter that gives the readings it was told."""

    name = "scripted"

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def read(self) -> int:
        return self.values.pop(0)

    def peak(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return None


def test_phases_keep_the_highest_of_several_micro_batches_and_the_peak_of_the_run():
    phases = PhaseMemory(Scripted(10, 50, 70, 40, 5))
    phases.record("start")
    phases.record("after_forward")
    phases.record("after_forward")
    phases.record("after_forward")
    assert phases.readings == {"start": 10, "after_forward": 70}
    phases.restart()
    phases.record("start")
    assert phases.readings == {"start": 5}
    assert phases.peak() == 70


def test_bytes_counted_in_two_ways_never_stand_side_by_side():
    meter = Scripted(900, 10, 20)
    phases = PhaseMemory(meter)
    phases.record("start")
    meter.name = "another"
    phases.record("after_forward")
    assert phases.readings == {"after_forward": 10}
    assert phases.peak() == 10
