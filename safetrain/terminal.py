"""Findings for people: a code frame with a caret, the holder, the bytes, the fix; and a summary at the end.

Fits the width of the terminal, and is coloured only there (`NO_COLOR` is respected).
"""

from __future__ import annotations

import linecache
import os
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from safetrain.findings import Finding, Severity, SourceLine

_ORDER: tuple[Severity, ...] = ("error", "warning", "note")
_COLORS = {"error": "31;1", "warning": "33;1", "note": "36", "dim": "2", "fix": "32", "bold": "1"}
_WIDTH_OF_A_PIPE = 100
_MIN_WIDTH, _MAX_WIDTH = 40, 120


class Terminal:
    """Writes findings to a stream: each at once (`show`, which a `Report` takes), and all of them at the end.

    Args:
        stream: where to; colours only when it is a terminal.
        width: columns; default: the terminal's, 100 into a pipe.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None, color: bool | None = None) -> None:
        self._stream = stream
        self.color = wants_color(stream) if color is None else color
        self.width = width or _width_of(stream)

    def show(self, finding: Finding) -> None:
        """One finding, as soon as it is made."""
        self._write(format_finding(finding, width=self.width, color=self.color))

    def show_loud(self, finding: Finding) -> None:
        """`show`, but for notes: those wait for the summary."""
        if finding.severity != "note":
            self.show(finding)

    def summary(
        self, findings: Sequence[Finding], *, num_steps: int, checked: Sequence[str] = (), full: bool = False
    ) -> None:
        """The end of a run: counts, one line a fault (with `full`, all of each), what was `checked` and is healthy."""
        self._write(
            format_summary(
                findings, num_steps=num_steps, checked=checked, full=full, width=self.width, color=self.color
            )
        )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose owner did not ask for plain text."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _width_of(stream: TextIO) -> int:
    if not stream.isatty():
        return _WIDTH_OF_A_PIPE
    return max(_MIN_WIDTH, min(_MAX_WIDTH, shutil.get_terminal_size((_WIDTH_OF_A_PIPE, 24)).columns))


def format_finding(finding: Finding, *, width: int = _WIDTH_OF_A_PIPE, color: bool = False) -> str:
    """The whole finding as text that ends in a blank line."""
    paint = _Painter(color)
    head = paint(f"{finding.severity} {finding.code} {finding.name}", finding.severity) + paint(
        f"  {_when(finding)}", "dim"
    )
    lines = [head, *_wrapped(finding.message, width, "  ")]
    if finding.source is not None:
        lines += _frame(finding.source, _marked(finding), width, paint)
    facts = {
        "holder": finding.holder if finding.holder and finding.holder not in finding.message else None,
        "params": _listed(finding.params),
        "module": finding.module,
        "cause": finding.cause,
    }
    lines += [
        line
        for label, text in facts.items()
        if text
        for line in _wrapped(text, width, "  ", paint(f"{label}: ", "dim"), label)
    ]
    if finding.fix:
        lines += _wrapped(finding.fix, width, "  ", paint("fix: ", "fix"), "fix")
    return "\n".join(lines) + "\n\n"


def _when(finding: Finding) -> str:
    where = f"{finding.phase}, " if finding.phase != "train" else ""
    if finding.last_step > finding.first_step:
        return f"{where}steps {finding.first_step} to {finding.last_step}, {finding.count} times"
    return f"{where}step {finding.first_step}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _wrapped(text: str, width: int, indent: str, label: str = "", plain: str = "") -> list[str]:
    """Wrapped lines; `label` (coloured, as long as `plain` and ': ') stands before the first."""
    hanging = indent + "  " if label else indent
    room = max(20, width)
    lines = textwrap.wrap(
        text,
        room,
        initial_indent=indent + (" " * (len(plain) + 2) if label else ""),
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if label and lines:
        lines[0] = indent + label + lines[0].lstrip()
    return lines


def _marked(finding: Finding) -> str:
    """The part of the line to point at: the operation, else the whole statement."""
    text = finding.source.text if finding.source is not None else ""
    return finding.op if finding.op and finding.op in text else text


def _frame(source: SourceLine, marked: str, width: int, paint: _Painter) -> list[str]:
    """The line with its neighbours and a caret under what is meant."""
    gutter = len(str(source.line + 1))
    lines = ["  " + paint(f"{' ' * gutter}--> {_shown_path(source.file)}:{source.line}", "dim")]
    for number in (source.line - 1, source.line, source.line + 1):
        text = linecache.getline(source.file, number).rstrip() if number > 0 else ""
        if number == source.line:
            text = text or source.text
        elif not text.strip():
            continue
        room = max(20, width - gutter - 5)
        text = text if len(text) <= room else text[: room - 1] + "…"
        lines.append(f"  {paint(f'{number:>{gutter}} |', 'dim')} {text}")
        if number == source.line:
            at = max(text.find(marked) if marked else -1, len(text) - len(text.lstrip()))
            length = max(1, min(len(marked) or len(text.strip()), len(text) - at))
            lines.append(f"  {paint(' ' * gutter + ' |', 'dim')} {' ' * at}{paint('^' * length, 'bold')}")
    return lines


def _shown_path(file: str) -> str:
    """Relative where that is shorter: people read it, and editors open it."""
    try:
        relative = os.path.relpath(file)
    except ValueError:  # another drive
        return file
    return relative if len(relative) < len(file) else file


def format_summary(
    findings: Sequence[Finding],
    *,
    num_steps: int,
    checked: Sequence[str] = (),
    full: bool = False,
    width: int = _WIDTH_OF_A_PIPE,
    color: bool = False,
) -> str:
    """Faults worst first, and what was checked and found healthy."""
    paint = _Painter(color)
    steps = f"{num_steps} step{'s' if num_steps != 1 else ''}"
    lines = []
    if not findings:
        lines.append(paint(f"safetrain: nothing found in {steps}", "fix"))
    else:
        lines.append(paint(f"safetrain: {_counted(findings)} in {steps}", "bold"))
    if full and findings:
        lines += ["", "".join(format_finding(f, width=width, color=color) for f in worst_first(findings)).rstrip("\n")]
    else:
        lines += [_one_line(finding, paint) for finding in worst_first(findings)]
    healthy = [what for what in checked if what not in {f.name for f in findings}]
    if healthy:
        lines += _wrapped(", ".join(healthy), width, "  ", paint("healthy: ", "dim"), "healthy")
    return "\n".join(lines) + "\n"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, warnings, notes; within each, by code and by the step of the first."""
    return sorted(findings, key=lambda f: (_ORDER.index(f.severity), f.code, f.first_step))


def _counted(findings: Sequence[Finding]) -> str:
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in _ORDER]
    return ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n)


def _one_line(finding: Finding, paint: _Painter) -> str:
    where = f"  {_shown_path(finding.source.file)}:{finding.source.line}" if finding.source is not None else ""
    what = finding.holder or _listed(finding.params, 3) or finding.module or ""
    head = paint(f"{finding.severity} {finding.code}", finding.severity)
    return f"  {head} {finding.name}{where}  {what}  ({_when(finding)})"


class _Painter:
    """Colours a text, or not."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def __call__(self, text: str, style: str) -> str:
        return f"\x1b[{_COLORS[style]}m{text}\x1b[0m" if self._color and text else text
