"""What is planned for machines of every size, why, and how fast it is said to be."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import GIB, US, any_measurements, experiment, measurements, resources

from qfleet.control.measurements import LearnerCost, Measurements, at
from qfleet.control.plan import Plan
from qfleet.control.planner import make_plan
from qfleet.control.planner_leeway import ALIKE
from qfleet.control.planner_limits import (
    ENVIRONMENT_BYTES,
    OTHERS,
    PROCESS_BYTES,
    STEPS_OF_EACH,
    most_actors,
    replay_bytes,
)
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, with_changes
from qfleet.planning import apply_plan
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

PLACED = {"placement"}


def planned(measured: Measurements, cores: float = 8, run: Experiment | None = None, **rest: Any) -> Plan:
    fixed = rest.pop("fixed", PLACED)
    return make_plan(run or experiment(), measured, resources(cores, **rest), fixed)


def role(plan: Plan, kind: str) -> Any:
    return next(one for one in plan.roles if one.kind == kind)


# ---------------------------------------------------------------- properties


@given(any_measurements, st.floats(0.5, 64))
@settings(max_examples=60, deadline=None)
def test_a_plan_fits_the_cores_the_budget_and_the_experiment(measured: Measurements, cores: float) -> None:
    run = experiment()
    plan = planned(measured, cores, run)
    assert 1 <= plan.settings["actors"] <= max(1, int(cores))
    assert sum(one.cores for one in plan.roles) <= cores + 1e-6
    assert all(one.busy <= 1 + 1e-6 for one in plan.roles)
    changed = apply_plan(run, plan)
    assert changed.actors * changed.actor.envs <= max(run.actor.envs, run.env_steps // STEPS_OF_EACH)
    assert {name for name in plan.settings if name.startswith("actor")} <= plan.reasons.keys()


@given(any_measurements, st.floats(1, 64), st.floats(1, 4))
@settings(max_examples=60, deadline=None)
def test_more_cores_are_never_slower(measured: Measurements, cores: float, times: float) -> None:
    few, many = planned(measured, cores), planned(measured, times * cores)
    assert (many.env_steps_per_s or 0) >= (1 - ALIKE) * (few.env_steps_per_s or 0)


@given(any_measurements, st.floats(1, 32))
@settings(max_examples=30, deadline=None)
def test_equal_measurements_give_an_equal_plan_that_a_file_keeps(measured: Measurements, cores: float) -> None:
    plan = planned(measured, cores)
    assert plan == planned(measured, cores)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.yaml"
        path.write_text(plan.to_yaml())
        assert Plan.from_yaml(path) == plan


@given(any_measurements, st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_processes_fit_the_memory(measured: Measurements, processes: int) -> None:
    run = experiment()
    memory = replay_bytes(run, measured) + processes * PROCESS_BYTES
    plan = planned(measured, 32, run, memory=memory)
    assert plan.settings["actors"] <= max(1, processes - OTHERS)


def test_processes_of_environments_fit_the_memory_and_the_cores() -> None:
    """An actor counted as one process, however many its environments had."""
    run = experiment(**{"env.vectorisation": "async", "evaluation.envs": 8})
    awake = measurements()
    asleep = measurements(actor_cpu=tuple((size, 0.01 * seconds) for size, seconds in awake.actor_tick))
    judged, actor = OTHERS * PROCESS_BYTES + 8 * ENVIRONMENT_BYTES, PROCESS_BYTES + 16 * ENVIRONMENT_BYTES
    room = resources(8, memory=replay_bytes(run, asleep) + judged + 3 * actor)
    assert most_actors(run, asleep, room, 16) == 3
    assert most_actors(run, awake, room, 16) == 3
    assert most_actors(run, asleep, room, 64) == 1
    plan = make_plan(run, asleep, room, PLACED)
    sizes = plan.settings["actors"] + plan.settings["spare_actors"], int(plan.settings["actor.envs"])
    assert sizes[0] * (PROCESS_BYTES + sizes[1] * ENVIRONMENT_BYTES) <= 3 * actor
    wide = resources(2)
    assert [most_actors(run, awake, wide, envs) for envs in (16, 32, 256)] == [2, 1, 1]
    assert most_actors(run, asleep, wide, 256) == 5, "those that sleep take memory alone"
    assert most_actors(experiment(), awake, wide, 256) == 2


@given(any_measurements, st.sampled_from(["actors", "actor.envs", "actor.unroll", "threads"]), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_what_is_fixed_stays(measured: Measurements, name: str, value: int) -> None:
    run = experiment(**{name: value})
    plan = planned(measured, 8, run, fixed={"placement", name})
    assert plan.settings[name] == value


@given(any_measurements, st.floats(1, 64))
@settings(max_examples=40, deadline=None)
def test_without_a_placement_the_faster_one_is_chosen(measured: Measurements, cores: float) -> None:
    plan = planned(measured, cores, fixed=())
    assert plan.env_steps_per_s == max(plan.placements.values())
    assert plan.placements[plan.placement] == plan.env_steps_per_s


# ---------------------------------------------------------------- known machines


def test_slow_environments_get_all_cores_that_the_others_leave() -> None:
    plan = planned(measurements(env=2000 * US, learner=10 * US), cores=8)
    assert plan.settings["actors"] in (7, 8)
    assert plan.bottleneck in ("actor", "cores")
    assert (plan.env_steps_per_s or 0) > 6 * plan.placements["inline"]


def test_a_slow_learner_needs_one_actor_only() -> None:
    plan = planned(measurements(env=20 * US, learner=1000 * US), cores=8)
    assert plan.settings["actors"] == 1
    assert plan.bottleneck == "learner"
    assert role(plan, "learner").busy == pytest.approx(1)
    assert plan.env_steps_per_s == pytest.approx(1 / (1000 * US), rel=0.05)


def test_equal_work_on_two_cores_is_nearly_twice_as_fast_as_inline() -> None:
    plan = planned(measurements(env=200 * US, act=0.0, replay=1 * US, learner=200 * US), cores=2)
    assert plan.settings["actors"] == 1
    assert 1.6 <= (plan.env_steps_per_s or 0) / plan.placements["inline"] <= 2


def test_messages_that_cost_more_than_they_save_are_told_of() -> None:
    tiny = measurements(env=0.1 * US, act=0.1 * US, replay=0.1 * US, learner=0.1 * US, message=1000 * US)
    asked = planned(tiny, cores=2)
    assert asked.placement == "processes"
    assert "inline would be" in asked.reasons["placement"]
    free = planned(tiny, cores=2, fixed=())
    assert free.placement == "inline"
    assert free.settings == {}
    assert "messages cost more than they save" in free.reasons["placement"]
    several = planned(tiny, cores=2, run=experiment(learners=2), fixed=())
    assert several.placement == "processes", "inline they would only take turns"


def test_dear_messages_hold_more_steps() -> None:
    run = experiment(**{"learner.learning_starts": 100_000, "replay.capacity": 100_000})
    plan = planned(
        measurements(env=2 * US, act=1 * US, learner=1 * US, message=2000 * US),
        4,
        run,
        fixed=("placement", "actor.envs"),
    )
    assert plan.settings["actor.unroll"] > 4
    cheap = planned(measurements(env=200 * US, message=1 * US), 4, run)
    assert cheap.settings["actor.unroll"] == 1


def test_a_learner_takes_threads_and_devices_that_pay() -> None:
    ways = [
        LearnerCost(device="cpu", threads=1, seconds=1000 * US),
        LearnerCost(device="cpu", threads=4, seconds=300 * US),
        LearnerCost(device="cuda", threads=1, seconds=20 * US),
    ]
    on_cpu = planned(measurements(learners=ways[:2]), cores=8)
    assert on_cpu.settings["threads"] == 4
    assert planned(measurements(learners=ways[:2]), cores=1).settings["threads"] == 1
    on_gpu = planned(measurements(learners=ways), cores=8, gpu="a GPU")
    assert (on_gpu.settings["device"], on_gpu.settings["threads"]) == ("cuda", 1)


def test_a_gpu_server_pays_for_large_observations_and_not_for_small_ones() -> None:
    cuda = ((4, 500 * US), (64, 600 * US), (256, 900 * US))
    large = measurements(env=50 * US, act=2000 * US, learner=20 * US, act_cuda=cuda)
    plan = planned(large, cores=16, gpu="a GPU")
    assert plan.settings["inference.kind"] == "served"
    assert plan.settings["inference.device"] == "cuda"
    assert apply_plan(experiment(), plan).inference.kind == "served"
    assert role(plan, "inference").device == "cuda"
    small = planned(measurements(act=1 * US, act_cuda=cuda), cores=16, gpu="a GPU")
    assert "inference.kind" not in small.settings
    assert "server (cuda)" in small.reasons["inference"]
    kept = planned(large, cores=16, gpu="a GPU", fixed={"placement", "inference.kind"})
    assert "inference.kind" not in kept.settings


def test_several_servers_that_were_asked_for_share_the_actors() -> None:
    cuda = ((4, 500 * US), (64, 8000 * US), (256, 32000 * US))
    measured = measurements(env=50 * US, act=8000 * US, learner=1 * US, act_cuda=cuda, copy_bytes_per_s=54e9)
    run = {
        servers: experiment(actors=3, **{"inference.kind": "served", "inference.servers": servers})
        for servers in (1, 3)
    }
    fixed = {"placement", "inference.kind", "inference.servers"}
    one, three = (planned(measured, 16, run[servers], gpu="a GPU", fixed=fixed) for servers in (1, 3))
    assert (role(one, "inference").count, role(three, "inference").count) == (1, 3)
    assert (three.env_steps_per_s or 0) > 1.5 * (one.env_steps_per_s or 0)
    assert three.settings["inference.servers"] == 3
    assert role(three, "inference").busy <= 1 + 1e-6
    assert "of its " in three.reasons["inference"]


def test_two_groups_are_taken_where_they_were_measured_to_pay() -> None:
    slow = measurements(env=500 * US, learner=10 * US)
    assert planned(slow, cores=1).settings["actor.groups"] == 1
    overlapped = slow.replace(two_groups=0.6)
    assert planned(overlapped, cores=4, fixed={"placement", "actors"}).settings["actor.groups"] == 2
    assert planned(slow.replace(two_groups=1.4), cores=4).settings["actor.groups"] == 1


def test_rollouts_wait_for_their_weights_so_actors_take_turns_with_the_learner() -> None:
    run = with_changes(apply(preset("mountaincar"), "pqn"), {"placement": "processes"})
    even = measurements(env=100 * US, act=0.0, replay=0.0, learner=100 * US, message=1 * US, batches_per_step=0.0)
    one = planned(even, 4, run, fixed={"placement", "actors"})
    assert (one.env_steps_per_s or 0) < 1.05 * one.placements["inline"]
    assert "actor.unroll" not in one.settings
    assert (planned(even, 4, run).env_steps_per_s or 0) > 1.5 * (one.env_steps_per_s or 0)


def test_a_replay_that_does_not_fit_is_a_problem_that_names_what_would() -> None:
    run = experiment(**{"replay.capacity": 1_000_000})
    plan = planned(measurements(row_bytes=7096), 2, run, memory=2 * GIB)
    (problem,) = plan.problems
    assert "replay.capacity 1,000,000 takes 6.61 GiB" in problem
    fitting = int(problem.split("lower it to ")[1].split()[0].replace(",", ""))
    assert fitting * 7096 <= 2 * GIB < (fitting + 1000) * 7096
    with pytest.raises(ConfigError, match="GiB of memory"):
        apply_plan(run, plan)
    mapped = with_changes(run, {"replay.storage.kind": "mapped"})
    assert planned(measurements(row_bytes=7096), 2, mapped, memory=2 * GIB).problems == ()


def test_several_learners_are_kept_and_no_gain_is_promised() -> None:
    one, two = planned(measurements()), planned(measurements(), run=experiment(learners=2))
    assert role(two, "learner").count == 2
    assert two.env_steps_per_s == one.env_steps_per_s
    assert "as fast as one" in two.reasons["learners"]


def test_measurements_of_a_busy_machine_come_with_a_warning() -> None:
    assert "load" not in planned(measurements()).reasons
    busy = planned(measurements(cpu_share=0.3)).reasons["load"]
    assert "got 30% of the processor time: other programs run here" in busy
    asleep = planned(measurements(cpu_share=0.3, core_share=0.99)).reasons["load"]
    assert "environments sleep (no other program" in asleep
    assert "vectorisation async" in asleep


def test_a_plan_is_for_its_own_experiment_and_its_own_numbers() -> None:
    run = experiment()
    plan = planned(measurements(), 4, run)
    with pytest.raises(ConfigError, match="is for mountaincar"):
        apply_plan(with_changes(preset("acrobot"), {"placement": "processes"}), plan)
    with pytest.raises(ConfigError, match="actors 9 contradicts the plan"):
        apply_plan(with_changes(run, {"actors": 9}), plan, fixed={"actors"})
    same = with_changes(run, dict(plan.settings))
    assert apply_plan(same, plan, fixed=set(plan.settings) | {"placement"}) == same


_OTHER = "preset: mountaincar\nalgo: dqn\nplacement: processes\nsettings: {%s: ray}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "configuration"),
        ("actors: 2", "unknown setting 'actors'"),
        ("[", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        (_OTHER % "placement", "placement is not for a plan's settings to say"),
        (_OTHER % "env.id", "env.id is not for a plan's settings to say"),
    ],
    ids=["empty", "unknown", "cut", "deep", "placement", "environment"],
)
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml") as error:
        Plan.from_yaml(tmp_path / "plan.yaml")
    assert said in str(error.value)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=5), st.integers(1, 4000))
@settings(max_examples=100, deadline=None)
def test_a_curve_never_falls_below_zero_and_meets_its_points(values: list[float], size: int) -> None:
    curve = tuple((4 ** (i + 1), value) for i, value in enumerate(sorted(values)))
    assert at(curve, size) >= 0
    assert [at(curve, point) for point, _ in curve] == pytest.approx([value for _, value in curve])
    assert at(curve, size) <= at(curve, size + 1) + 1e-12


def test_a_replay_in_two_shards_is_twice_as_fast_and_has_an_actor_for_each() -> None:
    slow, two = measurements(replay=200 * US), {"actors": 2, "replay.shards": 2}
    one, both = planned(slow), planned(slow, run=experiment(**two))
    assert (one.bottleneck, both.bottleneck) == ("replay", "replay")
    assert both.env_steps_per_s == pytest.approx(2 * (one.env_steps_per_s or 0))
    assert (role(both, "replay").count, role(both, "replay").busy) == (2, pytest.approx(1.0))
    assert planned(measurements(env=1e-9, learner=1.0), cores=1, run=experiment(**two)).settings["actors"] == 2
