"""A bar on a terminal, few lines in a file."""

from __future__ import annotations

import io
import re
import threading

import pytest
from small_training import make_data, make_trainer

from safetrain.callbacks import EarlyStopping, Progress
from safetrain.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_log_file_gets_the_first_row_each_evaluation_and_the_end():
    stream = io.StringIO()
    progress = Progress(stream=stream, plain_every_s=60)
    make_trainer(progress, max_epochs=2, log_every=1).fit(make_data(), make_data())
    out = lines(stream)
    assert len(out) == 4
    assert re.fullmatch(
        r"step 1/8  epoch 0  accuracy [\d.]+  loss [\d.]+  grad_norm [\d.]+  memory \d+ MB  [\d.e+]+ steps/s", out[0]
    )
    assert re.fullmatch(r"step 4  epoch 1  loss [\d.]+  val/loss [\d.]+  val/accuracy [\d.]+", out[1])
    assert out[2].startswith("step 8  epoch 2  loss")
    assert re.fullmatch(r"finished at step 8 after [\d.]+ s, [\d.e+]+ steps/s", out[3])


def test_the_last_row_is_not_held_back_for_good():
    stream = io.StringIO()
    make_trainer(Progress(stream=stream, plain_every_s=60), max_steps=6, log_every=2).fit(make_data())
    assert [line.split("  ")[0] for line in lines(stream)[:2]] == ["step 1/6", "step 6/6"]


def test_every_row_is_a_line_when_asked_for():
    stream = io.StringIO()
    make_trainer(Progress(stream=stream, plain_every_s=0), max_steps=5, log_every=1).fit(make_data())
    assert [line.split("  ")[0] for line in lines(stream)[:-1]] == [f"step {i}/5" for i in range(1, 6)]


def test_a_terminal_gets_a_bar_with_loss_rate_and_memory():
    stream = Terminal()
    make_trainer(Progress(stream=stream), max_epochs=3, log_every=1).fit(make_data(), make_data())
    out = stream.getvalue()
    assert "\r" in out
    last = out[: out.rindex("finished")].splitlines()[-1]
    assert re.search(r"train: 100%.*12/12.*step/s.*loss [\d.]+.*memory \d+ MB", last)
    assert re.search(r"step 4  epoch 1  val/loss [\d.]+  val/accuracy [\d.]+\n", out)


def test_a_resumed_run_starts_its_bar_where_it_was(tmp_path):
    first = make_trainer(max_steps=4, run_dir=tmp_path)
    first.fit(make_data())
    path = first.save(tmp_path / "checkpoints")
    stream = Terminal()
    make_trainer(Progress(stream=stream), max_steps=6, run_dir=tmp_path).fit(make_data(), resume=path)
    assert "4/6" in stream.getvalue()
    assert "6/6" in stream.getvalue()


def test_the_end_says_why():
    stream = io.StringIO()
    trainer = make_trainer(Progress(stream=stream), EarlyStopping(patience=1, min_delta=100.0), max_epochs=9)
    trainer.fit(make_data(), make_data())
    assert re.search(r"finished at step 8 .*: early stopping: loss did not improve in 1 evaluations", lines(stream)[-1])


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO])
def test_after_a_failure_the_bar_is_closed_and_nothing_claims_to_have_finished(stream_type):
    stream = stream_type()
    trainer = make_trainer(Progress(stream=stream), max_steps=9)

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("boom")

    trainer.on_step = fail
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(make_data())
    assert stream.getvalue().endswith("\n")
    assert "finished" not in stream.getvalue()


def test_the_bar_starts_no_thread():
    before = threading.active_count()
    during = []
    trainer = make_trainer(Progress(stream=Terminal()), max_steps=2)
    trainer.on_step = lambda step: during.append(threading.active_count())
    trainer.fit(make_data())
    assert during == [before, before]


@pytest.mark.filterwarnings("ignore:step 1. the gradients:RuntimeWarning")
def test_skipped_steps_are_never_hidden():
    stream = io.StringIO()
    trainer = make_trainer(Progress(stream=stream), max_steps=1)
    trainer.poison = (1,)
    trainer.fit(make_data())
    assert "loss nan" in lines(stream)[0]
    assert "skipped_steps 1" in lines(stream)[0]


def test_a_negative_interval_is_refused():
    with pytest.raises(ConfigError, match="plain_every_s=-1"):
        Progress(plain_every_s=-1)
