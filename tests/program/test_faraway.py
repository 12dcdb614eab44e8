"""Checkpoints that are copied to an address of fsspec: whole or absent there, fetched elsewhere, by one driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from program_cases import short, states, stop_at

import qfleet.api as api
from qfleet.core.errors import CheckpointError, ConfigError, QfleetError, Superseded
from qfleet.experiment import Experiment
from qfleet.runtime import checkpoint
from qfleet.runtime.faraway import Faraway


class Unreliable(LocalFileSystem):  # type: ignore[misc]
    """A disk to which some writes fail, as they are numbered."""

    protocol = "unreliable"
    cachable = False
    failing: range = range(0)
    written = 0

    def put_file(self, *arguments: Any, **named: Any) -> None:
        number, Unreliable.written = Unreliable.written, Unreliable.written + 1
        if number in Unreliable.failing:
            raise ConnectionResetError("the store is gone")
        super().put_file(*arguments, **named)


@pytest.fixture
def unreliable() -> type[Unreliable]:
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.failing, Unreliable.written = range(0), 0
    return Unreliable


def run(target: str, **changes: Any) -> Experiment:
    small: dict[str, Any] = {
        "env_steps": 600,
        "learner.learning_starts": 100,
        "checkpoint.every": 100,
        "evaluation.every": 200,
        "network.hidden": [16],
        "replay.capacity": 300,
        "replay.segment": 20,
        "actor.envs": 4,
        "checkpoint.target": target,
    }
    return short("dqn", "cartpole", **{**small, **changes})


def files(folder: Path) -> set[str]:
    """Return what a run's directory, or its copy, has of what a resume needs."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    beside = {name.removeprefix("checkpoints/") for name in names if not name.rpartition("/")[2].startswith(".")}
    return {name for name in beside if name.startswith(("0", "chunks", "model", "config"))}


def test_the_copy_has_what_is_here_and_goes_on_elsewhere_as_if_never_cut(tmp_path):
    room = {"replay.capacity": 2000}  # what a full replay has dropped is no part of a checkpoint
    uncut = api.train(run(f"file://{tmp_path}/other", **room), seed=5, run_dir=tmp_path / "uncut")
    cut = run(f"file://{tmp_path}/store", **room)
    here = api.train(cut, seed=5, run_dir=tmp_path / "here", callbacks=stop_at(430))
    assert files(tmp_path / "store") == files(here.dir), "old checkpoints and chunks are gone there, too"
    elsewhere = api.fetch(f"file://{tmp_path}/store", tmp_path / "elsewhere")
    assert states(api.resume(elsewhere)) == states(uncut)
    assert files(tmp_path / "store") == files(elsewhere)


def test_an_object_store_in_memory_will_do(tmp_path):
    api.train(run("memory://bucket/run", env_steps=300), seed=5, run_dir=tmp_path / "here")
    fetched = api.fetch("memory://bucket/run", tmp_path / "there")
    assert files(fetched) == files(tmp_path / "here")
    with pytest.raises(ConfigError, match="memory://bucket/run already holds a run: go on with `qfleet resume"):
        api.train(run("memory://bucket/run"), run_dir=tmp_path / "second")
    assert not (tmp_path / "second").exists()


@pytest.mark.usefixtures("written_at_once")
def test_a_store_that_fails_is_told_and_tried_again_and_never_ends_a_run(unreliable, tmp_path, monkeypatch):
    monkeypatch.setattr("qfleet.control.due.RETRY_S", 0.0)
    unreliable.failing = range(3, 4)  # in the first checkpoint, which is never the last
    long = run(f"unreliable://{tmp_path}/store", env_steps=1000)  # two more come, which push it out
    done = api.train(long, seed=5, run_dir=tmp_path / "run")
    events = [json.loads(line) for line in (done.dir / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event.get("kind") == "unsaved"]
    assert told
    assert "ConnectionResetError: the store is gone" in told[0]
    assert files(tmp_path / "store") == files(done.dir)


def test_a_store_that_stays_away_fails_the_last_checkpoint_only(unreliable, tmp_path):
    unreliable.failing = range(10_000)
    with pytest.raises(QfleetError, match="the store is gone"):
        api.train(run(f"unreliable://{tmp_path}/store"), seed=5, run_dir=tmp_path / "run")
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints").manifest["env_steps"] >= 600, "it is here"


@pytest.mark.parametrize("cut", range(0, 13, 3))
def test_a_copy_that_was_cut_short_leaves_the_one_before(cut, unreliable, tmp_path):
    done = api.train(run(f"unreliable://{tmp_path}/store", env_steps=300), seed=5, run_dir=tmp_path / "run")
    before = checkpoint.complete(tmp_path / "store")[-1].name
    (tmp_path / "store" / "driver").unlink()
    faraway = Faraway(f"unreliable://{tmp_path}/store")
    faraway.take_over(new=False)
    newest = checkpoint.complete(done.dir / "checkpoints")[-1]
    later = newest.with_name(f"{int(newest.name[:12]) + 7:012d}")
    newest.rename(later)
    unreliable.failing, unreliable.written = range(cut, 10_000), 0
    with pytest.raises(CheckpointError, match="the store is gone"):
        faraway.copy(later, done.dir, 2)
    fetched = api.fetch(f"unreliable://{tmp_path}/store", tmp_path / "fetched")
    assert checkpoint.newest_good(fetched / "checkpoints").directory.name == before


def test_a_driver_that_was_replaced_copies_nothing_more(tmp_path):
    done = api.train(run(f"file://{tmp_path}/store", env_steps=300), seed=5, run_dir=tmp_path / "run")
    first, second = Faraway(f"file://{tmp_path}/store"), Faraway(f"file://{tmp_path}/store")
    first.take_over(new=False)
    newest = checkpoint.complete(done.dir / "checkpoints")[-1]
    first.copy(newest, done.dir, 2)
    second.take_over(new=False)
    with pytest.raises(Superseded, match="another process has taken over the run at file://"):
        first.copy(newest, done.dir, 2)
    second.copy(newest, done.dir, 2)


def test_damage_on_the_way_is_noticed(tmp_path):
    api.train(run(f"file://{tmp_path}/store", env_steps=300), seed=5, run_dir=tmp_path / "run")
    for state in (tmp_path / "store").glob("0*/learner-0.safetensors"):
        state.write_bytes(state.read_bytes()[:-1] + b"x")
    fetched = api.fetch(f"file://{tmp_path}/store", tmp_path / "fetched")
    with pytest.raises(CheckpointError, match=r"learner-0\.safetensors: damaged"):
        api.resume(fetched)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere://x/y", "checkpoint.target nowhere://x/y: Protocol not known"),
        ("ftp://me:secret@host/run", "has a password, which would be written"),
    ],
)
def test_addresses_that_will_not_do_are_refused_and_leave_nothing(address, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as refused:
        api.train(run(address), run_dir=tmp_path / "run")
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_fetch_never_overwrites(tmp_path):
    api.train(run(f"file://{tmp_path}/store", env_steps=300), seed=5, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="exists already"):
        api.fetch(f"file://{tmp_path}/store", tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        api.fetch(f"file://{tmp_path}/nothing", tmp_path / "new")
    assert not (tmp_path / "new").exists()
