"""A little trainer class with checkpointing, early stopping and a kept best model."""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.freq = torch.rand(n, generator=g) * 3
        self.noise = torch.randn(n, 32, generator=g) * 0.1

    def __len__(self):
        return len(self.freq)

    def __getitem__(self, i):
        t = torch.linspace(0, 6.28, 32)
        return torch.sin(self.freq[i] * t) + self.noise[i], self.freq[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 5, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(),
        )
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.features(x.unsqueeze(1))).squeeze(1)


class Trainer:
    def __init__(self, model, folder, bug=False):
        self.model = model
        self.folder = Path(folder)
        self.bug = bug
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.loss_fn = nn.HuberLoss()
        self.best, self.best_state = float("inf"), None

    def run_epoch(self, loader):
        for x, y in loader:
            loss = self.loss_fn(self.model(x), y)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def validate(self, loader):
        self.model.eval()
        with torch.inference_mode():
            total = sum(self.loss_fn(self.model(x), y).item() for x, y in loader)
        if not self.bug:
            self.model.train()
        return total / len(loader)

    def fit(self, train, val, epochs):
        self.model.train()
        for epoch in range(epochs):
            last = self.run_epoch(train)
            score = self.validate(val)
            self.scheduler.step(score)
            if score < self.best:
                self.best, self.best_state = score, copy.deepcopy(self.model.state_dict())
                torch.save({"model": self.best_state, "epoch": epoch}, self.folder / "best.pt")
            print(f"{epoch}: {last:.5f} {score:.5f} lr {self.optimizer.param_groups[0]['lr']}")


if __name__ == "__main__":
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Net(), folder, bug="--bug" in sys.argv)
        trainer.fit(DataLoader(Waves(256, 1), 32, shuffle=True), DataLoader(Waves(96, 2), 32), epochs=4)
        best = torch.load(trainer.folder / "best.pt")["model"]
    print(sum(v.double().sum().item() for v in trainer.model.state_dict().values()), sum(v.double().sum().item() for v in best.values()))
    print(torch.rand(2).tolist())
