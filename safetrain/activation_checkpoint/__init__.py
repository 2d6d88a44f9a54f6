"""Activation checkpointing: chosen modules keep less between forward and backward, and compute the rest again.

What a module may do (`Mode`): `recompute` keeps its inputs only; `selective` keeps the results of matrix products and
convolutions too, and computes the cheap rest again; `offload` recomputes nothing and moves what it saves to host
memory; `auto` leaves that, module by module, to `safetrain.activation_checkpoint.auto`, within a budget of bytes.
"""

from __future__ import annotations

from safetrain.activation_checkpoint.applying import applied, apply, choose, set_mode, undo
from safetrain.activation_checkpoint.blocks import find_blocks
from safetrain.activation_checkpoint.options import CheckpointOptions, Mode, as_options

__all__ = ["CheckpointOptions", "Mode", "applied", "apply", "as_options", "choose", "find_blocks", "set_mode", "undo"]
