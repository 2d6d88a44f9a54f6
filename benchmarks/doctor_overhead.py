"""What the doctor costs a script: CPU time of its steps with and without it, in interleaved processes.

    python benchmarks/doctor_overhead.py [--rounds 5] [--workloads tiny small mid]

This file is the script, too: `doctor_overhead.py --train tiny` is a loop by hand over a `DataLoader`. Ratios are
medians over rounds of one process under `python -m safetrain doctor` to one without. The first step is recorded
operation by operation; the guards look closer at the steps up to the 64th than at later ones, so each has its own
column. Weights at the end must be equal bit for bit, or the run is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from overhead import Workload, raw
from torch.utils.data import DataLoader

STEPS = {"tiny": 3000, "small": 200, "mid": 24}
EARLY = 64


class Epochs:
    """Passes over a loader until there were enough steps, with a CPU time stamp before each."""

    def __init__(self, loader: DataLoader[Any], steps: int) -> None:
        self.loader, self.steps = loader, steps
        self.stamps: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        while len(self.stamps) < self.steps:
            for batch in self.loader:
                self.stamps.append(time.process_time())
                yield batch
                if len(self.stamps) == self.steps:
                    break
        self.stamps.append(time.process_time())


def train(name: str) -> None:
    """The script: train, then print what it cost and a number that tells all weights."""
    torch.set_num_threads(1)
    work = Workload(name)
    model = work.model()
    work.batches = epochs = Epochs(DataLoader(work.batches[:EARLY], batch_size=None), STEPS[name])
    raw(work, model)()
    at = epochs.stamps
    later = (at[-1] - at[EARLY]) / (len(at) - 1 - EARLY) if len(at) > 2 * EARLY else None
    early = at[min(EARLY, len(at) - 1)] - at[1]
    weights = str([hash(p.detach().numpy().tobytes()) for p in model.parameters()])
    print(json.dumps({"first": at[1] - at[0], "early": early, "later": later, "weights": weights}))


def run(name: str, options: list[str]) -> dict[str, Any]:
    """One process."""
    command = [sys.executable, *options, __file__, "--train", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--train", metavar="WORKLOAD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train)
    print(
        "| workload | by hand, µs a step | first step, ms added | steps 2 to 64 | later steps |\n|---|---|---|---|---|"
    )
    for name in args.workloads:
        pairs = []
        for _ in range(args.rounds):
            pairs.append((run(name, []), run(name, ["-m", "safetrain", "doctor", "--quiet"])))
            if pairs[-1][0]["weights"] != pairs[-1][1]["weights"]:
                raise SystemExit(f"{name}: other weights under the doctor")
        added = statistics.median(doctor["first"] - hand["first"] for hand, doctor in pairs)
        steps = min(EARLY, STEPS[name]) - 1
        cost = statistics.median(hand["later"] or hand["early"] / steps for hand, _ in pairs)
        early, later = (
            f"{statistics.median(doctor[part] / hand[part] for hand, doctor in pairs):.2f}" if pairs[0][0][part] else ""
            for part in ("early", "later")
        )
        print(f"| `{name}` | {cost * 1e6:.0f} | {added * 1e3:+.0f} | {early} | {later} |", flush=True)


if __name__ == "__main__":
    main()
