"""The autopsy family: judges that explain an error, and judges of wrong results that raise none.

`catalogue` has the rules. Each `explain_*` takes a `Failure`; each `find_*` a `Recorder` of the step.
"""

from safetrain.rules.autopsy.alias import AliasWatcher
from safetrain.rules.autopsy.carried import explain_backward_twice
from safetrain.rules.autopsy.cut import cuts_of, explain_no_graph, explain_non_scalar
from safetrain.rules.autopsy.failure import Failure, frames_of, loss_in
from safetrain.rules.autopsy.inference import explain_inference_tensor
from safetrain.rules.autopsy.inplace import explain_inplace_modified, explain_leaf_inplace
from safetrain.rules.autopsy.nonfinite import (
    explain_nonfinite,
    explain_nonfinite_calls,
    find_nonfinite_gradients,
    unexplained_loss,
)
from safetrain.rules.autopsy.nonfinite_graph import find_nonfinite_loss
from safetrain.rules.autopsy.recompute import RandomWatcher, explain_recompute_mismatch, find_recompute_differences
from safetrain.rules.autopsy.silent_write import LeafWatcher, find_silent_writes

__all__ = [
    "AliasWatcher",
    "Failure",
    "LeafWatcher",
    "RandomWatcher",
    "cuts_of",
    "explain_backward_twice",
    "explain_inference_tensor",
    "explain_inplace_modified",
    "explain_leaf_inplace",
    "explain_no_graph",
    "explain_non_scalar",
    "explain_nonfinite",
    "explain_nonfinite_calls",
    "explain_recompute_mismatch",
    "find_nonfinite_gradients",
    "find_nonfinite_loss",
    "find_recompute_differences",
    "find_silent_writes",
    "frames_of",
    "loss_in",
    "unexplained_loss",
]
