"""The catalogue entries of family L, and how its findings name lines."""

from __future__ import annotations

from typing import Any

from safetrain.findings import SourceLine, rule
from safetrain.foreign.events import LoopEvent
from safetrain.source import with_text

MODE_NOT_RESTORED = rule("L501", "mode-not-restored", "warning", "train/eval mode differs after an evaluation")
BATCHNORM_BATCH = rule(
    "L502", "batchnorm-batch", "warning", "batch statistics over one sample, or accumulation with BatchNorm"
)
ACCUMULATION_SCALE = rule("L503", "accumulation-scale", "warning", "several backwards before a step, not normalised")
SHORT_WINDOW = rule("L504", "short-window", "warning", "leftover micro-batches dropped or wrongly weighted")
CHECKPOINT_INPUT = rule(
    "L506", "checkpoint-no-grad-input", "warning", "a reentrant checkpoint whose inputs need no gradient"
)
CHECKPOINT_GRANULARITY = rule("L507", "checkpoint-granularity", "warning", "recomputation costs more than it saves")
RECOMPILES = rule("L508", "recompiles", "warning", "torch.compile keeps recompiling or falls back")
SAME_ORDER = rule("L509", "same-order", "warning", "every epoch replays one order")
RESUME_INCOMPLETE = rule("L510", "resume-incomplete", "warning", "a resumed run misses part of its state")
RECOMPUTE_BUFFERS = rule("L511", "recompute-updates-buffers", "warning", "checkpointing runs BatchNorm's update twice")
TRAIN_IN_EVAL = rule("L512", "train-mode-in-eval", "warning", "evaluation runs with dropout or BatchNorm in train mode")
FROZEN_BUT_MOVING = rule("L513", "frozen-but-moving", "warning", "a frozen module still changes its buffers")
ALIASED_SNAPSHOT = rule("L514", "aliased-snapshot", "warning", "a kept state_dict shares memory with the live model")
CONTEXT_LEAK = rule(
    "L515", "context-leak", "warning", "a hook or callback left grad mode, autocast, modes or freezing changed"
)
REPEATED_BATCH = rule(
    "L516", "repeated-batch", "warning", "each step starts the data anew and trains on the first batch"
)
REMADE_OPTIMIZER = rule("L517", "remade-optimizer", "warning", "each step makes its optimizer anew and loses its state")


def text_of(source: SourceLine | None) -> SourceLine | None:
    return with_text(source) if source is not None else None


def place_of(event: LoopEvent) -> Any:
    return (event.source.file, event.source.line) if event.source is not None else None


def line_of(source: SourceLine | None) -> str:
    return f"line {source.line}" if source is not None else "an unknown line"
