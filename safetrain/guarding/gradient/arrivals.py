"""Does backward bring a parameter a gradient that is cleared before any guard sees it?"""

from __future__ import annotations

import functools

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Arrivals:
    """Listens for the gradients of single parameters, for one step: `watch` before its backward, `stop` after it."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._arrived: set[str] = set()

    @property
    def listens(self) -> bool:
        """Whether there is something to `stop`."""
        return bool(self._handles)

    def watch(self, name: str, tensor: Tensor | None) -> None:
        """Note it when backward brings this parameter something."""
        if tensor is not None and tensor.requires_grad:
            note = functools.partial(_note, self._arrived, name)
            self._handles.append(tensor.register_hook(note))  # type: ignore[no-untyped-call]

    def stop(self) -> set[str]:
        """Listen no longer. The names of those that got one since the last call."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        arrived = set(self._arrived)
        self._arrived.clear()
        return arrived


def _note(arrived: set[str], name: str, grad: Tensor | None) -> None:
    if grad is not None:
        arrived.add(name)
