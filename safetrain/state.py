"""What a run looks like from outside: the one object every listener receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from safetrain.findings import SourceLine
    from safetrain.foreign.module_call import ModuleCall

Phase = Literal["setup", "train", "eval"]

FIRST_STEPS = 64
"""Steps at the start of a run, all of which are sampled."""


@dataclass(slots=True, eq=False)
class RunState:
    """The run as listeners may read it. A driver (Trainer, doctor, watch) writes it; listeners write only what is said.

    Steps are optimizer steps. `step` counts the finished ones, so in the first step it is 0 and `current_step` 1.
    Tensors here live on the device and carry no graph, except `micro_loss`; reading one as a number is a host sync,
    so do it on logging steps only.
    """

    model: nn.Module
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any] = field(default_factory=dict)
    scaler: torch.amp.GradScaler | None = None
    device: torch.device | None = None
    run_dir: Path | None = None

    phase: Phase = "setup"
    step: int = 0
    """Finished optimizer steps, skipped ones included."""
    micro_step: int = 0
    """Micro-batches whose backward has run, over the whole run."""
    epoch: int = 0
    """Epochs finished; the first epoch runs with 0."""
    batch_in_epoch: int = 0
    """Micro-batches of the running epoch that have been handed to a step."""
    gated: bool = False
    """The driver itself keeps Inf and NaN gradients from the weights and tells by `on_skip`."""
    num_samples: int = 0
    """Samples of this window, as far as its batches tell."""
    in_step: bool = False
    is_sampled: bool = True
    """The running step reaches the `sampled_hooks` of listeners too; decided before it starts."""
    sampled_until: int = 0
    """Every step up to this one is sampled."""
    stepping: tuple[str, ...] = ()
    """Names of the optimizers about to step, during `on_backward_end`; empty means all."""
    total_steps: int | None = None
    """The step that will end the run, where that is known beforehand."""

    batch: Any = None
    """The micro-batch being processed (on the device); None between steps."""
    micro_loss: Tensor | None = None
    """The loss about to be differentiated, with its graph. Set during `on_backward_start` only: never keep it."""
    loss: Tensor | None = None
    """Mean loss of the last window: scalar, detached, on the device."""
    grad_norm: Tensor | None = None
    """Total gradient norm of the last step, unscaled and before clipping: scalar, on the device."""
    evaluated_step: int | None = None
    """The step after which the last evaluation ran."""
    skipped_steps: int = 0
    """Steps whose non-finite gradients were kept from the weights, each optimizer's counted by itself.

    Exact on logging steps, else it may lag by one.
    """

    micro_batch_size: int | None = None
    """Batches are cut into micro-batches of at most so many samples; None: trained as the loader gives them."""
    oom_splits: int = 0
    """Times that the run went on in smaller micro-batches after memory had run out."""

    is_logging_step: bool = False
    """This step ends with `on_log`; decided before it starts, so that costly readings are made only then."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Values of this step's `log` calls and returned metrics: detached tensors or numbers."""
    row: dict[str, float] = field(default_factory=dict)
    """Numbers of the row being logged. During `on_log` a listener may add to it; writers come last and write it."""
    attached_metrics: set[str] = field(default_factory=set)
    """Names of this step's metrics that came with a graph; the loop detached them."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    """Result of the last evaluation, averaged by sample count."""

    exception: BaseException | None = None
    """Set during `on_exception` and `on_split` only."""
    replay: Callable[[], Tensor] | None = None
    """Runs the micro-batch in `batch` forward again and returns its loss: for a replay that is undone afterwards.

    In a foreign loop it calls the model again and returns its output, or raises LookupError where that cannot be done.
    """
    module_calls: Callable[[Tensor | None], Sequence[ModuleCall]] = lambda loss: ()
    """For drivers that see module calls: those of this step that a loss hangs on (None: all), oldest first."""
    forecast_peak: Callable[[int], int] | None = None
    """Bytes at the peak of a step over `batch`, cut to micro-batches of a size; raises where that cannot be known."""
    gradients_off_at: SourceLine | None = None
    """The user's line that last called `torch.set_grad_enabled(False)`, where a driver sees it."""
    checkpoint_path: Path | None = None
    """Where the last checkpoint was written; valid from `on_checkpoint_saved`."""
    save_request: str | None = None
    """A listener sets this to have the run saved at the end of the step; the text says why."""
    stop_reason: str | None = None
    """A listener sets this to end the run after the step; the text says why."""

    @property
    def current_step(self) -> int:
        """The step a listener should name: counted from 1, the running one inside a step, else the last finished."""
        return self.step + 1 if self.in_step or self.step == 0 else self.step

    def begin_step(self) -> None:
        """For drivers, at the start of a step: whether it is sampled.

        Past `sampled_until` five of every 64 are, and after 512 steps five of every 256.
        """
        self.in_step = True
        step = self.step + 1
        self.is_sampled = step <= self.sampled_until or step % (64 if step <= 516 else 256) <= 4

    def request_samples(self, num_steps: int) -> None:
        """Have the next so many steps sampled."""
        self.sampled_until = max(self.sampled_until, self.step + num_steps)

    def learning_rates(self) -> dict[str, float]:
        """Learning rate of each optimizer's first group. A rate kept as a CUDA tensor costs a host sync."""
        return {name: float(opt.param_groups[0]["lr"]) for name, opt in self.optimizers.items()}
