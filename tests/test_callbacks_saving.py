"""Checkpoints come when asked for, old ones go, and a signal saves the run without losing anybody's handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from small_training import make_data, make_model, make_trainer

from safetrain.callbacks import Callback, EarlyStopping, Saving
from safetrain.errors import ConfigError


class Saves(Callback):
    """Notes each save."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint_saved(self, state):
        self.steps.append(state.step)


def kept(run_dir: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in (run_dir / "checkpoints").glob("step_*"))


def test_every_few_steps_and_the_end_are_saved_and_the_newest_kept(tmp_path):
    saves = Saves()
    saving = Saving(every_steps=3, every_epoch=False, keep_last=2)
    make_trainer(saving, saves, max_steps=10, run_dir=tmp_path).fit(make_data())
    assert saves.steps == [3, 6, 9, 10]
    assert kept(tmp_path) == [9, 10]


def test_every_epoch_is_saved_after_its_evaluation_and_the_end_not_twice(tmp_path):
    saves = Saves()
    make_trainer(Saving(keep_last=9), saves, max_epochs=3, run_dir=tmp_path).fit(make_data(), make_data())
    assert saves.steps == [4, 8, 12]
    saves.steps.clear()
    make_trainer(Saving(keep_last=9), saves, max_epochs=2, run_dir=tmp_path / "without_validation").fit(make_data())
    assert saves.steps == [4, 8]


def test_nothing_is_saved_when_nothing_is_asked_for(tmp_path):
    saves = Saves()
    make_trainer(Saving(every_epoch=False, at_end=False), saves, max_epochs=2, run_dir=tmp_path).fit(make_data())
    assert saves.steps == []


@pytest.mark.parametrize(("monitor", "mode"), [("score", "max"), ("val/score", "max"), ("score", "min")])
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path, monitor, mode):
    scores = iter([0.5, 0.9, 0.7, 0.1, 0.6] if mode == "max" else [0.5, 0.1, 0.3, float("nan"), 0.4])
    saving = Saving(keep_last=1, monitor=monitor, mode=mode)
    trainer = make_trainer(saving, max_epochs=5, run_dir=tmp_path)
    trainer.evaluation_step = lambda batch: {"score": torch.tensor(value)}

    class Score(Callback):
        def on_eval_start(self, state):
            nonlocal value
            value = next(scores)

    value = 0.0
    trainer.listeners = type(trainer.listeners)([Score(), saving])
    trainer.fit(make_data(), make_data())
    assert kept(tmp_path) == [8, 20]


def test_a_resumed_run_knows_the_best_of_the_one_before(tmp_path):
    first = Saving(monitor="loss")
    make_trainer(first, max_epochs=2, run_dir=tmp_path).fit(make_data(), make_data())
    second = Saving(monitor="loss")
    trainer = make_trainer(second, max_epochs=3, run_dir=tmp_path)
    trainer.evaluation_step = lambda batch: {"loss": torch.tensor(1e9)}  # worse from here on
    trainer.fit(make_data(), make_data(), resume=tmp_path)
    assert second.state_dict() == first.state_dict()


def test_a_best_value_from_an_evaluation_that_does_not_name_it_is_one_clear_error(tmp_path):
    trainer = make_trainer(Saving(monitor="acuracy", mode="max"), max_epochs=1, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"'acuracy'.*accuracy, loss.*did you mean 'accuracy'"):
        trainer.fit(make_data(), make_data())


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="keep_last=0"):
        Saving(keep_last=0)
    with pytest.raises(ConfigError, match="every_steps=0"):
        Saving(every_steps=0)
    with pytest.raises(ConfigError, match=r'"fid".*mode="min" or mode="max"|\'fid\'.*mode="min" or mode="max"'):
        Saving(monitor="fid")
    with pytest.raises(ConfigError, match="best"):
        Saving(monitor="loss", mode="best")  # type: ignore[arg-type]


def test_a_run_without_a_place_to_save_is_refused_before_the_first_step(tmp_path):
    trainer = make_trainer(Saving(), max_steps=1)
    with pytest.raises(ConfigError, match="run_dir"):
        trainer.fit(make_data())
    assert trainer.state.step == 0
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    with pytest.raises(ConfigError, match="Saving cannot write to"):
        make_trainer(Saving(), max_steps=1, run_dir=in_the_way / "run").fit(make_data())


def send(number: int, at_step: int):
    """Raises a signal in this process in the middle of a step."""

    def on_step(step: int) -> None:
        if step == at_step:
            os.kill(os.getpid(), number)

    return staticmethod(on_step)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_ending_signal_saves_after_the_step_and_stops(tmp_path, name, capfd):
    number = getattr(signal, name)
    former = signal.getsignal(number)
    saves = Saves()
    trainer = make_trainer(Saving(), saves, max_epochs=5, run_dir=tmp_path)
    trainer.on_step = send(number, 6).__func__
    state = trainer.fit(make_data())
    assert saves.steps[-1] == state.step == 6
    assert state.stop_reason == f"signal {name}"
    assert name in capfd.readouterr().err
    assert signal.getsignal(number) is former


def test_a_run_saved_at_a_signal_and_resumed_ends_in_the_same_bits(tmp_path):
    whole, cut = make_model(), make_model()
    make_trainer(model=whole, max_epochs=3).fit(make_data())
    trainer = make_trainer(Saving(), model=cut, max_epochs=3, run_dir=tmp_path)
    trainer.on_step = send(signal.SIGTERM, 6).__func__
    trainer.fit(make_data())
    resumed = make_model()
    make_trainer(Saving(), model=resumed, max_epochs=3, run_dir=tmp_path).fit(make_data(), resume=tmp_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_sigusr1_saves_and_the_run_goes_on(tmp_path):
    former = signal.getsignal(signal.SIGUSR1)
    saves = Saves()
    trainer = make_trainer(Saving(every_epoch=False), saves, max_steps=9, run_dir=tmp_path)
    trainer.on_step = send(signal.SIGUSR1, 3).__func__
    state = trainer.fit(make_data())
    assert saves.steps == [3, 9]
    assert state.stop_reason is None
    assert signal.getsignal(signal.SIGUSR1) == former


def test_a_second_ctrl_c_interrupts_at_once(tmp_path):
    saves = Saves()
    trainer = make_trainer(Saving(), saves, max_steps=9, run_dir=tmp_path)

    def twice(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    trainer.on_step = twice
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make_data())
    assert trainer.state.step == 2
    assert saves.steps == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_come_back_when_the_run_fails_and_a_handler_set_meanwhile_stays(tmp_path):
    former = signal.getsignal(signal.SIGTERM)
    mine = lambda number, frame: None  # noqa: E731
    trainer = make_trainer(Saving(), max_steps=9, run_dir=tmp_path)

    def fail(step: int) -> None:
        signal.signal(signal.SIGUSR1, mine)
        raise RuntimeError("boom")

    trainer.on_step = fail
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(RuntimeError, match="boom"):
            trainer.fit(make_data())
        assert signal.getsignal(signal.SIGTERM) == former
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_outside_the_main_thread_it_says_that_signals_are_not_handled(tmp_path):
    caught = []

    def work() -> None:
        with pytest.warns(UserWarning, match="outside the main thread") as warned:
            make_trainer(Saving(), max_steps=1, run_dir=tmp_path).fit(make_data())
        caught.extend(warned)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_early_stopping_ends_the_run_and_the_end_is_saved(tmp_path):
    values = iter([3.0, 2.0, 2.5, 2.1, 1.0])
    stopping = EarlyStopping(patience=2)
    trainer = make_trainer(stopping, Saving(), max_epochs=5, run_dir=tmp_path)
    value = [0.0]
    trainer.evaluation_step = lambda batch: {"loss": torch.tensor(value[0])}

    class Next(Callback):
        def on_eval_start(self, state):
            value[0] = next(values)

    trainer.listeners = type(trainer.listeners)([Next(), *trainer.callbacks])
    state = trainer.fit(make_data(), make_data())
    assert state.epoch == 4
    assert "loss did not improve in 2 evaluations (last 2.1, best 2)" in state.stop_reason
    assert kept(tmp_path)[-1] == 16


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_ctrl_c_at_a_terminal_leaves_loader_workers_working_until_the_run_is_saved(tmp_path):
    """A terminal sends Ctrl-C to the whole process group, workers included."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from small_training import make_data, make_trainer
            from torch.utils.data import DataLoader
            from safetrain.callbacks import Saving

            loader = DataLoader(make_data().dataset, batch_size=4, num_workers=2)
            trainer = make_trainer(Saving(), max_epochs=50, run_dir={str(tmp_path / "run")!r})

            def on_step(step):
                if step == 5:
                    os.killpg(0, signal.SIGINT)

            trainer.on_step = on_step
            state = trainer.fit(loader)
            print("step", state.step, state.stop_reason)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, start_new_session=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "step 5 signal SIGINT"
    assert "Traceback" not in done.stderr
    assert kept(tmp_path / "run") == [5]
