import torch
from torch import nn


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(2, b), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width=6, bug=False):
        super().__init__()
        self.bug = bug
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.mid = block(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.fuse = block(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.aux = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.mid(self.down2(torch.nn.functional.max_pool2d(a, 2)))
        u = self.fuse(torch.cat([self.up(b), a], 1))
        aux = self.aux(b.detach() if not self.bug else b)
        return self.out(u), aux if not self.bug else (aux > 0).float()
