"""A small transformer in float16 autocast: loss scaling, accumulation, clipping, warm-up, an EMA copy."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = "--bug" in sys.argv
ACCUM, VOCAB = 4, 23


class Block(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(torch.randn(1, 16, d) * 0.02)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        h = self.tok(x) + self.pos[:, : x.shape[1]]
        for block in self.blocks:
            h = block(h, mask)
        return F.linear(self.norm(h), self.tok.weight)


@torch.no_grad()
def update_ema(ema, model, decay=0.95):
    for a, b in zip(ema.parameters(), model.parameters()):
        a.lerp_(b, 1 - decay)


def main():
    torch.manual_seed(2)
    start = torch.randint(0, VOCAB, (192, 1))
    tokens = (start + torch.arange(17) * 3) % VOCAB
    loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)
    model = LM()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = 0
    for epoch in range(4):
        optimizer.zero_grad()
        for i, (batch,) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / ACCUM
            scaler.scale(loss).backward()
            if (i + 1) % ACCUM == 0:
                if not BUG:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if scaler.get_scale() >= before:
                    scheduler.step()
                update_ema(ema, model)
                step += 1
        print(f"epoch {epoch} step {step} loss {loss.item() * ACCUM:.5f}")
    print(sum(p.double().sum().item() for p in [*model.parameters(), *ema.parameters()]), torch.rand(1).item())


if __name__ == "__main__":
    main()
