"""The small Catch in tensors: a ball falls, a paddle waits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.envs.tensor.picture import Picture
from qfleet.envs.tensor.protocol import Game, GameState, below

_PIXELS = 16


class Catch(Game):
    """A ball falls one row a step; the paddle below moves left, stays or moves right. Caught pays 1, missed -1.

    Observes the board [1, rows, columns] uint8. The state is `row`, `ball` and `paddle` [E] int64: the ball's row and
    column, and the paddle's column. The only column of `random` decides where a ball falls.
    """

    draws = 1

    def __init__(self, rows: int = 10, columns: int = 5) -> None:
        self._rows, self._columns = rows, columns
        leaf = LeafSpec(shape=(1, rows, columns), dtype="uint8")
        self.spec = EnvSpec(name="qfleet/Catch", observations={PLAIN: leaf}, actions=3)

    def start(self, random: Tensor) -> GameState:
        """Return balls in the top row, their columns by `random` [E, 1], and paddles in the middle."""
        ball = below(random[:, 0], self._columns)
        return {"row": torch.zeros_like(ball), "ball": ball, "paddle": torch.full_like(ball, self._columns // 2)}

    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Move the paddles by action - 1, then let the balls fall."""
        row, ball = state["row"] + 1, state["ball"]
        paddle = (state["paddle"] + action - 1).clamp(0, self._columns - 1)
        landed = row == self._rows - 1
        reward = torch.where(ball == paddle, 1.0, -1.0) * landed
        return {"row": row, "ball": ball, "paddle": paddle}, reward, landed

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return the boards [E, 1, rows, columns]: 255 where the ball or the paddle is."""
        ball = torch.add(state["ball"], state["row"], alpha=self._columns)
        paddle = state["paddle"] + (self._rows - 1) * self._columns
        board = torch.zeros(len(ball), self._rows * self._columns, dtype=torch.uint8, device=ball.device)
        board.scatter_(1, torch.stack((ball, paddle), 1), 255)
        return {PLAIN: board.view(-1, 1, self._rows, self._columns)}

    def draw(self, state: GameState, index: int) -> Picture:
        """Return game `index` as an RGB picture [16 * rows, 16 * columns, 3]."""
        one = {name: value[index : index + 1] for name, value in state.items()}
        board: Picture = self.observe(one)[PLAIN][0, 0].cpu().numpy()
        return board[:, :, None].repeat(3, axis=2).repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1)
