"""Trains Stable-Baselines3's DQN on CartPole-v1 with its tuned settings, and prints how long it took as one JSON line.

usage: .peers/bin/python benchmarks/peers/sb3_cartpole.py --seed 201

Time runs from the first environment step to the third evaluation in a row (20 episodes each, every 1,000 steps) with a
mean return of 475 or more; the time that evaluations take is left out. Then the kept model plays 100 unseen episodes.
"""

from __future__ import annotations

import argparse
import json
import time

import gymnasium as gym
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

TARGET_SCORE = 475.0
EVALUATE_EVERY = 1_000
STEP_BUDGET = 150_000

# The settings that RL Baselines3 Zoo publishes for CartPole-v1.
TUNED = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
# Exploration decays over a fraction of the planned steps: the Zoo plans 50,000, and our budget must not stretch it.
ZOO_STEPS = 50_000


def mean_return(model: DQN, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy over whole episodes of an environment with its own seed."""
    env = make_vec_env("CartPole-v1", n_envs=min(episodes, 20), seed=seed)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=episodes, deterministic=True)
    env.close()
    return float(mean)


class StopAtThirdInARow(BaseCallback):
    """Evaluates every 1,000 steps, counts the successes in a row, and keeps time without the evaluations."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.in_a_row = 0
        self.evaluation_s = 0.0

    def _on_training_start(self) -> None:
        self.start = time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps % EVALUATE_EVERY:
            return True
        paused = time.perf_counter()
        score = mean_return(self.model, episodes=20, seed=1_000_000 * (self.seed + 1) + self.num_timesteps)
        self.in_a_row = self.in_a_row + 1 if score >= TARGET_SCORE else 0
        self.evaluation_s += time.perf_counter() - paused
        return self.in_a_row < 3

    def seconds(self) -> float:
        """Training time so far."""
        return time.perf_counter() - self.start - self.evaluation_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Stable-Baselines3 DQN on CartPole-v1, tuned settings")
    parser.add_argument("--seed", type=int, required=True)
    seed = parser.parse_args().seed

    torch.set_num_threads(1)
    settings = {**TUNED, "exploration_fraction": TUNED["exploration_fraction"] * ZOO_STEPS / STEP_BUDGET}
    model = DQN("MlpPolicy", Monitor(gym.make("CartPole-v1")), seed=seed, device="cpu", **settings)
    clock = StopAtThirdInARow(seed)
    model.learn(total_timesteps=STEP_BUDGET, callback=clock)
    seconds = clock.seconds()
    result = {
        "peer": "stable-baselines3",
        "seed": seed,
        "seconds": round(seconds, 3),
        "env_steps": model.num_timesteps,
        "steps_per_s": round(model.num_timesteps / seconds, 1),
        "solved": clock.in_a_row == 3,
        "final_mean": mean_return(model, episodes=100, seed=1_000_000_000 + seed),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
