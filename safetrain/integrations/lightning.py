"""`GuardCallback` for Lightning: `Trainer(callbacks=[GuardCallback()])`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from safetrain.bare_loop import watch
from safetrain.findings import Finding

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class GuardCallback(Callback):  # type: ignore[misc]
    """Watches `fit` and shows at once what is wrong with it. Changes nothing that the trainer computes.

    Args:
        rules: codes and families to watch for; default: all.
        strict: a warning stops the run with `GuardError`, as an error does.
        stream: where findings are shown; None for nowhere.
    """

    def __init__(self, *, rules: Sequence[str] = (), strict: bool = False, stream: TextIO | None = sys.stderr) -> None:
        self._options: dict[str, Any] = {"rules": rules, "strict": strict, "stream": stream}
        self._watch: watch | None = None
        self.findings: list[Finding] = []
        """Of the last `fit`, also while it runs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch, once the strategy has made the optimizers."""
        self._end(None)
        self._watch = watch(pl_module, list(trainer.optimizers), **self._options).__enter__()
        self.findings = self._watch.findings

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the run for what must stop it. The window itself is closed by the next batch."""
        if self._watch is not None:
            self._watch.raise_if_failed()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain what ends the run."""
        self._end(exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.__exit__(type(error) if error is not None else None, error, None)
