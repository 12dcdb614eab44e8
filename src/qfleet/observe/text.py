"""Turns the numbers and events of a run into short text for lines, panels and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

_JUDGED = {"kept": "kept", "taken_back": "took back"}
"""How a balancer's judgements are told, by name; the change that is judged follows."""
_SHOWN_ELSEWHERE = {"event", "time", "env_steps", "wall_s", "text", "role", "index"}


def known(record: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a record, or None where it is absent, null, NaN, infinite or not a number."""
    value = record.get(key)
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def count(value: float) -> str:
    """Return a count of things: 12,000 below a million, then 1.25M, 12.5M, 1.25B."""
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}"


def counted(value: float, thing: str) -> str:
    """Return so many of a thing: 1 actor, 2 actors."""
    return f"{count(value)} {thing}{'' if value == 1 else 's'}"


def number(value: float) -> str:
    """Return a measured value with about four significant digits."""
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def rate(value: float) -> str:
    """Return a speed per second; slow ones keep a decimal."""
    return count(value) if abs(value) >= 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Return a span of time in its two largest units: 8s, 2m05s, 3h20m, 4d06h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    for larger, size, smaller, part in (("m", 60, "s", 1), ("h", 3600, "m", 60)):
        if whole < size * (60 if larger == "m" else 24):
            return f"{whole // size}{larger}{whole % size // part:02d}{smaller}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def interval(bounds: Any) -> str:
    """Return " [low, high]" for a pair of finite numbers, or an empty string."""
    if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
        return ""
    if not all(isinstance(bound, Real) and math.isfinite(bound) for bound in bounds):
        return ""
    return f" [{number(bounds[0])}, {number(bounds[1])}]"


def one_line(text: str) -> str:
    """Return the text with everything that could break a line or drive a terminal replaced by spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is its header: the first column to the left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def sentence(record: Mapping[str, Any]) -> str:
    """Return one line that tells an event of `events.jsonl` to a person."""
    name, steps = str(record.get("event", "event")), known(record, "env_steps")
    head = name if steps is None else f"{name} at {count(steps)} steps"
    told = one_line(f"{who(record) if record.get('role') else ''} {details(record)}")
    return one_line(f"{head}: {told}" if told else head)


def who(record: Mapping[str, Any]) -> str:
    """Return which role an event is about, as in `actor[1]`; `run` where it is about all of them."""
    return f"{record['role']}[{record.get('index', 0)}]" if record.get("role") else "run"


def details(record: Mapping[str, Any]) -> str:
    """Return in one line what an event tells besides its name, its role and the steps at which it happened."""
    name = record.get("event")
    if name == "evaluation":
        return one_line(_evaluation(record))
    if name == "notice":
        return one_line(str(record.get("text", "")))
    if name == "balance":
        return _decided(record)
    if name == "testing":
        return f"{record.get('played')} of {record.get('episodes')} episodes of the final test are played"
    told = [str(record["text"])] if record.get("text") else []
    told += [_field(key, value) for key, value in record.items() if key not in _SHOWN_ELSEWHERE and _simple(value)]
    return one_line(", ".join(told))


def decision(record: Mapping[str, Any]) -> str:
    """Return what a "balance" event tells: of whom, what and why, or what came of it and why it had been done."""
    return one_line(f"{who(record)} {_decided(record)}")


def _decided(record: Mapping[str, Any]) -> str:
    name, text = str(record.get("decision", "")), str(record.get("text", ""))
    now = f"now {record['inference']}, " if record.get("inference") else ""
    said = f"{_JUDGED[name]} {text}" if name in _JUDGED else f"{name.replace('_', ' ')}: {text}"
    because = f" ({record['because']})" if record.get("because") else ""
    return one_line(f"{now}{said}{because}")


def _evaluation(record: Mapping[str, Any]) -> str:
    mean, episodes, target = known(record, "mean"), known(record, "episodes"), known(record, "target")
    parts = ["mean unknown" if mean is None else f"mean {number(mean)}{interval(record.get('ci95'))}"]
    if episodes is not None:
        parts.append(f"{count(episodes)} episodes")
    if target is not None:
        parts.append(f"target {number(target)}")
    if record.get("best"):
        parts.append("best so far")
    return ", ".join(parts)


def _simple(value: Any) -> bool:
    return isinstance(value, (str, bool, int, float)) and value != ""


def _field(key: str, value: str | float) -> str:
    shown = value if isinstance(value, (str, int)) else number(value)
    return f"{key} {shown}"
