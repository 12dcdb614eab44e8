"""MinAtar Freeway: walk up across eight lanes of cars as often as the time allows, a point each time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from qfleet.envs.tensor.minatar.common import DOWN, NOOP, SIZE, UP, MinAtar, cells, shift
from qfleet.envs.tensor.protocol import GameState, below

_LANES = 8
_COLUMN = 4
_HOME = SIZE - 1
_REST = 3
_PACES = 5
_TICKS = 2501


class Freeway(MinAtar):
    """Each lane, rows 1 to 8, has a car that goes round; who is hit starts again at the bottom.

    Columns of `random`: 0 sticky action; 1 to 8, at the start and after each crossing, the velocities of the cars:
    one of -5 to -1 and 1 to 5, whose sign is the direction and whose size the ticks that the car waits between moves.
    """

    title = "Freeway"
    channels: ClassVar = {
        "chicken": (240, 228, 66),
        "car": (213, 94, 0),
        "speed1": (230, 230, 230),
        "speed2": (190, 190, 190),
        "speed3": (150, 150, 150),
        "speed4": (110, 110, 110),
        "speed5": (70, 70, 70),
    }
    moves = (NOOP, UP, DOWN)
    draws = 1 + _LANES

    def begin(self, random: Tensor) -> GameState:
        """Return games with all cars in the first column and the chicken at the bottom."""
        velocity = _velocity(random)
        single = torch.zeros_like(velocity[:, 0])
        return {
            "row": torch.full_like(single, _HOME),
            "rest": torch.full_like(single, _REST),
            "cars_x": torch.zeros_like(velocity),
            "wait": velocity.abs(),
            "velocity": velocity,
            "tick": torch.zeros_like(single, dtype=torch.int32),
        }

    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Move the chicken if it has rested, then the cars whose wait is over."""
        step = torch.where(state["rest"] == 0, shift(action, UP, DOWN), 0)
        rest = (torch.where(step == 0, state["rest"], _REST) - 1).clamp(min=0)
        row = (state["row"] + step).clamp(0, _HOME)
        crossed = row == 0
        row = row.masked_fill(crossed, _HOME)
        anew = crossed.unsqueeze(1)
        velocity = torch.where(anew, _velocity(random), state["velocity"])
        pause = velocity.abs()
        wait = torch.where(anew, pause, state["wait"])
        goes = wait == 0
        cars_x = (state["cars_x"] + velocity.sign() * goes) % SIZE
        under = ((state["cars_x"] == _COLUMN) | (cars_x == _COLUMN)) & cells(row - 1, _LANES)
        tick = state["tick"] + 1
        following = {
            "row": row.masked_fill(under.any(1), _HOME),
            "rest": rest,
            "cars_x": cars_x,
            "wait": torch.where(goes, pause, wait - 1),
            "velocity": velocity,
            "tick": tick,
        }
        return following, crossed.to(torch.float32), tick >= _TICKS

    def planes(self, state: GameState) -> Tensor:
        """Return the chicken, the cars, and for each of five speeds the cells such cars come from: [E, 7, 10, 10]."""
        velocity, cars_x = state["velocity"], state["cars_x"].unsqueeze(1)
        from_x = (cars_x - velocity.sign().unsqueeze(1)) % SIZE
        paces = cells(velocity.abs() - 1, _PACES).transpose(1, 2)
        cars = pad(torch.cat([cars_x, torch.where(paces, from_x, SIZE)], 1), (1, 1), value=SIZE)
        chicken = torch.where(cells(state["row"]), _COLUMN, SIZE).unsqueeze(1)
        return cells(torch.cat([chicken, cars], 1))


def _velocity(random: Tensor) -> Tensor:
    """Return velocities [E, 8] int8 of new cars."""
    drawn = below(random[:, 1:], 2 * _PACES).to(torch.int8)
    return drawn - _PACES + (drawn >= _PACES)
