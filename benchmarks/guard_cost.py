"""What the guards cost: median µs a step, guard by guard and hook by hook, in a hand-written loop that drives them.

    python benchmarks/guard_cost.py [--steps 3000] [--objects 5_000_000] [--all]

`--objects` fills the heap first: the cost must not change. `--all` measures every default guard, else those of graphs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from safetrain.callbacks.base import HOOKS, Callback
from safetrain.findings import Report
from safetrain.guarding.retention import retention_guards
from safetrain.guards import default_guards
from safetrain.state import RunState

WARM_UP = 300


class Timed:
    """Calls a guard's hooks and notes what each call takes."""

    def __init__(self, guards: list[Callback]) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._calls = {
            hook: [
                (type(g).__name__, getattr(g, hook))
                for g in guards
                if getattr(type(g), hook) is not getattr(Callback, hook)
            ]
            for hook in HOOKS
        }

    def __call__(self, hook: str, state: RunState) -> None:
        for name, call in self._calls[hook]:
            started = time.perf_counter()
            call(state)
            self.seconds[name, hook].append(time.perf_counter() - started)


def run(guards: list[Callback], steps: int) -> tuple[float, dict[tuple[str, str], float]]:
    """(seconds a step in all, median seconds by guard and hook) on the MLP of the `tiny` workload."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    state = RunState(model=model, optimizers={"main": optimizer})
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    tell = Timed(guards)
    tell("on_fit_start", state)
    state.phase = "train"
    whole: list[float] = []
    for i in range(WARM_UP + steps):
        if i == WARM_UP:
            tell.seconds.clear()
            whole.clear()
        started = time.perf_counter()
        one_step(model, optimizer, state, x, y, tell)
        whole.append(time.perf_counter() - started)
    return statistics.median(whole), {key: statistics.median(seconds) for key, seconds in tell.seconds.items()}


def one_step(model: nn.Module, optimizer: Any, state: RunState, x: torch.Tensor, y: torch.Tensor, tell: Timed) -> None:
    """A step as the Trainer takes it, with its events."""
    state.in_step = True
    tell("on_step_start", state)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    state.micro_loss = loss
    tell("on_backward_start", state)
    state.micro_loss = None
    loss.backward()
    state.micro_step += 1
    del loss
    tell("on_backward_end", state)
    optimizer.step()
    state.step += 1
    state.in_step = False
    tell("on_step_end", state)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--objects", type=int, default=0)
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    heap = [[i] for i in range(args.objects)]
    report = Report()
    raw, _ = run([], args.steps)
    total, parts = run((default_guards if args.all else retention_guards)(report), args.steps)
    print(f"raw step {raw * 1e6:.1f} µs; with guards {total * 1e6:.1f} µs; heap of {len(heap)} objects")
    for (guard, hook), seconds in sorted(parts.items()):
        print(f"  {guard:20} {hook:20} {seconds * 1e6:7.2f} µs")
    print(f"  {'in all':41} {sum(parts.values()) * 1e6:7.2f} µs a step")
    for finding in report.findings:
        print("  finding:", finding.code, finding.message)


if __name__ == "__main__":
    main()
