"""Parity puts any damage within one part right, and nothing else by mistake."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qfleet.runtime.parity import mended, parity_of


@given(data=st.binary(min_size=1, max_size=400), choose=st.data())
def test_damage_within_one_part_is_put_right(data: bytes, choose: st.DataObject) -> None:
    parity = parity_of(data)
    assert len(parity) == -(-len(data) // 32)
    part = choose.draw(st.integers(0, (len(data) - 1) // len(parity)))
    place = slice(part * len(parity), (part + 1) * len(parity))
    noise = choose.draw(st.binary(min_size=len(data[place]), max_size=len(data[place])))
    damaged = data[: place.start] + noise + data[place.stop :]
    assert mended(damaged, parity, lambda content: content == data) == (None if damaged == data else data)


@given(data=st.binary(max_size=100), other=st.binary(max_size=100))
def test_what_cannot_be_put_right_is_not(data: bytes, other: bytes) -> None:
    assert mended(data, parity_of(other), lambda content: False) is None
