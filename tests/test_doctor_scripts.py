"""Scripts as people write them: the same to the bit under the doctor, not accused, and the planted fault found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor_host import fork, spawn

SCRIPTS = Path(__file__).parent / "scripts"

PLANTED = {
    "argparse_functions": ("G101", "history"),
    "notebook": ("P202", "decoder"),
    "trainer_class": ("L501", "eval"),
    "gan": ("G101", "fakes"),
    "reinforce": ("G101", "baseline"),
    "rnn_tbptt": ("G107", "state"),
    "amp_accumulation": ("A301", "clip_grad_norm_"),
    "by_hand": ("G101", "seen"),
    "lbfgs_style": ("G101", "kept"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_healthy_script_is_left_as_it_is_and_not_accused(name: str) -> None:
    """The last line that each prints is a digest of all weights and the next random number."""
    script = SCRIPTS / f"{name}.py"
    bare, watched = fork(script, watched=False), fork(script)
    assert bare.code == 0, bare.err
    assert (watched.code, watched.out) == (bare.code, bare.out)
    assert watched.codes() == []


@pytest.mark.parametrize(("name", "expected"), PLANTED.items(), ids=list(PLANTED))
def test_the_planted_fault_is_found_and_named(name: str, expected: tuple[str, str]) -> None:
    code, what = expected
    watched = fork(SCRIPTS / f"{name}.py", ["--bug"])
    found = [f for f in watched.findings if f["code"] == code]
    assert found, watched.err
    said = " ".join(str(found[0][key]) for key in ("message", "holder", "params", "op"))
    assert what in said or what in found[0]["source"]["text"]


def test_a_package_runs_as_a_module_with_its_relative_imports() -> None:
    bare = spawn(["-m", "segment"], cwd=SCRIPTS, watched=False)
    healthy = spawn(["-m", "segment"], cwd=SCRIPTS)
    assert (healthy.code, healthy.out) == (0, bare.out)
    assert healthy.codes() == []
    sick = spawn(["-m", "segment", "--bug"], cwd=SCRIPTS)
    assert sick.codes() == ["P201"]
    assert sick.findings[0]["params"] == ["aux.weight", "aux.bias"]
