"""Splits the layers of a network by their channels over the tensor ranks, in place."""

from __future__ import annotations

import math

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qfleet.algo.networks import QNetwork
from qfleet.core.errors import ConfigError
from qfleet.parallel.convolutions import ColumnConv2d, RowConv2d
from qfleet.parallel.points import Named, Widths

_SHOWN = 8
"""How many of the degrees that would work a message names."""


def split_widths(network: QNetwork, found: Widths, mesh: DeviceMesh) -> dict[str, int]:
    """Give each rank its equal share of the layers' parameters; return the split dimension of each, by name.

    Of a pair the first layer is split by its outputs and the second by its inputs, whose partial results are summed;
    a lone layer is split by its outputs, which are joined. Dense layers become DTensors. All other parameters are the
    same on all ranks, and so are their gradients.
    """
    if mesh.size() == 1:
        return {}
    check_widths(network, found, mesh.size())
    split: dict[str, int] = {}
    for first, second in found.pairs:
        _by_outputs(network, first, mesh, joined=False)
        _by_inputs(network, second, mesh)
        split |= {f"{first[0]}.weight": 0, f"{first[0]}.bias": 0, f"{second[0]}.weight": 1}
    for name, layer in found.lone:
        _by_outputs(network, (name, layer), mesh, joined=True)
        split |= {f"{name}.weight": 0, f"{name}.bias": 0}
    kept = dict(network.named_parameters())
    return {name: dim for name, dim in split.items() if name in kept}


def check_widths(network: QNetwork, found: Widths, degree: int) -> None:
    """Refuse a tensor degree that does not divide some layer, by its name and with the degrees that would work."""
    layers = [first for first, _ in found.pairs] + found.lone
    if not layers:
        raise ConfigError(
            f"the network names no layer that tensor {degree} could split: give your network class a method"
            " split_points() that names pairs (see qfleet.parallel.points.SplitPoints), or use tensor 1"
        )
    for name, layer in [*layers, *(second for _, second in found.pairs)]:
        _check_kind(name, layer)
    sizes = {name: _outputs(layer) for name, layer in layers}
    for (first, layer), (second, follower) in found.pairs:
        if _inputs(follower) != _outputs(layer):
            raise ConfigError(
                f"the layers '{first}' and '{second}' are no pair: the first has {_outputs(layer)} outputs, the second"
                f" {_inputs(follower)} inputs"
            )
    for name, size in sizes.items():
        if size % degree:
            common = math.gcd(*sizes.values())
            working = [d for d in range(1, common + 1) if common % d == 0][:_SHOWN]
            raise ConfigError(
                f"tensor {degree} does not divide the {size} outputs of the layer '{name}'; tensor"
                f" {', '.join(map(str, working))} would work"
            )


def _check_kind(name: str, layer: nn.Module) -> None:
    plain = isinstance(layer, nn.Linear) or (
        isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"
    )
    if not plain:
        raise ConfigError(
            f"the layer '{name}' ({type(layer).__name__}) cannot be split: only nn.Linear, and nn.Conv2d without groups"
            " and with zero padding can"
        )


def _outputs(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]


def _inputs(layer: nn.Module) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else int(layer.in_channels)  # type: ignore[arg-type]


def _by_outputs(network: nn.Module, named: Named, mesh: DeviceMesh, joined: bool) -> None:
    name, layer = named
    if isinstance(layer, nn.Conv2d):
        network.set_submodule(name, ColumnConv2d(layer, mesh, joined))
    else:
        style = ColwiseParallel(output_layouts=Replicate()) if joined else ColwiseParallel()
        # Every rank has built the same network, so none needs another's parameters.
        parallelize_module(layer, mesh, style, src_data_rank=None)


def _by_inputs(network: nn.Module, named: Named, mesh: DeviceMesh) -> None:
    name, layer = named
    if isinstance(layer, nn.Conv2d):
        network.set_submodule(name, RowConv2d(layer, mesh))
    else:
        parallelize_module(layer, mesh, RowwiseParallel(), src_data_rank=None)
