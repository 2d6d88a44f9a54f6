"""Hooks that pile up: registered in every step, removed in none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from safetrain.findings import Finding, SourceLine, rule

PILING_HOOKS = rule(
    "G113", "piling-hooks", "warning", "a module, parameter or optimizer gets another hook every step and loses none"
)

HookCounts = dict[tuple[str, str], int]
"""Hooks by (where: `model.layers.0`, `optimizer main`, …; attribute that holds them)."""

_KINDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_OF_ALL_MODULES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def count_hooks(model: nn.Module, optimizers: Mapping[str, Optimizer] | None = None) -> HookCounts:
    """Hooks of every module and parameter, of optimizers, and torch's global ones. About 1 µs each; no host sync."""
    counts: HookCounts = {}
    for name, owner, kinds in hook_owners(model, optimizers or {}):
        for kind in kinds:
            if hooks := getattr(owner, kind, None):
                counts[name, kind] = len(hooks)
    return counts


def hook_owners(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """What may hold hooks: its name, itself, and which of its attributes hold them."""
    for name, module in model.named_modules():
        yield _joined("model", name), module, _KINDS
    for name, parameter in model.named_parameters():
        yield _joined("model", name), parameter, _OF_PARAMETERS
    for name, optimizer in optimizers.items():
        yield f"optimizer {name}", optimizer, _OF_OPTIMIZERS
    yield "torch", torch_module, _OF_ALL_MODULES


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def find_piling_hooks(
    samples: list[tuple[int, HookCounts]], *, lines: Mapping[tuple[str, str], SourceLine] | None = None
) -> list[Finding]:
    """G113 from counts at three or more steps: `samples` holds (step, counts), oldest first.

    One is accused when between any two samples it gained at least one hook a step. Hooks made once, at start or
    lazily, and hooks that are removed again do not rise like that. `lines`: where each kind was registered, if known.
    """
    if len(samples) < 3:
        return []
    findings = []
    last_step, latest = samples[-1]
    for key, count in latest.items():
        if all(
            later.get(key, 0) - earlier.get(key, 0) >= to - since
            for (since, earlier), (to, later) in itertools.pairwise(samples)
        ):
            owner, kind = key
            per_step = (count - samples[0][1].get(key, 0)) / (last_step - samples[0][0])
            holder = f"{owner}.{kind}"
            findings.append(
                PILING_HOOKS.finding(
                    f"`{holder}` grows by {per_step:.3g} a step ({count} after {last_step} steps). Each of them runs "
                    "in every call, and what they captured stays alive.",
                    source=(lines or {}).get(key),
                    holder=holder,
                    module=owner.removeprefix("model.") if owner.startswith("model.") else None,
                    cause="a hook is registered in every step and never removed",
                    fix="register it once, or keep the handle and call `handle.remove()` at the end of the step",
                )
            )
    return findings
