"""Whose line is it: the user's frame above a call, and the names that it can see.

Cheap enough for every step: a frame is judged by its file name, once per file, and text is read only for a report.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from safetrain.findings import SourceLine

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = tuple(
    {os.path.realpath(path) + os.sep for key in ("stdlib", "platstdlib") if (path := sysconfig.get_path(key))}
    | {path + os.sep for key in ("stdlib", "platstdlib") if (path := sysconfig.get_path(key))}
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

USER, LIBRARY, MACHINERY = 2, 1, 0
"""How good a frame is as an answer: the user's own, an installed package's, or torch, safetrain and the stdlib."""

_grade: dict[str, int] = {}

_lines: dict[tuple[str, int], SourceLine] = {}
"""Lines that were asked for: a loop asks for the same few again and again."""

_SNAPSHOT_READERS = frozenset({"locals", "vars", "dir", "eval", "exec"})


def grade(filename: str) -> int:
    """USER, LIBRARY or MACHINERY for a code object's file name."""
    known = _grade.get(filename)
    if known is None:
        known = _grade[filename] = _judge(filename)
    return known


def _judge(filename: str) -> int:
    if filename.startswith("<"):
        # A notebook cell's or -c's code is the user's; `<frozen runpy>` and generated code are not.
        return USER if filename.startswith(("<ipython", "<stdin", "<string")) else MACHINERY
    path = os.path.abspath(filename)
    if path.startswith((_PACKAGE, _TORCH)):
        return MACHINERY
    if any(part in path for part in _INSTALLED):
        return LIBRARY
    return MACHINERY if path.startswith(_STDLIB) else USER


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The nearest frame of the user's own code, else the nearest of an installed package, else None.

    Starts at `frame`, or at the caller's. Do not keep the result: a frame holds its locals.
    """
    here: FrameType | None = frame if frame is not None else sys._getframe(1)
    second: FrameType | None = None
    while here is not None:
        kind = grade(here.f_code.co_filename)
        if kind == USER:
            return here
        if kind == LIBRARY and second is None:
            second = here
        here = here.f_back
    return second


def other_threads_run() -> bool:
    """Whether a further thread is at work, rather than waiting for a queue or a lock inside the standard library.

    Reading `.grad` while another thread drops that gradient ends the process: torch lets go of the interpreter while
    the gradient's object is half gone.
    """
    own = threading.get_ident()
    files = [frame.f_code.co_filename for ident, frame in sys._current_frames().items() if ident != own]
    return any(grade(file) != MACHINERY or os.path.abspath(file).startswith((_PACKAGE, _TORCH)) for file in files)


def user_line(frame: FrameType | None = None) -> SourceLine | None:
    """Where the user is, without the text of the line (see `with_text`): about a microsecond."""
    found = user_frame(frame if frame is not None else sys._getframe(1))
    if found is None:
        return None
    key = (found.f_code.co_filename, found.f_lineno)
    line = _lines.get(key)
    if line is None:
        line = _lines[key] = SourceLine(*key)
    return line


def with_text(source: SourceLine) -> SourceLine:
    """The same line with its text, read now."""
    return source if source.text else SourceLine(source.file, source.line, line_text(source.file, source.line))


def line_text(filename: str, line: int) -> str:
    """The stripped text of a line, empty when the source is not to be had."""
    return linecache.getline(filename, line).strip()


def traceback_line(tb: TracebackType | None) -> SourceLine | None:
    """The innermost user line of a traceback, with its text."""
    best: SourceLine | None = None
    best_grade = MACHINERY
    while tb is not None:
        filename = tb.tb_frame.f_code.co_filename
        kind = grade(filename)
        if kind >= max(best_grade, LIBRARY):
            best, best_grade = SourceLine(filename, tb.tb_lineno, line_text(filename, tb.tb_lineno)), kind
        tb = tb.tb_next
    return best


def ended_calls(frame: FrameType | None) -> list[FrameType]:
    """`frame` and those that called it, as far as they have ended: a traceback that is kept keeps them all."""
    running = set()
    here: FrameType | None = sys._getframe(1)
    while here is not None:
        running.add(here)
        here = here.f_back
    ended = []
    while frame is not None and frame not in running:
        ended.append(frame)
        frame = frame.f_back
    return ended


def frame_locals(frame: FrameType) -> dict[str, Any]:
    """A copy of a running frame's local names that leaves nothing behind.

    Before Python 3.13, reading `f_locals` of a function stores a snapshot in the frame, which would keep old tensors
    alive until the function returns: it is emptied here. A function that calls `locals()` itself shares that snapshot
    with its own code, so it is left alone and its names are not seen.
    """
    code = frame.f_code
    if sys.version_info >= (3, 13) or not code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if _reads_snapshot(code):
        return {}
    snapshot = frame.f_locals
    names = dict(snapshot)
    if sys.gettrace() is None:
        snapshot.clear()
    return names


@functools.lru_cache(maxsize=4096)
def _reads_snapshot(code: CodeType) -> bool:
    """Whether a function calls `locals()` or its like by that name (`model.eval()` is another thing)."""
    if _SNAPSHOT_READERS.isdisjoint(code.co_names):
        return False
    loads = (i for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return any(i.argval in _SNAPSHOT_READERS for i in loads)
