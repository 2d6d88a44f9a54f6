"""Text that every machine with Python has: the sources of its own standard library."""

from __future__ import annotations

import string
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

ALPHABET = "\n" + string.printable[:95] + "\t"
"""What a character may be; any other is read as `?`."""
_CODES = {character: code for code, character in enumerate(ALPHABET)}


@cache
def load_files(limit_chars: int = 4_000_000) -> tuple[list[Tensor], list[Tensor]]:
    """(training files, validation files): each file a tensor [characters] of codes, int64; every 20th validates."""
    files, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if total + len(text) > limit_chars:
            break
        total += len(text)
        files.append(torch.tensor([_CODES.get(character, _CODES["?"]) for character in text]))
    return [f for i, f in enumerate(files) if i % 20], files[::20]


def ngram_loss(train: list[Tensor], val: list[Tensor], order: int) -> float:
    """Loss per character (nats) of a smoothed `order`-gram model: the baseline that a network has to beat.

    Each order's estimate leans on the one below it (Witten-Bell smoothing): contexts seen often are trusted more.
    """
    size = len(ALPHABET)
    heard, tested = torch.cat(train), torch.cat(val)
    probability = torch.full((len(tested) - order + 1,), 1 / size, dtype=torch.float64)
    for n in range(1, order + 1):
        seen, asked = _codes_of(heard, n, size), _codes_of(tested, n, size)[order - n :]
        grams, counts = seen.unique(return_counts=True)
        contexts, where = (grams // size).unique(return_inverse=True)
        context_counts = torch.zeros(len(contexts), dtype=torch.float64).index_add_(0, where, counts.double())
        followers = torch.zeros(len(contexts), dtype=torch.float64).index_add_(
            0, where, torch.ones(len(grams)).double()
        )
        count = _look_up(grams, counts.double(), asked)
        context_count = _look_up(contexts, context_counts, asked // size)
        kinds = _look_up(contexts, followers, asked // size)
        known = context_count > 0
        mixed = (count + kinds * probability) / (context_count + kinds).clamp(min=1)
        probability = torch.where(known, mixed, probability)
    return -probability.log().mean().item()


def _codes_of(text: Tensor, n: int, size: int) -> Tensor:
    """One integer for every run of `n` characters; dividing by `size` gives its context."""
    codes = torch.zeros(len(text) - n + 1, dtype=torch.int64)
    for i in range(n):
        codes = codes * size + text[i : len(text) - n + 1 + i]
    return codes


def _look_up(keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
    """The value of each asked key, 0 where there is none; `keys` are sorted."""
    place = torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)
    return torch.where(keys[place] == asked, values[place], 0.0)
