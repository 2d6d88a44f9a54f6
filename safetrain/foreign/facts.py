"""Facts about what a foreign loop hands to torch: loaders and their samplers, checkpoints and their parts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.weak import WeakIdKeyDictionary

POSITION_KEYS = ("epoch", "step", "iteration", "global_step", "it", "iter")
_MAX_LOOKED_AT = 64


def loader_facts(loader: Any) -> dict[str, Any]:
    """What an `epoch_start` event says of a `DataLoader`, beyond the order that its sampler gives."""
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    plain = batch_sampler is None or type(batch_sampler) is BatchSampler
    chosen = sampler if plain else batch_sampler
    with_epoch = next((s for s in (batch_sampler, sampler) if hasattr(s, "set_epoch")), None)
    return {
        "loader": _number_of(loader),
        "length": _length(loader),
        "order": None,
        "sampler": type(with_epoch if with_epoch is not None else chosen).__name__,
        "shuffles": not isinstance(chosen, SequentialSampler) and getattr(chosen, "shuffle", True) is not False,
        "set_epoch": with_epoch is not None,
        "sampler_epoch": getattr(with_epoch, "epoch", None),
    }


def optimizer_facts(optimizer: Optimizer) -> dict[str, Any]:
    """What an `optimizer_made` event says."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    again = bool(params) and all(p in _given for p in params)
    for p in params:
        _given[p] = True
    plain = type(optimizer).__name__ == "SGD" and not any(group.get("momentum") for group in optimizer.param_groups)
    return {
        "optimizer": id(optimizer),
        "name": type(optimizer).__name__,
        "again": again,
        "keeps_state": not plain and type(optimizer).__name__ != "LBFGS",
    }


_given: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameters that an optimizer was made for."""
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def _number_of(loader: Any) -> int:
    """The same number for the same loader. An address would be given to the next loader when this one is gone."""
    return _numbers.setdefault(loader, next(_next_number))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def batch_order(index: Any) -> int | None:
    """A number for the samples that a sampler chose for one batch; None for a stream, which chooses none."""
    if not isinstance(index, list | tuple) or not index or index[0] is None:
        return None
    return hash(tuple([i if type(i) is int else str(i) for i in index]))


def any_nonzero(tensors: Iterable[Tensor]) -> bool:
    """Whether any of them holds something other than zero. Host sync."""
    return any(bool(t.detach().count_nonzero()) if t.layout is torch.strided else t._nnz() > 0 for t in tensors)


def checkpoint_parts(obj: Any) -> set[str]:
    """What the top-level values of a checkpoint are: some of model, optimizer, scheduler, scaler, rng, epoch."""
    own = part_of(obj)
    if own is not None:
        return {own}
    if not isinstance(obj, dict):
        return set()
    parts: set[str] = set()
    for key, value in list(obj.items())[:_MAX_LOOKED_AT]:
        part = part_of(value) or _by_key(str(key).lower(), value)
        if part is not None:
            parts.add(part)
        elif isinstance(value, dict | list | tuple):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            parts.update(
                p
                for k, v in list(inner)[:_MAX_LOOKED_AT]
                if (p := part_of(v) or _by_key(str(k).lower(), v)) is not None
            )
    return parts


def part_of(value: Any) -> str | None:
    """Which object's state a value is, by its own keys and types."""
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, LRScheduler):
        return "scheduler"
    if isinstance(value, torch.amp.GradScaler):
        return "scaler"
    if isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1 and value.numel() > 15:
        return "rng"
    if not isinstance(value, dict) or not value:
        return None
    if {"state", "param_groups"} <= value.keys():
        return "optimizer"
    if "last_epoch" in value or "num_bad_epochs" in value:
        return "scheduler"
    if {"scale", "growth_factor"} <= value.keys():
        return "scaler"
    tensors = [isinstance(v, Tensor) for k, v in value.items() if isinstance(k, str) and not k.endswith("_extra_state")]
    return "model" if tensors and all(tensors) and not any(_is_rng(k) for k in value) else None


def _by_key(key: str, value: Any) -> str | None:
    if _is_rng(key):
        return "rng"
    if isinstance(value, int) and any(word in key for word in POSITION_KEYS):
        return "epoch"
    return None


def _is_rng(key: Any) -> bool:
    text = str(key).lower()
    return "rng" in text or "random" in text


def target_of(owner: Any) -> str:
    """Whose `load_state_dict` was called: model, optimizer, scheduler or scaler."""
    return part_of(owner) or "model"


def active_layers(models: Iterable[tuple[str, nn.Module]]) -> tuple[tuple[str, str], ...]:
    """(name, class) of the dropout and batch-norm layers that are in train mode."""
    return tuple(
        (f"{name}.{inner}" if name and inner else inner or name, type(module).__name__)
        for name, model in models
        for inner, module in model.named_modules()
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm)
    )
