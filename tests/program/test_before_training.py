"""What would fail is refused before training starts: one message, with the way out, and nothing left behind."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet import planning, sharing
from qfleet.ability import require_able
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.usercode import UserCode
from qfleet.envs.make import env_spec
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime.memory import shared_memory_root


def refused(tmp_path: Path, match: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError, match=match) as caught:
        api.train(run_dir=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
    assert not list(shared_memory_root().glob(f"*qfleet-{os.getpid()}-*"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"replay.capacity": 500_000}, "replay.capacity"),
        ({"learner.batch_size": 40_000}, "learner.batch_size"),
        ({"network.hidden": [1024, 1024]}, "network"),
    ],
)
def test_too_little_shared_memory_names_what_takes_most(
    changes: dict[str, Any], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "free_bytes", lambda: 5_000_000)
    text = refused(tmp_path, "shared memory is too small", preset=short(placement="processes", **changes))
    assert f"lower {setting}" in text
    assert "5.0 MB are free" in text
    assert "--shm-size" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.tensor": 3}, "tensor 3 does not divide the .* would work"),
        ({"parallel.pipeline": 7}, "pipeline 1 or 2 would work"),
        ({"device": "cuda"}, "device 'cuda': torch sees no CUDA device here .* use device 'cpu'"),
    ],
)
def test_what_no_rank_could_do_is_refused_before_anything_is_measured_or_started(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: Any) -> None:
        raise AssertionError("begun before it was refused")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(planning, "measure", too_late)
    monkeypatch.setattr(qfleet.session, "place", too_late)
    given = {"placement": "processes", "topology": "pipeline", **changes}
    refused(tmp_path, words, preset="cartpole", **given)
    refused(tmp_path, words, preset="cartpole", actors=1, **given)


@pytest.mark.parametrize("changes", [{"learners": 2, "parallel.update.kind": "sharded"}, {"parallel.tensor": 2}])
def test_more_ranks_of_a_divided_network_than_gpus_are_refused_before_anything_starts(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    experiment = short(placement="processes", device="cuda", **changes)
    with pytest.raises(ConfigError, match="2 ranks need 2 GPUs, and this machine has 1"):
        require_able(experiment, env_spec(experiment.env, None), UserCode())


@pytest.mark.parametrize(
    "algo", ["dqn", *(pytest.param(algo, marks=pytest.mark.slow) for algo in ("rainbow", "r2d2", "pqn"))]
)
def test_what_a_run_is_said_to_share_is_about_what_it_shares(algo: str, tmp_path: Path) -> None:
    experiment = short(algo, placement="processes", actors=1, **{"replay.capacity": 20_000})
    said = sum(sharing.shared_bytes(experiment, env_spec(experiment.env), UserCode()).values())
    most = 0

    def on_step(metrics: Any, stop: Any) -> None:
        nonlocal most
        folders = shared_memory_root().glob(f"qfleet-{os.getpid()}-*")
        sizes = [path.stat().st_blocks * 512 for folder in folders for path in folder.iterdir()]
        most = max(most, sum(sizes))

    api.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=on_step))
    pages = 200 * 4096  # of many small files, which nobody counts
    assert said / 2 < most < said + pages


def test_enough_shared_memory_is_no_matter_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "free_bytes", lambda: 0)
    assert api.train(short(env_steps=300), run_dir=tmp_path / "run").summary["env_steps"] >= 300


HOLDER = """
    import sys, time
    from pathlib import Path
    from qfleet.runtime.rundir import RunDir
    with RunDir(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
"""


def test_a_directory_that_a_living_run_uses_is_refused_and_that_of_a_dead_one_taken_over(tmp_path: Path) -> None:
    run = api.train(short(env_steps=300), run_dir=tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(run.dir)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            named = rf"in use by {getpass.getuser()}@{socket.gethostname()} \(process {holder.pid}, since 20.*--run-dir"
            with pytest.raises(ConfigError, match=named):
                api.resume(run.dir, env_steps=400)
            with pytest.raises(ConfigError, match=named):
                api.train(short(env_steps=300), run_dir=run.dir)
        finally:
            holder.kill()
    record = json.loads((run.dir / ".lock").read_text())
    assert (record["pid"], record["until"]) == (holder.pid, None), "it died without giving the lock back"
    assert api.resume(run.dir, env_steps=400).summary["env_steps"] == 400


def test_more_processes_than_the_cores_can_serve_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    run = api.train(short(env_steps=300, placement="processes", actors=2), run_dir=tmp_path / "run")
    texts = [event["text"] for event in read_jsonl(run.dir / "events.jsonl") if event.get("kind") == "crowded"]
    assert texts == ["5 processes share 1 cores: they will wait for each other; fewer actors may be faster"]


class OnlyHere(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that refuses to be made in any process but one."""

    def __init__(self, home: int) -> None:
        if os.getpid() != home:
            raise OSError("no licence in this process")
        super().__init__(gymnasium.make("CartPole-v1"))


class Here:
    """A function that makes it, and can be sent to other processes."""

    __name__ = "here"

    def __init__(self) -> None:
        self._home = os.getpid()

    def __call__(self) -> OnlyHere:
        return OnlyHere(self._home)


SMALL = {"placement": "processes", "actors": 1, "env_steps": 2000}


def test_an_environment_that_cannot_be_made_in_a_child_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, r"cannot be made: OSError: no licence in this process \(found by actor-0\)", env=Here(), **SMALL)


def test_an_environment_that_cannot_be_sent_to_a_child_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def factory() -> gymnasium.Env[Any, Any]:
        with lock:
            return gymnasium.make("CartPole-v1")

    refused(tmp_path, r"cannot be sent to another process.*--placement inline", env=factory, **SMALL)


class Raises(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("a bug in step")


def test_an_environment_that_raises_in_a_child_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(QfleetError, match="a bug in step"):
        api.train(env=Raises, run_dir=tmp_path / "run", **SMALL)
    assert not list(shared_memory_root().glob(f"*qfleet-{os.getpid()}-*"))
