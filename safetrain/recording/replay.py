"""Run something again and leave the run as if it had not happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from safetrain import rng
from safetrain.versions import set_version

_NOT_PLAIN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within the block the model may be run and differentiated; afterwards nothing of it shows.

    Put back: generators, gradients, buffers and parameters (values, and `_version` where something was written),
    train/eval modes, grad mode, and what each module keeps in plain attributes (a hidden state, a cache). Not put back:
    what user code did elsewhere, such as a list it appended to. Costs a copy of the model's tensors for its duration.
    """
    tensors = [
        t for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided and t.device.type != "meta"
    ]
    with torch.no_grad():
        copies = [(t, None if t.is_inference() else t._version, t.detach().clone()) for t in tensors]
    gradients = [(p, p.grad) for p in model.parameters()]
    modules = [(m, m.training, plain_attributes(m), dict(m._buffers)) for m in model.modules()]
    grad_mode = torch.is_grad_enabled()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with rng.preserved():
            yield
    finally:
        torch.set_grad_enabled(grad_mode)
        for module, training, plain, buffers in modules:
            module.training = training
            module._buffers.update(buffers)
            restore_plain_attributes(module, plain)
        for tensor, version, copy in copies:
            if version is None or tensor._version != version or _changed_uncounted(tensor, copy):
                _put_back(tensor, version, copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_PLAIN}


def restore_plain_attributes(module: nn.Module, plain: dict[str, Any]) -> None:
    now = vars(module)
    for name in [n for n in now if n not in plain and n not in _NOT_PLAIN]:
        del now[name]
    now.update(plain)


def _changed_uncounted(tensor: Tensor, copy: Tensor) -> bool:
    """BatchNorm's kernels move running statistics without counting it as a write; `.data` writes hide as well."""
    return not torch.equal(tensor.detach(), copy)


def _put_back(tensor: Tensor, version: int | None, copy: Tensor) -> None:
    if version is None:
        with torch.inference_mode():
            tensor.copy_(copy)
        return
    with torch.no_grad():
        tensor.copy_(copy)
    set_version(tensor, version)
