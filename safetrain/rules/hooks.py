"""Hooks that pile up: registered in every step, removed in none."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import nn

from safetrain.findings import Finding, SourceLine, rule

PILING_HOOKS = rule("G113", "piling-hooks", "warning", "a module gets another hook every step and loses none")

HookCounts = dict[tuple[str, str], int]
"""Hooks by (module name, attribute that holds them)."""

_KINDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def count_hooks(model: nn.Module) -> HookCounts:
    """Hooks of every module. About 1 µs a module; no host sync."""
    counts: HookCounts = {}
    for name, module in model.named_modules():
        held = vars(module)
        for kind in _KINDS:
            if hooks := held.get(kind):
                counts[name, kind] = len(hooks)
    return counts


def find_piling_hooks(
    samples: list[tuple[int, HookCounts]], *, lines: Mapping[tuple[str, str], SourceLine] | None = None
) -> list[Finding]:
    """G113 from counts at three or more steps: `samples` holds (step, counts), oldest first.

    A module is accused when between any two samples it gained at least one hook a step. Hooks made once, at start or
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
            name, kind = key
            per_step = (count - samples[0][1].get(key, 0)) / (last_step - samples[0][0])
            holder = ".".join(part for part in ("model", name, kind) if part)
            findings.append(
                PILING_HOOKS.finding(
                    f"`{holder}` grows by {per_step:.3g} a step ({count} after {last_step} steps). Each of them runs "
                    "in every call, and what they captured stays alive.",
                    source=(lines or {}).get(key),
                    holder=holder,
                    module=name or None,
                    cause="a hook is registered in every step and never removed",
                    fix="register it once, or keep the handle and call `handle.remove()` at the end of the step",
                )
            )
    return findings
