"""Adam's compiled step: equal to torch's, with the same gate, target and saved state."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from qfleet.accel.cpu_step import CompiledStep, supports
from qfleet.algo.agent import HardTargetConfig, ReplayAgent, SoftTargetConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig, AdamWConfig, RmspropConfig
from qfleet.algo.schedules import LinearRateConfig
from qfleet.algo.steps import GradientStep
from qfleet.algo.torsos import MlpConfig
from qfleet.core.errors import CheckpointError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec

SPEC = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(5,), dtype="float32")}, actions=3)
LOSS = torch.tensor(0.5)


def make(kind, optim, rule=None, hidden=(64, 33)):
    network = build_network(MlpConfig(hidden=hidden), ReplayAgent(), SPEC, 1)
    step = kind(network, optim, 40, None)
    target = None
    if rule is not None:
        target = FlatParameters(copy.deepcopy(network))
        step.watch(target, rule)
    return step, target


def feed(steps, rng, size=1.0):
    gradient = torch.from_numpy(rng.standard_normal(steps[0].flat.gradients.shape).astype(np.float32) * size)
    results = []
    for step in steps:
        step.flat.gradients.copy_(gradient)
        results.append(step(LOSS))
    return results


@pytest.mark.parametrize(
    "optim",
    [
        AdamConfig(lr=1e-2, max_grad_norm=None),
        AdamConfig(lr=1e-2, max_grad_norm=1.0, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-3),
        AdamWConfig(lr=1e-2, weight_decay=0.1, schedule=LinearRateConfig(end=0.1)),
    ],
)
@pytest.mark.parametrize("rule", [None, SoftTargetConfig(tau=0.1), HardTargetConfig(period=7)])
def test_steps_equal_torchs(optim, rule):
    (ours, target), (theirs, expected) = make(CompiledStep, optim, rule), make(GradientStep, optim, rule)
    rng = np.random.default_rng(0)
    for number in range(30):
        (made, norm), (wanted, wanted_norm) = feed((ours, theirs), rng, size=10.0 ** rng.integers(-3, 2))
        assert made == wanted
        torch.testing.assert_close(norm, wanted_norm)
        assert ours.learning_rate == theirs.learning_rate
        if rule is not None:
            ours.follow()
            theirs.follow()
            torch.testing.assert_close(target.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.flat.parameters, theirs.flat.parameters, rtol=1e-5, atol=1e-6)
        assert ours.count == theirs.count == number + 1


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_changes_nothing(where, bad):
    step, target = make(CompiledStep, AdamConfig(), SoftTargetConfig(tau=0.5))
    rng = np.random.default_rng(0)
    feed((step,), rng)
    before, followed = step.state_dict(), target.to_numpy()
    step.flat.gradients.fill_(1.0)
    if where == "gradient":
        step.flat.gradients[-1] = bad
    made, norm = step(torch.tensor(bad) if where == "loss" else LOSS)
    assert not made
    assert not torch.isfinite(norm)
    after = step.state_dict()
    assert after["count"] == before["count"] == 1
    np.testing.assert_array_equal(after["weights"], before["weights"])
    np.testing.assert_array_equal(target.to_numpy(), followed)
    for name, moment in after["optim"]["moments"].items():
        assert torch.equal(moment, before["optim"]["moments"][name])


def test_a_hook_changes_the_gradient_before_it_is_judged():
    network = build_network(MlpConfig(), ReplayAgent(), SPEC, 1)
    step = CompiledStep(network, AdamConfig(), None, lambda gradient: gradient.mul_(2.0))
    step.flat.gradients.fill_(1.0)
    _, norm = step(LOSS)
    assert norm.item() == pytest.approx(2.0 * math.sqrt(step.flat.gradients.numel()))


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("first", "second"), [(CompiledStep, GradientStep), (GradientStep, CompiledStep)])
def test_saved_states_are_those_of_torchs_step(first, second, before):
    optim = AdamConfig(lr=1e-2, schedule=LinearRateConfig(end=0.1))
    (saver, _), (other, _) = make(first, optim), make(second, optim)
    rng = np.random.default_rng(0)
    for _ in range(before):
        feed((saver,), rng)
    other.load_state_dict(saver.state_dict())
    for _ in range(3):
        feed((saver, other), rng)
        torch.testing.assert_close(saver.flat.parameters, other.flat.parameters, rtol=1e-5, atol=1e-6)
    assert other.learning_rate == saver.learning_rate


def test_a_resumed_step_goes_on_to_the_bit():
    (whole, _), (cut, _) = make(CompiledStep, AdamConfig()), make(CompiledStep, AdamConfig())
    rng = np.random.default_rng(0)
    for _ in range(5):
        feed((whole,), rng)
    cut.load_state_dict(whole.state_dict())
    feed((whole, cut), rng)
    np.testing.assert_array_equal(whole.flat.to_numpy(), cut.flat.to_numpy())


def test_a_state_of_another_optimiser_or_size_is_refused():
    step, _ = make(CompiledStep, AdamConfig())
    feed((step,), np.random.default_rng(0))
    with pytest.raises(CheckpointError, match="adam"):
        make(CompiledStep, AdamWConfig())[0].load_state_dict(step.state_dict())
    with pytest.raises(CheckpointError, match="size"):
        make(CompiledStep, AdamConfig(), hidden=(3,))[0].load_state_dict(step.state_dict())


def test_supports_names_what_this_file_can_do():
    assert supports(AdamConfig())
    assert supports(AdamWConfig())
    assert not supports(RmspropConfig())
    assert not supports(AdamConfig(l1=0.1))
