"""What the five MinAtar games share: actions, some of them sticky, channels of 10x10 cells, and the picture of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.envs.tensor.constants import Constants
from qfleet.envs.tensor.protocol import Game, GameState

NOOP, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
SIZE = 10
"""Rows and columns of the board; rows count from the top."""
_PIXELS = 16


class MinAtar(Game):
    """One of the games: subclasses give `channels`, `begin`, `play` and `planes`; this adds what all of them share.

    Column 0 of `random` decides whether the last action is repeated; the columns from 1 on belong to the game. The
    state is the game's with one more entry, `last_action` [E] int8: the action last taken, noop at the start.
    """

    title: ClassVar[str]
    """The game's name in ids, such as Breakout."""
    channels: ClassVar[dict[str, tuple[int, int, int]]]
    """The observation's channels in order, with the colour of each in pictures; earlier ones cover later ones."""
    moves: ClassVar[tuple[int, ...]]
    """Those of the six actions that do something in this game, and noop; an action's number is its place here."""

    def __init__(self, sticky: float = 0.1, ramping: bool = True, all_actions: bool = False) -> None:
        """Repeat the last action with probability `sticky`; `ramping` makes games that have levels harder with time.

        With `all_actions` all six can be chosen, also those without effect.
        """
        self.sticky, self.ramping = sticky, ramping
        moves = range(6) if all_actions else self.moves
        self._moves = Constants(torch.tensor(moves, dtype=torch.int8))
        leaf = LeafSpec(shape=(len(self.channels), SIZE, SIZE), dtype="bool")
        self.spec = EnvSpec(name=f"qfleet/MinAtar-{self.title}", observations={PLAIN: leaf}, actions=len(moves))

    @abstractmethod
    def begin(self, random: Tensor) -> GameState:
        """Return new games for `random` [E, draws], on its device."""

    @abstractmethod
    def play(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Return what actions [E] int8, as they reach the game, lead to: state, rewards [E] float32, over [E]."""

    @abstractmethod
    def planes(self, state: GameState) -> Tensor:
        """Return the channels [E, C, 10, 10] bool."""

    def start(self, random: Tensor) -> GameState:
        """Return new games for `random` [E, draws], on its device."""
        return {**self.begin(random), "last_action": random.new_zeros(len(random), dtype=torch.int8)}

    def move(self, state: GameState, action: Tensor, random: Tensor) -> tuple[GameState, Tensor, Tensor]:
        """Return what actions [E] lead to, some of them replaced by the last one."""
        (moves,) = self._moves.on(action.device)
        taken = torch.where(random[:, 0] < self.sticky, state["last_action"], moves[action])
        following, reward, over = self.play(state, taken, random)
        return {**following, "last_action": taken}, reward, over

    def observe(self, state: GameState) -> dict[str, Tensor]:
        """Return the channels [E, C, 10, 10] bool."""
        return {PLAIN: self.planes(state)}

    def draw(self, state: GameState, index: int) -> NDArray[np.uint8]:
        """Return game `index` as an RGB picture [160, 160, 3]."""
        planes = self.planes({name: value[index : index + 1] for name, value in state.items()})[0].cpu().numpy()
        board = np.zeros((SIZE, SIZE, 3), np.uint8)
        for plane, colour in reversed(list(zip(planes, self.channels.values(), strict=True))):
            board[plane] = colour
        return board.repeat(_PIXELS, 0).repeat(_PIXELS, 1)


def shift(action: Tensor, back: int, forth: int) -> Tensor:
    """Return -1 where actions [E] are `back`, 1 where they are `forth`, else 0, as int8."""
    taken = embedding(action.int(), torch.eye(6, dtype=torch.int8, device=action.device))
    return taken[:, forth] - taken[:, back]


def cells(index: Tensor, count: int = SIZE) -> Tensor:
    """Return, for indices [...] from 0 to `count`, the one cell each names: [..., count] bool; `count` names none."""
    # Rows of a table: on a CPU several times faster than comparing with a range; compilers make a comparison of it.
    return embedding(index.int(), torch.eye(count + 1, count, dtype=torch.bool, device=index.device))
