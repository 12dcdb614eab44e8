"""Convolutions of which each tensor rank has some channels, and the three ways in which tensors pass between ranks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class ColumnConv2d(nn.Module):
    """A convolution that gives this rank's share of the output channels, or with `joined` those of all ranks."""

    def __init__(self, layer: nn.Conv2d, mesh: DeviceMesh, joined: bool) -> None:
        super().__init__()
        self._mesh, self._joined, self._form = mesh, joined, _form(layer)
        self.weight = own_part(layer.weight, mesh, 0)
        self.bias = None if layer.bias is None else own_part(layer.bias, mesh, 0)

    def forward(self, image: Tensor) -> Tensor:
        """Map [B, C, H, W], the same on all ranks, to this rank's or all channels."""
        output = F.conv2d(_given(image, self._mesh), self.weight, self.bias, **self._form)
        return _joined(output, self._mesh) if self._joined else output


class RowConv2d(nn.Module):
    """A convolution that takes this rank's share of the input channels and gives all output channels."""

    def __init__(self, layer: nn.Conv2d, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh, self._form = mesh, _form(layer)
        self.weight = own_part(layer.weight, mesh, 1)
        self.bias = layer.bias

    def forward(self, image: Tensor) -> Tensor:
        """Map this rank's channels to [B, C, H, W], the same on all ranks."""
        output = _summed(F.conv2d(image, self.weight, None, **self._form), self._mesh)
        return output if self.bias is None else output + self.bias.view(-1, 1, 1)


def own_part(parameter: Tensor, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    """Return a copy of this rank's equal share of a parameter along `dim`."""
    parts = parameter.detach().tensor_split(mesh.size(), dim)
    return nn.Parameter(parts[mesh.get_local_rank()].clone())


def _form(layer: nn.Conv2d) -> dict[str, Any]:
    return {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}


def _given(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensor itself; the gradients that the ranks have for it are summed."""
    given: Tensor = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(
        grad_placements=[Partial()]
    )
    return given


def _summed(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks; each gets its gradient as it is."""
    partial = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    summed: Tensor = partial.redistribute(placements=[Replicate()]).to_local()
    return summed


def _joined(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the channels of all ranks; each gets its part of the gradient."""
    shares = DTensor.from_local(tensor, mesh, [Shard(1)], run_check=False)
    joined: Tensor = shares.redistribute(placements=[Replicate()]).to_local()
    return joined
