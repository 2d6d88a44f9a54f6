"""What `oom="split"` costs in steps that fit, in microseconds of CPU a step.

    python benchmarks/oom_split.py [--rounds 15]

Each round trains the same model with and without it, in shuffled order, in this process on one thread, guards off;
`off again` is the noise. Medians over rounds of the difference to the same round's `off`. `tiny` is two linear layers;
`norms` has ten BatchNorm layers, a big mask that never moves, and modules of its own, all of which are noted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from safetrain import Trainer

CONTENDERS: dict[str, dict[str, Any]] = {"off": {}, "off again": {}, "split": {"oom": "split"}}
STEPS = 400


class Layer(nn.Module):
    """A module of a user's own, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


def make_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "tiny":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = nn.Sequential(*(Layer() for _ in range(10)), nn.Linear(64, 10))
    model.register_buffer("mask", torch.ones(1024, 1024))
    return model


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])


def microseconds(name: str, settings: dict[str, Any], batches: list[Any]) -> float:
    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = Classifier(model, optimizer, max_steps=STEPS, guards="off", **settings)
    trainer.fit(batches[:8] * (STEPS // 8))  # warm
    trainer.max_steps = 2 * STEPS
    start = time.process_time()
    trainer.fit(batches)
    return (time.process_time() - start) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 32, 64, generator=generator), torch.randint(10, (64, 32), generator=generator)
    pool = list(zip(x, y, strict=True))
    batches = [pool[i % 64] for i in range(STEPS)]
    for name in ("tiny", "norms"):
        times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for _ in range(rounds):
            for contender in random.sample(list(CONTENDERS), len(CONTENDERS)):
                times[contender].append(microseconds(name, CONTENDERS[contender], batches))
        off = times.pop("off")
        print(f"{name}: off {statistics.median(off):.0f} µs a step")
        for contender, values in times.items():
            added = statistics.median(b - a for a, b in zip(off, values, strict=True))
            print(f"  {contender}: {added:+.1f} µs")


if __name__ == "__main__":
    main()
