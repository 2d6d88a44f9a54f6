"""Optimise an input against a frozen network, with L-BFGS and a closure: no weights are trained."""

import sys

import torch
from torch import nn

BUG = "--bug" in sys.argv
torch.manual_seed(4)
features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)).eval().requires_grad_(False)
content, style = torch.rand(1, 3, 12, 12), torch.rand(1, 3, 12, 12)


def gram(f):
    f = f.flatten(2)
    return f @ f.transpose(1, 2) / f.shape[-1]


with torch.no_grad():
    want_content, want_gram = features(content), gram(features(style))
image = content.clone().requires_grad_()
optimizer = torch.optim.LBFGS([image], max_iter=5)
kept = []

for step in range(6):

    def closure():
        optimizer.zero_grad()
        f = features(image)
        loss = (f - want_content).pow(2).mean() + 10 * (gram(f) - want_gram).pow(2).mean()
        loss.backward()
        if BUG:
            kept.append(f)
        return loss

    loss = optimizer.step(closure)
    print(step, f"{loss.item():.6f}")
print(image.sum().item(), torch.rand(1).item())
