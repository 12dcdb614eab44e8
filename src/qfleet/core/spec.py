"""What a network and a replay need to know of an environment: the leaves of its observation and its actions."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from qfleet.core.config import Config

PLAIN = "observation"
"""The leaf name of an observation that is a single array; Dict observations use their own (dotted) names."""


class LeafSpec(Config):
    """One array of an observation."""

    shape: tuple[int, ...]
    """Shape of one environment's leaf, frame stack included (stack first: 4x84x84)."""
    dtype: str
    """NumPy dtype name, such as "float32" or "uint8"."""
    categories: int | None = None
    """Number of categories of a Discrete leaf (its array is a scalar integer); None for Box."""
    start: int = 0
    """What the environment calls the first category (Discrete.start); networks and replay count from 0."""
    stack: int = 1
    """How many of the leading entries are a frame stack; 1 for none. Replay keeps single frames of `shape[1:]`."""
    stack_padding: Literal["zero", "repeat"] = "repeat"
    """What fills the stack before an episode's first frame."""

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of what is stored for each step."""
        return self.shape[1:] if self.stack > 1 else self.shape

    @property
    def frame_bytes(self) -> int:
        """Bytes stored for each step."""
        return math.prod(self.frame_shape) * np.dtype(self.dtype).itemsize


class EnvSpec(Config):
    """The interface between an environment and an agent."""

    name: str
    """The environment's id, for messages."""
    observations: dict[str, LeafSpec]
    """The leaves by name, in a fixed order; a single array is called `PLAIN`."""
    actions: int
    """Number of joint discrete actions."""
    action_shape: tuple[int, ...] = ()
    """For MultiDiscrete: the sizes of its parts, whose product is `actions`; empty for Discrete."""
    action_start: int = 0
    """What the environment calls the first action (Discrete.start)."""
    masked: bool = False
    """Whether every observation comes with a mask of allowed actions."""

    @property
    def plain(self) -> bool:
        """Whether the observation is a single array rather than a dictionary."""
        return tuple(self.observations) == (PLAIN,)
