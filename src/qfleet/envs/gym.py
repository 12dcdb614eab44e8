"""Makes environments that are registered with Gymnasium, or that the user's own factory returns."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from pydantic import Field, model_validator

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, QfleetError, did_you_mean
from qfleet.envs.faults import raised
from qfleet.envs.guarded import guarded
from qfleet.envs.gymvector import GymVector
from qfleet.envs.loop import Environment, LoopEnv, build_all, close_quietly
from qfleet.envs.reward import AS_IT_IS, RewardShaping
from qfleet.envs.spaces import Layout, read_layout
from qfleet.envs.vector import VectorEnv
from qfleet.envs.worker import Maker
from qfleet.envs.workers import WorkersEnv

Factory = Callable[[], Any]
"""Returns a new `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` with as many environments as are asked for."""


class GymConfig(Config):
    """An environment with Gymnasium's interface."""

    kind: Literal["gym"] = "gym"
    id: str
    """The registered id, such as "CartPole-v1" or "my_module:MyEnv-v0"; with a factory, the name used in messages."""
    kwargs: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Passed to the environment when it is made."""
    vectorisation: Literal["sync", "async", "native"] = "sync"
    """One after the other in the actor's process, each in its own process, or the environment's own vector version."""
    step_timeout: float = Field(60.0, gt=0)
    """Seconds that a step or reset of an environment in a process of its own may take; a longer one is taken for hung:
    its episode is cut and its process begun anew, after five losses in a row no more (vectorisation "async")."""
    frame_stack: int = Field(1, ge=1, le=64)
    """How many of the newest frames an observation holds; Box observations only."""
    reward_scale: float = Field(1.0, gt=0)
    """Rewards for learning are multiplied by this, after clipping; scores are not."""
    reward_clip: float | None = Field(None, gt=0)
    """Rewards for learning are limited to plus or minus this; None for no limit."""
    time_limit: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated, instead of the registered limit."""
    autoreset: Literal["auto", "disabled", "next_step", "same_step"] = "auto"
    """Who begins the next episode: "auto" is "disabled" (qfleet does, exact resume) wherever that is possible."""

    @model_validator(mode="after")
    def _native_decides_itself(self) -> GymConfig:
        if self.vectorisation == "native" and self.autoreset != "auto":
            raise ValueError("a native vector environment decides itself how it resets; leave autoreset at 'auto'")
        return self


_MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


def make_gym(
    config: GymConfig, num_envs: int, evaluation: bool, render: bool, factory: Factory | None, mends: bool = False
) -> VectorEnv:
    """Return `num_envs` environments; see `qfleet.envs.make_env`."""
    shaping = AS_IT_IS if evaluation else RewardShaping(config.reward_scale, config.reward_clip)
    if config.vectorisation == "native":
        return wrap_vector(_native(config, num_envs, factory), config.id, shaping, config.frame_stack)
    factories = [partial(_build, config, render and index == 0, factory) for index in range(num_envs)]
    first = factories[0]()
    if isinstance(first, gymnasium.vector.VectorEnv):
        return wrap_vector(_sized(first, num_envs, config.id), config.id, shaping, config.frame_stack)
    try:
        layout = layout_of(first, config.id)
        if config.vectorisation == "sync" and config.autoreset not in _MODES:
            envs = [first, *build_all(factories[1:])]
            return LoopEnv(envs, layout, shaping, config.frame_stack, factories if mends else (), evaluation)
    except BaseException:
        close_quietly(first)
        raise
    close_quietly(first)
    if config.autoreset not in _MODES:
        makers = [Maker(make, "" if factory else config.id) for make in factories]
        return WorkersEnv(makers, layout, shaping, config.frame_stack, config.step_timeout, evaluation)
    vector = SyncVectorEnv if config.vectorisation == "sync" else AsyncVectorEnv
    env = vector(guarded(factories, layout), autoreset_mode=_MODES[config.autoreset])
    return GymVector(env, layout, shaping, config.frame_stack)


def wrap_vector(
    env: Any, name: str = "vector environment", shaping: RewardShaping = AS_IT_IS, frame_stack: int = 1
) -> VectorEnv:
    """Return a user's own `gymnasium.vector.VectorEnv`, in any of the three autoreset modes, as qfleet sees it."""
    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise ConfigError(f"{name}: expected a gymnasium.vector.VectorEnv, got {type(env).__name__}")
    layout = _layout(env, name, "single_")
    return GymVector(env, layout, shaping, frame_stack)


def layout_of(env: Environment, name: str) -> Layout:
    """Return the layout of one environment; resets it once, to see whether masks come with its observations."""
    return _layout(env, name, "")


def _layout(env: Any, name: str, prefix: str) -> Layout:
    for space in ("observation_space", "action_space"):
        if not hasattr(env, prefix + space):
            raise ConfigError(f"{name} has no {prefix}{space}; set it in the environment's constructor")
    try:
        _, info = env.reset(seed=0)
    except Exception as error:
        raise ConfigError(f"{name}: {raised('reset(seed=0)', error)}") from error
    return read_layout(name, getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space"), info)


def _build(config: GymConfig, render: bool, factory: Factory | None) -> Any:
    if factory is None:
        options: dict[str, Any] = {} if config.time_limit is None else {"max_episode_steps": config.time_limit}
        if render:  # only then: not every environment takes the argument
            options["render_mode"] = "rgb_array"
        return _made(config.id, partial(_make_one, config.id, **options), config.kwargs)
    env = _made(config.id, factory, {})
    if isinstance(env, gymnasium.vector.VectorEnv):
        return env
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{config.id}: the factory returned a {type(env).__name__}, not a gymnasium.Env")
    return env if config.time_limit is None else gymnasium.wrappers.TimeLimit(env, config.time_limit)


def _make_one(env_id: str, **options: Any) -> Environment:
    """Return a registered environment without the wrappers that check what the adapters here make sure of."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    spec = gymnasium.registry.get(name)
    unwatched = name if spec is None else dataclasses.replace(spec, order_enforce=False)
    return gymnasium.make(unwatched, disable_env_checker=True, **options)


def _native(config: GymConfig, num_envs: int, factory: Factory | None) -> Any:
    if factory is not None:
        return _sized(_made(config.id, factory, {}), num_envs, config.id)
    limit: dict[str, Any] = {} if config.time_limit is None else {"max_episode_steps": config.time_limit}
    make = partial(gymnasium.make_vec, config.id, num_envs=num_envs, vectorization_mode="vector_entry_point", **limit)
    return _made(config.id, make, config.kwargs)


def _made(name: str, make: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what `make` returns; whatever it raises instead is one error that names the environment."""
    try:
        return make(**kwargs)
    except QfleetError:
        raise
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        reason, _, _ = str(error).partition(" Did you mean")  # the hint here knows the versions too
        end = "" if reason.endswith((".", "?")) else "."
        near = did_you_mean(name, gymnasium.registry)
        own = near or " A class of your own is given in Python: env=CLASS in qfleet.train, resume and evaluate."
        raise ConfigError(f"no environment '{name}': {reason}{end}{own}") from error
    except Exception as error:
        given = f" with kwargs {kwargs}" if kwargs else ""
        raise ConfigError(f"{name} cannot be made{given}: {type(error).__name__}: {error}") from error


def _sized(env: Any, num_envs: int, name: str) -> Any:
    if getattr(env, "num_envs", None) != num_envs:
        have = getattr(env, "num_envs", "no")
        raise ConfigError(f"{name}: the factory's vector environment has {have} environments, {num_envs} are asked for")
    return env
