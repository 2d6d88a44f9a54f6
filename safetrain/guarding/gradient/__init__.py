"""Guards over gradients: thin listeners that feed the judges of `rules.gradient` from any driver.

They share one `Watch`: the coverage of parameters by optimizers, kept up to date, and the look (see `path_look`) that
is taken for one step when something is suspect. No guard keeps a tensor alive or reads one as a number outside logging
steps and the sparse steps of `is_sample`.
"""

from __future__ import annotations

from safetrain.callbacks.base import Callback
from safetrain.findings import Report
from safetrain.guarding.gradient.lost import LostGradientGuard
from safetrain.guarding.gradient.missing import MissingGradientGuard
from safetrain.guarding.gradient.numbers import NumbersGuard
from safetrain.guarding.gradient.sampling import is_sample
from safetrain.guarding.gradient.stale import StaleGradientGuard
from safetrain.guarding.gradient.watch import Watch

__all__ = [
    "LostGradientGuard",
    "MissingGradientGuard",
    "NumbersGuard",
    "StaleGradientGuard",
    "Watch",
    "gradient_guards",
    "is_sample",
]


def gradient_guards(report: Report, *, may_look: bool = True, patience: int = 100) -> list[Callback]:
    """The guards of this file, in the order they must run."""
    watch = Watch(report, may_look=may_look)
    return [
        watch,
        LostGradientGuard(report, watch),  # before the next one: what it explains is no constant term
        MissingGradientGuard(report, watch, patience=patience),
        NumbersGuard(report, watch),
        StaleGradientGuard(report, watch),
    ]
