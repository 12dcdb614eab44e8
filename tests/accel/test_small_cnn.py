from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_for_hopper import compile_for_hopper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounded_products import _rounded_products  # noqa: F401  (a fixture for every test here)
from torch import Tensor

from qfleet.accel import small_cnn
from qfleet.accel.kernels.conv import Tile
from qfleet.accel.small_cnn import SmallCnnForward, SmallCnnGradient, supports
from qfleet.accel.small_cnn_tiles import SmallCnnTiles
from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import CategoricalConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.torsos import MlpConfig, NatureConfig, SmallCnnConfig
from qfleet.algo.updates import RolloutUpdate, build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch

CUDA = torch.device("cuda")
CONFIG = SmallCnnConfig(layer_norm=True)


def few(units: int = 128, splits: int = 2) -> SmallCnnTiles:
    """Return few programs: the interpreter's time goes by them."""
    return SmallCnnTiles(
        front_samples=3,
        front_warps=4,
        dense=Tile(16, units, 256, 4, 2),
        dense_splits=splits,
        weight=Tile(64, 512, 16, 4, 2),
        input=Tile(16, 512, 64, 4, 2),
        conv_programs=5,
        conv_warps=4,
    )


def make_spec(*shape: int, dtype: str = "bool", actions: int = 3, **leaf: Any) -> EnvSpec:
    return EnvSpec(name="grid", observations={PLAIN: LeafSpec(shape=shape, dtype=dtype, **leaf)}, actions=actions)


def make_network(
    device: torch.device, config: Any = CONFIG, agent: Any = None, spec: EnvSpec | None = None, seed: int = 1
) -> tuple[QNetwork, FlatParameters]:
    """Return a network whose norms have weights and biases other than ones and zeros."""
    network = build_network(config, agent or RolloutAgent(), spec or make_spec(4, 6, 5), seed).to(device)
    flat = FlatParameters(network)
    noise = torch.randn(len(flat.parameters), generator=torch.Generator().manual_seed(seed))
    flat.parameters.add_(0.1 * noise.to(device)).mul_(~padding(network, flat))
    return network, flat


def make_rollout(spec: EnvSpec, rows: int, device: torch.device, seed: int = 0) -> RolloutTensors:
    generator, leaf = torch.Generator().manual_seed(seed), spec.observations[PLAIN]
    images = torch.rand(rows, *leaf.shape, generator=generator)
    if leaf.dtype == "bool":
        images = images < 0.2
    elif leaf.dtype == "uint8":
        images = (images * 256).to(torch.uint8)
    return RolloutTensors(
        observation={PLAIN: images.to(device)},
        action=torch.randint(0, spec.actions, (rows,), generator=generator).to(device),
        goal=torch.randn(rows, generator=generator).to(device),
        weight=(torch.rand(rows, generator=generator) < 0.7).float().to(device),
    )


def spans(network: QNetwork, flat: FlatParameters) -> list[slice]:
    origin = flat.parameters.storage_offset()
    starts = [parameter.data.storage_offset() - origin for parameter in network.parameters()]
    sizes = [parameter.numel() for parameter in network.parameters()]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def padding(network: QNetwork, flat: FlatParameters) -> Tensor:
    """Return which entries of the flat tensors belong to no parameter."""
    free = torch.ones_like(flat.gradients, dtype=torch.bool)
    for span in spans(network, flat):
        free[span] = False
    return free


def worst(network: QNetwork, flat: FlatParameters, expected: Tensor) -> float:
    """Return the largest error of a parameter's gradient, relative to the norm of what it should be."""
    pairs = [(flat.gradients[span], expected[span]) for span in spans(network, flat)]
    return max(float((actual - exact).norm() / exact.norm().clamp(min=1e-6)) for actual, exact in pairs)


def parts(data: RolloutTensors) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor | None]:
    return data.observation, data.action, data.goal, data.weight


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.integers(4, 10), height=st.integers(3, 10), width=st.integers(3, 10), actions=st.integers(2, 6),
    batch=st.integers(1, 37), outputs=st.sampled_from([16, 32]), units=st.sampled_from([64, 128]),
    dtype=st.sampled_from(["bool", "uint8", "float32"]), weights=st.sampled_from(["none", "some", "zeros"]),
    loss=st.sampled_from(["mse", "huber"]), splits=st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_regression_equals_automatic_differentiation(
    channels: int, height: int, width: int, actions: int, batch: int, outputs: int, units: int, dtype: str,
    weights: str, loss: Any, splits: int, device: torch.device,
) -> None:  # fmt: skip
    if width < channels:  # such an image would be taken for one with its channels last
        height, width = channels, channels
    agent, spec = RolloutAgent(loss=loss, huber_threshold=0.5), make_spec(channels, height, width, dtype=dtype)
    spec = spec.model_copy(update={"actions": actions})
    config = CONFIG.model_copy(update={"channels": (outputs,), "dense": units})
    network, flat = make_network(device, config, agent, spec)
    assert supports(network, agent, CUDA)
    data = make_rollout(spec, batch, device, seed=batch)
    if weights != "some":
        data = replace(data, weight=None if weights == "none" else torch.zeros(batch, device=device))
    expected = EagerGradient(agent, flat, network, None).regression(*parts(data))
    gradients = flat.gradients.clone()
    flat.gradients.fill_(7.0)
    fast = SmallCnnGradient(agent, flat, network, None, "fp32", few(units, splits))
    torch.testing.assert_close(fast.regression(*parts(data)), expected, rtol=1e-5, atol=1e-5)
    assert worst(network, flat, gradients) < 1e-5
    assert (flat.gradients[padding(network, flat)] == 7.0).all()
    q = SmallCnnForward(network, "fp32", few(units, splits)).q(data.observation)
    torch.testing.assert_close(q, network.q(data.observation).detach(), rtol=1e-5, atol=1e-5)


def test_shipped_blocks_at_the_size_of_a_game(device: torch.device) -> None:
    agent, spec = RolloutAgent(), make_spec(4, 10, 10)
    network, flat = make_network(device, CONFIG, agent, spec)
    data = make_rollout(spec, 18, device)
    expected = EagerGradient(agent, flat, network, None).regression(*parts(data))
    gradients = flat.gradients.clone()
    found = SmallCnnGradient(agent, flat, network, None, "fp32").regression(*parts(data))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert worst(network, flat, gradients) < 1e-5


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_gathered_where_they_lie(weighted: bool, device: torch.device) -> None:
    agent, spec = RolloutAgent(), make_spec(4, 6, 5)
    network, flat = make_network(device)
    data = make_rollout(spec, 40, device)
    data = data if weighted else replace(data, weight=None)
    chosen = torch.randperm(40, generator=torch.Generator().manual_seed(2)).to(device)[:19]
    fast = SmallCnnGradient(agent, flat, network, None, "fp32", few())
    rows = [part if part is None else part[chosen] for part in parts(data)[1:]]
    copied = fast.regression({PLAIN: data.observation[PLAIN][chosen]}, *rows)
    gradients = flat.gradients.clone()
    flat.gradients.fill_(7.0).mul_(~padding(network, flat))
    assert fast.regression_of(data, chosen) == copied
    assert torch.equal(flat.gradients, gradients)


def test_a_rollout_is_learned_from_as_by_automatic_differentiation(device: torch.device) -> None:
    agent, spec = RolloutAgent(epochs=1, minibatches=3), make_spec(4, 6, 5)
    data, results = make_rollout(spec, 31, device), []
    for gradient in (EagerGradient, lambda *given: SmallCnnGradient(*given, "fp32", few())):
        network = build_network(CONFIG, agent, spec, 1).to(device)
        generator = torch.Generator(device).manual_seed(4)
        update = build_update(agent, network, AdamConfig(lr=1e-3), generator, gradient=gradient)
        assert isinstance(update, RolloutUpdate)
        results.append((update.learn(data), update.flat.parameters))
    (expected, weights), (found, fast_weights) = results
    assert found.updates == expected.updates == 3
    for name, value in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast_weights, weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("double", [True, False])
def test_replay_equals_automatic_differentiation(double: bool, device: torch.device) -> None:
    agent, spec, batch = ReplayAgent(double=double, huber_threshold=0.5), make_spec(4, 6, 5), 19
    (online, flat), (target, _) = (make_network(device, CONFIG, agent, spec, seed) for seed in (1, 2))
    data, following = make_rollout(spec, batch, device), make_rollout(spec, batch, device, seed=1)
    generator = torch.Generator().manual_seed(3)
    sample = TensorBatch(
        observation=data.observation,
        next_observation=following.observation,
        action=data.action,
        reward=data.goal,
        discount=torch.full((batch,), 0.97, device=device),
        weight=torch.rand(batch, generator=generator).to(device),
        mask=None,
        next_mask=(torch.rand(batch, spec.actions, generator=generator) < 0.6).to(device),
        size=2 * batch,
    )
    expected = EagerGradient(agent, flat, online, target).replay(sample)
    gradients = flat.gradients.clone()
    found = SmallCnnGradient(agent, flat, online, target, "fp32", few()).replay(sample)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.priority, expected.priority, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-5, atol=1e-5)
    assert worst(online, flat, gradients) < 1e-5


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_bfloat16_is_near(dtype: str, device: torch.device) -> None:
    agent, spec = RolloutAgent(), make_spec(4, 6, 5, dtype=dtype)
    network, flat = make_network(device, CONFIG, agent, spec)
    data = make_rollout(spec, 37, device)
    expected = EagerGradient(agent, flat, network, None).regression(*parts(data))
    gradients = flat.gradients.clone()
    found = SmallCnnGradient(agent, flat, network, None, "bf16", few()).regression(*parts(data))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert 1e-4 < worst(network, flat, gradients) < 5e-2
    q = SmallCnnForward(network, "bf16", few()).q(data.observation)
    torch.testing.assert_close(q, network.q(data.observation).detach(), rtol=2e-2, atol=2e-2)


def test_the_same_batch_has_the_same_gradient_to_the_bit(device: torch.device) -> None:
    network, flat = make_network(device)
    data, runs = make_rollout(make_spec(4, 6, 5), 37, device), []
    fast = SmallCnnGradient(RolloutAgent(), flat, network, None, "bf16", few(splits=5))
    for _ in range(2):
        result = fast.regression(*parts(data))
        runs.append((result, flat.gradients.clone()))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0][0].data_ptr() != runs[1][0][0].data_ptr()  # a loop keeps the losses of all its updates


def test_an_empty_minibatch_has_no_gradient(device: torch.device) -> None:
    network, flat = make_network(device)
    flat.gradients.fill_(7.0)
    data = make_rollout(make_spec(4, 6, 5), 8, device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    found = SmallCnnGradient(RolloutAgent(), flat, network, None, "fp32", few()).regression_of(data, nothing)
    assert [float(value) for value in found] == [0.0, 0.0]
    assert not flat.gradients.any()


def test_a_goal_that_is_no_number_shows_in_the_loss(device: torch.device) -> None:
    network, flat = make_network(device)
    data = make_rollout(make_spec(4, 6, 5), 20, device)
    data.goal[17], data.weight[17] = torch.nan, 1.0
    loss, value = SmallCnnGradient(RolloutAgent(), flat, network, None, "fp32", few()).regression(*parts(data))
    assert loss.isnan()
    assert value.isfinite()


def test_many_observations_are_valued_in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    network, _ = make_network(device)
    observation = make_rollout(make_spec(4, 6, 5), 21, device).observation
    monkeypatch.setattr(small_cnn, "_ROWS", 8)
    q = SmallCnnForward(network, "fp32", few()).q(observation)
    torch.testing.assert_close(q, network.q(observation).detach(), rtol=1e-5, atol=1e-5)


def test_tensors_with_gaps_are_refused_or_copied(device: torch.device) -> None:
    network, flat = make_network(device)
    data = make_rollout(make_spec(4, 6, 5), 16, device)
    fast = SmallCnnGradient(RolloutAgent(), flat, network, None, "fp32", few())
    expected = fast.regression(*parts(data))
    turned = data.observation[PLAIN].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert fast.regression({PLAIN: turned}, *parts(data)[1:]) == expected
    with pytest.raises(ValueError, match="contiguous"):
        fast.regression_of(data, torch.arange(16, device=device)[::2])


def test_more_blocks_than_tickets_are_refused(device: torch.device) -> None:
    network, flat = make_network(device)
    data = make_rollout(make_spec(4, 6, 5), 33, device)
    fast = SmallCnnGradient(RolloutAgent(), flat, network, None, "fp32", few())
    fast._network._tickets = fast._network._tickets[:2]
    with pytest.raises(ValueError, match="3 blocks of rows need as many tickets, not 2"):
        fast.regression(*parts(data))


@pytest.mark.parametrize(
    ("change", "agent", "expected"),
    [
        ({}, RolloutAgent(), True),
        ({"channels": (64,), "dense": 512}, ReplayAgent(double=True, n_step=3), True),
        ({"channels": (16, 16)}, RolloutAgent(), False),
        ({"channels": (24,)}, RolloutAgent(), False),
        ({"dense": 100}, RolloutAgent(), False),
        ({"dense": 0}, RolloutAgent(), False),
        ({"layer_norm": False}, RolloutAgent(), False),
        ({"activation": "silu"}, RolloutAgent(), False),
        ({"dropout": 0.1}, RolloutAgent(), False),
        ({"spectral_norm": True}, RolloutAgent(), False),
        ({}, RolloutAgent(dueling=True), False),
        ({}, ReplayAgent(noisy=True), False),
        ({}, ReplayAgent(head=CategoricalConfig()), False),
        ({}, ReplayAgent(munchausen=MunchausenConfig()), False),
    ],
)
def test_only_the_plain_network_is_supported(change: dict[str, Any], agent: Any, expected: bool) -> None:
    network = build_network(CONFIG.model_copy(update=change), agent, make_spec(4, 10, 10), 1)
    assert supports(network, agent, CUDA) is expected
    assert not supports(network, agent, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (CONFIG, make_spec(10, 10, 4)),  # channels last
        (CONFIG, make_spec(10, 10)),
        (CONFIG, make_spec(2, 4, 10, 10, stack=2)),
        (CONFIG, make_spec(4, 12, 12)),
        (CONFIG, make_spec(15, 15, 15)),
        (CONFIG.model_copy(update={"input": InputConfig(normalize=True)}), make_spec(4, 10, 10, dtype="float32")),
        (CONFIG.model_copy(update={"input": InputConfig(scale=(0.5,))}), make_spec(4, 10, 10, dtype="float32")),
        (MlpConfig(layer_norm=True), make_spec(4, 10, 10)),
        (NatureConfig(layer_norm=True), make_spec(4, 84, 84)),
    ],
)
def test_only_one_small_image_is_supported(config: Any, spec: EnvSpec) -> None:
    assert not supports(build_network(config, RolloutAgent(), spec, 1), RolloutAgent(), CUDA)


def test_float16_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        SmallCnnForward(make_network(device)[0], "fp16")


def every_launch() -> None:
    """Make the launches of a gradient and of values, in each number format; then those of other sizes."""
    cases: list[tuple[Any, ...]] = [(precision, CONFIG, 4, 512) for precision in ("fp32", "tf32", "bf16")]
    wide = CONFIG.model_copy(update={"channels": (64,), "dense": 512})
    cases += [("bf16", CONFIG, 10, 2048), ("tf32", wide, 6, 128)]
    for precision, config, channels, batch in cases:
        spec, agent = make_spec(channels, 10, 10), RolloutAgent()
        network = build_network(config, agent, spec, 1)
        data = make_rollout(spec, batch, torch.device("cpu"))
        chosen = torch.arange(batch)
        SmallCnnGradient(agent, FlatParameters(network), network, None, precision).regression_of(data, chosen)
        SmallCnnForward(network, precision).q(data.observation)


@pytest.mark.slow
def test_an_h200_multiplies_by_tensor_cores(tmp_path: Path) -> None:
    code = compile_for_hopper("test_small_cnn", tmp_path)
    assert len(code) == 5 * 7
    products = [kernel for kernel in code if "wgmma" in kernel or "mma.sync" in kernel]
    assert len(products) == 5 * 6  # all but the sum of parts
