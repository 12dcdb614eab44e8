"""One mesh of learner ranks: data x pipeline x tensor, over torch's own process groups."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qfleet.core.errors import ConfigError
from qfleet.parallel.devices import own_device
from qfleet.parallel.gloo import INTERFACES, one_thread_gloo
from qfleet.parallel.gradsync import LOOPBACK, interface, local, meeting_store

Dimension = Literal["data", "pipeline", "tensor"]
_DIMENSIONS: tuple[Dimension, ...] = ("data", "pipeline", "tensor")


@dataclass(frozen=True)
class Degrees:
    """How many ranks share each dimension of the work; also used for the coordinates of one rank."""

    data: int = 1
    """Replicas, each with its part of the batch."""
    pipeline: int = 1
    """Stages that the layers of a replica are divided into."""
    tensor: int = 1
    """Ranks that share the channels of each layer of a stage."""

    def __str__(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in _DIMENSIONS)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(astuple(self))

    def place(self, rank: int) -> Degrees:
        """Return the coordinates of a rank: neighbours share a tensor, the next ones a pipeline."""
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Degrees(data, pipeline, tensor)


class Mesh:
    """One rank's view of the mesh. Every method must be called by all ranks of the dimensions it names, in one order.

    The process's default process group belongs to it, from here to `close`. `rendezvous` is where the ranks meet:
    `file:///path` (one machine, a file that does not exist yet) or `tcp://host:port` of rank 0.
    """

    def __init__(self, degrees: Degrees, rank: int, size: int, rendezvous: str, device: str, timeout_s: float) -> None:
        """Take a rank of `size`; on 'cuda' ranks talk by NCCL, on 'cpu' by gloo, and wait `timeout_s` seconds."""
        check_degrees(degrees, size)
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} is not one of {size}: ranks are counted from 0 to {size - 1}")
        if distributed.is_initialized():
            raise ConfigError("this process has a process group of its own: give each learner rank its own process")
        self.degrees, self.place, self._name = degrees, degrees.place(rank), f"rank {rank} of {size}"
        self.device = _device(device, rank, size, rendezvous)
        if local(rendezvous):
            _stay_on_loopback()
        backend = "nccl" if self.device.type == "cuda" else one_thread_gloo()
        timeout = timedelta(seconds=timeout_s)
        try:
            store = meeting_store(rendezvous, rank, size, timeout)
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        except RuntimeError as error:
            raise ConnectionError(f"{self._name}: meeting at {rendezvous} failed: {error}") from error
        self._mesh = init_device_mesh(self.device.type, astuple(degrees), mesh_dim_names=_DIMENSIONS)

    @property
    def data(self) -> DeviceMesh:
        """The ranks that have other parts of the batch than this one."""
        return self._mesh["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that share each layer with this one."""
        return self._mesh["tensor"]

    def group(self, dimension: Dimension) -> distributed.ProcessGroup:
        """Return the ranks that differ from this one along a dimension only."""
        return self._mesh.get_group(dimension)

    def sum_(self, tensor: Tensor, *dimensions: Dimension) -> Tensor:
        """Replace a contiguous tensor by its sum over the ranks along the dimensions; all get the same bits."""
        for dimension in dimensions:
            if getattr(self.degrees, dimension) > 1:
                distributed.all_reduce(tensor, group=self.group(dimension))
        return tensor

    def share_(self, tensor: Tensor, dimension: Dimension, source: int) -> Tensor:
        """Replace a contiguous tensor by that of the rank with the coordinate `source` along a dimension."""
        if getattr(self.degrees, dimension) > 1:
            distributed.broadcast(tensor, group=self.group(dimension), group_src=source)
        return tensor

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn what torch raises when another rank is gone into one error that says so."""
        try:
            yield
        except RuntimeError as error:
            if not _lost(error):
                raise
            raise ConnectionError(f"{self._name}: {what} failed, another rank may be gone: {error}") from error

    def close(self) -> None:
        """Leave all groups, at the end of the work of all ranks.

        Others see at once when a rank's process dies; for one that only leaves they may wait until the timeout.
        """
        if distributed.is_initialized():
            distributed.destroy_process_group()


def sharers(sharded: bool) -> tuple[Dimension, ...]:
    """Return the dimensions along which ranks have shares of one network; `sharded` says whether data ranks do."""
    return _DIMENSIONS if sharded else _DIMENSIONS[1:]


def check_degrees(degrees: Degrees, size: int) -> None:
    """Refuse degrees that are not a mesh of `size` ranks, and say what would be one."""
    if min(astuple(degrees)) < 1:
        raise ConfigError(f"a mesh of {degrees} has no ranks: each degree must be at least 1")
    if degrees.size == size:
        return
    split = degrees.pipeline * degrees.tensor
    fitting = Degrees(size // split, degrees.pipeline, degrees.tensor) if size % split == 0 else Degrees(data=size)
    raise ConfigError(
        f"a mesh of {degrees} needs {degrees.size} ranks, and there are {size}:"
        f" start {degrees.size} learners, or ask for {fitting}"
    )


def _stay_on_loopback() -> None:
    """Let all groups of this process, which torch makes as it likes, listen where no other machine can reach them."""
    if name := interface(LOOPBACK):
        os.environ.setdefault(INTERFACES, name)


def _lost(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, comes from the network; gloo's have no class of their own."""
    if error is None:
        return False
    return isinstance(error, distributed.DistError) or "gloo" in str(error) or _lost(error.__cause__)


def _device(device: str, rank: int, size: int, rendezvous: str) -> torch.device:
    """Return the rank's own device; NCCL wants one GPU for each rank."""
    if torch.device(device).type != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("ranks on 'cuda' talk by NCCL, which needs GPUs, and there is none here: use device 'cpu'")
    if rendezvous.startswith("file:") and size > count:
        raise ConfigError(
            f"{size} ranks need {size} GPUs, and this machine has {count}: start {count} learners, or use device 'cpu'"
        )
    return torch.device(own_device(device, rank))
