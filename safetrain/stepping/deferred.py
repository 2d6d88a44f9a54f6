"""Reading a flag of the device without making the host wait for the step that sets it."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredFlag:
    """A yes/no that a step leaves on its device, read when it has long been decided.

    On the CPU it can be read at once. On CUDA it is copied to pinned memory behind the kernels that set it, and
    `take`, called a step later, waits only for that copy: the next forward and backward are queued already, so the
    device never idles. Other accelerators read at once, which is a host sync.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._flag: Tensor | None = None
        self.step = 0
        """The step that left it."""
        if self._on_cuda:
            self._host = torch.zeros((), pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: object) -> DeferredFlag:
        """A flag of its own that reads at once: events cannot be copied, and a copied Trainer only forecasts."""
        return DeferredFlag(torch.device("cpu"))

    @property
    def waits(self) -> bool:
        """Reading it now would make the host wait, so read it a step later."""
        return self._on_cuda

    def put(self, flag: Tensor, step: int) -> None:
        """Remember a scalar tensor of a step: non-zero means yes."""
        self.step = step
        if self._on_cuda:
            self._host.copy_(flag.reshape(()), non_blocking=True)
            self._copied.record()
            flag = self._host
        self._flag = flag

    def take(self) -> bool | None:
        """The flag last put, or None when it was taken already."""
        flag, self._flag = self._flag, None
        if flag is None:
            return None
        if self._on_cuda:
            self._copied.synchronize()
        return bool(flag.tolist())  # of a CPU tensor: a memory read, not a device sync
