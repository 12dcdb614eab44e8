"""Chooses the actions of many environments with one network, and keeps what it remembers of each of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from qfleet.algo.exploration import choose
from qfleet.algo.networks import QNetwork
from qfleet.algo.sequences import stored
from qfleet.core.role import State
from qfleet.core.types import Bools, Floats, Ints, Leaves


@dataclass(frozen=True)
class Choice:
    """What was chosen for E environments, and by what."""

    action: Ints  # [E]
    q: Floats  # [E, A]
    extras: Leaves  # [E, ...] what a replay keeps of the memory before this choice; nothing without memory


class Acting:
    """A network at play in a fixed number of environments; without memory it is the network's values alone."""

    def __init__(self, network: QNetwork, envs: int, device: str = "cpu") -> None:
        """Play in `envs` environments with a network that is on a device."""
        self._network, self._device = network, device
        self.memory: Floats = network.initial_state(envs).cpu().numpy()
        """What is remembered [E, S] of the episodes; S is 0 without memory."""

    def act(
        self,
        observation: Leaves,
        mask: Bools | None,
        epsilon: Floats,
        rng: np.random.Generator,
        envs: Ints | None = None,
    ) -> Choice:
        """Choose for observations [E, ...] of the environments `envs` [E], all of them if None."""
        tensors = {name: torch.from_numpy(leaf).to(self._device) for name, leaf in observation.items()}
        with torch.inference_mode():
            if not self._network.recurrent:
                q = self._network.q(tensors).cpu().numpy()
                return Choice(choose(q, epsilon, mask, rng), q, {})
            which = slice(None) if envs is None else envs
            before = self.memory[which]
            values, after = self._network.recall(tensors, torch.from_numpy(before).to(self._device))
        q = values.cpu().numpy()
        action, extras = choose(q, epsilon, mask, rng), stored(before)
        self.memory[which] = after.cpu().numpy()
        self.memory[which, -1] = action + 1
        return Choice(action, q, extras)

    def forget(self, where: Bools | Ints) -> None:
        """Begin anew in environments, given as a mask of all or by number: their episode ended or broke off."""
        self.memory[where] = 0

    def state_dict(self) -> State:
        """Return what is remembered."""
        return {"memory": self.memory.copy()}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
        self.memory = np.array(state["memory"])
