"""The fused loop of rollout agents (PQN): play a rollout on the device, value it, learn from it, forget it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor

from qfleet.accel.rehearsal import Rehearsal
from qfleet.algo.agent import RolloutAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.targets import allow, lambda_returns
from qfleet.algo.updates import RolloutUpdate, build_update
from qfleet.roles.fused.loop import Loop, Progress
from qfleet.roles.fused.memory import require_memory
from qfleet.roles.fused.setup import FusedSetup
from qfleet.roles.fused.team import Team


class RolloutLoop(Loop):
    """One network and E environments; one piece is one rollout of T ticks and all updates on it."""

    update: RolloutUpdate

    def __init__(self, setup: FusedSetup, team: Team | None = None) -> None:
        super().__init__(setup, team)
        assert isinstance(setup.agent, RolloutAgent)
        self._agent = setup.agent
        require_memory(setup, self.update.flat.parameters.numel())
        self._latest: dict[str, Tensor] = {}
        self._working = self.recording(self._work)
        # While torch's compiler fuses the game, which is mostly waiting, our kernels for the network can be compiled.
        self._rehearsal = (
            Rehearsal(partial(self._rehearse, deepcopy(self.update.online))) if self.choices.small_cnn else None
        )

    @property
    def evaluated(self) -> FlatParameters:
        """The network's weights."""
        return self.update.flat

    def advance(self) -> Progress:
        """Play one rollout and learn from it."""
        before, tried = self.update.updates, self._agent.epochs * self._agent.minibatches
        self.set_epsilon()
        # Ticks that only begin an episode are no steps, so how many rollouts the budget takes shows on the way.
        self.update.prepare(math.ceil(before * self.setup.env_steps / self.steps) if self.steps else None)
        self._working()
        made = self.update.updates - before
        if made < tried:
            tried -= min(self._take_empty(), tried - made)
        return Progress(self.count_steps(), made, tried, tried - made, tried if made == 0 else 0)

    def _take_empty(self) -> int:
        """Return how many minibatches were left out for lack of weight; one rank that has none is enough."""
        empty = self.update.take_empty()
        return empty if self.team is None or self.team.apart else self.team.total(empty)

    def _work(self) -> None:
        played = self._play()
        if self._rehearsal is not None:
            self._rehearsal.end()
        self._latest = self.update.learn(played).metrics

    def _rehearse(self, online: QNetwork) -> None:
        """Act and learn with a network of the same shape, on what is seen now."""
        setup, ticks = self.setup, self._agent.rollout_length
        generator = torch.Generator(self.device)
        update = build_update(
            setup.agent, online, setup.optim, generator, 1, gradient=self.choices.gradient, stepper=self.choices.stepper
        )
        assert isinstance(update, RolloutUpdate)
        seen = self.player.env.observe(self.player.state)
        self.choices.values(online)(seen)
        samples = ticks * setup.envs
        update.prepare()
        update.learn(
            RolloutTensors(
                observation={name: torch.cat([leaf] * ticks) for name, leaf in seen.items()},
                action=torch.zeros(samples, dtype=torch.int64, device=self.device),
                goal=torch.zeros(samples, device=self.device),
                weight=torch.ones(samples, device=self.device),
            )
        )

    @torch.no_grad()
    def _play(self) -> RolloutTensors:
        """Return T ticks of E environments as T * E samples; those that only began an episode have weight 0."""
        agent, online = self._agent, self.update.online.eval()
        ticks, rewards, values = [], [], []
        for _ in range(agent.rollout_length):
            ticked, reward = self.tick()
            ticks.append(ticked)
            rewards.append(reward)
            values.append(allow(ticked.q, ticked.mask).amax(1))
        # What a tick leads to is what the next one acts on, and the network stays the same meanwhile.
        last, mask = self.player.observation, self.player.env.mask(self.player.state)
        next_value = torch.stack([*values[1:], allow(self._values(last), mask).amax(1)])
        online.train()
        outcomes = [tick.outcome for tick in ticks]
        terminated = torch.stack([outcome.terminated for outcome in outcomes])
        continues = ~(terminated | torch.stack([outcome.truncated for outcome in outcomes]))
        continues[-1] = False
        discount = agent.gamma * (~terminated).float()
        reward = torch.stack(rewards)
        goal = lambda_returns(reward, discount, next_value, continues, agent.q_lambda)
        return RolloutTensors(
            observation={name: torch.cat([tick.observation[name] for tick in ticks]) for name in last},
            action=torch.cat([tick.action for tick in ticks]),
            goal=goal.flatten(),
            weight=torch.cat([outcome.valid for outcome in outcomes]).float(),
        )

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers worth watching. Waits for the device."""
        return {**super().metrics(), **{name: float(value) for name, value in self._latest.items()}}
