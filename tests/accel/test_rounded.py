"""Networks that act in bfloat16 by weights that were rounded beforehand: autocast's values, and never older weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.precision import autocast
from qfleet.accel.rounded import Rounded
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.torsos import ImpalaConfig, MlpConfig, NatureConfig, SmallCnnConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec

FRAMES = EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=4)
GRID = EnvSpec(name="grid", observations={PLAIN: LeafSpec(shape=(4, 10, 10), dtype="uint8")}, actions=4)
VECTOR = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(5,), dtype="float32")}, actions=4)
CASES = {
    "nature": (NatureConfig(), FRAMES, ReplayAgent(dueling=True)),
    "padded": (NatureConfig(padding="same"), FRAMES, ReplayAgent()),
    "spectral": (NatureConfig(spectral_norm=True), FRAMES, ReplayAgent()),
    "impala": (ImpalaConfig(), FRAMES, ReplayAgent()),
    "small": (SmallCnnConfig(layer_norm=True), GRID, ReplayAgent()),
    "categorical": (MlpConfig(hidden=(64,)), VECTOR, ReplayAgent(head=CategoricalConfig())),
    "quantile": (MlpConfig(hidden=(64,)), VECTOR, ReplayAgent(head=QuantileConfig())),
    "implicit": (MlpConfig(hidden=(64,)), VECTOR, ReplayAgent(head=ImplicitQuantileConfig())),
    "noisy": (MlpConfig(hidden=(64,)), VECTOR, ReplayAgent(noisy=True)),
    "vector": (MlpConfig(hidden=(64, 64)), VECTOR, ReplayAgent()),
}
NEAR = 2.0**-7
"""How far products may be apart that were summed in another order, for values of about 1: one bit of bfloat16."""


def network_of(name: str) -> QNetwork:
    config, spec, agent = CASES[name]
    return build_network(config, agent, spec, seed=0).explore()


def seen(spec: EnvSpec, rows: int) -> dict[str, Tensor]:
    rng, leaf = np.random.default_rng(rows), spec.observations[PLAIN]
    values = rng.integers(256, size=(rows, *leaf.shape)) if leaf.dtype == "uint8" else rng.normal(size=(rows, 5))
    return {PLAIN: torch.from_numpy(values.astype(leaf.dtype))}


def by_autocast(network: QNetwork, observation: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode(), autocast("bf16", torch.device("cpu")):
        return network.q(observation)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 16])
def test_values_are_those_of_weights_that_are_rounded_at_each_call(name, rows):
    observation = seen(CASES[name][1], rows)
    network, plain = network_of(name), network_of(name)
    compute_by_onednn(network, AccelConfig(), foreign=False)
    rounded = Rounded(network, "bf16", foreign=False)
    with torch.inference_mode():
        found, exact = rounded.values(observation), plain.q(observation)
    assert found.dtype == torch.float32, "NumPy, and so an actor, knows no bfloat16"
    torch.testing.assert_close(found, by_autocast(plain, observation), rtol=0, atol=NEAR)
    assert 0 < (found - exact).abs().max() < 10 * NEAR


@pytest.mark.parametrize("name", ["nature", "vector"])
def test_new_weights_count_once_they_are_renewed(name):
    observation = seen(CASES[name][1], 2)
    network = network_of(name)
    flat, rounded = FlatParameters(network), Rounded(network, "bf16", foreign=False)
    with torch.inference_mode():
        before = rounded.values(observation)
        flat.load_numpy(2 * flat.to_numpy())
        assert torch.equal(rounded.values(observation), before)
        rounded.renew()
        after = rounded.values(observation)
    twice = network_of(name)
    FlatParameters(twice).load_numpy(flat.to_numpy())
    torch.testing.assert_close(after, by_autocast(twice, observation), rtol=NEAR, atol=NEAR)
    assert not torch.equal(after, before)


def test_what_is_sent_and_saved_of_a_network_has_no_rounded_copies():
    network, plain = network_of("nature"), network_of("nature")
    Rounded(network, "bf16", foreign=False)
    assert list(network.state_dict()) == list(plain.state_dict())
    np.testing.assert_array_equal(FlatParameters(network).to_numpy(), FlatParameters(plain).to_numpy())


@pytest.mark.parametrize(("precision", "foreign"), [("fp32", False), ("bf16", True)])
def test_networks_in_float32_and_those_of_ones_own_are_left_as_they_are(precision, foreign):
    network = network_of("nature")
    Rounded(network, precision, foreign)
    assert {type(module) for module in network.modules()} >= {nn.Conv2d, nn.Linear}
