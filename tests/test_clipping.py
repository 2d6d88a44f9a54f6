"""Clipping gives torch's bits, whatever the gradients are, and reads the norm only when asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from safetrain.stepping.clipping import clip_by_norm, clip_groups_by_norm

Grads = list[Tensor | None]


def params_with(grads: Grads) -> list[nn.Parameter]:
    """Parameters whose gradients are copies of `grads`."""
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(3 if grad is None else grad.shape, dtype=None if grad is None else grad.dtype))
        param.grad = None if grad is None else grad.clone()
        params.append(param)
    return params


def seeded(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


def sparse() -> Tensor:
    values = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 0.5]])
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), values, (4, 2), check_invariants=True)


KINDS: dict[str, Grads] = {
    "plain": [*seeded((4, 3), (3,))],
    "some without": [None, *seeded((4, 3), (3,)), None],
    "float64": [*seeded((4, 3), (3,), dtype=torch.float64)],
    "bfloat16": [*seeded((4, 3), (3,), dtype=torch.bfloat16)],
    "two types": [*seeded((4, 3)), *seeded((3,), dtype=torch.float64)],
    "scalar": [torch.tensor(3.0), *seeded((4, 3))],
    "nan": [torch.tensor([1.0, math.nan]), torch.ones(2)],
    "infinite": [torch.tensor([1.0, math.inf]), torch.ones(2)],
}


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.985, 0.995, 1.0, 1.000001, 1.02, 50.0])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_gradients_are_those_of_torch(kind: str, share: float, norm_type: float, read: bool) -> None:
    mine, torchs = params_with(KINDS[kind]), params_with(KINDS[kind])
    whole = clip_grad_norm_(params_with(KINDS[kind]), 1.0, norm_type)
    limit = share * (whole.item() if math.isfinite(whole.item()) else 1.0)
    norm, number = clip_by_norm([mine[:1], mine[1:]], norm_type, limit, read=read)
    expected = clip_grad_norm_(torchs, limit, norm_type)
    assert norm is not None and norm.dtype == expected.dtype and torch.equal(norm.nan_to_num(), expected.nan_to_num())
    for a, b in zip(mine, torchs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad.nan_to_num(7.0), b.grad.nan_to_num(7.0))
    assert (number is None) == (not read)
    if number is not None:
        assert number == expected.item() or (math.isnan(number) and math.isnan(expected.item()))


def test_sparse_gradients_are_clipped_by_the_norm_of_their_summed_values() -> None:
    params = params_with([None])
    table = nn.Parameter(torch.zeros(4, 2))
    table.grad = sparse()
    norm, _ = clip_by_norm([[*params, table]], 2.0, 1.0, read=True)
    dense = sparse().to_dense()
    assert norm is not None and norm.item() == pytest.approx(dense.norm().item())
    assert torch.allclose(table.grad.to_dense(), dense / (norm + 1e-6))


def test_gradients_with_a_graph_are_clipped_without_adding_to_it() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    assert weight.grad.requires_grad
    norm, _ = clip_by_norm([[weight]], 2.0, None, read=True)
    assert norm is not None and not norm.requires_grad


def test_groups_are_clipped_each_by_itself() -> None:
    mine, torchs = params_with(KINDS["plain"]), params_with(KINDS["plain"])
    empty = params_with([None])
    norm, number = clip_groups_by_norm([mine[:1], empty, mine[1:]], 2.0, 0.5, read=True)
    norms = [clip_grad_norm_(torchs[:1], 0.5), clip_grad_norm_(torchs[1:], 0.5)]
    assert norm is not None and number == norm.item() == torch.stack(norms).norm().item()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, torchs, strict=True))  # type: ignore[arg-type]


def test_nothing_to_clip_is_no_norm() -> None:
    params = params_with([None, None])
    assert clip_by_norm([params], 2.0, 1.0, read=True) == (None, None)
    assert clip_groups_by_norm([params, params], 2.0, 1.0, read=True) == (None, None)


def test_gradients_inside_the_limit_are_left_alone_once_the_norm_was_read(monkeypatch: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *args: calls.append(args))
    params = params_with(KINDS["plain"])
    clip_by_norm([params], 2.0, 1e6, read=True)
    assert not calls
    clip_by_norm([params], 2.0, 1e6, read=False)
    assert len(calls) == 1
