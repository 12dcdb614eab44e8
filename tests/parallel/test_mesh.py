"""Meshes of ranks: coordinates, refusals, and one rank alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_cases import CASES, batch_of, network_of, split, unsplit
from torch import distributed

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.recurrent import MemoryConfig
from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.parallel.mesh import Degrees, Mesh, check_degrees
from qfleet.parallel.split_update import SplitUpdate

DEGREE = st.integers(1, 5)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Mesh]:
    mesh = Mesh(Degrees(), 0, 1, f"file://{tmp_path}/meet", "cpu", 10.0)
    yield mesh
    mesh.close()


def test_ranks_of_one_machine_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch would take the address of the host's name, which other machines may reach."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    Mesh(Degrees(), 0, 1, f"file://{tmp_path}/meet", "cpu", 10.0).close()
    addresses = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [one.address for one in addresses]


@given(DEGREE, DEGREE, DEGREE)
@settings(max_examples=50, deadline=None)
def test_every_rank_has_its_own_place_and_tensor_ranks_are_neighbours(data: int, pipeline: int, tensor: int) -> None:
    degrees = Degrees(data, pipeline, tensor)
    places = [degrees.place(rank) for rank in range(degrees.size)]
    expected = [Degrees(d, p, t) for d in range(data) for p in range(pipeline) for t in range(tensor)]
    assert places == expected
    check_degrees(degrees, degrees.size)


@pytest.mark.parametrize(
    ("degrees", "size", "message"),
    [
        (Degrees(2, 2, 1), 3, "needs 4 ranks, and there are 3: start 4 learners, or ask for data 3 x pipeline 1"),
        (Degrees(1, 1, 2), 4, "needs 2 ranks, and there are 4: .* ask for data 2 x pipeline 1 x tensor 2"),
        (Degrees(0, 1, 1), 1, "each degree must be at least 1"),
    ],
)
def test_degrees_that_are_no_mesh_are_refused_with_some_that_are(degrees: Degrees, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh(degrees, 0, size, "file:///nowhere", "cpu", 1.0)


def test_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        Mesh(Degrees(data=2), 2, 2, "file:///nowhere", "cpu", 1.0)


@pytest.mark.parametrize(("count", "message"), [(0, "there is none here: use device 'cpu'"), (1, "start 1 learners")])
def test_nccl_without_enough_gpus_is_refused(count: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=message):
        Mesh(Degrees(data=2), 0, 2, "file:///nowhere", "cuda", 1.0)


def test_nobody_else_comes_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="rank 0 of 2: meeting at"):
        Mesh(Degrees(data=2), 0, 2, f"file://{tmp_path}/meet", "cpu", 0.5)
    assert time.monotonic() - began < 10
    assert not distributed.is_initialized()


def test_second_mesh_in_one_process_is_refused(alone: Mesh, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its own process"):
        Mesh(Degrees(), 0, 1, f"file://{tmp_path}/other", "cpu", 1.0)


def test_mesh_of_one_rank_is_the_unsplit_update(alone: Mesh) -> None:
    update, expected = split("mlp", alone), unsplit("mlp")
    for seed in range(3):
        found, wanted = update(batch_of("mlp", seed)), expected(batch_of("mlp", seed))
        assert np.array_equal(found.priority, wanted.priority)  # type: ignore[arg-type]
    update.assemble()
    np.testing.assert_allclose(update.flat.to_numpy(), expected.flat.to_numpy(), rtol=1e-6, atol=1e-7)
    assert update.learning_rate == expected.learning_rate


def test_batch_for_several_updates_makes_them(alone: Mesh) -> None:
    update, expected = split("mlp", alone), unsplit("mlp")
    batch = replace(batch_of("mlp", 0), updates=2)
    found, wanted = update(batch), expected(batch)
    assert (found.updates, update.updates) == (2, 2)
    np.testing.assert_allclose(found.priority, wanted.priority, rtol=1e-5)  # type: ignore[arg-type]


def test_hook_takes_the_place_of_the_sum_over_replicas(alone: Mesh) -> None:
    seen: list[torch.Tensor] = []
    _, agent, _, optim = CASES["mlp"]
    update = SplitUpdate(
        agent, network_of("mlp"), optim, torch.Generator(), alone, hook=lambda flat: seen.append(flat.clone())
    )
    update(batch_of("mlp", 0))
    assert [len(flat) for flat in seen] == [update.flat.parameters.numel()]


@pytest.mark.parametrize("agent", [RolloutAgent(), ReplayAgent(memory=MemoryConfig())], ids=["rollout", "memory"])
def test_agents_without_transitions_are_refused(agent: Any, alone: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"learns from replayed transitions only.*use data parallelism"):
        SplitUpdate(agent, network_of("mlp"), CASES["mlp"][3], torch.Generator(), alone)


def test_state_of_another_network_is_refused(alone: Mesh) -> None:
    update = split("mlp", alone)
    with pytest.raises(ConfigError, match="other settings"):
        update.load_state_dict(unsplit("norm").state_dict())
    state = unsplit("mlp").state_dict()
    state["step"]["optim"]["moments"] = {"exp_avg": torch.zeros(7)}
    with pytest.raises(CheckpointError, match="size 7 does not fit"):
        update.load_state_dict(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_on_a_gpu_learns_as_on_a_cpu(sharded: bool, tmp_path: Path) -> None:
    expected = unsplit("nature")
    mesh = Mesh(Degrees(), 0, 1, f"file://{tmp_path}/meet", "cuda", 30.0)
    try:
        _, agent, _, optim = CASES["nature"]
        update = SplitUpdate(agent, network_of("nature"), optim, torch.Generator("cuda"), mesh, sharded=sharded)
        for seed in range(2):
            update(batch_of("nature", seed))
            expected(batch_of("nature", seed))
        update.assemble()
        np.testing.assert_allclose(update.flat.to_numpy(), expected.flat.to_numpy(), rtol=1e-2, atol=1e-3)
    finally:
        mesh.close()
