"""The package's losses and updates equal those of the one-file reference on random batches."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onefile_module import onefile

from qfleet.algo.agent import HardTargetConfig, ReplayAgent, SoftTargetConfig
from qfleet.algo.batch import to_tensors
from qfleet.algo.inputs import InputConfig
from qfleet.algo.losses import compute_loss
from qfleet.algo.networks import build_network
from qfleet.algo.optim import SgdConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch as CoreBatch

SCALE = (2.4, 2.0, 0.21, 2.0)
SPEC = EnvSpec(name="CartPole-v1", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=2)
NETWORK = MlpConfig(hidden=(32, 32), input=InputConfig(scale=tuple(1 / s for s in SCALE)))


class Plain(torch.nn.Module):
    """Lets the page call a network of the package, which takes observations by name."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.network({PLAIN: observation})
        return values


def random_batch(rng: np.random.Generator, size: int) -> CoreBatch:
    """Transitions of 1 to 5 steps, some of them terminated, with errors on both sides of Huber's threshold."""
    steps = rng.integers(1, 6, size=size)
    discount = np.where(rng.random(size) < 0.2, 0.0, 0.99**steps)
    return CoreBatch(
        observation={PLAIN: rng.standard_normal((size, 4)).astype(np.float32)},
        action=rng.integers(2, size=size),
        reward=(2 * rng.standard_normal(size)).astype(np.float32),
        discount=discount.astype(np.float32),
        next_observation={PLAIN: rng.standard_normal((size, 4)).astype(np.float32)},
        weight=rng.uniform(0.1, 1.0, size).astype(np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
    )


def page_batch(batch: CoreBatch) -> Any:
    columns = (batch.observation[PLAIN], batch.action, batch.reward, batch.discount, batch.next_observation[PLAIN])
    return onefile.Batch(*(torch.from_numpy(column) for column in columns))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 64), double=st.booleans(), weighted=st.booleans())
def test_the_packages_loss_and_gradient_equal_the_pages(seed: int, size: int, double: bool, weighted: bool) -> None:
    agent = ReplayAgent(double=double)
    online, target = (build_network(NETWORK, agent, SPEC, seed=seed % 1000 + i) for i in range(2))
    batch = random_batch(np.random.default_rng(seed), size)
    if not weighted:
        batch = dataclasses.replace(batch, weight=np.ones(size, np.float32))
    tensors = to_tensors(batch, torch.device("cpu"))
    loss = compute_loss(agent, online, target, tensors)
    ours = torch.dot(loss.per_sample, tensors.weight) / tensors.size
    pages = onefile.td_loss(
        Plain(online), Plain(target), page_batch(batch), double, tensors.weight if weighted else None
    )
    torch.testing.assert_close(ours, pages, rtol=1e-6, atol=1e-6)
    parameters = list(online.parameters())
    for mine, theirs in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(pages, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("rule", [SoftTargetConfig(tau=0.1), HardTargetConfig(period=4)], ids=["soft", "hard"])
def test_the_packages_updates_equal_the_pages(double: bool, rule: SoftTargetConfig | HardTargetConfig) -> None:
    agent = ReplayAgent(double=double, target=rule)
    network = build_network(NETWORK, agent, SPEC, seed=1)
    online, target = Plain(copy.deepcopy(network)), Plain(copy.deepcopy(network))
    optimizer = torch.optim.SGD(online.parameters(), lr=0.05)
    update = build_update(agent, network, SgdConfig(lr=0.05, max_grad_norm=None), torch.Generator())
    tau, period = (rule.tau, 1) if isinstance(rule, SoftTargetConfig) else (1.0, rule.period)
    rng = np.random.default_rng(0)
    for count in range(1, 11):
        batch = random_batch(rng, 32)
        assert update(batch).updates == 1
        optimizer.zero_grad()
        onefile.td_loss(online, target, page_batch(batch), double, torch.from_numpy(batch.weight)).backward()
        optimizer.step()
        if count % period == 0:
            onefile.update_target(online, target, tau)
    for mine, theirs in ((update.online, online), (update.target, target)):
        assert mine is not None
        for ours, pages in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, pages, rtol=1e-6, atol=1e-6)
