"""The guards: which listen to a run, to what, and in what order.

A guard is a thin callback. It notes next to nothing in each step, calls a judge of `safetrain.rules` when something is
off, and hands the findings to the `Report`. Guards hold no tensor and nothing that prolongs one's life. Most hear of
sampled steps only (`Callback.sampled_hooks`): the first 64, five of every 64 later (of 256 after 512), and those they
ask for.

| guard | listens to | rules |
|---|---|---|
| RetentionGuard | backward start, step end, evaluation | G101 G102 G103 G105 G106 G107 G110 |
| WasteGuard | backward start, step end | G104 G105 G108 |
| FunctionGuard | backward start | G106 G111 G112 |
| AutopsyGuard | the first step, exceptions | G121–G129 |
| finite_guard | the Trainer's gate, elsewhere backward start and end | P206 P211 |
| HookGuard | four steps of 64 | G113 |
| gradient_guards | coverage, probes and paths, by sampled steps | G109 P201–P205 P207–P213 |
| loop_guards | modes, BatchNorm, loss weights, compiler, loss scale | A303 A304 L501–L506 L508 L511–L513 |
| GranularityGuard | the third and fourth step | L507 |
| FragmentationGuard | backward start, step end (CUDA) | M403 |
| WorkerGuard | step end (Linux, with loader workers) | M402 |
| MemoryGuard | step end, evaluation, exceptions | M401 M402 M404 M405 |

What only a foreign loop can get wrong is judged from events by `safetrain.foreign.watching`; the Trainer adds a watch
over kept snapshots (L514) and over what users' hooks leave behind (L515).
"""

from __future__ import annotations

from safetrain.autopsy import AutopsyGuard
from safetrain.callbacks.base import Callback
from safetrain.findings import Report
from safetrain.guarding.finite import finite_guard
from safetrain.guarding.gradient import gradient_guards
from safetrain.guarding.granularity import GranularityGuard
from safetrain.guarding.hooks import HookGuard
from safetrain.guarding.loop import loop_guards
from safetrain.guarding.memory import memory_guards
from safetrain.guarding.retention import retention_guards


def default_guards(report: Report, *, gated: bool = False) -> list[Callback]:
    """The guards of a run, in the order in which they hear of each event. They report to `report`.

    `gated`: the driver keeps Inf and NaN gradients from the weights itself, without a scaler (see `RunState.gated`).
    """
    return [
        GranularityGuard(report),  # first: it takes times
        AutopsyGuard(report),
        finite_guard(report, gated=gated),
        *retention_guards(report),
        HookGuard(report),
        *gradient_guards(report),
        *loop_guards(report, scaled=not gated),
        *memory_guards(report),  # last: what the others have told explains growth
    ]
