"""Any tensor-native game as an ordinary Gymnasium environment; its numbers come from Gymnasium's generator."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from qfleet.core.spec import LeafSpec
from qfleet.envs.spaces import MASK_KEY
from qfleet.envs.tensor.games import checked_options, make_game
from qfleet.envs.tensor.picture import Picture
from qfleet.envs.tensor.protocol import GameState


class TensorGame(gymnasium.Env[Any, Any]):
    """One game at a time; its time limit is Gymnasium's wrapper."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(self, game: str, render_mode: str | None = None, **options: Any) -> None:
        """`options` are those of the game's class, such as `sticky` of the MinAtar games."""
        self._game = make_game(game, **checked_options(game, options))
        spec = self._game.spec
        leaves = {name: _space(leaf) for name, leaf in spec.observations.items()}
        self.observation_space = next(iter(leaves.values())) if spec.plain else spaces.Dict(leaves)
        self.action_space = spaces.Discrete(spec.actions)
        self.render_mode = render_mode
        self._state: GameState = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a new game."""
        super().reset(seed=seed)
        self._state = self._game.start(self._random())
        return self._look()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take an action, a whole number from 0 on; raises ValueError for one that the game does not have."""
        chosen = torch.tensor([self._checked(action)])
        self._state, reward, over = self._game.move(self._state, chosen, self._random())
        observation, info = self._look()
        return observation, float(reward), bool(over), False, info

    def render(self) -> Picture | None:
        """Return the game as an RGB image [height, width, 3], where that is the render mode."""
        return None if self.render_mode is None else self._game.draw(self._state, 0)

    def _checked(self, action: Any) -> int:
        count = self._game.spec.actions
        with contextlib.suppress(TypeError):  # of what is no whole number
            if 0 <= (number := operator.index(action)) < count:
                return number
        raise ValueError(f"action {action!r} is not in the action space: a whole number from 0 to {count - 1}")

    def _random(self) -> torch.Tensor:
        return torch.from_numpy(self.np_random.random((1, self._game.draws), dtype=np.float32))

    def _look(self) -> tuple[Any, dict[str, Any]]:
        leaves = {name: leaf[0].numpy().copy()[()] for name, leaf in self._game.observe(self._state).items()}
        mask = self._game.mask(self._state)
        info = {} if mask is None else {MASK_KEY: mask[0].numpy().astype(np.int8)}
        return next(iter(leaves.values())) if self._game.spec.plain else leaves, info


def _space(leaf: LeafSpec) -> spaces.Space[Any]:
    """Return the space of one leaf; numbers with a fraction have no bounds."""
    if leaf.categories is not None:
        return spaces.Discrete(leaf.categories)
    dtype = np.dtype(leaf.dtype)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
    highest = 1 if dtype.kind == "b" else np.iinfo(dtype).max
    return spaces.Box(0, highest, leaf.shape, dtype.type)
