"""What the guards cost, guard by guard: mean µs a step in a hand-written loop that drives them as the Trainer does.

    python benchmarks/guard_cost.py [--steps 3000] [--objects 5_000_000]

`--objects` fills the heap first: the cost must not change. Means, because most guards work in sampled steps only. Each
number includes about 0.2 µs a call for taking the time. The first steps, in which everything is looked at, are shown by
themselves.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

from safetrain.callbacks.base import Callback, overrides
from safetrain.findings import Report
from safetrain.guards import default_guards
from safetrain.state import FIRST_STEPS, RunState

FIRST = 4 * FIRST_STEPS


class Timed:
    """Calls the hooks of guards and adds up what each guard takes."""

    def __init__(self, guards: list[Callback]) -> None:
        self.guards = guards
        self.seconds: dict[str, float] = defaultdict(float)

    def __call__(self, hook: str, state: RunState) -> None:
        for guard in self.guards:
            if not overrides(guard, hook) or (hook in guard.sampled_hooks and not state.is_sampled):
                continue
            call = getattr(guard, hook)
            started = time.perf_counter()
            call(state)
            self.seconds[type(guard).__name__] += time.perf_counter() - started


def run(guards: list[Callback], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by guard in the first `FIRST` steps, and in the `steps` after them, on the MLP of the `tiny` workload."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    state = RunState(model=model, optimizers={"main": optimizer}, gated=True)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    tell = Timed(guards)
    state.request_samples(FIRST_STEPS)
    tell("on_fit_start", state)
    state.phase = "train"
    first: dict[str, float] = {}
    for i in range(FIRST + steps):
        if i == FIRST:
            first, tell.seconds = tell.seconds, defaultdict(float)
        one_step(model, optimizer, state, x, y, tell)
    return first, tell.seconds


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState, x: torch.Tensor, y: torch.Tensor, tell: Timed
) -> None:
    """A step as the Trainer takes it, with its events."""
    state.begin_step()
    tell("on_step_start", state)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
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


def rules_of(guard: Callback) -> str:
    """The rules that the first line of the guard's docstring names."""
    summary = (type(guard).__doc__ or "").partition("\n")[0]
    return " ".join(re.findall(r"[GPALM]\d{3}(?: to [GPALM]\d{3})?", summary))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--objects", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    heap = [[i] for i in range(args.objects)]
    report = Report()
    guards = default_guards(report, gated=True)
    first, later = run(guards, args.steps)
    print(f"heap of {len(heap):,} objects more than usual\n")
    print(f"| guard | rules | µs a step | first {FIRST} steps together, ms |\n|---|---|---|---|")
    for guard in sorted(guards, key=lambda guard: -later[type(guard).__name__]):
        name = type(guard).__name__
        print(f"| {name} | {rules_of(guard)} | {later[name] / args.steps * 1e6:.2f} | {first[name] * 1e3:.1f} |")
    print(f"| in all | | {sum(later.values()) / args.steps * 1e6:.2f} | {sum(first.values()) * 1e3:.1f} |")
    for finding in report.findings:
        print("finding:", finding.code, finding.message)


if __name__ == "__main__":
    main()
