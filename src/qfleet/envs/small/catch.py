"""Catch the falling ball: the smallest task with images and a delayed reward."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Image = NDArray[np.uint8]
_PIXELS = 16


class Catch(gymnasium.Env[Image, Any]):
    """A ball falls one row a step; the paddle below moves left, stays or moves right. Caught pays 1, missed -1."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(self, rows: int = 10, columns: int = 5, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (1, rows, columns), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.render_mode = render_mode
        self._rows, self._columns = rows, columns
        self._row = self._ball = self._paddle = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Image, dict[str, Any]]:
        """Drop a ball from a random column; the paddle starts in the middle."""
        super().reset(seed=seed)
        self._row, self._paddle = 0, self._columns // 2
        self._ball = int(self.np_random.integers(self._columns))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Image, float, bool, bool, dict[str, Any]]:
        """Move the paddle by action - 1, then let the ball fall."""
        self._paddle = int(np.clip(self._paddle + action - 1, 0, self._columns - 1))
        self._row += 1
        landed = self._row == self._rows - 1
        reward = 0.0 if not landed else 1.0 if self._ball == self._paddle else -1.0
        return self._observe(), reward, landed, False, {}

    def render(self) -> Any:
        """Return the board as text or as an RGB image, by the render mode."""
        board = self._observe()[0]
        if self.render_mode == "ansi":
            return "\n".join("".join("#" if cell else "." for cell in row) for row in board)
        if self.render_mode is None:
            return None
        return np.kron(board[:, :, None], np.ones((_PIXELS, _PIXELS, 3), np.uint8))

    def _observe(self) -> Image:
        board = np.zeros((1, self._rows, self._columns), np.uint8)
        board[0, self._row, self._ball] = 255
        board[0, self._rows - 1, self._paddle] = 255
        return board
