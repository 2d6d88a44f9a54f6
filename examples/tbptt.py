"""Truncated backpropagation through time: an RNN reads one endless text, a piece a step, and remembers across pieces.

    python -m safetrain run examples/configs/tbptt.yaml
    python examples/tbptt.py

The state that one step ends with is the state that the next begins with, cut from the graph: without `detach` each step
would reach back through all earlier ones (rule G107). It lives in a buffer of the model, so a checkpoint holds it and a
resumed run goes on reading where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from stdlib_text import ALPHABET, load_files
from torch import Tensor, nn

from safetrain import Trainer


class Piece(TypedDict):
    """`codes` and `targets` [rows, length]: row by row the text goes on where the piece before ended."""

    codes: Tensor
    targets: Tensor
    is_first: bool


class Pieces:
    """One long text folded into `rows` rows and read side by side, `length` characters a piece."""

    def __init__(self, files: list[Tensor], rows: int, length: int) -> None:
        text = torch.cat(files)
        self.rows = text[: len(text) // rows * rows].view(rows, -1)
        self.length = length

    def __len__(self) -> int:
        return (self.rows.shape[1] - 1) // self.length

    def __iter__(self) -> Iterator[Piece]:
        for start in range(0, len(self) * self.length, self.length):
            piece = self.rows[:, start : start + self.length + 1]
            yield {"codes": piece[:, :-1], "targets": piece[:, 1:], "is_first": start == 0}


class Reader(nn.Module):
    """A GRU over characters: codes [rows, length] and a state to logits of each next code and the state after them."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))
        self.register_buffer("carried", torch.zeros(1, rows, width))

    def forward(self, codes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, state = self.rnn(self.characters(codes), state)
        return self.head(outputs), state


class TBPTTTrainer(Trainer):
    class Params(BaseModel, extra="forbid", frozen=True):
        rows: int = 32
        """Places of the text that are read at once."""
        length: int = 16
        """Characters a step: how far gradients reach back."""
        width: int = 128
        """Size of the state."""
        carry: bool = True
        """Whether a piece begins with the state that the one before ended with; else with zeros."""
        limit_chars: int = 1_000_000
        """How much of the standard library to read."""

    @classmethod
    def build_model(cls, params: Params) -> nn.Module:
        return Reader(params.rows, params.width)

    @classmethod
    def build_data(cls, params: Params) -> tuple[Pieces, Pieces]:
        train, val = load_files(params.limit_chars)
        return Pieces(train, params.rows, params.length), Pieces(val, params.rows, params.length)

    def training_step(self, batch: Piece) -> Tensor:
        loss, state = self.read(batch, self.model.carried)
        self.model.carried = state.detach()  # the graph of this step ends here
        return loss

    def evaluation_step(self, batch: Piece) -> Tensor:
        loss, self.eval_state = self.read(batch, getattr(self, "eval_state", None))
        return loss

    def read(self, batch: Piece, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Loss over a piece, and the state after it."""
        if state is None or batch["is_first"] or not self.params.carry:
            state = torch.zeros_like(self.model.carried)
        logits, state = self.model(batch["codes"], state)
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), state


def main() -> None:
    losses = {}
    for carry in (False, True):
        torch.manual_seed(0)
        params = TBPTTTrainer.Params(carry=carry)
        model = TBPTTTrainer.build_model(params)
        trainer = TBPTTTrainer(
            model, torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True), max_steps=800, clip_norm=1
        )
        trainer.params = params
        train, val = TBPTTTrainer.build_data(params)
        losses[carry] = trainer.fit(train, val).eval_metrics["loss"]
    print(f"loss per character: {losses[False]:.3f} starting each piece anew, {losses[True]:.3f} carrying the state on")


if __name__ == "__main__":
    main()
