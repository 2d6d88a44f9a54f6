"""Autograd-graph instruments: death tokens, walks, pinned bytes, who holds what, and which line stored it.

They measure and judge nothing; see `safetrain.rules.graph` for the judges.
"""

from safetrain.graph.holders import Holder, Holders, Survey, climb, find_holders, graph_owners, reaches
from safetrain.graph.marks import Census, Mark, Marks, grad_fn_of, mark_of, put_mark
from safetrain.graph.storing import StoreTrace, files_of, storing_line
from safetrain.graph.walk import (
    Pinned,
    SavedFreed,
    Walk,
    format_bytes,
    is_freed,
    marks_reached,
    owned_tensors,
    pinned,
    reachable_parameters,
    saved_tensors,
    storage_key,
    walk,
)
from safetrain.graph.windows import bound_of, only_rebinds

__all__ = [
    "Census",
    "Holder",
    "Holders",
    "Mark",
    "Marks",
    "Pinned",
    "SavedFreed",
    "StoreTrace",
    "Survey",
    "Walk",
    "bound_of",
    "climb",
    "files_of",
    "find_holders",
    "format_bytes",
    "grad_fn_of",
    "graph_owners",
    "is_freed",
    "mark_of",
    "marks_reached",
    "only_rebinds",
    "owned_tensors",
    "pinned",
    "put_mark",
    "reachable_parameters",
    "reaches",
    "saved_tensors",
    "storage_key",
    "storing_line",
    "walk",
]
