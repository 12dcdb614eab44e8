"""The edges' part of a checkpoint: read by any placement, whichever wrote it.

Where roles are elsewhere, each writes the states of its own ends, `OWNER.ends`; inline there is one file for all edges.
Both say the same: what waits in a stream, the newest of a latest value, which of them each reader has seen, and each
writer's cell of a counter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.runtime import checkpoint

WHOLE, OWN = "edges", ".ends"


def end_key(edge: str, side: str, reader: int) -> str:
    """Return the name of an end's state among those of its owner."""
    return f"{edge}/{side}/{reader}"


def known(directory: Path, owner: str) -> bool:
    """Return whether a checkpoint has edges of an owner: those of one who was away may be missing."""
    return _exists(directory, f"{owner}{OWN}") or _exists(directory, WHOLE)


def of_owner(directory: Path, owner: str, keys: list[str]) -> State:
    """Return the states of an owner's ends; those that no run of this arrangement wrote are left out."""
    if _exists(directory, f"{owner}{OWN}"):
        return checkpoint.read_state(directory, f"{owner}{OWN}")
    if not _exists(directory, WHOLE):
        raise CheckpointError(f"{directory} holds no edges of '{owner}': it was made by a differently arranged run")
    whole = checkpoint.read_state(directory, WHOLE)
    return {key: state for key in keys if (state := _part(whole, *_parsed(key))) is not None}


def of_all(directory: Path) -> State:
    """Return all `edges` by name, and the stamp that each reader of a latest value has `seen`."""
    if _exists(directory, WHOLE):
        return checkpoint.read_state(directory, WHOLE)
    whole: State = {"edges": {}, "seen": {}}
    for file in sorted(directory.glob(f"*{OWN}.msgpack")):
        for key, state in checkpoint.read_state(directory, file.name.removesuffix(".msgpack")).items():
            _add(whole, *_parsed(key), state)
    return whole


def _part(whole: State, edge: str, side: str, reader: int) -> Any | None:
    """Return the state of one end, out of that of all edges; None if it is not there."""
    if side == "subscriber":
        return whole["seen"].get(f"{edge}/{reader}")
    content = whole["edges"].get(edge)
    if side == "counter" and content is not None:
        return content[reader] if reader < len(content) else 0
    return 0 if side == "sender" and content is not None else content


def _add(whole: State, edge: str, side: str, reader: int, state: Any) -> None:
    """Put the state of one end among that of all edges."""
    if side == "subscriber":
        whole["seen"][f"{edge}/{reader}"] = state
    elif side == "counter":
        cells = whole["edges"].setdefault(edge, [])
        cells += [0] * (reader + 1 - len(cells))
        cells[reader] = state
    elif side != "sender":  # the receiver has what was sent
        whole["edges"][edge] = state


def _parsed(key: str) -> tuple[str, str, int]:
    edge, side, reader = key.rsplit("/", 2)
    return edge, side, int(reader)


def _exists(directory: Path, name: str) -> bool:
    return (directory / f"{name}.msgpack").exists()
