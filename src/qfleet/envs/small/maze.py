"""A maze: every step costs 1, the goal pays 10; drawn in text, as an image and as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, MissingExtra
from qfleet.envs.small.model import Model

DEFAULT = """
########
#S.....#
#.####.#
#.#..#.#
#.#.##.#
#...#..#
###.#.##
#.....G#
########
"""
STEP_REWARD, GOAL_REWARD = -1.0, 10.0
_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
_PIXELS = 16
_COLOURS = {"#": (40, 44, 52), ".": (240, 240, 236), "S": (170, 200, 235), "G": (90, 180, 100)}
_AGENT = (220, 80, 60)


class Maze(gymnasium.Env[Any, Any]):
    """Observes the cell's number (row * width + column); actions are up, right, down, left; walls hold one back.

    The layout is text, one line for each row: '#' wall, '.' or ' ' free, 'S' start, 'G' goal.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(self, layout: str = DEFAULT, render_mode: str | None = None) -> None:
        self._grid = _read(layout)
        self._height, self._width = self._grid.shape
        self._start = int(np.flatnonzero(self._grid.ravel() == "S")[0])
        self.observation_space = spaces.Discrete(self._grid.size)
        self.action_space = spaces.Discrete(len(_MOVES))
        self.render_mode = render_mode
        self._model = self.model()
        self._cell = self._start

    def model(self) -> Model:
        """Return the exact rules; walls and the goal are states that no episode acts in."""
        cells = self._grid.ravel()
        to = np.zeros((cells.size, len(_MOVES)), np.int64)
        for cell in range(cells.size):
            row, column = divmod(cell, self._width)
            for action, (down, right) in enumerate(_MOVES):
                there = (row + down, column + right)
                inside = 0 <= there[0] < self._height and 0 <= there[1] < self._width
                free = inside and self._grid[there] != "#"
                to[cell, action] = there[0] * self._width + there[1] if free else cell
        terminal = cells[to] == "G"
        return Model(to, np.where(terminal, GOAL_REWARD, STEP_REWARD), terminal)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin at S."""
        super().reset(seed=seed)
        self._cell = self._start
        return self._cell, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Go up (0), right (1), down (2) or left (3)."""
        here = (self._cell, action)
        self._cell = int(self._model.next_state[here])
        return self._cell, float(self._model.reward[here]), bool(self._model.terminal[here]), False, {}

    def render(self) -> Any:
        """Return the maze as text or as an RGB image, by the render mode; the agent is '@' or red."""
        if self.render_mode is None:
            return None
        return self.text() if self.render_mode == "ansi" else self.image()

    def text(self) -> str:
        """Return the maze as lines of text."""
        cells = self._grid.copy()
        cells[divmod(self._cell, self._width)] = "@"
        return "\n".join("".join(row) for row in cells)

    def image(self) -> NDArray[np.uint8]:
        """Return the maze as an RGB image [16 * height, 16 * width, 3]."""
        picture = np.array([[_COLOURS[str(cell)] for cell in row] for row in self._grid], np.uint8)
        picture[divmod(self._cell, self._width)] = _AGENT
        return picture.repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1)

    def save_png(self, path: str | Path) -> None:
        """Write the image to a PNG file."""
        try:
            from PIL import Image
        except ImportError:
            raise MissingExtra("pillow", "media", "drawing the maze as PNG") from None
        Image.fromarray(self.image()).save(path, format="PNG")


def _read(layout: str) -> NDArray[np.str_]:
    lines = [line for line in layout.splitlines() if line.strip()]
    width = max((len(line) for line in lines), default=0)
    grid = np.array([list(line.replace(" ", ".").ljust(width, ".")) for line in lines])
    unknown = sorted(set(grid.ravel().tolist()) - set(_COLOURS))
    starts, goals = int((grid == "S").sum()), int((grid == "G").sum())
    if unknown or starts != 1 or goals < 1:
        raise ConfigError(
            f"the maze has {starts} starts 'S' (1 is needed), {goals} goals 'G' (at least 1) and unknown characters "
            f"{unknown or 'none'}; allowed are '#', '.', ' ', 'S' and 'G'"
        )
    return grid
