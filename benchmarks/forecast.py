"""The forecast of a step's peak memory against the measured peak, for twelve models. Each runs in processes of its own.

    python benchmarks/forecast.py            # all of them, some minutes
    python benchmarks/forecast.py mlp gpt    # some of them
    python benchmarks/forecast.py --billion  # how long a GPT of 1.5 billion parameters takes, and how much memory

Measured is the C heap (`mallinfo2`), read after every operation of the second and third step, less what it was before
the model was made. Before that the same training runs once and is thrown away, so that what torch, MKL and oneDNN keep
for themselves is there already ("kept"). What a kernel takes and gives back within one operation is not in that number;
it is in the high-water mark of resident memory, which is shown beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from safetrain import Trainer
from safetrain.callbacks.base import Callback, Listeners
from safetrain.memory import HeapMeter
from safetrain.planner import forecast
from safetrain.planner.faking import faking, make_mode
from safetrain.state import RunState

# ---- models ----------------------------------------------------------------------------------------------------------


class Classifier(Trainer):
    def training_step(self, batch: Any) -> Tensor:
        *inputs, labels = batch
        logits = self.model(*inputs)
        return F.cross_entropy(logits.flatten(0, -2) if labels.ndim == 2 else logits, labels.flatten(0, 1)
                               if labels.ndim == 2 else labels)  # fmt: skip


def conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv(inputs, outputs, stride), nn.ReLU(), *conv(outputs, outputs))
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Sequential(*conv(3, width), nn.SiLU()), nn.Sequential(*conv(width, 2 * width), nn.SiLU())]
        )
        self.middle = nn.Sequential(*conv(2 * width, 4 * width), nn.SiLU())
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.join = nn.ModuleList(
            [nn.Sequential(*conv(4 * width, 2 * width), nn.SiLU()), nn.Sequential(*conv(2 * width, width), nn.SiLU())]
        )
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], dim=1))
        return self.head(x).flatten(2).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(2 * width, words)
        self.gru = nn.GRU(width, 2 * width, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.words(x))[0])


class Experts(nn.Module):
    """Each expert takes the tokens that suit it best: of n tokens and e experts, 2n / e."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance, chosen = self.router(tokens).softmax(-1).topk(2 * len(tokens) // len(self.experts), dim=0)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            out = out.index_add(0, chosen[:, index], expert(tokens[chosen[:, index]]) * chance[:, index, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = (
            Experts(width, experts)
            if experts
            else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.mix(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.feed(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, words: int, width: int, depth: int, heads: int, experts: int = 0) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words)
        self.blocks = nn.Sequential(*[Block(width, heads, experts) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(x))))


class EncoderDecoder(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.core = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.core(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True))


def mlp() -> nn.Module:
    sizes = (512, 3072, 3072, 3072)
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def cnn() -> nn.Module:
    body = [nn.Sequential(*conv(3 if i == 0 else 32, 32), nn.ReLU()) for i in range(4)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def resnet() -> nn.Module:
    body = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    return nn.Sequential(*conv(3, 16), nn.ReLU(), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def images(count: int, size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(count, 3, size, size), torch.randint(10, (count,)))


def pixels() -> tuple[Tensor, ...]:
    return torch.randn(8, 3, 96, 96), torch.randint(10, (8, 9216))


def rows(count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(count, 512), torch.randint(10, (count,)))


def text(*shape: int, words: int, parts: int = 2) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randint(words, shape) for _ in range(parts))


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    what: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    optimizer: Callable[..., Any] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"fused": True})
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[Trainer, list[Any]]:
        """The Trainer and one window."""
        model = self.model()
        optimizer = self.optimizer(model.parameters(), lr=1e-3, **self.options)
        trainer = Classifier(model, optimizer, max_steps=3, guards="off", **self.settings)
        return trainer, [self.batch() for _ in range(trainer.accumulate)]


def gpt() -> nn.Module:
    return GPT(4096, 384, 6, 6)


def moe() -> nn.Module:
    return GPT(2048, 256, 4, 4, experts=8)


def gru() -> nn.Module:
    return Recurrent(4096, 192)


def seq2seq() -> nn.Module:
    return EncoderDecoder(4096, 256)


def unet() -> nn.Module:
    return UNet(24)


SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "options": {"momentum": 0.9, "foreach": True}}
TEXT = text(8, 256, words=4096)
PICTURES = images(32, 64)
FOREACH: dict[str, Any] = {"options": {"foreach": True}}
CLIPPED = {"clip_norm": 1.0}
CASES = {
    "mlp": Case("MLP, fused AdamW", mlp, rows(2048)),
    "cnn": Case("CNN with BatchNorm, SGD", cnn, PICTURES, **SGD),
    "resnet": Case("residual net, foreach AdamW", resnet, images(32, 96), **FOREACH),
    "gru": Case("GRU, AdamW one by one", gru, text(32, 64, words=4096), options={"foreach": False}),
    "gpt": Case("GPT, fused AdamW", gpt, TEXT),
    "gpt-checkpointed": Case("GPT, blocks recomputed", gpt, TEXT, settings={"activation_checkpoint": "blocks.*"}),
    "gpt-bf16": Case("GPT, bf16, foreach AdamW", gpt, TEXT, **FOREACH, settings={"precision": "bf16", **CLIPPED}),
    "gpt-accumulate": Case("GPT, 4 batches, SGD", gpt, text(2, 256, words=4096), settings={"accumulate": 4}, **SGD),
    "encoder-decoder": Case("encoder–decoder, fused AdamW", seq2seq, text(8, 192, words=4096, parts=3)),
    "unet": Case("U-Net, SGD", unet, pixels, **SGD),
    "moe": Case("mixture of experts, fused AdamW", moe, text(8, 192, words=2048)),
    "mlp-fp16": Case("MLP, fp16, foreach AdamW", mlp, rows(192), **FOREACH, settings={"precision": "fp16", **CLIPPED}),
}


# ---- in a process of its own -----------------------------------------------------------------------------------------


class HeapPeak(TorchDispatchMode):
    """The highest reading of the heap after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.peak = HeapMeter(slow_ns=10**9), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.meter.read())
        return result


class Watch(Callback):
    """Begins with the second step, ends with the third."""

    def __init__(self, mode: HeapPeak) -> None:
        self.mode = mode

    def on_step_start(self, state: RunState) -> None:
        if state.step == 1:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # the high-water mark begins anew
            self.mode.__enter__()

    def on_step_end(self, state: RunState) -> None:
        if state.step == 3:
            self.mode.__exit__(None, None, None)


def measure(case: Case) -> dict[str, float]:
    """Bytes: the peaks of the heap and of resident memory above the baseline, and what libraries had kept by then."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # big blocks go back to the system at once, so that resident memory follows them
    tiny = dataclasses.replace(
        case, model=lambda: nn.Linear(4, 4), batch=lambda: (torch.randn(4, 4), torch.ones(4).long())
    )
    train(dataclasses.replace(tiny, settings={}), HeapPeak())  # imports, Python's own caches
    gc.collect()
    mode = HeapPeak()
    before = mode.meter.read()
    train(case, HeapPeak())
    gc.collect()
    libc.malloc_trim(0)
    heap, resident = mode.meter.read(), status("VmRSS")
    train(case, mode)
    return {"heap": mode.peak - heap, "resident": status("VmHWM") - resident, "kept": heap - before}


def train(case: Case, mode: HeapPeak) -> None:
    trainer, window = case.build()
    trainer.listeners = Listeners([Watch(mode)])
    trainer.fit(window * 3)


def status(field: str) -> int:
    """A size in `/proc/self/status`, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def predict(case: Case) -> dict[str, float]:
    start, mode = time.perf_counter(), make_mode()
    with faking(mode):
        trainer, window = case.build()
    found = forecast(trainer, window, mode)
    return {
        "forecast": found.peak_bytes,
        "seconds": time.perf_counter() - start,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **{phase: peak for phase, (peak, _) in found.peaks.items()},
    }


# ---- the table -------------------------------------------------------------------------------------------------------

BILLION = Case("GPT of 1.5 billion, fused AdamW", lambda: GPT(50257, 1600, 48, 25), text(4, 1024, words=50257))


def child(task: str, name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", task, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{task} of {name} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(names: list[str]) -> list[dict[str, Any]]:
    """A row a model: forecast and measured bytes, and the error as a share of what was measured."""
    print("| model | forecast MB | heap MB | error | resident MB | kept MB | forecast took s |\n" + "|---" * 7 + "|")
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name, **child("predict", name), **child("measure", name)}
        row["error"] = row["forecast"] / row["heap"] - 1
        rows.append(row)
        forecast_mb, heap, resident, kept = (
            f"{row[key] / 1e6:.1f}" for key in ("forecast", "heap", "resident", "kept")
        )
        told = f"| {forecast_mb} | {heap} | {row['error']:+.1%} | {resident} | {kept} | {row['seconds']:.1f} |"
        print(f"| {CASES[name].what} {told}", flush=True)
    errors = [abs(row["error"]) for row in rows]
    print(f"\nerror: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--billion", action="store_true", help="forecast a GPT of 1.5 billion parameters")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        task, name = args.child
        torch.manual_seed(0)
        print(json.dumps((predict if task == "predict" else measure)(CASES.get(name, BILLION))))
        sys.stdout.flush()
        os._exit(0)  # no time for giving memory back
    if args.billion:
        row = child("predict", "billion")
        took = f"forecast in {row['seconds']:.1f} s and {row['rss'] / 1e9:.2f} GB"
        print(f"{BILLION.what}: {row['forecast'] / 1e9:.1f} GB, {took}")
        return
    rows = compare(args.names or list(CASES))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
