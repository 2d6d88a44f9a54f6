"""Trainings that run out of memory for real: `python oom_trials.py 0 1 2 …`, one line of JSON for each number.

A number chooses the step, the phase, the room that is left and whether the run may split. The process limits its own
address space then, as `ulimit -v` would, and the allocator fails with its true error. Each trial is a forked child.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from safetrain import Callback, RunState, Trainer, checkpoint
from safetrain.rules.out_of_memory import is_out_of_memory

PHASES = ("forward", "backward", "optimizer", "evaluation", "saving")
STEPS, SAMPLES, WIDTH = 6, 1024, 512
MB = 1_000_000
_MMAP_THRESHOLD = -3  # of malloc.h


def limit(room: int | None) -> None:
    """Leave so many bytes of address space; None lifts the limit."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and kept would be room, too
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft = resource.RLIM_INFINITY if room is None else used + room
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


class Tightens(Callback):
    """Leaves little room from one phase of one step on."""

    def __init__(self, step: int, phase: str, room: int) -> None:
        self.step, self.phase, self.room, self.now = step, phase, room, 0
        self.history = [float(i) for i in range(200_000)]  # takes memory to write

    def tighten(self, phase: str) -> None:
        if phase == self.phase and self.now == self.step:
            self.phase = "done"
            limit(self.room)

    def on_step_start(self, state: RunState) -> None:
        self.now = state.step + 1

    def on_backward_start(self, state: RunState) -> None:
        self.tighten("backward")

    def on_backward_end(self, state: RunState) -> None:
        self.tighten("optimizer")

    def on_eval_start(self, state: RunState) -> None:
        self.tighten("evaluation")

    def on_step_end(self, state: RunState) -> None:
        state.save_request = "every step"

    def state_dict(self) -> dict[str, Any]:
        self.tighten("saving")  # asked for when a checkpoint is about to be written
        return {"history": self.history}


class SmallerFrom(Callback):
    """The reference: from a step on, micro-batches of a size that somebody else came down to."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes

    def on_step_start(self, state: RunState) -> None:
        state.micro_batch_size = self.sizes.get(state.step + 1, state.micro_batch_size)


class Splits(Callback):
    """The sizes that a run came down to, by step."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def on_split(self, state: RunState) -> None:
        assert state.micro_batch_size is not None
        self.sizes[state.current_step] = state.micro_batch_size


class Regression(Trainer):
    tightens: Tightens | None = None

    def training_step(self, batch: Tensor) -> Tensor:
        if self.tightens is not None and self.state.phase == "train":
            self.tightens.tighten("forward")
        return self.model(batch).square().mean()


def make(run_dir: Path, *callbacks: Callback, fused: bool, oom: str, guards: str = "default") -> Regression:
    torch.manual_seed(0)
    sizes = (64, WIDTH, WIDTH, WIDTH)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Dropout(0.1), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    return Regression(
        model, optimizer, max_steps=STEPS, eval_every=2, seed=3, callbacks=callbacks, run_dir=run_dir, oom=oom,  # type: ignore[arg-type]
        log_every=2,
        guards=guards,  # type: ignore[arg-type]
    )  # fmt: skip


def data(samples: int = SAMPLES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 64, generator=generator) for _ in range(3)]


def weights(trainer: Trainer) -> list[Tensor]:
    return [*trainer.model.state_dict().values(), *(t for s in _states(trainer) for t in s.values())]


def _states(trainer: Trainer) -> list[dict[str, Tensor]]:
    optimizer = trainer.state.optimizers["main"]
    return [optimizer.state[p] for p in trainer.model.parameters()]


def equal(mine: Trainer, theirs: Trainer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(mine), weights(theirs), strict=True))


def trial(number: int, folder: Path) -> dict[str, Any]:
    """What came of it."""
    draw = random.Random(number)
    phase = PHASES[number % len(PHASES)]
    step, fused, oom = draw.randint(1, STEPS), draw.random() < 0.5, draw.choice(["split", "split", "raise"])
    if phase == "evaluation":
        step += step % 2
    # The forward keeps 2 MB for each of 9 operations; later phases need less.
    most = {"forward": 20, "backward": 6, "optimizer": 3, "evaluation": 8, "saving": 6}[phase]
    room = int(draw.uniform(0.1, most) * MB)
    tightens, splits = Tightens(step, phase, room), Splits()
    trainer = make(folder / "run", tightens, splits, fused=fused, oom=oom)
    trainer.tightens = tightens
    told: dict[str, Any] = {"number": number, "phase": phase, "step": step, "room": room, "oom": oom}
    try:
        trainer.fit(data(), data(2 * SAMPLES))
    except Exception as error:
        limit(None)
        told |= {"ended": "stopped", "is_oom": is_out_of_memory(error), "error": str(error)[:300]}
        told["told"] = [f.message for f in trainer.report.findings if f.code == "M404" and f.severity == "error"]
        told["notes"] = getattr(error, "__notes__", [])
        trainer = None  # type: ignore[assignment]
    else:
        limit(None)
        told |= {"ended": "finished"}
    told["splits"] = dict(splits.sizes)
    saved = folder / "run" / "checkpoints"
    told["left"] = [path.name for path in saved.glob(".tmp-*")] if saved.is_dir() else []
    told["checkpoints"] = [checkpoint.read(path)["counters"]["step"] for path in checkpoint.checkpoints(saved)]
    last = max(told["checkpoints"], default=0)
    kept = splits.sizes if trainer is not None else {k: size for k, size in splits.sizes.items() if k <= last}
    reference = make(folder / "reference", SmallerFrom(kept), fused=fused, oom="raise", guards="off")
    reference.fit(data(), data(2 * SAMPLES))
    if trainer is None:  # what was saved before is whole: a run that resumes from it ends in the same bits
        trainer = make(folder / "run", Tightens(0, "", 0), fused=fused, oom="raise", guards="off")
        trainer.fit(data(), data(2 * SAMPLES), resume=folder / "run" if told["checkpoints"] else None)
    told["exact"] = equal(trainer, reference)
    return told


def main(numbers: list[int]) -> None:
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # what a tensor leaves is room again at once
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:  # what is imported late is imported once, and not under a limit
        make(Path(folder), fused=False, oom="raise").fit(data(), data())
    for number in numbers:
        pid = os.fork()
        if pid == 0:
            folder = Path(tempfile.mkdtemp())
            try:
                told = trial(number, folder)
            except BaseException:
                limit(None)
                told = {"number": number, "failed": traceback.format_exc()}
            print(json.dumps(told), flush=True)
            shutil.rmtree(folder)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(json.dumps({"number": number, "failed": f"ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
