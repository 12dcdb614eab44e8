"""Dense networks by hand: equal to the modules they stand for, on every network that they accept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.accel.mlp import MlpForward, MlpGradient, supports, ways
from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent, SoftTargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import QuantileConfig
from qfleet.algo.inputs import InputConfig
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.torsos import MlpConfig, SmallCnnConfig
from qfleet.algo.updates import build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.replay.sumtree import use_numba

MIXED = EnvSpec(
    name="mixed",
    observations={
        "camera": LeafSpec(shape=(3, 2), dtype="uint8"),
        "speed": LeafSpec(shape=(2,), dtype="float32"),
        "gear": LeafSpec(shape=(), dtype="int64", categories=5),
    },
    actions=4,
)


@pytest.fixture(params=["compiled", "torch"], scope="module", autouse=True)
def way(request):
    """Run everything with compiled loops and without."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("QFLEET_NO_NUMBA", "1")
        elif not (use_numba() and compiled_library()):
            pytest.skip("needs numba and a matrix library that shows its functions")
        assert (ways().network.__name__ == "CompiledNetwork") == (request.param == "compiled")
        yield


def compiled_library():
    from qfleet.accel.cpu_network import library

    return library() is not None


def vector(size=4, actions=3):
    return EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(size,), dtype="float32")}, actions=actions)


def random_leaves(spec, rng, rows):
    found = {}
    for name, leaf in spec.observations.items():
        shape = (rows, *leaf.shape)
        if leaf.dtype == "float32":
            found[name] = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        else:
            found[name] = torch.from_numpy(rng.integers(0, leaf.categories or 256, shape).astype(leaf.dtype))
    return found


def random_batch(spec, rng, rows, masked=False):
    def numbers(low, high):
        return torch.from_numpy(rng.uniform(low, high, rows).astype(np.float32))

    mask = torch.from_numpy(rng.random((rows, spec.actions)) < 0.5) if masked else None  # some rows allow nothing
    return TensorBatch(
        observation=random_leaves(spec, rng, rows),
        action=torch.from_numpy(rng.integers(0, spec.actions, rows)),
        reward=numbers(-3, 3),
        discount=numbers(-1, 1).clamp(min=0),
        next_observation=random_leaves(spec, rng, rows),
        weight=numbers(0, 1),
        mask=mask,
        next_mask=mask,
        size=rows + 3,
    )


def networks(config, agent, spec):
    """Return an online and a target network, both in flat memory, and the online one's flat parameters."""
    online, target = (build_network(config, agent, spec, seed) for seed in (1, 2))
    flat = FlatParameters(online)
    FlatParameters(target)
    torch.manual_seed(0)
    for network in (online, target):  # biases, and scales of a normalisation, that are not those of a new network
        for parameter in network.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return online, target.explore(), flat


def spoil(network):
    """Leave no gradient that could pass for a new one; the padding between them stays 0."""
    for parameter in network.parameters():
        parameter.grad.fill_(math.nan)


def assert_equal_gradients(agent, online, target, flat, batch):
    assert supports(online, agent)
    expected = EagerGradient(agent, flat, online, target).replay(batch)
    gradients = flat.gradients.clone()
    spoil(online)
    found = MlpGradient(agent, flat, online, target).replay(batch)
    torch.testing.assert_close(flat.gradients, gradients, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.priority, expected.priority, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-5, atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    hidden=st.lists(st.sampled_from([1, 2, 5, 16, 33]), max_size=3),
    size=st.sampled_from([1, 2, 4, 15, 16, 20]),
    actions=st.sampled_from([2, 3, 7]),
    rows=st.sampled_from([1, 2, 16, 37]),
    seed=st.integers(0, 2**32 - 1),
    flags=st.tuples(*[st.booleans()] * 6),
)
def test_replay_gradients_equal_the_eager_ones(hidden, size, actions, rows, seed, flags):
    double, dueling, layer_norm, masked, scaled, huber = flags
    rng = np.random.default_rng(seed)
    agent = ReplayAgent(double=double, dueling=dueling, loss="huber" if huber else "mse", huber_threshold=0.7)
    scale = tuple(rng.uniform(0.5, 2, size).tolist()) if scaled else ()
    if layer_norm:  # the normalisation of one or two numbers multiplies rounding errors by hundreds
        hidden = [max(width, 5) for width in hidden]
    config = MlpConfig(hidden=tuple(hidden), layer_norm=layer_norm, input=InputConfig(scale=scale))
    spec = vector(size, actions)
    assert_equal_gradients(agent, *networks(config, agent, spec), random_batch(spec, rng, rows, masked))


@settings(max_examples=40, deadline=None)
@given(
    hidden=st.lists(st.sampled_from([5, 16, 33]), max_size=3),
    rows=st.integers(0, 33),
    seed=st.integers(0, 2**32 - 1),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_regression_gradients_equal_the_eager_ones(hidden, rows, seed, flags):
    dueling, layer_norm, weighted, huber = flags
    rng = np.random.default_rng(seed)
    agent = RolloutAgent(dueling=dueling, loss="huber" if huber else "mse")
    spec = vector()
    online, _, flat = networks(MlpConfig(hidden=tuple(hidden), layer_norm=layer_norm), agent, spec)
    batch = random_batch(spec, rng, rows)
    weight = torch.from_numpy(rng.integers(0, 2, rows).astype(np.float32)) if weighted else None
    arguments = (batch.observation, batch.action, batch.reward, weight)
    expected = EagerGradient(agent, flat, online, None).regression(*arguments)
    gradients = flat.gradients.clone()
    spoil(online)
    found = MlpGradient(agent, flat, online, None).regression(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat.gradients, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_several_leaves_and_lagging_statistics_of_the_target(normalize):
    agent = ReplayAgent(double=True)
    config = MlpConfig(hidden=(8, 8), input=InputConfig(normalize=normalize))
    online, target, flat = networks(config, agent, MIXED)
    rng = np.random.default_rng(0)
    online.observe(random_leaves(MIXED, rng, 50))
    assert_equal_gradients(agent, online, target, flat, random_batch(MIXED, rng, 16))


def test_one_gradient_object_takes_batches_of_changing_sizes_and_weights_that_change_in_place():
    agent, spec, rng = ReplayAgent(double=True), vector(), np.random.default_rng(0)
    online, target, flat = networks(MlpConfig(hidden=(16, 16), layer_norm=True), agent, spec)
    fast, eager = MlpGradient(agent, flat, online, target), EagerGradient(agent, flat, online, target)
    results = []
    for rows in (4, 32, 8, 32, 64, 4):
        batch = random_batch(spec, rng, rows)
        expected = eager.replay(batch)
        gradients = flat.gradients.clone()
        results.append((fast.replay(batch), expected))
        torch.testing.assert_close(flat.gradients, gradients, rtol=1e-5, atol=1e-6)
        flat.parameters.sub_(flat.gradients, alpha=0.1)
    for found, expected in results:  # none was overwritten by a later one
        torch.testing.assert_close(found.priority, expected.priority, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("agent", "config"),
    [
        (ReplayAgent(), MlpConfig(hidden=(16, 16))),
        (ReplayAgent(dueling=True), MlpConfig(hidden=(16,), layer_norm=True, input=InputConfig(scale=(0.5,)))),
        (RolloutAgent(), MlpConfig(hidden=(), input=InputConfig(normalize=True))),
    ],
)
def test_values_equal_the_networks_for_every_number_of_rows(agent, config):
    spec, rng = vector(), np.random.default_rng(0)
    network, _, flat = networks(config, agent, spec)
    network.observe(random_leaves(spec, rng, 30))
    values = MlpForward(network)
    for rows in (16, 1, 33, 16, 2):
        observation = random_leaves(spec, rng, rows)
        torch.testing.assert_close(values.q(observation), network.q(observation).detach(), rtol=1e-5, atol=1e-6)
        flat.parameters.mul_(1.1)  # the next weights arrive in place


def test_supports_names_what_this_file_can_do():
    plain = MlpConfig(hidden=(8, 8))
    accepted = [
        (ReplayAgent(double=True, dueling=True), plain.replace(layer_norm=True)),
        (RolloutAgent(), plain),
        (ReplayAgent(), plain.replace(hidden=())),
    ]
    refused = [
        (ReplayAgent(noisy=True), plain),
        (ReplayAgent(munchausen=MunchausenConfig()), plain),
        (ReplayAgent(head=QuantileConfig(quantiles=3)), plain),
        (ReplayAgent(), plain.replace(dropout=0.1)),
        (ReplayAgent(), plain.replace(spectral_norm=True)),
        (ReplayAgent(), plain.replace(activation="tanh")),
    ]
    for agent, config in accepted + refused:
        assert supports(build_network(config, agent, vector(), 0), agent) == ((agent, config) in accepted)
    embedding = plain.replace(input=InputConfig(embedding=4))
    assert not supports(build_network(embedding, ReplayAgent(), MIXED, 0), ReplayAgent())
    image = EnvSpec(name="image", observations={PLAIN: LeafSpec(shape=(4, 10, 10), dtype="bool")}, actions=3)
    assert not supports(build_network(SmallCnnConfig(), ReplayAgent(), image, 0), ReplayAgent())


def updates(agent, config, spec):
    """Return the eager and the fast update of the same network."""
    return [
        build_update(
            agent,
            build_network(config, agent, spec, 1),
            AdamConfig(),
            torch.Generator().manual_seed(0),
            gradient=gradient,
        )
        for gradient in (EagerGradient, MlpGradient)
    ]


def test_a_run_of_replay_updates_stays_with_the_eager_one():
    agent = ReplayAgent(double=True, target=SoftTargetConfig(tau=0.1))
    spec, rng = vector(), np.random.default_rng(0)
    eager, fast = updates(agent, MlpConfig(hidden=(32, 32)), spec)
    for _ in range(30):
        batch = random_batch(spec, rng, 32)
        expected, found = eager.learn(batch), fast.learn(batch)
        torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fast.target_flat.parameters, eager.target_flat.parameters, rtol=0, atol=1e-4)


def test_a_run_of_rollout_updates_stays_with_the_eager_one():
    agent = RolloutAgent(epochs=2, minibatches=4)
    spec, rng = vector(), np.random.default_rng(0)
    eager, fast = updates(agent, MlpConfig(hidden=(32, 32), layer_norm=True), spec)
    for _ in range(5):
        batch = random_batch(spec, rng, 62)  # so that minibatches differ in size
        data = RolloutTensors(batch.observation, batch.action, batch.reward, batch.weight.round())
        expected, found = eager.learn(data), fast.learn(data)
        assert found.updates == expected.updates == 8
        torch.testing.assert_close(found.metrics, expected.metrics, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(fast.flat.parameters, eager.flat.parameters, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_a_non_finite_batch_changes_nothing(bad, loss):
    """The Huber loss of an infinite reward has a finite gradient, and must be skipped all the same."""
    agent, spec = ReplayAgent(loss=loss), vector()
    _, fast = updates(agent, MlpConfig(hidden=(8, 8)), spec)
    batch = random_batch(spec, np.random.default_rng(0), 16)
    batch.reward[3] = bad
    before = fast.flat.to_numpy()
    assert not fast.learn(batch).made
    np.testing.assert_array_equal(fast.flat.to_numpy(), before)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_observation_changes_nothing(bad, layer_norm):
    """A ReLU that took what is not a number for 0 would hide it."""
    agent, spec = ReplayAgent(), vector(20)
    _, fast = updates(agent, MlpConfig(hidden=(20, 20), layer_norm=layer_norm), spec)
    batch = random_batch(spec, np.random.default_rng(0), 16)
    batch.observation[PLAIN][3, 7] = bad
    before = fast.flat.to_numpy()
    assert not fast.learn(batch).made
    np.testing.assert_array_equal(fast.flat.to_numpy(), before)
