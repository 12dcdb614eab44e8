"""Shards a network over the data ranks: each keeps its rows of every tensor, and gathers a layer when it is needed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from qfleet.algo.networks import QNetwork
from qfleet.parallel.mesh import Mesh
from qfleet.parallel.points import layers_of


def shard_network(network: QNetwork, mesh: Mesh) -> dict[str, torch.Size]:
    """Leave each data rank its rows of all parameters, on its device; return what room it has for each, by name.

    All ranks have the same room: where a tensor's rows cannot be dealt out evenly, the last ones do not fill theirs.
    Gradients are summed over the ranks in the backward pass, each rank getting its rows of the sum.
    """
    rooms = {name: _room(parameter, mesh.degrees.data) for name, parameter in network.named_parameters()}
    layers = [layer for _, layer in layers_of(network) if any(weight.ndim > 1 for weight in layer.parameters())]
    for layer in network.modules():
        if hasattr(layer, "inplace"):  # torch marks what enters and leaves a layer, and nobody may write to that
            layer.inplace = cast(Any, False)
    # Torso and head are called on their own, so there are two roots; they also have what belongs to no large layer.
    for unit in (*layers, network.torso, network.head):
        unit.register_forward_hook(_unviewed)
        fully_shard(unit, mesh=mesh.data, reshard_after_forward=True)
        sharded = cast(FSDPModule, unit)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        unit.register_forward_hook(_forget)
    return rooms


def _room(parameter: nn.Parameter, ranks: int) -> torch.Size:
    """Return the shape of the largest share of what tensor ranks have left of a parameter: that of the first rank."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.Size((-(-local.shape[0] // ranks), *local.shape[1:]))


def _unviewed(_unit: nn.Module, _inputs: object, output: object) -> object:
    """Return what a layer gives as memory of its own: where a view is written to, torch loses its mark for the way
    back."""
    view = isinstance(output, Tensor) and output.requires_grad and output._is_view()
    return cast(Tensor, output).clone() if view else output


def _forget(unit: nn.Module, *_: object) -> None:
    """Take back what torch noted of a pass for the way back, if there is none.

    Of a target network, which never goes back, the notes would grow for ever; of the online network's passes without
    a gradient they would have layers gathered in vain.
    """
    group = cast(Any, fully_shard).state(unit)._fsdp_param_group
    if group is not None and not torch.is_grad_enabled():
        group._post_forward_indices.pop()
        group.comm_ctx.post_forward_order.pop()
