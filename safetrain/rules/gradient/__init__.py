"""Family P: parameters that do not train as they should, and terms of a loss that cannot teach.

The judges are plain functions, usable in a bare loop; `safetrain.guarding.gradient` feeds them in a run.
"""

from safetrain.rules.gradient.catalogue import (
    CONSTANT_TERM,
    DROPPED_GRAD,
    DUPLICATE,
    FREEZE_INEFFECTIVE,
    FROZEN_IN_OPTIMIZER,
    GRAD_NONE,
    GRADIENT_SCALE,
    NO_UPDATE,
    NOT_IN_OPTIMIZER,
    STALE_GRAD,
    STALE_IN_OPTIMIZER,
    ZERO_GRAD,
)
from safetrain.rules.gradient.freezes import (
    find_ineffective_freezes,
    find_state_dict_freeze,
)
from safetrain.rules.gradient.lost import explain_lost
from safetrain.rules.gradient.missing import (
    explain_missing,
    find_constant_terms,
    find_missing_grads,
    may_have_constant_term,
)
from safetrain.rules.gradient.numbers import (
    VANISHED,
    ZeroCause,
    biases_before_norm,
    find_gradient_scale,
    find_no_updates,
    find_zero_grads,
    stale_finding,
    zero_gradient_causes,
)
from safetrain.rules.gradient.optimizers import (
    GradientEvidence,
    find_optimizer_mismatches,
    find_unregistered,
    graph_parameters,
    hidden_parameters,
    judge_coverage,
    judge_duplicates,
    judge_frozen,
    parameters_of_drivers,
    shared_finding,
)

__all__ = [
    "CONSTANT_TERM",
    "DROPPED_GRAD",
    "DUPLICATE",
    "FREEZE_INEFFECTIVE",
    "FROZEN_IN_OPTIMIZER",
    "GRADIENT_SCALE",
    "GRAD_NONE",
    "NOT_IN_OPTIMIZER",
    "NO_UPDATE",
    "STALE_GRAD",
    "STALE_IN_OPTIMIZER",
    "VANISHED",
    "ZERO_GRAD",
    "GradientEvidence",
    "ZeroCause",
    "biases_before_norm",
    "explain_lost",
    "explain_missing",
    "find_constant_terms",
    "find_gradient_scale",
    "find_ineffective_freezes",
    "find_missing_grads",
    "find_no_updates",
    "find_optimizer_mismatches",
    "find_state_dict_freeze",
    "find_unregistered",
    "find_zero_grads",
    "graph_parameters",
    "hidden_parameters",
    "judge_coverage",
    "judge_duplicates",
    "judge_frozen",
    "may_have_constant_term",
    "parameters_of_drivers",
    "shared_finding",
    "stale_finding",
    "zero_gradient_causes",
]
