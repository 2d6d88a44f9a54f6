"""Train a classifier on synthetic rings. Written as functions with a command line."""

import argparse
import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bug", action="store_true", help="keep the losses attached")
    return parser.parse_args()


def rings(n=512):
    angle = torch.rand(n) * 2 * math.pi
    y = torch.randint(0, 3, (n,))
    radius = 1.0 + y + 0.1 * torch.randn(n)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y)


def build(hidden=48):
    return nn.Sequential(
        nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 3),
    )


def train_one_epoch(model, loader, optimizer, scheduler, args, history):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        history.append(loss if args.bug else loss.item())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main():
    args = get_args()
    torch.manual_seed(0)
    train_set, val_set = random_split(rings(), [384, 128])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=64)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    history = []
    for epoch in range(args.epochs):
        train_one_epoch(model, train_loader, optimizer, scheduler, args, history)
        print(f"epoch {epoch} loss {float(history[-1]):.4f} accuracy {evaluate(model, val_loader):.3f}")
    digest = hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values()))
    print(digest.hexdigest(), torch.rand(1).item())


if __name__ == "__main__":
    main()
