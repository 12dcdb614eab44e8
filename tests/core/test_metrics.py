"""The counters behind the reported numbers."""

from __future__ import annotations

import math

from qfleet.core.codec import roundtrip
from qfleet.core.metrics import Window


def test_window_forgets_the_oldest_and_resumes() -> None:
    window = Window(3)
    assert math.isnan(window.mean())
    for value in (100, 1, 2, 3):
        window.add(value)
    assert (window.mean(), len(window)) == (2.0, 3)
    resumed = Window(3)
    resumed.load_state_dict(roundtrip(window.state_dict()))
    for w in (window, resumed):
        w.add(7)
    assert resumed.mean() == window.mean() == 4.0
