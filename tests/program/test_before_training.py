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
from qfleet import crowding, planning, sharing
from qfleet.ability import require_able
from qfleet.control import resources
from qfleet.control.monitor import Callbacks
from qfleet.core.announcing import heard_by
from qfleet.core.errors import ConfigError, QfleetError
from qfleet.core.shared_memory import shared_memory_root
from qfleet.core.usercode import UserCode
from qfleet.envs.make import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.runtime.processes import ProcessPlacement


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


class Sharing:
    """Looks, while a run trains, at how many bytes the files of its shared memory take at most."""

    def __init__(self, *prefixes: str) -> None:
        self._prefixes, self.most = prefixes or ("",), 0

    def on_step(self, metrics: Any, stop: Any) -> None:
        folders = shared_memory_root().glob(f"qfleet-{os.getpid()}-*")
        files = [path for folder in folders for path in folder.iterdir() if path.name.startswith(self._prefixes)]
        self.most = max(self.most, sum(path.stat().st_blocks * 512 for path in files))


def said_bytes(experiment: Experiment) -> float:
    return sum(sharing.shared_bytes(experiment, env_spec(experiment.env), UserCode()).values())


PAGE = 4096
SERVED = {"inference.kind": "served"}
ADAPTIVE = {"inference.kind": "adaptive", "inference.begins": "served"}


@pytest.mark.parametrize(
    ("algo", "changes"),
    [
        ("dqn", {}),
        ("dqn", SERVED),
        *(pytest.param(algo, {}, marks=pytest.mark.slow) for algo in ("rainbow", "r2d2", "pqn")),
        *(pytest.param("r2d2", changes, marks=pytest.mark.slow) for changes in (SERVED, ADAPTIVE)),
    ],
)
def test_what_a_run_is_said_to_share_is_about_what_it_shares(
    algo: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    experiment = short(algo, placement="processes", actors=1, **{"replay.capacity": 20_000, **changes})
    said, seen = said_bytes(experiment), Sharing()
    api.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=seen.on_step))
    assert said / 2 < seen.most < said + 200 * PAGE, "but for pages of many small files, which nobody counts"


@pytest.mark.parametrize(
    "changes",
    [
        ADAPTIVE,
        *(pytest.param(changes, marks=pytest.mark.slow) for changes in (SERVED, {**SERVED, "actor.groups": 4})),
        pytest.param({**SERVED, "actor.groups": 2, "env.vectorisation": "async"}, marks=pytest.mark.slow),
    ],
)
def test_requests_for_inference_and_their_replies_are_counted(changes: dict[str, Any], tmp_path: Path) -> None:
    """With many environments whose observations are frames they take more than experience does."""
    wide = {"env.id": "wide_env:Wide-v0", "network.hidden": [16], "network.input.scale": [1 / 255], "actor.envs": 24}
    experiment = short(placement="processes", actors=2, **{"replay.capacity": 2000, **wide, **changes})
    said = said_bytes(experiment) - said_bytes(with_changes(experiment, {"inference.kind": "local"}))
    seen = Sharing("requests-", "replies-")
    api.train(experiment, run_dir=tmp_path / "run", callbacks=Callbacks(on_step=seen.on_step))
    assert said > 2 * 24 * 4096 * 2
    assert said / 2 < seen.most < said + 50 * PAGE


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


class Told:
    """A sink that keeps what is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def metrics(self, record: Any) -> None: ...

    def event(self, record: Any) -> None:
        self.events.append(dict(record))

    def close(self) -> None: ...


def test_more_processes_than_a_container_has_cores_for_are_told_before_any_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an event of a run that trained already, and counted the cores of the whole machine."""

    def begin(*_: Any, **__: Any) -> None:
        raise ConfigError("begun")

    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(resources, "_QUOTAS", ((tmp_path / "cpu.max", None),))
    monkeypatch.setattr(ProcessPlacement, "__init__", begin)
    told = Told()
    with pytest.raises(ConfigError, match="begun"):
        api.train(short(placement="processes", actors=2), run_dir=tmp_path / "run", sinks=[told])
    (event,) = told.events
    words = "5 processes share 0.5 cores: they will wait for each other; a lower --actors (now 2) may be faster"
    assert (event["event"], event["text"]) == ("preparing", words)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"actors": 2, "spare_actors": 7}, "--spare-actors (now 7)"),
        ({"actors": 8, "replay.shards": 8, "learners": 9}, "--learners (now 9)"),
        ({"learners": 2, "parallel.tensor": 5}, "--learners (now 2)"),
        ({"actors": 6, "inference": {"kind": "served", "servers": 6}}, "--actors (now 6)"),
        ({"learners": 3, "parallel.update": {"kind": "server", "servers": 7}}, "--parallel.update.servers (now 7)"),
    ],
)
def test_what_makes_processes_many_is_named(changes: dict[str, Any], flag: str) -> None:
    told: list[str] = []
    with heard_by(told.append):
        crowding.tell_crowd(short(placement="processes", **changes), 2)
        crowding.tell_crowd(short(placement="processes", **changes), 16)
    (text,) = told
    assert f"a lower {flag} may be faster" in text


INSTEAD = "--env.vectorisation sync (now async)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"actors": 4, "actor.envs": 256, "evaluation.envs": 8},
            "1,039 processes share 2 cores: they will wait for each other; a lower --actor.envs (now 256) or --actors"
            f" (now 4) may be faster, or {INSTEAD}",
        ),
        (
            {"actors": 1, "actor.envs": 8, "evaluation.envs": 40, "evaluation.episodes": 40},
            f"a lower --evaluation.envs (now 40) may be faster, or {INSTEAD}",
        ),
        ({"placement": "inline", "actor.envs": 200}, "200) may be faster, or --env.vectorisation sync"),
        ({"actors": 1, "spare_actors": 1, "actor.envs": 17}, "--actor.envs (now 17)"),
        ({"actors": 1, "actor.envs": 16, "evaluation.envs": 40, "evaluation.episodes": 8}, ""),
        ({"actors": 1, "actor.envs": 256, "env.vectorisation": "sync"}, ""),
    ],
)
def test_processes_of_environments_are_counted_among_those_that_are_told(changes: dict[str, Any], said: str) -> None:
    """4 actors with 256 such environments each passed on 2 cores without a word."""
    told: list[str] = []
    settings = {"placement": "processes", "env.vectorisation": "async", "evaluation.episodes": 8, **changes}
    with heard_by(told.append):
        crowding.tell_crowd(short(**settings), 2)
    assert len(told) == bool(said)
    assert not said or said in told[0]


@pytest.mark.parametrize(("placement", "count"), [("processes", "1,039"), ("inline", "1,032")])
def test_processes_of_environments_that_memory_does_not_hold_are_refused(
    placement: str, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowding, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(crowding, "available_memory", lambda: 8 * 2**30)
    changes = {"actors": 4, "actor.envs": 256, "evaluation.envs": 8, "evaluation.episodes": 8}
    many = short(placement=placement, **{"env.vectorisation": "async"}, **changes)
    with pytest.raises(ConfigError) as refused:
        crowding.require_processes_fit(many)
    assert str(refused.value).startswith(f"{count} processes are more than this machine holds: at about 150 MiB each")
    assert "10 MiB for each environment's own" in str(refused.value)
    assert str(refused.value).endswith(f"Lower --actor.envs (now 256) or --actors (now 4), or set {INSTEAD}")
    monkeypatch.setattr(crowding, "available_memory", lambda: 64 * 2**30)
    crowding.require_processes_fit(many)


@pytest.mark.parametrize("plan", [None, "auto"])
def test_so_many_actors_that_they_would_only_end_the_machine_are_refused(
    plan: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: Any) -> None:
        raise AssertionError("begun before it was refused")

    monkeypatch.setattr(crowding, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(crowding, "available_memory", lambda: 8 * 2**30)
    monkeypatch.setattr(planning, "measure", too_late)
    monkeypatch.setattr(qfleet.session, "build_program", too_late)
    many = short(placement="processes", actors=10_000, **{"actor.envs": 1, "replay.capacity": 200_000})
    words = r"10,003 processes are more than this machine holds: .*8.0 GiB are free.*Lower --actors \(now 10,000\)"
    refused(tmp_path, words, preset=many, plan=plan, fixed={"actors"})


def test_idle_processes_that_memory_holds_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that wait for something else need no core of their own."""
    monkeypatch.setattr(crowding, "usable_cores", lambda: 2.0)
    waiting = short(placement="processes", actors=100)
    monkeypatch.setattr(crowding, "available_memory", lambda: 64 * 2**30)
    crowding.require_processes_fit(waiting)
    monkeypatch.setattr(crowding, "available_memory", lambda: 0)
    crowding.require_processes_fit(short(placement="processes", actors=20))
    crowding.require_processes_fit(with_changes(waiting, {"placement": "ray", "address": "somewhere:6379"}))
    with pytest.raises(ConfigError, match="103 processes"):
        crowding.require_processes_fit(with_changes(waiting, {"placement": "ray"}))


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


@pytest.fixture
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans must not come so far as to measure anything."""

    def too_late(*_: Any) -> None:
        raise AssertionError("measured before it was refused")

    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "_wake", too_late)
    monkeypatch.setattr(planning, "measure", too_late)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("actors", [1, "auto"])
def test_an_environment_that_cannot_be_made_in_a_child_is_refused(actors: Any, tmp_path: Path) -> None:
    words = r"cannot be made: OSError: no licence in this process \(found by actor-0\)"
    refused(tmp_path, words, env=Here(), **{**SMALL, "actors": actors})


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("actors", [1, "auto"])
def test_an_environment_that_cannot_be_sent_to_a_child_is_refused(actors: Any, tmp_path: Path) -> None:
    lock = threading.Lock()

    def factory() -> gymnasium.Env[Any, Any]:
        with lock:
            return gymnasium.make("CartPole-v1")

    words = r"cannot be sent to another process.*--placement inline"
    refused(tmp_path, words, env=factory, **{**SMALL, "actors": actors})


class Raises(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("a bug in step")


def test_an_environment_that_raises_in_a_child_ends_the_run_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(QfleetError, match="a bug in step"):
        api.train(env=Raises, run_dir=tmp_path / "run", **SMALL)
    assert not list(shared_memory_root().glob(f"*qfleet-{os.getpid()}-*"))
