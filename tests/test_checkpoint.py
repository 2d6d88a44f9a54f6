"""Checkpoints: whole or not there, refused when they do not fit, and then nothing is changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from safetrain import checkpoint
from safetrain.callbacks import EMA, Callback
from safetrain.checkpoint import files as checkpoint_files
from safetrain.checkpoint.plain import entries, pack, same, unpack
from safetrain.errors import CheckpointError
from safetrain.loop import Trainer


class Fit(Trainer):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()


DATA = list(torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0)))


def net(width: int = 5, **more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(first=nn.Linear(3, width), norm=nn.BatchNorm1d(width), last=nn.Linear(width, 1), **more)
    )


def trained(steps: int = 4, model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = model if model is not None else net()
    trainer = make(model, max_steps=steps, **settings)
    trainer.fit(DATA)
    return trainer


def make(
    model: nn.Module,
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.Adam(params, lr=0.01),
    schedule: Callable[[Any], Any] | None = lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    **settings: Any,
) -> Trainer:
    built = optimizer(model.parameters())
    return Fit(model, built, schedule(built) if schedule else None, guards="off", **{"max_steps": 4, **settings})


def snapshot(trainer: Trainer) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in entries(checkpoint.capture(trainer))
    }


def assert_unchanged(trainer: Trainer, before: dict[str, Any]) -> None:
    now = dict(entries(checkpoint.capture(trainer)))
    assert list(now) == list(before)
    assert [name for name in now if not same(now[name], before[name])] == []


# ---------------------------------------------------------------------- round trips


def test_everything_comes_back_and_a_folder_has_what_it_says(tmp_path: Path) -> None:
    trainer = trained(callbacks=[EMA(0.9)])
    path = trainer.save(tmp_path)
    assert path == tmp_path / "step_00000004"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.pt", "state.pt"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 4 and manifest["versions"]["torch"] == torch.__version__
    assert manifest["files"]["model.pt"]["bytes"] == (path / "model.pt").stat().st_size

    torch.manual_seed(77)
    other = make(net(), callbacks=[EMA(0.9)])
    other.load(path)
    other.fit(DATA)  # at its end already: takes up the average and does no step
    assert_unchanged(other, snapshot(trainer))


def test_the_model_file_is_a_plain_state_dict_for_anyone(tmp_path: Path) -> None:
    trainer = trained()
    weights = torch.load(trainer.save(tmp_path) / "model.pt", weights_only=True)
    fresh = net()
    fresh.load_state_dict(weights)
    assert torch.equal(fresh.first.weight, trainer.model.first.weight)


def test_a_compiled_wrapper_leaves_no_prefix_and_either_loads_the_other(tmp_path: Path) -> None:
    wrapped = torch.compile(net(), backend="eager")
    trainer = trained(model=wrapped)
    path = trainer.save(tmp_path)
    assert all("_orig_mod" not in name for name, _ in entries(checkpoint.read(path)))
    bare = make(net())
    bare.load(path)
    assert torch.equal(bare.model.first.weight, wrapped.first.weight)
    again = make(torch.compile(net(), backend="eager"))
    again.load(bare.save(tmp_path))
    assert torch.equal(again.model.first.weight, wrapped.first.weight)


def test_weights_alone_load_from_files_of_others(tmp_path: Path) -> None:
    source = trained().model
    foreign = {f"module._orig_mod.{name}": value for name, value in source.state_dict().items()}
    torch.save(foreign, tmp_path / "foreign.pt")
    target = net()
    checkpoint.load_weights(target, checkpoint.read_weights(tmp_path / "foreign.pt"))
    assert torch.equal(target.last.weight, source.last.weight)


def test_buffers_outside_the_state_dict_and_modes_come_back(tmp_path: Path) -> None:
    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("carried", torch.zeros(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.carried = self.carried + 1
            return self.inner(x)

    trainer = trained(model=Carrying())
    trainer.model.inner.norm.eval()
    trainer.model.inner.last.bias.requires_grad_(False)
    path = trainer.save(tmp_path)
    other = make(Carrying())
    other.load(path)
    assert other.model.carried.tolist() == [4, 4]
    assert not other.model.inner.norm.training and other.model.inner.last.training
    assert not other.model.inner.last.bias.requires_grad and other.model.inner.last.weight.requires_grad


def test_moments_kept_finer_than_the_weights_are_not_rounded(tmp_path: Path) -> None:
    class Fine(torch.optim.SGD):
        """Keeps float32 masters of bfloat16 weights."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("master", p.float())
                    master.sub_(p.grad.float(), alpha=group["lr"])
                    p.copy_(master)

    torch.manual_seed(0)
    trainer = make(nn.Linear(3, 2).bfloat16(), lambda params: Fine(params, lr=1e-3), None)
    trainer.fit([batch.bfloat16() for batch in DATA])
    path = trainer.save(tmp_path)
    other = make(nn.Linear(3, 2).bfloat16(), lambda params: Fine(params, lr=1e-3), None)
    other.load(path)
    mine, theirs = trainer.state.optimizers["main"].state, other.state.optimizers["main"].state
    for p, q in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert theirs[q]["master"].dtype == torch.float32
        assert torch.equal(mine[p]["master"], theirs[q]["master"])


def test_lbfgs_history_comes_back(tmp_path: Path) -> None:
    def lbfgs(params: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=3)

    whole = make(net(), lbfgs, None, max_steps=8)
    whole.fit(DATA)
    part = make(net(), lbfgs, None, max_steps=5)
    part.fit(DATA)
    resumed = make(net(), lbfgs, None, max_steps=8)
    resumed.fit(DATA, resume=part.save(tmp_path))
    assert_unchanged(resumed, snapshot(whole))


def test_plain_containers_and_arrays_survive_and_nothing_else_is_written(tmp_path: Path) -> None:
    value = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "number": np.float64(0.1),
        "generator": np.random.default_rng(3).bit_generator.state,
        "tuple": (1, None, "x", b"y", 2.5, True, {1, 2}),
        "counter": Counter("aab"),
        3: [torch.ones(2, dtype=torch.bfloat16)],
    }
    torch.save(pack(value, "x"), tmp_path / "x.pt")
    back = unpack(torch.load(tmp_path / "x.pt", weights_only=True))
    assert back["array"].dtype == np.int16 and (back["array"] == value["array"]).all() and back["empty"].shape == (0, 2)
    assert back["tuple"] == value["tuple"] and back["counter"] == value["counter"] and back["number"] == 0.1
    restored = np.random.default_rng()
    restored.bit_generator.state = back["generator"]
    assert restored.random() == np.random.default_rng(3).random()


# ---------------------------------------------------------------------- writing


class Holding(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"held": [self.value]}


@pytest.mark.parametrize(
    "value", [deque([1]), Path("x"), lambda: 1, nn.Linear(1, 1), np.array([None])], ids=lambda v: type(v).__name__
)
def test_what_could_not_be_loaded_safely_is_refused_before_writing(value: Any, tmp_path: Path) -> None:
    trainer = trained(callbacks=[Holding(1), Holding(value)])
    with pytest.raises(CheckpointError, match=r"`callbacks\.Holding\.1\.held\.0` is a .*cannot be loaded again safely"):
        trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


_CRASHING_WRITER = """
    import os, sys
    import torch
    from safetrain.checkpoint import files as checkpoint_files
    moment, directory = sys.argv[1:]
    payload = {"model": {"w": torch.ones(1000)}, "counters": {"step": 2}, "versions": {}}
    torch.save_original = torch.save
    def dying_save(content, file):
        torch.save_original(content, file)
        file.truncate(700)
        os._exit(1)
    def die(*args, **options):
        os._exit(1)
    if moment == "in the first file":
        torch.save = dying_save
    elif moment == "before the manifest":
        checkpoint_files.json.dump = die
    elif moment == "before the rename":
        os.rename = die
    checkpoint_files.write(payload, directory)
"""


@pytest.mark.parametrize("moment", ["in the first file", "before the manifest", "before the rename"])
def test_a_crash_while_writing_leaves_the_checkpoint_before_it(moment: str, tmp_path: Path) -> None:
    trainer = trained(steps=1)
    trainer.save(tmp_path)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_CRASHING_WRITER), moment, str(tmp_path)], check=False)
    assert done.returncode == 1
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step_00000001"]
    assert checkpoint.read(tmp_path)["counters"]["step"] == 1
    assert len(list(tmp_path.iterdir())) == 2, "the dead writer's folder is still there"
    trained(steps=3).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000003"]


def test_a_full_disk_is_said_and_leaves_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(steps=1)
    trainer.save(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    trainer.state.step = 2
    with pytest.raises(CheckpointError, match=r"could not write checkpoint .*step_00000002: .*No space left"):
        trainer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not write checkpoint"):
        trained().save(tmp_path / "file" / "runs")


def test_saving_a_step_again_replaces_it_and_a_crash_in_between_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained()
    trainer.save(tmp_path)
    trainer.state.eval_metrics = {"loss": 0.5}
    path = trainer.save(tmp_path)
    assert checkpoint.read(path)["counters"]["eval_metrics"] == {"loss": 0.5}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]

    rename, calls = os.rename, []

    def second_fails(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("power cut")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="power cut"):
        trainer.save(tmp_path)
    assert checkpoint.latest(tmp_path).name == "step_00000004.old"
    assert checkpoint.read(tmp_path)["counters"]["eval_metrics"] == {"loss": 0.5}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    trainer = trained()
    for step in (1, 2, 3, 4, 10, 100_000_000):
        trainer.state.step = step
        trainer.save(tmp_path)
    deleted = checkpoint.prune(tmp_path, keep_last=2, keep=tmp_path / "step_00000002")
    assert [path.name for path in deleted] == ["step_00000001", "step_00000003", "step_00000004"]
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step_00000002",
        "step_00000010",
        "step_100000000",
    ]
    assert len(list(tmp_path.iterdir())) == 3


# ---------------------------------------------------------------------- reading what is damaged


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit of the weights": (lambda p: _flip(p / "model.pt"), "model.pt was changed after it was written"),
    "one bit of the state": (lambda p: _flip(p / "state.pt"), "state.pt was changed after it was written"),
    "cut off": (lambda p: os.truncate(p / "state.pt", 100), "state.pt has 100 bytes instead of"),
    "file missing": (lambda p: (p / "model.pt").unlink(), "model.pt is missing"),
    "manifest missing": (
        lambda p: (p / "manifest.json").unlink(),
        "has no manifest.json, so it is no complete checkpoint",
    ),
    "manifest unreadable": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text("{}"), "manifest.json cannot be read"),
    "manifest lists nothing": (lambda p: _edit_manifest(p / "manifest.json", files={}), "does not list model.pt"),
    "another step": (lambda p: _edit_manifest(p / "manifest.json", step=9), "manifest says step 9, the state 4"),
    "newer format": (lambda p: _edit_manifest(p / "manifest.json", format=99), "written by a newer safetrain"),
    "gone": (lambda p: shutil.rmtree(p), "there is no such folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(damage: str, tmp_path: Path) -> None:
    act, says = DAMAGE[damage]
    trainer = trained()
    path = trainer.save(tmp_path)
    act(path)
    target = trained(steps=2)
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=says) as caught:
        target.load(path)
    assert str(path) in str(caught.value)
    assert_unchanged(target, before)


def test_the_error_names_another_checkpoint_to_resume_from(tmp_path: Path) -> None:
    trained(steps=2).save(tmp_path)
    path = trained(steps=4).save(tmp_path)
    _flip(path / "model.pt")
    with pytest.raises(CheckpointError, match=r"resume from .*step_00000002 instead"):
        checkpoint.read(tmp_path)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    path = trained().save(tmp_path / "run")
    torch.save({"w": Evil()}, path / "model.pt")
    facts = {"sha256": checkpoint_files._digest(path / "model.pt"), "bytes": (path / "model.pt").stat().st_size}
    manifest = json.loads((path / "manifest.json").read_text())
    _edit_manifest(path / "manifest.json", files={**manifest["files"], "model.pt": facts})
    with pytest.raises(CheckpointError, match="cannot be loaded as weights only"):
        checkpoint.read(path)
    assert not (tmp_path / "owned").exists()


def test_an_empty_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no step_"):
        checkpoint.read(tmp_path)


# ---------------------------------------------------------------------- reading what belongs to another run


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def two_groups(params: Any) -> torch.optim.Optimizer:
    listed = list(params)
    return torch.optim.Adam([{"params": listed[:2]}, {"params": listed[2:]}], lr=0.01)


def backwards(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(params)[::-1], lr=0.01)


class Refusing(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"version": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["version"] != 2:
            raise KeyError("shadow")


STRANGERS: dict[str, tuple[Callable[[], Trainer], str]] = {
    "lacks an entry": (
        lambda: make(net(extra=nn.Linear(1, 1))),
        r"lacks `extra\.weight` \(float32 \[1, 1\]\) of this Sequential",
    ),
    "has one more": (
        lambda: make(nn.Sequential(OrderedDict(first=nn.Linear(3, 5)))),
        r"has `norm\.weight` \(float32 \[5\]\)",
    ),
    "another shape": (
        lambda: make(net(7)),
        r"holds `first\.weight` as float32 \[5, 3\], but this Sequential has float32 \[7, 3\]",
    ),
    "another dtype": (lambda: make(net().double()), r"`first\.weight` as float32 .* float64"),
    "another optimizer": (lambda: make(net(), sgd), "optimizer `main` is Adam in the checkpoint and SGD in this run"),
    "other groups": (lambda: make(net(), two_groups), "has 1 parameter groups in the checkpoint and 2 here"),
    "another order": (
        lambda: make(net(), backwards),
        r"the checkpoint has `first\.weight` where this run has `last\.bias`",
    ),
    "fewer parameters": (
        lambda: make(net(), lambda params: torch.optim.Adam(list(params)[:3], lr=0.1)),
        "holds 6 parameters in the checkpoint and 3 here",
    ),
    "no schedule": (lambda: make(net(), schedule=None), "scheduler `main` is StepLR in the checkpoint and not there"),
    "a scaler": (lambda: make(net(), precision="fp16"), "made without loss scaling and this run has a scaler"),
    "a callback that refuses": (
        lambda: make(net(), callbacks=[Refusing()]),
        r"`callbacks\.Refusing\.0` .* KeyError: 'shadow'",
    ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(stranger: str, tmp_path: Path) -> None:
    build, says = STRANGERS[stranger]
    path = trained(callbacks=[Refusing()] if "callback" in stranger else []).save(tmp_path)
    target = build()
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=says):
        target.load(path)
    assert_unchanged(target, before)


def test_data_of_another_length_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = trained(steps=4).save(tmp_path)
    target = make(net(), max_steps=9)
    weight = target.model.first.weight.detach().clone()
    with pytest.raises(CheckpointError, match="batch 4 of 6, but this loader has 5 batches"):
        target.fit(DATA[:5], resume=path)
    assert torch.equal(target.model.first.weight, weight) and target.state.step == 0


def test_a_callback_that_is_gone_is_warned_about(tmp_path: Path) -> None:
    path = trained(callbacks=[EMA(0.9)]).save(tmp_path)
    with pytest.warns(UserWarning, match=r"holds the state of callback EMA\.0, which this run does not have"):
        make(net()).load(path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = checkpoint.read_weights(trained().save(tmp_path))
    target = net(7)
    with pytest.raises(CheckpointError, match=r"`first\.weight`"):
        checkpoint.load_weights(target, weights)
