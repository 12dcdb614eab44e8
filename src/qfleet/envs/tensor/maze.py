"""The small Maze in tensors: a table says where each action leads from each cell."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.envs.small import maze
from qfleet.envs.tensor.constants import Constants
from qfleet.envs.tensor.picture import Picture
from qfleet.envs.tensor.protocol import Game, GameState


class Maze(Game):
    """Observes the cell's number; actions are up, right, down, left; every step costs 1, the goal pays 10.

    Layouts are those of `qfleet.envs.small.maze`. The state is `cell` [E] int64; nothing is random.
    """

    draws = 0

    def __init__(self, layout: str = maze.DEFAULT) -> None:
        self._drawn = _DrawnMaze(layout)
        self._start, _ = self._drawn.reset()
        model = self._drawn.model()
        rules = (model.next_state, model.reward.astype(np.float32), model.terminal)
        self._rules = Constants(*[torch.from_numpy(table.ravel()) for table in rules])
        cells, self._actions = model.next_state.shape
        leaf = LeafSpec(shape=(), dtype="int64", categories=cells)
        self.spec = EnvSpec(name="qfleet/Maze", observations={PLAIN: leaf}, actions=self._actions)

    def start(self, random: Tensor) -> GameState:
        """Return agents at S for `random` [E, 0], on its device."""
        return {"cell": torch.full((len(random),), self._start, device=random.device)}

    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Go up (0), right (1), down (2) or left (3); walls hold one back."""
        next_cell, reward, terminal = self._rules.on(action.device)
        at = torch.add(action, state["cell"], alpha=self._actions)
        return {"cell": next_cell[at]}, reward[at], terminal[at]

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return the cells' numbers [E]: row * width + column."""
        return {PLAIN: state["cell"].clone()}

    def draw(self, state: GameState, index: int) -> Picture:
        """Return game `index` as an RGB picture [16 * height, 16 * width, 3]."""
        return self._drawn.image_of(int(state["cell"][index]))


class _DrawnMaze(maze.Maze):
    """The small maze with its agent wherever one wants it."""

    def image_of(self, cell: int) -> Picture:
        self._cell = cell
        return self.image()
