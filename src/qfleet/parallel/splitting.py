"""Takes a rank's share out of a whole network: layers by pipeline stage, channels by tensor rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from qfleet.algo.inputs import Inputs
from qfleet.algo.layers import Dropout
from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.errors import ConfigError
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.parallel.points import widths
from qfleet.parallel.sharding import shard_network
from qfleet.parallel.share import Share
from qfleet.parallel.stages import Cut, FirstStage, LaterStage, plan_cut, take_stage
from qfleet.parallel.tensor import check_widths, split_widths


@dataclass(frozen=True)
class SplitNetwork:
    """What one rank has of a network."""

    network: QNetwork
    """Without a pipeline: works like the unsplit one. With it: its head on the last stage, which takes features."""
    stage: FirstStage | LaterStage | None
    """This rank's layers of the torso; None without a pipeline."""
    cut: Cut
    share: Share
    split: dict[str, int]
    """The dimension by which tensor ranks share a parameter, by its name in the unsplit network."""
    sharded: bool
    """Whether data ranks share the rows of what each of them would have."""


def split_network(network: QNetwork, mesh: Mesh, who: str = "online", sharded: bool = False) -> SplitNetwork:
    """Keep in the network, which is changed, what belongs to this rank; `who` names its features on the last stage."""
    check_split(network, mesh.degrees, sharded)
    cut = plan_cut(network, mesh.degrees.pipeline)
    split = split_widths(network, widths(network, cut.stages), mesh.tensor) if mesh.degrees.tensor > 1 else {}
    rooms = shard_network(network, mesh) if sharded else {}
    names = {id(tensor): name for name, tensor in network.state_dict(keep_vars=True).items()}
    if mesh.degrees.pipeline == 1:
        return SplitNetwork(network, None, cut, Share([network], names, rooms), split, sharded)
    stage = take_stage(network, cut, mesh.place.pipeline, who)
    return SplitNetwork(network, stage, cut, Share([stage, network.head], names), split, sharded)


def inputs_of(part: SplitNetwork) -> Inputs | None:
    """Return what prepares raw observations on this rank; None on later stages, which get none."""
    holder = part.network if part.stage is None else part.stage
    torso = getattr(holder, "torso", None)
    return torso.inputs if isinstance(torso, Torso) else None


def running_statistics(network: QNetwork) -> list[str]:
    """Return the names of the tensors besides parameters that a network learns."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    return [name for name in network.state_dict() if name not in parameters]


def check_split(network: QNetwork, degrees: Degrees, sharded: bool = False) -> None:
    """Refuse what cannot be split, before any rank waits for another, and say what would work."""
    whole = degrees.pipeline == degrees.tensor == 1
    if whole and not sharded:
        return
    asked = "parallel.update.kind 'sharded'" if whole else f"pipeline {degrees.pipeline} and tensor {degrees.tensor}"
    if network.recurrent or not isinstance(network.torso, Torso):
        kind = "a network with memory" if network.recurrent else "a table"
        raise ConfigError(f"{asked} cannot split {kind}: use data parallelism, or an agent without memory")
    random = [name for name, module in network.named_modules() if _is_random(module)]
    if random and not whole:
        raise ConfigError(
            f"{asked} cannot split dropout (layer '{random[0]}'), which draws one mask for all of a layer's entries:"
            " set network.dropout to 0, or use data parallelism"
        )
    moving = [name for name in running_statistics(network) if not name.startswith("torso.inputs.")]
    if moving:
        raise ConfigError(
            f"{asked} cannot split a network with a state besides its parameters ('{moving[0]}'), which would move"
            " with each part of a batch: go without spectral_norm and batch normalisation, or use data parallelism"
        )
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if tied := set(names) - {name for name, _ in network.named_parameters()}:
        raise ConfigError(f"{asked} cannot split tied parameters ('{min(tied)}'): use data parallelism")
    if sharded and (odd := [name for name, p in network.named_parameters() if not p.ndim or not p.is_contiguous()]):
        raise ConfigError(f"{asked} divides rows, and the parameter '{odd[0]}' has none: make it a contiguous vector")
    cut = plan_cut(network, degrees.pipeline)
    if degrees.tensor > 1:
        check_widths(network, widths(network, cut.stages), degrees.tensor)


def _is_random(module: nn.Module) -> bool:
    return isinstance(module, Dropout | _DropoutNd | nn.RReLU)
