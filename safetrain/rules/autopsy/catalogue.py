"""Catalogue entries of the autopsy family: errors explained, and wrong results that raise none."""

from __future__ import annotations

from safetrain.findings import rule

BACKWARD_TWICE = rule("G121", "backward-twice", "error", "explains “backward through the graph a second time”")
INPLACE_MODIFIED = rule(
    "G122",
    "inplace-modified",
    "error",
    "explains “modified by an inplace operation”: where it was saved, where and by which op it was changed",
)
NO_GRAPH = rule(
    "G123",
    "loss-without-graph",
    "error",
    "explains “element 0 of tensors does not require grad”: where the path was cut",
)
NON_SCALAR = rule(
    "G124", "non-scalar-loss", "error", "explains “grad can be implicitly created only for scalar outputs”"
)
LEAF_INPLACE = rule(
    "G125",
    "leaf-inplace",
    "error",
    "explains “a leaf Variable that requires grad is being used in an in-place operation”",
)
RECOMPUTE_MISMATCH = rule(
    "G126",
    "recompute-mismatch",
    "error",
    "a recomputed activation differs from the original: another shape or number of tensors, or other random numbers",
)
INFERENCE_TENSOR = rule("G127", "inference-tensor", "error", "explains inference tensors meeting autograd")
SILENT_WRITE = rule(
    "G128",
    "silent-write",
    "warning",
    "a saved tensor was changed behind autograd's back between forward and backward: wrong gradients, no error",
)
INPLACE_ALIAS = rule(
    "G129",
    "inplace-alias",
    "warning",
    "an in-place op changed a value that the same forward reads again: another function than written, no error",
)
NONFINITE_GRAD = rule(
    "P206", "nonfinite-grad", "warning", "Inf or NaN in a gradient: the first parameter and the op that made it"
)
NONFINITE_LOSS = rule(
    "P211", "nonfinite-loss", "warning", "the loss is Inf or NaN: the first module and op whose result was"
)
