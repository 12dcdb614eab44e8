"""Environments: Gymnasium, Atari, EnvPool and tensor-native games behind one interface, and small ones of our own."""

from qfleet.envs.atari import AtariConfig
from qfleet.envs.gym import Factory, GymConfig, wrap_vector
from qfleet.envs.make import EnvConfig, env_spec, make_env
from qfleet.envs.pool import EnvPoolConfig
from qfleet.envs.reward import RewardShaping
from qfleet.envs.small import register_small
from qfleet.envs.tensor.games import TensorConfig, register_games
from qfleet.envs.vector import Tick, VectorEnv

__all__ = [
    "AtariConfig",
    "EnvConfig",
    "EnvPoolConfig",
    "Factory",
    "GymConfig",
    "RewardShaping",
    "TensorConfig",
    "Tick",
    "VectorEnv",
    "env_spec",
    "make_env",
    "wrap_vector",
]

register_small()
register_games()
