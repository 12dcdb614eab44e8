"""Fused runs that do not fit their device are refused before they begin, with what would fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from qfleet.core.errors import ConfigError
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import FusedSetup, memory
from qfleet.roles.fused.memory import (
    MODEL_COPIES,
    data_bytes,
    device_memory,
    evaluation_bytes,
    pass_bytes,
    require_memory,
)
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.roles.learner_setup import GroupConfig
from qfleet.setups import fused_setup

PARAMETERS = 10_000


def setup(algo: str = "dqn", **changes: Any) -> FusedSetup:
    game = {"env.kind": "tensor", "env.game": "catch", "device": "cpu"}
    experiment = with_changes(apply(preset("catch"), algo), {**game, **changes})
    return fused_setup(experiment, env_spec(experiment.env), UserCode())


def need(run: FusedSetup) -> int:
    return data_bytes(run)[0] + 4 * MODEL_COPIES * PARAMETERS + pass_bytes(run) + evaluation_bytes(run)


@pytest.mark.parametrize("algo", ["dqn", "prioritised", "pqn"])
def test_a_run_is_refused_exactly_when_it_does_not_fit(algo: str) -> None:
    run = setup(algo)
    require_memory(run, PARAMETERS, available=need(run))
    with pytest.raises(ConfigError, match=r"model 0\.\d\d GiB .* available"):
        require_memory(run, PARAMETERS, available=need(run) - 1)


@pytest.mark.parametrize("algo", ["dqn", "prioritised"])
def test_the_largest_capacity_that_is_named_fits_and_one_tick_more_does_not(algo: str) -> None:
    run = setup(algo, **{"replay.capacity": 30_000_000})
    available = need(run) // 3
    with pytest.raises(ConfigError) as refused:
        require_memory(run, PARAMETERS, available)
    largest = int(re.search(r"replay\.capacity to at most ([\d,]+)", str(refused.value))[1].replace(",", ""))
    assert 0 < largest < 30_000_000
    require_memory(_with_capacity(run, largest), PARAMETERS, available)
    with pytest.raises(ConfigError):
        require_memory(_with_capacity(run, largest + run.actor.envs), PARAMETERS, available)


def test_the_most_environments_that_are_named_fit_and_one_more_does_not() -> None:
    run = setup("pqn", **{"actor.envs": 60_000})
    available = need(run) // 5
    with pytest.raises(ConfigError) as refused:
        require_memory(run, PARAMETERS, available)
    most = int(re.search(r"actor\.envs to at most ([\d,]+)", str(refused.value))[1].replace(",", ""))
    require_memory(_with_envs(run, most), PARAMETERS, available)
    with pytest.raises(ConfigError):
        require_memory(_with_envs(run, most + 1), PARAMETERS, available)


def test_of_several_loops_only_those_on_the_same_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupConfig(rank=1, size=4, rendezvous="file:///nowhere")
    run = replace(setup("dqn"), group=group, device="cuda:1")
    monkeypatch.setattr(memory, "device_memory", lambda device: need(run))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    require_memory(run, PARAMETERS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="does not fit the memory of device 'cuda:1'"):
        require_memory(run, PARAMETERS)


def test_where_nothing_fits_no_capacity_is_named() -> None:
    with pytest.raises(ConfigError, match=r"No replay\.capacity would fit"):
        require_memory(setup(), PARAMETERS, available=1000)


def test_what_is_reckoned_for_a_replay_is_what_its_tensors_take() -> None:
    run = setup("prioritised")
    grid = ReplayLoop(run).grid
    held = sum(column.numel() * column.element_size() for column in grid._columns().values())
    assert data_bytes(run)[0] == pytest.approx(held, rel=0.5)
    assert data_bytes(run)[0] >= held


def test_memory_of_the_cpu_is_that_of_the_machine() -> None:
    assert device_memory(torch.device("cpu")) > 2**20


def _with_capacity(run: FusedSetup, capacity: int) -> FusedSetup:
    return replace(run, replay=run.replay.replace(capacity=capacity))


def _with_envs(run: FusedSetup, envs: int) -> FusedSetup:
    return replace(run, actor=run.actor.replace(envs=envs))
