"""A GAN with spectral norm, two optimizers and label smoothing."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

BUG = "--bug" in sys.argv


class G(nn.Module):
    def __init__(self, z=6):
        super().__init__()
        self.z = z
        self.net = nn.Sequential(nn.Linear(z, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, n):
        return self.net(torch.randn(n, self.z))


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1)))

    def forward(self, x):
        return self.net(x)


def real(n):
    return torch.randn(n, 2) * torch.tensor([0.5, 1.0]) + torch.tensor([2.0, -1.0])


def main():
    torch.manual_seed(1)
    generator, critic = G(), D()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    fakes = []
    for step in range(60):
        x, fake = real(24), generator(24)
        d_loss = F.binary_cross_entropy_with_logits(critic(x), torch.full((24, 1), 0.9))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(24, 1))
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        fake = generator(24)
        g_loss = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(24, 1))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        if step % 5 == 0:
            fakes.append(fake if BUG else fake.detach())
        if step % 20 == 0:
            print(f"{step} d {d_loss.item():.4f} g {g_loss.item():.4f}")
    print(torch.cat(fakes).mean(0).tolist())
    print(sum(p.double().sum().item() for m in (generator, critic) for p in m.state_dict().values()), torch.rand(1).item())


main()
