"""Remembers what brings an environment back to where it is: the seed of its last seeded reset and the actions since."""

from __future__ import annotations

import numpy as np

from qfleet.core.role import State
from qfleet.core.types import Ints

RESEED_EVERY = 256
"""Steps for ordinary environments: the cost of seeding vanishes, and a replay stays short."""


class Journal:
    """One seed and one list of joint actions for each environment.

    Seeding every episode would cost short ones a fifth of their time. So an episode begins from a new seed only when
    `reseed_every` or more steps are in the log; others go on with the environment's own generator, which a replay of
    the whole log brings to the same place. What a run does depends on its steps alone, not on where it is cut.
    """

    def __init__(self, num_envs: int, reseed_every: int) -> None:
        self._reseed_every = reseed_every
        self.seeds = [0] * num_envs
        self.actions: list[list[int]] = [[] for _ in range(num_envs)]

    def due(self, index: int, coming: int = 0) -> bool:
        """Return whether environment `index`'s next episode, after `coming` more steps, shall begin from a new seed."""
        return len(self.actions[index]) + coming >= self._reseed_every

    def open(self, index: int, seed: int) -> None:
        """Environment `index` was reset with `seed`: what came before no longer matters."""
        self.seeds[index] = seed
        self.actions[index] = []

    def record(self, actions: Ints) -> None:
        """Append one action [E] for each environment."""
        for log, action in zip(self.actions, actions.tolist(), strict=True):
            log.append(action)

    def state_dict(self) -> State:
        """Return seeds, log lengths [E] and all actions in one array."""
        return {
            "seeds": list(self.seeds),
            "lengths": np.array([len(log) for log in self.actions], np.int64),
            "actions": np.array([action for log in self.actions for action in log], np.int16),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` returned."""
        self.seeds = [int(seed) for seed in state["seeds"]]
        ends = np.cumsum(state["lengths"])
        self.actions = [part.tolist() for part in np.split(np.asarray(state["actions"]), ends[:-1])]
