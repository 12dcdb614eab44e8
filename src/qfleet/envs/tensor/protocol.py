"""What a tensor-native game is, and how its episodes follow one another: pure functions over batched tensors.

Everything has the environments first. Nothing here, and nothing in a game, waits for the device or branches on a value
of a tensor, so that a whole loop of these functions can be compiled or captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qfleet.core.spec import EnvSpec

GameState = dict[str, Tensor]
"""All that the future of E games depends on, by name, each [E, ...]; functions return new ones, never change theirs."""


class Game(ABC):
    """The rules of one game. A state, an action and random numbers decide what comes next; there is no other source."""

    spec: EnvSpec
    """Observations and actions."""
    draws: int
    """Uniform numbers in [0, 1) that one environment takes in one tick, to start or to move."""

    @abstractmethod
    def start(self, random: Tensor) -> GameState:
        """Return new games for `random` [E, draws], on its device."""

    @abstractmethod
    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Return what actions [E] lead to: the next state, rewards [E] float32, and whether the rules end it [E]."""

    @abstractmethod
    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return the observation leaves [E, ...] with the names and types of `spec`."""

    def mask(self, state: GameState) -> Tensor | None:
        """Return the allowed actions [E, A], for a game that restricts them."""
        return None

    @abstractmethod
    def draw(self, state: GameState, index: int) -> NDArray[np.uint8]:
        """Return game `index` as an RGB picture [height, width, 3]; may wait for the device."""


@dataclass(frozen=True)
class Outcome:
    """What one tick of E environments brought."""

    reward: Tensor  # [E] float32, as the rules have it
    terminated: Tensor  # [E] bool
    truncated: Tensor  # [E] bool, by the time limit
    valid: Tensor  # [E] bool: false where this tick only began a new episode; its action was ignored


class TensorEnv:
    """Plays a game again and again: the tick after an episode's end ignores the action and starts the next one.

    So the observation after an episode's last action is seen as such, as in Gymnasium's NEXT_STEP mode. The state is
    the game's with two more entries: `ended` [E] bool, the episode is over; `age` [E] int32, its ticks so far.
    """

    def __init__(self, game: Game, time_limit: int | None = None) -> None:
        """Truncate episodes after `time_limit` steps; None plays by the rules alone."""
        self.game, self.time_limit = game, time_limit
        self.spec, self.draws = game.spec, game.draws

    def reset(self, random: Tensor) -> GameState:
        """Return E environments at the start of an episode, for `random` [E, draws]."""
        state = self.game.start(random)
        envs, device = len(random), random.device
        ended = torch.zeros(envs, dtype=torch.bool, device=device)
        return {**state, "ended": ended, "age": torch.zeros(envs, dtype=torch.int32, device=device)}

    def step(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Outcome]:
        """Take actions [E] int64 and `random` [E, draws]; return the next state and what happened."""
        game = {name: value for name, value in state.items() if name not in ("ended", "age")}
        moved, reward, terminated = self.game.move(game, action, random)
        fresh, resets = self.game.start(random), state["ended"]
        valid = ~resets
        age = torch.where(resets, 0, state["age"] + 1)
        terminated = terminated & valid
        truncated = torch.zeros_like(terminated)
        if self.time_limit is not None:
            truncated = (age >= self.time_limit) & ~terminated & valid
        following = {name: torch.where(_like(resets, value), fresh[name], value) for name, value in moved.items()}
        reward = torch.where(resets, torch.zeros_like(reward), reward)
        state = {**following, "ended": terminated | truncated, "age": age}
        return state, Outcome(reward, terminated, truncated, valid)

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return the observation leaves [E, ...] to act on next, or that an ended episode ended with."""
        return self.game.observe(state)

    def mask(self, state: GameState) -> Tensor | None:
        """Return the allowed actions [E, A], for a game that restricts them."""
        return self.game.mask(state)


def below(random: Tensor, count: int | Tensor) -> Tensor:
    """Return whole numbers from 0 to `count` - 1 as int64, equally likely, from uniform numbers in [0, 1)."""
    return (random * count).long().clamp(max=count - 1)  # a float32 product may round up to the count


def _like(flag: Tensor, value: Tensor) -> Tensor:
    """Return a flag [E] with as many axes as `value` [E, ...]."""
    return flag.view(-1, *[1] * (value.ndim - 1))


def to_arrays(state: GameState) -> dict[str, Any]:
    """Return a state as arrays, for a checkpoint."""
    return {name: value.cpu().numpy().copy() for name, value in state.items()}


def to_state(arrays: dict[str, Any], device: torch.device) -> GameState:
    """Return the state that `to_arrays` was given, on a device."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in arrays.items()}
