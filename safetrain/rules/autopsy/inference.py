"""G127: an inference tensor met autograd. Which one, and which line keeps it."""

from __future__ import annotations

import ast

from torch import Tensor

from safetrain.findings import Finding
from safetrain.rules.autopsy.carried import attribute_store, binding_of
from safetrain.rules.autopsy.catalogue import INFERENCE_TENSOR
from safetrain.rules.autopsy.failure import Failure, Named, named_tensors
from safetrain.source import syntax


def explain_inference_tensor(failure: Failure) -> Finding:
    """The finding for “Inference tensors cannot be saved for backward” and its relatives."""
    held = _inference_tensors(failure)
    if not held:
        return INFERENCE_TENSOR.finding(
            "a tensor made under torch.inference_mode() was used in a computation that records gradients",
            source=failure.source,
            cause="it was made inside inference_mode and kept; no name in sight holds it",
            fix="make it under torch.no_grad() instead, or clone it outside inference_mode before use",
        )
    item = held[0]
    stored = attribute_store(item.owner, item.name) if item.owner is not None else None
    if stored is None and item.frame is not None:
        stored = binding_of(item.frame.f_code.co_filename, item.name, item.line)
    where = f" (stored on line {stored.line}: `{stored.text}`)" if stored is not None else ""
    used = failure.source
    return INFERENCE_TENSOR.finding(
        f"{item.label} is an inference tensor{where} and is used where gradients are recorded"
        + (f", on line {used.line}: `{used.text}`" if used else ""),
        source=stored or used,
        holder=item.label,
        module=type(item.owner).__name__ if item.owner is not None else None,
        cause=f"`{item.name}` was made while torch.inference_mode() was on (an evaluation filled a cache), and "
        "training reads it",
        fix="evaluate under torch.no_grad(), or fill the cache with `.clone()` outside inference_mode, or clear it "
        "after evaluation",
    )


def _inference_tensors(failure: Failure) -> list[Named]:
    """Names that hold inference tensors; those on the failed line first, attributes before locals."""
    found = [n for n in named_tensors(failure) if isinstance(n.tensor, Tensor) and n.tensor.is_inference()]
    on_line = _names_on_line(failure)
    return sorted(found, key=lambda n: (n.name not in on_line, n.owner is None))


def _names_on_line(failure: Failure) -> set[str]:
    source = failure.source
    statement = syntax.statement_at(source.file, source.line) if source is not None else None
    nodes = list(ast.walk(statement)) if statement is not None else []
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}
