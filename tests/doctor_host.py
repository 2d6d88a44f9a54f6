"""Run a script bare and under the doctor: in a fresh interpreter, or in a fork of this one where that is enough."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once here, not in every fork

from safetrain import doctor

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Ran:
    """How a script ended. `trouble`: one of our own judges failed."""

    code: int
    out: str
    err: str
    findings: list[dict[str, Any]]
    reported: bool

    @property
    def trouble(self) -> bool:
        """Whether the report had to say that something of ours failed."""
        return "judges failed" in self.err or "could not start to watch" in self.err

    def codes(self, *severities: str) -> list[str]:
        """Codes of the findings of these severities (default: warnings and errors)."""
        return [f["code"] for f in self.findings if f["severity"] in (severities or ("warning", "error"))]


def environment() -> dict[str, str]:
    """One thread, and this checkout on the path."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def command(script: Sequence[str], options: Sequence[str] = (), *, watched: bool = True) -> list[str]:
    """`python script…`, or the same under the doctor."""
    return [sys.executable, *(["-m", "safetrain", "doctor", *options] if watched else []), *script]


def spawn(script: Sequence[str], options: Sequence[str] = (), *, cwd: Path, watched: bool = True) -> Ran:
    """Run in a fresh interpreter."""
    out = Path(tempfile.mkdtemp()) / "findings.jsonl"
    given = ["--json", str(out), *options] if watched else []
    done = subprocess.run(
        command(script, given, watched=watched), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120
    )
    ran = Ran(done.returncode, done.stdout, done.stderr, _read(out), out.exists())
    assert not ran.trouble, ran.err
    return ran


def fork(
    script: Path,
    arguments: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    watched: bool = True,
    trouble: bool = False,
) -> Ran:
    """Run in a child of this process, without importing torch again. `trouble`: a judge is meant to fail."""
    folder = Path(tempfile.mkdtemp())
    report, out, err = folder / "findings.jsonl", folder / "out", folder / "err"
    pid = os.fork()
    if pid == 0:
        _child(script, arguments, ["--json", str(report), *options], watched, out, err)
    deadline = time.monotonic() + 120
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.01)
    ran = Ran(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text(), _read(report), report.exists())
    assert ran.trouble == trouble, ran.err
    return ran


def _child(script: Path, arguments: Sequence[str], options: Sequence[str], watched: bool, out: Path, err: Path) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        os.chdir(script.parent)
        sys.stdout = io.TextIOWrapper(io.FileIO(str(out), "w"), line_buffering=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(str(err), "w"), line_buffering=True)
        if watched:
            code = doctor.main([*options, str(script), *arguments])
        else:
            sys.argv = [str(script), *arguments]
            sys.path[0] = str(script.parent)
            runpy.run_path(str(script), run_name="__main__")
            code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
