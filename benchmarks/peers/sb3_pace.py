"""Trains Stable-Baselines3's DQN on CartPole-v1 with one update of batch 128 per 10 steps, and prints its pace as JSON.

usage: .peers/bin/python benchmarks/peers/sb3_pace.py [--env-steps 10000]
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from stable_baselines3 import DQN

START = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        batch_size=128,
        train_freq=10,
        gradient_steps=1,
        learning_starts=START,
        policy_kwargs={"net_arch": [128, 128]},
        seed=1,
    )
    model.learn(2 * START)  # the first updates load and allocate
    began = time.perf_counter()
    model.learn(options.env_steps, reset_num_timesteps=False)
    spent = time.perf_counter() - began
    print(json.dumps({"steps_per_s": options.env_steps / spent}))


if __name__ == "__main__":
    main()
