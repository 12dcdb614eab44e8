"""Draws thick lines on a light ground: all that pictures of carts, poles and joints need."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.uint8]
Point = tuple[float, float]
_GROUND = (244, 244, 240)


def blank(height: int, width: int) -> Picture:
    """Return an empty RGB picture [height, width, 3]."""
    return np.full((height, width, 3), _GROUND, np.uint8)


def draw_line(picture: Picture, start: Point, end: Point, thickness: float, colour: tuple[int, int, int]) -> None:
    """Draw a line with round ends into `picture`; points are (column, row), all in pixels."""
    rows, columns = np.mgrid[: picture.shape[0], : picture.shape[1]]
    across, down = end[0] - start[0], end[1] - start[1]
    square = max(across**2 + down**2, 1e-9)  # a line without length is a dot
    along = np.clip(((columns - start[0]) * across + (rows - start[1]) * down) / square, 0.0, 1.0)
    distance = np.hypot(columns - start[0] - along * across, rows - start[1] - along * down)
    picture[distance <= thickness / 2] = colour
