"""Receivers of a run's metrics and events: files that survive a kill, plain lines, and silence."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from qfleet.core.errors import QfleetError
from qfleet.core.failpoints import failpoint
from qfleet.observe.text import count, duration, known, number, one_line, rate, sentence

_MOST_WAITING = 10_000
"""Lines that wait for room on a full disk; then the oldest go."""
_LEAST_FREE = 2**20
"""Bytes on a disk below which it is full."""
Metrics = Mapping[str, float | str]
"""A flat record: numbers in base units (steps, seconds, fractions), texts; an absent key is unknown."""


class Sink(Protocol):
    """Something that is told how a run goes."""

    def metrics(self, record: Metrics) -> None:
        """Take the newest numbers; called every few seconds or more often."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Take something that happened; its name is under "event"."""

    def close(self) -> None:
        """Write what is left and give everything back; safe to call twice."""


class Silent:
    """A sink that shows nothing (`--quiet`)."""

    def metrics(self, record: Metrics) -> None:
        """Ignore the numbers."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Do nothing."""


class JsonlSink:
    """Appends to `metrics.jsonl` and `events.jsonl`; a killed run loses at most the line it was writing."""

    def __init__(self, directory: Path, require: Callable[[], None] = lambda: None) -> None:
        """Take what raises an error as soon as nothing may be written any more."""
        self._directory, self._require = directory, require
        self._metrics = Lines(directory / "metrics.jsonl")
        self._events = Lines(directory / "events.jsonl")

    def metrics(self, record: Metrics) -> None:
        """Append one line to metrics.jsonl."""
        self._write(self._metrics, record)

    def event(self, record: Mapping[str, Any]) -> None:
        """Append one line to events.jsonl."""
        self._write(self._events, record)

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()

    def _write(self, file: Lines, record: Mapping[str, Any]) -> None:
        """Append a record, after all those that had to wait."""
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        try:
            self._require()
        except OSError as error:  # no file can be opened now, say: then nobody knows whether this may be written
            file.add(line)
            raise QfleetError(f"cannot look at {self._directory}: {error.strerror}") from error
        file.add(line)
        for one in (self._events, self._metrics):
            one.write()
        require_room(self._directory)


class Lines:
    """A file of lines that grows at its end; lines for which there is no room wait, the last thousands of them."""

    def __init__(self, path: Path) -> None:
        self._file = _open_whole(path)
        self._name = path.stem
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)

    def add(self, line: bytes) -> None:
        """Take the next line, to be written."""
        self._waiting.append(line)

    def write(self) -> None:
        """Write all lines that were taken; QfleetError if there is no room, and then they wait on."""
        while self._waiting:
            end = self._file.seek(0, os.SEEK_END)
            try:
                failpoint(f"{self._name}.write")
                if self._file.write(self._waiting[0]) != len(self._waiting[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._file.truncate(end)  # without the torn line
                raise QfleetError(f"cannot write {self._file.name}: {error.strerror}; free some space") from error
            self._waiting.popleft()

    def close(self) -> None:
        """Write what waits, if there is room, and close the file."""
        with contextlib.suppress(QfleetError):
            self.write()
        self._file.close()


def require_room(directory: Path) -> None:
    """Raise QfleetError if the disk of a directory is full: a line or two may still fit when nothing else does."""
    try:
        disk = os.statvfs(directory)
    except OSError:  # deleted meanwhile
        return
    if disk.f_blocks and disk.f_bavail * disk.f_frsize < _LEAST_FREE:
        raise QfleetError(f"the disk of {directory} is full; free some space")


class PlainLines:
    """One plain line every few seconds for a log file or a pipe: no colours, no cursor movement."""

    def __init__(self, stream: TextIO, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every_s, self._clock = stream, every_s, clock
        self._next_at = -math.inf
        self._unwritten: Metrics | None = None

    def metrics(self, record: Metrics) -> None:
        """Write the numbers as a line, unless the last such line is younger than the interval."""
        self._unwritten = record
        if self._clock() >= self._next_at:
            self._write_metrics()

    def event(self, record: Mapping[str, Any]) -> None:
        """Write an event at once; the end of a run is preceded by its last numbers."""
        if record.get("event") in ("finished", "stopped", "failed"):
            self._write_metrics()
        self._write(sentence(record))

    def close(self) -> None:
        """Write the numbers that were still held back; the stream stays open, for it is not ours."""
        self._write_metrics()

    def _write_metrics(self) -> None:
        if self._unwritten is not None:
            self._write(progress_line(self._unwritten))
            self._unwritten, self._next_at = None, self._clock() + self._every_s

    def _write(self, line: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # The reader has gone (a closed pipe or terminal): a run must not die of not being watched.
            pass


def progress_line(record: Metrics) -> str:
    """Return the numbers of a metrics record in aligned columns, then the bottleneck; unknown ones are dashes."""
    steps, budget = known(record, "env_steps"), known(record, "env_steps_budget")
    percent = f"{100 * steps / budget:.0f}%" if steps is not None and budget else ""

    def shown(key: str, show: Callable[[float], str]) -> str:
        value = known(record, key)
        return "-" if value is None else show(value)

    bottleneck = f"  {one_line(str(record['bottleneck']))}" if record.get("bottleneck") else ""
    return (
        f"{shown('wall_s', duration):>6}  steps {shown('env_steps', count):>8} {percent:>4}"
        f"  return {shown('episode_return', number):>8}  {shown('env_steps_per_s', rate):>7} steps/s"
        f"  {shown('updates_per_s', rate):>7} updates/s  eta {shown('eta_s', duration):>6}{bottleneck}"
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that `JsonlSink` wrote; a line counts once its newline is there.

    A torn last line is left out. A missing file, or a damaged line before the last, is an error that names it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise QfleetError(f"cannot read {path}: {error.strerror}; is this the directory of a run?") from error
    records = []
    for position, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise QfleetError(
                f"{path}, line {position} is damaged ({error}); remove that line to read the rest"
            ) from error
        if not isinstance(record, dict):
            raise QfleetError(f"{path}, line {position} is not a record; remove that line to read the rest")
        records.append(record)
    return records


def _open_whole(path: Path) -> FileIO:
    """Open a file for appending, without the torn line that a kill may have left at its end."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)  # what a full disk did not take must not wait in a buffer
        file.truncate(_end_of_last_line(file))
    except OSError as error:
        raise QfleetError(f"cannot write {path}: {error.strerror}; choose another --run-dir") from error
    return file


def _end_of_last_line(file: FileIO, block: int = 1 << 16) -> int:
    position = file.seek(0, 2)
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def _plain(value: Any) -> Any:
    """Return what JSON can hold: NaN and infinities become null, arrays lists, other objects their text."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int)) else str(value)
