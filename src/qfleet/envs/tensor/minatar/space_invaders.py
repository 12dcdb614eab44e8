"""MinAtar Space Invaders: a cannon shoots at waves of aliens that march, descend at the walls and drop bombs."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qfleet.envs.tensor.minatar.common import FIRE, LEFT, NOOP, RIGHT, SIZE, MinAtar, cells, shift
from qfleet.envs.tensor.protocol import GameState

_COOL_DOWN = 5
_BOMB_EVERY = 10
_SLOWEST, _FASTEST = 12, 6
"""Ticks between two moves of a full wave: of the first wave, and of those after many waves."""
_WAVE = 24
_WAVE_COLUMN = 0b1111000000
"""A full wave has 24 aliens: six columns of four, in the top rows."""
_BOARD = (1 << SIZE) - 1
_TOP = 1 << (SIZE - 1)
_FAR = 99


class _Counters(NamedTuple):
    """The small numbers of the state, each [E] int32."""

    cannon: Tensor  # its column
    cooldown: Tensor  # ticks until it can shoot again
    heading: Tensor  # of the aliens: -1 left, 1 right
    aliens: Tensor  # how many are left
    interval: Tensor  # ticks between two moves of a full wave
    move_in: Tensor
    bomb_in: Tensor


_OPENING = (5, 0, -1, _WAVE, _SLOWEST, _SLOWEST, _BOMB_EVERY)


class SpaceInvaders(MinAtar):
    """Each alien hit pays 1; a bomb or an alien that reaches the cannon, or the ground, ends the game.

    Column 0 of `random` decides about the sticky action; nothing else is random. The state is `columns` [E, 3, 10]
    int32, the aliens, shots and bombs of each column of the board as the bits of a word, the lowest bit the bottom row;
    and `counters` [E, 7] int32, the fields of `_Counters`.
    """

    title = "SpaceInvaders"
    channels: ClassVar = {
        "cannon": (86, 180, 233),
        "alien": (0, 158, 115),
        "alien_left": (0, 158, 115),
        "alien_right": (0, 158, 115),
        "friendly_bullet": (255, 255, 255),
        "enemy_bullet": (213, 94, 0),
    }
    moves = (NOOP, LEFT, RIGHT, FIRE)
    draws = 1

    def __init__(self, sticky: float = 0.1, ramping: bool = True, all_actions: bool = False) -> None:
        """Repeat the last action with probability `sticky`; with `ramping`, each new wave marches faster."""
        super().__init__(sticky, ramping, all_actions)
        self._opening_on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def begin(self, random: Tensor) -> GameState:
        """Return games with a full wave and the cannon in the middle."""
        columns, counters = self._opening(random.device)
        return {"columns": columns.repeat(len(random), 1, 1), "counters": counters.repeat(len(random), 1)}

    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Move the cannon, the shots and the bombs, then the aliens when it is time; then see which are hit."""
        before, shots, bombs = state["columns"].unbind(1)
        counters = _Counters(*state["counters"].unbind(1))
        cannon = (counters.cannon + shift(action, LEFT, RIGHT)).clamp(0, SIZE - 1)
        here = cells(cannon)
        fires = (action == FIRE) & (counters.cooldown == 0)
        shots = ((shots | (here & fires.unsqueeze(1))) << 1) & _BOARD
        bombs = bombs >> 1
        aliens, heading, landed = _march(before, counters)
        over = landed | ((before | aliens | bombs) & here).any(1)  # `here` selects the lowest bit: the bottom row
        bombs = bombs | _dropped(aliens, cannon, counters.bomb_in == 0)
        hits = aliens & shots
        kills = (hits != 0).sum(1, dtype=torch.int32)  # a wave is too low for two shots to hit in one column
        counters = _tick(counters, fires)._replace(cannon=cannon, heading=heading, aliens=counters.aliens - kills)
        aliens, counters = self._refill(aliens ^ hits, counters)
        columns = torch.stack([aliens, shots ^ hits, bombs], 1)
        return {"columns": columns, "counters": torch.stack([*counters], 1)}, kills.to(torch.float32), over

    def planes(self, state: GameState) -> Tensor:
        """Return cannon, aliens, the same where they head left and right, shots and bombs: [E, 6, 10, 10] bool."""
        aliens, shots, bombs = state["columns"].unbind(1)
        cannon, _, heading, *_ = state["counters"].unbind(1)
        leftwards = aliens * (heading < 0).unsqueeze(1)
        words = torch.stack([cells(cannon).int(), aliens, leftwards, aliens ^ leftwards, shots, bombs], 1)
        height = torch.arange(SIZE - 1, -1, -1, dtype=torch.int32, device=words.device)
        return (words.unsqueeze(2) & (1 << height).unsqueeze(1)).bool()  # faster on a CPU than a comparison with 0

    def _refill(self, aliens: Tensor, counters: _Counters) -> tuple[Tensor, _Counters]:
        """Return aliens [E, 10] and counters, with a full wave where none are left."""
        cleared = counters.aliens == 0
        wave = self._opening(aliens.device)[0][0]
        counters = counters._replace(aliens=counters.aliens.masked_fill(cleared, _WAVE))
        if self.ramping:
            counters = counters._replace(interval=(counters.interval - cleared.int()).clamp(min=_FASTEST))
        return torch.where(cleared.unsqueeze(1), wave, aliens), counters

    def _opening(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the columns [3, 10] and counters [7] of a new game, made when a device is first seen."""
        if device not in self._opening_on:
            columns = torch.zeros(3, SIZE, dtype=torch.int32, device=device)
            columns[0, 2:8] = _WAVE_COLUMN
            self._opening_on[device] = columns, torch.tensor(_OPENING, dtype=torch.int32, device=device)
        return self._opening_on[device]


def _march(aliens: Tensor, counters: _Counters) -> tuple[Tensor, Tensor, Tensor]:
    """Return the aliens [E, 10] after their move if it is time for one, their heading, and whether they landed."""
    moves, heading = counters.move_in == 0, counters.heading
    turns = moves & (torch.where(heading < 0, aliens[:, 0], aliens[:, -1]) != 0)
    grounded = aliens & 1
    landed = turns & grounded.any(1)
    # What descends from the bottom row comes up in the top row: the game is over, but it is still seen and hit.
    descended = (aliens >> 1) | (grounded * _TOP)
    step = heading * (moves ^ turns)
    source = (torch.arange(SIZE, device=aliens.device) - step.unsqueeze(1)) % SIZE
    moved = torch.where(turns.unsqueeze(1), descended, aliens.gather(1, source))
    return moved, torch.where(turns, -heading, heading), landed


def _dropped(aliens: Tensor, cannon: Tensor, drops: Tensor) -> Tensor:
    """Return a bomb [E, 10] where the lowest alien of the column nearest the cannon is, where one `drops` [E]."""
    column = torch.arange(SIZE, dtype=cannon.dtype, device=cannon.device)
    # unequal for all columns: of two equally near ones the left one is taken
    distance = (4 * (column - cannon.unsqueeze(1)) + 1).abs().masked_fill(aliens == 0, _FAR)
    nearest = (distance == distance.amin(1, keepdim=True)) & drops.unsqueeze(1)
    return (aliens & -aliens) * nearest


def _tick(counters: _Counters, fires: Tensor) -> _Counters:
    """Return counters with the timers after this tick, in which the cannon `fires` [E]."""
    interval = torch.minimum(counters.aliens, counters.interval)
    return counters._replace(
        cooldown=(counters.cooldown.masked_fill(fires, _COOL_DOWN) - 1).clamp(min=0),
        move_in=torch.where(counters.move_in == 0, interval, counters.move_in) - 1,
        bomb_in=counters.bomb_in.masked_fill(counters.bomb_in == 0, _BOMB_EVERY) - 1,
    )
