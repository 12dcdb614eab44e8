"""`qfleet status`: how a run stands, or a table of all runs in a folder, from their directories alone."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import QfleetError
from qfleet.observe.text import aligned, count, counted, duration, interval, known, number, one_line, rate

if TYPE_CHECKING:
    from qfleet.operating import Standing

USAGE = "qfleet status [RUN_DIR|FOLDER] [--json]"
_HEADER = (
    "run", "state", "since", "owner", "preset", "placement",
    "actors", "learners", "shards", "steps", "updates", "steps/s", "evaluation", "checkpoint", "restarts", "faults",
)  # fmt: skip


class StatusOptions(Config):
    """Flags of `status`."""

    path: Path = Path("runs")
    """A run, or a folder of runs."""
    as_json: bool = Field(False, alias="json")
    """Print what is known as JSON: an object for a run, a list for a folder."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(StatusOptions, {}) if setting.name != "path"]
        print(help_page(USAGE, "Show how a run stands, or all runs of a folder (runs by default).", options))
        return 0
    given = parse_options(StatusOptions, words, "path", USAGE)

    from qfleet.operating import runs_in, standing

    found = runs_in(given.path)
    if found == [given.path]:
        one = standing(given.path)
        print(json.dumps(_plain(one), indent=1) if given.as_json else "\n".join(_lines(one, time.time())))
        return 0
    print(_several(found, given.as_json) if found or given.as_json else f"{given.path} holds no run")
    return 0


def _several(paths: Sequence[Path], as_json: bool) -> str:
    """Return how several runs stand, and which of them cannot be read: the others are worth seeing."""
    from qfleet.operating import standing

    stands, unreadable = [], {}
    for path in paths:
        try:
            stands.append(standing(path))
        except QfleetError as error:
            unreadable[str(path)] = str(error)
    if as_json:
        plain = [*map(_plain, stands), *({"run": path, "error": why} for path, why in unreadable.items())]
        return json.dumps(plain, indent=1)
    return "\n".join([*([_table(stands, time.time())] if stands else []), *unreadable.values()])


def _plain(one: Standing) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "run": str(one.run)}


def _table(stands: Sequence[Standing], now: float) -> str:
    lines = aligned([_HEADER, *(_row(one, now) for one in stands)])
    told = [one for one in stands if one.note and one.state in ("running", "failed", "dead")]
    lines += [one_line(f"{one.run}: {one.state}, {one.note}") for one in told]
    return "\n".join(lines)


def _row(one: Standing, now: float) -> tuple[str, ...]:
    owner = one.owner
    mean = None if one.evaluation is None else known(one.evaluation, "mean")
    cells = (
        str(one.run),
        one.state,
        "-" if owner is None else duration(now - owner.since),
        "-" if owner is None else f"{owner.user}@{owner.host}:{owner.pid}",
        one.preset,
        one.placement,
        _or_dash(one.actors, count),
        _or_dash(one.learners, count),
        _or_dash(one.shards, count),
        _or_dash(one.env_steps, count),
        _or_dash(one.updates, count),
        _or_dash(one.env_steps_per_s, rate) if one.state == "running" else "-",
        _or_dash(mean, number),
        "-" if one.checkpoint is None else f"{_at(one.checkpoint)}, {_ago(one.checkpoint, now)} ago",
        str(one.restarts),
        str(one.faults),
    )
    return tuple(map(one_line, cells))


def _lines(one: Standing, now: float) -> list[str]:
    """Return how one run stands, a line for each thing that is known."""
    lines = [("what", f"{one.preset} ({one.algo}, seed {one.seed}), {one.placement}")] if one.preset else []
    lines.append(("owner", str(one.owner or "unknown")))
    if one.env_steps is not None:
        budget = f" of {count(one.env_steps_budget)}" if one.env_steps_budget else ""
        speed = f", {rate(one.env_steps_per_s)} steps/s" if one.env_steps_per_s and one.state == "running" else ""
        record = "" if one.newest_record is None else f" (last record, {duration(now - one.newest_record)} ago)"
        lines.append(("steps", f"{count(one.env_steps)}{budget}, {counted(one.updates or 0, 'update')}{speed}{record}"))
    numbers = {"actor": one.actors, "learner": one.learners, "shard": one.shards}
    if there := [counted(number, name) for name, number in numbers.items() if number is not None]:
        had = "" if one.state == "running" else " at the last record"
        lines.append(("roles", ", ".join(there) + had))
    if (score := one.evaluation) is not None:
        mean = _or_dash(known(score, "mean"), number)
        lines.append(("evaluation", f"{mean}{interval(score['ci95'])} {_at(score)}, {_ago(score, now)} ago"))
    saved = "none yet" if one.checkpoint is None else f"{_at(one.checkpoint)}, {_ago(one.checkpoint, now)} ago"
    lines += [
        ("checkpoint", saved),
        ("trouble", f"{counted(one.restarts, 'restart')}, {counted(one.faults, 'other fault')}"),
    ]
    if one.state == "running" and one.bottleneck:
        lines.append(("bottleneck", one.bottleneck))
    title = f"{one.run}: {one.state}" + (f", {one.note}" if one.note else "")
    return [one_line(title), *(f"  {label:<11} {one_line(text)}" for label, text in lines)]


def _or_dash(value: float | None, show: Any) -> str:
    return "-" if value is None else str(show(value))


def _at(record: dict[str, Any]) -> str:
    return f"at {_or_dash(known(record, 'env_steps'), count)} steps"


def _ago(record: dict[str, Any], now: float) -> str:
    return duration(now - (known(record, "time") or now))
