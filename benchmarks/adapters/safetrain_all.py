"""Default guards and every callback that a run from a config has, writing to a run directory."""

from __future__ import annotations

from . import only
from . import safetrain as bare


def load():
    global callbacks
    bare.load()
    from safetrain import callbacks


def train(w, variant=None):
    only(w)
    listeners = [
        callbacks.Throughput(),
        callbacks.LrMonitor(),
        callbacks.MemoryMonitor(),
        callbacks.JsonlMetrics(),
        callbacks.TensorBoard(),
        callbacks.Progress(),
    ]
    bare.make(w, guards="default", callbacks=listeners, run_dir=w.out_dir, log_every=50).fit(w.loader())


def evaluate(w, variant=None):
    return bare.make(w, guards="default").evaluate(w.loader())["loss"]
