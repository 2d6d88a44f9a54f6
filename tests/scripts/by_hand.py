"""Two-layer network with plain tensors and updates written by hand."""

import sys

import torch

BUG = "--bug" in sys.argv
torch.manual_seed(0)
x = torch.randn(128, 5)
y = torch.sin(x.sum(1, keepdim=True))
w1 = (torch.randn(5, 32) * 0.4).requires_grad_()
b1 = torch.zeros(32, requires_grad=True)
w2 = (torch.randn(32, 1) * 0.2).requires_grad_()
lr, seen = 0.05, 0.0

for it in range(60):
    pred = (x @ w1 + b1).tanh() @ w2
    loss = (pred - y).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for p in (w1, b1, w2):
            p -= lr * p.grad
            p.grad.zero_()
    seen = seen + (loss if BUG else loss.item())
    if it % 20 == 0:
        print(it, f"{loss.item():.5f}")
print(f"{float(seen):.4f}", w1.sum().item(), w2.sum().item(), torch.rand(1).item())
