"""Processes are killed at random moments, and at chosen ones; a checker looks for what was lost, doubled or invented.

On Ray half of the deaths are Ray's own (`ray.kill`), the others the system's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from history import Found, check
from killer import ALL_KINDS, ENVS, ROLES, Killer
from numbered_env import journals
from program_cases import short

import qfleet.api as api
import qfleet.session
from qfleet.control.monitor import Callbacks
from qfleet.core.failpoints import VARIABLE
from qfleet.envs import make_env
from qfleet.experiment import Experiment
from qfleet.program import place
from qfleet.replay import Replay
from qfleet.runtime.checkpoint import complete, read_state
from qfleet.runtime.memory import shared_memory_root
from qfleet.setups import shard_setup

FINAL_TEST = "test-0"
"""Who plays it dies, too, where a point is everybody's."""


ALL_APART = {"inference.kind": "served", "inference.resend_s": 0.3, "env.vectorisation": "async"}
"""Settings of a run that has all kinds of processes."""


class Patient:
    """Lets a role die as often as it likes."""

    def delay(self, name: str, lived_s: float) -> float:
        return 0.0


def experiment(folder: Path, env_steps: int, **changes: Any) -> Experiment:
    (folder / "journal").mkdir()
    settings = {
        "placement": "processes",
        "actors": 2,
        "actor.envs": ENVS,
        "env.id": "numbered_env:Numbered-v0",
        "env.kwargs": {"journal": str(folder / "journal")},
        "env.reward_scale": 1.0,
        "network.hidden": [16],
        "network.input.scale": [1e-2],
        "agent.n_step": 3,
        "replay.capacity": 2 * env_steps,
        "learner.train_period": 8.0,
        "learner.snapshot_s": 0.05,
        "checkpoint.every": 10**9,
        "replay.sampler": {"kind": "prioritised", "initial": "actor"},
    }
    return short(env_steps=env_steps, **{**settings, **changes})


def survive(
    run: Experiment, folder: Path, monkeypatch: pytest.MonkeyPatch, killer: Killer | None = None
) -> tuple[Found, list[dict[str, Any]]]:
    """Let a run go to its end; return what the checker found, and the events of the deaths."""

    def placed(*arguments: Any) -> Any:
        placement: Any = place(*arguments)
        placement._restarts = Patient()
        if killer is not None:
            killer.placement = placement
        return placement

    monkeypatch.setattr(qfleet.session, "place", placed)
    callbacks = Callbacks(on_step=killer.on_step if killer else None)
    done = api.train(run, run_dir=folder / "run", callbacks=callbacks)
    assert done.summary["env_steps"] >= run.env_steps
    assert not list(shared_memory_root().glob(f"qfleet-{os.getpid()}-*"))
    assert not multiprocessing.active_children()
    until = time.monotonic() + 30
    while killer is not None and (left := [*filter(alive, killer.seen), *players(folder / "journal")]):
        assert time.monotonic() < until, f"processes are left: {left}"
        time.sleep(0.1)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    shards = [stored(run, folder / "run", index) for index in range(run.replay_parts)]
    found = check(shards, journals(folder / "journal"), evicting=run.replay.capacity < run.env_steps)
    return found, [event for event in events if event["event"] == "restart"]


def stored(run: Experiment, folder: Path, index: int, saved: Path | None = None) -> Replay:
    """Return one shard of the replay of a run's last checkpoint, or of one that was `saved` before."""
    probe = make_env(run.env, 1)
    setup = shard_setup(run, probe.spec, folder, index)
    probe.close()
    replay = Replay(
        run.replay, probe.spec, streams=setup.streams, n_step=setup.n_step, gamma=setup.gamma,
        part=setup.part, rng=np.random.default_rng(0), directory=folder,
    )  # fmt: skip
    saved = saved or complete(folder / "checkpoints")[-1]
    replay.load_state_dict(read_state(saved, f"replay-{index}")["replay"])
    return replay


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def players(directory: Path) -> list[int]:
    """Return the numbers of the living that have written a journal: roles, and environments that are processes."""
    wrote = {int(path.suffix[1:]): path.stat().st_mtime for path in directory.iterdir()}
    return [
        process.pid
        for process in psutil.process_iter(["status", "create_time"])
        if process.pid in wrote
        and process.pid != os.getpid()  # which has looked at an environment, too
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and process.info["create_time"] < wrote[process.pid] + 1.0  # a later one only has the same number
    ]


def lives(deaths: list[dict[str, Any]]) -> int:
    """Return how often roles were begun anew; one that dies before it is ready has one event for several lives."""
    last = {(death["role"], death["index"]): death["life"] for death in deaths}
    return sum(last.values())


def check_deaths(killer: Killer, folder: Path, deaths: list[dict[str, Any]]) -> None:
    """Raise AssertionError unless all was killed, and told: a role's death as one, that of an environment as a cut."""
    kinds = {name.rpartition("/")[2].partition("-")[0] for name in killer.roles}
    assert (killer.left, set(killer.killed)) == (0, kinds)
    assert lives(deaths) == killer.killed.total() - killer.killed["environment"]
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event.get("kind") == "environment"]
    assert all(text.endswith("its episode is cut, it begins anew") for text in told)
    assert killer.cuts.total() <= len(told) <= killer.cuts.total() + killer.perhaps_cuts
    assert killer.whole == {name.partition("/")[0] for name in killer.roles if "/" in name}


@pytest.mark.parametrize(
    ("killing", "changes"),
    [
        ({"kills": 5, "seed": 1, "pause": 400}, {}),
        ({"kills": 12, "seed": 1310, "pause": 200, "roles": ALL_KINDS}, ALL_APART),
    ],
    ids=["four kinds", "all kinds"],
)
def test_nothing_is_lost_when_random_processes_are_killed(
    killing: dict[str, Any], changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(**killing)
    found, deaths = survive(experiment(tmp_path, 5000, **changes), tmp_path, monkeypatch, killer)
    check_deaths(killer, tmp_path, deaths)
    assert found.sent > 4500
    assert found.stored == found.sent
    assert found.broken > 0


@pytest.mark.slow
def test_only_the_oldest_is_gone_from_a_full_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(kills=5, seed=2, pause=400)
    run = experiment(tmp_path, 5000, **{"replay.capacity": 800, "replay.segment": 20})
    found, deaths = survive(run, tmp_path, monkeypatch, killer)
    assert (killer.left, lives(deaths)) == (0, 5)
    assert 600 < found.stored < 800
    assert found.items > 500


def test_nothing_is_lost_when_one_of_two_shards_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "replay-0/replay.after_commit:kill@40,replay-1/replay.before_commit:kill@60")
    run = experiment(tmp_path, 1500, **{"replay.shards": 2})
    found, deaths = survive(run, tmp_path, monkeypatch)
    died = {(death["role"], death["index"]) for death in deaths}
    assert died == {("replay", 0), ("replay", 1)}
    assert found.sent > 1200
    assert found.stored == found.sent


@pytest.mark.slow
def test_nothing_is_lost_when_ray_actors_are_killed(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(kills=2, seed=3, pause=600)
    found, deaths = survive(experiment(tmp_path, 2500, placement="ray"), tmp_path, monkeypatch, killer)
    assert killer.left == 0
    assert killer.deaths <= lives(deaths) <= killer.deaths + killer.perhaps
    assert killer.deaths + killer.perhaps == 1 + len(ROLES)
    assert found.sent > 2200
    assert found.stored == found.sent


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_kills_on_ray(seed: int, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(kills=25, seed=seed, pause=3000)
    capacity = 200_000 if seed % 2 else 2000
    run = experiment(tmp_path, 100_000, placement="ray", **{"replay.capacity": capacity})
    found, deaths = survive(run, tmp_path, monkeypatch, killer)
    assert killer.left == 0
    assert killer.deaths <= lives(deaths) <= killer.deaths + killer.perhaps
    assert found.stored > 0.8 * min(capacity, found.sent)


@pytest.mark.slow
@pytest.mark.parametrize("storage", [{"kind": "ram"}, {"kind": "mapped"}, {"kind": "lz4", "smallest": 1}])
@pytest.mark.parametrize("capacity", [50_000, 2000])
@pytest.mark.parametrize(("roles", "changes"), [(ROLES, {}), (ALL_KINDS, ALL_APART)], ids=["four kinds", "all kinds"])
def test_hundreds_of_kills(
    roles: tuple[str, ...],
    changes: dict[str, Any],
    storage: dict[str, Any],
    capacity: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killer = Killer(kills=34, seed=capacity + len(storage["kind"]), pause=600, roles=roles)
    run = experiment(tmp_path, 40_000, **{"replay.capacity": capacity, "replay.storage": storage, **changes})
    found, deaths = survive(run, tmp_path, monkeypatch, killer)
    check_deaths(killer, tmp_path, deaths)
    assert found.stored > 0.8 * min(capacity, found.sent)


POINTS = [
    "replay-0/replay.before_commit:kill@40,actor-0/channel.after_write:kill@50,learner-0/keep.before_commit:kill@3",
    "replay-0/replay.after_commit:kill@40,actor-0/channel.after_send:kill@50,learner-0/keep.after_commit:kill@3",
    "replay-0/channel.before_ack:kill@40,actor-0/channel.before_send:kill@50,evaluator-0/keep.after_commit:kill@2",
    "replay-0/channel.after_send:kill@10,learner-0/channel.before_ack:kill@10,evaluator-0/keep.before_commit:kill@1",
    "worker.step:kill@60",
]


@pytest.mark.parametrize(
    "points", [POINTS[1], *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS if p != POINTS[1])]
)
def test_nothing_is_lost_by_deaths_at_the_worst_moments(
    points: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, points)
    found, deaths = survive(experiment(tmp_path, 1500), tmp_path, monkeypatch)
    named = {point.split("/")[0] for point in points.split(",")} if "/" in points else set(ROLES[:-1])
    assert named <= {f"{death['role']}-{death['index']}" for death in deaths} <= {*ROLES, FINAL_TEST}
    assert found.stored == found.sent


def test_an_evaluator_that_dies_when_it_has_told_its_result_does_not_count_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One good evaluation could be two in a row."""
    monkeypatch.setenv(VARIABLE, "evaluator-0/keep.before_commit:kill@2")
    _, deaths = survive(experiment(tmp_path, 1500), tmp_path, monkeypatch)
    assert {death["role"] for death in deaths} == {"evaluator"}
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["env_steps"] for event in events if event["event"] == "evaluation"]
    assert steps
    assert len(steps) == len(set(steps))


def test_a_learner_says_what_its_death_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "learner-0/worker.step:kill@200")
    run = experiment(tmp_path, 1500, **{"learner.snapshot_s": 1000.0})
    survive(run, tmp_path, monkeypatch)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    text = next(event["text"] for event in events if event.get("kind") == "restarted")
    assert text.startswith("learner restarted from update 0: ")
    assert int(text.split()[5]) > 10
