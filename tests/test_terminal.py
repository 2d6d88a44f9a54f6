"""Findings for people: frame and caret, within the width, coloured on a terminal only."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from safetrain.findings import Finding, SourceLine
from safetrain.terminal import Terminal, format_finding, format_summary


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def finding(tmp_path: Path) -> Finding:
    file = tmp_path / "train.py"
    file.write_text(
        "for x, y in loader:\n    loss = criterion(model(x), y)\n    history.append(loss)\n    print('.')\n"
    )
    return Finding(
        code="G101",
        name="graph-retained",
        message="local `history` in main() → list[0..41] keeps 42 graphs of earlier steps alive (skeleton: 90 nodes), "
        "one more each step",
        source=SourceLine(str(file), 3, "history.append(loss)"),
        first_step=4,
        last_step=4,
        cause="the tensor was made at train.py:2: loss = criterion(model(x), y)",
        fix="history.append(loss.detach())",
    )


def test_the_line_stands_between_its_neighbours_with_a_caret_under_it(finding: Finding) -> None:
    lines = format_finding(finding).splitlines()
    at = next(i for i, line in enumerate(lines) if "history.append(loss)" in line and "|" in line)
    assert "loss = criterion" in lines[at - 1]
    column = lines[at].index("history.append")
    assert lines[at + 1].rstrip() == " " * 4 + "| " + " " * (column - 6) + "^" * len("history.append(loss)")
    assert "print" in lines[at + 2]


def test_the_operation_alone_is_underlined_when_it_is_known(finding: Finding) -> None:
    finding.op = "append"
    assert "^" * 6 in format_finding(finding) and "^" * 7 not in format_finding(finding)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_text_keeps_within_the_width(finding: Finding, width: int) -> None:
    finding.source = SourceLine("gone.py", 1, "x")
    assert max(map(len, format_finding(finding, width=width).splitlines())) <= width


def test_colour_on_a_terminal_only(finding: Finding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    pipe, tty = io.StringIO(), Tty()
    Terminal(pipe).show(finding)
    Terminal(tty).show(finding)
    assert "\x1b[" not in pipe.getvalue() and "\x1b[" in tty.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", tty.getvalue()).split() == pipe.getvalue().split()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Tty()
    Terminal(plain).show(finding)
    assert "\x1b[" not in plain.getvalue()


def test_the_summary_has_the_worst_first_and_what_is_healthy(finding: Finding) -> None:
    note = Finding(code="G102", name="metric", message="m", severity="note", first_step=1, last_step=9, count=3)
    error = Finding(code="G121", name="twice", message="m", severity="error", first_step=2, last_step=2)
    text = format_summary([note, finding, error], num_steps=50, checked=["optimizer coverage"])
    assert text.splitlines()[0] == "safetrain: 1 error, 1 warning, 1 note in 50 steps"
    assert text.index("G121") < text.index("G101") < text.index("G102")
    assert "steps 1 to 9, 3 times" in text
    assert "healthy: optimizer coverage" in text


def test_nothing_found_says_so() -> None:
    assert format_summary([], num_steps=1) == "safetrain: nothing found in 1 step\n"
