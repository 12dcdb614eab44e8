"""Reads Gymnasium spaces: which arrays an observation has, which joint actions there are, where the mask comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Array, Bools, Leaves

MAX_ACTIONS = 4096
"""Joint actions above which a Q-network with one output each stops making sense."""
MASK_KEY = "action_mask"
"""Where Gymnasium, PettingZoo and RLlib users put the allowed actions: in `info` or in a Dict observation."""

Path = tuple[str | int, ...]


class Misfit(Exception):
    """An observation or mask is not what its space promised; the caller adds environment and step."""


class MaskMisfit(Misfit):
    """A mask is missing or has the wrong shape."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation and how to reach it."""

    name: str
    path: Path
    declared: np.dtype[Any]
    """The dtype the space promises; `spec.dtype` is what is kept (float64 becomes float32)."""
    spec: LeafSpec

    def reach(self, observation: Any) -> Any:
        """Return this leaf's value inside a (batched or single) observation."""
        try:
            for key in self.path:
                observation = observation[key]
        except (KeyError, IndexError, TypeError) as error:
            raise Misfit(f"the observation has no '{self.name}' ({type(error).__name__}: {error})") from None
        return observation

    def fit(self, value: Any, count: int) -> Array:
        """Return the values of `count` environments as one array of the promised shape and kind, or raise Misfit."""
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        if array.shape != (count, *self.spec.shape):
            raise Misfit(f"{self._title} has shape {array.shape[1:]}, its space says {self.spec.shape}")
        if array.dtype != self.declared and not _keeps(array.dtype, self.declared):
            raise Misfit(f"{self._title} has dtype {array.dtype}, its space says {self.declared}")
        return array - self.spec.start if self.spec.start else array

    @property
    def _title(self) -> str:
        return "the observation" if self.name == PLAIN else f"observation '{self.name}'"


@dataclass(frozen=True)
class Layout:
    """How one environment's observations, masks and actions map to arrays."""

    spec: EnvSpec
    """Frame stacks are not in it yet: every leaf is a single frame, unless the environment itself stacks."""
    leaves: tuple[Leaf, ...]
    table: Array
    """[A, ...] the environment's own action for each joint action number."""
    mask_in_observation: bool = False

    def empty(self, count: int) -> Leaves:
        """Return uninitialised leaves [count, ...]."""
        return {leaf.name: np.empty((count, *leaf.spec.shape), leaf.spec.dtype) for leaf in self.leaves}

    def gather(self, observations: Sequence[Any]) -> Leaves:
        """Return the observations of single environments as fresh leaves [len, ...]; raises Misfit."""
        return {leaf.name: self._gathered(leaf, observations) for leaf in self.leaves}

    def first_misfit(self, observations: Sequence[Any]) -> tuple[int, str]:
        """Return which of the observations that `gather` refused is wrong, and how."""
        for index, observation in enumerate(observations):
            try:
                self.gather([observation])
            except Misfit as misfit:
                return index, str(misfit)
        return 0, "the observations of the environments cannot be stacked"

    @staticmethod
    def _gathered(leaf: Leaf, observations: Sequence[Any]) -> Array:
        values = observations if not leaf.path else [leaf.reach(observation) for observation in observations]
        try:
            stacked = np.array(values)
        except ValueError as error:
            raise Misfit(f"values cannot be stacked: {error}") from None
        return leaf.fit(stacked, len(values)).astype(leaf.spec.dtype, copy=False)

    def take(self, observation: Any, count: int) -> Leaves:
        """Return a batched observation of `count` environments as fresh leaves [count, ...]; raises Misfit."""
        return {leaf.name: np.array(leaf.fit(leaf.reach(observation), count), leaf.spec.dtype) for leaf in self.leaves}

    def mask(self, observation: Any, info: Mapping[str, Any], shape: tuple[int, ...]) -> Bools | None:
        """Return the allowed actions of a single ([A]) or batched ([E, A]) observation as a fresh array, if any."""
        if not self.spec.masked:
            return None
        source = observation if self.mask_in_observation else info
        if MASK_KEY not in source:
            raise MaskMisfit(f"no '{MASK_KEY}' came with the observation, although the first reset had one")
        mask = np.array(source[MASK_KEY], bool)
        if mask.shape != shape:
            raise MaskMisfit(f"the action mask has shape {mask.shape}, expected {shape}")
        return mask


def read_layout(
    name: str, observation: spaces.Space[Any], action: spaces.Space[Any], info: Mapping[str, Any]
) -> Layout:
    """Return the layout of an environment; `info` is what one reset returned (a mask may be in it)."""
    table, action_shape, start = _action_table(name, action)
    mask_in_observation = isinstance(observation, spaces.Dict) and MASK_KEY in observation.spaces
    if mask_in_observation:
        assert isinstance(observation, spaces.Dict)
        observation = spaces.Dict({key: space for key, space in observation.spaces.items() if key != MASK_KEY})
    leaves = _leaves(name, observation, ())
    if not leaves:
        raise ConfigError(f"{name}: the observation space {observation} has no array to learn from")
    if len(leaves) == 1:
        only = leaves[0]
        leaves = [Leaf(PLAIN, only.path, only.declared, only.spec)]
    by_name = {leaf.name: leaf.spec for leaf in leaves}
    if len(by_name) < len(leaves):
        raise ConfigError(f"{name}: two parts of the observation share the dotted name of one leaf; rename a key")
    spec = EnvSpec(
        name=name,
        observations=by_name,
        actions=len(table),
        action_shape=action_shape,
        action_start=start,
        masked=mask_in_observation or MASK_KEY in info,
    )
    return Layout(spec, tuple(leaves), table, mask_in_observation)


def _leaves(name: str, space: spaces.Space[Any], path: Path) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in _leaves(name, part, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for key, part in enumerate(space.spaces) for leaf in _leaves(name, part, (*path, key))]
    title = ".".join(map(str, path)) or PLAIN
    if isinstance(space, spaces.Discrete):
        spec = LeafSpec(shape=(), dtype="int64", categories=int(space.n), start=int(space.start))
        return [Leaf(title, path, np.dtype(np.int64), spec)]
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        declared = np.dtype(space.dtype)
        kept = "float32" if declared.kind == "f" else declared.name
        shape = tuple(int(size) for size in space.shape)
        return [Leaf(title, path, declared, LeafSpec(shape=shape, dtype=kept))]
    raise ConfigError(
        f"{name}: observation '{title}' is a {type(space).__name__} space; "
        "supported are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these. Wrap the environment."
    )


def _action_table(name: str, space: spaces.Space[Any]) -> tuple[Array, tuple[int, ...], int]:
    """Return (the environment's action for each joint number [A, ...], sizes of the parts, first action's number)."""
    if isinstance(space, spaces.Discrete):
        _refuse_too_many(name, (int(space.n),))
        return np.arange(space.n, dtype=np.int64) + space.start, (), int(space.start)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        if isinstance(space, spaces.MultiDiscrete):
            sizes, first = space.nvec, space.start
        else:
            sizes, first = np.full(space.shape, 2), np.zeros(space.shape, int)
        parts = tuple(int(size) for size in sizes.ravel())
        _refuse_too_many(name, parts)
        joint = np.stack(np.unravel_index(np.arange(math.prod(parts)), parts), axis=-1).reshape(-1, *space.shape)
        return (joint + first).astype(space.dtype), parts, 0
    if isinstance(space, spaces.Box):
        raise ConfigError(
            f"{name} has continuous actions ({space}); Q-learning chooses among discrete ones. Libraries that learn "
            "continuous control (SAC, TD3, PPO): Stable-Baselines3, CleanRL, TorchRL. Or discretise the actions."
        )
    raise ConfigError(
        f"{name}: actions are a {type(space).__name__} space; supported are Discrete, MultiDiscrete and MultiBinary. "
        "Wrap the environment."
    )


def _refuse_too_many(name: str, parts: tuple[int, ...]) -> None:
    joint = math.prod(parts)
    if joint > MAX_ACTIONS:
        arithmetic = " x ".join(map(str, parts)) + f" = {joint:,}" if len(parts) > 1 else f"{joint:,}"
        raise ConfigError(
            f"{name}: {arithmetic} joint actions; at most {MAX_ACTIONS:,} are supported, one Q-value each. "
            "Reduce the action space in a wrapper."
        )


def _keeps(given: np.dtype[Any], declared: np.dtype[Any]) -> bool:
    """Return whether values of dtype `given` may stand where `declared` was promised."""
    if declared.kind == "f":
        return given.kind in "fiub"
    return np.can_cast(given, declared, "safe")
