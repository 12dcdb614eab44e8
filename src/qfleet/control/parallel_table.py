"""The candidates of a parallel plan as a plain text table: what each takes, of what that is made, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from qfleet.control.parallel_ways import Candidate, Choice

HEADINGS = ("plan", "ms", "compute", "communication", "waiting", "memory", "verdict")
SHOWN = 16
"""Rows of possible ways that are shown at most; the chosen one is always among them."""
REFUSED = 6
"""Rows of impossible ways that are shown at most."""


def candidates_table(choice: Choice, shown: int = SHOWN) -> str:
    """Return the candidates as lines of text, the fastest first, and the reason of the choice below."""
    possible = [one for one in choice.candidates if one.cost]
    refused = [one for one in choice.candidates if not one.cost]
    rows = [_row(one, choice.best) for one in _kept(possible, choice.best, shown)]
    rows += [_row(one, choice.best) for one in refused[:REFUSED]]
    widths = [max(len(row[column]) for row in [HEADINGS, *rows]) for column in range(len(HEADINGS))]
    lines = [_line(row, widths) for row in [HEADINGS, *rows]]
    left = len(possible) + len(refused) - len(rows)
    if left:
        lines.append(f"{left} more are left out: slower, or impossible for such reasons")
    return "\n".join([*lines, choice.why])


def _kept(possible: Sequence[Candidate], best: Candidate, shown: int) -> list[Candidate]:
    """Return the first ones, with the chosen way and the slowest but one device not lost."""
    wanted = [one for one in possible if one is best or one.way.ranks == 1]
    first = [one for one in possible if one not in wanted][: max(shown - len(wanted), 0)]
    return [one for one in possible if one in wanted or one in first]


def _row(one: Candidate, best: Candidate) -> tuple[str, ...]:
    cost = one.cost
    if cost is None:
        return (str(one.way), "", "", "", "", "", one.obstacle)
    parts = [f"{part / cost.seconds:.0%}" for part in (cost.compute, cost.communication, cost.idle)]
    return (str(one.way), f"{1e3 * cost.seconds:.2f}", *parts, f"{cost.memory / 2**20:,.1f} MiB", _verdict(one, best))


def _verdict(one: Candidate, best: Candidate) -> str:
    assert one.cost is not None
    assert best.cost is not None
    if one is best:
        return "chosen"
    times = one.cost.seconds / best.cost.seconds
    words = f"{times:.2f} times as long" if times >= 1 else f"{1 / times:.2f} times as fast"
    return words if one.way.exact else f"{words}, learns otherwise"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return one line: names to the left, figures to the right."""
    last = len(row) - 1
    cells = [
        cell.ljust(width) if column in (0, last) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
