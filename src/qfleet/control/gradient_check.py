"""Whether other settings compute the same gradient: one on the same data, beside the eager float32 one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qfleet.accel.precision import SMALLEST, LossScale, Precision
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.core import seeding
from qfleet.core.tensors import TensorBatch
from qfleet.envs.tensor.games import make_tensor_env
from qfleet.roles.fused.choices import choose, workload_of
from qfleet.roles.fused.player import Player
from qfleet.roles.fused.setup import FusedSetup

TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1, "fp16": 2e-2}
"""Largest length of the difference of two gradients, as a part of the eager one's length. The formats round each factor
of a product by up to 6e-8, 5e-4, 4e-3 and 5e-4 of it. Over all built-in algorithms bf16 came to 5e-2 at most."""
TICKS = 16
"""Random moves that the samples come from."""


def difference(gradient: Tensor, eager: Tensor) -> float:
    """Return the length of the difference [P], as a part of the eager gradient's length; NaN if one is not finite."""
    return float((gradient - eager).norm() / eager.norm().clamp(min=1e-30))


def gradient_of(setup: FusedSetup, data: TensorBatch) -> Tensor:
    """Return the gradient [P] that a fresh network has on the data with the setup's settings."""
    device, agent = torch.device(setup.device), setup.agent
    assert isinstance(agent, ReplayAgent | RolloutAgent)
    network = build_network(setup.network, agent, setup.spec, seed=setup.seed, custom=setup.code.network).to(device)
    choices = choose(setup, network)
    flat, generator = FlatParameters(network), seeding.torch_stream(setup.seed, "probe", device=device)
    network.train().set_generator(generator)
    if isinstance(agent, RolloutAgent):
        regression = choices.gradient(agent, flat, network, None)
        arguments = (data.observation, data.action, data.reward, data.weight)
        return _unscaled(partial(regression.regression, *arguments), flat, choices.scale, generator)
    target = copy.deepcopy(network).explore()
    _ = FlatParameters(target)  # the hand-written networks read their weights from it
    for one in (network, target):
        one.resample_noise(generator)
    return _unscaled(
        partial(choices.gradient(agent, flat, network, target).replay, data), flat, choices.scale, generator
    )


def _unscaled(
    backward: Callable[[], object], flat: FlatParameters, scale: LossScale | None, generator: torch.Generator
) -> Tensor:
    """Return the gradient [P] that `backward` fills; a scale falls until it fits, as it would in a run."""
    random = generator.get_state()
    backward()
    if scale is None:
        return flat.gradients.clone()
    while scale.value > SMALLEST and not flat.gradients.isfinite().all():
        scale.adapt(made=False, loss=torch.zeros_like(scale.value))
        generator.set_state(random)
        backward()
    return flat.gradients / scale.value


@torch.no_grad()
def sample_data(setup: FusedSetup) -> TensorBatch:
    """Return as many samples as one update of the run takes: observations of random play, rewards drawn at random.

    Real rewards are mostly zero, and a gradient of errors near zero says more about rounding than about a loss.
    """
    device, agent = torch.device(setup.device), setup.agent
    assert isinstance(agent, ReplayAgent | RolloutAgent)
    size = max(workload_of(setup).batch, 1)
    generator = seeding.torch_stream(setup.seed, "probe", purpose="data", device=device)
    player = Player(make_tensor_env(setup.env), math.ceil(size / TICKS), generator)
    values, always = torch.zeros(player.envs, setup.spec.actions, device=device), torch.ones((), device=device)
    ticks = [player.tick(lambda observation: values, always) for _ in range(TICKS + 1)]

    def rows(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)[:size]

    names, before, after = list(ticks[0].observation), ticks[:-1], ticks[1:]
    masks = [tick.mask for tick in ticks if tick.mask is not None]
    return TensorBatch(
        observation={name: rows([tick.observation[name] for tick in before]) for name in names},
        action=rows([tick.action for tick in before]),
        reward=torch.randn(size, generator=generator, device=device),
        discount=agent.gamma * (~rows([tick.outcome.terminated for tick in before])).float(),
        next_observation={name: rows([tick.observation[name] for tick in after]) for name in names},
        weight=torch.ones(size, device=device),
        mask=rows(masks[:-1]) if masks else None,
        next_mask=rows(masks[1:]) if masks else None,
        size=size,
    )
