"""A large network's gradient in bfloat16 on a CPU: that of float32 within rounding, and the same every time."""

from __future__ import annotations

import numpy as np
import torch

from qfleet.accel.choices import Job, choose
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import NatureConfig
from qfleet.algo.updates import ReplayUpdate, build_update
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch
from qfleet.core.usercode import UserCode

SPEC = EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=4)
AGENT, OPTIM, CPU = ReplayAgent(double=True), AdamConfig(), torch.device("cpu")
ROUNDING = 0.1
"""Of a parameter's gradient, relative: as torch's own bfloat16 on a GPU."""


def gradient_in(precision: str) -> dict[str, torch.Tensor]:
    """The gradient of one batch, by parameter, as a run with this setting computes it."""
    network = build_network(NatureConfig(), AGENT, SPEC, seed=0)
    work = workload(AGENT, NatureConfig(), OPTIM, SPEC, UserCode())
    chosen = choose(Job(AccelConfig(precision=precision), AGENT, OPTIM, CPU, work), network)
    assert chosen.settings.precision == precision
    made_by = {"gradient": chosen.gradient, "stepper": chosen.stepper}
    update = build_update(AGENT, network, OPTIM, torch.Generator().manual_seed(0), 100, **made_by)
    assert isinstance(update, ReplayUpdate)
    assert update(batch()).updates == 1
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def batch(size: int = 16) -> Batch:
    rng = np.random.default_rng(0)
    frames = rng.integers(256, size=(2, size, 4, 84, 84), dtype=np.uint8)
    return Batch(
        observation={PLAIN: frames[0]},
        action=rng.integers(4, size=size),
        reward=rng.normal(size=size).astype(np.float32),
        discount=np.full(size, 0.99, np.float32),
        next_observation={PLAIN: frames[1]},
        weight=np.ones(size, np.float32),
        index=np.arange(size),
        generation=np.zeros(size, np.int64),
        global_size=size,
    )


def test_the_gradient_is_that_of_float32_within_rounding() -> None:
    exact, rounded = gradient_in("fp32"), gradient_in("bf16")
    errors = {name: float((rounded[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    assert max(errors.values()) < ROUNDING, errors
    assert max(errors.values()) > 1e-4  # or nothing was rounded


def test_the_same_batch_gives_the_same_bits() -> None:
    first, second = gradient_in("bf16"), gradient_in("bf16")
    assert all(torch.equal(first[name], second[name]) for name in first)
