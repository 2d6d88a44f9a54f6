"""Saving a run and resuming it exactly: what a checkpoint holds, and how it is put back.

`capture` and `restore` are about a running trainer, `checkpoint_files` about folders on disk; both are used through
this module.
"""

from __future__ import annotations

import copy
import platform
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from safetrain import __version__, rng
from safetrain.checkpoint.files import checkpoints, latest, prune, read, read_weights, write
from safetrain.errors import CheckpointError

__all__ = ["capture", "checkpoints", "latest", "load_weights", "prune", "read", "read_weights", "restore", "write"]

_COUNTERS = (
    *("step", "micro_step", "epoch", "batch_in_epoch", "evaluated_step", "skipped_steps", "eval_metrics"),
    *("micro_batch_size", "oom_splits"),
)
_WRAPPER = "_orig_mod."  # torch.compile(module) puts it into every name; a checkpoint does not depend on it


def capture(trainer: Any) -> dict[str, Any]:
    """Everything that shapes the rest of the run. Call it between steps; it moves no generator and changes nothing.

    Tensors share memory with the live run: write the payload, or deep-copy it, before the next step. A host sync for a
    loss scaler on an accelerator.

    Covered: model (buffers that its state dict leaves out too), which parameters are frozen and which modules are in
    eval mode, optimizers, schedulers, scaler, callbacks, the trainer's own `state_dict` if it has one, counters,
    generators, and the position in the training data. Not covered: plain attributes of modules (give the module
    `get_extra_state`), and generators that nothing above leads to.
    """
    state = trainer.state
    model = state.model
    saved = _clean(model.state_dict())
    loader = trainer.train_loader
    return {
        "versions": _versions(),
        "classes": _classes(trainer),
        "model": saved,
        "buffers": {name: buffer for name, buffer in _buffers(model) if name not in saved},
        "frozen": [_plain(name) for name, param in model.named_parameters() if not param.requires_grad],
        "eval_modules": [_plain(name) for name, module in model.named_modules() if not module.training],
        "optimizers": {name: optimizer.state_dict() for name, optimizer in state.optimizers.items()},
        "optimized": _optimized(model, state.optimizers),
        "schedulers": {name: scheduler.state_dict() for name, scheduler in state.schedulers.items()},
        "scaler": state.scaler.state_dict() if state.scaler is not None else None,
        "callbacks": {name: held for name, callback in _named_callbacks(trainer) if (held := callback.state_dict())},
        "trainer": _trainer_state(trainer),
        "counters": {name: getattr(state, name) for name in _COUNTERS},
        "loader": loader.state_dict() if loader is not None else None,
        "rng": rng.capture(),
    }


def restore(trainer: Any, payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Put a payload back, so that the run goes on as if it had never stopped. Settings kept in state win over new ones:
    learning rates, frozen parameters, module modes.

    The trainer takes over the payload's tensors: do not use it afterwards. With `trainer.train_loader` set, its next
    epoch starts at the saved position. Returns that position, for a loader that is made later.

    Raises:
        CheckpointError: the payload is of another model, optimizer, schedule or precision, or of other data;
            names the first entry that does not fit. Nothing of the trainer was changed.
    """
    state = trainer.state
    _check_model(state.model, payload)
    _check_optimizers(state, payload)
    _check_schedulers(state, payload)
    _check_scaler(state, payload)
    _check_trainer(trainer, payload)
    position, loader = payload["loader"], trainer.train_loader
    if loader is not None and position is not None:
        loader.load_state_dict(position)
    try:
        _load_what_may_refuse(trainer, payload)
    except CheckpointError:
        if loader is not None:
            loader.forget_position()
        raise
    _load_model(state.model, payload)
    for name, optimizer in state.optimizers.items():
        _load_optimizer(optimizer, payload["optimizers"][name])
    if state.scaler is not None:
        state.scaler.load_state_dict(payload["scaler"])
    for name in _COUNTERS:
        if name in payload["counters"]:  # the last two came later than the first checkpoints
            setattr(state, name, payload["counters"][name])
    rng.restore(payload["rng"])
    return position if isinstance(position, dict) else None


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a model's state dict alone (see `read_weights`), wherever it was saved: prefixes of wrappers do not matter.

    Raises:
        CheckpointError: names the first entry that is missing, unexpected or of another shape. Nothing was changed.
    """
    weights = _clean(weights)
    _check_entries(model, weights, same_dtype=False)
    _load_state_dict(model, weights)


# ---------------------------------------------------------------------- names


def _plain(name: str) -> str:
    return (
        name.replace(_WRAPPER, "").removesuffix("._orig_mod").removeprefix("_orig_mod") if "_orig_mod" in name else name
    )


def _clean(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state dict whose names carry no wrapper."""
    cleaned = OrderedDict((_plain(name), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        cleaned._metadata = {_plain(name): value for name, value in metadata.items()}  # type: ignore[attr-defined]
    return cleaned


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((_plain(name), buffer) for name, buffer in model.named_buffers())


def _named_callbacks(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Callbacks by class name and their number within the class, so that adding a progress bar renames none."""
    seen: Counter[str] = Counter()
    for callback in trainer.callbacks:
        name = type(callback).__name__
        yield f"{name}.{seen[name]}", callback
        seen[name] += 1


def _optimized(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, list[list[str]]]:
    """By optimizer and group: the names of its parameters, in order."""
    names = {id(param): _plain(name) for name, param in model.named_parameters()}
    return {
        key: [
            [names.get(id(p), f"(not in the model) {tuple(p.shape)}") for p in group["params"]]
            for group in opt.param_groups
        ]
        for key, opt in optimizers.items()
    }


def _classes(trainer: Any) -> dict[str, Any]:
    state = trainer.state
    return {
        "model": type(state.model).__name__,
        "optimizers": {name: type(opt).__name__ for name, opt in state.optimizers.items()},
        "schedulers": {name: type(scheduler).__name__ for name, scheduler in state.schedulers.items()},
    }


def _versions() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    return {
        "safetrain": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **({"numpy": str(numpy.__version__)} if numpy is not None else {}),
    }


def _trainer_state(trainer: Any) -> dict[str, Any]:
    return trainer.state_dict() if hasattr(trainer, "state_dict") else {}


# ---------------------------------------------------------------------- checks, before anything is changed


def _check_model(model: nn.Module, payload: Mapping[str, Any]) -> None:
    _check_entries(model, payload["model"], same_dtype=True)
    modules = {_plain(name) for name, _ in model.named_modules()}
    for name in payload["buffers"]:
        if name.rpartition(".")[0] not in modules:
            raise CheckpointError(_other_model(f"has the buffer `{name}`, which this {type(model).__name__} does not"))


def _check_entries(model: nn.Module, weights: Mapping[str, Any], *, same_dtype: bool) -> None:
    own = _clean(model.state_dict())
    kind = type(model).__name__
    for name, value in own.items():
        if name not in weights:
            raise CheckpointError(_other_model(f"lacks `{name}` ({_shape(value)}) of this {kind}"))
    for name, value in weights.items():
        if name not in own:
            raise CheckpointError(_other_model(f"has `{name}` ({_shape(value)}), which this {kind} does not"))
    for name, value in weights.items():
        mine = own[name]
        if not isinstance(mine, Tensor) or nn.parameter.is_lazy(mine) or not isinstance(value, Tensor):
            continue
        if mine.shape != value.shape or (same_dtype and mine.dtype != value.dtype):
            raise CheckpointError(
                _other_model(f"holds `{name}` as {_shape(value)}, but this {kind} has {_shape(mine)}")
            )


def _other_model(what: str) -> str:
    return (
        f"the checkpoint is of another model: it {what}. Build the model with the settings of the saved run "
        "(its config is in the run directory)"
    )


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _check_optimizers(state: Any, payload: Mapping[str, Any]) -> None:
    _check_kinds("optimizer", payload["classes"]["optimizers"], state.optimizers)
    own = _optimized(state.model, state.optimizers)
    for name, groups in payload["optimized"].items():
        if len(groups) != len(own[name]):
            raise CheckpointError(
                f"optimizer `{name}` has {len(groups)} parameter groups in the checkpoint and {len(own[name])} here; "
                "build it with the same groups (those added while training, too)"
            )
        for i, (saved, mine) in enumerate(zip(groups, own[name], strict=True)):
            for theirs, ours in zip(saved, mine, strict=False):
                if theirs != ours:
                    raise CheckpointError(
                        f"optimizer `{name}`, group {i}: the checkpoint has `{theirs}` where this run has `{ours}`; "
                        "give the optimizer the same parameters in the same order"
                    )
            if len(saved) != len(mine):
                raise CheckpointError(
                    f"optimizer `{name}`, group {i} holds {len(saved)} parameters in the checkpoint and {len(mine)} "
                    "here; "
                    "give the optimizer the same parameters"
                )


def _check_schedulers(state: Any, payload: Mapping[str, Any]) -> None:
    _check_kinds("scheduler", payload["classes"]["schedulers"], state.schedulers)


def _check_kinds(what: str, saved: Mapping[str, str], own: Mapping[str, Any]) -> None:
    for name in [*saved, *(name for name in own if name not in saved)]:
        theirs, ours = saved.get(name), type(own[name]).__name__ if name in own else None
        if theirs != ours:
            raise CheckpointError(
                f"{what} `{name}` is {theirs or 'not'} in the checkpoint and {ours or 'not there'} in this run; "
                f"use the {what}s of the saved run, or start a new run from its weights"
            )


def _check_scaler(state: Any, payload: Mapping[str, Any]) -> None:
    saved, own = payload["scaler"] is not None, state.scaler is not None
    if saved != own:
        raise CheckpointError(
            f"the checkpoint was made {'with' if saved else 'without'} loss scaling and this run "
            f"{'has a' if own else 'has no'} scaler; "
            f"set precision={'fp16' if saved else 'fp32 or bf16, as the saved run had'}"
        )


def _check_trainer(trainer: Any, payload: Mapping[str, Any]) -> None:
    if payload["trainer"] and not hasattr(trainer, "load_state_dict"):
        raise CheckpointError(
            f"the checkpoint holds state of the trainer itself ({', '.join(payload['trainer'])}), but "
            f"{type(trainer).__name__} "
            "has no load_state_dict; use the Trainer subclass of the saved run"
        )


# ---------------------------------------------------------------------- loading


def _load_what_may_refuse(trainer: Any, payload: Mapping[str, Any]) -> None:
    """Load into objects whose `load_state_dict` is not ours; when one raises, put those before it back."""
    targets = [
        (f"schedulers.{name}", scheduler, payload["schedulers"][name])
        for name, scheduler in trainer.state.schedulers.items()
    ]
    callbacks = dict(_named_callbacks(trainer))
    for name, held in payload["callbacks"].items():
        if name in callbacks:
            targets.append((f"callbacks.{name}", callbacks[name], held))
        else:
            warnings.warn(
                f"the checkpoint holds the state of callback {name}, which this run does not have", stacklevel=4
            )
    if payload["trainer"]:
        targets.append(("trainer", trainer, payload["trainer"]))
    undo: list[tuple[Any, Any]] = []
    for entry, target, held in targets:
        before = copy.deepcopy(target.state_dict())
        try:
            target.load_state_dict(held)
        except Exception as error:
            for done, earlier in undo:
                if earlier:
                    done.load_state_dict(earlier)
            raise CheckpointError(
                f"`{entry}` of the checkpoint does not fit this run: {type(error).__name__}: {error}"
            ) from error
        undo.append((target, before))


def _load_model(model: nn.Module, payload: Mapping[str, Any]) -> None:
    _load_state_dict(model, payload["model"])
    modules = {_plain(name): module for name, module in model.named_modules()}
    for name, value in payload["buffers"].items():
        path, _, leaf = name.rpartition(".")
        current = modules[path]._buffers.get(leaf)
        if (
            current is not None
            and current.shape == value.shape
            and current.dtype == value.dtype
            and not current.is_inference()
        ):
            current.copy_(value)
        else:  # grown while training, or not there yet
            like = current if current is not None else next(model.parameters(), value)
            modules[path]._buffers[leaf] = value.to(like.device)
    frozen, evaluating = set(payload["frozen"]), set(payload["eval_modules"])
    for name, param in model.named_parameters():
        param.requires_grad_(_plain(name) not in frozen)
    for name, module in model.named_modules():
        module.training = _plain(name) not in evaluating


def _load_state_dict(model: nn.Module, weights: Mapping[str, Any]) -> None:
    own_names = {_plain(name): name for name in model.state_dict()}
    renamed = OrderedDict((own_names[name], value) for name, value in weights.items())
    metadata = getattr(weights, "_metadata", None)
    if metadata is not None and all(name == own for name, own in own_names.items()):
        renamed._metadata = metadata  # type: ignore[attr-defined]
    model.load_state_dict(renamed)


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    devices = [
        {key: value.device for key, value in g.items() if isinstance(value, Tensor)} for g in optimizer.param_groups
    ]
    optimizer.load_state_dict(dict(saved))
    for group, on in zip(optimizer.param_groups, devices, strict=True):
        for key, device in on.items():  # a learning rate kept as a tensor; torch leaves it where the file put it
            if isinstance(group[key], Tensor):
                group[key] = group[key].to(device)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    for index, param in zip(indices, params, strict=True):
        for key, value in saved["state"].get(index, {}).items():
            now = optimizer.state[param][key]
            # torch casts state to the parameter's dtype, which would round fp32 moments of bf16 weights.
            if key != "step" and isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[param][key] = value.to(now.device)
