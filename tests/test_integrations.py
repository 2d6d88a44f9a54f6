"""The guards inside Lightning and the Hugging Face Trainer, with the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import io
import re
import warnings
from pathlib import Path

import pytest

from safetrain.errors import GuardError
from tests.doctor_host import spawn

SCRIPTS = Path(__file__).parent / "scripts"

needs_lightning = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None,
    reason="lightning is not installed (pip install safetrain[integrations])",
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed (pip install safetrain[integrations])",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "holder", "line"),
    [
        pytest.param("lightning_fit.py", ".seen", "self.seen.append(loss)", marks=needs_lightning),
        pytest.param("hf_trainer.py", ".history", "self.history.append(outputs.logits)", marks=needs_transformers),
    ],
)
def test_the_doctor_reads_scripts_of_other_trainers_as_they_are(script: str, holder: str, line: str) -> None:
    bare = spawn([script], cwd=SCRIPTS, watched=False)
    healthy = spawn([script], cwd=SCRIPTS)
    assert (healthy.code, _without_times(healthy.out)) == (0, _without_times(bare.out))
    assert healthy.codes() == []
    sick = spawn([script, "--bug"], cwd=SCRIPTS)
    assert sick.codes() == ["G101"]
    assert holder in sick.findings[0]["holder"]
    assert sick.findings[0]["source"]["text"] == line


def _without_times(out: str) -> str:
    """What a trainer prints of its own speed is another number in each run."""
    return re.sub(r"'\w+(_runtime|_per_second)': '?[\d.]+'?", "", out)


@needs_lightning
@pytest.mark.slow
def test_lightning_callback_reports_and_stops_when_strict(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning as L
        import torch
        from torch import nn
        from torch.utils.data import DataLoader

        from safetrain.integrations.lightning import GuardCallback

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.kept = nn.Linear(4, 1), []

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                loss = self.net(batch).pow(2).mean()
                self.kept.append(loss)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        def fit(guard: GuardCallback) -> None:
            trainer = L.Trainer(
                max_epochs=1, callbacks=[guard], logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
            )  # fmt: skip
            trainer.fit(Module(), DataLoader(torch.randn(64, 4), batch_size=8))

        shown = io.StringIO()
        guard = GuardCallback(stream=shown)
        fit(guard)
        assert [f.code for f in guard.findings] == ["G101"]
        assert "kept" in shown.getvalue()
        with pytest.raises(GuardError, match="G101"):
            fit(GuardCallback(stream=None, strict=True))


@needs_transformers
@pytest.mark.slow
def test_transformers_callback_reports_and_stops_when_strict(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from torch import nn
        from transformers import Trainer, TrainingArguments

        from safetrain.integrations.transformers import GuardCallback

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.kept = nn.Linear(4, 1), []

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                loss = (self.net(x).squeeze(1) - labels).pow(2).mean()
                self.kept.append(loss)
                return {"loss": loss}

        rows = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(64)]
        args = TrainingArguments(
            str(tmp_path), num_train_epochs=1, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
            save_strategy="no", logging_strategy="no", use_cpu=True,
        )  # fmt: skip
        guard = GuardCallback(stream=None)
        Trainer(Model(), args, train_dataset=rows, callbacks=[guard]).train()
        assert [f.code for f in guard.findings] == ["G101"]
        strict = GuardCallback(stream=None, strict=True)
        with pytest.raises(GuardError, match="G101"):
            Trainer(Model(), args, train_dataset=rows, callbacks=[strict]).train()
        strict.close()
