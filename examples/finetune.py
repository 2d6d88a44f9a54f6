"""Fine-tuning: a frozen backbone and a new head, which learns digits that the backbone has never seen.

    python -m safetrain run examples/configs/finetune.yaml
    python examples/finetune.py

Freezing takes two things. `requires_grad_(False)` keeps the weights; `eval()` keeps BatchNorm's statistics and switches
dropout off. The trainer leaves the mode of each module as it was set up, after evaluations too.
"""

from __future__ import annotations

import torch
from digits import Batch, DigitsTrainer
from pydantic import BaseModel
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def keep_labels(data: Dataset[Batch], low: int, high: int, limit: int | None = None) -> TensorDataset:
    """The images whose label is in low..high, at most `limit` of them, labelled from 0."""
    images, labels = data.tensors
    chosen = ((labels >= low) & (labels <= high)).nonzero().squeeze(1)[:limit]
    return TensorDataset(images[chosen], labels[chosen] - low)


def pretrained(width: int) -> nn.Sequential:
    """A network trained on the digits 0 to 4 (a second or two); what it was trained on is all that it knows."""
    params = DigitsTrainer.Params(width=width)
    model = DigitsTrainer.build_model(params)
    train, _ = DigitsTrainer.build_data(params)
    loader = DataLoader(keep_labels(train, 0, 4), batch_size=64, shuffle=True)
    DigitsTrainer(model, torch.optim.AdamW(model.parameters(), lr=5e-3), max_epochs=5).fit(loader)
    return model


class FinetuneTrainer(DigitsTrainer):
    class Params(BaseModel, extra="forbid", frozen=True):
        width: int = 32
        """Channels of the backbone's first convolution."""
        num_images: int = 100
        """How many images of the digits 5 to 9 the head may learn from."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        *layers, old_head = pretrained(params.width)
        backbone = nn.Sequential(*layers).requires_grad_(False).eval()
        return nn.Sequential(backbone, nn.Linear(old_head.in_features, 5))

    @classmethod
    def build_data(cls, params: Params) -> tuple[TensorDataset, TensorDataset]:
        train, val = DigitsTrainer.build_data(DigitsTrainer.Params())
        return keep_labels(train, 5, 9, params.num_images), keep_labels(val, 5, 9)


if __name__ == "__main__":
    torch.manual_seed(0)
    params = FinetuneTrainer.Params()
    model = FinetuneTrainer.build_model(params)
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    train, val = FinetuneTrainer.build_data(params)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainer = FinetuneTrainer(model, torch.optim.AdamW(trainable, lr=1e-2, fused=True), max_epochs=30)
    state = trainer.fit(DataLoader(train, batch_size=25, shuffle=True), DataLoader(val, batch_size=200))
    moved = [name for name, value in model[0].state_dict().items() if not torch.equal(value, before[name])]
    print(f"accuracy on the digits 5 to 9: {state.eval_metrics['accuracy']:.2%} from {len(train)} images")
    print(f"entries of the backbone that moved: {moved or 'none'}")
