"""The exceptions safetrain raises on purpose. Each message names the thing, the consequence and one remedy."""

from __future__ import annotations


class SafetrainError(Exception):
    """Base of every error that safetrain raises on purpose."""


class ConfigError(SafetrainError, ValueError):
    """A setting is wrong, unknown, or contradicts another one."""


class BatchError(SafetrainError, ValueError):
    """A loader or a step handed over something that cannot be trained on."""


class CheckpointError(SafetrainError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class NonFiniteError(SafetrainError, FloatingPointError):
    """Gradients or a loss were Inf or NaN and the policy is to stop. Weights were not touched."""


class GuardError(SafetrainError):
    """A rule whose policy is `error` fired. `findings` holds what it saw."""

    def __init__(self, message: str, findings: list[object] | None = None) -> None:
        super().__init__(message)
        self.findings = findings or []
