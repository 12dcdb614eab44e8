"""A slow environment holds up an actor that acts for all at once, and not one that acts for whoever is ready."""

from __future__ import annotations

import pytest

from qfleet.bench.stragglers import rates


@pytest.mark.slow
def test_others_need_not_wait_for_a_straggler():
    """So slow a one that no load of the machine makes up for it; what an ordinary one costs is for the benchmark."""
    _, all_at_once = rates(2.0, groups=1, times_slower=1000)
    _, whoever_is_ready = rates(2.0, groups=2, times_slower=1000)
    assert whoever_is_ready > 3 * all_at_once
