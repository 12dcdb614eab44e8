"""Tells a role that hangs from one that works long, and a run that stands still from one that waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from qfleet.core.protocols import Report
from qfleet.runtime.streams import Level

_LONG_PHASE_S, _LONGER = 600.0, 10
"""How long a phase other than "running" may last: building, compiling, evaluating, saving; or so many times as long as
a step in that one, if that is longer."""
_SILENT_S, _SILENT_PART = 4.0, 1 / 15
"""How long a process may give no sign of life while the others stand still: it gives two a second, unless an
environment keeps Python to itself; or such a part of a step in the phase "running", if that is longer."""
_HURRIED_S = 3.0
"""How long a step may still take when a person wants the run to end, in phases that are done anew at little cost."""
_ANEW = ("running", "waiting for environments", "evaluating", "making")
_STANDSTILL_S = 10.0
_NAMED = 4
"""So many of those for whom a role waits are named, the others counted."""
_WAITING_S = 0.5
"""A step that has taken longer than this is work, whatever the role said after the one before."""
_DEAF_S = 1.0
"""When nobody listened for longer, that time was no silence."""
_MUTE_S = 2 * _DEAF_S
"""Silence that is shorter is no sign of a hang, however short a step may be: signs of life come twice a second."""


@dataclass
class Watchdog:
    """Knows when each role was last heard of; a step may take `stall` seconds in the phase "running"."""

    stall: float
    _heard: dict[str, float] = field(default_factory=dict)
    _listened: float = 0.0

    def listening(self, now: float) -> None:
        """Note that the supervisor listens now."""
        if (away := now - self._listened) > _DEAF_S:
            self._heard = {name: min(at + away, now) for name, at in self._heard.items()}
        self._listened = now

    def heard(self, name: str, now: float) -> None:
        """Note a sign of life."""
        self._heard[name] = now

    def verdict(
        self,
        name: str,
        report: Report,
        replaceable: bool,
        now: float,
        pausing: bool = False,
        hurried_s: float = 0.0,
    ) -> str:
        """Return why a role must be taken for dead; empty if it need not. A death that ends the run is not rushed.

        While all are `pausing`, nobody waits long for a process that is silent; and when a person has waited for the
        end of the run for `hurried_s` seconds, nor for a step: its environment may hang.
        """
        long_s = max(_LONG_PHASE_S, _LONGER * self.stall)
        limit = self.stall if report.phase == "running" and replaceable else long_s
        silent = now - self._heard.get(name, now)
        quiet_s = max(_SILENT_S, _SILENT_PART * self.stall)
        mute_s = max(limit, _MUTE_S)
        if pausing and replaceable and report.phase != "starting" and quiet_s < silent <= mute_s:
            return f"its process was silent for {silent:.0f} s while the others waited for it"
        hurried = replaceable and report.phase in _ANEW and hurried_s > _HURRIED_S
        if hurried and report.step_s > _HURRIED_S:
            return f"it held up the end of the run: {report.step_s:.0f} s in one step, in phase '{report.phase}'"
        where = f"in phase '{report.phase}' (survival.stall_s {self.stall:g})"
        if report.step_s > limit:
            return f"it hung: {report.step_s:.0f} s in one step, {where}"
        if silent > mute_s:
            return f"it hung: its process was silent for {silent:.0f} s, {where}"
        return ""


def has_nothing_to_do(report: Report) -> bool:
    """Return whether a role has nothing to do."""
    return bool(report.idle) and report.step_s < _WAITING_S


@dataclass
class Standstill:
    """Notices when every role waits and no stream moves.

    `facing` names who is at the other end of each edge of a role.
    """

    facing: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    _moved: int = -1
    _since: float = 0.0
    _told: bool = False

    def look(self, reports: Sequence[Report], levels: Sequence[Level], now: float, done: Collection[str] = ()) -> str:
        """Return who waits for whom, once for each standstill; else an empty string.

        `reports` are those of the roles that are there and not `done`, of which there are only names.
        """
        moved = sum(level.sent + level.taken for level in levels)
        idle = bool(reports) and all(has_nothing_to_do(report) for report in reports)
        if moved != self._moved or not idle:
            self._moved, self._since, self._told = moved, now, False
        if self._told or now - self._since < _STANDSTILL_S:
            return ""
        self._told = True
        there = {_name(report): "" for report in reports} | dict.fromkeys(done, " (done)")
        waits = [f"{_name(report)} waits{self._whom(report, there)}: {report.idle}" for report in reports]
        waits += [f"{level.edge} holds {level.sent - level.taken} of {level.capacity}" for level in levels]
        return f"nothing has moved for {now - self._since:.0f} s. " + "; ".join(waits)

    def _whom(self, report: Report, there: Mapping[str, str]) -> str:
        """Return for whom a role waits, of those who are there; empty where that is nobody but the supervisor."""
        edges = self.facing.get(_name(report), {})
        others = dict.fromkeys(other for edge in report.awaited for other in edges.get(edge, ()) if other in there)
        names = [other + there[other] for other in others]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f" for {', '.join(names[:_NAMED])}{more}" if names else ""


def _name(report: Report) -> str:
    return f"{report.kind}-{report.index}"
