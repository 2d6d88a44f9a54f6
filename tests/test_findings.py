"""Reports: one finding a fault, policies, and a file that survives a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import safetrain.rules  # noqa: F401 (fills the catalogue)
from safetrain import ConfigError, Finding, GuardError
from safetrain.findings import RULES, Report, SourceLine

FIELDS = {
    *("code", "name", "severity", "phase", "first_step", "last_step", "count", "message", "source", "holder", "params"),
    *("module", "op", "pinned_bytes", "growth_bytes_per_step", "cause", "fix"),
}


def leak(line: int = 3, severity: str = "warning") -> Finding:
    return RULES["G101"].finding("kept", source=SourceLine("train.py", line, "history.append(loss)"), severity=severity)


def test_a_fault_seen_again_is_counted_not_repeated() -> None:
    report = Report()
    for step in (2, 5, 9):
        report.add(leak(), step=step)
    report.add(leak(line=8), step=9)
    first, second = report.findings
    assert (first.first_step, first.last_step, first.count) == (2, 9, 3)
    assert (second.first_step, second.count) == (9, 1)


def test_policies() -> None:
    report = Report({"G101": "ignore"})
    report.add(leak(), step=1)
    assert report.findings == []
    report = Report({"G101": "note"}, strict=True)
    report.add(leak(), step=1)
    assert report.findings[0].severity == "note"
    report.raise_if_failed()
    for stops in (Report({"G101": "error"}), Report(strict=True)):
        stops.add(leak(), step=4)
        with pytest.raises(GuardError, match="G101 graph-retained: kept") as raised:
            stops.raise_if_failed()
        assert raised.value.findings == stops.findings
        stops.raise_if_failed()  # once


def test_a_finding_that_is_an_error_by_itself_does_not_stop_a_run() -> None:
    """It explains one that was raised, or a run that goes on by its own policy."""
    report = Report()
    report.add(leak(severity="error"), step=1)
    report.raise_if_failed()


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rule G999"):
        Report({"G999": "error"})


def test_the_file_has_one_object_a_line_with_every_field(tmp_path: Path) -> None:
    path = tmp_path / "run" / "findings.jsonl"
    report = Report(jsonl=path)
    report.add(leak(), step=2)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(row) == FIELDS
    assert row["source"] == {"file": "train.py", "line": 3, "text": "history.append(loss)"}


def test_a_place_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    report = Report(jsonl=tmp_path / "file" / "findings.jsonl")
    with pytest.warns(UserWarning, match="cannot be written"):
        report.add(leak(), step=2)
    report.close()
    assert len(report.findings) == 1


def test_an_empty_file_says_that_nothing_was_found(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    Report(jsonl=path).close()
    assert path.read_text() == ""


def test_a_resumed_run_keeps_what_was_found_before(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    first = Report(jsonl=path)
    first.add(leak(), step=2)
    first.close()
    second = Report(jsonl=path)
    second.keep_earlier()
    second.add(leak(line=9), step=12)
    second.close()
    assert [json.loads(line)["first_step"] for line in path.read_text().splitlines()] == [2, 12]
