"""Environments of the EnvPool library: many games in C++ threads, resumed by cutting open episodes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from pydantic import Field, field_validator

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, MissingExtra, did_you_mean
from qfleet.core.spec import LeafSpec
from qfleet.core.types import Bools, Leaves
from qfleet.envs.gymvector import GymVector
from qfleet.envs.reward import AS_IT_IS, RewardShaping
from qfleet.envs.spaces import Layout, Leaf, read_layout

_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_type", "reward_clip")
_LIFE_LOSS = ("episodic_life", "zero_discount_on_life_loss")


class EnvPoolConfig(Config):
    """An EnvPool task."""

    kind: Literal["envpool"] = "envpool"
    id: str
    """EnvPool's task id, such as "Pong-v5" or "CartPole-v1"."""
    kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """EnvPool's own options, such as `repeat_action_probability`; whatever is not given keeps EnvPool's default."""
    reward_scale: float = Field(1.0, gt=0)
    """Rewards for learning are multiplied by this, after clipping; scores are not."""
    reward_clip: float | None = Field(None, gt=0)
    """Rewards for learning are limited to plus or minus this; None for no limit. EnvPool's own clipping stays off."""
    threads: int = Field(0, ge=0)
    """Threads that step the environments; 0 leaves the choice to EnvPool."""

    @field_validator("kwargs")
    @classmethod
    def _refuse_what_is_ours(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for key in kwargs:
            if key in _OURS:
                raise ValueError(
                    f"'{key}' is set by qfleet; use the fields reward_clip and threads, and the run's seed"
                )
            if key in _LIFE_LOSS:
                raise ValueError(f"'{key}' is not supported: its frame stacks reach across episodes; use kind 'atari'")
        return kwargs


class PoolEnv(GymVector):
    """EnvPool in its synchronous form; it takes its seeds when it is made, so that a reset makes it anew."""

    def __init__(self, config: EnvPoolConfig, num_envs: int, evaluation: bool = False) -> None:
        self._config = config
        pool = _build(config, num_envs, seed=0)
        layout = _read(config.id, pool)
        shaping = AS_IT_IS if evaluation else RewardShaping(config.reward_scale, config.reward_clip)
        super().__init__(_Sized(pool, num_envs), layout, shaping)

    @property
    def protocol(self) -> dict[str, Any]:
        """Every option of the pool, EnvPool's defaults among them."""
        options = self._env.pool.spec.config._asdict()
        unrelated = {"base_path", "num_threads", "thread_affinity_offset", "seed", "env_seed", "num_envs", "batch_size"}
        return {
            key: value
            for key, value in options.items()
            if key not in unrelated and isinstance(value, bool | int | float | str)
        }

    def render(self) -> NDArray[np.uint8]:
        """Return the newest grey frame of environment 0 as RGB; only image tasks can be drawn."""
        frame = next(iter(self._observation.values()))[0]
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise ConfigError(f"{self.spec.name}: EnvPool gives no image of this task; evaluate it with kind 'gym'")
        return np.repeat(frame[-1].astype(np.uint8)[:, :, None], 3, axis=2)

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        assert which.all(), "EnvPool cannot be restarted in part"
        self._pending[:] = False
        seeds = [self._draw_seed(index) % 2**31 for index in range(self.num_envs)]
        self._env.close()
        self._env = _Sized(_build(self._config, self.num_envs, seeds), self.num_envs)
        observation, infos = self._call("reset()", self._env.reset)
        return self._take(observation), self._take_mask(observation, infos)


class _Sized:
    """The part of Gymnasium's vector interface that EnvPool's objects lack."""

    def __init__(self, pool: Any, num_envs: int) -> None:
        self.pool, self.num_envs = pool, num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.reset, self.step, self.close = pool.reset, pool.step, pool.close


def _build(config: EnvPoolConfig, num_envs: int, seed: int | list[int]) -> Any:
    try:
        import envpool
    except ImportError:
        raise MissingExtra("envpool", "envpool", f"the EnvPool task '{config.id}'") from None
    known = envpool.list_all_envs()
    if config.id not in known:
        raise ConfigError(f"EnvPool has no task '{config.id}'.{did_you_mean(config.id, known)}")
    options: dict[str, Any] = dict(config.kwargs)
    if hasattr(envpool.make_spec(config.id).config, "reward_clip"):
        options["reward_clip"] = False
    try:
        return envpool.make(
            config.id, env_type="gymnasium", num_envs=num_envs, num_threads=config.threads, seed=seed, **options
        )
    except Exception as error:
        raise ConfigError(
            f"EnvPool does not make '{config.id}' with {config.kwargs}: {type(error).__name__}: {error}"
        ) from error


def _read(name: str, pool: Any) -> Layout:
    """Return the layout; a task with a `stack_num` stacks its own frames and repeats the first one."""
    layout = read_layout(f"envpool:{name}", pool.observation_space, pool.action_space, {})
    depth = int(getattr(pool.spec.config, "stack_num", 1))
    if depth == 1:
        return layout
    leaves = tuple(_stacked(leaf, depth) for leaf in layout.leaves)
    return Layout(layout.spec.replace(observations={leaf.name: leaf.spec for leaf in leaves}), leaves, layout.table)


def _stacked(leaf: Leaf, depth: int) -> Leaf:
    if not leaf.spec.shape or leaf.spec.shape[0] != depth:
        return leaf  # colour frames are stacked inside the channel axis, which no replay of single frames can undo
    spec: LeafSpec = leaf.spec.replace(stack=depth, stack_padding="repeat")
    return Leaf(leaf.name, leaf.path, leaf.declared, spec)
