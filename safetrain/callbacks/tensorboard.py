"""Rows, gradient norms by layer, the config and the findings, for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain.callbacks.base import Callback
from safetrain.callbacks.layer_health import LayerHealth
from safetrain.callbacks.memory import OWNERS
from safetrain.callbacks.run_dir import unwritable, writable_run_dir

if TYPE_CHECKING:
    from safetrain.state import RunState

LAYOUT = {
    "run": {
        "loss": ["Multiline", ["(train|val)/loss$"]],
        "learning rate": ["Multiline", ["^lr/", "train/lr"]],
    },
    "memory": {
        "MB by phase": ["Multiline", ["memory/(start|after_.*|evaluation|peak)_mb"]],
        "MB by owner after forward: each line with all below it": ["Multiline", ["memory_stacked/.*"]],
        "growth, kB a step": ["Multiline", ["memory/growth_kb_per_step"]],
        "reserved but not in use, as a share": ["Multiline", ["memory/fragmentation"]],
        "allocation retries; splits after memory ran out": [
            "Multiline",
            ["memory/alloc_retries", "memory/oom_splits"],
        ],
    },
    "gradients": {
        "total norm before clipping": ["Multiline", ["train/grad_norm"]],
        "norm by layer": ["Multiline", ["grad_norm/.*"]],
        "update over weight by layer": ["Multiline", ["update_ratio/.*"]],
        "dead and exploding layers": ["Multiline", ["gradients/(dead|exploding)_layers"]],
    },
}
"""The custom scalars page: what belongs on one chart."""


class TensorBoard(Callback):
    """Writes events into the run directory: every value of every row, and how each layer fares.

    A layer is a module that owns parameters. `grad_norm/<module>` is the norm over its gradients, unscaled and before
    clipping; `update_ratio/<module>` how far the step moved its weights, relative to their norm, over up to 4,096
    entries of each; `gradients/dead_layers` and `gradients/exploding_layers` count those without any gradient, and
    those with one that is not finite or a hundred times what was usual. All on logging steps only, read with the row.
    `memory_stacked/…` are the owners' bytes of the row, each with all before it: TensorBoard has no stacked chart.
    The resolved `config.yaml` and the `findings.jsonl` of the run directory are shown as text. A resumed run hides what
    was written beyond the step it resumed from.

    Args:
        layers: whether to log these numbers by layer.
        folder: where to write; default: the run directory.

    Raises:
        ConfigError: at fit start, when there is no run directory or it cannot be written.
    """

    def __init__(self, *, layers: bool = True, folder: str | Path | None = None) -> None:
        self._layers = LayerHealth() if layers else None
        self._folder = Path(folder) if folder is not None else None
        self._writer: Any = None
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
        if state.is_logging_step and self._layers is not None:
            self._layers.before_step(state)

    def on_step_end(self, state: RunState) -> None:
        """Queue how far the weights moved."""
        if state.is_logging_step and self._layers is not None:
            self._layers.after_step()

    def on_log(self, state: RunState) -> None:
        """Write the row, and read and write the numbers by layer."""
        if self._writer is None:
            return
        layers = self._layers.read() if self._layers is not None else {}
        for key, value in (*state.row.items(), *layers.items(), *_stacked(state.row).items()):
            self._writer.add_scalar(key, value, state.step)
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
        if self._layers is not None:
            self._layers.clear()


def _stacked(row: Mapping[str, float]) -> dict[str, float]:
    """The owners' bytes, each with all before it; numbered, so that they are listed from the lowest line up."""
    total, told = 0.0, {}
    for number, owner in enumerate(OWNERS, 1):
        value = row.get(f"memory/by_owner/{owner}_mb")
        if value is not None:
            total += value
            told[f"memory_stacked/{number}_{'plus_' if number > 1 else ''}{owner}_mb"] = total
    return told


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
