"""The Trainer as it comes: default guards, no callbacks."""

from __future__ import annotations

from . import only
from .safetrain import load, make

__all__ = ["evaluate", "load", "train"]


def train(w, variant=None):
    only(w)
    make(w, guards="default").fit(w.loader())


def evaluate(w, variant=None):
    return make(w, guards="default").evaluate(w.loader())["loss"]
