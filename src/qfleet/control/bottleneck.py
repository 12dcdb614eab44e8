"""Names the role that holds the others up, from what share of the time each of them works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

Shares = Mapping[str, Sequence[float]]
"""Share of the time that each role works, by its kind."""
BESIDE = "evaluator"
"""It works beside the others: nobody waits for it."""
_WAITING = 0.05
"""Shorter waits are not worth a word."""
_OTHERS = "others"
"""The supervisor, and programs of other people."""
_FULL = 0.9
"""Cores that are busier have no room for anybody."""
_IDLE = 0.2
"""Where the busiest is less busy, nobody is held up by work: a role is away, or an environment does not answer."""


def in_turns(shares: Shares) -> str:
    """Return which kind of role takes most of the time of a process that they share; empty without any."""
    if not shares:
        return ""
    most = max(shares, key=lambda kind: sum(shares[kind]))
    return f"{most} takes {sum(shares[most]):.0%} of the time"


@dataclass(frozen=True)
class Load:
    """What the cores of a machine do."""

    cores: float
    """How many there are."""
    busy: float
    """Share of their time in which they work, for whomever."""
    used: Mapping[str, float]
    """How many of them the roles of each kind keep busy."""

    def full(self) -> str:
        """Return that there are too few of them, and who has them; empty while some are free."""
        if self.busy < _FULL:
            return ""
        used = {**self.used, _OTHERS: self.busy * self.cores - sum(self.used.values())} if self.used else {}
        most = sorted(used, key=lambda kind: -used[kind])
        taken = [f"{kind} {used[kind]:.1f}" for kind in most if used[kind] >= _WAITING * self.cores]
        return f"cores {self.busy:.0%} busy" + (f" ({', '.join(taken)} of {self.cores:g})" if taken else "") + "; "


def side_by_side(shares: Shares, load: Load | None = None) -> str:
    """Return which kind of role is busiest where each has a process of its own, and how long the others wait.

    Where they have all cores of a machine busy, whose `load` is given, these come first.
    """
    busy = {kind: fmean(values) for kind, values in shares.items() if kind != BESIDE}
    beside = fmean(shares.get(BESIDE) or [0.0])
    if not busy:
        return ""
    most = max(busy, key=lambda kind: busy[kind])
    waits = [
        f"{kind}{'s wait' if len(shares[kind]) > 1 else ' waits'} {1 - share:.0%}"
        for kind, share in busy.items()
        if kind != most and share < 1 - _WAITING
    ]
    if busy[most] < _IDLE <= beside:
        return f"{BESIDE} {beside:.0%} busy; all others wait"
    if busy[most] < _IDLE:
        return f"nobody is busy: all wait (the busiest, {most}, waits {1 - busy[most]:.0%} of the time)"
    name = f"{most}s" if len(shares[most]) > 1 else most
    first = "" if load is None else load.full()
    return f"{first}{name} {busy[most]:.0%} busy" + (f"; {', '.join(waits)}" if waits else "")
