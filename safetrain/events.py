"""What a loop written by somebody else was seen to do: one record per call that matters, in order.

The Trainer owns these calls and makes them in the right order, so only drivers that watch foreign loops
(`doctor`, `watch`) record them. Judges of loop faults read a window of records and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from safetrain.findings import SourceLine

EventKind = Literal[
    "zero_grad",
    "backward",
    "clip",
    "scale",
    "unscale",
    "scaler_step",
    "scaler_update",
    "optimizer_step",
    "scheduler_step",
    "train_mode",
    "eval_mode",
    "epoch_start",
]


@dataclass(slots=True)
class LoopEvent:
    """One call of the user's loop.

    `step` is the running optimizer step, counted from 1. `data` holds plain values by kind, never a tensor that a
    graph hangs on:

    - zero_grad: `optimizer` (id or None), `params` (tuple of parameter ids that had a gradient), `set_to_none`
    - backward: `retain_graph`, `create_graph`, `scaled` (loss came from `scaler.scale`), `divided_by` (number or None),
      `batch_size` (of the module's last input, or None), `grad_mode_eval` (model was in eval mode), `loss_node` (name)
    - clip: `function`, `params` (ids given), `num_grads` (how many had one), `scaled` (gradients still scaled),
      `in_window` (a further backward came before the step; filled when the window closes)
    - scale / unscale / scaler_update: `scaler` (id), `optimizer` (id), `scale` (float, when known without a sync)
    - scaler_step: `scaler`, `optimizer`, `taken`
    - optimizer_step: `optimizer`, `taken`, `params` (ids whose gradient was used)
    - scheduler_step: `scheduler` (class name), `optimizer`
    - train_mode / eval_mode: `module` (class name), `root` (it is a model, not an inner module)
    - epoch_start: `length` (batches, or None), `order` (hash of the sampler's first indices, or None)
    """

    kind: EventKind
    step: int
    source: SourceLine | None = None
    data: dict[str, Any] = field(default_factory=dict)
