"""Stacks the newest frames of environments that do not do so themselves."""

from __future__ import annotations

import numpy as np

from qfleet.core.spec import LeafSpec
from qfleet.core.types import Array, Bools, Ints, Leaves


class FrameStack:
    """Keeps no state: it maps (stacked observations, new frames) to stacked observations.

    Box leaves are stacked (oldest first), categories are not. An episode's first frame fills its whole stack.
    """

    def __init__(self, frames: dict[str, LeafSpec], depth: int) -> None:
        self._stacked = {name for name, leaf in frames.items() if depth > 1 and leaf.categories is None}
        self._depth = depth
        self.specs = {
            name: leaf.replace(shape=(depth, *leaf.shape), stack=depth, stack_padding="repeat")
            if name in self._stacked
            else leaf
            for name, leaf in frames.items()
        }

    def start(self, frames: Leaves) -> Leaves:
        """Return the stacks [E, depth, ...] of episodes that begin with these frames [E, ...]."""
        return {name: self._filled(frame) if name in self._stacked else frame for name, frame in frames.items()}

    def push(self, stacks: Leaves, frames: Leaves, fresh: Bools) -> Leaves:
        """Return new stacks: one frame further, or begun anew where `fresh`."""
        if not self._stacked:
            return frames
        pushed = {
            name: self._shifted(stacks[name], frame) if name in self._stacked else frame
            for name, frame in frames.items()
        }
        if fresh.any():
            for name in self._stacked:
                pushed[name][fresh] = self._filled(frames[name][fresh])
        return pushed

    def finals(self, stacks: Leaves, frames: Leaves, finished: Ints) -> Leaves:
        """Return the stacks [F, depth, ...] that end with the final frames [F, ...] of environments `finished`."""
        return {
            name: self._shifted(stacks[name][finished], frame) if name in self._stacked else frame
            for name, frame in frames.items()
        }

    def differing(self, stacks: Leaves, frames: Leaves) -> Bools:
        """Return [E]: where the newest frames of the stacks are not exactly `frames`."""
        differs = np.zeros(len(next(iter(frames.values()))), bool)
        for name, frame in frames.items():
            newest = stacks[name][:, -1] if name in self._stacked else stacks[name]
            differs |= (newest != frame).reshape(len(frame), -1).any(axis=1)
        return differs

    def _filled(self, frame: Array) -> Array:
        return np.repeat(frame[:, None], self._depth, axis=1)

    @staticmethod
    def _shifted(stack: Array, frame: Array) -> Array:
        return np.concatenate([stack[:, 1:], frame[:, None]], axis=1)
