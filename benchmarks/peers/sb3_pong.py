"""Trains Stable-Baselines3's DQN on Pong for a while, or only plays, and prints its pace as one JSON line.

usage: .peers/bin/python benchmarks/peers/sb3_pong.py [--env-steps 3000] [--envs 1] [--threads 2] [--acting-only]

The settings are those that RL Baselines3 Zoo publishes for Atari, one update of 32 per 4 steps, but for the size of the
buffer, which would not fit every machine, and for sticky actions instead of random starts.
"""

from __future__ import annotations

import argparse
import json
import time

import ale_py
import gymnasium as gym
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack

PERIOD = 4
START = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-steps", type=int, default=3_000)
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--acting-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gym.register_envs(ale_py)
    env = make_atari_env(
        "ALE/Pong-v5",
        n_envs=options.envs,
        seed=1,
        env_kwargs={"frameskip": 1, "repeat_action_probability": 0.25},
        wrapper_kwargs={"noop_max": 0, "terminal_on_life_loss": False},
    )
    ticks = max(PERIOD // options.envs, 1)
    model = DQN(
        "CnnPolicy",
        VecFrameStack(env, n_stack=4),
        learning_rate=1e-4,
        buffer_size=10_000,
        batch_size=32,
        learning_starts=0 if options.acting_only else START,
        train_freq=ticks,
        gradient_steps=0 if options.acting_only else ticks * options.envs // PERIOD,
        target_update_interval=1_000,
        exploration_initial_eps=0.01,
        exploration_final_eps=0.01,
        seed=1,
        device="cpu",
    )
    model.learn(2 * START)  # the first updates load and allocate
    steps, began = model.num_timesteps, time.perf_counter()
    model.learn(options.env_steps, reset_num_timesteps=False)
    spent = time.perf_counter() - began
    print(json.dumps({"steps_per_s": (model.num_timesteps - steps) / spent}))


if __name__ == "__main__":
    main()
