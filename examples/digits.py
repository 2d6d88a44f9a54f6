"""Handwritten digits: a whole training in one class. Reaches 98 % and more in a few seconds on a CPU.

python -m safetrain run examples/configs/digits.yaml        # with logs, checkpoints and TensorBoard
python examples/digits.py                                   # the same as a script of your own
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from safetrain import Trainer

Batch = tuple[Tensor, Tensor]
"""Images [n, 1, 8, 8] in 0..1 and their labels [n]."""


class DigitsTrainer(Trainer):
    """A small convolutional network on the 1,797 images that come with scikit-learn."""

    class Params(BaseModel, extra="forbid", frozen=True):
        width: int = 32
        """Channels of the first convolution; the second has twice as many."""
        dropout: float = 0.5
        """Share of features dropped before the classifier."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        width = params.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),  # BatchNorm would cancel a bias
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(params.dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    @classmethod
    def build_data(cls, params: Params) -> tuple[Dataset[Batch], Dataset[Batch]]:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        train, val = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
        return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])

    def training_step(self, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def evaluation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.model(images)
        return {
            "loss": F.cross_entropy(logits, labels),
            "accuracy": (logits.argmax(dim=1) == labels).float().mean(),
        }


if __name__ == "__main__":
    torch.manual_seed(0)
    params = DigitsTrainer.Params()
    model = DigitsTrainer.build_model(params)
    train, val = DigitsTrainer.build_data(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=460)
    trainer = DigitsTrainer(model, optimizer, schedule, max_steps=460)
    state = trainer.fit(DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=360))
    print(f"validation accuracy {state.eval_metrics['accuracy']:.2%} after {state.epoch} epochs")
