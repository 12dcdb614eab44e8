"""The message that brings weights to actors in fewer bytes than they have.

Shapes: P parameters, Q words of buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qfleet.core.types import Floats, Version


@dataclass(frozen=True)
class PackedWeights:
    """A network's parameters in a compressed form, and its buffers as they are."""

    version: Version
    form: str
    """How `payload` is to be read: see `parallel.packing`."""
    payload: list[Tensor]
    """The parameters [P], or what is to be added to those of a keyframe."""
    buffers: Floats  # [Q] bit by bit: counters lie there, too
    checksum: int
    """Of the flat array [P + Q] that every reader has when it has read this: see `algo.flat.checksum`."""
    base: int | None = None
    """The checksum of the keyframe that the payload is added to; None where it stands for itself."""


PACKED_MESSAGES: tuple[type, ...] = (PackedWeights,)
"""Every class of this file that may travel."""
