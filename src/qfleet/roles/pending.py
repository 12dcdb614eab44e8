"""What an actor last saw and chose in each of its environments, until it knows what came of it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from qfleet.core.role import State
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.vector import Tick
from qfleet.roles.acting import Choice

T = TypeVar("T", bound=np.generic)


class Pending:
    """Observations [E, ...], masks [E, A] and choices of E environments, read and replaced for some at a time."""

    def __init__(self, observation: Leaves, mask: Bools | None) -> None:
        self._observation, self._mask = observation, mask
        self._count = len(next(iter(observation.values())))
        self._choice: Choice | None = None

    def seen(self, envs: Ints) -> tuple[Leaves, Bools | None]:
        """Return what environments `envs` [K] show [K, ...] and allow [K, A], until they are next seen."""
        if len(envs) == self._count:
            return self._observation, self._mask
        return _rows(self._observation, envs), None if self._mask is None else self._mask[envs]

    def chosen(self, envs: Ints) -> Choice:
        """Return what was chosen for environments `envs` [K]."""
        choice = self._choice
        assert choice is not None, "actions are sent before parts are received"
        if len(envs) == self._count:
            return choice
        return Choice(choice.action[envs], choice.q[envs], _rows(choice.extras, envs))

    def choose(self, envs: Ints, choice: Choice) -> None:
        """Keep what was chosen for environments `envs` [K]."""
        if len(envs) == self._count:
            self._choice = choice
            return
        if self._choice is None:
            extras = {name: _for_all(leaf, self._count) for name, leaf in choice.extras.items()}
            self._choice = Choice(_for_all(choice.action, self._count), _for_all(choice.q, self._count), extras)
        self._choice.action[envs], self._choice.q[envs] = choice.action, choice.q
        for name, leaf in choice.extras.items():
            self._choice.extras[name][envs] = leaf

    def see(self, envs: Ints, tick: Tick) -> None:
        """Keep what environments `envs` [K] show after a tick."""
        if len(envs) == self._count:
            self._observation, self._mask = tick.observation, tick.mask
            return
        for name, leaf in tick.observation.items():
            self._observation[name][envs] = leaf
        if self._mask is not None:
            self._mask[envs] = tick.mask

    def state_dict(self) -> State:
        """Return everything."""
        choice = None if self._choice is None else dict(vars(self._choice))
        return {"observation": self._observation, "mask": self._mask, "choice": choice}

    def load_state_dict(self, state: State, envs: Ints) -> None:
        """Continue from what `state_dict` returned in environments `envs`, whose actions are under way."""
        for name, leaf in self._observation.items():
            leaf[envs] = state["observation"][name][envs]
        if self._mask is not None:
            self._mask[envs] = state["mask"][envs]
        if state["choice"] is not None:
            kept = state["choice"]
            extras = {name: np.array(leaf) for name, leaf in kept["extras"].items()}
            self._choice = Choice(np.array(kept["action"]), np.array(kept["q"]), extras)


def _rows(leaves: Leaves, envs: Ints) -> Leaves:
    """Return the rows of some environments (ascending), not copied where these lie side by side."""
    first, last = int(envs[0]), int(envs[-1])
    rows = slice(first, last + 1) if last - first == len(envs) - 1 else envs
    return {name: leaf[rows] for name, leaf in leaves.items()}


def _for_all(some: NDArray[T], count: int) -> NDArray[T]:
    """Return zeros like an array of some environments, for all."""
    return np.zeros((count, *some.shape[1:]), some.dtype)
