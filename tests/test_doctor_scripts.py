"""Scripts as people write them: the same to the bit under the doctor, not accused, and the planted fault found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor_host import fork, spawn

SCRIPTS = Path(__file__).parent / "scripts"

PLANTED = {
    "argparse_functions": ("G101", "history.append(loss if args.bug", "history"),
    "notebook": ("P202", "optimizer = optim.Adam(encoder.parameters() if BUG", "decoder.0.weight"),
    "trainer_class": ("L501", "self.model.eval()", "goes on in eval mode"),
    "gan": ("G101", "fakes.append(fake if BUG", "fakes"),
    "reinforce": ("G101", "baseline = 0.9 * baseline", "baseline"),
    "rnn_tbptt": ("G107", "logits, state = model(x, state)", "state"),
    "amp_accumulation": ("A301", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "unscale"),
    "by_hand": ("G101", "seen = seen + (loss if BUG", "seen"),
    "lbfgs_style": ("G101", "kept.append(f)", "kept"),
}
"""Rule, line and a word of what is said, by script. More in a package (below), in Lightning and Hugging Face."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_healthy_script_is_left_as_it_is_and_not_accused(name: str) -> None:
    """The last line that each prints is a digest of all weights and the next random number."""
    script = SCRIPTS / f"{name}.py"
    bare, watched = fork(script, watched=False), fork(script)
    assert bare.code == 0, bare.err
    assert (watched.code, watched.out) == (bare.code, bare.out)
    assert watched.codes() == []


@pytest.mark.parametrize(("name", "expected"), PLANTED.items(), ids=list(PLANTED))
def test_the_planted_fault_is_found_and_named(name: str, expected: tuple[str, str, str]) -> None:
    code, line, what = expected
    watched = fork(SCRIPTS / f"{name}.py", ["--bug"])
    found = [f for f in watched.findings if f["code"] == code]
    assert found, watched.err
    assert found[0]["source"]["text"].startswith(line)
    assert what in " ".join(str(found[0][key]) for key in ("message", "holder", "params", "fix"))


def test_a_package_runs_as_a_module_with_its_relative_imports() -> None:
    bare = spawn(["-m", "segment"], cwd=SCRIPTS, watched=False)
    healthy = spawn(["-m", "segment"], cwd=SCRIPTS)
    assert (healthy.code, healthy.out) == (0, bare.out)
    assert healthy.codes() == []
    sick = spawn(["-m", "segment", "--bug"], cwd=SCRIPTS)
    assert sick.codes() == ["P201"]
    assert sick.findings[0]["params"] == ["aux.weight", "aux.bias"]
    assert "(aux > 0).float()" in sick.findings[0]["source"]["text"]
