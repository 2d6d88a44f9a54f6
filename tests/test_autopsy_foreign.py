"""Loops that know nothing of this package: faults of a user's script, inferred or replayed, down to the line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from safetrain.findings import Finding
from safetrain.foreign.watching import Watch

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(96, 6); y = x[:, :1] * 2 + 0.1 * torch.randn(96, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
"""

LOOP = """
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for xb, yb in loader:
    loss = F.mse_loss(model(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

SCRIPTS: dict[str, tuple[str, str]] = {
    "a penalty computed once by an object": (
        "G121",
        HEAD
        + """
class Reg:
    def __init__(self, model):
        self.penalty = sum(p.pow(2).sum() for p in model.parameters())  # HERE
def main():
    model = nn.Linear(6, 1)
    reg = Reg(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb) + 1e-4 * reg.penalty
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
""",
    ),
    "a running centre that reaches the loss a step later": (
        "G122",
        HEAD
        + """
class Distil(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.register_buffer("center", torch.zeros(1, 4))
    def forward(self, a, b):
        p, q = self.net(a), self.net(b)
        target = F.softmax(q.detach() - self.center, dim=1)
        loss = -(target * F.log_softmax(p, dim=1)).sum(1).mean()
        self.center = 0.9 * self.center + 0.1 * q.mean(0, keepdim=True)  # HERE
        return loss
def main():
    model = Distil()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for xb, _ in loader:
        loss = model(xb, xb + 0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
main()
""",
    ),
    "features shared by two losses": (
        "G121",
        HEAD
        + """
enc = nn.Linear(6, 8); a = nn.Linear(8, 1); b = nn.Linear(8, 1)
opt = torch.optim.SGD([*enc.parameters(), *a.parameters(), *b.parameters()], lr=0.01)
for xb, yb in loader:
    feats = torch.tanh(enc(xb))  # HERE
    opt.zero_grad()
    F.mse_loss(a(feats), yb).backward()
    F.l1_loss(b(feats), yb).backward()
    opt.step()
""",
    ),
    "weights moved by hand between two backwards": (
        "G122",
        HEAD
        + """
w1 = torch.randn(6, 8, requires_grad=True); w2 = torch.randn(8, 1, requires_grad=True)
def model(x):
    return torch.tanh(x @ w1) @ w2
for xb, yb in loader:
    pred = model(xb)
    loss1 = F.mse_loss(pred, yb)
    loss2 = pred.abs().mean()
    g1, g2 = torch.autograd.grad(loss1, [w1, w2], retain_graph=True)
    with torch.no_grad():
        w1 -= 0.01 * g1
        w2 -= 0.01 * g2  # HERE
    loss2.backward()
    w1.grad = w2.grad = None
""",
    ),
    "a forward in a decorated function": (
        "G123",
        HEAD
        + """
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
@torch.no_grad()  # HERE
def predict(xb):
    return model(xb)
for xb, yb in loader:
    loss = F.mse_loss(predict(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a loss computed by NumPy": (
        "G123",
        HEAD
        + """
import numpy as np
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for xb, yb in loader:
    out = model(xb)
    err = np.mean((out.detach().numpy() - yb.numpy()) ** 2)  # HERE
    loss = torch.tensor(err)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a model that is frozen throughout": (
        "G123",
        HEAD
        + """
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
for p in model.parameters():
    p.requires_grad = False  # HERE
"""
        + LOOP,
    ),
    "a hand-written checkpoint that forgets the generator": (
        "G126",
        HEAD
        + """
class Ckpt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, n, *args):
        ctx.run = run
        ctx.inputs = list(args[:n]); ctx.params = list(args[n:])
        with torch.no_grad():
            return ctx.run(*ctx.inputs)  # HERE
    @staticmethod
    def backward(ctx, g):
        ins = [t.detach().requires_grad_(True) for t in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*[t.view_as(t) for t in ins])
        gr = torch.autograd.grad(out, ins + ctx.params, g, allow_unused=True)
        return (None, None) + gr
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.mid = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))
        self.head = nn.Linear(16, 1)
    def forward(self, x):
        h = self.stem(x)
        h = Ckpt.apply(self.mid, 1, h, *self.mid.parameters())
        return self.head(h)
model = Net()
"""
        + LOOP,
    ),
    "averaged weights put in before backward": (
        "G128",
        HEAD
        + """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
shadow = [p.detach().clone() for p in model.parameters()]
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for xb, yb in loader:
    opt.zero_grad()
    loss = F.mse_loss(model(xb), yb)
    for p, s in zip(model.parameters(), shadow):
        s.mul_(0.9).add_(p.detach(), alpha=0.1)
        p.data.copy_(s)  # HERE
    loss.backward()
    opt.step()
""",
    ),
    "skip features activated in place": (
        "G129",
        HEAD
        + """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.act = nn.LeakyReLU(0.2, inplace=True)
        self.u = nn.Linear(16, 1)
    def forward(self, x):
        skips = []
        for layer in self.d:
            x = layer(x)
            skips.append(x)
            x = self.act(x)  # HERE
        return self.u(torch.cat(skips, 1))
model = UNet()
"""
        + LOOP,
    ),
    "a distance of zero": (
        "P206",
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(6, 4)
    def forward(self, a, b):
        d = (self.enc(a) - self.enc(b)).pow(2).sum(1).sqrt()  # HERE
        return d
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for i, (xb, yb) in enumerate(loader):
    other = xb.flip(0).clone()
    if i == 3: other[0] = xb[0]
    loss = F.mse_loss(model(xb, other), yb[:, 0].abs())
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a standard deviation of one sample": (
        "P211",
        HEAD
        + """
model = nn.Linear(6, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x[:33], y[:33]), batch_size=16)
for i, (xb, yb) in enumerate(loader):
    out = model(xb)
    out = (out - out.mean()) / (out.std() + 1e-6)  # HERE
    loss = F.mse_loss(out, yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a batch without a single label": (
        "P211",
        HEAD
        + """
model = nn.Linear(6, 3)
yc = torch.randint(0, 3, (96,)); yc[32:48] = -100
loader = DataLoader(TensorDataset(x, yc), batch_size=16)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for i, (xb, yb) in enumerate(loader):
    loss = F.cross_entropy(model(xb), yb, ignore_index=-100)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
}
"""By fault: the rule, and a script whose line to change ends in `# HERE`."""


def diagnose(script: Path) -> list[Finding]:
    """Run a script as the doctor does, in this process."""
    watch = Watch(("G12", "P206", "P211"))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        watch.observer.failed(error)
    finally:
        watch.finish()
        torch.set_grad_enabled(True)
    return watch.report.findings


@pytest.mark.filterwarnings("ignore:std")  # torch says so as well
@pytest.mark.parametrize("fault", SCRIPTS)
def test_a_script_is_told_its_line(fault: str, tmp_path: Path) -> None:
    code, text = SCRIPTS[fault]
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    line = next(n for n, row in enumerate(text.splitlines(), 1) if row.endswith("# HERE"))
    findings = diagnose(script)
    assert [f.code for f in findings] == [code], [f.message for f in findings]
    source = findings[0].source
    assert source is not None and (Path(source.file).name, source.line) == ("train.py", line), findings[0]
