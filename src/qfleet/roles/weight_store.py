"""Weights on their way from the learner back to the actors: one flat array, a version, a checksum; the newest wins.

Receives: the learner's network, when it publishes.
Sends: Weights, as a latest value.
Waits for: nothing; an actor that finds nothing newer goes on with what it has.
"""

from __future__ import annotations

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.core.errors import QfleetError
from qfleet.core.protocols import Subscriber
from qfleet.core.role import State
from qfleet.core.types import Version, Weights


def snapshot(flat: FlatParameters, version: Version, env_steps: int, reward_scale: float = 1.0) -> Weights:
    """Return a network's weights as a message of their own."""
    values = flat.to_numpy()
    return Weights(version, values, checksum(values), env_steps, reward_scale)


class WeightReader:
    """An actor's end: keeps a network at the newest weights, copied in place and verified."""

    def __init__(self, flat: FlatParameters, edge: Subscriber[Weights]) -> None:
        self._flat, self.edge = flat, edge
        self.version = Version()

    def refresh(self) -> bool:
        """Take over newer weights if there are any; returns whether there were."""
        weights = self.edge.latest()
        if weights is None:
            return False
        self.take(weights)
        return True

    def take(self, weights: Weights) -> None:
        """Copy weights into the network after checking them."""
        if checksum(weights.flat) != weights.checksum:
            raise QfleetError(f"weights {weights.version} arrived damaged: their checksum differs from the sender's")
        self._flat.load_numpy(weights.flat)
        self.version = weights.version

    def state_dict(self) -> State:
        """Return the weights in use."""
        return {"version": self.version, "flat": self._flat.to_numpy()}

    def load_state_dict(self, state: State) -> None:
        """Use the saved weights again."""
        self.version = state["version"]
        self._flat.load_numpy(state["flat"])
