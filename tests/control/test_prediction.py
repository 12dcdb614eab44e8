"""How fast arrangements are said to be: against runs that were measured, and against the equation itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import US, experiment, measurements, resources

from qfleet.control.measurements import Measurements
from qfleet.control.planner import make_plan
from qfleet.control.prediction import EFFICIENCY, Arrangement, Tick, crowded, predict
from qfleet.control.resources import Resources
from qfleet.experiment import with_changes
from qfleet.presets import preset

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("crowds.json").read_text())
"""Pong on two machines, an update for 200 steps, actors of 32 games: what was measured before, and what runs then did
(`benchmarks/cores_busy.py`)."""
RARELY = {"learner.train_period": 200.0, "learner.learning_starts": 2000, "replay.capacity": 200_000}
PONG = with_changes(preset("atari:pong"), {"placement": "processes", **RARELY})
seconds = st.floats(1e-6, 1e-1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["machine"])
def test_what_is_predicted_is_near_what_was_measured(case: dict[str, Any]) -> None:
    measured = Measurements.model_validate(case["measurements"])
    for actors, groups, side, found in case["steps_per_s"]:
        way = Arrangement(actors, 32, 1, groups, measured.learners[0], side)
        rate = predict(PONG, measured, case["cores"], way).rate
        assert 0.8 < found / rate < 1.2, f"{actors} actors, {groups} groups, {side}: {found} of {rate:.0f} steps/s"


@pytest.mark.parametrize(("case", "actors"), [(CASES[0], 16), (CASES[1], 16), (CASES[2], 2)], ids=str)
def test_cores_that_games_in_threads_leave_idle_get_more_actors(case: dict[str, Any], actors: int) -> None:
    """Six actors left 16 cores idle for 27 % of the time, ten for 17 %, and one actor two cores for 25 %."""
    plan = make_plan(PONG, Measurements.model_validate(case["measurements"]), _machine(case), {"placement"})
    assert plan.settings["actors"] == actors
    assert plan.settings["env.threads"] == 2, "16 threads for each of 16 actors were slower"
    assert "cores" in plan.reasons["env.threads"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["machine"])
def test_threads_that_were_asked_for_stay_and_one_actor_alone_has_all(case: dict[str, Any]) -> None:
    measured = Measurements.model_validate(case["measurements"])
    asked = with_changes(PONG, {"env.threads": 3})
    for run, fixed in ((asked, {"placement"}), (asked, {"placement", "env.threads"}), (PONG, {"env.threads"})):
        assert "env.threads" not in make_plan(run, measured, _machine(case), {"placement", *fixed}).settings
    plenty = _machine(case).replace(cores=64.0)
    assert "env.threads" not in make_plan(PONG, measured, plenty, {"placement", "actors"}).settings


def test_games_never_get_more_threads_than_there_are_cores_or_games() -> None:
    two = Measurements.model_validate(CASES[2]["measurements"])
    plan = make_plan(with_changes(PONG, {"actors": 1}), two, _machine(CASES[2]), {"placement", "actors"})
    assert plan.settings.get("env.threads", 0) <= 2
    sixteen = Measurements.model_validate(CASES[0]["measurements"])
    fixed = {"placement", "actors", "actor.envs", "actor.groups"}
    few = with_changes(PONG, {"actors": 16, "actor.envs": 32, "actor.groups": 32})
    assert make_plan(few, sixteen, _machine(CASES[0]), fixed).settings.get("env.threads", 1) == 1


def test_a_learner_that_holds_the_run_up_gets_no_more_actors_than_it_needs() -> None:
    measured = Measurements.model_validate(CASES[0]["measurements"])
    slow = measured.replace(learners=tuple(one.replace(seconds=100 * US) for one in measured.learners))
    plan = make_plan(PONG, slow, _machine(CASES[0]), {"placement"})
    assert plan.bottleneck == "learner"
    assert plan.settings["actors"] < 10
    assert "env.threads" not in plan.settings


def test_a_learner_that_takes_the_cores_does_not_get_more_actors_either() -> None:
    """Two cores, one update for 4 steps: two actors were planned that had nothing to do."""
    often = {**CASES[2]["measurements"], "updates_per_step": 0.25, "batches_per_step": 0.25}
    often["learners"] = [{"device": "cpu", "threads": 2, "seconds": 3e-3}]
    run = with_changes(PONG, {"learner.train_period": 4.0})
    plan = make_plan(run, Measurements.model_validate(often), _machine(CASES[2]), {"placement"})
    assert plan.bottleneck == "cores"
    assert plan.settings["actors"] == 1
    assert not {"env.threads", "inference.kind"} & plan.settings.keys(), "nor a server that would not be asked"


def _machine(case: dict[str, Any]) -> Resources:
    return resources(case["cores"], gpu="a GPU" if case["cores"] == 16 else "")


@given(seconds, seconds, st.floats(0, 1), seconds, st.integers(1, 64), st.floats(1, 64))
def test_a_crowded_tick_solves_its_equation(
    rest: float, stepping: float, share: float, beside: float, actors: int, cores: float
) -> None:
    burst = stepping * (1 + share * (cores - 1))
    tick = Tick(rest + stepping, rest + burst, rest, burst)
    length = crowded(tick, cores, actors, beside)
    taken, all_cores = (actors - 1) * tick.cpu + actors * beside, EFFICIENCY * cores / (tick.cpu + beside)
    assert length >= tick.length
    if length > tick.length:
        assert length == pytest.approx(rest + burst / (EFFICIENCY * cores - taken / length), rel=1e-6)
    more = min((actors + 1) / crowded(tick, cores, actors + 1, beside), all_cores)
    assert more >= min(actors / length, all_cores) * (1 - 1e-9), "one more never makes all slower"
    assert crowded(tick, 2 * cores, actors, beside) <= length * (1 + 1e-9)


def test_environments_in_the_actors_own_thread_crowd_nobody() -> None:
    measured = measurements(env=500 * US, learner=10 * US)
    way = Arrangement(4, 16, 1, 1, measured.learners[0])
    four = predict(experiment(), measured, 8, way)
    one = predict(experiment(), measured, 8, replace(way, actors=1))
    assert four.rate == pytest.approx(4 * one.rate)
