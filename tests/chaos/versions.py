"""Decides from the history of a run whether its weights only went forward, written by one learner in each epoch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple


class Version(NamedTuple):
    """Which weights."""

    epoch: int
    number: int


class Note(NamedTuple):
    """One line of a history: when, by which life of which role, what and which weights."""

    at: int
    life: str
    what: str
    version: Version


def read(folder: Path) -> list[Note]:
    """Return all that the roles of a run noted, in order."""
    notes = []
    for path in sorted(folder.iterdir()):
        *lines, _ = path.read_text().split("\n")  # after the last line is nothing, or half a line of the dead
        for at, what, epoch, number in map(str.split, lines):
            notes.append(Note(int(at), path.name, what, Version(int(epoch), int(number))))
    return sorted(notes)


def check_versions(notes: list[Note], earlier: AbstractSet[Version] = frozenset()) -> set[Version]:
    """Raise AssertionError unless versions strictly increase and each epoch has one writer; returns those published.

    Whoever follows weights sees them in that order, each once in its life, and none that were not published: in this
    part of a run, or in `earlier` ones, whose last weights a resumed run begins with.
    """
    writers, seen = defaultdict(set), defaultdict(list)
    for note in notes:
        if note.what == "published":
            writers[note.version.epoch].add(note.life)
            seen["published"].append(note.version)
        elif note.life.startswith(("actor", "inference")):
            seen[note.life].append(note.version)
    for epoch, lives in writers.items():
        assert len(lives) == 1, f"epoch {epoch} of the weights was written by {sorted(lives)}"
    published = set(seen["published"])
    for who, versions in seen.items():
        back = [(old, new) for old, new in itertools.pairwise(versions) if new <= old]
        assert not back, f"weights went back: {who} had {back[0][0]} before {back[0][1]}"
        assert (published | earlier).issuperset(versions), f"{who} took weights that nobody published"
    return published
