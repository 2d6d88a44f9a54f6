"""The bare Trainer, no callbacks and guards off, for the peers' harness (see benchmarks/README.md)."""

from __future__ import annotations

from . import only


def load():
    global safetrain, Bare
    import safetrain
    import safetrain.loop

    class Bare(safetrain.Trainer):
        loss_fn = None

        def training_step(self, batch):
            x, y = batch
            return self.loss_fn(self.model(x), y)


def make(w, **options):
    optimizer = w.optimizer()
    trainer = Bare(
        w.model, optimizer, w.scheduler(optimizer),
        accumulate=w.accum, clip_norm=w.clip, max_epochs=w.epochs, log_every=10**9,
        **{"guards": "off", **options},
    )  # fmt: skip
    trainer.loss_fn = w.loss_fn
    return trainer


def train(w, variant=None):
    only(w)
    make(w).fit(w.loader())


def evaluate(w, variant=None):
    options = {"eval_context": variant} if variant else {}
    return make(w, **options).evaluate(w.loader())["loss"]
