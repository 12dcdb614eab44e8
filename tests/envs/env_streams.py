"""Turns ticks into the transitions that a learner would see, for comparing adapters with each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from qfleet.envs import VectorEnv

Transition = tuple[Any, ...]


def transitions(env: VectorEnv, seeds: list[int], actions: np.ndarray) -> list[list[Transition]]:
    """Return for each environment its (observation, action, reward, ended, truncated, next observation, mask)."""
    observation, mask = env.reset(seeds)
    streams: list[list[Transition]] = [[] for _ in seeds]
    taken = [0] * len(seeds)
    for _ in range(len(actions)):
        # Each environment has its own script of actions, so that reset-only ticks use none up.
        chosen = np.array([actions[taken[index], index] for index in range(len(seeds))])
        tick = env.step(chosen)
        finals = dict(zip(tick.finished.tolist(), range(len(tick.finished)), strict=True))
        for index in np.flatnonzero(tick.valid).tolist():
            after = {
                name: (tick.final_observation[name][finals[index]] if index in finals else leaf[index]).tobytes()
                for name, leaf in tick.observation.items()
            }
            after_mask = tick.final_mask if index in finals else tick.mask
            row = finals.get(index, index)
            streams[index].append(
                (
                    {name: leaf[index].tobytes() for name, leaf in observation.items()},
                    None if mask is None else mask[index].tolist(),
                    int(chosen[index]),
                    float(tick.reward[index]),
                    bool(tick.terminated[index]),
                    bool(tick.truncated[index]),
                    after,
                    None if after_mask is None else after_mask[row].tolist(),
                )
            )
            taken[index] += 1
        observation, mask = tick.observation, tick.mask
    return streams


def record(env: VectorEnv, actions: np.ndarray) -> list[Any]:
    """Step through the actions [T, E] and return everything that came of them, as comparable values."""
    log: list[Any] = []
    for action in actions:
        tick = env.step(action)
        log.append(
            {
                name: value.tobytes()
                if isinstance(value, np.ndarray)
                else {key: leaf.tobytes() for key, leaf in value.items()}
                if isinstance(value, dict)
                else value
                for name, value in vars(tick).items()
            }
        )
    return log
