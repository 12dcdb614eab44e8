"""What happens again and again is told in measure, and nothing is left out of the count."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.roles import telling
from qfleet.roles.telling import AT_ONCE, EVERY_S, Telling


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 30)), max_size=60))
def test_all_are_told_or_counted_and_few_lines_do_it(arrivals: list[tuple[float, int]]) -> None:
    """An environment that raised in every other episode filled 600 MB of events in an hour."""
    with pytest.MonkeyPatch.context() as patch:
        now = [0.0]
        patch.setattr(telling.time, "monotonic", lambda: now[0])
        told, came, speaks = Telling(), 0, []
        for seconds, count in [*arrivals, (2 * EVERY_S, 0)]:
            now[0] += seconds
            speaks += told.of(f"loss {came + n}" for n in range(count))
            came += count
        counted = sum(int(match[1]) for text in speaks if (match := re.match(r"(\d+) more in \d+ s, the last", text)))
        assert sum(text.startswith("loss") for text in speaks) + counted == came
        assert len(speaks) <= (AT_ONCE + 1) * (now[0] / EVERY_S + 1)


def test_the_first_few_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(telling.time, "monotonic", lambda: now[0])
    told = Telling()
    assert told.of(["a", "b"]) == ["a", "b"]
    last = told.of(["c"] * 20)
    assert len(last) == AT_ONCE - 2
    assert [text.endswith("told as one)") for text in last] == [False] * (AT_ONCE - 3) + [True]
    assert told.of(["d"]) == []
    now[0] += EVERY_S
    assert told.of(["e"]) == ["13 more in 60 s, the last: d", "e"]
