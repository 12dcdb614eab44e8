"""MinAtar Seaquest: a submarine shoots fish and other submarines, picks up divers and surfaces while it has air."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from qfleet.envs.tensor.minatar.common import DOWN, FIRE, LEFT, NOOP, RIGHT, SIZE, UP, MinAtar, cells
from qfleet.envs.tensor.protocol import GameState, below

_LAST = SIZE - 1
_LANES = 8
_COOL_DOWN = 5
_AIR = 200
_AIR_CELL = _AIR // SIZE
_SEATS = 6
_DIVER_EVERY, _DIVER_MOVES_EVERY = 30, 6
_TORPEDO_EVERY = 11
_SPAWN_EVERY, _REST = 20, 5
"""In a new game: ticks between two enemies, and whole ticks that an enemy rests in a cell."""
_LEAST_SPAWN_EVERY, _LEAST_REST = 1, 2
_NOWHERE = SIZE
"""The row of a shot or a diver that is not there."""

_CELL = 6
_CELL_BITS = (1 << _CELL) - 1
_ROW_BITS = (1 << _CELL * SIZE) - 1
_READY = _ROW_BITS // _CELL_BITS
"""The lowest bit of every cell: an enemy that moves in this tick."""
_BOARDS = [6, 1, 2]
"""How many boards hold enemies, the directions of lanes, and torpedoes."""


class _Counters(NamedTuple):
    """The small numbers of the state, each [E] int64."""

    clock: Tensor  # ticks so far
    cooldown: Tensor  # ticks until the player can shoot again
    air: Tensor  # ticks under water that it lasts
    aboard: Tensor  # divers
    surfacings: Tensor  # those that made the game harder
    spawn_in: Tensor


class _Tables(NamedTuple):
    """The constants that are looked up in every tick, on one device."""

    counters: Tensor  # [6]: of a new game
    swimmers: Tensor  # [3, 5]: of a new game
    steps: Tensor  # [6, 2]: columns and rows that the player moves, by action
    strides: Tensor  # [6, 4]: how far shots and divers move along their heading, by the clock modulo 6
    births: Tensor  # [12, 6]: all bits of the boards that a newborn enemy is in; a submarine by the clock, last a fish
    spots: Tensor  # [132, 100] bool: the cell of each place of a board with a column more on both sides


class Seaquest(MinAtar):
    """A hit pays 1, six divers at the surface the tenths of air left; a touch or a surfacing without divers ends it.

    Columns of `random`: 0 sticky action; 1 and 2 the direction of the enemy and of the diver that appear; 3 and 4
    their rows; 5 whether the enemy is a submarine. With ramping, every surfacing makes enemies appear a tick sooner,
    and every second one makes them rest a tick less.

    The state is int64: `counters` [E, 6], the fields of `_Counters`; `swimmers` [E, 3, 5], the column, row and heading
    of the player, the newer and older shot, the newer and older diver (there are never more); and `boards` [E, 9, 10],
    words that are rows of ten cells of six bits. They hold the fish, the enemy submarines, the four bits of each
    submarine's birth (the clock modulo 11), the rows in which enemies head right (all bits), and the torpedoes to the
    left and to the right. An enemy is one bit: that of its cell for the ticks that it still rests there. All enemies of
    a row head the same way and appear one after the other, at least 14 ticks apart while their rests still shrink; so
    no two of them share a bit, and of those in one cell the lowest is the oldest.
    """

    title = "Seaquest"
    channels: ClassVar = {
        "sub_front": (86, 180, 233),
        "sub_back": (0, 114, 178),
        "friendly_bullet": (255, 255, 255),
        "trail": (110, 110, 110),
        "enemy_bullet": (240, 228, 66),
        "enemy_fish": (213, 94, 0),
        "enemy_sub": (204, 121, 167),
        "oxygen_gauge": (200, 200, 200),
        "diver_gauge": (0, 158, 115),
        "diver": (0, 158, 115),
    }
    moves = (NOOP, LEFT, UP, RIGHT, DOWN, FIRE)
    draws = 6

    def __init__(self, sticky: float = 0.1, ramping: bool = True, all_actions: bool = False) -> None:
        """Repeat the last action with probability `sticky`; with `ramping`, surfacing makes the game harder."""
        super().__init__(sticky, ramping, all_actions)
        self._tables_on: dict[torch.device, _Tables] = {}

    def begin(self, random: Tensor) -> GameState:
        """Return games with the player at the surface of an empty sea."""
        envs, tables = len(random), self._tables(random.device)
        return {
            "counters": tables.counters.repeat(envs, 1),
            "swimmers": tables.swimmers.repeat(envs, 1, 1),
            "boards": tables.counters.new_zeros(envs, sum(_BOARDS), SIZE),
        }

    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Let things appear when it is time, then move the player, shots, divers, enemies and torpedoes."""
        tables, old = self._tables(random.device), _Counters(*state["counters"].unbind(1))
        fires, spawns = (action == FIRE) & (old.cooldown == 0), old.spawn_in == 0
        spawn_every = (_SPAWN_EVERY - old.surfacings).clamp(min=_LEAST_SPAWN_EVERY)
        rest = (_REST - (old.surfacings >> 1)).clamp(min=_LEAST_REST)
        enemy, diver = _newcomers(random)
        swimmers = _with_swimmers(state["swimmers"], diver, fires, old.clock)
        x, y, heading, caught = _swum(swimmers, tables, action, old)
        kind = torch.where(random[:, 5] < 1 / 3, old.clock % _TORPEDO_EVERY, _TORPEDO_EVERY)
        enemies, lanes, torpedoes = torch.split(state["boards"], _BOARDS, 1)
        enemies, lanes = _with_enemy(enemies, lanes, enemy, tables.births.index_select(0, kind), spawns, rest)
        firing = tables.births.index_select(0, (old.clock + 1) % _TORPEDO_EVERY)
        words = _words(x[:, :3], y[:, :3])
        boards, hits, struck = _fought(enemies, lanes, torpedoes, words, rest, firing)
        never = torch.zeros_like(hits[:, :1])
        y = y.masked_fill(torch.cat([never, hits, caught], 1), _NOWHERE)
        new, bonus, ends = self._breathed(old._replace(aboard=old.aboard + caught.sum(1)), swimmers[:, 1, 0], y[:, 0])
        new = new._replace(
            clock=old.clock + 1,
            cooldown=(old.cooldown.masked_fill(fires, _COOL_DOWN) - 1).clamp(min=0),
            spawn_in=torch.where(spawns, spawn_every, old.spawn_in) - 1,
        )
        following = {"counters": torch.stack([*new], 1), "swimmers": torch.stack([x, y, heading], 1), "boards": boards}
        return following, (hits.sum(1) + bonus).to(torch.float32), struck | ends

    def planes(self, state: GameState) -> Tensor:
        """Return the channels [E, 10, 10, 10] bool."""
        x, y, heading = state["swimmers"].unbind(1)
        place = (SIZE + 2) * y + x + 1
        spots = embedding(torch.cat([place, place - heading], 1), self._tables(place.device).spots)
        spots = spots.view(-1, 2 * x.shape[1], SIZE, SIZE)
        front, shot, other_shot, diver, other_diver, back, _, _, trail, other_trail = spots.unbind(1)
        trails, torpedoes, fish, subs = _unpacked(state["boards"])
        air, aboard = _gauges(_Counters(*state["counters"].unbind(1)))
        shots, divers, trails = shot | other_shot, diver | other_diver, trails | trail | other_trail
        return torch.stack([front, back, shots, trails, torpedoes, fish, subs, air, aboard, divers], 1)

    def _breathed(self, counters: _Counters, old_y: Tensor, y: Tensor) -> tuple[_Counters, Tensor, Tensor]:
        """Return counters after a move of the player between rows [E], the reward for surfacing, and the fatal ends."""
        aboard, air = counters.aboard, counters.air - y.clamp(max=1)
        arrives = (old_y > 0) & (y == 0)
        stranded = arrives & (aboard == 0)
        surfaces = arrives ^ stranded
        full = surfaces & (aboard == _SEATS)
        # a full boat gives up all its divers and, as any other, one more: it goes on with -1
        paid = surfaces.long()
        after = counters._replace(air=air.masked_fill(surfaces, _AIR), aboard=aboard.masked_fill(full, 0) - paid)
        if self.ramping:
            after = after._replace(surfacings=counters.surfacings + paid)
        return after, air // _AIR_CELL * full, stranded | (counters.air <= 0)

    def _tables(self, device: torch.device) -> _Tables:
        """Return the constants, made when a device is first seen."""
        if device not in self._tables_on:
            self._tables_on[device] = _make_tables(device)
        return self._tables_on[device]


def _make_tables(device: torch.device) -> _Tables:
    """Return the constants on a device."""
    births = [[0, -1, *(-(clock >> bit & 1) for bit in range(4))] for clock in range(_TORPEDO_EVERY)]
    places = [[-1, *range(SIZE * row, SIZE * row + SIZE), -1] for row in range(SIZE)] + [[-1] * (SIZE + 2)]
    tables = _Tables(
        counters=torch.tensor([0, 0, _AIR, 0, 0, _SPAWN_EVERY]),
        swimmers=torch.tensor([[5, 0, 0, 0, 0], [0] + 4 * [_NOWHERE], [-1, 1, 1, 1, 1]]),
        steps=torch.tensor([[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1], [0, 0]]),
        strides=torch.tensor([[1, 1, 0, 0]] * (_DIVER_MOVES_EVERY - 1) + [[1, 1, 1, 1]]),
        births=torch.tensor([*births, [-1, 0, 0, 0, 0, 0]]),
        spots=torch.tensor(places).view(-1, 1) == torch.arange(SIZE * SIZE),
    )
    return _Tables(*(table.to(device) for table in tables))


def _newcomers(random: Tensor) -> tuple[Tensor, Tensor]:
    """Return column, row and heading [E, 3] of the enemy and of the diver that appear if it is time."""
    rightwards, row = random[:, 1:3] < 1 / 2, below(random[:, 3:5], _LANES) + 1
    enemy, diver = torch.stack([~rightwards * _LAST, row, rightwards * 2 - 1], 1).unbind(2)
    return enemy, diver


def _with_swimmers(swimmers: Tensor, diver: Tensor, fires: Tensor, clock: Tensor) -> Tensor:
    """Return swimmers [E, 3, 5] with a shot from the player's place where it `fires`, and a diver where it is time."""
    player, shots, divers = torch.split(swimmers, [1, 2, 2], 2)
    dives = (clock % _DIVER_EVERY == 0) & (clock > 0)
    shots = torch.where(fires.view(-1, 1, 1), swimmers[:, :, :2], shots)
    divers = torch.where(dives.view(-1, 1, 1), torch.cat([diver.unsqueeze(2), divers[:, :, :1]], 2), divers)
    return torch.cat([player, shots, divers], 2)


def _swum(swimmers: Tensor, tables: _Tables, action: Tensor, counters: _Counters) -> tuple[Tensor, ...]:
    """Return columns, rows and headings [E, 5] after the swimmers' moves, and the divers [E, 2] that are picked up."""
    x, y, heading = swimmers.unbind(1)
    across, down = torch.split(tables.steps.index_select(0, action.int()), 1, 1)
    player_x, player_y = (x[:, :1] + across).clamp(0, _LAST), (y[:, :1] + down).clamp(0, _LANES)
    # all divers move at once: the ticks between their arrivals are a multiple of those between their moves
    strides = tables.strides.index_select(0, counters.clock % _DIVER_MOVES_EVERY)
    free_x = x[:, 1:] + heading[:, 1:] * strides
    inside_x = free_x.clamp(0, _LAST)
    meets = ((x[:, 3:] == player_x) | (free_x[:, 2:] == player_x)) & (y[:, 3:] == player_y)
    caught = meets & (meets.cumsum(1) <= _SEATS - counters.aboard.unsqueeze(1))
    y = torch.cat([player_y, y[:, 1:].masked_fill(free_x != inside_x, _NOWHERE)], 1)
    heading = torch.cat([torch.where(across == 0, heading[:, :1], across), heading[:, 1:]], 1)
    return torch.cat([player_x, inside_x], 1), y, heading, caught


def _with_enemy(
    enemies: Tensor, lanes: Tensor, enemy: Tensor, kind: Tensor, spawns: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return enemies [E, 6, 10] and lanes [E, 1, 10] with one where it `spawns`, if none of its row head against it."""
    x, y, heading = enemy.unbind(1)
    lane = heading.clamp(min=0).view(-1, 1, 1) * _ROW_BITS
    free = ((enemies[:, :1] | enemies[:, 1:2]) == 0) | (lanes == lane)
    row = (cells(y) & spawns.unsqueeze(1)).unsqueeze(1) & free
    born = row * (1 << (_CELL * x + rest)).view(-1, 1, 1)
    return enemies | (born & kind.unsqueeze(2)), torch.where(row, lane, lanes)


def _fought(
    enemies: Tensor, lanes: Tensor, torpedoes: Tensor, words: Tensor, rest: Tensor, firing: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return boards after this tick, which of the two shots hit [E, 2], and whether the player was struck [E].

    `words` [E, 3, 10] are those of the player and the shots; `firing` [E, 6] is the kind of submarine that fires.
    """
    player, shots = words[:, :1], words[:, 1:]
    here, hits = _shot(enemies, shots)
    ready, rest = here & _READY, rest.view(-1, 1, 1)
    entering = (ready << (rest + _CELL) & lanes) | (ready >> (_CELL - rest) & ~lanes)
    there = ((here ^ ready) >> 1) | entering
    # a shot that is still there stops what comes into its cell; a submarine fires all the same
    met = (entering[:, :1] | entering[:, 1:2]) & shots.masked_fill(hits.unsqueeze(2), 0)
    fired = _fired(there, firing)
    launched = torpedoes | torch.cat([fired & ~lanes, fired & lanes], 1)
    torpedoes = torch.cat([launched[:, :1] >> _CELL, launched[:, 1:] << _CELL & _ROW_BITS], 1)
    dangers = here[:, :2] | there[:, :2] | launched | torpedoes
    struck = (dangers & player).flatten(1).any(1)
    left = there & ~met.sum(1, keepdim=True)
    return torch.cat([left, lanes, torpedoes], 1), hits | met.any(2), struck


def _shot(enemies: Tensor, shots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the enemies [E, 6, 10] without those in the cells of shots [E, 2, 10], and the shots that hit [E, 2].

    A shot takes only one: of the fish there, or if there are none of the submarines, the oldest.
    """
    fish, subs = (enemies[:, :2].unsqueeze(2) & shots.unsqueeze(1)).unbind(1)
    targets = torch.where(fish.any(2, keepdim=True), fish, subs)
    return enemies & ~(targets & -targets).sum(1, keepdim=True), targets.any(2)


def _fired(enemies: Tensor, firing: Tensor) -> Tensor:
    """Return the places [E, 1, 10] of those `enemies` [E, 6, 10] that are of the kind `firing` [E, 6]."""
    differs = enemies ^ firing.unsqueeze(2)
    differs = differs[:, :3] | differs[:, 3:]
    return ~(differs[:, :1] | differs[:, 1:2] | differs[:, 2:])


def _words(x: Tensor, y: Tensor) -> Tensor:
    """Return words [..., 10] with all bits of the cells in columns `x` and rows `y` [...], none for row 10."""
    return cells(y) * (_CELL_BITS << _CELL * x).unsqueeze(-1)


def _unpacked(boards: Tensor) -> tuple[Tensor, ...]:
    """Return the cells [E, 10, 10] bool that hold trails of enemies, torpedoes, fish and submarines."""
    fish, subs, *_, lanes, to_left, to_right = boards.unbind(1)
    foes = fish | subs
    trails = (foes >> _CELL & lanes) | (foes << _CELL & ~lanes)
    words = torch.stack([trails, to_left | to_right, fish, subs], 1)
    cell = _CELL_BITS << _CELL * torch.arange(SIZE, device=boards.device)
    return (words.unsqueeze(3) & cell).bool().unbind(1)  # faster on a CPU than a comparison with 0


def _gauges(counters: _Counters) -> tuple[Tensor, ...]:
    """Return the cells [E, 10, 10] bool of the bottom row that show the air left and the divers aboard."""
    column = torch.arange(SIZE, device=counters.air.device)
    air = column < (counters.air // _AIR_CELL).unsqueeze(1)
    aboard = (column >= _LAST - counters.aboard.unsqueeze(1)) & (column < _LAST)
    return pad(torch.stack([air, aboard], 1).unsqueeze(2), (0, 0, _LAST, 0)).unbind(1)
