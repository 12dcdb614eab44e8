"""Cuts the flat parameter vector into one slice for each parameter server."""

from __future__ import annotations

from itertools import pairwise

from qfleet.core.errors import ConfigError

BLOCK = 16
"""Values that stay together. Optimisers work on each value by itself, but their kernels round the last few of a vector,
which do not fill a register, in another way: cut here, a slice's values move to the bit as those of the whole."""


def cut(size: int, parts: int) -> tuple[slice, ...]:
    """Return the `parts` contiguous slices of a vector [size], in order; they have equally many blocks, or one less.

    A cut may go through the middle of a layer.
    """
    blocks = -(-size // BLOCK)
    if not 0 < parts <= blocks:
        raise ConfigError(f"parallel.update.servers {parts}: {size} parameters can be shared by 1 to {blocks} servers")
    bounds = [min(size, BLOCK * (blocks * part // parts)) for part in range(parts + 1)]
    return tuple(slice(start, end) for start, end in pairwise(bounds))
