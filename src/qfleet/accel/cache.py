"""What probes found best, kept in the user's cache directory as JSON: read when a run starts, written by a probe."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from qfleet.accel.table import Settings
from qfleet.core.config import Config

Key = Mapping[str, Any]
"""Plain values (hardware, work, versions) that a choice holds for."""


class Entry(Config):
    """One choice and what it holds for."""

    key: dict[str, Any]
    """Hardware, work and versions."""
    settings: Settings
    """The fastest ones."""
    why: str
    """When they were measured, and how much faster they are."""


class _File(Config):
    format: Literal[1] = 1
    entries: tuple[Entry, ...] = ()


def cache_path() -> Path:
    """Return the file: in QFLEET_CACHE, or in qfleet/ of XDG_CACHE_HOME or of ~/.cache.

    A user without a home, as in some containers, has it among the temporary files.
    """
    own, shared = os.environ.get("QFLEET_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        directory = Path(own) if own else Path(shared or Path.home() / ".cache") / "qfleet"
    except RuntimeError:
        directory = Path(tempfile.gettempdir()) / f"qfleet-{os.getuid()}"
    return directory / "choices.json"


def read() -> tuple[tuple[Entry, ...], str]:
    """Return all entries, and one line that says why the file was ignored; empty if it was not."""
    path = cache_path()
    try:
        return _File.model_validate_json(path.read_bytes()).entries, ""
    except FileNotFoundError:
        return (), ""
    except OSError as error:
        return (), f"{path} cannot be read ({error.strerror}) and is ignored"
    except ValidationError:
        return (), f"{path} is damaged or of another version and is ignored; the next probe rewrites it"


def find(key: Key) -> tuple[Entry | None, str]:
    """Return the entry for exactly this key, if there is one, and why the file was ignored, if it was."""
    entries, complaint = read()
    wanted = _canonical(key)
    return next((entry for entry in entries if _canonical(entry.key) == wanted), None), complaint


def store(key: Key, settings: Settings, why: str) -> Path:
    """Keep a choice, in place of an older one for the same key; return the file. Raises OSError if that fails."""
    path, wanted = cache_path(), _canonical(key)
    others = [entry for entry in read()[0] if _canonical(entry.key) != wanted]
    kept = _File(entries=(*others, Entry(key=json.loads(wanted), settings=settings, why=why)))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: two probes at once must not write into the same file.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".choices.", delete=False) as partial:
        partial.write(kept.model_dump_json(indent=1) + "\n")
    os.replace(partial.name, path)
    return path


def _canonical(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
