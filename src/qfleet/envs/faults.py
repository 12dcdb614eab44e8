"""Finds what no learner can use in what environments report (NaN, infinity, empty masks), and says what they raise."""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qfleet.core.spec import PLAIN, EnvSpec
from qfleet.core.types import Bools, Leaves

_LARGEST = float(np.finfo(np.float32).max)
"""Rewards are stored in float32, where larger ones are infinite."""
_LONGEST = 2000
"""Characters that are told of an exception's text."""


def describe_bad_rows(
    spec: EnvSpec, frames: Leaves, mask: Bools | None, reward: NDArray[np.float64] | None
) -> tuple[int, str] | None:
    """Return (row, what is wrong there) for the first fault in [E, ...] arrays, or None."""
    if reward is not None and not (usable := np.abs(reward) <= _LARGEST).all():
        row = int(np.flatnonzero(~usable)[0])
        return row, f"the reward is {reward[row]}"
    for name, leaf in spec.observations.items():
        values = frames[name]
        title = "the observation" if name == PLAIN else f"observation '{name}'"
        if leaf.categories is not None:
            outside = (values < 0) | (values >= leaf.categories)  # type: ignore[operator]  # an integer leaf
            if outside.any():
                row = int(np.flatnonzero(outside)[0])
                return row, f"{title} is category {values[row]}, its space has {leaf.categories}"
        elif values.dtype.kind == "f" and not np.isfinite(values).all():
            finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
            return int(np.flatnonzero(~finite)[0]), f"{title} contains NaN or infinity"
    if mask is not None and not mask.any(axis=1).all():
        return int(np.flatnonzero(~mask.any(axis=1))[0]), "the action mask allows no action"
    return None


def raised(what: str, error: BaseException) -> str:
    """Return which call raised what, and in which line: often all that is left of it in another process."""
    try:
        said = str(error)
    except Exception:
        said = "(it cannot be told)"
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}... ({len(said):,} characters)"
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})" for frame in place)
    return f"{what} raised {type(error).__name__}: {said}{where}"
