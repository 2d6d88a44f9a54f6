"""The exceptions safetrain raises on purpose. Each message names the thing, the consequence and one remedy."""

from __future__ import annotations

import sys


class SafetrainError(Exception):
    """Base of every error that safetrain raises on purpose."""


class ConfigError(SafetrainError, ValueError):
    """A setting is wrong, unknown, or contradicts another one."""


class BatchError(SafetrainError, ValueError):
    """A loader or a step handed over something that cannot be trained on."""


class CheckpointError(SafetrainError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class BudgetError(SafetrainError):
    """A step is forecast to need more memory than there is. Nothing was trained."""


class NonFiniteError(SafetrainError, FloatingPointError):
    """Gradients or a loss were Inf or NaN and the policy is to stop. Weights were not touched."""


class GuardError(SafetrainError):
    """A rule whose policy is `error` fired. `findings` holds what it saw."""

    def __init__(self, message: str, findings: list[object] | None = None) -> None:
        super().__init__(message)
        self.findings = findings or []


def add_note(error: BaseException, note: str) -> None:
    """Put a line under the error's own message in its traceback."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
