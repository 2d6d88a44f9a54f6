"""From a config to built objects: trainer class, parameters, model, loaders, optimizers, schedules, listeners.

What the config's types cannot tell (does this optimizer exist, does it take this argument, does a pattern match) is
checked here, and every fault is a `ConfigError` that names the config key.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import Dataset, IterableDataset

from safetrain import callbacks, rng
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.callbacks.base import Callback
from safetrain.compile import CompileOptions
from safetrain.config import CallbacksConfig, Config, DataConfig, OptimConfig, ScheduleConfig
from safetrain.config.file import as_mapping, validate
from safetrain.config.schedules import WarmupCosine
from safetrain.config.user_code import load_object
from safetrain.data.loader import make_loader
from safetrain.errors import ConfigError
from safetrain.loop import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What a config builds: `job.trainer.fit(job.train, job.val)` runs it."""

    trainer: Trainer
    train: Iterable[Any]
    val: Iterable[Any] | None


def build(
    config: Config,
    run_dir: Path | None = None,
    listeners: Iterable[Callback] = (),
    *,
    first: Iterable[Callback] = (),
    making: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Job:
    """Build everything a config names. Generators are seeded first (`config.seed`); nothing is written.

    `listeners` come after those of the config, `first` before them. `making` gives a context for what has parameters
    (model, optimizers, Trainer), which the data are built outside of: a forecast makes them without bytes.

    Raises:
        ConfigError: a setting does not fit what it names. The message has the config key and a remedy.
    """
    trainer_class = load_trainer(config.trainer)
    params = build_params(trainer_class, config)
    device = pick_device(config.device)
    if config.seed is not None:
        rng.seed_everything(config.seed)
    with making():
        model = build_model(trainer_class, params, device)
    train, val = build_data(trainer_class, params, config, device)
    with making():
        trainer = _assemble(trainer_class, model, device, params, config, run_dir, (first, listeners))
    return Job(trainer, train, val)


def _assemble(
    trainer_class: type[Trainer],
    model: nn.Module,
    device: torch.device,
    params: Any,
    config: Config,
    run_dir: Path | None,
    listeners: tuple[Iterable[Callback], Iterable[Callback]],
) -> Trainer:
    """The Trainer with its optimizers, schedules and listeners, those given first and last among them."""
    optimizers = build_optimizers(trainer_class, model, params, config)
    schedulers = build_schedulers(trainer_class, optimizers, params, config)
    own_listeners = trainer_class.build_callbacks(params) if hasattr(trainer_class, "build_callbacks") else ()
    compiling, recomputing = config.compile, config.activation_checkpoint
    trainer = trainer_class(
        model,
        optimizers,
        schedulers,
        device=device,
        precision=config.precision,
        **as_mapping(config.loop),
        seed=config.seed,
        deterministic=config.deterministic,
        compile=None if compiling is None else CompileOptions(**as_mapping(compiling)),
        activation_checkpoint=None if recomputing is None else CheckpointOptions(**as_mapping(recomputing)),
        callbacks=[*listeners[0], *own_listeners, *build_callbacks(config.callbacks), *listeners[1]],
        guards=config.guards,
        strict=config.strict,
        run_dir=run_dir,
    )
    trainer.params = params
    return trainer


# ---------------------------------------------------------------------------------------------- what the user wrote


def load_trainer(spec: str) -> type[Trainer]:
    """The Trainer subclass that a config names. Raises `ConfigError`."""
    found = load_object(spec, "trainer")
    if not (inspect.isclass(found) and issubclass(found, Trainer)):
        raise ConfigError(
            f"trainer: {spec} is no subclass of safetrain.Trainer; write `class {spec.rpartition(':')[2]}(Trainer):`"
        )
    return found


def build_params(trainer_class: type[Trainer], config: Config) -> Any:
    """An instance of the trainer's `Params` from `config.params`; None for a trainer without. Raises `ConfigError`."""
    declared = getattr(trainer_class, "Params", None)
    if declared is None:
        if config.params:
            raise ConfigError(
                f"params.{next(iter(config.params))}: {trainer_class.__name__} declares no parameters; give it a "
                "`class Params(pydantic.BaseModel)` or remove params"
            )
        return None
    if not (inspect.isclass(declared) and issubclass(declared, BaseModel)):
        raise ConfigError(
            f"trainer: {trainer_class.__name__}.Params is no pydantic.BaseModel; write `class Params(BaseModel):`"
        )
    return validate(declared, config.params, trainer_class.__name__, "params.")


def _call_hook(trainer_class: type[Trainer], name: str, signature: str, *args: Any) -> Any:
    hook = getattr(trainer_class, name, None)
    if hook is None:
        raise ConfigError(
            f"trainer: {trainer_class.__name__} has no {name}, which a config needs; add `@classmethod def "
            f"{name}{signature}`"
        )
    if not inspect.ismethod(hook):
        raise ConfigError(f"trainer: {trainer_class.__name__}.{name} must be a classmethod; put @classmethod above it")
    return hook(*args)


def build_model(trainer_class: type[Trainer], params: Any, device: torch.device) -> nn.Module:
    """The model from the trainer's `build_model`, on the device. Raises `ConfigError`."""
    model = _call_hook(trainer_class, "build_model", "(cls, params) -> nn.Module", params)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"trainer: {trainer_class.__name__}.build_model returned a {type(model).__name__}; return a torch.nn.Module"
        )
    return model.to(device)  # before the optimizers are made: what is fused depends on it


def pick_device(name: str) -> torch.device:
    """The device a config names; `auto` is the accelerator if there is one. Raises `ConfigError`."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch asserts when it was built without CUDA
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"device: {name!r} cannot be used here: {reason}; set device=auto or device=cpu") from error
    return device


# ---------------------------------------------------------------------------------------------- data


def build_data(
    trainer_class: type[Trainer], params: Any, config: Config, device: torch.device
) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """The loaders for training and evaluation from the trainer's `build_data`. Raises `ConfigError`."""
    data = _call_hook(trainer_class, "build_data", "(cls, params) -> tuple[train, val | None]", params)
    if not (isinstance(data, tuple) and len(data) == 2):
        raise ConfigError(
            f"trainer: {trainer_class.__name__}.build_data returned a {type(data).__name__}; return (train, val), "
            "with None for no val"
        )
    train, val = data
    if train is None:
        raise ConfigError(
            f"trainer: {trainer_class.__name__}.build_data returned no training data (None); return a Dataset or a "
            "loader"
        )
    if val is None:
        _check_no_evaluation(config, trainer_class.__name__)
    if not isinstance(train, Dataset) and config.data != DataConfig():
        changed = next(key for key, value in config.data if value != getattr(DataConfig(), key))
        raise ConfigError(
            f"data.{changed} would be ignored: {trainer_class.__name__}.build_data returned a ready "
            f"{type(train).__name__}; "
            "return the dataset instead, or remove the data section and set it there"
        )
    if isinstance(train, IterableDataset) and config.data.shuffle:
        raise ConfigError(
            f"data.shuffle: true cannot shuffle {type(train).__name__}, an IterableDataset, which has its own "
            "order; remove data.shuffle"
        )
    return _loader(train, config, device, training=True), None if val is None else _loader(
        val, config, device, training=False
    )


def _loader(data: Any, config: Config, device: torch.device, *, training: bool) -> Any:
    """Our loader over a dataset; a ready loader as it is."""
    if not isinstance(data, Dataset):
        return data
    options = config.data
    shuffle = not config.loop.overfit_batches if options.shuffle is None else options.shuffle
    batch_size = options.batch_size if training else options.eval_batch_size or options.batch_size
    if training and not isinstance(data, IterableDataset) and len(data) == 0:  # type: ignore[arg-type]
        raise ConfigError(
            f"trainer: build_data returned an empty training {type(data).__name__}; check the path or filter that "
            "fills it"
        )
    return make_loader(
        data,
        batch_size=batch_size,
        shuffle=training and shuffle,
        num_workers=options.num_workers,
        drop_last=training and options.drop_last,
        pin_memory=device.type == "cuda" if options.pin_memory is None else options.pin_memory,
    )


def _check_no_evaluation(config: Config, trainer: str) -> None:
    """Settings that wait for an evaluation would wait for ever."""
    listeners = config.callbacks
    waiting = {
        "loop.eval_every": config.loop.eval_every is not None,
        "callbacks.early_stopping": listeners.early_stopping is not None,
        "callbacks.checkpoint.monitor": listeners.checkpoint is not None and listeners.checkpoint.monitor is not None,
    }
    for key, is_set in waiting.items():
        if is_set and not config.loop.overfit_batches:
            raise ConfigError(
                f"{key} needs evaluation, but {trainer}.build_data returned no validation data; return (train, "
                f"val) or remove {key}"
            )


# ---------------------------------------------------------------------------------------------- optimizers


def build_optimizers(
    trainer_class: type[Trainer], model: nn.Module, params: Any, config: Config
) -> Optimizer | dict[str, Optimizer]:
    """Optimizers from the config, or from the trainer's `build_optimizers`. Raises `ConfigError`."""
    own = getattr(trainer_class, "build_optimizers", None)
    configured = "optim" if config.optim else "optims" if config.optims else None
    if own is not None:
        if configured:
            raise ConfigError(
                f"{configured} would be ignored: {trainer_class.__name__}.build_optimizers makes the optimizers; "
                "remove one of them"
            )
        made: Optimizer | dict[str, Optimizer] = own(model, params)
        return made
    if configured is None:
        raise ConfigError("optim is missing; add e.g. optim: {name: AdamW, lr: 1e-3}")
    if config.optim is not None:
        return build_optimizer(model, config.optim, "optim")
    optimizers: dict[str, Optimizer] = {}
    owner: dict[int, str] = {}
    for name, optim in config.optims.items():
        path = f"optims.{name}"
        optimizers[name] = build_optimizer(model, optim, path)
        for group in optimizers[name].param_groups:
            for param in group["params"]:
                other = owner.setdefault(id(param), path)
                if other != path:
                    twice = next(n for n, p in model.named_parameters() if p is param)
                    raise ConfigError(
                        f"{other}.params and {path}.params both match {twice}, which would be stepped twice; "
                        "narrow one pattern"
                    )
    return optimizers


def build_optimizer(model: nn.Module, config: OptimConfig, path: str) -> Optimizer:
    """One optimizer over the parameters that its patterns match. `path` is its config key. Raises `ConfigError`."""
    kind = _named_class(config.name, vars(torch.optim), Optimizer, f"{path}.name", "torch.optim")
    options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (config.model_extra or {}).items()
    }
    if config.lr is not None:
        options["lr"] = config.lr
    if config.fused is not None:
        options["fused"] = config.fused
    _check_arguments(kind, options, path, skip=1)
    groups = _param_groups(model, config, path)
    for group in config.groups.values():
        _check_arguments(kind, {**options, **group}, f"{path}.groups", skip=1)
    if (
        config.fused is None
        and "fused" in inspect.signature(kind).parameters
        and not options.keys() & {"foreach", "differentiable", "capturable"}
    ):
        try:
            fused: Optimizer = kind(groups, **options, fused=True)
        except RuntimeError:  # not for these parameters or this device: torch's own choice then
            groups = _param_groups(model, config, path)
        except (ValueError, TypeError) as error:
            raise _refused(kind, path, error) from error
        else:
            return fused
    made: Optimizer = _construct(kind, path, groups, **options)
    return made


def _param_groups(model: nn.Module, config: OptimConfig, path: str) -> list[dict[str, Any]]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError(
            f"{path}: {type(model).__name__} has no parameter that requires a gradient; nothing would be trained"
        )
    chosen = {
        name: p for name, p in trainable.items() if not config.params or _first_match(name, config.params) is not None
    }
    _check_patterns(config.params, trainable, f"{path}.params")
    _check_patterns(tuple(config.groups), chosen, f"{path}.groups")
    groups: dict[str | None, dict[str, Any]] = {None: {"params": []}}
    for pattern, arguments in config.groups.items():
        groups[pattern] = {"params": [], **{k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}}
    for name, param in chosen.items():
        groups[_first_match(name, config.groups)]["params"].append(param)
    return [group for group in groups.values() if group["params"]]


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _check_patterns(patterns: Iterable[str], names: Mapping[str, Any], path: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(list(names)[:4]) + (", …" if len(names) > 4 else "")
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the names are {shown}"
            raise ConfigError(f"{path}: {pattern!r} matches no trainable parameter; {hint}")


# ---------------------------------------------------------------------------------------------- schedules


def build_schedulers(trainer_class: type[Trainer], optimizers: Any, params: Any, config: Config) -> Any:
    """Schedules from the config, or from the trainer's `build_schedulers`; None without. Raises `ConfigError`."""
    own = getattr(trainer_class, "build_schedulers", None)
    configured = "schedule" if config.schedule else "schedules" if config.schedules else None
    if own is not None:
        if configured:
            raise ConfigError(
                f"{configured} would be ignored: {trainer_class.__name__}.build_schedulers makes the schedules; "
                "remove one of them"
            )
        return own(optimizers, params)
    if config.schedule is not None:
        if isinstance(optimizers, Mapping):
            return {name: _schedule(opt, config.schedule, "schedule", config) for name, opt in optimizers.items()}
        return _schedule(optimizers, config.schedule, "schedule", config)
    if config.schedules:
        return {
            name: _schedule(optimizers[name], schedule, f"schedules.{name}", config)
            for name, schedule in config.schedules.items()
        }
    return None


def _schedule(optimizer: Optimizer, schedule: ScheduleConfig, path: str, config: Config) -> Any:
    available = {**vars(lr_scheduler), "WarmupCosine": WarmupCosine}
    kind = _named_class(schedule.name, available, lr_scheduler.LRScheduler, f"{path}.name", "torch.optim.lr_scheduler")
    if schedule.name in ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"):
        raise ConfigError(
            f"{path}.name: {schedule.name} takes functions or objects, which YAML has not; make it in your "
            "trainer's build_schedulers"
        )
    options = dict(schedule.model_extra or {})
    if kind is WarmupCosine and options.get("total_steps") is None:
        options["total_steps"] = _total_steps(path, config)
    _check_arguments(kind, options, path, skip=1)
    return _construct(kind, path, optimizer, **options)


def _total_steps(path: str, config: Config) -> int:
    loop = config.loop
    setting, value = (
        ("loop.max_epochs", loop.max_epochs) if loop.schedule_every == "epoch" else ("loop.max_steps", loop.max_steps)
    )
    if value is None:
        raise ConfigError(
            f"{path}.total_steps and {setting} are both missing, so the end of WarmupCosine is unknown; set one of them"
        )
    return value


# ---------------------------------------------------------------------------------------------- classes by name


def _named_class(name: str, available: Mapping[str, Any], base: type, path: str, home: str) -> Callable[..., Any]:
    """A class by its name in `available`, or by `module:Class`."""
    if ":" in name:
        found = load_object(name, path)
    else:
        known = {
            n: c
            for n, c in available.items()
            if inspect.isclass(c) and issubclass(c, base) and c is not base and n[0] != "_"
        }
        found = known.get(name)
        if found is None:
            near = [n for n in known if n.lower() == name.lower()] or difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"{path}: no {name} in {home}; {hint}")
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{path}: {name} is no subclass of {base.__module__}.{base.__name__}")
    result: Callable[..., Any] = found
    return result


def _check_arguments(kind: Callable[..., Any], options: Mapping[str, Any], path: str, *, skip: int) -> None:
    """Every option is an argument of `kind`, and none that it needs is missing. `skip` leading arguments are ours."""
    parameters = list(inspect.signature(kind).parameters.values())[skip:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for option in options:
        if option not in names:
            near = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {path}.{near[0]}?" if near else f"it takes {', '.join(names)}"
            raise ConfigError(f"{path}.{option}: {kind.__name__} has no such argument; {hint}")
    missing = [
        p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in options
    ]
    if missing:
        raise ConfigError(f"{path}.{missing[0]} is missing: {kind.__name__} needs it")


def _construct(kind: Callable[..., Any], path: str, *args: Any, **options: Any) -> Any:
    try:
        return kind(*args, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _refused(kind, path, error) from error


def _refused(kind: Callable[..., Any], path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: {kind.__name__} refuses its arguments: {error}")


# ---------------------------------------------------------------------------------------------- listeners


def build_callbacks(config: CallbacksConfig) -> list[Callback]:
    """The listeners that a config turns on: those that add to a row of the log first, those that write it last."""
    wanted: list[tuple[type[Callback], BaseModel | None]] = [
        (callbacks.EMA, config.ema),
        (callbacks.LrMonitor, config.lr_monitor),
        (callbacks.MemoryMonitor, config.memory),
        (callbacks.EmptyCache, config.empty_cache),
        (callbacks.EarlyStopping, config.early_stopping),
        (callbacks.Saving, config.checkpoint),
        (callbacks.Throughput, config.throughput),  # after saving, whose time it leaves out
        (callbacks.Progress, config.progress),
        (callbacks.TensorBoard, config.tensorboard),
        (callbacks.JsonlMetrics, config.jsonl),
    ]
    return [kind(**as_mapping(options)) for kind, options in wanted if options is not None]
