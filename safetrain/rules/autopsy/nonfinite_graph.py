"""P211 from the graph of a loss and from the source, where nothing can be run again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from safetrain.findings import Finding, SourceLine
from safetrain.foreign.module_call import ModuleCall
from safetrain.recording.saved import nodes_of
from safetrain.rules.autopsy.callsite import find_call
from safetrain.rules.autopsy.carried import binding_of
from safetrain.rules.autopsy.catalogue import NONFINITE_LOSS
from safetrain.rules.autopsy.failure import names_in
from safetrain.rules.autopsy.first_bad import Origin, beneath_views, find_origin, is_bad
from safetrain.rules.autopsy.nonfinite import (
    FROM_OUTSIDE,
    bad_weights,
    bad_weights_finding,
    call_text,
    remedy_for,
)


def find_nonfinite_loss(
    model: nn.Module, loss: Tensor, *, frame: FrameType | None = None, calls: Sequence[ModuleCall] = ()
) -> Finding | None:
    """P211 from the graph of a loss that has not been differentiated yet, where nothing can be run again. Host syncs.

    What the graph saved tells the operation; its line is looked for in the source: of the module whose call made it,
    where that is one of `calls` (all of this step's), else of the model's classes and of `frame`, the user's loop.
    P206 when weights are to blame. None for a finite loss.
    """
    value = loss.detach()
    if not is_bad(value):
        return None
    weights = bad_weights(model)
    if weights:
        return bad_weights_finding(weights)
    word = "NaN" if bool(torch.isnan(value).any()) else "Inf"
    origin = find_origin(loss)
    if origin is None:
        return None
    name, call = _plain_name(origin.node), next((call for call in calls if call.made(origin.node)), None)
    place, inside = _place_of(origin, loss, model, frame, call)
    if origin.kind == "fed":
        return _fed_finding(name, word, call, place)
    where = f" on line {place.line}: `{place.text}`" if place is not None else ""
    within = f" in {inside}" if inside else ""
    which = f", in {call_text(call)}" if call is not None and len(calls) > 1 else ""
    if origin.kind == "known" and origin.node is beneath_views(loss.grad_fn):
        what = f"nothing that its graph kept is; it began after that, at the latest in {name}"
    else:
        what = f"the first value in its graph that was not finite, as far as they were kept, came from {name}"
    return NONFINITE_LOSS.finding(
        f"the loss is {word}: {what}{within}{where}{which}",
        source=place,
        module=inside,
        op=name,
        cause=f"{name}{within} gave NaN or Inf{_IF_KNOWN[origin.kind]} (inferred from what the graph saved and from "
        "the source, not replayed)",
        fix=remedy_for(name, masked=True),
    )


_IF_KNOWN = {"made": " out of finite values", "known": "; what it was given was not kept"}


def _place_of(
    origin: Origin, loss: Tensor, model: nn.Module, frame: FrameType | None, call: ModuleCall | None
) -> tuple[SourceLine | None, str | None]:
    """(line, class) of an operation: inside the module `call` that made it, else wherever it may be."""
    name, near = _plain_name(origin.node), _neighbours(loss, origin.node)
    module = call.module if call is not None else None
    if module is not None:
        place, inside = find_call(module, None, name, near)
        return place, inside or type(module).__name__
    place, inside = find_call(model, frame, name, near)
    if place is None and origin.node is beneath_views(loss.grad_fn) and frame is not None:
        place = _binding_of_value(frame, loss)
    return place, inside


def _fed_finding(name: str, word: str, call: ModuleCall | None, place: SourceLine | None) -> Finding:
    """The line of the module call that got such a value, else of the operation."""
    place = call.line if call is not None else place
    where = (
        f", in {call_text(call)}," if call is not None else f" on line {place.line}: `{place.text}`" if place else ""
    )
    return NONFINITE_LOSS.finding(
        f"the loss is {word}: {name}{where} was given a value that was NaN or Inf already and that carries no graph: "
        "it came with the batch, or was computed before",
        source=place,
        module=type(call.module).__name__ if call is not None else None,
        op=name,
        cause=f"NaN or Inf in an input of {name} that no operation of this graph made",
        fix=FROM_OUTSIDE,
    )


def _binding_of_value(frame: FrameType, value: Tensor) -> SourceLine | None:
    """Where the user's frame bound the name that holds a tensor."""
    for name, held in names_in(frame).items():
        if held is value:
            return binding_of(frame.f_code.co_filename, name, frame.f_lineno)
    return None


def _plain_name(node: Any) -> str:
    """`softmax` of `SoftmaxBackward0`."""
    name = re.sub(r"Backward\d*$", "", node.name())
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _neighbours(loss: Tensor, node: Any) -> set[str]:
    """Names of the operations just before and after a node."""
    near = {child for child, _ in node.next_functions if child is not None}
    near |= {grandchild for child in near for grandchild, _ in child.next_functions if grandchild is not None}
    near |= {parent for parent in nodes_of(loss.grad_fn) if any(child is node for child, _ in parent.next_functions)}
    return {_plain_name(n) for n in near if not hasattr(n, "variable")}
