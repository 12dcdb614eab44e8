"""The eager gradient: the slope of the loss it returns, written over what was there, with or without weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algo_cases import VECTOR, leaves, make_batch

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.batch import leaves_to_tensors, to_tensors
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import MlpConfig

CPU = torch.device("cpu")
SMOOTH = MlpConfig(hidden=(16, 16), activation="tanh")  # differences know no corners


def make(agent):
    online = build_network(SMOOTH, agent, VECTOR, 3)
    target = build_network(SMOOTH, agent, VECTOR, 4) if isinstance(agent, ReplayAgent) else None
    flat = FlatParameters(online)
    return EagerGradient(agent, flat, online, target), flat


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    observation = leaves_to_tensors(leaves(VECTOR, rng, count), CPU)
    goal = torch.from_numpy(rng.standard_normal(count).astype(np.float32))
    return observation, torch.from_numpy(rng.integers(0, 3, count)), goal


def slope_along(loss, flat, direction, step=1e-2):
    """Return the loss's central difference along a direction."""
    start = flat.parameters.clone()
    flat.parameters.copy_(start + step * direction)
    above = loss().double()
    flat.parameters.copy_(start - step * direction)
    below = loss().double()
    flat.parameters.copy_(start)
    return ((above - below) / (2 * step)).item()


@pytest.mark.parametrize("agent", [ReplayAgent(), ReplayAgent(double=True, dueling=True, loss="mse")])
def test_replay_gives_the_slope_of_the_loss_it_returns(agent):
    gradient, flat = make(agent)
    batch = to_tensors(make_batch(VECTOR, np.random.default_rng(1), masked=True), CPU)
    gradient.replay(batch)
    gradients = flat.gradients.clone()
    direction = gradients / gradients.norm()
    found = slope_along(lambda: gradient.replay(batch).total, flat, direction)
    assert found == pytest.approx((gradients @ direction).item(), rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
def test_regression_gives_the_slope_of_the_loss_it_returns(weighted):
    gradient, flat = make(RolloutAgent())
    observation, action, goal = samples(16)
    weight = torch.arange(16).remainder(3).ne(0).float() if weighted else None
    gradient.regression(observation, action, goal, weight)
    gradients = flat.gradients.clone()
    direction = gradients / gradients.norm()
    found = slope_along(lambda: gradient.regression(observation, action, goal, weight)[0], flat, direction)
    assert found == pytest.approx((gradients @ direction).item(), rel=1e-3)


def test_gradients_are_written_over_and_results_are_detached():
    gradient, flat = make(ReplayAgent())
    first, second = (to_tensors(make_batch(VECTOR, np.random.default_rng(seed)), CPU) for seed in (1, 2))
    gradient.replay(first)
    expected = flat.gradients.clone()
    gradient.replay(second)
    assert not torch.equal(flat.gradients, expected)
    found = gradient.replay(first)
    assert torch.equal(flat.gradients, expected)
    assert not any(each.requires_grad for each in (found.total, found.priority, *found.metrics.values()))


def test_a_sample_of_weight_0_is_as_if_it_were_not_there():
    gradient, flat = make(RolloutAgent(loss="huber"))
    observation, action, goal = samples(12)
    weight = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0])
    kept = weight.bool()
    few = gradient.regression({name: leaf[kept] for name, leaf in observation.items()}, action[kept], goal[kept], None)
    expected = flat.gradients.clone()
    found = gradient.regression(observation, action, goal, weight)
    torch.testing.assert_close(found, few)
    torch.testing.assert_close(flat.gradients, expected)


@pytest.mark.parametrize("count", [0, 5])
def test_nothing_to_learn_from_gives_a_gradient_of_0(count):
    gradient, flat = make(RolloutAgent())
    flat.gradients.fill_(7)
    loss, value = gradient.regression(*samples(count), torch.zeros(count) if count else None)
    assert (loss.item(), value.item()) == (0, 0)
    assert not flat.gradients.any()
