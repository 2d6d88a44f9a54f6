"""What is promised: the names of `safetrain.__all__`, importable each, without torch until one of them is used."""

from __future__ import annotations

import subprocess
import sys

import safetrain

PROMISED = {
    *("Trainer", "StepOutput", "RunState", "Callback", "Finding", "CompileOptions", "CheckpointOptions"),
    *("watch", "find_retained_graphs", "find_missing_grads", "find_optimizer_mismatches", "seed_everything"),
    *("SafetrainError", "ConfigError", "BatchError", "BudgetError", "CheckpointError", "NonFiniteError", "GuardError"),
    "__version__",
}


def test_the_promised_names() -> None:
    """A name that goes away goes through a warning first; a new one is added here and to the changelog."""
    assert set(safetrain.__all__) == PROMISED
    for name in PROMISED:
        assert getattr(safetrain, name) is not None
    assert set(dir(safetrain)) >= PROMISED


def test_importing_the_package_imports_no_torch() -> None:
    code = "import safetrain, sys; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_the_trainer_costs_little_over_torch() -> None:
    """Time spent in our own modules and what they pull in, as the interpreter counts it."""
    code = (
        "import torch, time; start = time.process_time(); from safetrain import Trainer; "
        "print(time.process_time() - start)"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) for _ in range(2)
    ]
    assert min(runs) < 2.0, f"{min(runs):.2f} s over torch"
