"""Decides whether a run has told of each fault that it could notice: why, and how long it took to be put right."""

from __future__ import annotations

import re
from typing import Any

from cases import DAMAGE, FULL, HANGS, NAN, PARTED, Case

Lines = list[dict[str, Any]]
HEALED = {"unsaved": "saved", "unwritten": "written"}
"""Kinds of notices of what could not be written, with those that say after how many seconds it could be again."""


def check_told(what: Case, events: Lines) -> int:
    """Raise AssertionError unless the faults of a case are told; returns how many were met."""
    deaths = [event for event in events if event["event"] == "restart"]
    for death in deaths:
        assert death["cause"], f"a death without a cause: {death}"
        assert death["seconds_to_repair"] >= 0, f"a repair that ended before it began: {death}"
    told = {kind: sum(event.get("kind") == kind for event in events) for kind in (*HEALED, "skipped_update")}
    if what.faults == FULL:
        healed = [event["text"] for event in events if event.get("kind") in HEALED.values()]
        assert told["unsaved"] + told["unwritten"] > 0, "a full disk was not told"
        assert all(re.search(r"\d+\.\d s", text) for text in healed)
        assert len(healed) == told["unsaved"] + told["unwritten"], "that it could be written again was not told"
        return len(healed)
    if what.faults == HANGS:
        hung = sum("hung" in death["cause"] for death in deaths)
        assert hung == 2, f"two actors hung, and {hung} are told"
        return hung
    if what.faults == NAN:
        assert told["skipped_update"] > 0, "updates that were not finite were not told"
        return told["skipped_update"]
    if what.faults == DAMAGE:
        (resumed,) = (event for event in events if event["event"] == "resumed")
        assert len(resumed["skipped"]) + len(resumed["mended"]) == 1, "the damage was not told"
        return 1
    if what.faults == PARTED:
        assert any("was lost" in str(event) for event in events), "the loss of a machine was not told"
    return 1 if what.cut_s else what.points.count(":slow")
