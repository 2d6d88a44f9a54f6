"""The config of a run: one frozen tree. `python -m safetrain config --help` prints every field with its docstring.

Nothing here imports torch: reading a config and showing its help must answer at once. What needs torch to be judged
(does this optimizer exist, does it take this argument) is judged where it is built, in `safetrain.config.build`.

pydantic-settings was tried for files and overrides and not taken. Its command line knows only fields that are
declared, so `optim.betas=…`, `params.hidden=64`, `guards.G101=error` and `optims.critic.lr=…` are refused as
unrecognised; it reads YAML 1.1, where `1e-4` is a string; and it answers a misspelt key with argparse's usage text
instead of the right name. What it would save is some forty lines of `safetrain.config.file`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from safetrain.sizes import parse_bytes

Patterns: TypeAlias = Annotated[
    tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v), Field(strict=False)
]


def _on_or_off(value: Any) -> Any:
    """`true` means the section with its defaults, `false` means none."""
    if value is True:
        return {}
    return None if value is False else value


Switch = BeforeValidator(_on_or_off)


class Section(BaseModel):
    """A part of the config. Frozen, refuses unknown keys, and does not turn one type into another."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class LoopConfig(Section):
    """How long to train and what a step does. Names and defaults are those of `Trainer`."""

    max_steps: int | None = Field(None, ge=1)
    """Stop after so many optimizer steps."""
    max_epochs: int | None = Field(None, ge=1)
    """Stop after so many passes over the training data."""
    max_time: float | None = Field(None, gt=0)
    """Stop after so many seconds."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per optimizer step. The gradient equals that of one large batch, short last windows included."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Cut batches into micro-batches of at most so many samples; the gradients stay the same."""
    oom: Literal["raise", "split"] = "raise"
    """What a forward or backward that runs out of memory does: end the run, or repeat the step, and go on, with half
    the micro-batch size."""
    memory_budget: int | str | None = None
    """Refuse to start when a step is forecast to need clearly more than this, e.g. 24GB, with the cheapest remedies.
    auto: than the device has free. The forecast takes seconds, once; null: no forecast."""
    clip_norm: float | None = Field(None, gt=0)
    """Clip gradients to this total norm."""
    clip_norm_type: float = Field(2.0, gt=0)
    """Which p-norm `clip_norm` means; .inf for the largest absolute value."""
    clip_value: float | None = Field(None, gt=0)
    """Clip each gradient entry to [-value, value]."""
    clip_per_group: bool = False
    """Take the norm over each parameter group by itself."""
    nonfinite: Literal["skip", "raise"] = "skip"
    """What a step with Inf or NaN gradients does. Weights are not stepped with them either way."""
    check_finite: bool = True
    """The gate that keeps Inf and NaN gradients out of the weights.
    Costs one scalar read a step unless the optimizer is fused."""
    schedule_every: Literal["step", "epoch"] = "step"
    """When the learning-rate schedule moves: with each optimizer step that was taken, or with each epoch.
    ReduceLROnPlateau moves after each evaluation."""
    eval_every: int | None = Field(None, ge=1)
    """Evaluate after every so many optimizer steps; null: after each epoch."""
    limit_batches: int | None = Field(None, ge=1)
    """Use only so many micro-batches of each epoch."""
    limit_eval_batches: int | None = Field(None, ge=1)
    """Use only so many batches of each evaluation."""
    overfit_batches: int = Field(0, ge=0)
    """Train and evaluate on the first so many batches only: a model that cannot learn those has a bug."""
    eval_context: Literal["no_grad", "inference_mode"] = "no_grad"
    """What evaluation runs under. inference_mode is a little faster; its tensors can never meet autograd again."""
    log_every: int = Field(50, ge=1)
    """Optimizer steps between rows of the log. A logging step is the only one that waits for the device."""

    @model_validator(mode="after")
    def _check(self) -> LoopConfig:
        if self.max_steps is None and self.max_epochs is None and self.max_time is None:
            raise ValueError(
                "max_steps, max_epochs and max_time are all missing, so training would never end; set one, e.g. "
                "max_epochs: 10"
            )
        if self.overfit_batches and self.limit_batches:
            raise ValueError("overfit_batches and limit_batches both say which batches to use; remove one")
        if self.clip_norm is None and self.clip_norm_type != 2.0:
            raise ValueError(
                "clip_norm_type is set but clip_norm is not, so nothing would be clipped; set clip_norm too, e.g. "
                "clip_norm: 1.0"
            )
        if self.clip_norm is None and self.clip_per_group:
            raise ValueError(
                "clip_per_group is set but clip_norm is not, so nothing would be clipped; set clip_norm too, e.g. "
                "clip_norm: 1.0"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_norm and clip_value are both set; clip by one of them")
        if self.memory_budget not in (None, "auto"):
            parse_bytes(self.memory_budget, "memory_budget")
        if self.nonfinite == "raise" and not self.check_finite:
            raise ValueError(
                "nonfinite: raise needs check_finite: true, which is what notices Inf and NaN; remove one of the two"
            )
        return self


class OptimConfig(Section):
    """An optimizer. Further keys go to it as arguments and are checked against its signature."""

    model_config = ConfigDict(extra="allow")

    name: str = "AdamW"
    """A class of torch.optim, or your own as `package.module:Class`."""
    lr: float | None = Field(None, ge=0)
    """Learning rate; null: the optimizer's own default."""
    fused: bool | None = None
    """One kernel for all parameters, which also lets the finiteness gate work without a host sync.
    null: fused where the optimizer and the parameters allow it."""
    params: Patterns = ()
    """Which parameters, as shell patterns over their names, e.g. `generator.*`. Empty: all that require a gradient."""
    groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments for some of the parameters by name pattern, e.g. `{"*.bias": {weight_decay: 0.0}}`.
    The first match counts."""


class ScheduleConfig(Section):
    """A learning-rate schedule. Further keys go to it as arguments and are checked against its signature."""

    model_config = ConfigDict(extra="allow")

    name: str
    """A class of torch.optim.lr_scheduler, `WarmupCosine`, or your own as `package.module:Class`."""


class DataConfig(Section):
    """How our loader serves the datasets that the trainer returns."""

    batch_size: int = Field(32, ge=1)
    """Samples per micro-batch."""
    eval_batch_size: int | None = Field(None, ge=1)
    """Samples per evaluation batch; null: the same as batch_size."""
    shuffle: bool | None = None
    """Draw a new order each epoch; null: yes, except for iterable datasets and with loop.overfit_batches."""
    num_workers: int = Field(0, ge=0)
    """Worker processes that load batches; 0 loads in the training process."""
    drop_last: bool = False
    """Leave out the last, shorter batch of an epoch. It is weighted rightly without this."""
    pin_memory: bool | None = None
    """Load into page-locked memory, from which copies to a GPU overlap with computing; null: when training on CUDA."""


class CompileConfig(Section):
    """torch.compile, in place. Names and defaults are those of `safetrain.compile.CompileOptions`."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode."""
    dynamic: bool | None = None
    """true: one artifact for all shapes; false: one per shape; null: turn dynamic when shapes change."""
    fullgraph: bool = False
    """Refuse graph breaks: a break then means eager, with a warning that names it."""
    backend: str = "inductor"
    """torch.compile's backend; aot_eager needs no C++ compiler."""
    modules: Patterns = ()
    """Modules to compile one by one, as shell patterns over their names. Empty: the whole model."""
    exclude: Patterns = ()
    """Modules to leave eager, as shell patterns over their names; each costs a graph break."""
    activation_memory_budget: float | None = Field(None, ge=0, le=1)
    """Share of the activations that compiled code may keep for backward; the rest it computes again. null: torch's."""
    verify: bool = False
    """Compare loss and every gradient of the first window with eager."""
    tolerance: float | None = Field(None, gt=0, lt=1)
    """Largest relative deviation that verify accepts; null: 1e-3, or 5e-2 under reduced precision."""
    on_mismatch: Literal["refuse", "fallback"] = "refuse"
    """What to do when verify finds a difference: stop, or warn and train eagerly."""


class ActivationCheckpointConfig(Section):
    """Keep fewer activations between forward and backward. Names and defaults are those of `CheckpointOptions`."""

    modules: Patterns = ()
    """Which modules, as shell patterns over their names, e.g. `blocks.*`. Empty: the model's repeated blocks."""
    every: int = Field(1, ge=1)
    """Of those, in model order, the first and each n-th after it."""
    mode: Literal["recompute", "selective", "offload", "auto"] = "recompute"
    """recompute: keep a module's inputs only. selective: keep results of matrix products and convolutions as well.
    offload: move what is saved to host memory. auto: choose module by module, the fastest that fits into budget."""
    budget: int | str | None = None
    """For mode auto: the highest bytes of a step, e.g. 24GB: parameters, gradients, optimizer state and what the step
    allocates."""
    preserve_rng_state: bool | Literal["auto"] = "auto"
    """Draw the same random numbers (dropout) when recomputing. auto: where the forward drew any, which is checked.
    false is refused where it did."""

    @model_validator(mode="after")
    def _check(self) -> ActivationCheckpointConfig:
        if self.mode == "auto" and self.budget is None:
            raise ValueError("mode: auto needs a budget, e.g. budget: 24GB")
        if self.mode != "auto" and self.budget is not None:
            raise ValueError(f"budget would be ignored with mode: {self.mode}; set mode: auto, or remove budget")
        if self.budget is not None:
            parse_bytes(self.budget, "budget")
            if self.every != 1:
                raise ValueError("every and budget both say which modules recompute; remove one of them")
        return self


class ProgressConfig(Section):
    """A progress bar with loss, rate and memory; where the output is no terminal, a line now and then."""

    plain_every_s: float = Field(10.0, ge=0)
    """Seconds between lines of training rows where the output is no terminal; 0 writes every row."""


class JsonlConfig(Section):
    """Every row of the log as one JSON object a line in metrics.jsonl."""


class TensorBoardConfig(Section):
    """TensorBoard events: losses, learning rates, gradients by layer, memory by phase and owner, throughput."""

    layers: bool = True
    """Log gradient norm and update-to-weight ratio of each layer, and how many layers are dead or explode."""


class CheckpointConfig(Section):
    """When to save, and what to keep."""

    every_steps: int | None = Field(None, ge=1)
    """Save after every so many optimizer steps."""
    every_epoch: bool = True
    """Save after each epoch."""
    at_end: bool = True
    """Save when the run ends."""
    on_signals: bool = True
    """SIGTERM and Ctrl-C save after the running step and end the run; SIGUSR1 saves and goes on."""
    keep_last: int = Field(2, ge=1)
    """How many of the newest checkpoints to keep."""
    monitor: str | None = None
    """A validation metric, e.g. accuracy: the checkpoint with the best value is kept as well."""
    mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; null: as the name tells (a loss, an accuracy)."""


class EarlyStoppingConfig(Section):
    """Stop when a validation metric no longer improves."""

    monitor: str = "loss"
    """The metric of the evaluation, e.g. loss or accuracy."""
    patience: int = Field(3, ge=1)
    """Evaluations in a row without improvement that are borne."""
    mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; null: as the name tells (a loss, an accuracy)."""
    min_delta: float = Field(0.0, ge=0)
    """How much better counts as better."""


class EMAConfig(Section):
    """A running average of the weights, used for evaluation."""

    decay: float = Field(0.999, gt=0, lt=1)
    """How much of the old average each step keeps."""
    warmup: bool = False
    """Start with a smaller decay, so that a short run is not all start."""


class LrMonitorConfig(Section):
    """Learning rate of each parameter group in the log."""

    momentum: bool = False
    """Log momentum, or the first beta, as well."""


class MemoryConfig(Section):
    """Bytes in use at each phase of a logging step, and whose they are."""

    summary_every: int | None = Field(None, ge=1)
    """On CUDA, append torch.cuda.memory_summary() to memory_summary.txt after every so many steps."""


class EmptyCacheConfig(Section):
    """Give the allocator's unused memory back to the device at chosen moments, and log what that took and gave."""

    every_steps: int | None = Field(None, ge=1)
    """After every so many optimizer steps; null: at no fixed step."""
    around_evaluation: bool = True
    """Before and after each evaluation."""


class ThroughputConfig(Section):
    """Samples, tokens and floating-point operations per second in the log."""

    measure_flops: bool = True
    """Count the floating-point operations of the second step, which is slower for it."""
    flops_per_sample: float | None = Field(None, gt=0)
    """What a sample costs, forward and backward, when you know it."""
    peak_flops: float | None = Field(None, gt=0)
    """What the device can do per second; then the share of it in use (MFU) is logged."""


class CallbacksConfig(Section):
    """Listeners. `true` turns one on with its defaults, `false` turns it off."""

    progress: Annotated[ProgressConfig | None, Switch] = ProgressConfig()
    """A progress bar with loss, rate and memory; where the output is no terminal, a line now and then."""
    jsonl: Annotated[JsonlConfig | None, Switch] = JsonlConfig()
    """metrics.jsonl: every row of the log as one JSON object a line."""
    tensorboard: Annotated[TensorBoardConfig | None, Switch] = TensorBoardConfig()
    """TensorBoard events in the run's folder."""
    checkpoint: Annotated[CheckpointConfig | None, Switch] = CheckpointConfig()
    """Saving, in the run's folder under checkpoints/."""
    early_stopping: Annotated[EarlyStoppingConfig | None, Switch] = None
    """Stop when a validation metric no longer improves."""
    ema: Annotated[EMAConfig | None, Switch] = None
    """A running average of the weights, used for evaluation."""
    lr_monitor: Annotated[LrMonitorConfig | None, Switch] = LrMonitorConfig()
    """Learning rate of each parameter group in the log."""
    memory: Annotated[MemoryConfig | None, Switch] = MemoryConfig()
    """Bytes in use at each phase of a logging step."""
    empty_cache: Annotated[EmptyCacheConfig | None, Switch] = None
    """Give the allocator's unused memory back to the device at chosen moments, and log what that took and gave."""
    throughput: Annotated[ThroughputConfig | None, Switch] = ThroughputConfig()
    """Samples, tokens and floating-point operations per second in the log."""


Policy = Literal["ignore", "note", "warning", "error"]


def _guards(value: Any) -> Any:
    # Checked here by hand: pydantic would report a wrong policy once for each way the union could have been meant.
    if value is False:
        return "off"  # YAML 1.1 reads a bare `off` as false
    if value in ("default", "off"):
        return value
    policies = Policy.__args__  # type: ignore[attr-defined]
    if not isinstance(value, dict):
        raise ValueError(f"should be default, off, or a policy by rule code such as {{G101: error}}, got {value!r}")
    for code, policy in value.items():
        if policy not in policies:
            raise ValueError(f"{code}: {policy!r} is no policy; choose one of {', '.join(policies)}")
    return value


class Config(Section):
    """A run: what to train, on what, how long, and what to watch."""

    trainer: str
    """The Trainer subclass, as `folder/file.py:Class` or `package.module:Class`. A file is looked up from the current
    folder, then from the config's folder and those above it."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of this training, declared by the trainer's `Params`."""
    run_dir: Annotated[Path | None, Field(strict=False)] = None
    """Where everything of this run is written; null: runs/<config name>-<date>-<time>.
    A folder that holds a run is refused."""
    seed: int | None = Field(0, ge=0)
    """Seeds Python, NumPy and torch before data and model are built, and when training starts; null: as they are."""
    deterministic: bool = False
    """Have torch refuse operations that do not repeat bit for bit."""
    device: str = "auto"
    """Where to train, e.g. cpu, cuda:1; auto takes the accelerator when there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32, or autocast to bf16, or autocast to fp16 with loss scaling."""
    loop: LoopConfig
    """How long to train and what a step does."""
    optim: OptimConfig | None = None
    """The optimizer."""
    optims: dict[str, OptimConfig] = Field(default_factory=dict)
    """Several optimizers by name, each with the pattern of its parameters."""
    schedule: ScheduleConfig | None = None
    """The learning-rate schedule, for every optimizer alike."""
    schedules: dict[str, ScheduleConfig] = Field(default_factory=dict)
    """Schedules by the name of their optimizer."""
    data: DataConfig = DataConfig()
    """How our loader serves the datasets that the trainer returns."""
    compile: Annotated[CompileConfig | None, Switch] = None
    """torch.compile, in place."""
    activation_checkpoint: Annotated[ActivationCheckpointConfig | None, Switch] = None
    """Keep fewer activations between forward and backward; true: recompute the model's repeated blocks."""
    callbacks: CallbacksConfig = CallbacksConfig()
    """Listeners: progress, logs, saving, early stopping, averaged weights."""
    guards: Annotated[Literal["default", "off"] | dict[str, Policy], BeforeValidator(_guards)] = "default"
    """The rules that watch the run: default, off, or a policy by code such as {G101: error, M401: ignore}."""
    strict: bool = False
    """Warnings of the guards stop the run."""

    @model_validator(mode="after")
    def _check(self) -> Config:
        named = (
            {"optim": self.optim} if self.optim else {f"optims.{name}": optim for name, optim in self.optims.items()}
        )
        if self.optim and self.optims:
            raise ValueError(
                "optim and optims are both set; move the one under `optim` into `optims`, or remove one of them"
            )
        if self.schedule and self.schedules:
            raise ValueError("schedule and schedules are both set; remove one of them")
        for name in self.schedules:
            if name not in self.optims:
                known = ", ".join(self.optims) or "none, so use `schedule`"
                raise ValueError(f"schedules.{name} has no optimizer of that name in optims ({known})")
        for path, optim in named.items():
            if self.precision == "fp16" and optim.name == "LBFGS":
                raise ValueError(
                    f"precision: fp16 and {path}.name: LBFGS exclude each other: LBFGS calls backward several "
                    "times a step, "
                    "which loss scaling cannot follow; use precision: bf16 or another optimizer"
                )
            if path != "optim" and not optim.params:
                raise ValueError(
                    f"{path}.params is missing: with several optimizers each names its parameters, e.g. params: "
                    "'generator.*'"
                )
        recompute = self.activation_checkpoint
        if self.compile and recompute and recompute.mode in ("auto", "offload"):
            raise ValueError(
                f"compile and activation_checkpoint.mode: {recompute.mode} exclude each other: compiled code plans by "
                "itself what it keeps; use mode: recompute or selective, or leave compile out"
            )
        if self.loop.overfit_batches and self.data.shuffle:
            raise ValueError(
                "loop.overfit_batches and data.shuffle: true exclude each other: the same batches are to come again, "
                "not new ones; remove data.shuffle"
            )
        return self
