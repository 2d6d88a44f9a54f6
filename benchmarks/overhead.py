"""What the Trainer costs over a hand-written loop, in microseconds of CPU a step.

    python benchmarks/overhead.py [--rounds 15] [--workloads tiny tiny_accum eval_tiny small]

Each round runs every contender on the same work, in shuffled order, in this process on one thread; `raw again` is the
hand-written loop a second time, so its distance from the first is the noise. Medians over rounds of the difference to
the same round's raw loop. Weights at the end must be equal bit for bit, or the run is refused.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from safetrain import Callback, Trainer

Batches = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Workload:
    """The same model, data and optimizer for each contender."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.evaluates = name.startswith("eval_")
        self.accumulate = 4 if name.endswith("_accum") else 1
        if "tiny" in name:
            self.steps = 4000 if self.evaluates else 1500 // self.accumulate
            x = torch.randn(64, 32, 64, generator=generator)
            y = torch.randint(10, (64, 32), generator=generator)
        else:
            self.steps = 60
            shape, self.sizes = ((64, 4, 128), (8192, 320, 6, 5)) if "mid" in name else ((64, 8, 64), (512, 128, 2, 4))
            x = torch.randint(self.sizes[0], shape, generator=generator)
            y = torch.randint(self.sizes[0], shape, generator=generator)
        self.is_text = "tiny" not in name
        pool = list(zip(x, y, strict=True))
        self.batches: Batches = [pool[i % len(pool)] for i in range(self.steps * self.accumulate)]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        if self.is_text:
            vocab, width, layers, heads = self.sizes
            blocks = [Block(width, heads) for _ in range(layers)]
            return nn.Sequential(nn.Embedding(vocab, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocab))
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


class Contender(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        return Workload.loss(self.model, batch)


Run = Callable[[], object]


def raw(work: Workload, model: nn.Module) -> Run:
    """What a careful user writes without a framework."""
    return functools.partial(raw_evaluation if work.evaluates else raw_training, work, model)


def raw_evaluation(work: Workload, model: nn.Module) -> float:
    model.eval()
    total = torch.zeros(())
    with torch.no_grad():
        for batch in work.batches:
            total += work.loss(model, batch)
    return float(total) / len(work.batches)


def raw_training(work: Workload, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    params = list(model.parameters())
    for index, batch in enumerate(work.batches):
        if index % work.accumulate == 0:
            optimizer.zero_grad(set_to_none=True)
        loss = work.loss(model, batch)
        (loss / work.accumulate if work.accumulate > 1 else loss).backward()
        if (index + 1) % work.accumulate == 0:
            clip_grad_norm_(params, 1.0)
            optimizer.step()
            schedule.step()


def trainer(work: Workload, model: nn.Module, callbacks: Callable[[], list[Callback]] = list, **options: Any) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    contender = Contender(
        model, optimizer, schedule, max_epochs=1, accumulate=work.accumulate, clip_norm=1.0,
        callbacks=callbacks(), run_dir=tempfile.mkdtemp(prefix="overhead-"), **options,
    )  # fmt: skip
    return functools.partial(contender.evaluate if work.evaluates else contender.fit, work.batches)


def every_callback() -> list[Callback]:
    from safetrain.callbacks import JsonlMetrics, LrMonitor, MemoryMonitor, TensorBoard, Throughput

    return [LrMonitor(), MemoryMonitor(), Throughput(), JsonlMetrics(), TensorBoard()]


CONTENDERS: dict[str, Callable[[Workload, nn.Module], Run]] = {
    "raw": raw,
    "raw again": raw,
    "trainer, guards off": lambda work, model: trainer(work, model, guards="off"),
    "trainer, default guards": trainer,
    "trainer, every callback": lambda work, model: trainer(work, model, every_callback),
}


def measure(work: Workload, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU a step of each contender, round by round; the first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_number in range(rounds + 1):
        weights: dict[str, list[Tensor]] = {}
        for name in random.sample(list(CONTENDERS), len(CONTENDERS)):
            model = work.model()
            run = CONTENDERS[name](work, model)
            started = time.process_time()
            run()
            elapsed = time.process_time() - started
            weights[name] = list(model.parameters())
            if round_number:
                times[name].append(elapsed / work.steps * 1e6)
        for name, params in weights.items():
            if not all(torch.equal(a, b) for a, b in zip(weights["raw"], params, strict=True)):
                raise SystemExit(f"{name} ended with other weights than the raw loop")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workloads", nargs="+", default=["tiny", "tiny_accum", "eval_tiny", "small"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        times = measure(Workload(name), args.rounds)
        print(f"\n{name}: {statistics.median(times['raw']):.0f} µs a step by hand\n")
        print("| contender | ratio | added µs |\n|---|---|---|")
        for contender, values in times.items():
            pairs = list(zip(values, times["raw"], strict=True))
            ratio = statistics.median(mine / by_hand for mine, by_hand in pairs)
            added = statistics.median(mine - by_hand for mine, by_hand in pairs)
            print(f"| {contender} | {ratio:.3f} | {added:+.1f} |")


if __name__ == "__main__":
    main()
