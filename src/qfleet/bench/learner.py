"""Updates alone: on a GPU whole ones of the Nature network with its replay, on a CPU small networks beside plain torch.

On a CPU the candidates take turns, and each figure is the best round in CPU time, so that other load counts little.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qfleet.accel.mlp import MlpGradient
from qfleet.accel.steps import DeviceStep
from qfleet.algo.agent import ReplayAgent, RolloutAgent, SoftTargetConfig
from qfleet.algo.gradients import DeepAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.torsos import MlpConfig
from qfleet.algo.updates import ReplayUpdate, RolloutUpdate, build_update
from qfleet.bench import nature
from qfleet.bench.table import Row
from qfleet.bench.timing import Work, per_second
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch

BATCH, TAU, GAMMA = 128, 0.03, 0.97
CARTPOLE = EnvSpec(name="CartPole", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=2)
OPTIM = AdamConfig(lr=5e-4, eps=1e-8)
_MILLION = 1e6


def measure(rounds: int = 10, round_s: float = 0.05) -> list[Row]:
    """Time what the device at hand is for."""
    if torch.cuda.is_available():
        return nature_rows(nature.LENGTH, nature.ENVS, torch.device("cuda"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_beside(what, works, rounds, round_s) for what, works in _small_updates().items()]
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------- on a GPU


def nature_rows(length: int, envs: int, device: torch.device) -> list[Row]:
    """Time whole updates, and draws alone, from a full grid of `length` ticks of E environments."""
    from qfleet.accel.nature import NatureGradient

    grid = nature.filled_grid(length, envs, torch.Generator(device).manual_seed(1))
    rates = {}
    for batch, at_once in ((32, 32), (1024, 8)):
        update = nature.build(NatureGradient, DeviceStep, grid.generator)
        learning = nature.Learning(grid, update, batch, at_once, recorded=True)
        rates[batch] = per_second(learning, 1.0) * at_once
    drawn = per_second(nature.Sampling(grid, 8192, 8, recorded=True), 1.0) * 8 * 8192 / _MILLION
    learned, what = rates[1024] * 1024 / _MILLION, "Double DQN, prioritised, Nature network, whole update, batch"
    return [
        _floor(f"{what} 32", rates[32], "updates/s", 5_000, 10_000),
        _floor(f"{what} 1024", learned, "M transitions/s", 1.5, 2.5),
        _floor(f"prioritised draws from {grid.rows:,} frames, batch 8192", drawn, "M transitions/s", 10, 30),
    ]


def _floor(what: str, figure: float, unit: str, floor: float, goal: float) -> Row:
    shown = f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"
    return Row(what, f"{shown} {unit}", goal=f"at least {floor:,g}, aim {goal:,g}", met=figure >= floor)


# ---------------------------------------------------------------------------------------------------- on a CPU


def _beside(what: str, works: tuple[Work, Work], rounds: int, round_s: float) -> Row:
    """Time ours and plain torch in turns."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for number, work in enumerate(works):
            best[number] = min(best[number], _seconds_each(work, round_s))
    ours, plain = best
    return Row(what, f"{1 / ours:,.0f} updates/s", f"{1 / plain:,.0f} updates/s (plain torch)", plain / ours)


def _seconds_each(work: Work, round_s: float) -> float:
    work()
    began, calls = time.process_time(), 0
    while (spent := time.process_time() - began) < round_s or not calls:
        work()
        calls += 1
    return spent / calls


def _small_updates() -> dict[str, tuple[Work, Work]]:
    """Return ours and plain torch, by what they do."""
    batch, generator = random_batch(), torch.Generator().manual_seed(0)
    agent = ReplayAgent(double=True, gamma=GAMMA, target=SoftTargetConfig(tau=TAU))
    replay = _build(agent, MlpConfig(hidden=(128, 128)), generator)
    assert isinstance(replay, ReplayUpdate)
    rollout = _build(RolloutAgent(epochs=1, minibatches=1), MlpConfig(hidden=(256, 256), layer_norm=True), generator)
    assert isinstance(rollout, RolloutUpdate)
    data = RolloutTensors(batch.observation, batch.action, batch.reward)
    return {
        f"Double DQN update, soft target, MLP 128-128, batch {BATCH}": (
            partial(replay.learn, batch),
            PlainDoubleDqn(batch),
        ),
        f"PQN minibatch, MLP 256-256 with LayerNorm, batch {BATCH}": (partial(rollout.learn, data), PlainPqn(batch)),
    }


def _build(agent: DeepAgent, config: MlpConfig, generator: torch.Generator) -> object:
    return build_update(agent, build_network(config, agent, CARTPOLE, seed=0), OPTIM, generator, gradient=MlpGradient)


def random_batch() -> TensorBatch:
    """Return transitions of nothing in particular."""
    numbers = torch.Generator().manual_seed(0)
    observation, following = ({PLAIN: torch.randn(BATCH, 4, generator=numbers)} for _ in range(2))
    action, reward = torch.randint(2, (BATCH,), generator=numbers), torch.rand(BATCH, generator=numbers)
    discount, weight = torch.full((BATCH,), GAMMA), torch.ones(BATCH)
    return TensorBatch(observation, action, reward, discount, following, weight, None, None, BATCH)


class PlainDoubleDqn:
    """A Double-DQN update as one would write it with torch alone, with its fused Adam."""

    def __init__(self, batch: TensorBatch) -> None:
        self._batch = batch
        self.online, self.target = _mlp(128, layer_norm=False), _mlp(128, layer_norm=False)
        self.target.load_state_dict(self.online.state_dict())
        self._adam = torch.optim.Adam(self.online.parameters(), lr=OPTIM.lr, fused=True)

    def __call__(self) -> None:
        """Make one update."""
        batch = self._batch
        with torch.no_grad():
            best = self.online(batch.next_observation[PLAIN]).argmax(1, keepdim=True)
            following = self.target(batch.next_observation[PLAIN]).gather(1, best).squeeze(1)
            goal = batch.reward + batch.discount * following
        value = self.online(batch.observation[PLAIN]).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        _step(self._adam, F.smooth_l1_loss(value, goal))
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TAU)


class PlainPqn:
    """A minibatch of PQN as one would write it with torch alone, with its fused Adam."""

    def __init__(self, batch: TensorBatch) -> None:
        self._batch, self.network = batch, _mlp(256, layer_norm=True)
        self._adam = torch.optim.Adam(self.network.parameters(), lr=OPTIM.lr, fused=True)

    def __call__(self) -> None:
        """Make one update; its minibatch is taken from the whole, as ours is."""
        batch, chosen = self._batch, torch.randperm(BATCH)
        value = self.network(batch.observation[PLAIN][chosen])
        value = value.gather(1, batch.action[chosen].unsqueeze(1)).squeeze(1)
        _step(self._adam, F.smooth_l1_loss(value, batch.reward[chosen]))


def _step(adam: torch.optim.Optimizer, loss: Tensor) -> None:
    adam.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    adam.step()


def _mlp(width: int, layer_norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (4, width):
        layers += [nn.Linear(inputs, width), *([nn.LayerNorm(width)] if layer_norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))
