"""Which items a batch takes in proportion to their priorities, on the device: `PrioritisedSampler` without waiting."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfleet.core.role import State
from qfleet.replay.device_tree import DeviceTree
from qfleet.replay.samplers import PrioritisedConfig

SMALLEST, LARGEST = 2.0**-126, 2.0**96
"""Bounds of a leaf: none may vanish, and the sum of as many as a device can hold must stay finite."""


class DevicePriorities:
    """A sum tree whose leaves are (priority + epsilon)^alpha over `unit`, and the leaf that new items get.

    What is stored before any priority is known gets a leaf of 1. The first maximum then becomes the unit, so these
    items have that maximum, as they should, and need not be found and rewritten: draws and weights know no unit.
    """

    def __init__(self, config: PrioritisedConfig, capacity: int, device: torch.device) -> None:
        """Make an empty set of rows below `capacity`."""
        self._config = config
        self.tree = DeviceTree(capacity, device)
        self._scalars = torch.zeros(3, device=device)
        self.highest, self.unit, self.fresh = self._scalars.unbind()
        """The decayed maximum of all priorities written; the value of the first one; a new item's leaf."""
        self.fresh.fill_(1.0)

    def replace_rows(self, start: Tensor, added: Tensor) -> None:
        """Put in those of E rows from `start[0]` on where `added` [E] is 1; take out the E rows from `start[1]` on."""
        self.tree.set_block(start, torch.stack((added * self.fresh, torch.zeros_like(added))))

    def draw(self, uniform: Tensor, beta: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return rows [B] and weights [B] for `uniform` [B] as `DeviceTree.draw` takes it; an empty set has weights 0.

        A weight is (N P(i))^-beta over the maximum, which the least likely item has: N and the total cancel.
        """
        index, value = self.tree.draw(uniform)
        return index, torch.where(value > 0.0, (self.tree.minimum / value) ** beta, 0.0)

    def update(self, index: Tensor, current: Tensor, priority: Tensor) -> None:
        """Write the priorities [M] of rows `index` [M] where `current` [M], if finite, not negative, and in the set."""
        config = self._config
        written = current & (self.tree.leaves.index_select(0, index) > 0.0) & (priority >= 0.0) & (priority < math.inf)
        highest = torch.where(written, priority, -1.0).amax()
        raised = torch.maximum(highest, self.highest * config.max_decay)
        value = (raised + config.epsilon) ** config.alpha
        unit = torch.where(self.unit > 0.0, self.unit, value)
        scalars = torch.stack((raised, unit, (value / unit).clamp_(SMALLEST, LARGEST)))
        self._scalars.copy_(torch.where(highest >= 0.0, scalars, self._scalars))  # nothing written changes nothing
        leaf = ((priority + config.epsilon) ** config.alpha / unit).clamp_(SMALLEST, LARGEST)
        self.tree.set(torch.where(written, index, self.tree.capacity), torch.where(written, leaf, 0.0))

    def state_dict(self) -> State:
        """Return the tree and what new items get."""
        return {"tree": self.tree.state_dict(), "scalars": self._scalars.to("cpu", copy=True)}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`, in the tensors that are there."""
        self.tree.load_state_dict(state["tree"])
        self._scalars.copy_(state["scalars"])
