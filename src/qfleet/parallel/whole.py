"""Between a rank's share of a network and the flat vector of the unsplit one: so checkpoints depend on no plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters
from qfleet.parallel.mesh import Mesh
from qfleet.parallel.splitting import SplitNetwork


@dataclass(frozen=True)
class _Entry:
    """Where one tensor lies in both vectors."""

    here: int
    there: int
    shape: tuple[int, ...]
    """Of the unsplit tensor."""
    dim: int | None
    """The dimension that tensor ranks share; None for a tensor that all of them have."""


class Whole:
    """The places of a rank's tensors in the flat vector of the unsplit network, in `FlatParameters`' order.

    It serves whatever lies like the parameters: weights, gradients, the optimiser's averages.
    """

    def __init__(
        self, mesh: Mesh, part: SplitNetwork, local: FlatParameters, network: nn.Module, flat: FlatParameters
    ) -> None:
        """Take this rank's part and the unsplit network, each with its flat vector."""
        self._mesh, tensors = mesh, part.share.tensors()
        here = {name: _offset(tensor, local) for name, tensor in tensors.items()}
        unsplit = {name: tensor for name, tensor in network.state_dict(keep_vars=True).items() if name in tensors}
        self._entries = [
            _Entry(here[name], _offset(tensor, flat), tuple(tensor.shape), part.split.get(name))
            for name, tensor in unsplit.items()
        ]
        self._parameters, self._buffers = flat.parameters.numel(), flat.buffers.numel()

    def gather(self, local: Tensor, buffers: bool = False) -> Tensor:
        """Return the unsplit vector [P] of what the ranks have of it [p], on every rank; [P + Q] of [p + q] `buffers`.

        All ranks of a replica must call it together. What lies in no tensor is 0.
        """
        whole = torch.zeros(self._parameters + self._buffers * buffers, device=local.device)
        for entry in self._entries:
            if entry.here < local.numel() and (entry.dim is not None or self._mesh.place.tensor == 0):
                self._there(entry, whole).copy_(self._here(entry, local))
        # Summed as integers, the bits of what only one rank has stay as they are.
        self._mesh.sum_(whole.view(torch.int32), "pipeline", "tensor")
        return whole

    def scatter(self, whole: Tensor, local: Tensor) -> Tensor:
        """Fill `local` [p] or [p + q] with this rank's share of the unsplit vector [P] or [P + Q]; return it."""
        for entry in self._entries:
            if entry.here < local.numel():
                self._here(entry, local).copy_(self._there(entry, whole))
        return local

    def counted(self, gradients: Tensor) -> Tensor:
        """Return a vector [p] of ones, with zeros where another tensor rank has the same entries."""
        ones = torch.ones_like(gradients)
        for entry in self._entries:
            if entry.dim is None and self._mesh.place.tensor > 0 and entry.here < ones.numel():
                self._here(entry, ones).zero_()
        return ones

    def _here(self, entry: _Entry, local: Tensor) -> Tensor:
        """Return the rank's tensor as a view of its own vector."""
        shape = self._own_shape(entry)
        return local[entry.here : entry.here + math.prod(shape)].view(shape)

    def _there(self, entry: _Entry, whole: Tensor) -> Tensor:
        """Return the rank's tensor as a view of the unsplit vector."""
        tensor = whole[entry.there : entry.there + math.prod(entry.shape)].view(entry.shape)
        if entry.dim is None:
            return tensor
        size = self._own_shape(entry)[entry.dim]
        return tensor.narrow(entry.dim, self._mesh.place.tensor * size, size)

    def _own_shape(self, entry: _Entry) -> list[int]:
        shape = list(entry.shape)
        if entry.dim is not None:
            shape[entry.dim] //= self._mesh.degrees.tensor
        return shape


def _offset(tensor: Tensor, flat: FlatParameters) -> int:
    """Return where a tensor begins in the memory of parameters and buffers."""
    return (tensor.data_ptr() - flat.parameters.data_ptr()) // flat.parameters.element_size()
