"""Steps that a script takes by hand, without an optimizer: seen by what they do to parameters and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

_LOOKS = 8
"""Steps in which uncleared gradients are looked for: who never clears them does so from the start."""


class HandSteps:
    """`remember` after each backward; `taken` says whether the script has stepped since."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[Tensor], int, int | None, int]] = []
        self._uncleared: list[weakref.ref[Tensor]] | None = None
        self._looks_left = _LOOKS

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Note versions of parameters and gradients. No host sync."""
        self._before = [
            (weakref.ref(p), p._version, id(p.grad) if p.grad is not None else None, _version(p.grad))
            for p in parameters
            if p.requires_grad
        ]

    def taken(self) -> bool:
        """Whether a parameter was written to or replaced, or its gradient dropped or zeroed. Forgets it then.

        A write through `.data` does not show by itself; the clearing of gradients that follows does.
        """
        for ref, version, grad, grad_version in self._before:
            p = ref()
            if (
                p is None
                or p._version != version
                or (id(p.grad) if p.grad is not None else None) != grad
                or _version(p.grad) != grad_version
            ):
                self._uncleared = self._written_and_uncleared() if self._looks_left else None
                self._before = []
                return True
        return False

    def take_uncleared(self) -> list[Tensor] | None:
        """What a step wrote to while its gradient stayed as backward left it. Told once for each of the first steps."""
        refs, self._uncleared = self._uncleared, None
        return [tensor for ref in refs if (tensor := ref()) is not None] if refs is not None else None

    def _written_and_uncleared(self) -> list[weakref.ref[Tensor]]:
        self._looks_left -= 1
        return [
            ref
            for ref, version, grad, grad_version in self._before
            if (p := ref()) is not None
            and p._version != version
            and grad is not None
            and id(p.grad) == grad
            and _version(p.grad) == grad_version
        ]


def _version(grad: Tensor | None) -> int:
    return grad._version if grad is not None else 0
