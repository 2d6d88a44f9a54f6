"""Rows, gradient norms by layer, the config and the findings, for TensorBoard."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from safetrain.callbacks.base import Callback
from safetrain.callbacks.run_dir import unwritable, writable_run_dir

if TYPE_CHECKING:
    from safetrain.state import RunState

LAYOUT = {
    "run": {
        "loss": ["Multiline", ["(train|val)/loss$"]],
        "learning rate": ["Multiline", ["^lr/", "train/lr"]],
    },
    "memory": {"MB by phase": ["Multiline", ["memory/(start|after_.*|evaluation|peak)_mb"]]},
    "gradients": {
        "total norm before clipping": ["Multiline", ["train/grad_norm"]],
        "norm by layer": ["Multiline", ["grad_norm/.*"]],
    },
}
"""The custom scalars page: what belongs on one chart."""


class TensorBoard(Callback):
    """Writes events into the run directory: every value of every row, and the gradient norm of each layer.

    A layer is a module that owns parameters; `grad_norm/<module>` is the norm over its own, unscaled and before
    clipping. Norms are taken on logging steps only and read with the row, in one transfer.
    The resolved `config.yaml` and the `findings.jsonl` of the run directory are shown as text. A resumed run hides what
    was written beyond the step it resumed from.

    Args:
        layers: whether to log the norm of each layer.
        folder: where to write; default: the run directory.

    Raises:
        ConfigError: at fit start, when there is no run directory or it cannot be written.
    """

    def __init__(self, *, layers: bool = True, folder: str | Path | None = None) -> None:
        self._layers = layers
        self._folder = Path(folder) if folder is not None else None
        self._writer: Any = None
        self._norms: dict[tuple[str, ...], tuple[list[str], list[Tensor]]] = {}
        self._findings_seen = -1

    def on_fit_start(self, state: RunState) -> None:
        """Open the event file and write the config."""
        self._close()
        folder = writable_run_dir(state, "TensorBoard", self._folder)
        # Imported here: it takes longer than a small run, and only users of this callback should wait for it.
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(
                str(folder), purge_step=state.step + 1 if state.step else 0, max_queue=1000, flush_secs=10
            )
        except OSError as error:
            raise unwritable(folder, "TensorBoard", error) from error
        self._findings_seen = -1
        self._writer.add_custom_scalars(LAYOUT)
        config = state.run_dir / "config.yaml" if state.run_dir is not None else None
        if config is not None and config.is_file():
            self._writer.add_text("config", _as_code(config.read_text(encoding="utf-8")), state.step)

    def on_backward_end(self, state: RunState) -> None:
        """Queue the norms of the gradients about to be used; nothing is read here."""
        if state.is_logging_step and self._layers:
            self._norms[state.stepping] = _gradient_norms(state)

    def on_log(self, state: RunState) -> None:
        """Write the row, and read and write the norms."""
        if self._writer is None:
            return
        for key, value in state.row.items():
            self._writer.add_scalar(key, value, state.step)
        for layer, norm in _by_layer(self._norms).items():
            self._writer.add_scalar(f"grad_norm/{layer}", norm, state.step)
        self._norms.clear()
        self._write_findings(state)

    def on_eval_end(self, state: RunState) -> None:
        """Let a reader see what is there."""
        if self._writer is not None:
            self._writer.flush()

    def on_exception(self, state: RunState) -> None:
        """What led here must be on disk."""
        if self._writer is not None:
            self._writer.flush()

    def on_fit_end(self, state: RunState) -> None:
        """Write the last findings and close the file."""
        if self._writer is not None:
            self._write_findings(state)
        self._close()

    def _write_findings(self, state: RunState) -> None:
        """The findings so far as text, when they have changed."""
        path = state.run_dir / "findings.jsonl" if state.run_dir is not None else None
        if path is None or not path.is_file() or (stamp := path.stat().st_mtime_ns) == self._findings_seen:
            return
        self._findings_seen = stamp
        lines = path.read_text(encoding="utf-8").splitlines()
        self._writer.add_text("findings", _as_table(lines) if lines else "none", state.step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._norms.clear()


@torch.no_grad()
def _gradient_norms(state: RunState) -> tuple[list[str], list[Tensor]]:
    """Names of the parameters about to be stepped, and their gradients' 2-norms: one float32 vector a device."""
    stepping = state.stepping or tuple(state.optimizers)
    chosen = {id(p) for name in stepping for group in state.optimizers[name].param_groups for p in group["params"]}
    by_device: dict[torch.device, tuple[list[str], list[Tensor]]] = defaultdict(lambda: ([], []))
    for name, param in state.model.named_parameters():
        grad = param.grad
        if grad is not None and id(param) in chosen:
            names, grads = by_device[grad.device]
            names.append(name)
            grads.append(grad.coalesce().values() if grad.is_sparse else grad)
    names = [name for group, _ in by_device.values() for name in group]
    return names, [torch.stack(torch._foreach_norm(grads, 2, torch.float32)) for _, grads in by_device.values()]


def _by_layer(norms: dict[tuple[str, ...], tuple[list[str], list[Tensor]]]) -> dict[str, float]:
    """Norms read (one host sync a device) and joined over the parameters of each module."""
    squares: dict[str, float] = defaultdict(float)
    for names, vectors in norms.values():
        values = [value for vector in vectors for value in vector.tolist()]
        for name, value in zip(names, values, strict=True):
            squares[name.rpartition(".")[0] or name] += value * value
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def _as_code(text: str) -> str:
    """Markdown shows indented lines as they are."""
    return "\n".join("    " + line for line in text.splitlines())


def _as_table(lines: list[str]) -> str:
    """Findings as a Markdown table."""
    table = ["| code | severity | steps | count | message |", "|---|---|---|---|---|"]
    for line in lines:
        f = json.loads(line)
        message = str(f["message"]).replace("|", "\\|").replace("\n", " ")
        steps = f"{f['first_step']}–{f['last_step']}"
        table.append(f"| {f['code']} | {f['severity']} | {steps} | {f['count']} | {message} |")
    return "\n".join(table)
