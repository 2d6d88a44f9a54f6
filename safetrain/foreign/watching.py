"""The guards on a loop that is not ours: one report, the default guards, an observer that drives them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetrain.errors import ConfigError
from safetrain.findings import RULES, Finding, Policy, Report
from safetrain.foreign.events import LoopEvent
from safetrain.foreign.naming import visible_names
from safetrain.foreign.observe import Observer
from safetrain.graph import format_bytes
from safetrain.guarding.loop import SnapshotGuard
from safetrain.guarding.memory import MemoryGuard
from safetrain.guards import default_guards
from safetrain.rules.loop import loop_judges
from safetrain.rules.precision import precision_judges

CHECKED: dict[str, tuple[str, ...]] = {
    "graphs die with their step": ("G101", "G103", "G104", "G105", "G106", "G107", "G110", "G112"),
    "every trainable parameter gets a gradient": ("P201", "P207", "G109", "G123", "L506"),
    "the optimizer holds and moves what trains": ("P202", "P203", "P204", "P205", "P208", "P212"),
    "gradients are used once and cleared": ("P209", "P213"),
    "losses and gradients are finite": ("P206", "P211", "A304"),
    "no write behind autograd's back": ("G122", "G125", "G126", "G127", "G128", "G129", "L511"),
    "train and eval modes": ("L501", "L512", "L513"),
}
"""What every watched run was checked for, in words, with the rules that would have spoken."""

CHECKED_IF_USED: dict[str, tuple[str, tuple[str, ...]]] = {
    "clip": ("clipping", ("A301", "A306", "A307")),
    "scale": ("loss scaling", ("A301", "A302", "A303", "A304", "A305")),
    "scheduler_step": ("the schedule's order", ("A305",)),
    "checkpoint_loaded": ("resuming", ("L510",)),
    "epoch_start": ("the order of samples", ("L509",)),
}
"""The same for what a run may do or not: by the kind of event that shows it does."""


class Watch:
    """Guards on every training loop of this process from now on, until `finish`.

    `rules` selects codes and families (`G101`, `G`, `-G104`); empty means all. `show` gets each finding at once.
    Raises `ConfigError` for a rule that does not exist.
    """

    def __init__(
        self,
        rules: Sequence[str] = (),
        *,
        jsonl: Path | None = None,
        max_steps: int | None = None,
        show: Callable[[Finding], None] | None = None,
        on_step: Callable[[int], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        policy = policy_for(rules)
        self._ignored = {code for code, how in policy.items() if how == "ignore"}
        self.report = Report(policy, jsonl=jsonl, show=show)
        guards = [*default_guards(self.report), SnapshotGuard(self.report, _user_values)]
        self._memory = next(guard for guard in guards if isinstance(guard, MemoryGuard))
        judges = [
            listener.see for listener in (*guards, *loop_judges(), *precision_judges()) if hasattr(listener, "see")
        ]
        self.observer = Observer(
            guards, judges=judges, on_finding=self._add, max_steps=max_steps, on_step=on_step, on_trouble=on_trouble
        )
        self.observer.attach()

    def _add(self, finding: Finding, event: LoopEvent) -> None:
        self.report.add(finding, step=event.step, phase=self.observer.state.phase)

    def finish(self) -> None:
        """Stop watching and write the last counts."""
        self.observer.finish()
        self.report.close()

    def healthy(self) -> list[str]:
        """What was checked and found in order, in words."""
        if not self.observer.state.step:
            return []
        used = self.observer.kinds_seen
        checks = [*CHECKED.items(), *(check for kind, check in CHECKED_IF_USED.items() if kind in used)]
        rate = self._memory.noticeable_rate()
        if rate is not None:
            checks.append((f"memory rises by less than {format_bytes(rate)} a step", ("M401", "M402", "M405")))
        loud = {finding.code for finding in self.report.findings if finding.severity != "note"}
        return [what for what, codes in checks if not loud & set(codes) and not set(codes) <= self._ignored]


def _user_values() -> Iterator[tuple[str, Any]]:
    return visible_names(sys._getframe(1))


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
