"""Each row reaches the file; resumed runs go on where their checkpoint was."""

from __future__ import annotations

import json
import math
import os

import pytest
from small_training import make_data, make_trainer

from safetrain.callbacks import Callback, JsonlMetrics, Saving
from safetrain.callbacks.jsonl import read_rows
from safetrain.errors import ConfigError


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_rows_of_training_and_evaluation_are_there_with_step_epoch_and_time(tmp_path):
    make_trainer(JsonlMetrics(), max_epochs=2, log_every=2, run_dir=tmp_path).fit(make_data(), make_data())
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["epoch"], "val/loss" in row) for row in rows] == [
        (1, 0, False), (2, 0, False), (4, 0, False), (4, 1, True), (6, 1, False), (8, 1, False), (8, 2, True),
    ]  # fmt: skip
    assert {"train/loss", "train/accuracy", "train/grad_norm", "train/lr", "train/skipped_steps"} <= rows[0].keys()
    assert all(rows[i]["time"] <= rows[i + 1]["time"] for i in range(len(rows) - 1))


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    seen = []

    class Look(Callback):
        def on_log(self, state):
            seen.append(read_rows(tmp_path / "metrics.jsonl")[-1]["step"])

    make_trainer(JsonlMetrics(), Look(), max_steps=3, log_every=1, run_dir=tmp_path).fit(make_data())
    assert seen == [1, 2, 3]


def test_a_crash_loses_no_row(tmp_path):
    trainer = make_trainer(JsonlMetrics(), max_steps=9, log_every=1, run_dir=tmp_path)

    def crash(step: int) -> None:
        if step == 6:
            raise RuntimeError("boom")

    trainer.on_step = crash
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(make_data())
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("crash_at", [5, 6, 8, 9])
def test_a_resumed_run_ends_with_the_rows_of_an_uninterrupted_one(tmp_path, crash_at):
    """Saved every third step and each epoch of four; rows written after the last save go, none is there twice."""
    settings = {"max_epochs": 3, "log_every": 1}
    whole = make_trainer(JsonlMetrics(), Saving(every_steps=3), run_dir=tmp_path / "whole", **settings)
    whole.fit(make_data(), make_data())

    trainer = make_trainer(JsonlMetrics(), Saving(every_steps=3), run_dir=tmp_path / "cut", **settings)

    def crash(step: int) -> None:
        if step == crash_at:
            raise RuntimeError("boom")

    trainer.on_step = crash
    with pytest.raises(RuntimeError):
        trainer.fit(make_data(), make_data())
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "train/lo')  # the power went in the middle of a line
    again = make_trainer(JsonlMetrics(), Saving(every_steps=3), run_dir=tmp_path / "cut", **settings)
    again.fit(make_data(), make_data(), resume=tmp_path / "cut")
    expected = without_time(read_rows(tmp_path / "whole" / "metrics.jsonl"))
    assert without_time(read_rows(tmp_path / "cut" / "metrics.jsonl")) == expected


def test_rows_beyond_the_step_go_even_if_the_saved_run_did_not_count_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 9)))
    first = make_trainer(Saving(), max_steps=4, run_dir=tmp_path)
    first.fit(make_data())
    make_trainer(JsonlMetrics(), max_steps=5, log_every=1, run_dir=tmp_path).fit(make_data(), resume=tmp_path)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]


def test_a_second_fit_goes_on_in_the_same_file(tmp_path):
    trainer = make_trainer(JsonlMetrics(), max_steps=2, log_every=1, run_dir=tmp_path)
    trainer.fit(make_data())
    trainer.max_steps = 4
    trainer.fit(make_data())
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_new_run_in_a_used_directory_keeps_the_old_rows_aside(tmp_path):
    for _ in range(3):
        make_trainer(JsonlMetrics(), max_steps=2, log_every=1, run_dir=tmp_path).fit(make_data())
    for name in ("metrics.jsonl", "metrics.1.jsonl", "metrics.2.jsonl"):
        assert [row["step"] for row in read_rows(tmp_path / name)] == [1, 2]


@pytest.mark.filterwarnings("ignore:step 1. the gradients:RuntimeWarning")
def test_a_loss_that_is_nan_is_in_the_log_as_nan(tmp_path):
    trainer = make_trainer(JsonlMetrics(), max_steps=1, run_dir=tmp_path)
    trainer.poison = (1,)
    trainer.fit(make_data())
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["train/loss"])
    assert row["train/skipped_steps"] == 1


def test_without_a_run_directory_it_says_what_to_give():
    with pytest.raises(ConfigError, match=r"JsonlMetrics has nowhere to write.*run_dir"):
        make_trainer(JsonlMetrics(), max_steps=1).fit(make_data())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_one_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"cannot write to .*chmod u\+rwx"):
        make_trainer(JsonlMetrics(), max_steps=1, run_dir=tmp_path).fit(make_data())


def test_a_directory_where_the_file_should_be_is_one_clear_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "metrics.jsonl" / "x").touch()
    trainer = make_trainer(JsonlMetrics(), max_steps=1, run_dir=tmp_path / "metrics.jsonl" / "x")
    with pytest.raises(ConfigError, match="JsonlMetrics cannot write to"):
        trainer.fit(make_data())
