"""Functions that torch's compiler fuses: what it needs to know of itself is found ahead, by names that it still has."""

from __future__ import annotations

from torch._inductor import codecache

from qfleet.accel.fusing import _identify


def test_the_compilers_own_names_are_still_where_they_are_looked_for() -> None:
    codecache.CacheBase.get_system.cache_clear()
    _identify()
    assert codecache.CacheBase.get_system.cache_info().currsize == 1
