"""Where the large arrays of a replay come from: plain memory, unless a role has memory that outlives its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allocate = Callable[[str, tuple[int, ...], Any], NDArray[Any]]
"""Returns the array of a name, shape and dtype: zeros, or what a former life of its role left there."""


def zeros(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return an array in plain memory, which the system provides as it is first written."""
    return np.zeros(shape, dtype)
