"""Acts in environments and sends what happens: where every transition begins.

Receives: Weights (latest value).
Sends: Experience to its replay shard, or Rollouts to the learner when there is no replay.
Waits for: room in that stream; without a replay also for the weights that its last rollout led to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field

from qfleet.algo.agent import AgentConfig
from qfleet.algo.exploration import ExplorationConfig, choose, epsilons
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import NetworkConfig, build_network
from qfleet.core import seeding
from qfleet.core.config import Config
from qfleet.core.metrics import Window
from qfleet.core.protocols import Counter, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Experience, Rollout, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import EnvConfig, make_env
from qfleet.roles.recorder import RolloutRecorder, RowRecorder
from qfleet.roles.weight_store import WeightReader


class ActorConfig(Config):
    """How much one actor does at a time."""

    envs: int = Field(8, gt=0, le=65_536)
    """Environments of each actor."""
    unroll: int = Field(1, gt=0, le=4096)
    """Ticks of all environments between two messages."""


@dataclass(frozen=True)
class ActorSetup:
    """Everything an actor is built from, besides its handles."""

    actor: ActorConfig
    env: EnvConfig
    spec: EnvSpec
    network: NetworkConfig
    agent: AgentConfig
    exploration: ExplorationConfig
    seed: int
    index: int
    actors: int
    env_steps: int
    """Budget of the whole run."""
    code: UserCode


@dataclass(frozen=True)
class ActorHandles:
    """What an actor sees of the run."""

    experience: Sender[Experience | Rollout]
    weights: Subscriber[Weights]
    env_steps: Counter


class Actor(Role):
    """A vector of environments and a copy of the network."""

    kind = "actor"

    def __init__(self, setup: ActorSetup, handles: ActorHandles) -> None:
        self._setup, self._handles = setup, handles
        envs = setup.actor.envs
        self._first_env, self._total_envs = setup.index * envs, setup.actors * envs
        self._network = build_network(
            setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network
        )
        self._network.explore()
        self._noise = seeding.torch_stream(setup.seed, self.kind, setup.index, "noise")
        self._network.set_generator(self._noise)
        self._weights = WeightReader(FlatParameters(self._network), handles.weights)
        self._rng = seeding.numpy_stream(setup.seed, self.kind, setup.index, "actions")
        self._env = make_env(setup.env, envs, factory=setup.code.env)
        seeds = seeding.episode_seeds(setup.seed, "training", envs, first=self._first_env)
        self._observation, self._mask = self._env.reset(seeds)
        self._recorder: RowRecorder | RolloutRecorder = (
            RowRecorder(setup.spec, f"{self.kind}-{setup.index}", self._first_env)
            if setup.agent.kind == "replay"
            else RolloutRecorder()
        )
        self._acted_with: Version | None = None
        self._returns, self._lengths, self._episodes = Window(100), Window(100), 0

    def step(self) -> Status:
        """Act for a few ticks and send what happened."""
        if self._handles.env_steps.total() >= self._setup.env_steps:
            self._handles.experience.close()
            return DONE
        if not self._handles.experience.ready():
            return Idle("what was sent is not used up yet", wake_on=(self._handles.experience,))
        self._weights.refresh()
        if isinstance(self._recorder, RolloutRecorder) and self._weights.version == self._acted_with:
            return Idle("no newer weights yet", wake_on=(self._weights.edge,), deadline=0.01)
        self._acted_with = self._weights.version
        for _ in range(self._setup.actor.unroll):
            self._tick()
        self._handles.experience.send(self._recorder.message(self._weights.version))
        return WORKED

    def _tick(self) -> None:
        self._network.resample_noise(self._noise)
        with torch.inference_mode():
            q = self._network.q({name: torch.from_numpy(leaf) for name, leaf in self._observation.items()}).numpy()
        action = choose(q, self._epsilons(), self._mask, self._rng)
        tick = self._env.step(action)
        self._recorder.add(self._observation, self._mask, action, tick)
        self._observation, self._mask = tick.observation, tick.mask
        self._handles.env_steps.add(int(np.count_nonzero(tick.valid)))
        for score, length in zip(tick.scores, tick.score_lengths, strict=True):
            self._returns.add(float(score))
            self._lengths.add(float(length))
            self._episodes += 1

    def _epsilons(self) -> Any:
        step = self._handles.env_steps.total()
        return epsilons(self._setup.exploration, step, self._first_env, self._setup.actor.envs, self._total_envs)

    def metrics(self) -> Mapping[str, float]:
        """Return episode statistics and the present exploration."""
        values = {"episodes": float(self._episodes), "epsilon": float(self._epsilons().mean())}
        if self._episodes:
            values |= {"episode_return": self._returns.mean(), "episode_length": self._lengths.mean()}
        return values

    def state_dict(self) -> State:
        """Return environments, random streams, weights and statistics."""
        return {
            "env": self._env.state_dict(),
            "rng": seeding.numpy_state(self._rng),
            "noise": self._noise.get_state(),
            "weights": self._weights.state_dict(),
            "acted_with": self._acted_with,
            "sequence": self._recorder.sequence if isinstance(self._recorder, RowRecorder) else 0,
            "statistics": [self._returns.state_dict(), self._lengths.state_dict(), self._episodes],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue; environments that cannot be restored begin new episodes, and their streams are cut."""
        self._env.load_state_dict(state["env"])
        self._observation, self._mask = self._env.current()
        seeding.restore_numpy(self._rng, state["rng"])
        self._noise.set_state(state["noise"])
        self._weights.load_state_dict(state["weights"])
        self._acted_with = state["acted_with"]
        if isinstance(self._recorder, RowRecorder):
            self._recorder.sequence = state["sequence"]
            self._recorder.cut(self._env.cut)
        returns, lengths, self._episodes = state["statistics"]
        self._returns.load_state_dict(returns)
        self._lengths.load_state_dict(lengths)

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
