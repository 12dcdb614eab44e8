"""`qfleet logs`: the events of a run for a person to read, and as they come while it goes on."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from qfleet.cli.flags import parse_options, wants_help
from qfleet.cli.helptext import help_page
from qfleet.cli.settings import settings_of
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, did_you_mean
from qfleet.observe.text import count, details, known, one_line, who

USAGE = "qfleet logs RUN_DIR [--follow | -f] [--role NAME] [--since WHEN]"
LOOK_S = 0.3
"""How often a run that is followed is looked at."""
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Record = dict[str, Any]


class LogsOptions(Config):
    """Flags of `logs`."""

    run_dir: Path
    """The directory of the run."""
    follow: bool = False
    """Go on until the run ends; -f for short."""
    role: str = ""
    """Only what is about this role, such as actor or actor.1; run for what is about all of them."""
    since: str = ""
    """Only what is younger: 90s, 10m, 2h, 1d, or a time such as 2026-11-16T12:30."""


def run(words: Sequence[str]) -> int:
    """Carry out the command."""
    if wants_help(words):
        options = [setting for setting in settings_of(LogsOptions, {}) if setting.name != "run_dir"]
        print(help_page(USAGE, "Tell what happened in a run: time, role, event, text.", options))
        return 0
    given = parse_options(LogsOptions, ["--follow" if word == "-f" else word for word in words], "run_dir", USAGE)
    since = _time(given.since, time.time())

    from qfleet.operating import one_run, standing
    from qfleet.runtime.ownership import look

    path = one_run(given.run_dir)
    about, tail, going_on = _filter(path, given.role), Tail(path / "events.jsonl"), True
    while going_on:
        going_on = given.follow and look(path).alive  # before the file, so that its last words are read after it
        for record in tail.read():
            if about(record) and (known(record, "time") or 0.0) >= since:
                print(line(record), flush=True)
        if going_on:
            time.sleep(LOOK_S)
    if given.follow and (end := standing(path)).state == "dead":
        print(f"the run is dead: {end.note}", file=sys.stderr)
    return 0


def line(record: Record) -> str:
    """Return an event as a line: time, role, event, text."""
    from qfleet.runtime.ownership import clock

    steps = known(record, "env_steps")
    text = "; ".join(part for part in ("" if steps is None else f"at {count(steps)} steps", details(record)) if part)
    when = clock(known(record, "time") or 0.0)
    return f"{when}  {one_line(who(record)):<12}  {one_line(str(record.get('event', ''))):<10}  {text}"


class Tail:
    """Reads what was appended to a file of records since it was last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[Record]:
        """Yield the new records; a line counts once its newline is there, and one that is damaged is left out."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for text in whole.split(b"\n"):
            try:
                record = json.loads(text)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record


def _filter(path: Path, role: str) -> Callable[[Record], bool]:
    """Return whether an event is about a role, given as `actor`, `actor.1` or `actor[1]`."""
    from qfleet.operating import newest_record

    if not role:
        return lambda record: True
    kind, *index = re.split(r"[.\[-]", role.rstrip("]"), maxsplit=1)
    roles = {key.partition(".")[0] for key in newest_record(path / "metrics.jsonl") if key.count(".") == 2}
    roles |= {str(record.get("role") or "run") for record in Tail(path / "events.jsonl").read()}
    if roles and kind not in roles:  # before the first event nobody knows
        raise ConfigError(f"'--role' = '{role}': one of {', '.join(sorted(roles))}.{did_you_mean(kind, roles)}")
    if index:
        return lambda record: who(record) == f"{kind}[{index[0]}]"
    return lambda record: str(record.get("role") or "run") == kind


def _time(text: str, now: float) -> float:
    """Return the Unix time that a person means; 0 for an empty text."""
    if span := _SPAN.fullmatch(text):
        return now - float(span[1]) * _SECONDS[span[2]]
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except (ValueError, OverflowError):
        raise ConfigError(
            f"'--since' = '{text}': should be a span such as 90s, 10m, 2h or 1d, or a time such as 2026-11-16T12:30"
        ) from None
