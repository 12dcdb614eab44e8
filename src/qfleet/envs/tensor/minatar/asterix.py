"""MinAtar Asterix: walk between eight lanes of passing enemies and gold; gold is a point, an enemy the end."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from qfleet.envs.tensor.minatar.common import DOWN, LEFT, NOOP, RIGHT, SIZE, UP, MinAtar, cells, shift
from qfleet.envs.tensor.protocol import GameState, below

_LANES = 8
_LAST = SIZE - 1
_ENEMY, _GOLD = 1, 2
_SPAWN_EVERY, _MOVE_EVERY = 10, 5
_RAMP_EVERY = 102


class Asterix(MinAtar):
    """Each lane, rows 1 to 8, holds at most one thing that crosses the board; things appear and move by two timers.

    Columns of `random`: 0 sticky action; for the thing that appears: 1 its direction, 2 whether it is gold, 3 which
    of the free lanes. The state's `things` [E, 8] are 0 for nothing, 1 an enemy, 2 gold, negative for one going left.
    With ramping, things appear a tick sooner after every 102 ticks, and move a tick sooner after every 204.
    """

    title = "Asterix"
    channels: ClassVar = {
        "player": (86, 180, 233),
        "enemy": (213, 94, 0),
        "trail": (110, 110, 110),
        "gold": (240, 228, 66),
    }
    moves = (NOOP, LEFT, UP, RIGHT, DOWN)
    draws = 4

    def begin(self, random: Tensor) -> GameState:
        """Return games with empty lanes and the player in the middle."""
        lanes = random.new_zeros(len(random), _LANES, dtype=torch.int8)
        single = lanes[:, 0]
        return {
            "x": torch.full_like(single, 5),
            "lane": torch.full_like(single, 4),
            "things": lanes,
            "things_x": torch.zeros_like(lanes),
            "spawn_in": torch.full_like(single, _SPAWN_EVERY),
            "move_in": torch.full_like(single, _MOVE_EVERY),
            "tick": torch.zeros_like(single, dtype=torch.int32),
        }

    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Let a thing appear when it is time, move the player, then the things when it is time."""
        timers, spawns, moves = self._timers(state)
        things, things_x = _spawned(state, spawns, random)
        x = (state["x"] + shift(action, LEFT, RIGHT)).clamp(0, _LAST)
        lane = (state["lane"] + shift(action, UP, DOWN)).clamp(0, _LANES - 1)
        free_x = things_x + things.sign() * moves.unsqueeze(1)
        moved_x = free_x.clamp(0, _LAST)
        # A thing meets the player before or after its move. Whichever it was, gold is taken and an enemy ends the game.
        column = x.unsqueeze(1)
        meets = cells(lane, _LANES) & ((things_x == column) | (free_x == column))
        met = (things.abs() * meets).amax(1)
        taken = met == _GOLD
        gone = (free_x != moved_x) | (meets & taken.unsqueeze(1))
        following = {"x": x, "lane": lane, "things": things.masked_fill(gone, 0), "things_x": moved_x, **timers}
        return following, taken.to(torch.float32), met == _ENEMY

    def planes(self, state: GameState) -> Tensor:
        """Return player, enemies, the cells that things come from, and gold: [E, 4, 10, 10] bool."""
        things, things_x = state["things"], state["things_x"]
        kinds = things.abs()
        player = torch.where(cells(state["lane"], _LANES), state["x"].unsqueeze(1), SIZE)
        enemies = torch.where(kinds == _ENEMY, things_x, SIZE)
        trails = torch.where(kinds == 0, SIZE, (things_x - things.sign()) % (SIZE + 1))
        gold = torch.where(kinds == _GOLD, things_x, SIZE)
        return cells(pad(torch.stack([player, enemies, trails, gold], 1), (1, 1), value=SIZE))

    def _timers(self, state: GameState) -> tuple[GameState, Tensor, Tensor]:
        """Return the timers after this tick, and whether things appear and move in it: each [E]."""
        spawns, moves, tick = state["spawn_in"] == 0, state["move_in"] == 0, state["tick"]
        spawn_every: Tensor | int = _SPAWN_EVERY
        move_every: Tensor | int = _MOVE_EVERY
        if self.ramping:
            spawn_every = (_SPAWN_EVERY - tick // _RAMP_EVERY).clamp(min=1).to(torch.int8)
            move_every = (spawn_every + 1) // 2
        timers = {
            "spawn_in": torch.where(spawns, spawn_every, state["spawn_in"]) - 1,
            "move_in": torch.where(moves, move_every, state["move_in"]) - 1,
            "tick": tick + 1,
        }
        return timers, spawns, moves


def _spawned(state: GameState, spawns: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Return the things and their columns, each [E, 8], with a new one in a free lane where `spawns` [E]."""
    free = (state["things"] == 0) & spawns.unsqueeze(1)
    rank = free.cumsum(1)
    lane = free & (rank == below(random[:, 3:4], rank[:, -1:]) + 1)
    leftwards = random[:, 1:2] >= 0.5
    kind = (random[:, 2:3] < 1 / 3).to(torch.int8) + _ENEMY
    things = torch.where(lane, torch.where(leftwards, -kind, kind), state["things"])
    return things, torch.where(lane, leftwards.to(torch.int8) * _LAST, state["things_x"])
