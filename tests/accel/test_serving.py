"""Batches of any size have the values of the network itself: as they are on a CPU, padded and recorded on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.accel.serving import BatchedValues
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import EnvSpec, LeafSpec

SPEC = EnvSpec(
    name="toy",
    observations={"position": LeafSpec(shape=(3,), dtype="float32"), "picture": LeafSpec(shape=(2, 2), dtype="uint8")},
    actions=2,
)
NETWORK = MlpConfig(hidden=(8,))
CAPACITY = 40
AGENTS = {
    "plain": ReplayAgent(),
    "noisy": ReplayAgent(noisy=True),
    "recurrent": ReplayAgent(memory=MemoryConfig(hidden=4)),
}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(agent: ReplayAgent, device: str = "cpu", recorded: bool = False) -> tuple[BatchedValues, QNetwork]:
    network = build_network(NETWORK, agent, SPEC, seed=1).to(device).explore()
    FlatParameters(network)
    generator = torch.Generator(device).manual_seed(2)
    served = BatchedValues(network, SPEC.observations, SPEC.actions, CAPACITY, generator, recorded=recorded)
    return served, network


def fill(served: BatchedValues, rows: int, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    served.inputs["position"][:rows] = rng.normal(size=(rows, 3))
    served.inputs["picture"][:rows] = rng.integers(256, size=(rows, 2, 2))
    served.states[:rows] = rng.normal(size=served.states[:rows].shape)
    served.states[:rows, -1:] = 1
    observation = {name: torch.from_numpy(leaf[:rows].copy()) for name, leaf in served.inputs.items()}
    return observation, torch.from_numpy(served.states[:rows].copy())


@pytest.mark.parametrize("name", ["plain", "recurrent"])
@given(sizes=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_on_a_cpu_the_values_are_those_of_the_network_to_the_bit(name, sizes):
    served, network = make(AGENTS[name])
    rng = np.random.default_rng(0)
    for rows in sizes:
        observation, state = fill(served, rows, rng)
        with torch.inference_mode():
            q, after = network.recall(observation, state) if network.recurrent else (network.q(observation), state)
        values, memory = served(rows)
        np.testing.assert_array_equal(values, q.numpy())
        np.testing.assert_array_equal(memory, after.numpy())


def test_each_batch_of_a_noisy_network_has_noise_of_its_own():
    served, _ = make(AGENTS["noisy"])
    fill(served, 4, np.random.default_rng(0))
    first = served(4)[0].copy()
    assert not np.array_equal(served(4)[0], first)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", ["plain", "recurrent"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_on_a_gpu_padding_and_recording_change_no_value_and_new_weights_count(device, name, recorded):
    served, network = make(AGENTS[name], device, recorded)
    rng = np.random.default_rng(0)
    for rows in (1, 5, 16, 17, 40, 3, 5, 5, 5, 5, 33, 40, 40, 40, 40):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.01)
        observation, state = fill(served, rows, rng)
        on_device = {leaf: tensor.to(device) for leaf, tensor in observation.items()}
        with torch.inference_mode():
            q, after = (
                network.recall(on_device, state.to(device)) if network.recurrent else (network.q(on_device), state)
            )
        values, memory = served(rows)
        np.testing.assert_allclose(values, q.cpu().numpy(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(memory, after.cpu().numpy(), rtol=1e-5, atol=1e-5)
