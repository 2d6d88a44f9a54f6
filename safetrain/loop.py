"""The training loop. Start at `Trainer.train_step`: one optimizer step, read from top to bottom.

This is the one file that touches optimizers, the gradient scaler, grad mode and autocast.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from safetrain import activation_checkpoint as activation_checkpointing
from safetrain import checkpoint, rng
from safetrain import compile as compiling
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.activation_checkpoint.auto import auto_listeners
from safetrain.callbacks.base import Callback, Listeners
from safetrain.callbacks.run_dir import writable_run_dir
from safetrain.compile import CompileOptions
from safetrain.data import batch as batches
from safetrain.data.cutting import cut
from safetrain.data.loader import EpochLoader
from safetrain.errors import BatchError, ConfigError, NonFiniteError
from safetrain.findings import Report
from safetrain.guarding.context import ContextGuard
from safetrain.guarding.loop import SnapshotGuard
from safetrain.guards import default_guards
from safetrain.modules import set_training, sets_modes_itself
from safetrain.state import FIRST_STEPS, RunState
from safetrain.stepping.averages import Averages
from safetrain.stepping.clipping import clip_by_norm, clip_groups_by_norm
from safetrain.stepping.deferred import DeferredFlag
from safetrain.stepping.on_device import found_inf, not_finite, skip_together, skips_on_device
from safetrain.stepping.settings import check_arguments, check_optimizers, check_settings, needs_closure
from safetrain.stepping.splitting import Splitter, in_micro_batches, warn_if_unused
from safetrain.stepping.weighting import Metrics, Shares, StepOutput, check_loss, unpack
from safetrain.terminal import Terminal

Precision = Literal["fp32", "bf16", "fp16"]

_log = logging.getLogger("safetrain")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains `model`. Subclass it, write `training_step(batch)`, call `fit(train, val)`.

    Args:
        model: the module to train. It is used as it is: compiling happens in place, no wrapper is put around it.
        optimizers: one optimizer, or a dict of named ones.
        schedulers: one learning-rate scheduler, or a dict by optimizer name. Each advances once per optimizer step that
            was taken (`schedule_every="epoch"`: once an epoch; `ReduceLROnPlateau`: after each evaluation).
        device: where to train; the model is moved there. Default: where the model is.
        precision: "fp32", "bf16" (autocast) or "fp16" (autocast with loss scaling).
        scaler: a `torch.amp.GradScaler` of your own for fp16.
        accumulate: micro-batches per optimizer step. The gradient is that of one large batch, in short windows too.
        micro_batch_size: cut the loader's batches into micro-batches of at most so many samples; same gradients.
        oom: what a forward or backward that runs out of memory does: "raise", or "split": the step is repeated, and the
            run goes on, with half the `micro_batch_size` (`safetrain.stepping.splitting`).
        memory_budget: refuse to start when a step is forecast to need clearly more: bytes, such as "24GB", or "auto":
            what the device has free. The forecast takes seconds, once (`safetrain.planner`).
        clip_norm, clip_norm_type, clip_value: clip gradients by total p-norm or by value, after unscaling.
        clip_per_group: take the norm over each parameter group by itself.
        nonfinite: what a step with Inf or NaN gradients does: "skip" it (counted and logged) or "raise". Weights are
            never stepped with them, unless `check_finite` is off.
        check_finite: the gate that keeps such gradients out. Costs one scalar read a step for optimizers that cannot
            skip on the device; none for fused ones.
        max_steps, max_epochs, max_time: when to stop (optimizer steps, epochs, seconds); at least one.
        eval_every: evaluate after every so many steps; default: after each epoch.
        limit_batches, limit_eval_batches: micro-batches an epoch, batches an evaluation.
        overfit_batches: train and evaluate on the first so many batches only.
        eval_context: "no_grad" or "inference_mode".
        log_every: steps between rows of the log; the first step is logged too.
        seed: seeds every generator when `fit` starts a new run.
        deterministic: let torch refuse operations that do not repeat bit for bit.
        compile: True or `safetrain.compile.CompileOptions`; the model is compiled in place.
        activation_checkpoint: name patterns of modules that recompute their activations in backward, or
            `safetrain.activation_checkpoint.CheckpointOptions`.
        callbacks: listeners, called in list order.
        guards: "default", "off", or a policy by rule code such as `{"G101": "error"}`.
        strict: warnings of the guards stop the run.
        run_dir: where findings, logs and checkpoints go; nothing is written without one.

    Raises:
        ConfigError: a setting is wrong or contradicts another.
    """

    params: Any = None
    """The subclass's own typed parameters, when built from a config."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Mapping[str, Optimizer],
        schedulers: LRScheduler | Mapping[str, LRScheduler] | None = None,
        *,
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        micro_batch_size: int | None = None,
        oom: Literal["raise", "split"] = "raise",
        memory_budget: int | str | None = None,
        clip_norm: float | None = None,
        clip_norm_type: float = 2.0,
        clip_value: float | None = None,
        clip_per_group: bool = False,
        nonfinite: Literal["skip", "raise"] = "skip",
        check_finite: bool = True,
        schedule_every: Literal["step", "epoch"] = "step",
        max_steps: int | None = None,
        max_epochs: int | None = None,
        max_time: float | None = None,
        eval_every: int | None = None,
        limit_batches: int | None = None,
        limit_eval_batches: int | None = None,
        overfit_batches: int = 0,
        eval_context: Literal["no_grad", "inference_mode"] = "no_grad",
        log_every: int = 50,
        seed: int | None = None,
        deterministic: bool = False,
        compile: bool | CompileOptions | None = None,
        activation_checkpoint: str | Sequence[str] | CheckpointOptions | None = None,
        callbacks: Iterable[Callback] = (),
        guards: Literal["default", "off"] | Mapping[str, Any] = "default",
        strict: bool = False,
        run_dir: str | Path | None = None,
    ) -> None:
        self.model = model
        self.precision = precision
        self.accumulate, self.micro_batch_size, self.oom = accumulate, micro_batch_size, oom
        self.memory_budget, self._must_forecast = memory_budget, False
        self.clip_norm, self.clip_norm_type, self.clip_value = clip_norm, clip_norm_type, clip_value
        self.clip_per_group = clip_per_group
        self.nonfinite, self.check_finite = nonfinite, check_finite
        self.schedule_every = schedule_every
        self.max_steps, self.max_epochs, self.max_time = max_steps, max_epochs, max_time
        self.eval_every = eval_every
        self.limit_batches, self.limit_eval_batches = limit_batches, limit_eval_batches
        self.overfit_batches = overfit_batches
        self.eval_context = eval_context
        self.log_every = log_every
        self.seed, self.deterministic = seed, deterministic
        check_settings(self)
        check_arguments(compile, activation_checkpoint, callbacks)

        self.device = torch.device(device) if device is not None else _device_of(model)
        model.to(self.device)
        if activation_checkpoint is not None:
            recompute = activation_checkpointing.as_options(activation_checkpoint)
            activation_checkpointing.apply(model, recompute)
            callbacks = [
                *auto_listeners(model, recompute, device=self.device, is_compiled=bool(compile)),
                *callbacks,
            ]
        self.compile_options = CompileOptions() if compile is True else compile or None
        if self.compile_options is not None:
            compiling.apply(model, self.compile_options)
        named = dict(optimizers) if isinstance(optimizers, Mapping) else {"main": optimizers}
        schedules = dict(schedulers) if isinstance(schedulers, Mapping) else {"main": schedulers} if schedulers else {}
        check_optimizers(named, schedules, precision)
        if precision == "fp16" and scaler is None:
            scaler = torch.amp.GradScaler(self.device.type)
        self.state = RunState(model=model, optimizers=named, schedulers=schedules, scaler=scaler, device=self.device)
        self.state.run_dir = Path(run_dir) if run_dir is not None else None
        self.state.gated = check_finite and scaler is None
        self.train_loader: EpochLoader | None = None
        self._position: dict[str, Any] | None = None  # in the data, loaded before `fit` named the loader
        self.callbacks = list(callbacks)
        self.guards, self.strict = guards, strict
        self._attach_guards(self.state.run_dir)

        self._closure_optimizer = next((name for name, opt in named.items() if needs_closure(opt)), None)
        self._autocast = autocast_for(self.device, precision)
        self._moves = self.device.type != "cpu" or type(self).to_device is not Trainer.to_device
        self._stepped: set[str] = set()  # optimizers that stepped since the scaler was last updated
        self.state.micro_batch_size = micro_batch_size
        self._splitter = Splitter(model) if oom == "split" else None
        self._verdicts: dict[str, DeferredFlag] = {}  # was the last step of an optimizer to be skipped?
        self._begun: dict[str, list[Tensor]] = {}  # parameters that got their first state in that step
        if scaler is not None:
            for name, opt in named.items():
                opt.register_step_post_hook(functools.partial(_note_step, self._stepped, name))
        self._outside: list[nn.Parameter] = []  # trained by no optimizer
        self._overfit_set: list[Any] = []
        self._compile_checked = False
        self._rates: dict[str, float] = {}  # learning rates that the logged step used
        self._averages: Averages | None = None  # takes metrics on logging steps and in evaluations
        self._weight: Tensor | float = 1.0  # of the micro-batch that runs

    def _attach_guards(self, run_dir: Path | None) -> None:
        """Guards first, then callbacks. Findings go to `findings.jsonl` of `run_dir`, and to the terminal at once."""
        import safetrain.rules  # noqa: F401 (fills the catalogue that a policy is checked against)

        guards = self.guards
        if not isinstance(guards, Mapping) and guards not in ("default", "off"):
            raise ConfigError(f"guards={guards!r}; it is 'default', 'off' or a policy by rule code")
        policy = guards if isinstance(guards, Mapping) else {}
        jsonl = run_dir / "findings.jsonl" if run_dir is not None else None
        self.report = Report(policy, strict=self.strict, jsonl=jsonl, show=Terminal(sys.stderr).show_loud)
        if guards == "off":
            self.listeners = Listeners(self.callbacks)
        else:
            context = ContextGuard(self.model, self.report, device_type=self.device.type)
            snapshots = SnapshotGuard(self.report, functools.partial(_snapshot_holders, weakref.ref(self)))
            guarding = [*default_guards(self.report, gated=self.state.gated), snapshots]
            self.listeners = Listeners([*guarding, *self.callbacks], guards=guarding, watch=context.watch_callback)

    # ------------------------------------------------------------------ what a subclass writes

    def training_step(self, batch: Any) -> Tensor | tuple[Tensor, Metrics] | StepOutput:
        """Loss of one micro-batch: a mean loss, `(mean loss, metrics)`, or a `StepOutput`."""
        raise ConfigError(
            f"{type(self).__name__} has no training_step; define `def training_step(self, batch)` returning the loss"
        )

    def evaluation_step(self, batch: Any) -> Any:
        """The same for evaluation, or a dict of metrics alone. Default: `training_step`."""
        return self.training_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """What `predict` collects for one batch. Default: the model's output."""
        return self.model(batch)

    def batch_size(self, batch: Any) -> int:
        """Samples in a batch: weighs mean losses and metrics. Default: first dimension of the first tensor."""
        return batches.batch_size(batch)

    def split_batch(self, batch: Any, size: int) -> Sequence[Any]:
        """A batch in pieces of at most `size` samples, in order. Default: along the first dimension of its tensors."""
        return cut(batch, size, self.batch_size(batch))

    # ------------------------------------------------------------------ one optimizer step

    def train_step(self, window: Sequence[Any]) -> None:
        """One optimizer step over a window of micro-batches. Override it for GAN-like trainings, with the same helpers.

        The gradient is that of one large batch: a mean loss counts by its samples, a `StepOutput` by its weight.
        """
        if self._closure_optimizer is not None:
            return self._closure_step(self._closure_optimizer, window)
        self.zero_grad()  # at the start: a window that failed half way leaves nothing behind
        self.forward_backward(window)
        self.optimizer_step()

    def forward_backward(self, window: Sequence[Any]) -> Tensor:
        """Forward and backward of each micro-batch; gradients add up to the window's mean.

        Returns the window's mean loss: scalar, detached, on the device. Under `oom="split"` it is repeated in smaller
        micro-batches when memory runs out.
        """
        if self._splitter is not None:
            return self._splitter.run(self, window)
        if self.state.micro_batch_size is not None:
            window = in_micro_batches(self, window)
        return self._forward_backward(window)

    def _forward_backward(self, window: Sequence[Any]) -> Tensor:
        state = self.state
        if len(window) == 1:
            size = self.batch_size(window[0])
            state.num_samples += size
            loss, weight = self._forward(window[0], size)
            if weight is not None:
                loss = loss / weight
            mean = loss.detach()
            self.backward(loss)
        else:
            shares = Shares([self.batch_size(batch) for batch in window])
            state.num_samples += shares.num_samples
            for index, batch in enumerate(window):
                loss, weight = self._forward(batch, shares.sizes[index])
                self.backward(shares.share_of(loss, weight, index, self._gradients))
            mean = shares.finish(self._gradients)
        state.loss = mean
        return mean

    def _forward(self, batch: Any, size: int) -> tuple[Tensor, Tensor | float | None]:
        """The loss of a micro-batch, with its graph, and its weight if it brought one; its metrics are taken.

        A function of its own: what else the step made (a language model's logits) is gone when backward peaks.
        """
        if self._moves:
            batch = self.to_device(batch)
        self.state.batch, self._weight = batch, size
        with self._autocast:
            output = self.training_step(batch)
        if isinstance(output, Tensor):
            return output, None
        loss, weight, metrics = unpack(output)
        if metrics:
            self._take_metrics(metrics, size if weight is None else weight)
        return loss, weight

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Differentiate a scalar loss, scaled under fp16. `options` go to `Tensor.backward`.

        Raises:
            BatchError: the loss is no scalar tensor, or carries no graph.
        """
        state = self.state
        if loss.ndim or not loss.requires_grad:
            check_loss(loss, state.current_step)
        state.micro_loss = loss
        self.listeners.on_backward_start(state)
        state.micro_loss = None
        if state.scaler is not None:
            loss = state.scaler.scale(loss)
        loss.backward(**options)  # type: ignore[no-untyped-call]
        state.micro_step += 1

    def optimizer_step(self, *names: str) -> None:
        """Unscale, clip and step the named optimizers (default: all), keeping Inf and NaN out of the weights.

        The schedule of each moves only if its step was taken. No host sync for optimizers that skip on the device
        (fused ones); one scalar read otherwise.
        """
        state, scaler = self.state, self.state.scaler
        chosen = self._named(names)
        state.stepping = tuple(chosen)
        if self._verdicts:
            self._settle()  # before this step reads its rate, and listeners what was skipped
        if scaler is not None:
            self._unscale(scaler, chosen)
        self.listeners.on_backward_end(state)
        norm, number = self._clip(chosen)
        for name, opt in chosen.items():
            if state.is_logging_step:
                self._rates[name] = float(opt.param_groups[0]["lr"])
            if norm is None and not self._gradients((name,)):
                continue  # nothing to step; the guards say why
            self._step_if_finite(name, opt, norm, number)

    def zero_grad(self, *names: str) -> None:
        """Drop the gradients of the named optimizers' parameters; without names, of everything trained."""
        for opt in self._named(names).values():
            if type(opt).zero_grad is not Optimizer.zero_grad:
                opt.zero_grad()
            for group in opt.param_groups:
                for param in group["params"]:
                    param.grad = None
        if not names:
            for param in self._outside:
                param.grad = None

    def to_device(self, batch: Any) -> Any:
        """`batch`, of any structure, on the trainer's device. Pinned tensors are copied without blocking the host."""
        return batch if self.device.type == "cpu" else batches.to_device(batch, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that `training_step` runs in, for forwards of your own in an overridden `train_step`."""
        return self._autocast

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a scalar from inside a step. Averaged over the window's (the evaluation's) micro-batches by samples.

        In training only logging steps keep it. A tensor may carry a graph: it is detached here, and rule G102 tells.
        """
        self._take_metrics({name: value}, self._weight)

    def _unscale(self, scaler: torch.amp.GradScaler, chosen: Mapping[str, Optimizer]) -> None:
        if not self._stepped.isdisjoint(chosen):
            scaler.update()  # a second step within one window (n critic steps): the scaler allows one per update
            self._stepped.clear()
        for name, opt in chosen.items():
            if self._gradients((name,)):
                scaler.unscale_(opt)

    def _clip(self, chosen: Mapping[str, Optimizer]) -> tuple[Tensor | None, float | None]:
        """Clip what `chosen` will step.

        Keeps and returns the total norm before clipping, None when nobody needs it; and the same as a number where the
        gate has to read it: for optimizers that cannot skip on the device.
        """
        state, scaler = self.state, self.state.scaler
        is_gated = self.check_finite and scaler is None
        groups = [group["params"] for opt in chosen.values() for group in opt.param_groups]
        norm, number = None, None
        if self.clip_norm is not None or is_gated or state.is_logging_step:
            reads = is_gated and not all(map(skips_on_device, chosen.values()))
            clip = clip_groups_by_norm if self.clip_per_group and len(groups) > 1 else clip_by_norm
            norm, number = clip(groups, self.clip_norm_type, self.clip_norm, read=reads)
            if scaler is not None and norm is not None and clip is clip_by_norm and self.clip_norm is not None:
                skip_together(scaler, chosen.values(), norm)  # the norm of one has scaled all
        if self.clip_value is not None:
            clip_grad_value_([p for params in groups for p in params], self.clip_value)
        state.grad_norm = norm
        return norm, number

    def _step_if_finite(self, name: str, opt: Optimizer, norm: Tensor | None, number: float | None) -> None:
        """Step `opt` unless the norm of its gradients is not finite, and move its schedule if it stepped."""
        scaler, known = self.state.scaler, len(opt.state)
        if scaler is not None:
            self._stepped.discard(name)
            scaler.step(opt)  # reads one scalar, unless the optimizer skips on the device
            if skips_on_device(opt):
                self._defer(name, found_inf(scaler, opt), known)
            else:
                self._conclude(name, taken=name in self._stepped)
            self._stepped.add(name)
        elif norm is None or not self.check_finite:
            opt.step()
            self._conclude(name, taken=True)
        elif number is not None:
            taken = math.isfinite(number)
            if taken:
                opt.step()
            self._conclude(name, taken=taken)
        else:
            flag = not_finite(norm)
            opt.grad_scale, opt.found_inf = None, flag  # type: ignore[attr-defined]
            try:
                opt.step()
            finally:
                del opt.grad_scale, opt.found_inf  # type: ignore[attr-defined]
            self._defer(name, flag, known)

    def _defer(self, name: str, flag: Tensor, known: int) -> None:
        """Leave the verdict on a step to the device. Before it, `known` parameters had state in the optimizer."""
        begun = self.state.optimizers[name].state
        if len(begun) > known:
            self._begun[name] = list(begun)[known:]
        if name not in self._verdicts:
            self._verdicts[name] = DeferredFlag(self.device)
        verdict = self._verdicts[name]
        verdict.put(flag, self.state.current_step)
        if not verdict.waits:
            self._settle()

    def _settle(self) -> None:
        """Act on verdicts that the device left behind in an earlier step."""
        for name, verdict in self._verdicts.items():
            skipped = verdict.take()
            if skipped is None:
                continue
            begun = self._begun.pop(name, ())
            if skipped:
                for param in begun:  # a fused SGD's momentum would be whatever the memory held before
                    del self.state.optimizers[name].state[param]
            self._conclude(name, taken=not skipped, step=verdict.step)

    def _conclude(self, name: str, *, taken: bool, step: int | None = None) -> None:
        """Move the schedule of a step (default: this one) that was taken; count, tell or raise one that was not."""
        state = self.state
        if taken:
            scheduler = state.schedulers.get(name)
            if scheduler is not None and self.schedule_every == "step" and not _is_plateau(scheduler):
                scheduler.step()
            return
        state.skipped_steps += 1
        self.listeners.on_skip(state)
        others = " (or of one that steps together with it)" if len(state.optimizers) > 1 else ""
        told = (
            f"step {step or state.current_step}: the gradients of optimizer `{name}`{others} were Inf or NaN, so the "
            "step was skipped and the weights are as before"
        )
        if self.nonfinite == "raise":
            raise NonFiniteError(f"{told}. `nonfinite='skip'` goes on instead")
        if state.scaler is None and state.skipped_steps == 1:  # under loss scaling, skips are how the scale is found
            warnings.warn(f"{told}; further ones are counted in `train/skipped_steps`", RuntimeWarning, stacklevel=2)

    def _closure_step(self, name: str, window: Sequence[Any]) -> None:
        """One step of an optimizer that evaluates the window several times (LBFGS)."""
        opt = self.state.optimizers[name]
        params = [p for group in opt.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        self._rates[name] = float(opt.param_groups[0]["lr"])

        def closure() -> Tensor:
            self.zero_grad()
            loss = self.forward_backward(window)
            self.listeners.on_backward_end(self.state)
            _, number = self._clip({name: opt})
            if number is not None and not math.isfinite(number):
                raise _NonFiniteInClosure
            return loss

        try:
            loss: Any = opt.step(closure)  # type: ignore[arg-type]
        except _NonFiniteInClosure:
            with torch.no_grad():
                torch._foreach_copy_(params, before)
            opt.state.clear()  # the curvature it had gathered led here
            self._conclude(name, taken=False)
        else:
            if isinstance(loss, Tensor):
                self.state.loss = loss.detach()  # at the point where the step began
            self.state.num_samples = 0  # counted once, however often the window was evaluated
            self._conclude(name, taken=True)

    # ------------------------------------------------------------------ the run

    def fit(
        self, train: Iterable[Any], val: Iterable[Any] | None = None, *, resume: str | Path | None = None
    ) -> RunState:
        """Train until `max_steps`, `max_epochs`, `max_time` or a listener says stop.

        `resume` names a checkpoint or a run directory (its latest checkpoint); the run then goes on as if it had never
        stopped. Returns the final state.

        Raises:
            ConfigError: nothing says when to stop.
            BatchError: a loader is empty, or a step returned something that cannot be trained on.
            BudgetError: a step is forecast not to fit into `memory_budget`.
            CheckpointError: `resume` is missing, damaged, or from another model. Nothing was changed.
        """
        self._start_run(train, resume)
        state = self.state
        started = time.monotonic()
        val = self._overfit_set if self.overfit_batches else val
        state.replay, state.forecast_peak = self._replay, self._forecast_peak
        try:
            with self._failures_told(), rng.deterministic_algorithms(self.deterministic):
                self.listeners.on_fit_start(state)
                if state.run_dir is not None:
                    writable_run_dir(state, "the Trainer")
                while not self._should_stop(started):
                    self._run_epoch(val, started)
                self._settle()
                # Not when told to stop: a signal leaves little time, and a resumed run would count one evaluation more.
                if val is not None and state.step not in (0, state.evaluated_step) and state.stop_reason is None:
                    self._evaluate_and_log(val)
                self._save_if_requested()
        finally:
            state.in_step = False
            self.listeners.on_fit_end(state)
            self.report.close()
            if self.report.findings:
                Terminal(sys.stderr).summary(self.report.findings, num_steps=state.step)
        self._save_if_requested()  # a listener may have asked for the end to be saved
        if self.train_loader is not None:
            self.train_loader.close()  # its worker processes end with the run
        self.report.raise_if_failed()  # what the end of the run showed
        return state

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Listeners hear of an error, with the batch it happened on, before it goes on to the caller."""
        state = self.state
        try:
            yield
        except BaseException as error:
            state.exception = error
            self.listeners.on_exception(state)
            raise
        finally:
            state.exception = state.replay = state.forecast_peak = state.batch = state.micro_loss = None

    def _start_run(self, train: Iterable[Any], resume: str | Path | None) -> None:
        if self.max_steps is None and self.max_epochs is None and self.max_time is None:
            raise ConfigError("fit would never end: give the Trainer max_steps, max_epochs or max_time")
        state = self.state
        if self.overfit_batches:
            with rng.preserved():
                rng.seed_everything(self.seed or 0)  # so that a resumed run finds the same batches
                self._overfit_set = _first(train, self.overfit_batches)
        self.train_loader = EpochLoader.of(self._overfit_set or train)
        if not self.model.training or sets_modes_itself(self.model):
            self.model.train()  # else not: a model with only some modules in eval mode was set up so on purpose
        state.phase, state.stop_reason, state.save_request = "train", None, None
        state.total_steps = self._total_steps(self._overfit_set or train)
        if resume is not None:
            self.load(resume)
            self.report.keep_earlier()
        elif self._position is not None:
            self.train_loader.load_state_dict(self._position)
        elif self.seed is not None and state.step == 0:
            rng.seed_everything(self.seed)
        self._position, self._must_forecast = None, self.memory_budget is not None
        self._find_outside()  # after the load, which may thaw parameters
        state.request_samples(FIRST_STEPS)
        _log.info("listeners, in order: %s", ", ".join(type(c).__name__ for c in self.listeners.callbacks) or "none")

    def _total_steps(self, train: Any) -> int | None:
        """The step that ends the run, as far as the settings and the loader's length tell."""
        ends = [] if self.max_steps is None else [self.max_steps]
        if self.max_epochs is not None and hasattr(train, "__len__"):
            with suppress(TypeError):  # a DataLoader over an IterableDataset has a __len__ that raises
                batches_an_epoch = min(len(train), self.limit_batches or len(train))
                ends.append(self.max_epochs * math.ceil(batches_an_epoch / self.accumulate))
        return min(ends, default=None)

    def _find_outside(self) -> None:
        """Trainable parameters of the model that no optimizer holds: their gradients are dropped each step as well."""
        held = {id(p) for opt in self.state.optimizers.values() for g in opt.param_groups for p in g["params"]}
        self._outside = [p for p in self.model.parameters() if id(p) not in held and p.requires_grad]

    def _run_epoch(self, val: Iterable[Any] | None, started: float) -> None:
        """Steps until the loader ends; returns early when the run should stop."""
        state, loader = self.state, self.train_loader
        assert loader is not None
        iterator = loader.start_epoch(state.epoch)
        if self.limit_batches is not None:
            iterator = itertools.islice(iterator, max(0, self.limit_batches - loader.batches_done))
        while window := list(itertools.islice(iterator, self.accumulate)):
            state.batch_in_epoch = loader.batches_done
            self._run_step(window)
            if self.eval_every is not None and val is not None and state.step % self.eval_every == 0:
                self._evaluate_and_log(val)
            if state.save_request is not None:
                self._save_if_requested()
            if self._should_stop(started) and (state.stop_reason is not None or not self._at_epoch_end(loader)):
                return
        self._end_epoch(val)

    def _at_epoch_end(self, loader: EpochLoader) -> bool:
        """The epoch has no batch left, as far as lengths tell: a run that stops here has finished it."""
        lengths = [length for length in (loader.num_batches, self.limit_batches) if length is not None]
        return bool(lengths) and loader.batches_done >= min(lengths)

    def _end_epoch(self, val: Iterable[Any] | None) -> None:
        state = self.state
        self._settle()
        state.epoch, state.batch_in_epoch = state.epoch + 1, 0
        if self.schedule_every == "epoch":
            for scheduler in state.schedulers.values():
                if not _is_plateau(scheduler):
                    scheduler.step()
        self._find_outside()
        self.listeners.on_epoch_end(state)
        if self.eval_every is None and val is not None:
            self._evaluate_and_log(val)
        self._save_if_requested()

    def _run_step(self, window: Sequence[Any]) -> None:
        """`train_step` with its events and counters."""
        if self._must_forecast:
            self._forecast(window)
        state = self.state
        state.begin_step()
        self.listeners.choose(state)
        state.is_logging_step = logging_step = state.step == 0 or (state.step + 1) % self.log_every == 0
        self._averages = Averages(self.device) if logging_step else None
        self._stepped.clear()
        state.loss, state.num_samples = None, 0
        self.listeners.on_step_start(state)
        check_compiled = self.compile_options is not None and not self._compile_checked
        if check_compiled:
            self._verify_compiled(window)
        self.train_step(window)
        if check_compiled:
            compiling.warn_if_uncalled(self.model)
        if self._splitter is not None and not self._splitter.used:
            warn_if_unused(self)
        if state.scaler is not None and self._stepped:
            state.scaler.update()
        if not state.num_samples:  # an overridden train_step need not count them
            state.num_samples = sum(map(self.batch_size, window))
        state.step += 1
        state.in_step = False
        state.batch = None
        self.listeners.on_step_end(state)
        if logging_step:
            self._log_step()
        self.report.raise_if_failed()
        if state.attached_metrics:
            state.attached_metrics = set()

    def _forecast(self, window: Sequence[Any]) -> None:
        """Before the first step, where `memory_budget` asks for it: refuse a run that cannot fit."""
        from safetrain.planner.refusal import refuse_if_too_big  # which runs Trainers itself

        self._must_forecast = False
        assert self.memory_budget is not None
        refuse_if_too_big(self, window, self.memory_budget)

    def _verify_compiled(self, window: Sequence[Any]) -> None:
        """On the first window, where `compile.verify` asks for it: compare loss and gradients with eager ones."""
        options = self.compile_options
        assert options is not None
        self._compile_checked = True
        if options.verify:
            if type(self).training_step is Trainer.training_step:
                raise ConfigError(
                    f"compile.verify compares the loss of training_step, which {type(self).__name__} has not "
                    "(it overrides train_step); set compile.verify to false"
                )
            reduced = self.precision != "fp32"
            compiling.verify(self.model, lambda: self._loss_of(window), options, reduced_precision=reduced)
        self._find_outside()  # the first call of a lazy module makes its parameters

    def _should_stop(self, started: float) -> bool:
        state = self.state
        if self.max_steps is not None and state.step >= self.max_steps:
            return True
        if self.max_epochs is not None and state.epoch >= self.max_epochs:
            return True
        if self.max_time is not None and time.monotonic() - started >= self.max_time:
            return True
        return state.stop_reason is not None

    def _save_if_requested(self) -> None:
        state = self.state
        if state.save_request is None:
            return
        if state.run_dir is None:
            raise ConfigError(
                f"a checkpoint was asked for ({state.save_request}) but the Trainer has no run_dir to write it to"
            )
        state.save_request = None
        state.checkpoint_path = self.save(state.run_dir / "checkpoints")
        self.listeners.on_checkpoint_saved(state)

    def save(self, directory: str | Path) -> Path:
        """Write what shapes the rest of the run to a new folder `step_NNNNNNNN` of `directory`; returns its path."""
        self._settle()
        return checkpoint.write(checkpoint.capture(self), Path(directory))

    def load(self, path: str | Path) -> None:
        """Take up the run that `save` wrote to `path` (a checkpoint, or a run directory: its latest one).

        Raises:
            CheckpointError: it is missing, damaged, or from another model. Nothing was changed.
        """
        self._position = checkpoint.restore(self, checkpoint.read(path))
        sizes = (self.micro_batch_size, self.state.micro_batch_size)  # what the run came down to stays
        self.state.micro_batch_size = min((size for size in sizes if size is not None), default=None)

    def dry_run(self, train: Iterable[Any], val: Iterable[Any] | None = None) -> dict[str, float]:
        """Try everything once: a window, an evaluation batch, saving and loading. Returns the rows' numbers.

        Runs in a temporary run directory with every listener; afterwards model, optimizers, generators and settings
        are as before. An iterator that is used up once loses the batches tried.
        """
        state = self.state
        before = copy.deepcopy(checkpoint.capture(self))
        limits = ("max_steps", "max_epochs", "max_time", "eval_every", "limit_eval_batches")
        settings = {name: getattr(self, name) for name in limits}
        run_dir, report, listeners = state.run_dir, self.report, self.listeners
        with tempfile.TemporaryDirectory(prefix="safetrain-dry-run-") as folder:
            try:
                vars(self).update(dict.fromkeys(limits), max_steps=state.step + 1, limit_eval_batches=1)
                state.run_dir = Path(folder)
                self._attach_guards(state.run_dir)  # the run to come has its own, which have seen nothing yet
                self.fit(train, val)
                numbers = {"train/loss": float(state.loss)} if state.loss is not None else {}
                numbers |= {f"val/{name}": value for name, value in state.eval_metrics.items()}
                self.load(self.save(folder))
            finally:
                vars(self).update(settings)
                state.run_dir, self.report, self.listeners, self.train_loader = run_dir, report, listeners, None
                self._position = checkpoint.restore(self, before)
        return numbers

    def _loss_of(self, window: Sequence[Any]) -> Tensor:
        """The loss of a window with its graph, for looking at; nothing is differentiated or counted."""
        window = in_micro_batches(self, window)
        shares = Shares([self.batch_size(batch) for batch in window])
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(window):
            with self._autocast:
                loss, weight, _ = unpack(self.training_step(self.to_device(batch)))
            total = total + shares.share_of(loss, weight, index, list)
        return total

    def _replay(self) -> Tensor:
        """The loss of the micro-batch in `state.batch` once more, with its graph. Nothing is logged or kept here."""
        attributes = dict(vars(self))
        self._averages = None
        try:
            return self._loss_of([self.state.batch])
        finally:
            vars(self).clear()
            vars(self).update(attributes)

    def _forecast_peak(self, micro_batch_size: int) -> int:
        """Bytes of tensors at the peak of a step over `state.batch` in micro-batches of a size. Allocates nothing."""
        from safetrain.planner import forecast  # it knows the Trainer, and is seldom needed
        from safetrain.planner.faking import make_mode

        state = self.state
        before = state.micro_batch_size, state.exception
        state.micro_batch_size, state.exception = micro_batch_size, None
        try:
            return forecast(self, [state.batch], make_mode()).peak_bytes
        finally:
            state.micro_batch_size, state.exception = before

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Metrics over `loader`, averaged by samples (a `StepOutput`'s by its weight). One host sync, at the end.

        Runs without graphs, in eval mode, with the generators put back afterwards and each submodule's mode as it was.

        Raises:
            BatchError: the loader is empty, or a step returned nothing to average.
        """
        with self._failures_told():
            return self._evaluate(loader)

    def _evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        state = self.state
        averages = Averages(self.device)
        source = EpochLoader.of(loader, "evaluation")
        with self._evaluating(averages):
            if not self._evaluation_loop(source, averages):
                source.refuse_empty()
            metrics = averages.compute()
        if not metrics:
            raise BatchError(
                "evaluation: no step returned or logged a number, so there is nothing to average; return the loss, "
                "`(loss, metrics)` or a dict of metrics (is a `return` missing?)"
            )
        state.eval_metrics = metrics
        self.listeners.on_eval_end(state)
        return state.eval_metrics

    def _evaluation_loop(self, loader: Iterable[Any], averages: Averages) -> int:
        is_default = getattr(self.evaluation_step, "__func__", None) is Trainer.evaluation_step
        step, size_of = self.training_step if is_default else self.evaluation_step, self.batch_size
        moves, add_loss = self._moves, averages["loss"].add
        count = 0
        for batch in itertools.islice(loader, self.limit_eval_batches):
            count += 1
            if moves:
                batch = self.to_device(batch)
            self._weight = size = size_of(batch)
            output = step(batch)
            if isinstance(output, Tensor):
                add_loss(output.detach() if output.requires_grad else output, size)
            elif output is not None:
                self._take_evaluation(output, averages)
        return count

    def _take_evaluation(self, output: Any, averages: Averages) -> None:
        """Count what an evaluation step returned beside a plain loss."""
        if isinstance(output, Mapping):
            return self._take_metrics(output, self._weight)
        loss, weight, metrics = unpack(output)
        if weight is None:
            averages.add("loss", loss.detach(), self._weight)
        else:
            averages["loss"].add_sum(loss.detach(), weight)
        if metrics:
            self._take_metrics(metrics, self._weight if weight is None else weight)

    def predict(self, loader: Iterable[Any]) -> list[Any]:
        """`predict_step` of every batch, without graphs, on the CPU. A host sync a batch on accelerators."""
        with self._evaluating(None):
            source = EpochLoader.of(loader, "prediction")
            return [batches.to_host(self.predict_step(self.to_device(batch))) for batch in source]

    @contextmanager
    def _evaluating(self, averages: Averages | None) -> Iterator[None]:
        """Eval mode without graphs; afterwards phase, generators and the mode of every submodule are as they were."""
        state, before = self.state, (self.state.phase, self._averages)
        state.phase, self._averages = "eval", averages
        modes = [(module, module.training) for module in self.model.modules()]
        context = torch.inference_mode() if self.eval_context == "inference_mode" else torch.no_grad()
        try:
            if averages is not None:  # a prediction ends without on_eval_end: listeners would take it for an evaluation
                self.listeners.on_eval_start(state)
            self.model.eval()
            with rng.preserved(), context, self._autocast:
                yield
        finally:
            for module, training in modes:  # parents come first
                if module.training is not training:
                    set_training(module, training)
            state.phase, self._averages = before

    def _evaluate_and_log(self, val: Iterable[Any]) -> None:
        state = self.state
        self._settle()
        self.zero_grad()  # gradients would sit under the peak of evaluation, and the next step drops them anyway
        metrics = self._evaluate(val)
        state.evaluated_step = state.step
        if "loss" in metrics:
            for scheduler in state.schedulers.values():
                if _is_plateau(scheduler):
                    scheduler.step(metrics["loss"])
        state.row = {f"val/{name}": value for name, value in metrics.items()}
        self.listeners.on_log(state)

    # ------------------------------------------------------------------ numbers for the log

    def _take_metrics(self, metrics: Metrics, weight: Tensor | float) -> None:
        averages = self._averages
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.requires_grad:
                self.state.attached_metrics.add(name)
                value = value.detach()
            if averages is not None:
                averages.add(name, value, weight)

    def _log_step(self) -> None:
        """Fill `state.row` and send it out: the host sync of a logging step."""
        state, averages = self.state, self._averages
        assert averages is not None
        self._settle()
        if state.loss is not None:
            averages.add("loss", state.loss, 1.0)
        if state.grad_norm is not None:
            averages.add("grad_norm", state.grad_norm, 1.0)
        state.metrics = averages.compute()
        state.row = {f"train/{name}": value for name, value in state.metrics.items()}
        for name, rate in self._rates.items():
            state.row["train/lr" if len(state.optimizers) == 1 else f"train/lr/{name}"] = rate
        state.row["train/skipped_steps"] = float(state.skipped_steps)
        if self.oom == "split":
            state.row["memory/oom_splits"] = float(state.oom_splits)
        if state.scaler is not None:
            state.row["train/loss_scale"] = state.scaler.get_scale()
        self._averages = None
        self.listeners.on_log(state)

    # ------------------------------------------------------------------ small helpers

    def _named(self, names: Sequence[str]) -> Mapping[str, Optimizer]:
        optimizers = self.state.optimizers
        if not names:
            return optimizers
        for name in names:
            if name not in optimizers:
                raise ConfigError(f"there is no optimizer `{name}`; the Trainer has {', '.join(map(repr, optimizers))}")
        return {name: optimizers[name] for name in names}

    def _gradients(self, names: Sequence[str] = ()) -> list[Tensor]:
        """The gradients that the named optimizers (default: all) would step."""
        chosen = self._named(names).values()
        return [p.grad for opt in chosen for g in opt.param_groups for p in g["params"] if p.grad is not None]


def autocast_for(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context in which `training_step` runs."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, _AUTOCAST[precision])


class _NonFiniteInClosure(Exception):
    """Leaves an optimizer's line search before it writes Inf or NaN into the weights."""


def _snapshot_holders(trainer: weakref.ref[Trainer]) -> list[tuple[str, Any]]:
    """Where a script keeps its best weights: on trainer or callback. Held weakly: a guard keeps no run alive."""
    held = trainer()
    return [] if held is None else [("trainer", held), *((type(c).__name__, c) for c in held.callbacks)]


def _note_step(stepped: set[str], name: str, *_: Any) -> None:
    """Post-hook of an optimizer: it was really stepped (the scaler may have skipped it)."""
    stepped.add(name)


def _first(loader: Iterable[Any], count: int) -> list[Any]:
    return list(itertools.islice(EpochLoader.of(loader), count))


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceLROnPlateau)


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return tensor.device if tensor is not None else torch.device("cpu")
