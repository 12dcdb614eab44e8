"""Which form a gradient takes on its way to the other ranks or to a parameter server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qfleet.core.config import Config


class NoCompressionConfig(Config):
    """Gradients travel as they are, 4 bytes a value."""

    kind: Literal["none"] = "none"
    """Selects this form."""


class Fp16Config(Config):
    """Half precision: 2 times fewer bytes. What is too small for its range is kept until it has grown."""

    kind: Literal["fp16"] = "fp16"
    """Selects this form."""


class Bf16Config(Config):
    """Brain floats: 2 times fewer bytes, the range of float32, 8 bits of precision."""

    kind: Literal["bf16"] = "bf16"
    """Selects this form."""


class Int8Config(Config):
    """One byte a value, rounded up or down at random so that the mean is right: 3.98 times fewer bytes."""

    kind: Literal["int8"] = "int8"
    """Selects this form."""


class SignConfig(Config):
    """The sign of each value, and sizes for the rows and columns of each layer: 31 times fewer bytes."""

    kind: Literal["sign"] = "sign"
    """Selects this form."""


class TopKConfig(Config):
    """The largest values and their places; the default sends 284 times fewer bytes once the warm-up is over.

    A value that waits gathers momentum, so that it is as large when it is sent as if all had been sent at once.
    """

    kind: Literal["topk"] = "topk"
    """Selects this form."""
    fraction: float = Field(default=0.0035, gt=0, le=1)
    """Share of all values that is sent at each update; each takes 4 bytes, its place included."""
    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Share of its last change that a waiting value keeps; takes the place of SGD's own momentum."""
    warmup: int = Field(default=200, ge=0)
    """Updates over which the share falls, exponentially, from a quarter to `fraction`."""


class PowerSgdConfig(Config):
    """Each layer's matrix as the product of two thin ones, which follow it by power iteration; biases as they are."""

    kind: Literal["powersgd"] = "powersgd"
    """Selects this form."""
    rank: int = Field(default=4, ge=1)
    """Columns of the thin matrices; a layer that they would not make smaller is sent as it is."""


CompressionConfig = Annotated[
    NoCompressionConfig | Fp16Config | Bf16Config | Int8Config | SignConfig | TopKConfig | PowerSgdConfig,
    Field(discriminator="kind"),
]
