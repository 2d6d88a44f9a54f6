"""What TensorBoard reads back from the event files."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from small_training import SmallTrainer, make_data, make_model, make_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from safetrain.callbacks import Callback, LrMonitor, MemoryMonitor, Saving, TensorBoard, Throughput
from safetrain.callbacks.memory import OWNERS as memory_owners
from safetrain.errors import ConfigError


def read(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in events.Scalars(tag)}


def text(events: EventAccumulator, tag: str) -> str:
    return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_every_value_of_every_row_is_there(tmp_path):
    callbacks = [LrMonitor(), MemoryMonitor(), Throughput(), TensorBoard()]
    make_trainer(*callbacks, max_epochs=2, log_every=2, run_dir=tmp_path).fit(make_data(), make_data())
    events = read(tmp_path)
    tags = set(events.Tags()["scalars"])
    assert {
        "train/loss", "train/accuracy", "train/grad_norm", "train/lr", "lr/main", "val/loss", "val/accuracy",
        "memory/start_mb", "memory/after_forward_mb", "memory/after_backward_mb", "memory/after_step_mb",
        "memory/evaluation_mb", "memory/peak_mb", "throughput/samples_per_s", "throughput/tflops_per_s",
    } <= tags  # fmt: skip
    assert list(scalars(events, "train/loss")) == [1, 2, 4, 6, 8]
    assert list(scalars(events, "val/loss")) == [4, 8]


def test_norms_by_layer_are_those_of_the_gradients_and_add_up_to_the_total(tmp_path):
    by_hand = {}

    class Norms(Callback):
        def on_backward_end(self, state):
            model = state.model
            by_hand[state.current_step] = {
                name: float(torch.cat([p.grad.flatten() for p in model[int(name)].parameters()]).norm())
                for name in ("0", "1", "4")
            }

    make_trainer(Norms(), TensorBoard(), max_steps=4, log_every=2, run_dir=tmp_path).fit(make_data())
    events = read(tmp_path)
    total = scalars(events, "train/grad_norm")
    layers = {name: scalars(events, f"grad_norm/{name}") for name in ("0", "1", "4")}
    for step in (1, 2, 4):
        for name in layers:
            assert layers[name][step] == pytest.approx(by_hand[step][name], rel=1e-5)
        assert sum(layers[name][step] ** 2 for name in layers) ** 0.5 == pytest.approx(total[step], rel=1e-5)
    assert 3 not in layers["0"]


def test_update_ratios_say_how_far_each_layer_moved(tmp_path):
    """Layers of fewer than 4,096 entries are measured whole; a bigger one by a sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 900), nn.ReLU(), nn.Linear(900, 3))
    before, ratios = {}, {}

    class ByHand(Callback):
        def on_backward_end(self, state):
            before.update({name: p.detach().clone() for name, p in model.named_parameters()})

        def on_step_end(self, state):
            moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
            for layer in ("0", "2"):
                norms = [
                    torch.cat([v[f"{layer}.{kind}"].flatten() for kind in ("weight", "bias")]).norm()
                    for v in (moved, before)
                ]
                ratios[layer, state.step] = float(norms[0] / norms[1])

    make_trainer(ByHand(), TensorBoard(), model=model, max_steps=5, log_every=2, run_dir=tmp_path).fit(make_data())
    events = read(tmp_path)
    for step in (1, 2, 4):
        assert scalars(events, "update_ratio/2")[step] == pytest.approx(ratios["2", step], rel=1e-4)
        assert scalars(events, "update_ratio/0")[step] == pytest.approx(ratios["0", step], rel=0.2)
    assert set(scalars(events, "update_ratio/0")) == {1, 2, 4}


def test_dead_and_exploding_layers_are_counted(tmp_path):
    class Sick(SmallTrainer):
        def training_step(self, batch):
            x, y = batch
            hidden = self.model[0](x).relu() * 0  # no gradient goes through zero
            scale = 1e4 if self.state.current_step == 10 else 1.0
            return nn.functional.cross_entropy(self.model[1](hidden + x), y) * scale

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 3))  # the last is never called
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = Sick(
        model, optimizer, callbacks=[TensorBoard()], guards="off", max_steps=12, log_every=1, run_dir=tmp_path
    )
    trainer.fit(make_data())
    events = read(tmp_path)
    assert set(scalars(events, "gradients/dead_layers").values()) == {2.0}
    assert [step for step, count in scalars(events, "gradients/exploding_layers").items() if count] == [10]


def test_owners_are_stacked_each_on_those_before(tmp_path):
    rows = []

    class Last(Callback):
        def on_log(self, state):
            rows.append(dict(state.row))

    make_trainer(MemoryMonitor(), TensorBoard(), Last(), max_steps=3, log_every=1, run_dir=tmp_path).fit(make_data())
    events = read(tmp_path)
    tags = sorted(tag for tag in events.Tags()["scalars"] if tag.startswith("memory_stacked/"))
    assert [tag.split("_plus_")[-1] for tag in tags[1:]] == [
        "buffers_mb", "optimizer_state_mb", "gradients_mb", "activations_mb",
    ]  # fmt: skip
    owned = [rows[-1][f"memory/by_owner/{owner}_mb"] for owner in memory_owners]
    for number, tag in enumerate(tags, 1):
        assert scalars(events, tag)[3] == pytest.approx(sum(owned[:number]), rel=1e-5)


def test_sparse_and_half_precision_gradients_have_norms_too(tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True), "head": nn.Linear(4, 2).to(torch.bfloat16)})

    class Words(SmallTrainer):
        def training_step(self, batch):
            return self.model["head"](self.model["words"](batch).to(torch.bfloat16)).square().mean()

    optimizer = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    sparse = torch.optim.SparseAdam(model["words"].parameters(), lr=0.1)
    tensorboard = TensorBoard()
    trainer = Words(
        model, {"head": optimizer, "words": sparse}, callbacks=[tensorboard], guards="off", max_steps=1,
        run_dir=tmp_path, check_finite=False,
    )  # fmt: skip
    state = trainer.state
    tensorboard.on_fit_start(state)
    state.is_logging_step = True
    trainer.training_step(torch.tensor([1, 1, 3])).backward()
    tensorboard.on_backward_end(state)
    state.step = 1
    tensorboard.on_log(state)
    tensorboard.on_fit_end(state)
    events = read(tmp_path)
    dense = model["words"].weight.grad.to_dense().norm()
    assert scalars(events, "grad_norm/words")[1] == pytest.approx(float(dense), rel=1e-5)
    assert scalars(events, "grad_norm/head")[1] > 0


def test_with_several_optimizers_each_layer_has_the_norm_of_its_own_turn(tmp_path):
    """The generator's backward leaves gradients in the discriminator as well; they are not what it was stepped with."""
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})

    class Gan(SmallTrainer):
        def train_step(self, window):
            x = window[0][0][:, :4]
            self.zero_grad()
            self.backward(-self.model["d"](self.model["g"](x)).mean())
            self.optimizer_step("g")
            self.used_g = model["g"].weight.grad.norm().item(), model["g"].bias.grad.norm().item()
            self.zero_grad("d")
            self.backward(self.model["d"](self.model["g"](x).detach()).square().mean())
            self.optimizer_step("d")
            self.used_d = model["d"].weight.grad.norm().item(), model["d"].bias.grad.norm().item()

    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("g", "d")}
    trainer = Gan(model, optimizers, callbacks=[TensorBoard()], guards="off", max_steps=1, run_dir=tmp_path)
    trainer.fit(make_data())
    events = read(tmp_path)
    for name, (weight, bias) in (("g", trainer.used_g), ("d", trainer.used_d)):
        assert scalars(events, f"grad_norm/{name}")[1] == pytest.approx((weight**2 + bias**2) ** 0.5, rel=1e-5)


def test_config_findings_and_layout_can_be_read(tmp_path):
    (tmp_path / "config.yaml").write_text("optim:\n  lr: 0.01\n")
    finding = tmp_path / "findings.jsonl"

    class Found(Callback):
        def on_step_end(self, state):
            if state.step == 2:
                finding.write_text(
                    '{"code": "G101", "severity": "error", "first_step": 2, "last_step": 2, "count": 1, '
                    '"message": "a graph | is retained"}\n'
                )

    make_trainer(Found(), TensorBoard(), max_steps=3, log_every=1, run_dir=tmp_path).fit(make_data())
    events = read(tmp_path)
    assert "    optim:\n      lr: 0.01" in text(events, "config")
    assert "| G101 | error | 2–2 | 1 | a graph \\| is retained |" in text(events, "findings")
    assert "custom_scalars__config__" in events.Tags()["tensors"]


def test_a_resumed_run_hides_what_was_written_beyond_its_step(tmp_path):
    trainer = make_trainer(Saving(every_steps=3), TensorBoard(), max_steps=8, log_every=1, run_dir=tmp_path)

    def crash(step: int) -> None:
        if step == 6:
            raise RuntimeError("boom")

    trainer.on_step = crash
    with pytest.raises(RuntimeError):
        trainer.fit(make_data())
    assert list(scalars(read(tmp_path), "train/loss")) == [1, 2, 3, 4, 5]
    again = make_trainer(Saving(every_steps=3), TensorBoard(), max_steps=7, log_every=1, run_dir=tmp_path)
    again.fit(make_data(), resume=tmp_path / "checkpoints" / "step_00000003")
    events = read(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_what_led_to_a_crash_is_on_disk(tmp_path):
    trainer = make_trainer(TensorBoard(), max_steps=9, log_every=1, run_dir=tmp_path)

    def crash(step: int) -> None:
        if step == 4:
            # The process may die right after this hook; read before fit end closes the file.
            trainer.listeners.on_exception(trainer.state)
            steps.extend(scalars(read(tmp_path), "train/loss"))
            raise RuntimeError("boom")

    steps: list[int] = []
    trainer.on_step = crash
    with pytest.raises(RuntimeError):
        trainer.fit(make_data())
    assert steps == [1, 2, 3]


def test_it_keeps_no_gradient_alive(tmp_path):
    model = make_model()
    tensorboard = TensorBoard()
    trainer = make_trainer(tensorboard, model=model, max_steps=1, run_dir=tmp_path)
    trainer.state.is_logging_step = True
    tensorboard.on_fit_start(trainer.state)
    model(torch.randn(4, 8)).sum().backward()
    tensorboard.on_backward_end(trainer.state)
    held = [v for _, vectors in tensorboard._layers._norms.values() for v in vectors]
    assert sum(v.untyped_storage().nbytes() for v in held) == 4 * len(list(model.parameters()))
    tensorboard.on_step_end(trainer.state)
    assert not tensorboard._layers._before
    tensorboard.on_fit_end(trainer.state)


def test_without_a_run_directory_it_says_what_to_give():
    with pytest.raises(ConfigError, match=r"TensorBoard has nowhere to write.*run_dir"):
        make_trainer(TensorBoard(), max_steps=1).fit(make_data())


def test_importing_callbacks_imports_neither_torch_nor_tensorboard():
    code = (
        "import sys, safetrain.callbacks as c; assert 'torch' not in sys.modules; c.TensorBoard; "
        "assert 'tensorboard' not in sys.modules, 'only a run that uses it should pay for it'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
