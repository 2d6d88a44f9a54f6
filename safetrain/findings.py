"""What a rule found: the finding, the catalogue of rules, and the report that gathers findings and writes them out."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from safetrain.errors import ConfigError, GuardError

Severity = Literal["note", "warning", "error"]
Policy = Literal["ignore", "note", "warning", "error"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int
    text: str = ""


@dataclass(slots=True)
class Finding:
    """One fault: the object, the user's line, the numbers, the consequence and one fix to paste.

    Judges fill what they know; `Report.add` stamps phase and steps. Steps are optimizer steps counted from 1.
    """

    code: str
    message: str
    name: str = ""
    severity: Severity = "warning"
    phase: str = "train"
    first_step: int = 0
    last_step: int = 0
    count: int = 1
    source: SourceLine | None = None
    holder: str | None = None
    params: list[str] = field(default_factory=list)
    module: str | None = None
    op: str | None = None
    pinned_bytes: int | None = None
    growth_bytes_per_step: float | None = None
    cause: str | None = None
    fix: str | None = None

    def key(self) -> tuple[Any, ...]:
        """Two findings with the same key are the same fault."""
        line = (self.source.file, self.source.line) if self.source else None
        return (self.code, line, None if line else self.holder, tuple(self.params), self.module, self.op)

    def to_json(self) -> str:
        """One line of `findings.jsonl`."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """A catalogue entry. Stands beside the judge that makes its findings."""

    code: str
    name: str
    severity: Severity
    summary: str

    def finding(self, message: str, **fields: Any) -> Finding:
        """A finding of this rule; `fields` are those of `Finding`."""
        fields.setdefault("severity", self.severity)
        return Finding(code=self.code, name=self.name, message=message, **fields)


RULES: dict[str, Rule] = {}
"""Every rule by code, filled as `safetrain.rules` is imported."""


def rule(code: str, name: str, severity: Severity, summary: str) -> Rule:
    """Declare a rule and enter it into the catalogue."""
    assert code not in RULES, f"rule {code} is declared twice"
    RULES[code] = entry = Rule(code, name, severity, summary)
    return entry


class Report:
    """Gathers findings, one a fault, applies the policy, and hands each new one to its sinks.

    `policy` maps a code to ignore, note, warning or error. `strict` turns warnings into errors. What became an error by
    either stops the run: not here, but in `raise_if_failed`, which drivers call at the end of a step.
    """

    def __init__(
        self,
        policy: Mapping[str, Policy] | None = None,
        *,
        strict: bool = False,
        jsonl: Path | None = None,
        show: Any = None,
    ) -> None:
        unknown = sorted(set(policy or ()) - set(RULES))
        if unknown:
            raise ConfigError(f"guards: no rule {', '.join(unknown)}; `python -m safetrain rules` lists them")
        for code, value in (policy or {}).items():
            if value not in POLICIES:
                raise ConfigError(f"guards: {code} is {value!r}; it is one of {', '.join(POLICIES)}")
        self.findings: list[Finding] = []
        self._policy = dict(policy or {})
        self._strict = strict
        self._jsonl = jsonl
        self._show = show
        self._by_key: dict[tuple[Any, ...], Finding] = {}
        self._failed: list[Finding] = []
        self._earlier = ""  # lines of the part of the run that this one resumes

    def keep_earlier(self) -> None:
        """Keep what `findings.jsonl` holds already: this run goes on with the one that wrote it."""
        if self._jsonl is not None and self._jsonl.is_file():
            self._earlier = self._jsonl.read_text(encoding="utf-8")

    def add(self, finding: Finding, *, step: int, phase: str = "train") -> None:
        """Record a finding seen in `step` (counted from 1). A repeat raises the count of the first."""
        policy = self._policy.get(finding.code)
        if policy == "ignore":
            return
        known = self._by_key.get(finding.key())
        if known is not None:
            known.count += 1
            known.last_step = max(known.last_step, step)
            return
        finding.severity = policy or finding.severity
        stops = policy == "error"
        if self._strict and finding.severity == "warning":
            finding.severity, stops = "error", True
        finding.first_step = finding.first_step or step
        finding.last_step = max(finding.last_step, step)
        finding.phase = phase
        self.findings.append(finding)
        self._by_key[finding.key()] = finding
        if stops:
            self._failed.append(finding)
        if self._jsonl is not None:
            self._write_jsonl()
        if self._show is not None:
            self._show(finding)

    def extend(self, findings: Iterable[Finding], *, step: int, phase: str = "train") -> None:
        """`add` each."""
        for finding in findings:
            self.add(finding, step=step, phase=phase)

    def raise_if_failed(self) -> None:
        """Raise `GuardError` when a finding that stops the run was added since the last call."""
        if self._failed:
            failed, self._failed = self._failed, []
            raise GuardError("\n".join(f"{f.code} {f.name}: {f.message}" for f in failed), list(failed))

    def close(self) -> None:
        """Write final counts to `findings.jsonl` (an empty file says: watched, nothing found)."""
        if self._jsonl is not None and (self.findings or self._jsonl.parent.is_dir()):
            self._write_jsonl()

    def _write_jsonl(self) -> None:
        assert self._jsonl is not None
        lines = "".join(f.to_json() + "\n" for f in self.findings)
        try:
            self._jsonl.parent.mkdir(parents=True, exist_ok=True)
            self._jsonl.write_text(self._earlier + lines, encoding="utf-8")
        except OSError as error:  # a full disk must neither end a training nor hide the error that ended it
            warnings.warn(f"{self._jsonl} cannot be written ({error}), so findings are only shown", stacklevel=3)
            self._jsonl = None
