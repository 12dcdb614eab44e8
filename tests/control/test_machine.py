"""What is measured of a real experiment and machine, what is remembered, and what a container allows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from plan_cases import measurements
from plan_cases import resources as machine_of

from qfleet import planning
from qfleet.control import kept, machine, pieces, resources, rig
from qfleet.control import measurements as known
from qfleet.control.machine import arranged, env_sizes
from qfleet.control.measurements import Measurements, at
from qfleet.control.planner import make_plan
from qfleet.control.planner_limits import most_actors
from qfleet.core.errors import QfleetError
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.planning import plan_run
from qfleet.presets import preset
from qfleet.presets.algorithms import apply


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "PIECE_S", 0.15)
    monkeypatch.setattr(pieces, "PIECE_S", 0.01)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting processes takes seconds; say that a message costs nothing."""
    monkeypatch.setattr(planning, "_wake", lambda directory: 0.0)
    monkeypatch.setattr(planning, "_try_children", lambda experiment, build: None)


def small(algo: str = "dqn", **changes: Any) -> Experiment:
    base = apply(preset("mountaincar"), algo)
    return with_changes(base, {"placement": "processes", "network.hidden": (32,), "actor.envs": 4, **changes})


def measured(run: Experiment, code: UserCode | None = None, **rest: Any) -> Measurements:
    plan = plan_run(run, code or UserCode(), {"placement"}, lambda text: None, **rest)
    assert plan.measurements is not None
    return plan.measurements


class Waiting(gymnasium.Env[Any, Any]):
    """Sleeps a given time in every step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seconds = 0.0005

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return np.zeros(3, np.float32), 0.0, False, False, {}


def waiting() -> Experiment:
    few = {"actor.envs": 4, "learner.batch_size": 16, "learner.train_period": 1.0}
    return with_changes(preset("gym:", factory=Waiting), {"placement": "processes", **few})


@pytest.mark.usefixtures("no_processes")
def test_an_environment_of_known_cost_is_measured_as_such() -> None:
    found = measured(waiting(), UserCode(env=Waiting))
    for size, seconds in found.env_tick:
        assert size * Waiting.seconds <= seconds <= 10 * size * Waiting.seconds
    for size, seconds in found.actor_tick:
        assert seconds >= size * Waiting.seconds


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("algo", ["dqn", "rainbow", "pqn", "r2d2"])
def test_every_kind_of_agent_is_measured(algo: str) -> None:
    run = small(algo)
    found = measured(run)
    replaying = run.agent.kind == "replay"
    assert [size for size, _ in found.actor_tick] == [1, 4, 16]
    assert at(found.actor_tick, 16) > 0
    assert (found.replay > 0) == replaying
    assert found.learners[0].seconds > 0
    assert found.row_bytes > 0
    if replaying:
        assert found.updates_per_step == 1 / run.learner.train_period
        assert found.batch_message > 0


@pytest.mark.parametrize(
    "changes", [{"elastic.max_actors": 4}, {"elastic.max_shards": 2, "actors": 2}, {"spare_actors": 2}], ids=str
)
def test_runs_that_may_grow_are_measured_as_others_are(changes: dict[str, Any]) -> None:
    """What only processes can do was refused, since most is measured in one."""
    for placement in ("inline", "processes"):
        assert machine.arranged(small(**changes), placement=placement).all_actors == 1


@pytest.mark.usefixtures("no_processes")
def test_measuring_leaves_threads_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    measured(small(threads=1))
    assert torch.get_num_threads() == threads
    assert torch.rand(1) == wanted


@pytest.mark.usefixtures("no_processes")
def test_what_was_measured_is_remembered_for_the_same_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "QUIET", 0.0)
    run = small()
    first = measured(run)
    monkeypatch.setattr(machine, "_timed", lambda *rest: pytest.fail("measured again"))
    assert measured(run) == first
    assert measured(with_changes(run, {"seed": 7, "env_steps": 123_456, "evaluation.every": 5})) == first
    for change in ({"network.hidden": (64,)}, {"learner.batch_size": 64}, {"env.id": "CartPole-v1"}):
        with pytest.raises(pytest.fail.Exception):
            measured(with_changes(run, change))
    with pytest.raises(pytest.fail.Exception):
        measured(run, fresh=True)


@pytest.mark.usefixtures("no_processes")
def test_what_a_busy_machine_says_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "QUIET", 1.1)
    measured(small())
    assert not known.KNOWN.path.exists()


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_an_environment_that_sleeps_is_told_from_a_busy_machine(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "seconds", 0.005)
    monkeypatch.setattr(machine, "core_share", lambda seconds: share)
    run, code = waiting(), UserCode(env=Waiting)
    plan = plan_run(run, code, {"placement"}, lambda text: None)
    found = plan.measurements
    assert found is not None
    assert found.cpu_share < known.QUIET
    assert ("no other program" in plan.reasons["load"]) == (share == 1.0)
    assert known.KNOWN.path.exists() == (share == 1.0), "remembered, unless others disturbed it"
    if share == 1.0:
        monkeypatch.setattr(machine, "_timed", lambda *rest: pytest.fail("measured again"))
        assert measured(run, code) == found


@pytest.mark.usefixtures("no_processes")
def test_actors_that_sleep_are_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping environment was taken for a core that is busy, so that two actors had half of two cores idle."""
    monkeypatch.setattr(Waiting, "seconds", 0.005)
    monkeypatch.setattr(machine, "core_share", lambda seconds: 1.0)
    plan = plan_run(waiting(), UserCode(env=Waiting), {"placement", "actor.envs"}, lambda text: None)
    found = plan.measurements
    assert found is not None
    assert at(found.actor_cpu, 4) < 0.5 * at(found.actor_tick, 4)
    two = machine_of(2)
    assert most_actors(waiting(), found, two, 4) == 4 * 2 - 3
    assert make_plan(waiting(), found, two, {"placement", "actor.envs"}).settings["actors"] > 2
    awake = found.replace(actor_cpu=found.actor_tick)
    assert most_actors(waiting(), awake, two, 4) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs processes that share one core")
def test_a_loop_gets_its_share_of_a_core_that_others_want() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]  # on the same core
    try:
        time.sleep(0.5)  # until they are at work
        assert 0 < rig.core_share(0.3) < 0.6
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, before)


def test_a_damaged_cache_is_measured_again_and_rewritten() -> None:
    path = known.KNOWN.path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert known.KNOWN.find({"a": 1}) is None
    known.KNOWN.store({"a": 1}, measurements())
    assert known.KNOWN.find({"a": 1}) == measurements()
    assert known.KNOWN.find({"a": 2}) is None


def test_the_oldest_measurements_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 3)
    for number in range(5):
        known.KNOWN.store({"number": number}, measurements())
    assert [known.KNOWN.find({"number": number}) is not None for number in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", 8), ("1600000 100000\n", 8), ("nonsense", 8)]
)
def test_a_container_may_allow_parts_of_a_core(
    text: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(resources, "_QUOTAS", ((tmp_path / "cpu.max", None), (tmp_path / "none", tmp_path / "none")))
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert resources.usable_cores() == cores


def test_an_older_container_keeps_quota_and_period_in_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quota").write_text("250000")
    (tmp_path / "period").write_text("100000")
    monkeypatch.setattr(resources, "_QUOTAS", ((tmp_path / "quota", tmp_path / "period"),))
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert resources.usable_cores() == 2.5
    (tmp_path / "quota").write_text("-1")
    assert resources.usable_cores() == 8


@pytest.mark.usefixtures("no_processes")
def test_a_run_that_learns_nothing_cannot_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "GIVE_UP_S", 0.0)
    monkeypatch.setattr(rig, "WARM_S", 0.0)
    with pytest.raises(QfleetError, match="cannot be planned"):
        measured(small())


def test_a_rollout_agent_is_timed_with_as_many_environments_as_fill_its_minibatches() -> None:
    """A run of 128 environments was refused because one of them alone would not fill them."""
    run = with_changes(preset("minatar:breakout"), {"agent.rollout_length": 16, "topology": "pipeline"})
    assert run.agent.minibatches == 32
    few = with_changes(run, {"actor.envs": 4})
    assert env_sizes(few) == [2, 4, 16]
    assert arranged(few, **{"actor.envs": 2}).agent == run.agent
