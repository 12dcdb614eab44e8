"""The result of a benchmark: our figure, the peer's, their ratio and the goal, as text and as plain values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qfleet.control.summary import hardware
from qfleet.core.versions import versions


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    what: str
    ours: str
    """Our figure with its unit."""
    peer: str = ""
    """The peer's figure with its unit and its name; empty where there is none or it was not measured."""
    ratio: float | None = None
    """How many times better we are, where a peer was measured in the same run."""
    goal: str = ""
    """What the figure should be."""
    met: bool | None = None
    """Whether it is; None where that cannot be said."""


def markdown(suites: Mapping[str, Sequence[Row]], command: str) -> str:
    """Return the page with a table for each suite, and what it was measured on."""
    lines = ["# Results", "", f"Made by `{command}` on {time.strftime('%Y-%m-%d')}.", ""]
    machine = hardware()
    gpus = ", ".join(machine["gpus"]) or "none"
    lines += [f"Machine: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, GPUs: {gpus}."]
    lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".", ""]
    for name, rows in suites.items():
        lines += [f"## {name}", "", "| what | qfleet | peer | ratio | goal | met |", "|---|---|---|---|---|---|"]
        for row in rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            met = {True: "yes", False: "no", None: ""}[row.met]
            lines.append(f"| {row.what} | {row.ours} | {row.peer} | {ratio} | {row.goal} | {met} |")
        lines.append("")
    return "\n".join(lines)


def plain(suites: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return the same as values for a JSON file."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "hardware": hardware(),
        "suites": {name: [asdict(row) for row in rows] for name, rows in suites.items()},
    }
