"""The total norm of gradients, and clipping to it: torch's numbers bit for bit, cheaper where gradients are plain.

A step needs the norm three times: the gate reads it, clipping scales by it, the log shows it. So it is taken once; and
where the gate has read it on the host already, gradients inside the limit are not multiplied by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

_EPSILON = 1e-6  # torch's, in the denominator of the factor
_SURELY_INSIDE = 0.99
"""Below this share of the limit the factor is 1 in any precision that gradients come in."""


def clip_by_norm(
    groups: Sequence[Sequence[Tensor]], norm_type: float, limit: float | None, *, read: bool
) -> tuple[Tensor | None, float | None]:
    """Total p-norm of the gradients of all `groups` of parameters; scales them to `limit` in place, if there is one.

    Returns the norm before clipping: a scalar on the device (None where no parameter has a gradient), and the same
    as a number where `read` asks for it, which is one host sync.
    """
    grads = [grad for params in groups for p in params if (grad := p.grad) is not None]
    if not grads:
        return None, None
    plain = _are_plain(grads)
    norm = _norm_of_plain(grads, norm_type) if plain else _norm_of_any(grads, norm_type)
    number = float(norm.item()) if read else None
    if limit is not None and not (number is not None and number + _EPSILON < _SURELY_INSIDE * limit):
        if plain:
            torch._foreach_mul_(grads, torch.clamp(limit / (norm + _EPSILON), max=1.0))
        else:
            clip_grads_with_norm_([p for params in groups for p in params], limit, norm)
    return norm, number


def clip_groups_by_norm(
    groups: Sequence[Sequence[Tensor]], norm_type: float, limit: float | None, *, read: bool
) -> tuple[Tensor | None, float | None]:
    """The same for each group by itself; returns the norm over all of them."""
    norms = [clip_by_norm([params], norm_type, limit, read=False)[0] for params in groups]
    found = [norm for norm in norms if norm is not None]
    if not found:
        return None, None
    total = get_total_norm(found, norm_type)
    return total, float(total.item()) if read else None


def _norm_of_any(grads: list[Tensor], norm_type: float) -> Tensor:
    """The p-norm over all entries of gradients of any kind: scalar, on the device of the first."""
    try:
        return get_total_norm(grads, norm_type)
    except NotImplementedError:  # a sparse one among them: its values are all that counts
        return get_total_norm([g.coalesce().values() if g.is_sparse else g for g in grads], norm_type)


def _norm_of_plain(grads: list[Tensor], norm_type: float) -> Tensor:
    """What `get_total_norm` computes for them, without its sorting by device and type."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)
    return norm


def _are_plain(grads: list[Tensor]) -> bool:
    """Dense tensors of one type on one device that has foreach kernels, and that carry no graph."""
    device, dtype, layout = grads[0].device, grads[0].dtype, torch.strided
    if device.type not in ("cpu", "cuda"):
        return False
    for grad in grads:
        if type(grad) is not Tensor or grad.dtype is not dtype or grad.layout is not layout or grad.requires_grad:
            return False
        if grad.device != device:
            return False
    return True
