"""The one place where a configuration becomes environments."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from pydantic import Field

from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.envs.atari import AtariConfig, AtariEnv
from qfleet.envs.gym import Factory, GymConfig, make_gym
from qfleet.envs.pool import EnvPoolConfig, PoolEnv
from qfleet.envs.reward import AS_IT_IS, RewardShaping
from qfleet.envs.tensor.games import TensorConfig, make_tensor_env
from qfleet.envs.vector import VectorEnv

EnvConfig = Annotated[GymConfig | AtariConfig | EnvPoolConfig | TensorConfig, Field(discriminator="kind")]


def make_env(
    config: GymConfig | AtariConfig | EnvPoolConfig | TensorConfig,
    num_envs: int,
    *,
    evaluation: bool = False,
    render: bool = False,
    factory: Factory | None = None,
    mends: bool = False,
) -> VectorEnv:
    """Return `num_envs` environments that are stepped together.

    With `evaluation`, rewards are the environment's own and only its own rules end an episode. With `render`,
    environment 0 can be drawn. A `factory` makes the environments instead of `config.id` (kind "gym" only). Where it
    `mends`, an exception of one that is stepped alone costs its episode, in place of being raised.
    """
    if isinstance(config, GymConfig):
        return make_gym(config, num_envs, evaluation, render, factory, mends)
    if factory is not None:
        raise ConfigError(f"an environment factory goes with kind 'gym', not '{config.kind}'")
    if isinstance(config, AtariConfig):
        return AtariEnv(config, num_envs, evaluation)
    if isinstance(config, EnvPoolConfig):
        return PoolEnv(config, num_envs, evaluation)
    return _make_tensor(config, num_envs, evaluation)


def _make_tensor(config: TensorConfig, num_envs: int, evaluation: bool) -> VectorEnv:
    from qfleet.envs.tensor.vector import TensorVector  # here, since it loads torch

    shaping = AS_IT_IS if evaluation else RewardShaping(config.reward_scale, config.reward_clip)
    return TensorVector(make_tensor_env(config, evaluation), num_envs, shaping, config.options)


def env_spec(config: GymConfig | AtariConfig | EnvPoolConfig | TensorConfig, factory: Factory | None = None) -> EnvSpec:
    """Return what an agent has to know of the environment; makes one, looks at it and closes it."""
    if isinstance(config, GymConfig) and config.vectorisation == "async":
        config = config.replace(vectorisation="sync")  # the same spaces without a process
    with closing(make_env(config, 1, factory=factory)) as env:
        return env.spec
