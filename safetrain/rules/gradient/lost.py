"""P201 for parameters that trained and do so no longer: what was observed, and the cut where one was proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from safetrain.findings import Finding
from safetrain.recording.path_look import WhyNoGradient
from safetrain.rules.gradient.catalogue import listed
from safetrain.rules.gradient.missing import explain_missing


def explain_lost(
    verdicts: Mapping[str, WhyNoGradient | None], model: nn.Module, steps: Mapping[str, tuple[int, int]]
) -> list[Finding]:
    """P201 findings for parameters that lost their gradient, one for each cause.

    `steps`: the last step seen with a gradient, and the first without. A warning where the loss still reads what comes
    from them, past a cut. A note where it does not: a term that was annealed away or a head that is no longer asked for
    looks the same as one that was forgotten.
    """
    findings = []
    for finding in explain_missing({name: _of_the_loss(verdict) for name, verdict in verdicts.items()}, model):
        seen = [verdicts[name] for name in finding.params]
        proved = any(v is not None and (v.function is not None or _is_on_the_way(v)) for v in seen)
        last, first = min((steps[name] for name in finding.params), key=lambda pair: pair[1])
        owner = finding.module or "the parameter"
        finding.message = (
            f"{listed(finding.params)} had a gradient in every step seen until step {last} and in none since step "
            f"{first}: {finding.cause}. The optimizer holds it and steps without changing it."
        )
        finding.severity = "warning" if proved else "note"
        meant = f"if it is done training, say so by {owner}.requires_grad_(False)"
        finding.fix = f"{finding.fix}; {meant}" if proved else meant
        finding.first_step = first
        findings.append(finding)
    return findings


def _is_on_the_way(verdict: WhyNoGradient) -> bool:
    """The loss depends on what lies behind the cut. It does not where a term is only logged: `metrics(aux.item())`."""
    return verdict.cut is not None and verdict.cut.loss_uses_it


def _of_the_loss(verdict: WhyNoGradient | None) -> WhyNoGradient | None:
    if verdict is None or verdict.cut is None or verdict.cut.loss_uses_it:
        return verdict
    return dataclasses.replace(verdict, kind="result_unused", cut=None)
