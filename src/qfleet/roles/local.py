"""Chooses the actions of an actor's environments by a network of its own, which follows the newest weights."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from qfleet.accel.rounded import Rounded
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import QNetwork
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Subscriber, Waitable
from qfleet.core.role import State
from qfleet.core.types import Bools, Floats, Ints, Leaves, Version, Weights
from qfleet.roles.acting import Acting, Choice
from qfleet.roles.weight_store import WeightReader


class LocalActing:
    """Acts for parts of the environments, in the order in which they were asked for; the answer is there at once."""

    room = True
    """Any number of parts can be asked for."""

    def __init__(
        self,
        network: QNetwork,
        envs: int,
        noise: torch.Generator,
        weights: Subscriber[Weights | PackedWeights],
        rounded: Rounded,
        keyframes: Subscriber[PackedWeights] | None = None,
    ) -> None:
        """Take over a new network for `envs` environments, the generator of its noise, and how it is computed."""
        self._rounded = rounded
        self._network, self._noise = network.explore(), noise
        network.set_generator(noise)
        self._weights = WeightReader(FlatParameters(network), weights, keyframes)
        self._acting = Acting(network, envs)
        self._asked: deque[tuple[Leaves, Bools | None, Ints]] = deque()

    @property
    def version(self) -> Version:
        """The weights that choose."""
        return self._weights.version

    @property
    def memory(self) -> Floats:
        """What is remembered [E, S] of the episodes."""
        return self._acting.memory

    @memory.setter
    def memory(self, memory: Floats) -> None:
        self._acting.memory = memory

    @property
    def asked(self) -> Ints:
        """The environments that were asked for and not acted in yet."""
        return np.concatenate([np.zeros(0, np.int64), *(envs for *_, envs in self._asked)])

    @property
    def wake_on(self) -> tuple[Waitable, ...]:
        """What changes when there are newer weights."""
        return (self._weights.edge,)

    def refresh(self) -> None:
        """Take over newer weights if there are any."""
        if self._weights.refresh():
            self._rounded.renew()

    def ask(self, observation: Leaves, mask: Bools | None, envs: Ints) -> None:
        """Ask for actions after observations [K, ...] of environments `envs` [K]."""
        self._asked.append((observation, mask, envs))

    def answered(self) -> Ints | None:
        """Return the environments that were asked for first; None if there are none."""
        return self._asked[0][2] if self._asked else None

    def act(self, epsilon: Floats, rng: np.random.Generator) -> Choice:
        """Choose for the environments [K] that `answered` returned."""
        observation, mask, envs = self._asked.popleft()
        self._network.resample_noise(self._noise)
        with self._rounded.computing():
            return self._acting.act(observation, mask, epsilon, rng, envs)

    def forget(self, envs: Ints) -> None:
        """Begin anew in some environments: their episode ended or broke off."""
        self._acting.forget(envs)

    def close(self) -> None:
        """Do nothing: nobody waits for what is asked here."""

    def state_dict(self) -> State:
        """Return noise, memory and weights; between two messages nothing is asked."""
        return {
            "noise": self._noise.get_state(),
            "acting": self._acting.state_dict(),
            "weights": self._weights.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
        self._noise.set_state(state["noise"])
        if "acting" in state:  # version 0.1 had nothing to remember
            self._acting.load_state_dict(state["acting"])
        self._weights.load_state_dict(state["weights"])
        self._rounded.renew()
