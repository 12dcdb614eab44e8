"""Machines with several GPUs: what is known of them, who computes where, and what a plan makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import GIB, US, any_measurements, experiment, measurements, resources, seconds

from qfleet import setups
from qfleet.control import resources as machine
from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.plan import Plan
from qfleet.control.planner import make_plan
from qfleet.control.planner_leeway import ALIKE
from qfleet.control.resources import Gpu, Resources
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import Experiment
from qfleet.parallel.devices import in_turn
from qfleet.planning import apply_plan

ON_GPU = LearnerCost(device="cuda", threads=1, seconds=1 * US)
ON_CPU = LearnerCost(device="cpu", threads=1, seconds=1 * US)
SLOW_GPU = ((4, 500 * US), (64, 8000 * US), (256, 32_000 * US))
"""What a batch takes on a GPU that holds up many actors."""


def busy_gpus(learner: LearnerCost = ON_GPU) -> Measurements:
    """Return a run whose actors need a GPU, and one of them is not enough."""
    return measurements(env=50 * US, act=8000 * US, learners=(learner,), act_cuda=SLOW_GPU)


def planned(gpus: int, measured: Measurements, run: Experiment | None = None, fixed: tuple[str, ...] = ()) -> Plan:
    found = resources(16, gpu="a GPU", gpus=gpus)
    return make_plan(run or experiment(), measured, found, {"placement", *fixed})


def servers(plan: Plan) -> int:
    return sum(role.count for role in plan.roles if role.kind == "inference")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {0: 80, 1: 40, 2: 80, 3: 24}
    properties = {
        number: SimpleNamespace(name=f"GPU-{size}", total_memory=size * GIB) for number, size in sizes.items()
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


# ---------------------------------------------------------------- what is known of a machine


@pytest.mark.usefixtures("four_gpus")
def test_a_look_finds_every_gpu_with_its_name_and_memory() -> None:
    found = machine.look()
    assert found.gpu == "GPU-80", "what is measured is measured on the first"
    assert found.gpus[1:] == tuple(Gpu(name=f"GPU-{size}", memory=size * GIB) for size in (40, 80, 24))
    assert Resources.model_validate(found.model_dump(mode="json")) == found


def test_without_a_gpu_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (machine.look().gpus, machine.look().gpu) == ((), "")


@pytest.mark.parametrize("name", ["", "a GPU"])
def test_plans_from_when_one_gpus_name_was_kept_are_read(name: str) -> None:
    old = {"cpu": "test", "cores": 2.0, "memory": 1, "shared_memory": 1, "gpu": name}
    assert Resources.model_validate(old).gpu == name


@pytest.mark.usefixtures("four_gpus")
def test_a_copy_of_the_replay_must_fit_the_gpu_of_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment(device="cuda", **{"replay.storage.kind": "ram", "replay.capacity": 100_000})
    spec = env_spec(run.env)
    assert setups.mirrored(run, spec)
    small = {0: 1_000, 1: 80 * GIB, 2: 80 * GIB, 3: 80 * GIB}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=small[number]))
    assert not setups.mirrored(run, spec), "that of the others does not help"


# ---------------------------------------------------------------- who computes where


def turns(run: Experiment) -> list[int | None]:
    """Return whose turn it is of the servers, in order, and last of the evaluator."""
    spec, code = env_spec(run.env), UserCode()
    count = getattr(run.inference, "servers", 0)
    serving = [setups.inference_setup(run, spec, code, index).turn for index in range(count)]
    return [*serving, setups.evaluator_setup(run, spec, code).turn]


@pytest.mark.usefixtures("four_gpus")
def test_servers_come_after_the_learners_and_the_evaluator_is_last() -> None:
    served = {"actors": 3, "inference.kind": "served", "inference.servers": 3, "inference.device": "cuda"}
    assert turns(experiment(device="cuda", **served)) == [1, 2, 3, -1]
    assert turns(experiment(device="cuda", learners=2, **served)) == [2, 3, 4, -1]
    assert turns(experiment(device="cpu", **served)) == [0, 1, 2, -1], "no learner is on a GPU"
    assert turns(experiment(device="cuda", **{"parallel.tensor": 3}, **served)) == [3, 4, 5, -1]
    inline = experiment(placement="inline", device="cuda", **served)
    assert turns(inline) == [None] * 4, "one process has one GPU"


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["cpu", "cuda"]))
@settings(max_examples=40, deadline=None)
def test_a_plan_tells_where_roles_really_are(gpus: int, learners: int, count: int, device: str) -> None:
    asked = {"actors": count, "learners": learners, "inference.kind": "served", "inference.servers": count}
    run = experiment(device=device, **asked, **{"inference.device": "cuda"})
    plan = planned(gpus, busy_gpus(ON_GPU if device == "cuda" else ON_CPU), run, tuple(asked))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        *serving, evaluating = (in_turn(turn or 0, gpus) for turn in turns(apply_plan(run, plan)))
    users = [text.split(": ")[1].split(", ") for text in plan.reasons["GPUs"].split("; ")]
    for index, gpu in enumerate(serving):
        assert f"inference server {index}" in users[gpu]
    for rank in range(learners if device == "cuda" else 0):
        assert f"learner {rank}" in users[in_turn(rank, gpus)] or users[0][0] == "learner"
    assert ("evaluator" in users[evaluating]) == (device == "cuda")


# ---------------------------------------------------------------- what a plan makes of them


@given(any_measurements, seconds, st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_gpus_that_learners_need_change_nothing(measured: Measurements, act: float, learners: int, fewer: int) -> None:
    measured = measured.replace(learners=(ON_GPU,), act_cuda=tuple((size, act) for size in (4, 64, 256)))
    run = experiment(learners=learners)
    one, several = (planned(gpus, measured, run, ("learners",)) for gpus in (1, max(1, learners - fewer)))
    several = several.replace(resources=one.resources, reasons={**several.reasons, "GPUs": ""})
    assert several == one.replace(reasons={**one.reasons, "GPUs": ""})


@given(any_measurements, seconds, seconds, st.integers(1, 4), st.integers(0, 4))
@settings(max_examples=30, deadline=None)
def test_more_gpus_are_never_slower_and_never_have_two_servers(
    measured: Measurements, act: float, each: float, gpus: int, more: int
) -> None:
    measured = measured.replace(learners=(ON_GPU,), act_cuda=tuple((n, act + n * each / 16) for n in (4, 64, 256)))
    few, many = planned(gpus, measured), planned(gpus + more, measured)
    assert (many.env_steps_per_s or 0) >= (1 - ALIKE) * (few.env_steps_per_s or 0)
    assert servers(few) <= max(1, gpus - 1)
    assert servers(many) <= min(max(1, gpus + more - 1), int(many.settings["actors"]))


def test_servers_that_hold_a_run_up_get_the_gpus_that_no_learner_has() -> None:
    plans = {gpus: planned(gpus, busy_gpus()) for gpus in (1, 2, 4)}
    assert [servers(plan) for plan in plans.values()] == [1, 1, 3]
    assert (plans[4].env_steps_per_s or 0) > 2.5 * (plans[2].env_steps_per_s or 0)
    assert "GPUs" not in plans[1].reasons
    assert plans[2].reasons["GPUs"] == "0 (a GPU, 80 GiB): learner; 1 (a GPU, 80 GiB): inference server 0, evaluator"
    assert plans[4].reasons["GPUs"].endswith("3 (a GPU, 80 GiB): inference server 2, evaluator")
    assert getattr(apply_plan(experiment(), plans[4]).inference, "servers", 0) == 3


@pytest.mark.parametrize(
    ("learner", "learners", "free"), [(ON_GPU, 2, 2), (ON_GPU, 3, 1), (ON_GPU, 8, 1), (ON_CPU, 2, 4)]
)
def test_learners_leave_fewer_gpus_to_servers_where_they_take_some(
    learner: LearnerCost, learners: int, free: int
) -> None:
    assert servers(planned(4, busy_gpus(learner), experiment(learners=learners), ("learners",))) == free


def test_a_plan_names_servers_that_hold_it_up() -> None:
    overlapped = busy_gpus().replace(two_groups=0.7)
    assert "limited by the inference server (cuda)" in planned(2, overlapped).reasons["actors"]
    assert "limited by the inference servers (cuda)" in planned(4, overlapped).reasons["actors"]


def test_one_server_is_enough_where_it_is_waited_for_no_more() -> None:
    quick = busy_gpus().replace(act_cuda=((4, 50 * US), (256, 60 * US)))
    assert servers(planned(8, quick)) == 1


def test_what_nobody_uses_is_told() -> None:
    alone = planned(2, measurements(act=1 * US, learners=(ON_GPU,)), experiment(**{"evaluation.device": "cpu"}))
    assert alone.reasons["GPUs"].endswith("1 (a GPU, 80 GiB): nobody")


def test_servers_that_the_user_wants_are_as_many_on_any_number_of_gpus() -> None:
    run = experiment(actors=2, **{"inference.kind": "served", "inference.servers": 2})
    fixed = ("actors", "inference.kind", "inference.servers")
    assert [servers(planned(gpus, busy_gpus(), run, fixed)) for gpus in (1, 2, 8)] == [2, 2, 2]


def test_where_inference_can_be_moved_the_other_side_has_its_servers_too() -> None:
    asked: dict[str, Any] = {"actors": 8, "inference.kind": "adaptive", "inference.device": "cuda"}
    run = experiment(**asked)
    slower = measurements(env=30 * US, act=13 * US, learners=(ON_GPU,), act_cuda=((4, 400 * US), (256, 12_000 * US)))
    plan = planned(4, slower, run, tuple(asked))
    moved = apply_plan(run, plan).inference
    assert (moved.kind, getattr(moved, "begins", "")) == ("adaptive", "local")
    assert servers(plan) == getattr(moved, "servers", 0) > 1
    assert "inference server 1" in plan.reasons["GPUs"]
