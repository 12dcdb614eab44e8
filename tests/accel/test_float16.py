"""float16 with a loss scale: learns as float32 does, survives overflows, and still notices what is not a number."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from qfleet.accel import choices
from qfleet.accel.choices import Job
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.accel.gradients import WrappedGradient
from qfleet.accel.hardware import Hardware
from qfleet.accel.precision import LossScale
from qfleet.accel.steps import DeviceStep, ScaledStep
from qfleet.algo.agent import ReplayAgent, RolloutAgent, SoftTargetConfig
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.steps import GradientStep
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import build_update
from qfleet.control.candidates import format_put_back
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.core.usercode import UserCode

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
SPEC = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=3)
STEPS = [ScaledStep, DeviceStep]
REPLAY = ReplayAgent(target=SoftTargetConfig(tau=0.1), double=True)


def update_with(agent, device, stepper=GradientStep, gradient=EagerGradient, optim=None, hook=None):
    network = build_network(MlpConfig(hidden=(16,)), agent, SPEC, 1).to(device)
    random = torch.Generator(device).manual_seed(2)
    settings = optim or AdamConfig(lr=0.01)
    return build_update(agent, network, settings, random, 100, hook, gradient=gradient, stepper=stepper)


def in_float16(agent, device, kind, initial=2.0**10, **options):
    scale = LossScale(device, initial=initial, interval=8)
    gradient = partial(WrappedGradient, precision="fp16", scale=scale)
    return update_with(agent, device, partial(kind, scale=scale), gradient, **options), scale


def batches(device, count, reward=None):
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        rows = torch.randn(2, 16, 4, generator=random).to(device)
        yield TensorBatch(
            observation={PLAIN: rows[0]},
            action=torch.randint(3, (16,), generator=random).to(device),
            reward=torch.randn(16, generator=random).to(device)
            if reward is None
            else torch.full((16,), reward, device=device),
            discount=torch.full((16,), 0.9, device=device),
            next_observation={PLAIN: rows[1]},
            weight=torch.ones(16, device=device),
            mask=None,
            next_mask=None,
            size=16,
        )


def assert_near(found, expected, start, part=0.02):
    """The way that was learned differs by less than this part of it, and by more than nothing."""
    moved = (expected - start).norm()
    assert 0 < (found - expected).norm() < part * moved


@pytest.mark.parametrize("kind", STEPS)
def test_replay_updates_are_those_of_float32_within_rounding(device, kind):
    plain, (rounded, scale) = update_with(REPLAY, device), in_float16(REPLAY, device, kind)
    start = plain.flat.parameters.clone()
    for update in (plain, rounded):
        for batch in batches(device, 20):
            assert update.learn(batch).made
    assert plain.updates == rounded.updates == 20
    assert_near(rounded.flat.parameters, plain.flat.parameters, start)
    assert_near(rounded.target_flat.parameters, plain.target_flat.parameters, start)
    assert scale.value == 2.0**12  # doubled after 8 and 16 good steps


@pytest.mark.parametrize("kind", STEPS)
def test_rollout_updates_are_those_of_float32_within_rounding(device, kind):
    agent = RolloutAgent(epochs=2, minibatches=2)
    data = next(batches(device, 1))
    rollout = RolloutTensors(data.observation, data.action, data.reward, data.weight)
    plain, (rounded, _) = update_with(agent, device), in_float16(agent, device, kind)
    start = plain.flat.parameters.clone()
    for update in (plain, rounded):
        for _ in range(4):
            update.learn(rollout)
    assert_near(rounded.flat.parameters, plain.flat.parameters, start)


@pytest.mark.parametrize("kind", STEPS)
def test_an_overflow_changes_nothing_but_the_scale_which_soon_fits(device, kind):
    update, scale = in_float16(REPLAY, device, kind, initial=2.0**24)
    before, made = update.flat.parameters.clone(), []
    for batch in batches(device, 10):
        made.append(bool(update.learn(batch).made))
        if not any(made):
            assert torch.equal(update.flat.parameters, before)
    skipped = made.index(True)
    assert skipped > 3
    assert all(made[skipped:])
    assert scale.value == 2.0 ** (24 - skipped)
    assert scale.take_overflows() == skipped
    assert update.updates == 10 - skipped


@pytest.mark.parametrize("kind", STEPS)
def test_a_loss_that_is_not_a_number_is_not_the_scales_fault(device, kind):
    update, scale = in_float16(REPLAY, device, kind)
    for batch in batches(device, 3, reward=math.nan):
        assert not update.learn(batch).made
    assert scale.take_overflows() == 0
    assert scale.value == 2.0**10


@pytest.mark.parametrize("kind", STEPS)
def test_with_several_ranks_a_loss_that_is_not_a_number_spoils_the_step_of_all(device, kind):
    """What the other rank adds is finite; this one's gradient is too, as Huber's is of an infinite loss."""
    update, _ = in_float16(REPLAY, device, kind, hook=lambda gradients: gradients.mul_(2))
    before = update.flat.parameters.clone()
    update.flat.gradients.fill_(1.0)
    made, _ = update._step(torch.tensor(math.inf, device=device))
    assert not made
    assert torch.equal(update.flat.parameters, before)


@pytest.mark.parametrize("kind", STEPS)
def test_trap_15_a_run_cut_and_resumed_equals_uncut(device, kind):
    uncut, scale = in_float16(REPLAY, device, kind, initial=2.0**24)
    first, _ = in_float16(REPLAY, device, kind, initial=2.0**24)
    second, resumed = in_float16(REPLAY, device, kind, initial=2.0**24)
    data = list(batches(device, 30))
    for batch in data:
        uncut.learn(batch)
    for batch in data[:15]:
        first.learn(batch)
    second.load_state_dict(first.state_dict())
    for batch in data[15:]:
        second.learn(batch)
    assert np.array_equal(uncut.flat.to_numpy(), second.flat.to_numpy())
    assert resumed.state_dict() == scale.state_dict()


@pytest.mark.parametrize("kernels", ["off", "on"])
def test_the_setting_brings_scale_gradient_and_step_together(monkeypatch, device, kernels):
    monkeypatch.setattr(choices, "look", lambda where: Hardware("cuda", "some GPU", (7, 0), {"precision": "too old"}))
    network = build_network(MlpConfig(hidden=(16,)), REPLAY, SPEC, 1).to(device)
    work = workload(REPLAY, MlpConfig(), AdamConfig(), SPEC, UserCode())
    with format_put_back():
        chosen = choices.choose(
            Job(AccelConfig(precision="fp16", kernels=kernels, graphs="off"), REPLAY, AdamConfig(), device, work),
            network,
        )
    assert chosen.scale is not None
    assert chosen.settings.precision == "fp16"
    update = build_update(
        REPLAY, network, AdamConfig(), torch.Generator(device), gradient=chosen.gradient, stepper=chosen.stepper
    )
    chosen.scale.value.fill_(2.0**24)
    made = [bool(update.learn(batch).made) for batch in batches(device, 16)]
    assert (made[0], made[-1]) == (False, True)
    assert chosen.forgiven() == made.count(False)
    values = chosen.values(network)(next(batches(device, 1)).observation)
    torch.testing.assert_close(values, network.q(next(batches(device, 1)).observation), rtol=1e-2, atol=1e-2)
