"""Weights on their way from the learner back to the actors: one flat array, a version, a checksum; the newest wins.

Receives: the learner's network, when it publishes.
Sends: Weights, or PackedWeights and now and then a keyframe for them, as latest values.
Waits for: nothing; an actor that finds nothing newer goes on with what it has.
"""

from __future__ import annotations

import dataclasses

from qfleet.algo.flat import FlatParameters, checksum
from qfleet.core import history
from qfleet.core.errors import QfleetError
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Subscriber
from qfleet.core.role import State
from qfleet.core.types import Version, Weights
from qfleet.parallel.packing import Unpacker


def snapshot(flat: FlatParameters, version: Version, env_steps: int, reward_scale: float = 1.0) -> Weights:
    """Return a network's weights as a message of their own."""
    values = flat.to_numpy()
    return Weights(version, values, checksum(values), env_steps, reward_scale)


class WeightReader:
    """An actor's end: keeps a network at the newest weights, copied in place and verified."""

    def __init__(
        self,
        flat: FlatParameters,
        edge: Subscriber[Weights | PackedWeights],
        keyframes: Subscriber[PackedWeights] | None = None,
    ) -> None:
        """Follow an edge; `keyframes` is where those come that some packed weights need."""
        self._flat, self.edge, self._keyframes = flat, edge, keyframes
        self._unpacker = Unpacker(len(flat.parameters))
        self._early: PackedWeights | None = None
        """Weights whose keyframe is still on its way, or was replaced by that of newer ones."""
        self.version = Version()

    def refresh(self) -> bool:
        """Take over newer weights if there are any; returns whether there were."""
        weights = self.edge.latest()
        if weights is None:
            weights = self._early
        if weights is None:
            return False
        if isinstance(weights, PackedWeights) and not self._has_keyframe_of(weights):
            # Its arrays may lie where the next value will, and may be half overwritten.
            self._early = dataclasses.replace(weights, buffers=weights.buffers.copy())
            return False
        self._early = None
        self.take(weights)
        return True

    def _has_keyframe_of(self, weights: PackedWeights) -> bool:
        """Return whether what the weights are measured from is here; looks for it where it comes."""
        if self._keyframes is not None and not self._unpacker.can_read(weights):
            keyframe = self._keyframes.latest()
            if keyframe is not None:
                self._unpacker.remember(keyframe)
        return self._unpacker.can_read(weights)

    def take(self, weights: Weights | PackedWeights) -> None:
        """Copy weights into the network after checking them."""
        if isinstance(weights, PackedWeights):
            self._flat.load_numpy(self._unpacker.verified(weights))
        elif checksum(weights.flat) == weights.checksum:
            self._flat.load_numpy(weights.flat)
        else:
            raise QfleetError(f"weights {weights.version} arrived damaged: their checksum differs from the sender's")
        self.version = weights.version
        history.note("taken", self.version.epoch, self.version.number)

    def state_dict(self) -> State:
        """Return the weights in use, and what the next ones may be added to."""
        state = {"version": self.version, "flat": self._flat.to_numpy()}
        if self._keyframes is not None:
            state |= {"keyframe": self._unpacker.keyframe, "early": self._early}
        return state

    def load_state_dict(self, state: State) -> None:
        """Use the saved weights again."""
        self.version = state["version"]
        self._flat.load_numpy(state["flat"])
        if state.get("keyframe") is not None:
            self._unpacker.remember(state["keyframe"])
        self._early = state.get("early")
