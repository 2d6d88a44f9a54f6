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
    "optimizer_made",
    "optimizer_step",
    "scheduler_step",
    "train_mode",
    "eval_mode",
    "epoch_start",
    "epoch_end",
    "batch",
    "state_loaded",
    "checkpoint_saved",
    "checkpoint_loaded",
    "rng_restored",
    "run_end",
]


@dataclass(slots=True)
class LoopEvent:
    """One call of the user's loop.

    `step` is the running optimizer step, counted from 1. `data` holds plain values by kind, never a tensor that a
    graph hangs on. Ids of scalers and optimizers are `id()`s; a disabled scaler makes no records; a missing value is
    None or left out, and the judge that needs it stays silent:

    - zero_grad: `optimizer` (id or None for a module's), `params` (tuple of parameter ids that had a gradient),
      `set_to_none`
    - backward (recorded after it ran): `retain_graph`, `create_graph`, `scaled` (loss came from `scaler.scale`),
      `divided_by` (number or None), `batch_size` (of the module's last input, or None), `grad_mode_eval` (a root module
      with parameters in this graph was in eval mode at its last call), `loss_node` (name),
      `weight` (a `rules.loop.LossWeight` of the loss, or None), `uncleared` (after a step by hand: names of what it
      wrote to and left the gradient of)
    - clip: `function`, `params` (ids given), `num_grads` (how many had one), `scaled` (gradients still scaled),
      `in_window` (a further backward came before the step; filled when the window closes)
    - scale / unscale / scaler_update: `scaler` (id), `optimizer` (id), `scale` (float, when known without a sync)
    - scaler_step: `scaler`, `optimizer`, `taken`
    - optimizer_made: `optimizer`, `name` (class), `again` (an earlier one was made for all of its parameters),
      `keeps_state` (from step to step: momentum, averages)
    - optimizer_step: `optimizer`, `taken`, `params` (ids whose gradient was used), `filled` (gradients were cleared
      after the last backward, and yet some are not zero: the loop put them there itself)
    - scheduler_step: `scheduler` (class name), `optimizer`, `position` (`last_epoch` before the call). Never the call
      that a scheduler's own constructor makes
    - train_mode / eval_mode: `module` (class name), `module_id`, `root` (it is a model, not an inner module), `no_grad`
      (called while gradients were off)
    - epoch_start: `loader` (id), `length` (batches, or None), `order` (hash of the sampler's first indices, or None;
      it may be filled in while the epoch runs), `sampler` (class name of the sampler that has `set_epoch`, else of the
      sampler), `shuffles` (order is meant to differ: not a SequentialSampler, `shuffle` not False), `set_epoch` (it has
      that method), `sampler_epoch` (its `epoch`, or None)
    - epoch_end: `loader`; `batches`; `forwards`, `backwards` (during the pass); `root_training` (root modules were in
      train mode all through it), `active` (tuple of (name, class) of its Dropout and BatchNorm modules in train mode)
    - batch: `loader`
    - state_loaded: `target` ("model", "optimizer", "scheduler", "scaler"), `name` (class), `id`
    - checkpoint_saved / checkpoint_loaded: `parts` (what the top-level values are: a set of "model", "optimizer",
      "scheduler", "scaler", "rng", "epoch"), `keys`
    - rng_restored: `which` ("torch", "numpy", "python", "cuda")
    - run_end: nothing more will come; `step` is 1 where no step was taken
    """

    kind: EventKind
    step: int
    source: SourceLine | None = None
    data: dict[str, Any] = field(default_factory=dict)
