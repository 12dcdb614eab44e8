"""A JSON file in the user's cache that keeps what was measured, each by a key of plain values."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from qfleet.accel.cache import cache_path
from qfleet.core.config import Config

Kept = TypeVar("Kept")
_MOST = 64
"""Entries that a file holds at most; the oldest go first."""


class _Entry(Config):
    key: dict[str, Any]
    value: Any


class _File(Config):
    format: Literal[1] = 1
    entries: tuple[_Entry, ...] = ()


class KeptFile(Generic[Kept]):
    """Values of one type in one file, beside what probes found; a file that cannot be read holds nothing."""

    def __init__(self, name: str, kind: type[Kept]) -> None:
        self._name, self._values = name, TypeAdapter(kind)

    @property
    def path(self) -> Path:
        """The file."""
        return cache_path().with_name(self._name)

    def find(self, key: Mapping[str, Any]) -> Kept | None:
        """Return what was kept for exactly this key."""
        wanted = _plain(key)
        found = next((entry.value for entry in self._read() if _plain(entry.key) == wanted), None)
        try:
            return None if found is None else self._values.validate_python(found)
        except ValidationError:  # of another version: it is measured again
            return None

    def store(self, key: Mapping[str, Any], value: Kept) -> None:
        """Keep a value in place of an older one for the same key; raises OSError if that fails."""
        wanted = _plain(key)
        others = [entry for entry in self._read() if _plain(entry.key) != wanted]
        entry = _Entry(key=json.loads(wanted), value=self._values.dump_python(value, mode="json"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two plans at once must not write into the same file.
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=f".{self._name}.", delete=False) as partial:
            partial.write(_File(entries=(*others, entry)[-_MOST:]).model_dump_json(indent=1) + "\n")
        os.replace(partial.name, self.path)

    def _read(self) -> tuple[_Entry, ...]:
        try:
            return _File.model_validate_json(self.path.read_bytes()).entries
        except (OSError, ValidationError):
            return ()


def _plain(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
