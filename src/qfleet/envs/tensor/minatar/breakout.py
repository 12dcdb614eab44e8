"""MinAtar Breakout: a paddle keeps a ball in play that breaks three rows of bricks, a point each."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from qfleet.envs.tensor.minatar.common import LEFT, NOOP, RIGHT, SIZE, MinAtar, cells, shift
from qfleet.envs.tensor.protocol import GameState, below

_BOTTOM = SIZE - 1
_NO_BRICK = 4 * SIZE
_WALL = (1 << _NO_BRICK) - (1 << SIZE)


class Breakout(MinAtar):
    """The ball moves diagonally, one cell a tick; an episode ends when it passes the paddle in the bottom row.

    Columns of `random`: 0 sticky action; 1, at the start, the side that the ball comes from. The bricks of one game
    are the bits of one number: bit 10 * row + column, rows 1 to 3, so that none of the rules is wider than [E].
    """

    title = "Breakout"
    channels: ClassVar = {
        "paddle": (86, 180, 233),
        "ball": (255, 255, 255),
        "trail": (110, 110, 110),
        "brick": (213, 94, 0),
    }
    moves = (NOOP, LEFT, RIGHT)
    draws = 2

    def begin(self, random: Tensor) -> GameState:
        """Return games whose ball is in row 3 of the first or last column, on its way down and inwards."""
        side = below(random[:, 1], 2).to(torch.int8)
        x, y = side * _BOTTOM, torch.full_like(side, 3)
        return {
            "x": x,
            "y": y,
            "dx": 1 - 2 * side,
            "dy": torch.ones_like(side),
            "trail": SIZE * y + x,
            "paddle": torch.full_like(side, 4),
            "bricks": torch.full_like(side, _WALL, dtype=torch.int64),
            "striking": torch.zeros_like(side, dtype=torch.bool),
        }

    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Move the paddle, then the ball; it turns at walls, at bricks that it breaks, and at the paddle."""
        from_x, from_y, dy, bricks = state["x"], state["y"], state["dy"], state["bricks"]
        paddle = (state["paddle"] + shift(action, LEFT, RIGHT)).clamp(0, _BOTTOM)
        free_x, free_y = from_x + state["dx"], from_y + dy
        x, y = free_x.clamp(0, _BOTTOM), free_y.clamp(min=0)
        bit = 1 << (SIZE * y + x).long().clamp(max=_NO_BRICK)
        touched = (bricks & bit) != 0
        broken = touched & ~state["striking"]  # only the first of bricks met in a row; through the others it flies
        landed = y == _BOTTOM
        refill = landed & (bricks == 0)
        beside = landed & (from_x != paddle)
        saved = beside & (x == paddle)  # at the last moment: the ball goes back where it came from
        over = beside ^ saved
        turned = broken | (free_y != y) | (landed ^ over)
        following = {
            "x": x,
            "y": torch.where(turned, from_y, y),
            "dx": torch.where((free_x != x) | saved, -state["dx"], state["dx"]),
            "dy": torch.where(turned, -dy, dy),
            "trail": SIZE * from_y + from_x,
            "paddle": paddle,
            "bricks": torch.where(broken, bricks ^ bit, bricks.masked_fill(refill, _WALL)),
            "striking": touched,
        }
        return following, broken.to(torch.float32), over

    def planes(self, state: GameState) -> Tensor:
        """Return paddle, ball, the cell that the ball was in before, and bricks: [E, 4, 10, 10] bool."""
        board = SIZE * SIZE
        ball = SIZE * state["y"] + state["x"]
        single = cells(torch.stack([state["paddle"] + SIZE * _BOTTOM, ball, state["trail"]], 1), board)
        bits = 1 << torch.arange(board, device=ball.device).clamp(max=_NO_BRICK)
        bricks = (state["bricks"].view(-1, 1, 1) & bits) != 0
        return torch.cat([single, bricks], 1).view(-1, len(self.channels), SIZE, SIZE)
