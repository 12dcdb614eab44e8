"""The replay grid on a CPU with compiled loops: to store one tick, or to draw and read a batch, is one call each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.compiled import BOOLS, CUBE, FLOATS, INTS, MATRIX, compiled, part
from qfleet.core.types import Bools, Floats, Ints
from qfleet.replay.grid import ACTION, AHEAD, DISCOUNT, REWARD, START, TERMINATED, Grid, GridSample
from qfleet.replay.sumtree import Doubles

_MOVES = f"UniTuple({INTS},4)"
"""Positions, and how each tick moves them: see `Grid`."""
_ROWS = f"Tuple(({CUBE},{INTS}))"
"""Fields [FIELDS, length, E] and stamps [length]."""


@part
def _advance(positions: Ints, steps: Ints, wraps: Ints, limits: Ints) -> None:
    """Move each position on by its step, back to 0 at its wrap, at most to its limit."""
    for i in range(len(positions)):
        moved = positions[i] + steps[i]
        if moved >= wraps[i]:
            moved -= wraps[i]
        positions[i] = min(moved, limits[i])


@part
def _close(window: Floats, factors: Floats, powers: Floats, fields: Floats, at: int) -> None:
    """Write what the windows [n, FIELDS, E] came to as tick `at` of `fields` [FIELDS, length, E].

    `factors` [n] is what each tick's reward counts, `powers` [n + 1] the discounts by length.
    """
    for e in range(window.shape[2]):
        reward, terminated, ahead = np.float32(0), np.float32(0), 0
        for tick in range(len(window)):
            if window[tick, START, e] == 0:
                break
            reward += window[tick, REWARD, e] * factors[tick]
            terminated += window[tick, TERMINATED, e]
            ahead += 1
        fields[REWARD, at, e] = reward
        fields[DISCOUNT, at, e] = powers[ahead] - powers[ahead] * terminated
        fields[AHEAD, at, e] = ahead
        fields[ACTION, at, e] = window[0, ACTION, e] if ahead else 0.0


@part
def _open(window: Floats, action: Ints, reward: Floats, terminated: Bools, final: Bools) -> None:
    """Let a tick of E environments into the windows [n, FIELDS, E], in place of the oldest."""
    last = len(window) - 1
    for tick in range(last):
        window[tick] = window[tick + 1]
    for e in range(len(action)):
        window[last, REWARD, e], window[last, TERMINATED, e] = reward[e], terminated[e]
        window[last, START, e], window[last, ACTION, e] = not final[e], action[e]


@compiled(_MOVES, _ROWS, CUBE, FLOATS, FLOATS, INTS, FLOATS, BOOLS, BOOLS)
def _store(
    moves: tuple[Ints, Ints, Ints, Ints],
    rows: tuple[Floats, Ints],
    window: Floats,
    factors: Floats,
    powers: Floats,
    action: Ints,
    reward: Floats,
    terminated: Bools,
    final: Bools,
) -> None:
    """Store one tick of E environments but for its frames: what `Grid.add` does without priorities."""
    positions, (fields, stamp) = moves[0], rows
    stamp[positions[1]] = positions[0]
    _close(window, factors, powers, fields, positions[2])
    _open(window, action, reward, terminated, final)
    _advance(*moves)


@part
def _read(rows: tuple[Floats, Ints], whole: Ints, real: Floats) -> None:
    """Read the items at rows `whole[0]`: see `_sample`."""
    fields, stamp = rows
    numbers, envs = fields.reshape(len(fields), -1), fields.shape[2]
    for i in range(whole.shape[1]):
        row = whole[0, i]
        whole[1, i] = (row + int(numbers[AHEAD, row]) * envs) % numbers.shape[1]
        whole[2, i], whole[3, i] = int(numbers[ACTION, row]), stamp[row // envs]
        real[0, i], real[1, i] = numbers[REWARD, row], numbers[DISCOUNT, row]


@compiled(_ROWS, "float64[:,::1]", "int64", "int64", "int64[:,::1]", MATRIX)
def _sample(rows: tuple[Floats, Ints], uniform: Doubles, last: int, complete: int, whole: Ints, real: Floats) -> None:
    """Draw the items that `uniform` [tries, B] stands for: the first try that is one.

    Fill `whole` [4, B] with their rows, those that they bootstrap from, actions and ticks, and `real` [3, B] with
    rewards, discounts and weights: 0 where no try found an item.
    """
    ahead = rows[0][AHEAD].ravel()
    for i in range(whole.shape[1]):
        whole[0, i], real[2, i] = (last - int(uniform[0, i] * complete)) % len(ahead), 0
        for attempt in range(len(uniform)):
            row = (last - int(uniform[attempt, i] * complete)) % len(ahead)
            if ahead[row] > 0:
                whole[0, i], real[2, i] = row, 1
                break
    _read(rows, whole, real)


class CompiledGrid(Grid):
    """A `Grid` on a CPU with the same results."""

    def __init__(self, *arguments: Any) -> None:
        """Take what a `Grid` takes."""
        super().__init__(*arguments)
        self._frame_arrays = {name: frames.numpy() for name, frames in self.frames.items()}
        self._mask_array = None if self.mask is None else self.mask.numpy()
        self._moves: Any = tuple(each.numpy() for each in (self._positions, self._steps, self._wraps, self._limits))
        self._row_arrays = self.fields.numpy(), self.stamp.numpy()
        powers = torch.pow(self.gamma, torch.arange(self.n_step + 1, dtype=torch.float32))
        self._windows = self._window.numpy(), self._factors[:, REWARD, 0].numpy().copy(), powers.numpy()

    def add(
        self,
        frames: dict[str, Tensor],
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        final: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Store one tick of E environments; see `Grid.add`."""
        slot = self._moves[0][1]
        for name, frame in frames.items():
            self._frame_arrays[name][slot] = frame.numpy()
        if self._mask_array is not None and mask is not None:
            self._mask_array[slot] = mask.numpy()
        self._note_age(final)
        if self.priorities is not None:
            self.priorities.replace_rows(self._changing, self._window[0, START])
        outcome: Any = (line.contiguous().numpy() for line in (action, reward, terminated, final))
        _store(self._moves, self._row_arrays, *self._windows, *outcome)

    def sample_at(self, uniform: Tensor, beta: Tensor | float) -> GridSample:
        """Return the transitions that `uniform` [tries, B] float64 in [0, 1) stands for."""
        if self.priorities is not None:
            return self.transitions(*self.priorities.draw(uniform[0], beta))
        size, (last, complete) = uniform.shape[1], self._moves[0][5:7]
        whole, real = np.empty((4, size), np.int64), np.empty((3, size), np.float32)
        _sample(self._row_arrays, uniform.numpy(), last, complete, whole, real)
        numbers = torch.from_numpy(whole)
        index, _, action, generation = numbers.unbind()
        batch = self._batch(numbers[:2].view(-1), action, *torch.from_numpy(real).unbind())
        return GridSample(batch, index, generation)
