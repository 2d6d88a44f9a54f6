"""Meters for memory, and the timeline of a step: how many bytes are in use, on which device, at which phase.

A meter answers one question: how many bytes are in use now. Readings never synchronise with the device: allocators
keep their books on the host.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import torch

Device = torch.device | str | int | None
Phase = Literal["start", "after_forward", "after_backward", "after_step", "evaluation"]


class Meter(Protocol):
    """Bytes in use on one device. Compare readings only while `name` stays the same: a meter may fall back."""

    name: str
    """What is counted, in words."""

    def read(self) -> int:
        """Bytes in use now. No host sync."""

    def peak(self) -> int | None:
        """Highest use since the process began (or since its owner reset it), None where nobody keeps a record."""

    def reserved(self) -> int | None:
        """Bytes the allocator holds, used or not, None where it does not tell."""


def meter_for(device: Device = None) -> Meter:
    """The best meter for `device`: its allocator's books, or for the CPU the C heap, or resident memory.

    Costs of a reading: CPU heap 0.6 µs, resident memory 1.5 µs, CUDA some tens of µs (the allocator makes a table).
    """
    device = torch.device("cpu" if device is None else device)
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type in ("cpu", "meta"):
        return HeapMeter() if heap_is_readable() else RssMeter()
    return AcceleratorMeter(device) if _accelerator_readers(device) else RssMeter()


class CudaMeter:
    """Bytes of live tensors on a CUDA device, as PyTorch's caching allocator counts them."""

    def __init__(self, device: Device = "cuda") -> None:
        self._device = torch.device(device if device is not None else "cuda")
        self.name = f"{self._device} allocated"

    def read(self) -> int:
        """Bytes of live tensors; 0 before CUDA is first used."""
        return self._bytes("allocated_bytes", "current")

    def peak(self) -> int | None:
        """Highest `read` since the process began or the peak was last reset by someone."""
        return self._bytes("allocated_bytes", "peak")

    def reserved(self) -> int | None:
        """Bytes taken from the driver."""
        return self._bytes("reserved_bytes", "current")

    def _bytes(self, kind: str, which: str) -> int:
        # The nested table: `memory_allocated()` flattens and sorts all of it for one number.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats[kind]["all"][which]) if stats else 0


class AcceleratorMeter:
    """Bytes of live tensors on another accelerator: Apple's, Intel's, or one that `torch.accelerator` knows."""

    def __init__(self, device: Device) -> None:
        self._device = torch.device("cpu" if device is None else device)
        readers = _accelerator_readers(self._device)
        if readers is None:
            raise OSError(f"torch does not tell how much memory {self._device} uses; use RssMeter")
        self._read, self._peak, self._reserved = readers
        self.name = f"{self._device} allocated"

    def read(self) -> int:
        """Bytes of live tensors."""
        return self._read()

    def peak(self) -> int | None:
        """Highest `read`, where the backend records it."""
        return self._peak() if self._peak else None

    def reserved(self) -> int | None:
        """Bytes taken from the driver, where the backend tells."""
        return self._reserved() if self._reserved else None


Reader = Callable[[], int]


def _accelerator_readers(device: torch.device) -> tuple[Reader, Reader | None, Reader | None] | None:
    """Functions for bytes allocated, peak and reserved; None when this torch tells nothing about the device."""
    if device.type == "mps":
        # Its allocator is not one that torch.accelerator can ask, and it records no peak.
        return torch.mps.current_allocated_memory, None, torch.mps.driver_allocated_memory
    backend = torch.xpu if device.type == "xpu" else getattr(torch, "accelerator", None)
    if not hasattr(backend, "memory_allocated"):
        return None

    def reader(name: str) -> Reader:
        function = getattr(backend, name)
        return lambda: int(function(device))

    return reader("memory_allocated"), reader("max_memory_allocated"), reader("memory_reserved")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """The C library's own account of its heap, None where it has none (not glibc, or older than 2.33)."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return None
    function.restype, function.argtypes = _Mallinfo2, ()
    return function  # type: ignore[no-any-return]


def heap_is_readable() -> bool:
    """Whether the C heap's account exists and follows allocations (with jemalloc or tcmalloc preloaded it rests)."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return False
    size = 1 << 22
    before = mallinfo2()
    block = np.empty(size, np.uint8)  # which nobody writes to: the pages are never there
    after = mallinfo2()
    seen = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
    return block.nbytes == size and bool(seen >= size // 2)


class HeapMeter:
    """Bytes in use on the C heap of this process (glibc): CPU tensors and everything else that was allocated.

    Exact to a few KB. On a badly fragmented heap the account gets slow (a tenth of a second has been seen), so each
    call is timed; after three slow ones in a row the meter warns once and reads resident memory from then on, under
    another `name`. Who reads rarely can bear a higher `slow_ns` and keeps the exact account for longer.
    """

    SLOW_NS = 500_000

    def __init__(self, slow_ns: int = SLOW_NS) -> None:
        self.SLOW_NS = slow_ns
        mallinfo2 = _mallinfo2()
        if mallinfo2 is None:
            raise OSError("this C library has no mallinfo2; use RssMeter")
        self.name = "CPU heap"
        self._mallinfo2 = mallinfo2
        self._slow_in_a_row = 0
        self._rss: RssMeter | None = None

    def read(self) -> int:
        """Bytes in use on the heap, or resident bytes once the meter has fallen back."""
        if self._rss is not None:
            return self._rss.read()
        start = time.perf_counter_ns()
        info = self._mallinfo2()
        if time.perf_counter_ns() - start > self.SLOW_NS:
            self._note_slow_call()
        elif self._slow_in_a_row:
            self._slow_in_a_row = 0
        return int(info.uordblks + info.hblkhd)

    def peak(self) -> int | None:
        """None: the C heap records no peak."""
        return None

    def reserved(self) -> int | None:
        """Bytes the heap has taken from the system."""
        info = self._mallinfo2()
        return int(info.arena + info.hblkhd)

    def _note_slow_call(self) -> None:
        # One slow call may be the scheduler's doing; three in a row are the heap's.
        self._slow_in_a_row += 1
        if self._slow_in_a_row >= 3:
            self._rss = RssMeter()
            self.name = self._rss.name
            warnings.warn(
                f"reading the CPU heap takes over {self.SLOW_NS / 1e6:.1f} ms on this fragmented heap: "
                "memory is reported as resident bytes from here on, which are coarser and never fall quickly",
                stacklevel=3,
            )


class RssMeter:
    """Resident bytes of this process. Coarse: freed memory stays resident until the allocator gives it back.

    Without procfs (macOS, BSD) only the highest value so far is known, and `name` says so.
    """

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        self._fd: int | None = None
        self._pid = 0
        self._has_procfs = os.path.exists("/proc/self/statm")
        self.name = "resident memory" if self._has_procfs else "resident memory (highest so far)"

    def read(self) -> int:
        """Resident bytes now; without procfs the highest so far."""
        if not self._has_procfs:
            return self.peak() or 0
        # An open file reads six times faster than opening it again. It speaks of the process that opened it, so a
        # forked child (a loader worker) opens its own.
        if self._fd is None or self._pid != os.getpid():
            self._close()
            self._fd, self._pid = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
        return int(os.pread(self._fd, 64, 0).split(None, 2)[1]) * self._page

    def peak(self) -> int | None:
        """Highest resident bytes of the process, None where the system does not tell."""
        try:
            import resource
        except ImportError:  # Windows
            return None
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024

    def reserved(self) -> int | None:
        """None: residency is what is held."""
        return None

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self._close()


class PythonMeter:
    """Python's small objects, which its own allocator keeps apart from the C heap: numbers, short strings, instances.

    An estimate: the number of objects, each taken as 48 bytes (they have 16 to 512). A reading costs 40 µs for a
    million of them.
    """

    OBJECT_BYTES = 48

    def __init__(self) -> None:
        self.name = "Python's small objects"

    def read(self) -> int:
        """Estimated bytes now; 0 where Python does not count (`PYTHONMALLOC=malloc`)."""
        return sys.getallocatedblocks() * self.OBJECT_BYTES

    def peak(self) -> int | None:
        """None: nobody keeps a record."""
        return None

    def reserved(self) -> int | None:
        """None: the allocator does not tell."""
        return None


class PhaseMemory:
    """The timeline of one step: bytes at each phase, and the peak of the run.

    A window of several micro-batches visits `after_forward` more than once; the highest reading counts.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.readings: dict[Phase, int] = {}
        """Bytes at each phase recorded since `restart`, in the order first met."""
        self._highest = 0
        self._meter_name = meter.name

    def restart(self) -> None:
        """Forget the readings of the last step; the peak stays."""
        self.readings.clear()

    def record(self, phase: Phase) -> int:
        """Read the meter at `phase`; returns the bytes."""
        used = self.meter.read()
        if self.meter.name != self._meter_name:
            # Fallen back: bytes counted in two ways must not stand side by side.
            self.readings.clear()
            self._highest, self._meter_name = 0, self.meter.name
        self._highest = max(self._highest, used)
        self.readings[phase] = max(used, self.readings.get(phase, 0))
        return used

    def peak(self) -> int:
        """Highest bytes so far: the allocator's own record where there is one, which includes the time before the run.

        Elsewhere (CPU heap) the highest reading, which cannot see what came and went between two phases.
        """
        return max(self.meter.peak() or 0, self._highest)
