"""A small GPT that reads Python's standard library, measured against n-grams. A minute or two on a CPU.

    python -m safetrain run examples/configs/char_gpt.yaml
    python examples/char_gpt.py

Files end where they end, so the last piece of each is shorter. The step therefore returns a `StepOutput`: the sum of
the loss and how many characters it is over. However a window is split, every character counts the same.

It passes the 4-gram. The 5-gram has counted all of the text, of which these steps see 1.5 million characters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from stdlib_text import ALPHABET, load_files, ngram_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from safetrain import StepOutput, Trainer
from safetrain.config.schedules import WarmupCosine

NOTHING = -100
"""Target of a position past the end of a file; `cross_entropy` leaves it out."""


def rotate(x: Tensor) -> Tensor:
    """Turn the halves of each vector of `x` [..., length, size] by its position, so that attention sees distances."""
    length, size = x.shape[-2:]
    speeds = 100.0 ** -torch.linspace(0, 1, size // 2, device=x.device)
    angles = torch.outer(torch.arange(length, device=x.device), speeds).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.drop(self.mix(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.feed(self.norm2(x)))


class GPT(nn.Module):
    """Codes [batch, length] to the logits of each next code [batch, length, alphabet]."""

    def __init__(self, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.characters(codes))))


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Files cut into pieces: (codes [length], the code after each [length], `NOTHING` past the end of the file)."""

    def __init__(self, files: list[Tensor], length: int) -> None:
        self.files, self.length = files, length
        self.starts = [(i, start) for i, file in enumerate(files) for start in range(0, len(file) - 1, length)]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, start = self.starts[index]
        piece = self.files[file][start : start + self.length + 1]
        missing = self.length + 1 - len(piece)
        return F.pad(piece[:-1], (0, missing)), F.pad(piece[1:], (0, missing), value=NOTHING)


class CharGPTTrainer(Trainer):
    class Params(BaseModel, extra="forbid", frozen=True):
        length: int = 128
        """Characters that the model sees at once."""
        width: int = 96
        """Size of a character's vector."""
        depth: int = 3
        """Blocks."""
        heads: int = 4
        """Attention heads a block."""
        dropout: float = 0.0
        """Share of each block's output that is dropped in training."""
        limit_chars: int = 4_000_000
        """How much of the standard library to read."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        return GPT(params.width, params.depth, params.heads, params.dropout)

    @classmethod
    def build_data(cls, params: Params) -> tuple[Pieces, Pieces]:
        train, val = load_files(params.limit_chars)
        return Pieces(train, params.length), Pieces(val, params.length)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> StepOutput:
        codes, targets = batch
        logits = self.model(codes)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="sum")
        return StepOutput(loss_sum, weight=(targets != NOTHING).sum())


def main() -> None:
    params = CharGPTTrainer.Params()
    for order in (1, 2, 3, 4, 5):
        print(f"{order}-gram: {ngram_loss(*load_files(params.limit_chars), order):.3f} nats per character", flush=True)
    torch.manual_seed(0)
    model = CharGPTTrainer.build_model(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = WarmupCosine(optimizer, total_steps=1500, warmup_steps=100)
    trainer = CharGPTTrainer(model, optimizer, schedule, max_steps=1500, clip_norm=1.0)
    train, val = CharGPTTrainer.build_data(params)
    state = trainer.fit(DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=64))
    print(f"this GPT: {state.eval_metrics['loss']:.3f} nats per character after {state.step} steps")


if __name__ == "__main__":
    main()
