import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from .models import UNet


def shapes(n=96, size=16):
    masks = F.interpolate((torch.rand(n, 1, 4, 4) > 0.6).float(), size=size, mode="nearest")
    return masks + 0.3 * torch.randn_like(masks), masks


def dice(logits, mask):
    p = logits.sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


def train(cfg):
    torch.manual_seed(11)
    loader = DataLoader(TensorDataset(*shapes()), batch_size=cfg.batch, shuffle=True)
    model = UNet(bug=cfg.bug)
    opt = torch.optim.RMSprop(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        model.train()
        meter = 0.0
        for image, mask in loader:
            logits, aux = model(image)
            small = F.avg_pool2d(mask, 2)
            main = F.binary_cross_entropy_with_logits(logits, mask) + dice(logits, mask)
            loss = main + 0.4 * F.mse_loss(aux, small)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += loss.item()
        print(f"epoch {epoch} {meter / len(loader):.5f}")
    print(sum(p.double().abs().sum().item() for p in model.parameters()), torch.rand(1).item())
