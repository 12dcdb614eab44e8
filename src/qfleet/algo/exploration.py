"""Which actions are taken at random: the epsilon of each environment of the run, and the choice itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from qfleet.algo.schedules import Schedule
from qfleet.algo.targets import allow
from qfleet.core.config import Config
from qfleet.core.types import Bools, Floats, Ints


class EpsilonGreedyConfig(Schedule):
    """One epsilon for all environments, which falls with the environment steps of the whole run."""

    kind: Literal["epsilon_greedy"] = "epsilon_greedy"
    """Selects this exploration."""
    start: float = Field(default=1.0, ge=0, le=1)
    """Share of random actions at step 0."""
    end: float = Field(default=0.05, ge=0, le=1)
    """Share of random actions from `steps` on."""
    steps: int = Field(default=10_000, gt=0)
    """Environment steps of the whole run (not of one environment) that the change takes."""


class LadderConfig(Config):
    """A constant epsilon of its own for each of the run's N environments: base ** (1 + alpha * i / (N - 1)) (Ape-X)."""

    kind: Literal["ladder"] = "ladder"
    """Selects this exploration."""
    base: float = Field(default=0.4, gt=0, lt=1)
    """Epsilon of the first environment, the most curious one."""
    alpha: float = Field(default=7.0, ge=0)
    """How far the ladder reaches down: the last environment has base ** (1 + alpha)."""


class NoneConfig(Config):
    """No random actions: for noisy networks, which explore by themselves."""

    kind: Literal["none"] = "none"
    """Selects this exploration."""


ExplorationConfig = Annotated[EpsilonGreedyConfig | LadderConfig | NoneConfig, Field(discriminator="kind")]


def epsilons(config: ExplorationConfig, env_steps: int, first_env: int, num_envs: int, total_envs: int) -> Floats:
    """Return the epsilon [num_envs] of environments `first_env`, `first_env` + 1, ... of a run of `total_envs`.

    `env_steps` counts the steps of the whole run, so a resumed run goes on where it was.
    """
    if isinstance(config, EpsilonGreedyConfig):
        return np.full(num_envs, config.at(env_steps), np.float32)
    if isinstance(config, LadderConfig):
        rung = np.arange(first_env, first_env + num_envs) / max(total_envs - 1, 1)
        return (config.base ** (1 + config.alpha * rung)).astype(np.float32)
    return np.zeros(num_envs, np.float32)


def choose(q: NDArray[np.floating[Any]], epsilon: Floats, mask: Bools | None, rng: np.random.Generator) -> Ints:
    """Return an action [E] for each row of `q` [E, A]: random with probability `epsilon` [E], else the first best.

    Each environment has its own coin. Only actions allowed by `mask` [E, A] are taken; each row must allow one. Every
    call draws 2 E numbers whatever comes of them, so that the stream depends only on how often it was used.
    """
    coin, dice = rng.random((2, len(q)))
    if mask is None:
        greedy = q.argmax(axis=1)
        chance = (dice * q.shape[1]).astype(np.int64)
    else:
        greedy = np.where(mask, q, -np.inf).argmax(axis=1)
        allowed = mask.cumsum(axis=1)
        chance = (allowed > (dice * allowed[:, -1]).astype(np.int64)[:, None]).argmax(axis=1)
    actions: Ints = np.where(coin < epsilon, chance, greedy)
    return actions


def choose_tensors(q: Tensor, epsilon: Tensor, mask: Tensor | None, random: Tensor) -> Tensor:
    """Do what `choose` does on the device of `q` [E, A]; `random` [E, 2] holds each environment's coin and dice."""
    coin, dice = random.unbind(1)
    if mask is None:
        chance = (dice * q.shape[1]).long().clamp_(max=q.shape[1] - 1)  # a float32 product may round up
    else:
        allowed = mask.cumsum(1)
        chance = (allowed > (dice * allowed[:, -1]).long().unsqueeze(1)).int().argmax(1)
    return torch.where(coin < epsilon, chance, allow(q, mask).argmax(1))
