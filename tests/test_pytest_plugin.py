"""`pytest --safetrain`, run for real on a small suite with healthy and sick tests."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from tests.doctor_host import environment

SUITE = """
import pytest, torch, torch.nn.functional as F
from torch import nn

def train(keep=lambda loss: None):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(8):
        x = torch.randn(8, 4)
        loss = F.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        keep(loss)

def test_healthy():
    train(keep=float)

def test_leak():
    kept = []
    train(keep=kept.append)

def test_fails_by_itself():
    kept = []
    train(keep=kept.append)
    assert not kept

@pytest.mark.safetrain(rules="-G101")
def test_leak_that_is_meant():
    kept = []
    train(keep=kept.append)

@pytest.mark.safetrain(False)
def test_left_alone():
    kept = []
    train(keep=kept.append)
"""


def run_suite(folder: Path, *options: str) -> str:
    (folder / "test_suite.py").write_text(SUITE)
    registered = any(point.name == "safetrain" for point in entry_points(group="pytest11"))
    plugin = () if registered else ("-p", "safetrain.integrations.pytest_plugin")  # a checkout on the path alone
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", "-q", *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    return done.stdout


def test_a_test_fails_for_what_the_guards_find_in_it(tmp_path: Path) -> None:
    out = run_suite(tmp_path, "--safetrain", "-rA")
    assert "2 failed, 3 passed" in out, out
    assert "warning G101 graph-retained" in out and "kept" in out
    assert "FAILED test_suite.py::test_fails_by_itself - assert not" in out


def test_without_the_option_it_does_nothing(tmp_path: Path) -> None:
    assert "1 failed, 4 passed" in run_suite(tmp_path)
