"""PQN on CartPole-v1 as plain eager torch: the fixed loop that qfleet's speed on a CPU is measured against.

    python benchmarks/pqn_eager.py [--env-steps 100000] [--threads 1 2] [--seed 1]

Nothing here is tuned for speed but what every such loop has: vectorised environments and torch's fused Adam. The loop
runs once for each number of threads; the last line is the fastest as JSON. It imports nothing of qfleet.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ENVS, TICKS = 32, 64
EPOCHS, MINIBATCHES = 4, 16
GAMMA, LAMBDA, REWARD_SCALE = 0.99, 0.95, 0.1


def build_network(observations: int, actions: int, hidden: int = 256) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(observations, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, actions),
    )


def make_envs() -> gym.vector.VectorEnv:
    """CartPole's own vectorised form, which steps 32 environments many times faster than SyncVectorEnv does."""
    return gym.make_vec("CartPole-v1", num_envs=ENVS, vectorization_mode="vector_entry_point")


def learn_minibatch(
    network: nn.Module, optimizer: torch.optim.Optimizer, observation: Tensor, action: Tensor, goal: Tensor
) -> Tensor:
    """One gradient step of the values of the actions [B] towards their goals [B]; returns the loss."""
    value = network(observation).gather(1, action.unsqueeze(1)).squeeze(1)
    loss = 0.5 * F.mse_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimizer.step()
    return loss.detach()


class Rollouts:
    """Plays T ticks of E environments at a time, epsilon-greedily."""

    def __init__(self, network: nn.Module, seed: int) -> None:
        self.envs, self.network, self.rng = make_envs(), network, np.random.default_rng(seed)
        self.observation, _ = self.envs.reset(seed=seed)
        self.reset = np.zeros(ENVS, bool)  # the next tick only resets: Gymnasium ignores its action
        self.running, self.returns = np.zeros(ENVS), [0.0]

    @torch.no_grad()
    def play(self, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        """Observations [S, D], actions [S] and Q(lambda) goals [S] of the ticks that were not resets."""
        observation = np.zeros((TICKS + 1, ENVS, self.observation.shape[1]), np.float32)
        action, reward = np.zeros((TICKS, ENVS), np.int64), np.zeros((TICKS, ENVS), np.float32)
        terminated, ended, valid = (np.zeros((TICKS, ENVS), bool) for _ in range(3))
        for t in range(TICKS):
            observation[t], valid[t] = self.observation, ~self.reset
            greedy = self.network(torch.from_numpy(observation[t])).argmax(1).numpy()
            explore = self.rng.random(ENVS) < epsilon
            action[t] = np.where(explore, self.rng.integers(0, 2, ENVS), greedy)
            self.observation, reward[t], terminated[t], truncated, _ = self.envs.step(action[t])
            ended[t] = self.reset = terminated[t] | truncated
            self._count(reward[t] * valid[t])
        observation[-1] = self.observation
        goal = self._goals(torch.from_numpy(observation), reward, terminated, ended)
        rows = torch.from_numpy(valid.reshape(-1).nonzero()[0])
        return (
            torch.from_numpy(observation[:-1]).flatten(0, 1)[rows],
            torch.from_numpy(action).flatten()[rows],
            goal[rows],
        )

    def _goals(self, observation: Tensor, reward: np.ndarray, terminated: np.ndarray, ended: np.ndarray) -> Tensor:
        """The lambda-returns [T * E]; they stop at an episode's end, and bootstrap there unless it terminated."""
        following = self.network(observation[1:].flatten(0, 1)).amax(1).view(TICKS, ENVS)
        discount = GAMMA * torch.from_numpy(~terminated).float()
        share = LAMBDA * torch.from_numpy(~ended).float()
        share[-1] = 0
        goal, goals = following[-1], torch.zeros(TICKS, ENVS)
        for t in reversed(range(TICKS)):
            ahead = share[t] * goal + (1 - share[t]) * following[t]
            goals[t] = goal = torch.from_numpy(reward[t]) * REWARD_SCALE + discount[t] * ahead
        return goals.flatten()

    def _count(self, reward: np.ndarray) -> None:
        self.running += reward
        self.returns += self.running[self.reset].tolist()
        self.running[self.reset] = 0


def train(env_steps: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    network = build_network(4, 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4, fused=True)
    rollouts = Rollouts(network, seed)
    steps, start = 0, time.perf_counter()
    while steps < env_steps:
        observation, action, goal = rollouts.play(epsilon=max(0.05, 1 - steps / (0.3 * env_steps)))
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(action)).tensor_split(MINIBATCHES):
                learn_minibatch(network, optimizer, observation[chosen], action[chosen], goal[chosen])
        steps += len(action)
    seconds = time.perf_counter() - start
    recent = rollouts.returns[-100:]
    return {"seconds": seconds, "env_steps": steps, "steps_per_s": steps / seconds, "return": sum(recent) / len(recent)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-steps", type=int, default=100_000)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        results.append({"peer": "pqn_eager", "threads": threads, **train(options.env_steps, options.seed)})
        print("{threads} threads: {steps_per_s:,.0f} steps/s, mean return {return:.0f}".format(**results[-1]))
    print(json.dumps(max(results, key=lambda result: result["steps_per_s"])))


if __name__ == "__main__":
    main()
