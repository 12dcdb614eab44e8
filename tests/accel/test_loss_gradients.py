"""The loss kernels in the gradient of whole networks: equal to the eager gradient, alone and in the fused loop."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from qfleet.accel.choices import Choices
from qfleet.accel.loss_gradients import LossKernelGradient, supports
from qfleet.accel.precision import LossScale
from qfleet.accel.steps import DeviceStep
from qfleet.accel.table import EAGER
from qfleet.algo.agent import MunchausenConfig, ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.heads import CategoricalConfig, ImplicitQuantileConfig, QuantileConfig, ScalarConfig
from qfleet.algo.networks import build_network
from qfleet.algo.steps import GradientStep
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch
from qfleet.core.usercode import UserCode
from qfleet.envs import env_spec
from qfleet.experiment import with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.roles.fused import loop as fused_loop
from qfleet.roles.fused.replay_loop import ReplayLoop
from qfleet.setups import fused_setup

# By the interpreter NumPy computes what a GPU would, and remarks on each infinity.
pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|divide by zero|overflow):RuntimeWarning")
SPEC = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=3)
NETWORK, SIZE = MlpConfig(hidden=(16,)), 5
HEADS = {
    "scalar": ScalarConfig(),
    "categorical": CategoricalConfig(atoms=7, v_min=-3, v_max=3),
    "quantile": QuantileConfig(quantiles=6),
    "implicit": ImplicitQuantileConfig(taus=4, target_taus=3, acting_taus=5, cosines=8),
}
SOFT = {"munchausen": MunchausenConfig()}
CASES = [
    *((head, {}) for head in HEADS),
    *((head, {"double": True, "dueling": True}) for head in HEADS),
    *((head, SOFT) for head in HEADS if head != "categorical"),
    ("scalar", {"loss": "mse"}),
    ("categorical", {"noisy": True, "double": True}),
]


def batch(device, masked=False):
    random = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(device)

    masks = [(torch.rand(SIZE, 3, generator=random) < 0.6).to(device) if masked else None for _ in range(2)]
    return TensorBatch(
        observation={PLAIN: normal(SIZE, 4)},
        action=torch.randint(3, (SIZE,), generator=random).to(device),
        reward=2 * normal(SIZE),
        discount=0.9 * (normal(SIZE) > -0.5).float(),
        next_observation={PLAIN: normal(SIZE, 4)},
        weight=normal(SIZE).abs(),
        mask=masks[0],
        next_mask=masks[1],
        size=SIZE + 2,
    )


def gradient_by(kind, agent, device, **options):
    online, target = (build_network(NETWORK, agent, SPEC, seed).to(device) for seed in (1, 2))
    flat, _ = FlatParameters(online), FlatParameters(target)
    random = torch.Generator(device).manual_seed(3)
    online.train().set_generator(random)
    for network in (online, target.explore()):
        network.resample_noise(random)
    return kind(agent, flat, online, target, **options), flat


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("head", "changes"), CASES)
def test_equal_to_the_eager_gradient(device, head, changes, masked):
    agent, data = ReplayAgent(head=HEADS[head], **changes), batch(device, masked)
    eager, eager_flat = gradient_by(EagerGradient, agent, device)
    ours, flat = gradient_by(LossKernelGradient, agent, device, precision="fp32")
    for _ in range(2):  # the memory serves again, and random numbers go on alike
        expected, found = eager.replay(data), ours.replay(data)
        close(found.total, expected.total)
        close(found.priority, expected.priority)
        close(found.metrics["q_mean"], expected.metrics["q_mean"])
        close(flat.gradients, eager_flat.gradients)
    assert eager_flat.gradients.norm() > 1e-3


@pytest.mark.parametrize("head", HEADS)
def test_a_loss_scale_multiplies_the_gradient_and_nothing_else(device, head):
    agent, data = ReplayAgent(head=HEADS[head]), batch(device)
    plain, plain_flat = gradient_by(LossKernelGradient, agent, device, precision="fp32")
    scale = LossScale(device, initial=1024.0)
    scaled, flat = gradient_by(LossKernelGradient, agent, device, precision="fp32", scale=scale)
    assert torch.equal(plain.replay(data).total, scaled.replay(data).total)
    assert torch.equal(flat.gradients, plain_flat.gradients * 1024)


def test_float16_is_within_its_rounding(device):
    agent, data = ReplayAgent(head=HEADS["categorical"], double=True), batch(device)
    eager, eager_flat = gradient_by(EagerGradient, agent, device)
    scale = LossScale(device, initial=1024.0)
    ours, flat = gradient_by(LossKernelGradient, agent, device, precision="fp16", scale=scale)
    eager.replay(data)
    ours.replay(data)
    difference = flat.gradients / 1024 - eager_flat.gradients
    assert 0 < difference.norm() < 5e-3 * eager_flat.gradients.norm()


def test_what_it_accepts():
    def network(agent, **changes):
        return build_network(NETWORK.replace(**changes), agent, SPEC, 0)

    assert supports(network(ReplayAgent()), ReplayAgent())
    assert not supports(network(ReplayAgent(), dropout=0.1), ReplayAgent())
    assert not supports(network(RolloutAgent()), RolloutAgent())


def played(monkeypatch, algo, gradient, stepper, device):
    """Return a loop that has learned a little by this gradient."""
    few = {"agent.head.atoms": 7} if algo == "c51" else {"agent.head.quantiles": 6} if algo == "qr" else {}
    game = {"network.hidden": [16], "actor.envs": 4, "learner.batch_size": 4, "learner.learning_starts": 24}
    changes = {**game, **few, "learner.train_period": 16.0, "replay.capacity": 400, "device": device.type}
    experiment = with_changes(apply(preset("cartpole"), algo), changes)
    choices = Choices(EAGER, gradient, stepper, small=False, description="")
    monkeypatch.setattr(fused_loop, "choose", lambda setup, network: copy.copy(choices))
    loop = ReplayLoop(fused_setup(experiment, env_spec(experiment.env), UserCode()))
    for _ in range(2):
        loop.advance()
    assert loop.update.updates > 5
    return loop


@pytest.mark.parametrize("stepper", [GradientStep, DeviceStep])
@pytest.mark.parametrize("algo", ["dqn", "c51", "qr"])
def test_the_fused_loop_learns_the_same_with_it(monkeypatch, algo, stepper, device):
    eager = played(monkeypatch, algo, EagerGradient, stepper, device)
    ours = played(monkeypatch, algo, partial(LossKernelGradient, precision="fp32"), stepper, device)
    assert ours.steps == eager.steps
    torch.testing.assert_close(ours.update.flat.parameters, eager.update.flat.parameters, rtol=1e-4, atol=1e-5)
