"""What a plan for several learner ranks is weighed from: links, layers, the work of one update, and the machines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from qfleet.control.measurements import Curve

VALUE = 4
"""Bytes of a float32."""
SMALL = 16
"""A layer with fewer outputs is kept whole on every tensor rank: its parts would cost more than they save."""
Mode = Literal["all_reduce", "sharded", "server_sync", "server_stale", "server_async", "local"]


@dataclass(frozen=True)
class Link:
    """A connection between two ranks: a message takes `latency` and its bytes by `bandwidth`."""

    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds."""

    def seconds(self, size: float) -> float:
        """Return the seconds of one message of so many bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Fabric:
    """The links of a group, by how many ranks use them at once: ranks of one machine share its cores and memory."""

    reduce: tuple[tuple[int, Link], ...]
    """As sums over ranks see it, the adding included; numbers of ranks rising."""
    gather: tuple[tuple[int, Link], ...]
    """As copies see it: gathering, and sending from one stage to the next."""


@dataclass(frozen=True)
class Handling:
    """Seconds that parts of a network cost besides their computing and their bytes: the calls that hand data on."""

    layer: float = 0.0
    """Of each pass of a layer that ranks share."""
    micro_batch: float = 0.0
    """Of each pass of a micro-batch through a stage."""


@dataclass(frozen=True)
class Layer:
    """One layer with parameters, and what it costs for one row or by rows."""

    name: str
    parameters: int
    inputs: int
    """Values that it reads for one row."""
    outputs: int
    """Values that it makes of one row."""
    units: int
    """Features or channels that tensor ranks can share; 0 for a layer that is kept whole."""
    flops: float
    """Operations of the forward pass of one row."""
    forward: Curve
    """Seconds by rows."""
    backward: Curve
    """Seconds by rows."""

    def split(self, tensor: int) -> int:
        """Return among how many of the tensor ranks the layer is shared."""
        return tensor if self.units >= SMALL else 1


@dataclass(frozen=True)
class Work:
    """One update of the whole network with the whole batch."""

    batch: int
    """Rows of all ranks together."""
    update: Curve
    """Seconds of an unsplit update by rows, as the run computes it."""
    layers: tuple[Layer, ...]
    """In order; computed layer by layer, as a split network is."""
    rest: Curve
    """Seconds by rows of all that belongs to no layer and to no step: activations, targets, loss."""
    step: float
    """Seconds of clipping and optimiser for all parameters."""
    passes: int
    """Forward passes without a gradient: the target network's, and the online network's for double Q-learning."""
    moments: int
    """Values that the optimiser keeps for each parameter."""
    spread: float = 0.0
    """Standard deviation of an update's seconds, as a part of their mean."""

    @property
    def parameters(self) -> int:
        """Of the whole network."""
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True)
class Compression:
    """How gradients travel."""

    name: str
    value_bytes: float
    """On the wire for each value."""
    encode: float = 0.0
    """Seconds a value."""
    decode: float = 0.0
    """Seconds a value of one payload."""
    gathered: bool = False
    """Whether every rank gets the payloads of all, because they cannot be added as they are."""


PLAIN = Compression("none", VALUE)


@dataclass(frozen=True)
class Way:
    """One way to share an update among ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    micro: int = 1
    """Micro-batches that a rank's rows are cut into, for the pipeline."""
    mode: Mode = "all_reduce"
    servers: int = 0
    """Parameter servers, besides the ranks."""
    slack: int = 0
    """Updates that a worker may be ahead of the slowest (mode "server_stale")."""
    period: int = 1
    """Updates between two averages (mode "local")."""
    compression: Compression = PLAIN

    @property
    def ranks(self) -> int:
        """Learner ranks altogether."""
        return self.data * self.tensor * self.pipeline

    @property
    def exact(self) -> bool:
        """Whether it learns what one device would."""
        return self.mode in ("all_reduce", "sharded", "server_sync") and self.compression == PLAIN

    @property
    def settings(self) -> dict[str, int | str]:
        """The experiment's settings that make it learn in this way, by dotted name."""
        found: dict[str, int | str] = {
            "learners": self.data,
            "parallel.tensor": self.tensor,
            "parallel.pipeline": self.pipeline,
            "parallel.compression.kind": self.compression.name,
        }
        if self.pipeline > 1:
            found["parallel.micro_batches"] = self.micro
        if self.servers:
            mode = self.mode.removeprefix("server_")
            found |= {"parallel.update.kind": "server", "parallel.update.mode": mode}
            found["parallel.update.servers"] = self.servers
        elif self.mode == "local":
            found |= {"parallel.update.kind": "local", "parallel.update.period": self.period}
        else:
            found["parallel.update.kind"] = "sharded" if self.mode == "sharded" else "allreduce"
        if self.slack:
            found["parallel.update.slack"] = self.slack
        return found

    def __str__(self) -> str:
        """Return a name such as "data 2 x tensor 2"."""
        degrees = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        words = [" x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one device"]
        if self.micro > 1:
            words.append(f"{self.micro} micro-batches")
        if self.servers:
            kind = self.mode.removeprefix("server_") + (f" {self.slack}" if self.slack else "")
            words.append(f"{self.servers} server{'s' if self.servers > 1 else ''} {kind}")
        if self.mode == "sharded":
            words.append("sharded")
        if self.mode == "local":
            words.append(f"averaged every {self.period}")
        if self.compression != PLAIN:
            words.append(self.compression.name)
        return ", ".join(words)


@dataclass(frozen=True)
class Site:
    """Where the ranks are."""

    fabric: Fabric
    memory: int
    """Bytes: of one device, or of the machine if ranks share it."""
    ranks: int
    """How many ranks may be tried."""
    cores: float = math.inf
    """Cores that all ranks share; infinite where each has a device of its own."""
    handling: Handling = Handling()
    """What networks that are split cost besides."""
    slowdown: Curve = ((1, 1.0),)
    """How many times as long an update takes while so many ranks compute at once; beyond the last, cores are shared."""

    @property
    def shared(self) -> bool:
        """Whether ranks share cores and memory."""
        return math.isfinite(self.cores)

    def slow(self, ranks: int) -> float:
        """Return how many times as long so many ranks take for what one alone does."""
        # Cores that are shared are no less in each other's way than those that have a rank each.
        at_once = between(self.slowdown, min(ranks, self.cores))
        beyond = max(1.0, ranks / max(self.slowdown[-1][0], self.cores))
        return max(between(self.slowdown, ranks) * beyond, at_once * max(1.0, ranks / self.cores))

    def link(self, kind: Literal["reduce", "gather"], ranks: int) -> Link:
        """Return the link of a group of so many ranks, which share it as they share the cores."""
        found = self.fabric.reduce if kind == "reduce" else self.fabric.gather
        latency = between(tuple((count, link.latency) for count, link in found), ranks)
        cost = between(tuple((count, 1 / link.bandwidth) for count, link in found), ranks)
        beyond = max(1.0, ranks / max(found[-1][0], self.cores))
        return Link(1 / (cost * beyond), latency * beyond)


def cluster_fabric(link: Link) -> Fabric:
    """Return the fabric of machines that each have such a link."""
    return Fabric(reduce=((2, link),), gather=((2, link),))


def between(points: tuple[tuple[int, float], ...], place: float) -> float:
    """Return the value at a place: on the line between its neighbours, and as at the end beyond the ends."""
    if place <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return points[-1][1]
