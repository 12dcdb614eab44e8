"""Trains RLlib's DQN on CartPole-v1 or Pong for a while, and prints its pace as one JSON line.

usage: .peers/bin/python benchmarks/peers/rllib_dqn.py cartpole|pong [--seconds 20] [--runners 0] [--envs 10]

Plain DQN with a uniform replay: one update of 128 in 10 steps for a network of two layers of 128 (cartpole), one of 32
in 4 steps for the Nature network (pong; its games as RLlib wraps them, at 84 x 84). `--runners 0` samples in the
process that learns. The steps and updates that it reports are what RLlib counted in the time that is measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder

import ale_py
import gymnasium as gym
import ray
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

START = 500
STEPS = "num_env_steps_sampled_lifetime"


def pong(settings: Any) -> gym.Env:
    gym.register_envs(ale_py)
    game = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25)
    return wrap_atari_for_new_api_stack(game, dim=84, framestack=4)


NETWORKS = {
    "cartpole": DefaultModelConfig(fcnet_hiddens=[128, 128], fcnet_activation="relu", head_fcnet_hiddens=[]),
    "pong": DefaultModelConfig(
        conv_filters=[[32, 8, 4], [64, 4, 2], [64, 3, 1]],
        conv_activation="relu",
        head_fcnet_hiddens=[512],
        head_fcnet_activation="relu",
    ),
}
UPDATES = {"cartpole": (128, 10), "pong": (32, 4)}
"""The size of a batch, and the steps for each."""


def config(game: str, runners: int, envs: int) -> DQNConfig:
    """Return the settings of a run."""
    batch, period = UPDATES[game]
    return (
        DQNConfig()
        .environment("CartPole-v1" if game == "cartpole" else "pong")
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=envs, rollout_fragment_length=1)
        .learners(num_learners=0)
        .rl_module(model_config=NETWORKS[game])
        .training(
            train_batch_size_per_learner=batch,
            training_intensity=batch / period,
            num_steps_sampled_before_learning_starts=START,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 10_000},
            target_network_update_freq=1000,
            double_q=False,
            dueling=False,
            lr=1e-4,
        )
        .reporting(min_sample_timesteps_per_iteration=0, min_time_s_per_iteration=0.5)
        .debugging(seed=1, log_level="ERROR")
    )


class Counted:
    """Counts the calls of a function."""

    def __init__(self, called: Any) -> None:
        self._called, self.calls = called, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self._called(*arguments, **named)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("game", choices=UPDATES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--runners", type=int, default=0)
    parser.add_argument("--envs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_env("pong", pong)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algorithm = config(options.game, options.runners, options.envs).build_algo()
    updates = algorithm.learner_group.update = Counted(algorithm.learner_group.update)
    while updates.calls < 20:  # the first ones load and allocate
        result = algorithm.train()
    before, steps, began = updates.calls, result[STEPS], time.perf_counter()
    while (spent := time.perf_counter() - began) < options.seconds:
        result = algorithm.train()
    steps = result[STEPS] - steps
    print(json.dumps({"steps_per_s": steps / spent, "steps_per_update": steps / (updates.calls - before)}))
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
