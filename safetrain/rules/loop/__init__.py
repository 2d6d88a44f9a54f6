"""Family L: the loop's own order and bookkeeping, judged from what a loop was seen to do.

The judges are plain functions and small readers of events; `safetrain.guarding.loop` and the drivers of foreign loops
feed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safetrain.findings import Finding
from safetrain.foreign.events import LoopEvent
from safetrain.rules.loop.catalogue import (
    ACCUMULATION_SCALE,
    ALIASED_SNAPSHOT,
    BATCHNORM_BATCH,
    CHECKPOINT_GRANULARITY,
    CHECKPOINT_INPUT,
    CONTEXT_LEAK,
    FROZEN_BUT_MOVING,
    MODE_NOT_RESTORED,
    RECOMPILES,
    RECOMPUTE_BUFFERS,
    RESUME_INCOMPLETE,
    SAME_ORDER,
    SHORT_WINDOW,
    TRAIN_IN_EVAL,
)
from safetrain.rules.loop.compiled import (
    CompileCounts,
    find_compile_trouble,
    read_compile_counts,
)
from safetrain.rules.loop.divisor import WrongDivisor
from safetrain.rules.loop.granularity import find_checkpoint_granularity
from safetrain.rules.loop.modes import (
    ModeLeft,
    TrainModeInEval,
    find_changed_modes,
    find_parts_in_eval,
    find_train_mode_in_eval,
    mode_dependent,
    mode_finding,
    part_finding,
)
from safetrain.rules.loop.norms import (
    BufferMarks,
    find_batchnorm_batch,
    find_frozen_but_moving,
    mark_buffers,
    recompute_finding,
    reentrant_finding,
)
from safetrain.rules.loop.order import (
    SameOrder,
)
from safetrain.rules.loop.remade import (
    RemadeOptimizer,
    RepeatedBatch,
)
from safetrain.rules.loop.resume import (
    Alias,
    ResumeGaps,
    aliased_finding,
    find_aliased_snapshots,
    line_of_snapshot,
)
from safetrain.rules.loop.weights import (
    LossWeight,
    loss_weight,
)
from safetrain.rules.loop.windows import (
    ClearedTooEarly,
    EvalBackward,
    UnclearedByHand,
    Windows,
    uneven_finding,
)

__all__ = [
    "ACCUMULATION_SCALE",
    "ALIASED_SNAPSHOT",
    "BATCHNORM_BATCH",
    "CHECKPOINT_GRANULARITY",
    "CHECKPOINT_INPUT",
    "CONTEXT_LEAK",
    "FROZEN_BUT_MOVING",
    "MODE_NOT_RESTORED",
    "RECOMPILES",
    "RECOMPUTE_BUFFERS",
    "RESUME_INCOMPLETE",
    "SAME_ORDER",
    "SHORT_WINDOW",
    "TRAIN_IN_EVAL",
    "Alias",
    "BufferMarks",
    "ClearedTooEarly",
    "CompileCounts",
    "EvalBackward",
    "LossWeight",
    "ModeLeft",
    "RemadeOptimizer",
    "RepeatedBatch",
    "ResumeGaps",
    "SameOrder",
    "TrainModeInEval",
    "UnclearedByHand",
    "Windows",
    "WrongDivisor",
    "aliased_finding",
    "find_aliased_snapshots",
    "find_batchnorm_batch",
    "find_changed_modes",
    "find_checkpoint_granularity",
    "find_compile_trouble",
    "find_frozen_but_moving",
    "find_loop_faults",
    "find_parts_in_eval",
    "find_train_mode_in_eval",
    "line_of_snapshot",
    "loop_judges",
    "loss_weight",
    "mark_buffers",
    "mode_dependent",
    "mode_finding",
    "part_finding",
    "read_compile_counts",
    "recompute_finding",
    "reentrant_finding",
    "uneven_finding",
]


def find_loop_faults(events: Iterable[LoopEvent]) -> list[Finding]:
    """L501, L503, L504, L509, L510, L512, L516, L517, P209 and P213 in a record of a loop, one finding a fault."""
    judges = loop_judges()
    return [finding for event in events for judge in judges for finding in judge.see(event)]


def loop_judges() -> list[Any]:
    """Fresh judges of a foreign loop: feed each event in order to `see(event)`, which yields findings."""
    return [
        ModeLeft(),
        Windows(),
        WrongDivisor(),
        EvalBackward(),
        UnclearedByHand(),
        ClearedTooEarly(),
        SameOrder(),
        RepeatedBatch(),
        RemadeOptimizer(),
        ResumeGaps(),
        TrainModeInEval(),
    ]
