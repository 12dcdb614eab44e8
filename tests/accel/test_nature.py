from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bfloat16_products import _bfloat16_products  # noqa: F401  (a fixture for every test here)
from compile_for_hopper import compile_for_hopper
from torch import Tensor, nn

from qfleet.accel.kernels.conv import Tile
from qfleet.accel.nature import NatureGradient, supports
from qfleet.accel.nature_tiles import NatureTiles, tiles_for
from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import CategoricalConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.torsos import ImpalaConfig, MlpConfig, NatureConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch

BATCH, ACTIONS = 2, 5
FEW = NatureTiles(  # few programs: the interpreter's time goes by them
    conv1=Tile(512, 32, 64, 4, 2),
    conv2=Tile(256, 64, 64, 4, 2),
    conv3=Tile(256, 64, 64, 4, 2),
    dense=Tile(16, 128, 64, 4, 2),
    dense_splits=7,
    head_together=True,
    dense_input=Tile(16, 64, 128, 4, 2),
    conv3_input=Tile(256, 64, 64, 4, 2),
    conv2_input=Tile(256, 128, 64, 4, 2),
    dense_weight=Tile(64, 128, 16, 4, 2),
    conv3_weight=Tile(64, 64, 64, 4, 2),
    conv2_weight=Tile(256, 64, 64, 4, 2),
    conv1_weight=Tile(128, 64, 256, 4, 2),
    conv3_splits=2,
    conv2_splits=1,
    conv1_splits=3,
    head_splits=2,
)


def make_spec(*shape: int, dtype: str = "uint8") -> EnvSpec:
    return EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=shape, dtype=dtype, stack=4)}, actions=ACTIONS)


def make_network(config: Any, agent: Any, seed: int = 1, spec: EnvSpec | None = None) -> QNetwork:
    return build_network(config, agent, spec or make_spec(4, 84, 84), seed)


def make_batch(device: torch.device) -> TensorBatch:
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 256, (2, BATCH, 4, 84, 84), generator=generator, dtype=torch.uint8).to(device)
    return TensorBatch(
        observation={PLAIN: frames[0]},
        next_observation={PLAIN: frames[1]},
        action=torch.randint(0, ACTIONS, (BATCH,), generator=generator).to(device),
        reward=torch.randn(BATCH, generator=generator).to(device),
        discount=torch.full((BATCH,), 0.99, device=device),
        weight=torch.rand(BATCH, generator=generator).to(device),
        mask=None,
        next_mask=None,
        size=BATCH,
    )


def channels_last(batch: TensorBatch) -> TensorBatch:
    frames, following = (
        {PLAIN: leaves[PLAIN].permute(0, 2, 3, 1).contiguous()}
        for leaves in (batch.observation, batch.next_observation)
    )
    return replace(batch, observation=frames, next_observation=following)


class Rounded(torch.autograd.Function):
    """Rounds values, gradients or both to bfloat16, as they are where they lie in memory between two kernels."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, both: bool) -> Tensor:
        return values.bfloat16().float() if both else values.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0].bfloat16().float(), None


def round_network(network: QNetwork, flat: FlatParameters) -> None:
    """Round the weights, and from now on all that lies in memory between two layers."""
    flat.parameters.copy_(flat.parameters.bfloat16())
    for layers, both in ((network.torso.body.images[0], True), (network.head.streams.advantage, False)):
        for layer in layers:
            if isinstance(layer, nn.ReLU):
                layer.register_forward_hook(lambda _, __, values, both=both: Rounded.apply(values, both))


def relative_errors(network: QNetwork, flat: FlatParameters, expected: Tensor) -> list[float]:
    pairs = []
    for parameter in network.parameters():
        start = parameter.data.storage_offset()
        pairs.append([tensor[start : start + parameter.numel()] for tensor in (flat.gradients, expected)])
    return [float((actual - exact).norm() / exact.norm()) for actual, exact in pairs]


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, False), (torch.bfloat16, True)])
def test_gradient_equals_automatic_differentiation(dtype: torch.dtype, last: bool, device: torch.device) -> None:
    agent = ReplayAgent(double=not last)
    networks = [make_network(NatureConfig(dense=128), agent, seed).to(device) for seed in (1, 2)]
    flats = [FlatParameters(network) for network in networks]
    if dtype == torch.bfloat16:
        for network, weights in zip(networks, flats, strict=True):
            round_network(network, weights)
    batch, flat = make_batch(device), flats[0]
    fast = NatureGradient(agent, flat, *networks, dtype, channels_last=last, tiles=FEW)
    for weights in flats:
        weights.parameters.mul_(2**0.125 if dtype == torch.float32 else 1.0)  # it must see changed weights
    expected = EagerGradient(agent, flat, *networks).replay(batch)
    gradients = flat.gradients.clone()
    flat.gradients.fill_(7.0)
    result = fast.replay(channels_last(batch) if last else batch)
    torch.testing.assert_close(result.total, expected.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.priority, expected.priority, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.metrics["q_mean"], expected.metrics["q_mean"], rtol=1e-4, atol=1e-5)
    assert max(relative_errors(networks[0], flat, gradients)) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert (flat.gradients[padding(networks[0], flat)] == 7.0).all()


def padding(network: QNetwork, flat: FlatParameters) -> Tensor:
    """Return which entries of the flat tensors belong to no parameter."""
    free = torch.ones_like(flat.gradients, dtype=torch.bool)
    for parameter in network.parameters():
        free[parameter.data.storage_offset() :][: parameter.numel()] = False
    assert free.any()
    return free


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_regression_equals_automatic_differentiation(weighted: bool, device: torch.device) -> None:
    agent = RolloutAgent()
    network = make_network(NatureConfig(dense=128), agent).to(device)
    flat, batch = FlatParameters(network), make_batch(device)
    weight = torch.tensor([0.0, 1.0], device=device) if weighted else None
    given = (batch.observation, batch.action, batch.reward, weight)
    expected = EagerGradient(agent, flat, network, None).regression(*given)
    gradients = flat.gradients.clone()
    fast = NatureGradient(agent, flat, network, None, torch.float32, tiles=FEW)
    result = fast.regression(*given)
    assert max(relative_errors(network, flat, gradients)) < 1e-5
    if not weighted:  # the next minibatch must not overwrite what this one has returned
        fast.regression(batch.observation, batch.action, batch.reward + 1, weight)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "agent", "expected"),
    [
        (NatureConfig(), ReplayAgent(), True),
        (NatureConfig(dense=256), ReplayAgent(double=True, n_step=3, loss="mse"), True),
        (NatureConfig(dense=100), ReplayAgent(), False),
        (NatureConfig(dense=0), ReplayAgent(), False),
        (NatureConfig(layer_norm=True), ReplayAgent(), False),
        (NatureConfig(padding="same"), ReplayAgent(), False),
        (NatureConfig(dropout=0.1), ReplayAgent(), False),
        (NatureConfig(spectral_norm=True), ReplayAgent(), False),
        (NatureConfig(activation="silu"), ReplayAgent(), False),
        (NatureConfig(), ReplayAgent(dueling=True), False),
        (NatureConfig(), ReplayAgent(noisy=True), False),
        (NatureConfig(), ReplayAgent(munchausen=MunchausenConfig()), False),
        (NatureConfig(), ReplayAgent(head=CategoricalConfig()), False),
        (NatureConfig(), RolloutAgent(), True),
        (NatureConfig(), RolloutAgent(dueling=True), False),
        (ImpalaConfig(), ReplayAgent(), False),
        (MlpConfig(), ReplayAgent(), False),
    ],
)
def test_only_the_plain_network_is_supported(config: Any, agent: Any, expected: bool) -> None:
    assert supports(make_network(config, agent), agent) is expected


@pytest.mark.parametrize("spec", [make_spec(4, 84, 84, dtype="float32"), make_spec(4, 64, 64, 3)])
def test_only_a_stack_of_byte_frames_is_supported(spec: EnvSpec) -> None:
    agent = ReplayAgent()
    assert not supports(make_network(NatureConfig(), agent, spec=spec), agent)


def test_frames_in_another_layout_are_refused(device: torch.device) -> None:
    agent = ReplayAgent()
    networks = [make_network(NatureConfig(dense=128), agent, seed).to(device) for seed in (1, 2)]
    flat, _ = (FlatParameters(network) for network in networks)
    frames = make_batch(device).observation[PLAIN]
    fast = NatureGradient(agent, flat, *networks, tiles=FEW)
    for bad in (frames.float(), frames.to(memory_format=torch.channels_last)):
        with pytest.raises(ValueError, match="contiguous bytes"):
            fast.values(frames, bad)


def every_launch() -> None:
    """Call each kernel with the blocks of a small and of a large batch."""
    agent = ReplayAgent(double=True)
    online, target = (make_network(NatureConfig(), agent, seed) for seed in (1, 2))
    flat, _ = FlatParameters(online), FlatParameters(target)
    batch = make_batch(torch.device("cpu"))
    NatureGradient(agent, flat, online, target, tiles=tiles_for(32)).replay(batch)
    fast = NatureGradient(agent, flat, online, target, channels_last=True, tiles=tiles_for(1024))
    fast.replay(channels_last(batch))


@pytest.mark.slow
def test_an_h200_multiplies_by_tensor_cores_and_reads_wide(tmp_path: Path) -> None:
    code = compile_for_hopper("test_nature", tmp_path)
    assert len(code) == 32
    products = [kernel for kernel in code if "wgmma" in kernel or "mma.sync" in kernel]
    assert len(products) == 25  # twice four forward, three input and four weight gradients; the last layer's three
    for kernel in products:
        assert "cp.async.cg" in kernel or "ld.global.v4.b32" in kernel
