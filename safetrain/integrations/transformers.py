"""`GuardCallback` for the Hugging Face Trainer: `Trainer(..., callbacks=[GuardCallback()])`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from transformers import TrainerCallback

from safetrain.bare_loop import watch
from safetrain.findings import Finding


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """Watches `train` and shows at once what is wrong with it. Changes nothing that the trainer computes.

    That trainer tells its callbacks nothing of exceptions: after a `train` that raised, call `close()`.

    Args:
        rules: codes and families to watch for; default: all.
        strict: a warning stops the run with `GuardError`, as an error does.
        stream: where findings are shown; None for nowhere.
    """

    def __init__(self, *, rules: Sequence[str] = (), strict: bool = False, stream: TextIO | None = sys.stderr) -> None:
        self._options: dict[str, Any] = {"rules": rules, "strict": strict, "stream": stream}
        self._watch: watch | None = None
        self.findings: list[Finding] = []
        """Of the last `train`, also while it runs."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Begin to watch."""
        self.close()
        self._watch = watch(model, optimizer if optimizer is not None else (), **self._options).__enter__()
        self.findings = self._watch.findings

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the run for what must stop it. The window itself is closed by the next batch."""
        if self._watch is not None:
            self._watch.raise_if_failed()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching now. Needed only after a `train` that raised."""
        ended, self._watch = self._watch, None
        if ended is not None:
            ended.__exit__(None, None, None)
