"""What parameter servers and their workers agree on: the settings, and small arithmetic of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field
from torch import Tensor

from qfleet.core.config import Config
from qfleet.parallel.compression.powersgd import Matrix, matrices


class ServerConfig(Config):
    """How parameter servers keep the weights, and when they take whose gradients."""

    kind: Literal["server"] = "server"
    """Selects parameter servers."""
    mode: Literal["sync", "async", "stale"] = "sync"
    """Whether a step waits for a gradient of every worker (sync), is made for each gradient as it comes (async), or so,
    but with no worker far ahead of the slowest (stale)."""
    servers: int = Field(default=1, gt=0, le=1024)
    """How many servers share the parameters."""
    max_staleness: int = Field(default=64, gt=0)
    """Mode async: versions that a gradient may be behind when it is taken. Others wait where they would make it more:
    none is dropped. At least one less than there are workers."""
    slack: int = Field(default=2, gt=0)
    """Mode stale: gradients that a worker may be ahead of the slowest."""
    damping: float = Field(default=0.5, ge=0, le=1)
    """Modes async and stale: a step along a gradient that is s versions behind is multiplied by (1 + s)^-damping; 0
    leaves all as they are, 1 divides by 1 + s."""
    snapshot_s: float = Field(default=10.0, gt=0)
    """Seconds between two states that a server keeps: what is lost of its slice at most when its process dies."""


def add_in_order(parts: Tensor, chosen: list[int], out: Tensor) -> None:
    """Write the sum of the rows `chosen` of `parts` [W, N] into `out` [N], always added in the order given."""
    out.copy_(parts[chosen[0]])
    for row in chosen[1:]:
        out.add_(parts[row])


def layers_within(parameters: Iterable[Tensor], part: slice) -> list[Matrix]:
    """Return the whole rows of a network's matrices that lie in a slice of its flat parameters."""
    found = [layer.within(part.start, part.stop) for layer in matrices(parameters)]
    return [layer for layer in found if layer.rows]
