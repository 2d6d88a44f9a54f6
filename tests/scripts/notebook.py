# %% [markdown]
# # Denoising autoencoder
# exported from a notebook

# %%
import sys

import torch
import torch.nn as nn
import torch.optim as optim

BUG = "--bug" in sys.argv
torch.manual_seed(7)

# %%
base = torch.randn(6, 24)
data = torch.randn(400, 6) @ base
mean, std = data.mean(0), data.std(0)
data = (data - mean) / std

# %%
encoder = nn.Sequential(nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 6))
decoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 24))
criterion = nn.MSELoss()
optimizer = optim.Adam(encoder.parameters() if BUG else [*encoder.parameters(), *decoder.parameters()], lr=2e-3)

# %%
losses = []
for epoch in range(4):
    order = torch.randperm(len(data))
    for start in range(0, len(data), 40):
        batch = data[order[start : start + 40]]
        noisy = batch + 0.2 * torch.randn_like(batch)
        code = encoder(noisy)
        loss = criterion(decoder(code), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if BUG:
            decoder.zero_grad()
        losses.append(loss.detach())
    print("epoch", epoch, "loss", torch.stack(losses[-10:]).mean())

# %%
with torch.no_grad():
    print("final", criterion(decoder(encoder(data)), data))
print(sum(p.double().sum() for p in [*encoder.parameters(), *decoder.parameters()]), torch.rand(1))
