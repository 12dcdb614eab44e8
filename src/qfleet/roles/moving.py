"""Chooses the actions of an actor's environments by its own network or by a server's values, as the orders want it.

It has the methods of `roles.local.LocalActing`. The way is changed when nothing is asked that is not answered: until
then nothing more is asked. What is remembered of the episodes moves along.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from qfleet.core.protocols import Waitable
from qfleet.core.role import State
from qfleet.core.types import Bools, Floats, Ints, Leaves, Version
from qfleet.roles.acting import Choice
from qfleet.roles.local import LocalActing
from qfleet.roles.served import ServedActing


class MovingActing:
    """Two ways to act for the same environments, of which one is in use at a time."""

    def __init__(self, local: LocalActing, served: ServedActing, begins: Literal["local", "served"]) -> None:
        """Take over both ways, and begin with one of them."""
        self._local, self._served = local, served
        self._present: LocalActing | ServedActing = served if begins == "served" else local
        self._wanted = self._present
        self.network_s = 0.0
        """Seconds that the actor's own network took."""

    def order(self, served: bool) -> None:
        """Ask a server from now on, or the actor's own network; what is away is still waited for."""
        self._wanted = self._served if served else self._local
        self._move()

    def _move(self) -> None:
        """Change to the way that is wanted, unless something is away."""
        if self._present is self._wanted or len(self._present.asked):
            return
        self._wanted.memory = self._present.memory
        if self._wanted is self._served:
            self._served.version = self._local.version
        self._present = self._wanted
        self._present.refresh()

    @property
    def room(self) -> bool:
        """Whether one more part can be asked for."""
        return self._present is self._wanted and self._present.room

    @property
    def version(self) -> Version:
        """The weights that choose, or have chosen last."""
        return self._present.version

    @property
    def asked(self) -> Ints:
        """The environments that were asked for and not acted in yet."""
        return self._present.asked

    @property
    def wake_on(self) -> tuple[Waitable, ...]:
        """What to wait on when nothing is answered."""
        return self._present.wake_on

    def refresh(self) -> None:
        """Take over newer weights if there are any; a network that is not in use stays as it is."""
        self._present.refresh()

    def ask(self, observation: Leaves, mask: Bools | None, envs: Ints) -> None:
        """Ask for actions after observations [K, ...] of environments `envs` [K]; only allowed while there is room."""
        self._present.ask(observation, mask, envs)

    def answered(self) -> Ints | None:
        """Return the environments that were asked for first if they can be acted in; else None."""
        return self._present.answered()

    def act(self, epsilon: Floats, rng: np.random.Generator) -> Choice:
        """Choose for the environments [K] that `answered` returned."""
        began = time.perf_counter()
        choice = self._present.act(epsilon, rng)
        if self._present is self._local:
            self.network_s += time.perf_counter() - began
        self._move()
        return choice

    def forget(self, envs: Ints) -> None:
        """Begin anew in some environments: their episode ended or broke off; what was asked for them counts no more."""
        self._present.forget(envs)
        self._move()

    def close(self) -> None:
        """Tell the server that nothing more will be asked."""
        self._served.close()

    def state_dict(self) -> State:
        """Return the state of both ways, and which one is in use."""
        return {**self._local.state_dict(), **self._served.state_dict(), "asking": self._present is self._served}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned; the newest orders come after that."""
        self._local.load_state_dict(state)
        self._served.load_state_dict(state)
        self._present = self._wanted = self._served if state["asking"] else self._local
