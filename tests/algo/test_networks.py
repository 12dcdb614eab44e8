"""Networks: every torso with every head, input handling, randomness, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algo_cases import GRID, MIXED, PIXELS, STATES, VECTOR, leaves
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig, ScalarConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.layers import NoisyLinear
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import (
    CustomConfig,
    ImpalaConfig,
    MlpConfig,
    NatureConfig,
    SmallCnnConfig,
    TabularConfig,
)
from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec

HEADS = [
    (ScalarConfig(), ()),
    (CategoricalConfig(atoms=7), (7,)),
    (QuantileConfig(quantiles=9), (9,)),
    (ImplicitQuantileConfig(acting_taus=5, cosines=8), (5,)),
]


def tensors(spec, *batch, seed=0):
    return {k: torch.from_numpy(np.asarray(v)) for k, v in leaves(spec, np.random.default_rng(seed), *batch).items()}


def parameters(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


class TwoLayers(nn.Module):
    """A user's torso for a plain observation."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.first = nn.Linear(spec.observations[PLAIN].shape[0], 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()


class DictTorso(nn.Module):
    """A user's torso for a Dict observation."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        assert set(x) == set(MIXED.observations)
        return torch.cat([x["camera.front"].mean((1, 2)), x["speed"], x["gear"]], 1)


class Sideways(nn.Module):
    """A torso that breaks the contract."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1)


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("head", "entries"), HEADS)
@pytest.mark.parametrize(
    ("config", "spec", "custom"),
    [
        (MlpConfig(hidden=(8, 8), layer_norm=True, dropout=0.2, spectral_norm=True), VECTOR, None),
        (MlpConfig(hidden=()), MIXED, None),
        (SmallCnnConfig(channels=(4, 4), dense=8, layer_norm=True), MIXED, None),
        (SmallCnnConfig(channels=(3,), dense=0, spectral_norm=True), GRID, None),
        (CustomConfig(dense=8), VECTOR, TwoLayers),
        (CustomConfig(), MIXED, DictTorso),
    ],
)
def test_shapes_and_gradients(config, spec, custom, head, entries, noisy, dueling):
    network = build_network(config, ReplayAgent(head=head, noisy=noisy, dueling=dueling), spec, 0, custom)
    network.resample_noise(torch.Generator().manual_seed(0))
    observation = tensors(spec, 6)
    output = network(observation)
    assert output.shape == (6, spec.actions, *entries)
    assert network.q(observation).shape == (6, spec.actions)
    assert all(p.dtype == torch.float32 for p in network.parameters())
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (NatureConfig(), 3136),
        (NatureConfig(padding="same"), 64 * 11 * 11),
        (ImpalaConfig(), 32 * 11 * 11),
        (ImpalaConfig(width=2, pool=6, spectral_norm=True, dense=512), 64 * 36),
    ],
)
def test_pixel_networks_of_the_literature(config, features):
    network = build_network(config, ReplayAgent(dueling=True), PIXELS, 0)
    assert network.torso.features == features
    assert network(tensors(PIXELS, 2)).shape == (2, 6)


def test_nature_network_has_the_published_size():
    network = build_network(NatureConfig(), ReplayAgent(), PIXELS, 0)
    # 8x8x4x32+32, 4x4x32x64+64, 3x3x64x64+64, 3136x512+512, 512x6+6
    assert len(parameters(network)) == 8224 + 32832 + 36928 + 1606144 + 3078


@given(height=st.integers(1, 90), width=st.integers(1, 90))
def test_padded_convolutions_keep_one_position_of_every_stride(height, width):
    """8 pixels become one: the strides are 4, 2 and 1."""
    spec = EnvSpec(name="any", observations={PLAIN: LeafSpec(shape=(1, height, width), dtype="uint8")}, actions=2)
    network = build_network(NatureConfig(padding="same", dense=0), ReplayAgent(), spec, 0)
    assert network.torso.features == 64 * math.ceil(math.ceil(height / 4) / 2) * math.ceil(math.ceil(width / 4) / 2)


def test_padding_is_tensorflows_for_the_image_turned_round():
    """Convolve by hand with the rows that TensorFlow's "SAME" adds: 2 and 2, 1 and 2, 1 and 1 for 84 pixels."""
    network = build_network(NatureConfig(padding="same"), ReplayAgent(), PIXELS, 0)
    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    image = torch.rand(2, 4, 84, 84, generator=torch.Generator().manual_seed(0))
    ours, turned = image, image.flip(2, 3)
    for conv, (before, after) in zip(convs, ((2, 2), (1, 2), (1, 1)), strict=True):
        ours = conv(ours).relu()
        edges = nn.functional.pad(turned, (before, after, before, after))
        turned = nn.functional.conv2d(edges, conv.weight.flip(2, 3), conv.bias, conv.stride).relu()
    torch.testing.assert_close(ours, turned.flip(2, 3))


def test_glorots_beginning_fills_its_bounds_and_leaves_nothing_in_the_biases():
    network = build_network(NatureConfig(initialisation="glorot"), ReplayAgent(), PIXELS, seed=1)
    layers = [module for module in network.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert len(layers) == 5
    for layer in layers:
        inputs, outputs = (layer.weight[0].numel(), layer.weight[:, 0].numel())
        bound = (6 / (inputs + outputs)) ** 0.5
        assert 0.95 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()


def test_building_is_deterministic_and_leaves_the_global_stream_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    agent = ReplayAgent(noisy=True, head=QuantileConfig(quantiles=3))
    first, second = (build_network(MlpConfig(spectral_norm=True), agent, VECTOR, 7) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    other = build_network(MlpConfig(spectral_norm=True), agent, VECTOR, 8)
    assert not torch.equal(parameters(first), parameters(other))


@pytest.mark.parametrize(("head", "entries"), HEADS)
def test_dueling_advantages_have_mean_zero(head, entries):
    network = build_network(MlpConfig(hidden=(8, 8)), ReplayAgent(head=head, dueling=True), VECTOR, 0)
    observation = tensors(VECTOR, 5)
    before = network(observation)
    value = before.mean(1)
    with torch.no_grad():  # a shift of all advantages is not seen, a shift of the value is
        network.head.streams.advantage[-1].bias += 3.0
        torch.testing.assert_close(network(observation), before)
        network.head.streams.value[-1].bias += 2.0
        torch.testing.assert_close(network(observation).mean(1), value + 2)


def test_trap_10_noise_changes_with_each_draw_and_is_off_in_evaluation():
    network = build_network(MlpConfig(), ReplayAgent(noisy=True, dueling=True), VECTOR, 0)
    observation = tensors(VECTOR, 4)
    generator = torch.Generator().manual_seed(1)
    silent = network.eval()(observation)
    network.resample_noise(generator)
    assert torch.equal(network.eval()(observation), silent)
    first = network.explore()(observation)
    assert torch.equal(network(observation), first)
    network.resample_noise(generator)
    second = network(observation)
    assert not torch.equal(first, silent)
    assert not torch.equal(first, second)
    network.resample_noise(torch.Generator().manual_seed(1))
    assert torch.equal(network(observation), first)


def test_noise_is_factorised_with_the_published_scale_and_never_published():
    layer = NoisyLinear(400, 300)
    layer.resample(torch.Generator().manual_seed(0))
    assert set(dict(layer.state_dict())) == {"weight", "bias", "weight_sigma", "bias_sigma"}
    assert torch.equal(layer.weight_sigma, torch.full((300, 400), 0.5 / 20))
    # E|x| of a normal is sqrt(2 / pi): the variance of sign(x) sqrt|x|
    assert abs(layer.noise_in.var().item() - 0.798) < 0.1
    x = torch.randn(3, 400, generator=torch.Generator().manual_seed(1))
    weight = layer.weight + layer.weight_sigma * layer.noise_out[:, None] * layer.noise_in[None, :]
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias + layer.bias_sigma * layer.noise_out)


def test_dropout_is_drawn_from_the_given_generator_and_only_in_training():
    network = build_network(MlpConfig(dropout=0.5), ReplayAgent(), VECTOR, 0)
    observation = tensors(VECTOR, 8)
    torch.manual_seed(0)
    global_state = torch.get_rng_state()
    outputs = []
    for seed in (1, 1, 2):
        network.set_generator(torch.Generator().manual_seed(seed))
        outputs.append(network(observation))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(torch.get_rng_state(), global_state)
    assert torch.equal(network.explore()(observation), network.eval()(observation))


def test_implicit_quantiles_rise_with_the_fraction_given_and_are_fixed_without():
    network = build_network(MlpConfig(), ReplayAgent(head=ImplicitQuantileConfig(acting_taus=4)), VECTOR, 0)
    observation = tensors(VECTOR, 3)
    fixed = torch.tensor([[0.125, 0.375, 0.625, 0.875]]).expand(3, -1)
    torch.testing.assert_close(network(observation), network(observation, fixed))
    assert network(observation, torch.rand(3, 9, generator=torch.Generator().manual_seed(0))).shape == (3, 3, 9)
    shuffled = network(observation, fixed.flip(1))
    torch.testing.assert_close(shuffled.flip(2), network(observation, fixed))


def test_pixels_are_scaled_and_stacks_of_colour_frames_become_channels():
    shape = (2, 8, 6, 3)  # stack, height, width, colours
    spec = EnvSpec(name="x", observations={PLAIN: LeafSpec(shape=shape, dtype="uint8", stack=2)}, actions=2)
    network = build_network(SmallCnnConfig(channels=(5,)), ReplayAgent(), spec, 0)
    image = tensors(spec, 3)
    prepared = network.torso.inputs(image)[PLAIN]
    torch.testing.assert_close(prepared, image[PLAIN].float() / 255)
    seen = []
    network.torso.body.images[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    network(image)
    assert seen[0].shape == (3, 6, 8, 6)
    torch.testing.assert_close(seen[0][:, 4], prepared[:, 1, :, :, 1])


def test_a_fixed_scale_multiplies_the_numbers_of_all_leaves_in_order():
    network = build_network(MlpConfig(input=InputConfig(scale=(2.0, 0.5))), ReplayAgent(), MIXED, 0)
    observation = tensors(MIXED, 4)
    prepared = network.torso.inputs(observation)
    torch.testing.assert_close(prepared["speed"], observation["speed"] * torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(prepared["camera.front"], observation["camera.front"].float() / 255)
    assert prepared["gear"].shape == (4, 5)
    assert torch.equal(prepared["gear"].argmax(1), observation["gear"])
    single = build_network(MlpConfig(input=InputConfig(scale=(3.0,))), ReplayAgent(), MIXED, 0)
    torch.testing.assert_close(single.torso.inputs(observation)["speed"], observation["speed"] * 3)
    with pytest.raises(ConfigError, match="has 3 entries, but the observation has 2 numbers"):
        build_network(MlpConfig(input=InputConfig(scale=(1.0, 2.0, 3.0))), ReplayAgent(), MIXED, 0)


def test_running_normalisation_equals_the_statistics_of_all_it_has_seen():
    network = build_network(MlpConfig(input=InputConfig(normalize=True, clip=2.5)), ReplayAgent(), VECTOR, 0)
    rng = np.random.default_rng(0)
    data = (rng.standard_normal((300, 4)) * [1, 10, 0.1, 3] + [0, 5, -2, 100]).astype(np.float32)
    for part in np.split(data, [7, 50, 51, 200]):
        network.observe({PLAIN: torch.from_numpy(part)})
    expected = ((data - data.mean(0)) / data.std(0)).clip(-2.5, 2.5)
    found = network.torso.inputs({PLAIN: torch.from_numpy(data)})[PLAIN].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert "torso.inputs.stages.0.mean" in network.state_dict()


def test_embedded_categories_are_learned_vectors():
    network = build_network(MlpConfig(input=InputConfig(embedding=3)), ReplayAgent(), MIXED, 0)
    observation = tensors(MIXED, 4)
    assert network.torso.inputs(observation)["gear"].shape == (4, 3)
    network(observation).sum().backward()
    assert network.torso.inputs.stages[2].weight.grad.abs().sum() > 0


def test_spectral_norm_bounds_the_torsos_layers():
    network = build_network(MlpConfig(hidden=(32, 32, 8), spectral_norm=True), ReplayAgent(), VECTOR, 0)
    layer = network.torso.body.layers[2]
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(50)
    for _ in range(30):
        network(tensors(VECTOR, 2))
    assert abs(torch.linalg.matrix_norm(layer.weight, 2).item() - 1) < 1e-2


def test_a_table_is_looked_up():
    network = build_network(TabularConfig(initial=2.5), TabularAgent(), STATES, 0)
    with torch.no_grad():
        network.head.table[3, 1] = 7
    assert network.q({PLAIN: torch.tensor([3, 0])}).tolist() == [[2.5, 7], [2.5, 2.5]]


@pytest.mark.parametrize(
    ("config", "agent", "spec", "custom", "words"),
    [
        (NatureConfig(), ReplayAgent(), GRID, None, "'nature' cannot take the observations of grid"),
        (NatureConfig(), ReplayAgent(), VECTOR, None, "needs an image; vector has observation"),
        (TabularConfig(), TabularAgent(), VECTOR, None, "needs a single Discrete observation"),
        (TabularConfig(), ReplayAgent(), STATES, None, "need each other"),
        (MlpConfig(), TabularAgent(), STATES, None, "need each other"),
        (CustomConfig(), ReplayAgent(), VECTOR, None, "pass network=MyNet"),
        (CustomConfig(), ReplayAgent(), VECTOR, Sideways, r"'Sideways' must return features of shape \(batch, F\)"),
        (CustomConfig(), ReplayAgent(), MIXED, TwoLayers, "'TwoLayers' could not be built for mixed: KeyError"),
    ],
)
def test_networks_that_do_not_fit_are_refused(config, agent, spec, custom, words):
    with pytest.raises(ConfigError, match=words):
        build_network(config, agent, spec, 0, custom)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ReplayAgent(double=True, munchausen=MunchausenConfig()),
        lambda: ReplayAgent(head=CategoricalConfig(), munchausen=MunchausenConfig()),
        lambda: ReplayAgent(head=QuantileConfig(), loss="mse"),
        lambda: CategoricalConfig(v_min=1, v_max=1),
        lambda: InputConfig(scale=(1.0,), normalize=True),
        lambda: ReplayAgent(gamma=1.5),
        lambda: MlpConfig(hidden=(0,)),
        lambda: RolloutAgent(q_lambda=-0.1),
    ],
)
def test_contradictory_settings_are_refused(build):
    with pytest.raises(ValidationError):
        build()
