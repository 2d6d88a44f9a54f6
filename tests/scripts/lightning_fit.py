"""A Lightning training: module, loaders, scheduler, accumulation, clipping, validation."""

import logging
import sys
import tempfile
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BUG = "--bug" in sys.argv
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        if BUG:
            self.seen.append(loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def main():
    L.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)
    train = DataLoader(TensorDataset(x[:192], y[:192]), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=32)
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=1.0, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )
        trainer.fit(model, train, val)
    print(trainer.global_step, sum(p.double().sum().item() for p in model.parameters()), torch.rand(1).item())


if __name__ == "__main__":
    main()
