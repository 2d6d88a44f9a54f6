"""The guards on a loop that is not ours: one report, the default guards, an observer that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError
from safetrain.findings import RULES, Policy, Report
from safetrain.guards import default_guards
from safetrain.observe import Observer
from safetrain.rules.loop import loop_judges
from safetrain.rules.precision import precision_judges


def attach_guards(
    rules: Sequence[str] = (),
    *,
    jsonl: Path | None = None,
    max_steps: int | None = None,
    on_trouble: Callable[[str], None] | None = None,
) -> tuple[Report, Observer]:
    """Watch every training loop of this process from now on. `rules` selects codes and families; empty means all."""
    report = Report(policy_for(rules), jsonl=jsonl)
    guards = _guards(report)
    judges = [judge.see for judge in (*guards, *loop_judges(), *precision_judges()) if hasattr(judge, "see")]
    observer = Observer(
        guards,
        judges=judges,
        on_finding=lambda finding, event: report.add(finding, step=event.step, phase=observer.state.phase),
        max_steps=max_steps,
        on_trouble=on_trouble,
    )
    observer.attach()
    return report, observer


def _guards(report: Report) -> list[Callback]:
    guards = default_guards(report)
    kinds = {type(guard).__name__ for guard in guards}
    if "AutopsyGuard" not in kinds:
        from safetrain.autopsy import AutopsyGuard

        guards.append(AutopsyGuard(report))
    if "MissingGradientGuard" not in kinds:
        from safetrain.gradient_guards import gradient_guards

        guards.extend(gradient_guards(report))
    return guards


def policy_for(rules: Sequence[str]) -> dict[str, Policy]:
    """The policy under which only the selected rules report. Raises `ConfigError` for a code that does not exist."""
    chosen = [word for word in rules if not word.startswith("-")]
    dropped = [word[1:] for word in rules if word.startswith("-")]
    for word in (*chosen, *dropped):
        if not any(code.startswith(word) for code in RULES):
            raise ConfigError(f"--rules: no rule {word}; `python -m safetrain rules` lists them")
    return {
        code: "ignore"
        for code in RULES
        if (chosen and not code.startswith(tuple(chosen))) or (dropped and code.startswith(tuple(dropped)))
    }
