"""The guards on a loop that is not ours: one report, the default guards, an observer that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from safetrain.callbacks.base import Callback
from safetrain.errors import ConfigError
from safetrain.findings import RULES, Policy, Report
from safetrain.observe import Observer


def attach_guards(
    rules: Sequence[str] = (),
    *,
    jsonl: Path | None = None,
    max_steps: int | None = None,
    on_trouble: Callable[[str], None] | None = None,
) -> tuple[Report, Observer]:
    """Watch every training loop of this process from now on. `rules` selects codes and families; empty means all."""
    report = Report(policy_for(rules), jsonl=jsonl)
    observer = Observer((), max_steps=max_steps, on_trouble=on_trouble)
    observer.attach()
    return report, observer


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
