"""Names the role that holds the others up, from what share of the time each of them works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

Shares = Mapping[str, Sequence[float]]
"""Share of the time that each role works, by its kind."""
BESIDE = "evaluator"
"""It works beside the others: nobody waits for it."""
_WAITING = 0.05
"""Shorter waits are not worth a word."""
_IDLE = 0.2
"""Where the busiest is less busy, nobody is held up by work: a role is away, or an environment does not answer."""


def in_turns(shares: Shares) -> str:
    """Return which kind of role takes most of the time of a process that they share; empty without any."""
    if not shares:
        return ""
    most = max(shares, key=lambda kind: sum(shares[kind]))
    return f"{most} takes {sum(shares[most]):.0%} of the time"


def side_by_side(shares: Shares) -> str:
    """Return which kind of role is busiest where each has a process of its own, and how long the others wait."""
    busy = {kind: fmean(values) for kind, values in shares.items() if kind != BESIDE}
    if not busy:
        return ""
    most = max(busy, key=lambda kind: busy[kind])
    waits = [
        f"{kind}{'s wait' if len(shares[kind]) > 1 else ' waits'} {1 - share:.0%}"
        for kind, share in busy.items()
        if kind != most and share < 1 - _WAITING
    ]
    if busy[most] < _IDLE:
        return f"nobody is busy: all wait (the busiest, {most}, waits {1 - busy[most]:.0%} of the time)"
    name = f"{most}s" if len(shares[most]) > 1 else most
    return f"{name} {busy[most]:.0%} busy" + (f"; {', '.join(waits)}" if waits else "")
