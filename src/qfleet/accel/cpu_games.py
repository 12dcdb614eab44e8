"""A tick of a tensor-native game on a CPU in one compiled call: what a few environments cost otherwise is overhead.

Only CartPole has one. It computes in float64 and keeps float32, so it is equal to the tensor form but for rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.compiled import BOOLS, FLOATS, INTS, MATRIX, compiled, part
from qfleet.core.types import Bools, Floats, Ints
from qfleet.envs.tensor import cartpole
from qfleet.envs.tensor.protocol import GameState, Outcome
from qfleet.replay.sumtree import Doubles

_GAMES, _COUNTS = f"Tuple(({MATRIX},{BOOLS},int32[::1]))", f"Tuple(({FLOATS},float64[::1],{INTS}))"
_CONSTANTS, _FLAGS = "UniTuple(float64,8)", "boolean[:,::1]"
_NO_LIMIT = 2**31 - 1
_PHYSICS = (
    cartpole.GRAVITY,
    cartpole.FORCE / cartpole.TOTAL_MASS,
    cartpole.POLE_MASS * cartpole.HALF_LENGTH / cartpole.TOTAL_MASS,
    cartpole.HALF_LENGTH,
    cartpole.POLE_MASS / cartpole.TOTAL_MASS,
    cartpole.TICK,
    cartpole.FARTHEST,
    cartpole.STEEPEST,
)


@part
def _choose(values: Floats, epsilon: Floats, random: Floats, action: Ints) -> None:
    """Fill the actions [E]: at random with probability `epsilon` [E], else the first best of `values` [E, A].

    The first two columns of `random` are each environment's coin and dice.
    """
    actions = values.shape[1]
    for e in range(len(action)):
        best = 0
        for a in range(1, actions):
            if values[e, a] > values[e, best]:
                best = a
        chance = min(int(random[e, 1] * actions), actions - 1)  # a float32 product may round up
        action[e] = chance if random[e, 0] < epsilon[e] else best


@part
def _push(physics: Floats, action: int, constants: tuple[float, ...]) -> None:
    """Move one cart [4] on by one tick."""
    gravity, force, coupling, half_length, share, tick, _, _ = constants
    velocity, angle, spin = float(physics[1]), float(physics[2]), float(physics[3])
    cos, sin = math.cos(angle), math.sin(angle)
    push = (force if action == 1 else -force) + coupling * spin * spin * sin
    twist = (gravity * sin - cos * push) / (half_length * (4 / 3 - share * cos * cos))
    physics[0] += tick * velocity
    physics[1] += tick * (push - coupling * twist * cos)
    physics[2] += tick * spin
    physics[3] += tick * twist


@part
def _play(
    physics: Floats,
    ended: Bools,
    age: Ints,
    action: Ints,
    random: Floats,
    limit: int,
    constants: tuple[float, ...],
    reward: Floats,
    flags: Bools,
) -> None:
    """Move E carts on, or begin anew where an episode has ended; fill rewards [E] and an outcome's flags [3, E]."""
    farthest, steepest = np.float32(constants[6]), np.float32(constants[7])
    for e in range(len(action)):
        resets = ended[e]
        if resets:
            for number in range(4):
                physics[e, number] = random[e, number + 2] * np.float32(0.1) - np.float32(0.05)
            age[e] = 0
        else:
            _push(physics[e], action[e], constants)
            age[e] += 1
        terminated = not resets and (abs(physics[e, 0]) > farthest or abs(physics[e, 2]) > steepest)
        truncated = not resets and not terminated and age[e] >= limit
        reward[e], ended[e] = not resets, terminated or truncated
        flags[0, e], flags[1, e], flags[2, e] = terminated, truncated, not resets


@part
def _count(reward: Floats, flags: Bools, age: Ints, returns: Floats, finished: Doubles, steps: Ints) -> None:
    """Count as `Player` does: returns [E] of open episodes, what ended [3], and transitions [1]."""
    for e in range(len(reward)):
        returns[e] += reward[e]
        steps[0] += flags[2, e]
        if flags[0, e] or flags[1, e]:
            finished[0] += 1
            finished[1] += returns[e]
            finished[2] += age[e]
            returns[e] = 0


@compiled(_GAMES, _COUNTS, MATRIX, FLOATS, MATRIX, "int64", _CONSTANTS, INTS, FLOATS, _FLAGS)
def _tick(
    games: tuple[Floats, Bools, Ints],
    counts: tuple[Floats, Doubles, Ints],
    values: Floats,
    epsilon: Floats,
    random: Floats,
    limit: int,
    constants: tuple[float, ...],
    action: Ints,
    reward: Floats,
    flags: Bools,
) -> None:
    """Choose, play and count."""
    physics, ended, age = games
    _choose(values, epsilon, random, action)
    _play(physics, ended, age, action, random, limit, constants, reward, flags)
    _count(reward, flags, age, *counts)


class CartPoleMove:
    """A tick of CartPole in place: `choose_tensors`, then `TensorEnv.step`, then what `Player` counts."""

    def __init__(self, time_limit: int | None, state: GameState, counts: tuple[Tensor, Tensor, Tensor]) -> None:
        """Take the state and counts that change, whose tensors must stay; truncate after `time_limit` steps."""
        self._limit = _NO_LIMIT if time_limit is None else time_limit
        self._games: Any = tuple(state[name].numpy() for name in ("physics", "ended", "age"))
        self._counts: Any = tuple(tensor.view(-1).numpy() for tensor in counts)

    def __call__(self, values: Tensor, epsilon: Tensor, mask: Tensor | None, random: Tensor) -> tuple[Tensor, Outcome]:
        """Choose actions [E] by values [E, A], epsilon [E] or scalar, and `random` [E, 6]; return what came of them.

        CartPole allows every action, so there is no mask.
        """
        envs = len(random)
        action, reward, flags = np.empty(envs, np.int64), np.empty(envs, np.float32), np.empty((3, envs), np.bool_)
        q, chance, numbers = (each.contiguous().numpy() for each in (values.float(), epsilon.expand(envs), random))
        _tick(self._games, self._counts, q, chance, numbers, self._limit, _PHYSICS, action, reward, flags)
        outcome = Outcome(torch.from_numpy(reward), *torch.from_numpy(flags).unbind())
        return torch.from_numpy(action), outcome
