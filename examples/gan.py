"""A GAN: two optimizers that take turns in one overridden `train_step`. Learns eight Gaussians on a ring.

    python -m safetrain run examples/configs/gan.yaml
    python examples/gan.py

How well it learns is measured: the energy distance between generated and real points (0 when they are alike), and
how many of the eight Gaussians the generator reaches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from safetrain import Trainer

Batch = list[Tensor]
"""One tensor: real points [n, 2]."""

NUM_MODES, RADIUS, SPREAD = 8, 2.0, 0.15


def ring(num_points: int, seed: int) -> Tensor:
    """Points [num_points, 2] of the mixture."""
    draw = torch.Generator().manual_seed(seed)
    mode = torch.randint(NUM_MODES, (num_points,), generator=draw)
    return centers()[mode] + SPREAD * torch.randn(num_points, 2, generator=draw)


def centers() -> Tensor:
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return RADIUS * torch.stack((angles.cos(), angles.sin()), dim=1)


def energy_distance(a: Tensor, b: Tensor) -> Tensor:
    """2 E|a - b| - E|a - a'| - E|b - b'| over the points of `a` [n, 2] and `b` [m, 2]."""
    return 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


class GANTrainer(Trainer):
    class Params(BaseModel, extra="forbid", frozen=True):
        noise: int = 4
        """Numbers that the generator starts from."""
        width: int = 64
        """Units of each hidden layer."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        def mlp(size_in: int, size_out: int) -> nn.Module:
            width = params.width
            hidden = [nn.Linear(size_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
            return nn.Sequential(*hidden, nn.Linear(width, size_out))

        return nn.ModuleDict({"generator": mlp(params.noise, 2), "critic": mlp(2, 1)})

    @classmethod
    def build_data(cls, params: Params) -> tuple[Dataset[Batch], Dataset[Batch]]:
        return TensorDataset(ring(20_000, seed=1)), TensorDataset(ring(2_000, seed=2))

    def train_step(self, window: Sequence[Batch]) -> None:
        """The critic learns to rank real points above generated ones, then the generator learns to undo that."""
        real = torch.cat([points for (points,) in self.to_device(window)])

        self.zero_grad()
        with self.autocast():
            generated = self.generate(len(real)).detach()
            critic_loss = F.softplus(self.critic(generated) - self.critic(real)).mean()
        self.backward(critic_loss)
        self.optimizer_step("critic")

        self.zero_grad()
        with self.autocast():
            generated = self.generate(len(real))
            generator_loss = F.softplus(self.critic(real) - self.critic(generated)).mean()
        self.backward(generator_loss)
        self.optimizer_step("generator")

        self.log("critic_loss", critic_loss.detach())
        self.log("generator_loss", generator_loss.detach())

    def evaluation_step(self, batch: Batch) -> dict[str, Tensor]:
        real = batch[0]
        generated = self.generate(len(real))
        distance, mode = torch.cdist(generated, centers().to(self.device)).min(dim=1)
        reached = mode[distance < 3 * SPREAD].bincount(minlength=NUM_MODES) > len(real) / NUM_MODES / 4
        return {"energy_distance": energy_distance(generated, real), "modes": reached.sum()}

    def generate(self, num_points: int) -> Tensor:
        generator = self.model["generator"]
        return generator(torch.randn(num_points, generator[0].in_features, device=self.device))

    def critic(self, points: Tensor) -> Tensor:
        return self.model["critic"](points)


if __name__ == "__main__":
    torch.manual_seed(0)
    params = GANTrainer.Params()
    model = GANTrainer.build_model(params)
    train, val = GANTrainer.build_data(params)
    optimizers = {
        name: torch.optim.Adam(model[name].parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
        for name in ("generator", "critic")
    }
    schedules = {name: CosineAnnealingLR(optimizer, T_max=3000) for name, optimizer in optimizers.items()}
    trainer = GANTrainer(model, optimizers, schedules, max_steps=3000, eval_every=3000)
    val_loader = DataLoader(val, batch_size=len(val))
    before = trainer.evaluate(val_loader)
    after = trainer.fit(DataLoader(train, batch_size=256, shuffle=True), val_loader).eval_metrics
    print(f"energy distance {before['energy_distance']:.3f} -> {after['energy_distance']:.4f}")
    print(f"Gaussians reached {before['modes']:.0f} -> {after['modes']:.0f} of {NUM_MODES}")
    print(f"for comparison, two sets of real points are {energy_distance(ring(2000, 2), ring(2000, 3)):.4f} apart")
