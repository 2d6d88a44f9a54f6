"""What activation checkpointing saves and costs on a 12-layer GPT, on the CPU's heap meter.

    python benchmarks/activation_checkpoint.py [--width 128] [--batch 8] [--length 128] [--rounds 3] [--steps 9]

Every setting runs in child processes of its own, interleaved over the rounds. Bytes are those of the training at the
peak of a step: parameters, gradients, optimizer state, batch, and what a step adds, read after every operation. Times
are CPU milliseconds, the lowest of the processes' medians: what else runs on the machine only adds. Children never give
freed memory back to the system: whether that happens between two blocks is luck of the heap's layout, and its page
faults move a step's time by a tenth. `auto` gets five budgets between the peaks of all blocks recomputing and none.
`torch` is torch's own checkpoint around each block.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from safetrain import Callback, RunState, Trainer
from safetrain.activation_checkpoint import CheckpointOptions
from safetrain.activation_checkpoint.peaks import StretchPeaks
from safetrain.memory import HeapMeter

VOCABULARY = 96
SETTLED = 8
"""Steps until `auto` has measured, chosen and confirmed."""
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
BUDGETS = (0.02, 0.25, 0.5, 0.75, 1.05)
"""Where between the least and the most bytes."""


class Block(nn.Module):
    """Pre-norm attention and feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.mix(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Codes [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, width: int, length: int, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, max(1, width // 32)) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.tokens(codes) + self.places.weight[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Language(Trainer):
    """Next codes."""

    def training_step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Measures(Callback):
    """CPU seconds of the settled steps but the last, whose peak is read."""

    def __init__(self, last: int) -> None:
        self.last, self.seconds = last, list[float]()
        self.added = 0

    def on_step_start(self, state: RunState) -> None:
        state.model.zero_grad()  # the step begins with it; so what it adds is all there is beside weights and states
        if state.current_step == self.last:
            meter = HeapMeter(slow_ns=10**9)
            self._start, self._peaks = meter.read(), StretchPeaks(None, meter)
            self._peaks.start()
        self._began = time.process_time()

    def on_step_end(self, state: RunState) -> None:
        if state.step == self.last:
            self.added = self._peaks.take() - self._start
            self._peaks.stop()
        elif state.step >= SETTLED:
            self.seconds.append(time.process_time() - self._began)


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Train with one setting; what it took."""
    torch.manual_seed(0)
    model = GPT(options.width, options.length)
    last = SETTLED + options.steps
    measures = Measures(last)
    setting: Any = None
    if options.child == "torch":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    elif options.budget:
        setting = CheckpointOptions(mode="auto", budget=options.budget)
    elif options.child != "none":
        setting = CheckpointOptions(mode=options.child)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    trainer = Language(
        model, optimizer, max_steps=last, activation_checkpoint=setting, callbacks=[measures], guards="off"
    )
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCABULARY, (options.batch, options.length + 1), generator=generator) for _ in range(last)]
    trainer.fit(batches)
    own = 3 * sum(p.nbytes for p in model.parameters()) + batches[0].nbytes
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    modes = list(getattr(trainer.callbacks[0], "modes", {}).values())
    return {
        "bytes": own + measures.added,
        "activations": measures.added,
        "ms": 1e3 * statistics.median(measures.seconds),
        "weights": hashlib.sha256(weights).hexdigest()[:12],
        "modes": {mode: modes.count(mode) for mode in ("keep", "selective", "recompute")} if modes else {},
    }


def run(setting: str, arguments: list[str], budget: int | None = None) -> dict[str, Any]:
    """The result of a child process."""
    extra = ["--budget", str(budget)] if budget else []
    command = [sys.executable, __file__, *arguments, "--child", setting, *extra]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | STEADY_HEAP)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("batch", 8), ("length", 128), ("rounds", 3), ("steps", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(child(options)))
        return
    arguments = sys.argv[1:]
    results: dict[str, list[dict[str, Any]]] = {}
    ends = {setting: run(setting, arguments)["bytes"] for setting in ("none", "recompute")}
    least, most = ends["recompute"], ends["none"]
    budgets = {f"auto {share:.0%}": int(least + share * (most - least)) for share in BUDGETS}
    for _ in range(options.rounds):
        for setting in ("none", "torch", "recompute", "selective", *budgets):
            results.setdefault(setting, []).append(run(setting, arguments, budgets.get(setting)))
    print("| setting | budget MB | peak MB | step's own MB | CPU ms a step | against none | choice | weights |")
    print("|---|---|---|---|---|---|---|---|")
    plain = min(result["ms"] for result in results["none"])
    for setting, runs in results.items():
        ms = min(result["ms"] for result in runs)
        worst = max(result["bytes"] for result in runs)
        budget = f"{budgets[setting] / 1e6:.1f}" if setting in budgets else ""
        choice = ", ".join(f"{count} {mode}" for mode, count in runs[-1]["modes"].items() if count)
        print(
            f"| {setting} | {budget} | {worst / 1e6:.1f} | {runs[-1]['activations'] / 1e6:.1f} | {ms:.0f} | "
            f"{ms / plain - 1:+.0%} | {choice} | {runs[-1]['weights']} |"
        )


if __name__ == "__main__":
    main()
