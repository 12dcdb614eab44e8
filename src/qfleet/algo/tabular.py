"""Watkins' Q-learning on a table of values."""

from __future__ import annotations

from qfleet.core.types import Bools, Floats


def q_learning(
    table: Floats,
    transition: tuple[int, int, float, int],
    discount: float,
    alpha: float,
    next_mask: Bools | None = None,
) -> float:
    """Move table[s, a], in place, by alpha times the error of (s, a, reward, next s); return that error.

    The table is [S, A]; `discount` is gamma, or 0 after a termination; `next_mask` [A] restricts the maximum.
    """
    state, action, reward, next_state = transition
    following = table[next_state]
    if next_mask is not None and next_mask.any():
        following = following[next_mask]
    error = reward + discount * float(following.max()) - float(table[state, action])
    table[state, action] += alpha * error
    return error
