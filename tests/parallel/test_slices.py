"""The cuts of a flat vector: nothing is left out, nothing has two owners, no server has more than its share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError
from qfleet.parallel.slices import BLOCK, cut

sizes = st.integers(1, 5000).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, min(-(-size // BLOCK), 64))))


@settings(max_examples=200, deadline=None)
@given(sizes=sizes)
def test_every_value_has_one_owner_and_shares_differ_by_a_block_at_most(sizes: tuple[int, int]) -> None:
    size, parts = sizes
    owners = np.zeros(size, np.int64)
    pieces = cut(size, parts)
    for piece in pieces:
        owners[piece] += 1
    assert (owners == 1).all()
    assert np.array_equal(np.concatenate([np.arange(size)[piece] for piece in pieces]), np.arange(size))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert len(lengths) == parts
    blocks = [-(-length // BLOCK) for length in lengths]
    assert max(blocks) - min(blocks) <= 1
    assert all(piece.start % BLOCK == 0 for piece in pieces)
    assert min(lengths) > 0


@pytest.mark.parametrize("parts", [0, 4])
def test_more_servers_than_blocks_are_refused(parts: int) -> None:
    with pytest.raises(ConfigError, match="1 to 3 servers"):
        cut(40, parts)
