"""The messages between gradient workers and parameter servers: gradients in, slices of the parameters out.

Shapes: N values of one server's slice, W workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qfleet.core.types import Floats, Ints


@dataclass(frozen=True)
class GradientPush:
    """One server's slice of a gradient, from a worker."""

    worker: int
    sequence: int
    """Counts this worker's gradients from 1 without gaps, so that one sent twice is taken once."""
    version: int
    """That of the server's slice that the gradient was computed at."""
    payload: list[Tensor]
    """The gradient [N] in the form that the run's compression gives it; empty where a batch gave none."""


@dataclass(frozen=True)
class ParameterSlice:
    """A server's slice of the parameters, for all workers (latest value)."""

    server: int
    version: int
    """Rounds, or gradients, that the server has taken since the start of the run."""
    values: Floats  # [N]
    checksum: int
    """Of `values`: see `algo.flat.checksum`."""
    taken: Ints  # [W]
    """The sequence of each worker's newest gradient that is in these values, or was rejected."""
    learning_rate: float
    final: bool = False
    """Whether no worker will send any further gradient."""


GRADIENT_MESSAGES: tuple[type, ...] = (GradientPush, ParameterSlice)
"""Every class of this file that may travel."""
