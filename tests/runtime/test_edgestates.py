"""Edges of a checkpoint, written by one placement and read by the other."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import CheckpointError
from qfleet.runtime import edgestates
from qfleet.runtime.captured import Captured

NAMES = st.text(st.sampled_from("ab/."), min_size=1, max_size=4)
MESSAGES = st.lists(st.integers(0, 9), max_size=3)
LATEST = st.fixed_dictionaries({"value": st.none() | st.integers(0, 9), "stamp": st.integers(0, 9)})
CELLS = st.lists(st.integers(0, 9), min_size=1, max_size=3)


@st.composite
def all_edges(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the state of all edges as inline has it, and the same by owners, one for each end."""
    edges: dict[str, Any] = {}
    seen: dict[str, int] = {}
    owners: dict[str, dict[str, Any]] = {}

    def own(key: str, state: Any) -> None:
        owners[f"role-{len(owners)}"] = {key: state}

    for number, name in enumerate(draw(st.lists(NAMES, max_size=4))):
        edge, kind = f"{name}{number}", draw(st.sampled_from(["stream", "latest", "counter"]))
        if kind == "stream":
            edges[edge] = draw(MESSAGES)
            own(edgestates.end_key(edge, "sender", 0), len(edges[edge]))
            own(edgestates.end_key(edge, "receiver", 0), edges[edge])
        elif kind == "latest":
            edges[edge] = draw(LATEST)
            own(edgestates.end_key(edge, "publisher", 0), edges[edge])
            for reader in range(draw(st.integers(0, 2))):
                seen[f"{edge}/{reader}"] = draw(st.integers(0, 9))
                own(edgestates.end_key(edge, "subscriber", reader), seen[f"{edge}/{reader}"])
        else:
            edges[edge] = draw(CELLS)
            for writer, cell in enumerate(edges[edge]):
                own(edgestates.end_key(edge, "counter", writer), cell)
    return {"edges": edges, "seen": seen}, owners


@given(all_edges())
def test_either_form_is_read_as_the_other(given_edges: tuple[dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    whole, owners = given_edges
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        Captured(Path(one), edgestates.WHOLE, whole).write()
        for owner, states in owners.items():
            Captured(Path(other), f"{owner}{edgestates.OWN}", states).write()
        assert edgestates.of_all(Path(other)) == edgestates.of_all(Path(one)) == whole
        for owner, states in owners.items():
            assert edgestates.of_owner(Path(other), owner, list(states)) == states
            found = edgestates.of_owner(Path(one), owner, [*states, "new/receiver/0"])
            assert {key: 0 if "/sender/" in key else state for key, state in states.items()} == found


def test_an_owner_that_neither_form_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no edges of 'actor-7': it was made by a differently arranged run"):
        edgestates.of_owner(tmp_path, "actor-7", [])
