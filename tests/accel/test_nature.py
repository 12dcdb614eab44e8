from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compile_for_hopper import SHARED, compile_for_hopper
from rounded_products import _rounded_products  # noqa: F401  (a fixture for every test here)
from torch import Tensor, nn

from qfleet.accel import nature_layout
from qfleet.accel.choices import _gradient
from qfleet.accel.hardware import Hardware
from qfleet.accel.kernels import packing
from qfleet.accel.kernels.conv import Tile
from qfleet.accel.nature import NatureGradient, supports
from qfleet.accel.nature_layout import layers_of
from qfleet.accel.nature_tiles import NatureTiles, parts_of_sums, tiles_for
from qfleet.accel.precision import Precision
from qfleet.accel.table import Settings
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


FEW_OF_SMALL_IMAGES = replace(
    FEW,
    conv1=Tile(128, 32, 64, 4, 2),
    conv2=Tile(64, 64, 64, 4, 2),
    conv3=Tile(64, 64, 64, 4, 2),
    conv3_input=Tile(64, 64, 64, 4, 2),
    conv2_input=Tile(64, 128, 64, 4, 2),
    conv2_weight=Tile(128, 64, 64, 4, 2),
    conv1_weight=Tile(128, 64, 64, 4, 2),
)
SIZES = [1, 8, 32, 64, 128, 256, 512, 1024, 2048]
PADDED = NatureConfig(padding="same", dense=128)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs of the interpreter handle more weights than a GPU's."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(packing, "_COPIED", 8192)
        for module in (packing, nature_layout):
            monkeypatch.setattr(module, "BLOCK", 4096)


def make_spec(*shape: int, dtype: str = "uint8") -> EnvSpec:
    leaf = LeafSpec(shape=shape, dtype=dtype, stack=shape[0])
    return EnvSpec(name="frames", observations={PLAIN: leaf}, actions=ACTIONS)


def make_network(config: Any, agent: Any, seed: int = 1, spec: EnvSpec | None = None) -> QNetwork:
    return build_network(config, agent, spec or make_spec(4, 84, 84), seed)


def make_batch(device: torch.device, height: int = 84, width: int = 84) -> TensorBatch:
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 256, (2, BATCH, 4, height, width), generator=generator, dtype=torch.uint8).to(device)
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


@pytest.mark.parametrize(("precision", "last"), [("fp32", False), ("bf16", True)])
def test_gradient_equals_automatic_differentiation(precision: Precision, last: bool, device: torch.device) -> None:
    agent = ReplayAgent(double=not last)
    networks = [make_network(NatureConfig(dense=128), agent, seed).to(device) for seed in (1, 2)]
    flats = [FlatParameters(network) for network in networks]
    if precision == "bf16":
        for network, weights in zip(networks, flats, strict=True):
            round_network(network, weights)
    batch, flat = make_batch(device), flats[0]
    fast = NatureGradient(agent, flat, *networks, precision, channels_last=last, tiles=FEW)
    for weights in flats:
        weights.parameters.mul_(2**0.125 if precision == "fp32" else 1.0)  # it must see changed weights
    expected = EagerGradient(agent, flat, *networks).replay(batch)
    gradients = flat.gradients.clone()
    flat.gradients.fill_(7.0)
    result = fast.replay(channels_last(batch) if last else batch)
    torch.testing.assert_close(result.total, expected.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.priority, expected.priority, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.metrics["q_mean"], expected.metrics["q_mean"], rtol=1e-4, atol=1e-5)
    assert max(relative_errors(networks[0], flat, gradients)) < (1e-5 if precision == "fp32" else 1e-2)
    assert (flat.gradients[gaps(networks[0], flat)] == 7.0).all()


def gaps(network: QNetwork, flat: FlatParameters) -> Tensor:
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
    fast = NatureGradient(agent, flat, network, None, "fp32", tiles=FEW)
    result = fast.regression(*given)
    assert max(relative_errors(network, flat, gradients)) < 1e-5
    if not weighted:  # the next minibatch must not overwrite what this one has returned
        fast.regression(batch.observation, batch.action, batch.reward + 1, weight)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("height", "width", "double"), [(21, 34, True), (16, 13, False)])
def test_gradient_of_padded_convolutions_equals_automatic_differentiation(
    height: int, width: int, double: bool, device: torch.device
) -> None:
    agent, spec = ReplayAgent(double=double), make_spec(4, height, width)
    networks = [make_network(PADDED, agent, seed, spec).to(device) for seed in (1, 2)]
    flat, _ = (FlatParameters(network) for network in networks)
    batch = make_batch(device, height, width)
    expected = EagerGradient(agent, flat, *networks).replay(batch)
    gradients = flat.gradients.clone()
    fast = NatureGradient(agent, flat, *networks, "fp32", not double, FEW_OF_SMALL_IMAGES)
    result = fast.replay(batch if double else channels_last(batch))
    torch.testing.assert_close(result.total, expected.total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.priority, expected.priority, rtol=1e-4, atol=1e-5)
    assert max(relative_errors(networks[0], flat, gradients)) < 1e-5


@pytest.mark.parametrize(("precision", "least", "most"), [("fp32", 0, 1e-5), ("tf32", 1e-6, 5e-3)])
def test_regression_of_padded_convolutions_equals_automatic_differentiation(
    precision: Precision, least: float, most: float, device: torch.device
) -> None:
    agent = RolloutAgent()
    network = make_network(PADDED, agent, spec=make_spec(4, 18, 21)).to(device)
    flat, batch = FlatParameters(network), make_batch(device, 18, 21)
    given = (batch.observation, batch.action, batch.reward, None)
    expected = EagerGradient(agent, flat, network, None).regression(*given)
    gradients = flat.gradients.clone()
    fast = NatureGradient(agent, flat, network, None, precision, tiles=FEW_OF_SMALL_IMAGES)
    fast.values(255 - batch.observation[PLAIN])  # what it leaves in memory is not to be seen later
    result = fast.regression(*given)
    errors = relative_errors(network, flat, gradients)
    assert least <= min(errors)
    assert max(errors) < most
    torch.testing.assert_close(result, expected, rtol=max(most, 1e-4), atol=1e-5)


def test_float16_is_refused(device: torch.device) -> None:
    agent = RolloutAgent()
    network = make_network(PADDED, agent).to(device)
    with pytest.raises(ValueError, match="loss scale"):
        NatureGradient(agent, FlatParameters(network), network, None, "fp16")


@pytest.mark.parametrize(
    ("config", "agent", "expected"),
    [
        (NatureConfig(), ReplayAgent(), True),
        (NatureConfig(dense=256), ReplayAgent(double=True, n_step=3, loss="mse"), True),
        (NatureConfig(dense=100), ReplayAgent(), False),
        (NatureConfig(dense=0), ReplayAgent(), False),
        (NatureConfig(layer_norm=True), ReplayAgent(), False),
        (NatureConfig(padding="same"), ReplayAgent(), True),
        (NatureConfig(padding="same"), RolloutAgent(), True),
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


def test_a_stack_that_is_no_side_of_a_block_is_not_supported() -> None:
    agent = ReplayAgent()
    found = [supports(make_network(NatureConfig(), agent, spec=make_spec(n, 84, 84)), agent) for n in (1, 2, 3, 4, 6)]
    assert found == [True, True, False, True, False]


@pytest.mark.parametrize("change", [{"padding": "same"}, {"padding_mode": "reflect"}])
def test_padding_that_is_no_count_of_zeros_is_not_supported(change: dict[str, str]) -> None:
    agent = ReplayAgent()
    network = make_network(PADDED, agent)
    assert supports(network, agent)
    for name, value in change.items():
        setattr(layers_of(network)[4], name, value)
    assert not supports(network, agent)


def test_frames_in_another_layout_are_refused(device: torch.device) -> None:
    agent = ReplayAgent()
    networks = [make_network(NatureConfig(dense=128), agent, seed).to(device) for seed in (1, 2)]
    flat, _ = (FlatParameters(network) for network in networks)
    frames = make_batch(device).observation[PLAIN]
    fast = NatureGradient(agent, flat, *networks, tiles=FEW)
    for bad in (frames.float(), frames.to(memory_format=torch.channels_last)):
        with pytest.raises(ValueError, match="contiguous bytes"):
            fast.values(frames, bad)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_every_block_fits_the_layers(
    padding: Literal["valid", "same"], precision: Precision, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(type(packing._pack_kernel), "run", lambda self, *args, **options: launched.append(options))
    agent, batch = ReplayAgent(double=True), make_batch(device)
    online, target = (make_network(NatureConfig(padding=padding), agent, seed).to(device) for seed in (1, 2))
    flat, _ = FlatParameters(online), FlatParameters(target)
    for size in SIZES:  # a side that does not divide its layer's is refused before the launch
        tiles = tiles_for(size, torch.bfloat16 if precision == "bf16" else torch.float32)
        NatureGradient(agent, flat, online, target, precision, tiles=tiles).replay(batch)
    assert len(launched) == 16 * len(SIZES)


def shared_bytes(tile: Tile, dtype: torch.dtype) -> int:
    """Return the most shared memory that operands need: those of as many rounds as a program has stages."""
    return tile.stages * (tile.rows + tile.columns) * tile.depth * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", SIZES)
def test_every_block_fits_an_h200(batch: int, dtype: torch.dtype) -> None:
    tiles = [tile for tile in vars(tiles_for(batch, dtype)).values() if isinstance(tile, Tile)]
    assert len(tiles) == 11
    for tile in tiles:
        assert shared_bytes(tile, dtype) <= SHARED
        assert tile.depth >= 16  # the least that tensor cores multiply


def test_blocks_for_float32_read_ahead_no_more_than_those_that_were_tuned() -> None:
    for batch in (32, 256, 1024):
        pairs = zip(vars(tiles_for(batch)).values(), vars(tiles_for(batch, torch.float32)).values(), strict=True)
        for tuned, wide in pairs:
            if isinstance(tuned, Tile) and tuned.stages > 1:
                assert shared_bytes(wide, torch.float32) == shared_bytes(tuned, torch.bfloat16)
            else:
                assert wide == tuned


@pytest.mark.parametrize(
    ("wanted", "pixels", "expected"), [(7, 49, 7), (7, 121, 11), (7, 6, 6), (1, 121, 1), (7, 46, 2), (7, 47, 1)]
)
def test_sums_are_shared_out_by_what_divides_the_pixels(wanted: int, pixels: int, expected: int) -> None:
    assert parts_of_sums(wanted, pixels) == expected


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("padding", ["valid", "same"])
def test_a_gpu_in_bf16_or_tf32_computes_by_these_kernels(
    padding: Literal["valid", "same"], precision: Precision, device: torch.device
) -> None:
    agent = ReplayAgent()
    online, target = (make_network(NatureConfig(padding=padding), agent, seed).to(device) for seed in (1, 2))
    flat, _ = FlatParameters(online), FlatParameters(target)
    on, wanted = Hardware("cuda", "NVIDIA H200", (9, 0)), Settings(precision=precision, kernels=True)
    found = _gradient(agent, on, wanted, online, None)(agent, flat, online, target)
    assert isinstance(found, NatureGradient) == (precision != "fp32")


def every_launch() -> None:
    """Call each kernel with the blocks of a small and of a large batch, in both layouts, paddings and formats."""
    cases: list[tuple[Literal["valid", "same"], Precision, torch.dtype]] = [
        ("valid", "bf16", torch.bfloat16),
        ("same", "tf32", torch.float32),
    ]
    agent, batch = ReplayAgent(double=True), make_batch(torch.device("cpu"))
    for padding, precision, dtype in cases:
        online, target = (make_network(NatureConfig(padding=padding), agent, seed) for seed in (1, 2))
        flat, _ = FlatParameters(online), FlatParameters(target)
        networks = (agent, flat, online, target, precision)
        NatureGradient(*networks, tiles=tiles_for(32, dtype)).replay(batch)
        fast = NatureGradient(*networks, channels_last=True, tiles=tiles_for(1024, dtype))
        fast.replay(channels_last(batch))


@pytest.mark.slow
def test_an_h200_multiplies_by_tensor_cores_and_reads_wide(tmp_path: Path) -> None:
    code = compile_for_hopper("test_nature", tmp_path)
    assert len(code) == 4 * 16
    products = [kernel for kernel in code if "wgmma" in kernel or "mma.sync" in kernel]
    # of each case four forward, three input and four weight gradients; and the last layer's, in pairs of cases three
    assert len(products) == 4 * 11 + 2 * 3
    for kernel in products:
        assert "cp.async.cg" in kernel or "ld.global.v4.b32" in kernel
