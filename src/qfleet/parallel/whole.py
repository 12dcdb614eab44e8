"""Between a rank's share of a network and the flat vector of the unsplit one: so checkpoints depend on no plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters
from qfleet.parallel.mesh import Degrees, Mesh, sharers
from qfleet.parallel.splitting import SplitNetwork

_PIECE = 1 << 24
"""Values that are summed at once: a device may have no room for a whole network."""


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies in both vectors."""

    here: int
    there: int
    shape: tuple[int, ...]
    """Of the unsplit tensor."""
    part: tuple[slice, ...]
    """What this rank has of it."""
    common: bool
    """Whether all tensor ranks have the same."""


class Whole:
    """The places of a rank's tensors in the flat vector of the unsplit network, in `FlatParameters`' order.

    It serves whatever lies like the parameters: weights, gradients, the optimiser's averages.
    """

    def __init__(
        self, mesh: Mesh, part: SplitNetwork, local: FlatParameters, network: nn.Module, flat: FlatParameters
    ) -> None:
        """Take this rank's part and the unsplit network, each with its flat vector."""
        self._mesh, self._sharers = mesh, sharers(part.sharded)
        tensors, data = part.share.tensors(), mesh.degrees.data if part.sharded else 1
        here = {name: _offset(tensor, local) for name, tensor in tensors.items()}
        self._entries = []
        for name, tensor in network.state_dict(keep_vars=True).items():
            if name in tensors:
                shape, dim = tuple(tensor.shape), part.split.get(name)
                own = part_of(shape, dim, Degrees(data, 1, mesh.degrees.tensor), mesh.place)
                self._entries.append(_Entry(here[name], _offset(tensor, flat), shape, own, dim is None))
        self._parameters, self._buffers = flat.parameters.numel(), flat.buffers.numel()

    def gather(self, local: Tensor, buffers: bool = False) -> Tensor:
        """Return the unsplit vector [P] of what the ranks have of it [p], on every rank; [P + Q] of [p + q] `buffers`.

        It is on the host. All ranks that share a network must call it together. What lies in no tensor is 0.
        """
        whole = torch.zeros(self._parameters + self._buffers * buffers)
        for entry in self._entries:
            if entry.here < local.numel() and (not entry.common or self._mesh.place.tensor == 0):
                _there(entry, whole).copy_(_here(entry, local))
        # Summed as integers, the bits of what only one rank has stay as they are.
        for piece in torch.split(whole.view(torch.int32), _PIECE):
            piece.copy_(self._mesh.sum_(piece.to(local.device), *self._sharers))
        return whole

    def scatter(self, whole: Tensor, local: Tensor) -> Tensor:
        """Fill `local` [p] or [p + q] with this rank's share of the unsplit vector [P] or [P + Q]; return it."""
        for entry in self._entries:
            if entry.here < local.numel():
                _here(entry, local).copy_(_there(entry, whole))
        return local

    def counted(self, gradients: Tensor) -> Tensor:
        """Return a vector [p] of ones, with zeros where another tensor rank has the same entries; without any, a 1."""
        if self._mesh.place.tensor == 0:
            return gradients.new_ones(())
        ones = torch.ones_like(gradients)
        for entry in self._entries:
            if entry.common and entry.here < ones.numel():
                _here(entry, ones).zero_()
        return ones


def part_of(shape: tuple[int, ...], dim: int | None, degrees: Degrees, place: Degrees) -> tuple[slice, ...]:
    """Return what a rank has of a tensor: its equal share of `dim` among tensor ranks, and its rows of that among data
    ranks, of which all but the last have equally many. Of a degree of 1, that is all."""
    spans = [(0, size) for size in shape]
    if dim is not None:
        size = shape[dim] // degrees.tensor
        spans[dim] = (place.tensor * size, (place.tensor + 1) * size)
    if degrees.data > 1:
        begin, end = spans[0]
        rows = -(-(end - begin) // degrees.data)
        first = min(begin + place.data * rows, end)
        spans[0] = (first, min(first + rows, end))
    return tuple(slice(*span) for span in spans)


def _here(entry: _Entry, local: Tensor) -> Tensor:
    """Return the rank's part of a tensor as a view of its own vector."""
    shape = [span.stop - span.start for span in entry.part]
    return local[entry.here : entry.here + math.prod(shape)].view(shape)


def _there(entry: _Entry, whole: Tensor) -> Tensor:
    """Return the rank's part of a tensor as a view of the unsplit vector."""
    return whole[entry.there : entry.there + math.prod(entry.shape)].view(entry.shape)[entry.part]


def _offset(tensor: Tensor, flat: FlatParameters) -> int:
    """Return where a tensor begins in the memory of parameters and buffers."""
    return (tensor.data_ptr() - flat.parameters.data_ptr()) // flat.parameters.element_size()
