"""`safetrain.watch`: the guards on a loop of your own, for as long as a `with` block lasts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TextIO

from torch import nn
from torch.optim import Optimizer

from safetrain.errors import GuardError
from safetrain.findings import Finding
from safetrain.foreign.watching import Watch
from safetrain.terminal import Terminal


class watch:
    """Watch a training loop, and say at once what is wrong with it.

        with safetrain.watch(model, optimizer) as w:
            for x, y in loader:
                ...
                optimizer.step()
                w.step()

    Args:
        model, optimizer: what trains, if it was made before the block; later ones are found by themselves.
        rules: codes and families to watch for (`"G101"`, `"G"`, `"-G104"`); default: all.
        strict: `step` raises `GuardError` for warnings too, not for errors alone.
        stream: where findings are shown as they come; None for nowhere. Default: stderr.

    Everything is put back when the block ends. Nothing the loop computes changes.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | Iterable[Optimizer] = (),
        *,
        rules: Sequence[str] = (),
        strict: bool = False,
        stream: TextIO | None = sys.stderr,
    ) -> None:
        show: Callable[[Finding], None] | None = Terminal(stream).show if stream is not None else None
        self._rules, self._show, self._strict = rules, show, strict
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._watch: Watch | None = None
        self._told = 0
        self.trouble: list[str] = []
        """Tracebacks of guards that failed: a fault of this package, never of the loop."""

    def __enter__(self) -> watch:
        self._watch = Watch(self._rules, show=self._show, on_trouble=self.trouble.append)
        self._watch.observer.know(self._model, self._optimizers)
        self._model, self._optimizers = None, []  # held weakly from here on
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._watch is not None
        if error is not None:
            self._watch.observer.failed(error)
        self._watch.finish()

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._watch.report.findings if self._watch is not None else []

    def step(self) -> list[Finding]:
        """The step is over. Returns what was found since the last call.

        Optional: without it, a step ends where the next one begins.

        Raises:
            GuardError: there is an error among them (with `strict`: a warning).
        """
        assert self._watch is not None, "step() belongs into the `with` block"
        self._watch.observer.step_done()
        return self.raise_if_failed()

    def raise_if_failed(self) -> list[Finding]:
        """What was found since the last call, without saying that the step is over.

        Raises:
            GuardError: there is an error among it (with `strict`: a warning).
        """
        new = self.findings[self._told :]
        self._told = len(self.findings)
        bad = [f for f in new if f.severity == "error" or (self._strict and f.severity == "warning")]
        if bad:
            raise GuardError("\n".join(f"{f.code} {f.name}: {f.message}" for f in bad), list(bad))
        return new
