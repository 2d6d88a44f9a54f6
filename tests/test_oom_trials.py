"""Real out-of-memory at random steps and phases: the exact result, or a report and checkpoints that are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from safetrain import memory

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS and /proc"),
    pytest.mark.skipif(not memory.heap_is_readable(), reason="the C heap cannot be read here"),
]
SCRIPT = Path(__file__).with_name("oom_trials.py")
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "the optimizer's step",
    "evaluation": "evaluation",
    "saving": "saving a checkpoint",
}


def run_trials(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Each ended as promised: with the same bits as a run that never met a limit, at once or after resuming."""
    command = [sys.executable, str(SCRIPT), *map(str, numbers)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    trials = [json.loads(line) for line in ended.stdout.splitlines()]
    for trial in trials:
        assert "failed" not in trial, trial["failed"]
        assert trial["exact"], trial
        assert not trial["left"], trial
        if trial["ended"] == "stopped":
            assert trial["is_oom"] and len(trial["told"]) == 1 and trial["told"][0] in "".join(trial["notes"]), trial
        else:
            assert trial["checkpoints"] == [1, 2, 3, 4, 5, 6], trial
    return trials


def test_one_run_out_of_memory_in_each_phase() -> None:
    trials = run_trials(range(5))
    assert [trial["phase"] for trial in trials] == list(PHASES)
    assert [trial["ended"] for trial in trials] == ["finished", "finished", "stopped", "stopped", "stopped"]
    assert all(trial["splits"] for trial in trials[:2])
    for trial in trials[2:]:
        assert trial["told"][0].startswith(f"out of memory in {PHASES[trial['phase']]}"), trial


@pytest.mark.slow
def test_fifty_runs_out_of_memory_at_random_steps_and_phases() -> None:
    trials = run_trials(range(50))
    stopped = [trial for trial in trials if trial["ended"] == "stopped"]
    assert len([trial for trial in trials if trial["ended"] == "finished" and trial["splits"]]) >= 10
    assert all(
        any(trial["told"][0].startswith(f"out of memory in {where}") for trial in stopped) for where in PHASES.values()
    )
