"""A penalty on the gradient by the input: differentiate twice, and get a classifier that noise disturbs less.

    python -m safetrain run examples/configs/gradient_penalty.yaml
    python examples/gradient_penalty.py

`create_graph=True` keeps the graph of the first differentiation, so that backward can go through the penalty as well.
Asked for by `autograd.grad` it leaves nothing behind; `loss.backward(create_graph=True)` would (rule G105).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from digits import Batch, DigitsTrainer
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.data import DataLoader


class GradientPenaltyTrainer(DigitsTrainer):
    class Params(BaseModel, extra="forbid", frozen=True):
        width: int = 16
        """Channels of the first convolution; the second has twice as many."""
        penalty: float = 1.0
        """Weight of the squared length of each loss's gradient by its image."""
        noise: float = 0.3
        """Standard deviation of the noise that evaluation adds to images in 0..1."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        # No BatchNorm: it would mix the images of a batch, and each loss's gradient is meant by its own image alone.
        # Smooth activations: the second derivative of a ReLU is zero.
        width = params.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def training_step(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        images = images.clone().requires_grad_()
        losses = F.cross_entropy(self.model(images), labels, reduction="none")
        (slopes,) = torch.autograd.grad(losses.sum(), images, create_graph=True)
        steepness = slopes.square().sum(dim=(1, 2, 3)).mean()
        return losses.mean() + self.params.penalty * steepness, {"steepness": steepness.detach()}

    def evaluation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        noisy = images + self.params.noise * torch.randn_like(images)
        under_noise = (self.model(noisy).argmax(dim=1) == labels).float().mean()
        return {**super().evaluation_step(batch), "accuracy_under_noise": under_noise}


def main() -> None:
    for penalty in (0.0, 1.0):
        torch.manual_seed(0)
        params = GradientPenaltyTrainer.Params(penalty=penalty)
        model = GradientPenaltyTrainer.build_model(params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        trainer = GradientPenaltyTrainer(model, optimizer, max_epochs=10)
        trainer.params = params
        train, val = GradientPenaltyTrainer.build_data(params)
        state = trainer.fit(DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=360))
        accuracy, noisy = state.eval_metrics["accuracy"], state.eval_metrics["accuracy_under_noise"]
        print(f"penalty {penalty}: accuracy {accuracy:.2%}, under noise {noisy:.2%}")


if __name__ == "__main__":
    main()
