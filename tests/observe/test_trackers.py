"""TensorBoard files that can be read back, and W&B runs that stay on disk and hold no secrets."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from qfleet.core.errors import MissingExtra
from qfleet.observe.trackers import TensorBoardSink, WandbSink, evaluation_scalars, scalars, without_secrets

EVALUATION = {"event": "evaluation", "time": 6.0, "env_steps": 200, "mean": 3.5, "ci95": [3.0, 4.0], "iqm": math.nan}


def test_only_finite_numbers_are_charted() -> None:
    record = {
        "time": 5.0,
        "env_steps": 1,
        "loss": math.nan,
        "q_mean": 2.0,
        "bottleneck": "learner",
        "actor.0.busy": 0.5,
    }
    assert scalars(record) == {"train/q_mean": 2.0, "roles/actor.0.busy": 0.5}
    assert evaluation_scalars(EVALUATION) == {
        "evaluation/mean": 3.5, "evaluation/ci95_low": 3.0, "evaluation/ci95_high": 4.0,
    }  # fmt: skip


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.event({"event": "started", "preset": "cartpole"})
    sink.metrics({"time": 5.0, "env_steps": 100, "loss": 0.25, "actor.0.idle": "waits"})
    sink.metrics({"time": 7.0, "env_steps": 200, "loss": 0.125})
    sink.event(EVALUATION)
    sink.close()
    sink.close()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.wall_time, e.step, e.value) for e in events.Scalars("train/loss")] == [
        (5.0, 100, 0.25),
        (7.0, 200, 0.125),
    ]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/mean")] == [(200, 3.5)]
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "evaluation/mean", "evaluation/ci95_low", "evaluation/ci95_high",
    }  # fmt: skip
    (text,) = events.Tensors("events/text_summary")
    assert text.tensor_proto.string_val == [b"started: preset cartpole"]


def test_wandb_offline_makes_a_run_directory_without_secrets_and_goes_on_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "--password=argument-secret"])
    for _ in range(2):
        sink = WandbSink("qfleet-tests", "a-name", tmp_path)
        sink.event({"event": "started", "preset": "cartpole", "api_key": "config-secret"})
        sink.metrics({"env_steps": 100, "loss": 0.25, "q_mean": math.inf})
        sink.event(EVALUATION)
        sink.close()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb-id").read_text()
    # Not the directory's name: W&B appends a number to it where two runs begin in one second.
    assert [[file.name for file in run.glob("*.wandb")] for run in runs] == [[f"run-{run_id}.wandb"]] * 2
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for present in (b"train/loss", b"evaluation/mean", b"cartpole", b"a-name"):
        assert present in content
    assert b"config-secret" not in content
    assert b"argument-secret" not in content
    assert b"q_mean" not in content


def test_entries_that_look_like_secrets_are_left_out_at_any_depth() -> None:
    tree = {"seed": 1, "W_TOKEN": "x", "env": {"password": "x", "name": "y"}, "list": [{"apiKey": "x", "a": 1}]}
    assert without_secrets(tree) == {"seed": 1, "env": {"name": "y"}, "list": [{"a": 1}]}


def test_without_the_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"tensorboard.*qfleet\[track\]"):
        TensorBoardSink(tmp_path)
    with pytest.raises(MissingExtra, match=r"wandb.*qfleet\[track\]"):
        WandbSink("project", "name", tmp_path)
