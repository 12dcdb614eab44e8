"""Which form weights take on their way to those who act."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qfleet.core.config import Config


class PlainWeights(Config):
    """Weights travel as they are, 4 bytes a value."""

    kind: Literal["none"] = "none"
    """Selects this form."""


class Bf16Weights(Config):
    """Brain floats: 2 bytes a value, 8 bits of precision."""

    kind: Literal["bf16"] = "bf16"
    """Selects this form."""


class Int8Weights(Config):
    """One byte a value, in steps of 1/127 of the largest of its 1024 neighbours."""

    kind: Literal["int8"] = "int8"
    """Selects this form."""


class DeltaWeights(Config):
    """Now and then all values as int8, a keyframe; each time the way of those that have gone furthest since then.

    Every delta has the whole way since the keyframe, so that what one leaves out is in the next.
    """

    kind: Literal["delta"] = "delta"
    """Selects this form."""
    density: float = Field(default=0.1, gt=0, le=1)
    """Share of all values that is in a delta; each takes 2 bytes, its place included."""
    keyframe_period: int = Field(default=16, gt=0)
    """Publications from one keyframe to the next, each of which takes a byte a value."""


PackingConfig = Annotated[PlainWeights | Bf16Weights | Int8Weights | DeltaWeights, Field(discriminator="kind")]
