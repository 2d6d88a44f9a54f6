"""What can be set about activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from safetrain.errors import ConfigError
from safetrain.modules import as_patterns
from safetrain.sizes import parse_bytes

Mode = Literal["recompute", "selective", "offload", "auto"]


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Which modules keep less for backward, and how. Raises `ConfigError` for settings that contradict each other."""

    modules: tuple[str, ...] = ()
    """`fnmatch` patterns of module names as `model.named_modules()` gives them, as in `blocks.*`.
    Empty: the model's repeated blocks (`find_blocks`)."""
    every: int = 1
    """Of the matching modules, in model order: the first and each n-th after it."""
    mode: Mode = "recompute"
    """`recompute`, `selective`, `offload`, or `auto` within `budget`."""
    budget: int | str | None = None
    """The highest bytes that a step may take: parameters, gradients, optimizer state and all that the step allocates.
    A number, or such as `24GB`; for `mode="auto"` only. Kept as a number."""
    preserve_rng_state: bool | Literal["auto"] = "auto"
    """Whether a recomputation draws the random numbers of the first forward again. `auto`: where the forward drew any,
    as the generators themselves tell in every call. False is refused where it drew."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", as_patterns(self.modules))
        if self.mode not in get_args(Mode):
            raise ConfigError(f"activation_checkpoint.mode: {self.mode!r}; it is one of {', '.join(get_args(Mode))}")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"activation_checkpoint.every: {self.every!r}; it is a whole number from 1")
        if self.preserve_rng_state not in (True, False, "auto"):
            raise ConfigError(
                f"activation_checkpoint.preserve_rng_state: {self.preserve_rng_state!r}; it is true, false or auto"
            )
        self._check_budget()

    def _check_budget(self) -> None:
        if self.budget is None:
            if self.mode == "auto":
                raise ConfigError("activation_checkpoint.mode is auto but there is no budget; set budget, as in 24GB")
            return
        if self.mode != "auto":
            raise ConfigError(
                f"activation_checkpoint.budget would be ignored with mode: {self.mode}; set mode: auto or remove it"
            )
        if self.every != 1:
            raise ConfigError(
                "activation_checkpoint.every and budget both say which modules recompute; remove one of them"
            )
        object.__setattr__(self, "budget", parse_bytes(self.budget, "activation_checkpoint.budget"))


def as_options(value: str | Iterable[str] | CheckpointOptions) -> CheckpointOptions:
    """Options as they are; patterns as options. Raises `ConfigError` for an empty list of patterns."""
    if isinstance(value, CheckpointOptions):
        return value
    patterns = as_patterns(value)
    if not patterns:
        raise ConfigError(
            "activation_checkpoint: no pattern given; name the modules, as in `blocks.*`, or give CheckpointOptions() "
            "for the model's repeated blocks"
        )
    return CheckpointOptions(patterns)
