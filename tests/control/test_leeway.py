"""What a plan leaves to the balancer: spare actors, and who computes for the actors."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import US, any_measurements, experiment, measurements, resources, seconds

from qfleet.control import planner
from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.plan import Plan
from qfleet.control.planner import make_plan
from qfleet.control.planner_leeway import ALIKE, CLOSE
from qfleet.control.planner_limits import OTHERS, PROCESS_BYTES, STEPS_OF_EACH, replay_bytes
from qfleet.experiment import Experiment, with_changes
from qfleet.planning import apply_plan
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

LEARNER_BOUND = measurements(env=200 * US, learner=40 * US)
GPU = ((4, 800 * US), (64, 900 * US), (256, 1200 * US))
NO_BALANCER: list[dict[str, Any]] = [{"balance": "off"}, {"lockstep": True}]


def planned(measured: Measurements, cores: float = 8, run: Experiment | None = None, **rest: Any) -> Plan:
    fixed = {"placement", *rest.pop("fixed", ())}
    return make_plan(run or experiment(), measured, resources(cores, **rest), fixed)


def acting_counts(act: float, cuda: Any = GPU) -> Measurements:
    """Return a run whose network takes so many microseconds an observation on a core, or 800 a batch on a GPU."""
    return measurements(env=30 * US, act=act * US, learner=2 * US, replay=1 * US, message=20 * US, act_cuda=cuda)


def rollouts() -> Experiment:
    return with_changes(apply(preset("mountaincar"), "pqn"), {"placement": "processes"})


# ---------------------------------------------------------------- spare actors


@given(any_measurements, st.floats(0.5, 64), st.integers(0, 60), st.sampled_from(["dqn", "r2d2"]))
@settings(max_examples=80, deadline=None)
def test_spare_actors_are_few_and_have_cores_memory_budget_and_replay(
    measured: Measurements, cores: float, processes: int, algo: str
) -> None:
    run = with_changes(apply(preset("mountaincar"), algo), {"placement": "processes"})
    memory = replay_bytes(run, measured) + processes * PROCESS_BYTES
    plan = planned(measured, cores, run, memory=memory)
    actors, spare = int(plan.settings["actors"]), int(plan.settings["spare_actors"])
    assert plan.reasons["spare_actors"].startswith(str(spare))
    without = planned(measured, cores, run, memory=memory, fixed={"spare_actors"})
    assert (plan.env_steps_per_s, plan.roles) == (without.env_steps_per_s, without.roles), "the rates are those without"
    if spare:
        assert spare <= max(1, actors // 4)
        assert spare + sum(role.cores for role in plan.roles) <= cores
        assert actors + spare <= min(cores, processes - OTHERS)
        changed = apply_plan(run, plan)
        assert changed.all_actors * changed.actor.envs <= max(run.actor.envs, run.env_steps // STEPS_OF_EACH)


def test_a_run_that_waits_for_its_learner_has_actors_in_reserve() -> None:
    few = planned(measurements(env=20 * US, learner=1000 * US))
    assert (few.settings["actors"], few.settings["spare_actors"]) == (1, 1)
    longer = experiment(env_steps=2_000_000, **{"replay.capacity": 1_000_000})
    many = planned(measurements(env=400 * US, learner=40 * US), 32, longer)
    assert (many.settings["actors"], many.settings["spare_actors"]) == (11, 2)
    assert apply_plan(longer, many).spare_actors == 2


def test_there_is_no_spare_actor_where_it_would_only_crowd_or_find_no_room() -> None:
    crowded = planned(measurements(env=200 * US, learner=200 * US), cores=2)
    assert crowded.settings["spare_actors"] == 0
    assert "no core" in crowded.reasons["spare_actors"]
    run = experiment()
    memory = replay_bytes(run, LEARNER_BOUND) + (OTHERS + 5) * PROCESS_BYTES
    assert "memory" in planned(LEARNER_BOUND, 32, run, memory=memory).reasons["spare_actors"]
    short = experiment(env_steps=5 * 16 * STEPS_OF_EACH)
    assert "budget" in planned(LEARNER_BOUND, 32, short, fixed={"actor.envs"}).reasons["spare_actors"]


def test_there_is_no_spare_actor_whose_environments_would_be_missed() -> None:
    plan = planned(LEARNER_BOUND, 32, experiment(**{"exploration.kind": "ladder"}))
    assert plan.settings["spare_actors"] == 0
    assert "greediest" in plan.reasons["spare_actors"]


@pytest.mark.parametrize("run", [*(experiment(**changes) for changes in NO_BALANCER), rollouts()])
def test_without_a_balancer_nobody_would_wake_them(run: Experiment) -> None:
    plan = planned(LEARNER_BOUND, 32, run)
    assert "spare_actors" not in plan.settings
    assert apply_plan(run, plan).spare_actors == 0


def test_the_users_own_numbers_win() -> None:
    asked = experiment(spare_actors=7)
    assert apply_plan(asked, planned(LEARNER_BOUND, 32, asked, fixed={"spare_actors"})).spare_actors == 7
    two = experiment(actors=2)
    assert apply_plan(two, planned(LEARNER_BOUND, 32, two, fixed={"actors"})).all_actors == 2


# ---------------------------------------------------------------- who computes for the actors


def on(side: str, plan: Plan, measured: Measurements, cores: float) -> float:
    """Return the rate of a plan's arrangement where only one side of inference is there."""
    kept = ("actors", "actor.envs", "actor.unroll", "actor.groups", "threads")
    changes = {name: plan.settings[name] for name in kept}
    run = experiment(**changes, **{"inference.kind": side})
    same = planned(measured, cores, run, gpu="a GPU", fixed={*kept, "inference.kind"})
    assert same.env_steps_per_s is not None
    return same.env_steps_per_s


@given(seconds, seconds, seconds, st.floats(1e-5, 1e-2), st.floats(1, 64))
@settings(max_examples=80, deadline=None)
def test_inference_is_left_open_between_two_close_sides_only_and_begins_on_the_faster(
    env: float, act: float, learner: float, gpu: float, cores: float
) -> None:
    measured = measurements(env=env, act=act, learner=learner, act_cuda=tuple((n, gpu + n * US) for n in (4, 64, 256)))
    plan = planned(measured, cores, gpu="a GPU")
    if plan.settings.get("inference.kind") != "adaptive":
        return
    rates = {side: on(side, plan, measured, cores) for side in ("local", "served")}
    slower, faster = sorted(rates.values())
    assert slower >= (1 - CLOSE) * faster
    assert plan.env_steps_per_s == faster == rates[str(plan.settings["inference.begins"])]


@pytest.mark.parametrize(("act", "begins"), [(13, "local"), (20, "served")])
def test_the_run_finds_out_which_of_two_close_sides_is_faster(act: float, begins: str) -> None:
    plan = planned(acting_counts(act), 4, gpu="a GPU")
    assert plan.settings["inference.kind"] == "adaptive"
    assert (plan.settings["inference.begins"], plan.settings["inference.device"]) == (begins, "cuda")
    assert "the balancer finds out which is faster" in plan.reasons["inference"]
    assert [role.device for role in plan.roles if role.kind == "inference"] == ["cuda"]
    inference = apply_plan(experiment(), plan).inference
    assert (inference.kind, getattr(inference, "begins", "")) == ("adaptive", begins)


@pytest.mark.parametrize("act", [2, 60])
def test_sides_that_are_far_apart_or_do_not_matter_are_not_left_open(act: float) -> None:
    """The network takes almost none of an actor's time, or much less of it on the GPU."""
    plan = planned(acting_counts(act), 4, gpu="a GPU")
    assert plan.settings.get("inference.kind", "local") == ("local" if act == 2 else "served")


def test_a_run_that_waits_for_its_learner_does_not_ask_who_computes() -> None:
    held_up = acting_counts(15).replace(learners=measurements(learner=1000 * US).learners)
    assert "inference.kind" not in planned(held_up, 4, gpu="a GPU").settings


@pytest.mark.parametrize("run", [*(experiment(**changes) for changes in NO_BALANCER), rollouts()])
def test_without_a_balancer_nobody_would_move_it(run: Experiment) -> None:
    assert planned(acting_counts(15), 4, run, gpu="a GPU").settings.get("inference.kind") in (None, "served")


@pytest.mark.parametrize("kind", ["local", "served"])
def test_the_users_own_side_wins(kind: str) -> None:
    run = experiment(**{"inference.kind": kind})
    plan = planned(acting_counts(15), 4, run, gpu="a GPU", fixed={"inference.kind"})
    assert apply_plan(run, plan).inference.kind == kind


@pytest.mark.parametrize("act", [2, 60])
def test_asked_for_both_sides_are_weighed(act: float) -> None:
    run, measured = experiment(**{"inference.kind": "adaptive"}), acting_counts(act)
    plan = planned(measured, 4, run, gpu="a GPU", fixed={"inference.kind"})
    assert plan.env_steps_per_s == planned(measured, 4, gpu="a GPU").env_steps_per_s, "as fast as where it is free"
    begins = "local" if act == 2 else "served"
    assert (plan.settings["inference.kind"], plan.settings["inference.begins"]) == ("adaptive", begins)
    other = with_changes(run, {"inference.begins": "served" if begins == "local" else "local"})
    kept = planned(measured, 4, other, gpu="a GPU", fixed={"inference.kind", "inference.begins"})
    assert apply_plan(other, kept).inference == other.inference.replace(device=kept.settings["inference.device"])


def test_asked_for_it_is_never_inline() -> None:
    tiny = measurements(env=0.1 * US, act=0.1 * US, replay=0.1 * US, learner=0.1 * US, message=1000 * US)
    run = experiment(placement="inline", **{"inference.kind": "adaptive"})
    assert make_plan(run, tiny, resources(2)).placement == "inline", "nothing was asked for"
    assert make_plan(run, tiny, resources(2), {"inference.kind"}).placement == "processes"


def test_as_many_servers_as_the_user_wants_have_an_actor_each() -> None:
    run = experiment(actors=3, **{"inference.kind": "served", "inference.servers": 3})
    plan = planned(measurements(learner=1000 * US), 8, run, fixed={"inference.kind", "inference.servers"})
    assert plan.settings["actors"] == 3
    assert getattr(apply_plan(run, plan).inference, "servers", 0) == 3


def test_servers_that_nobody_asked_for_go_where_actors_are_faster_alone() -> None:
    run = experiment(**{"inference.kind": "served", "inference.precision": "bf16"})
    inference = apply_plan(run, planned(measurements(act=1 * US), 8, run)).inference
    assert (inference.kind, inference.precision) == ("local", "bf16")


# ---------------------------------------------------------------- a learner that is not kept waiting

ON_A_GPU = (LearnerCost(device="cuda", threads=1, seconds=100 * US),)
FAST_GPU = ((4, 60 * US), (16, 70 * US), (64, 90 * US))


@pytest.mark.parametrize("cores", [2, 4, 8, 16])
@pytest.mark.parametrize("fixed", [(), ("actors",)])
def test_a_lead_over_the_learner_changes_how_many_act_and_nothing_else(cores: int, fixed: tuple[str, ...]) -> None:
    """Acting was moved to the GPU that held the run up, or actors had four times as many environments, or sent sixteen
    times as much at once, which comes less evenly."""
    run = experiment(env_steps=5_000_000, **{"replay.capacity": 1_000_000})
    costs = measurements(env=20 * US, act=200 * US, learners=ON_A_GPU, act_cuda=FAST_GPU)
    leading = planned(costs, cores, run, gpu="a GPU", fixed=fixed)
    with patch.object(planner, "LEAD", 0.0):
        modest = planned(costs, cores, run, gpu="a GPU", fixed=fixed)
    assert leading.env_steps_per_s == pytest.approx(modest.env_steps_per_s, rel=ALIKE)
    counted = {"actors", "spare_actors"}
    assert {k: v for k, v in leading.settings.items() if k not in counted} == {
        k: v for k, v in modest.settings.items() if k not in counted
    }
    assert leading.settings["actors"] >= modest.settings["actors"]


def test_rollouts_need_no_lead_over_the_learner() -> None:
    """Their actors wait for the learner: more of them lead by nothing, and bring older samples."""
    costs = measurements(env=50 * US, act=1 * US, learner=400 * US)
    leading = planned(costs, 8, rollouts())
    with patch.object(planner, "LEAD", 0.0):
        assert leading.settings == planned(costs, 8, rollouts()).settings
    assert "limited by the learner (cpu); one actor would" in leading.reasons["actors"]
    assert "without waiting for the learner" not in leading.reasons["actors"], "which their actors do"
