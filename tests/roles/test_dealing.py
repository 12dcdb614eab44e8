"""A shard dies while it sends the parts of a draw: its next life sends the same draw to those who still wait for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import Edge
from test_lives import Keep, next_life, with_keep
from test_replay_shard import experience, make_shard

from qfleet.core import codec
from qfleet.core.spec import PLAIN
from qfleet.core.types import Batch
from qfleet.roles.dealing import joined, share_of
from qfleet.roles.replay_shard import ReplayShard, ShardHandles


class Died(BaseException):
    """What ends a life in the middle of something."""


class Mortal(Edge):
    """A stream or counter whose holder dies at the chosen one of all uses, before or after it took effect."""

    uses: dict[str, int]

    def __init__(self, uses: dict[str, int], **settings: Any) -> None:
        super().__init__(**settings)
        self.uses = uses

    def _used(self) -> None:
        self.uses["left"] -= 1
        if self.uses["left"] == 0:
            raise Died

    def send(self, message: Any) -> None:
        self._used()
        super().send(message)
        self._used()

    def add(self, amount: int) -> None:
        self._used()
        super().add(amount)
        self._used()


def drawing_shard(ranks: int, split: int, updates: int, uses: dict[str, int]) -> tuple[ReplayShard, ShardHandles]:
    """A shard that is to draw at its next step."""
    made, handles = make_shard(ranks, train_period=4.0, learning_starts=8, batch_size=6, updates_per_draw=updates)
    batches = tuple(Mortal(uses, capacity=2) for _ in range(ranks))
    handles = dataclasses.replace(handles, batches=batches, samples=Mortal(uses))
    made._setup = dataclasses.replace(made._setup, split=split)
    shard = with_keep(made, handles, Keep())
    for sequence in range(2):  # a row completes the one before
        handles.experience[0].send(experience(sequence))
        shard.step()
    for sequence in range(2, 2 + updates + 1):
        handles.experience[0].send(experience(sequence))
    return shard, shard._handles


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)]),
    updates=st.sampled_from([1, 2]),
    fatal=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_every_rank_gets_its_part_of_every_draw_once_wherever_shards_die(shape, updates, fatal):
    (ranks, split), uses = shape, {"left": -1}
    shard, handles = drawing_shard(ranks, split, updates, uses)
    drawn: list[list[Any]] = []
    for _ in range(8):
        uses["left"] = fatal.pop(0) if fatal else -1
        try:
            shard.step()
        except Died:
            uses["left"] = -1
            shard = next_life(shard)
        waiting = [len(stream.queue) for stream in handles.batches]
        assert len(set(waiting)) == 1, "no rank is ahead of the others"
        drawn += [[stream.receive() for stream in handles.batches] for _ in range(waiting[0])]
    assert handles.samples.total() == updates * len(drawn) > 0
    for number, parts in enumerate(drawn, 1):
        replicas = parts[::split]
        assert {part.draw for part in parts} == {updates * number}
        assert {(part.parts, part.global_size, part.updates) for part in parts} == {
            (ranks // split, 6 * updates, updates)
        }
        assert sum(len(part.index) for part in replicas) == 6 * updates
        for rank, part in enumerate(parts):  # those that share a network get the same
            first = parts[rank - rank % split]
            for name in ("index", "weight", "generation"):
                assert np.array_equal(getattr(part, name), getattr(first, name))
            assert np.array_equal(part.observation[PLAIN], first.observation[PLAIN])


@pytest.mark.parametrize("after", [1, 2])
def test_a_draw_is_made_again_to_the_bit(after):
    whole, handles = drawing_shard(2, 1, 1, {"left": -1})
    whole.step()
    expected = [stream.receive() for stream in handles.batches]
    uses = {"left": -1}
    cut, handles = drawing_shard(2, 1, 1, uses)
    uses["left"] = 2 + 2 * after - 1  # the draw is counted, then sent
    with pytest.raises(Died):
        cut.step()
    assert [len(stream.queue) for stream in handles.batches] == [after - 1, 0]
    next_life(cut)
    found = [stream.receive() for stream in handles.batches]
    for one, other in zip(expected, found, strict=True):
        for field in dataclasses.fields(one):
            value, again = getattr(one, field.name), getattr(other, field.name)
            if isinstance(value, np.ndarray):
                assert np.array_equal(value, again), field.name
            elif not isinstance(value, dict):
                assert value == again, field.name
        assert np.array_equal(one.next_observation[PLAIN], other.next_observation[PLAIN])


def test_a_rank_that_left_for_good_gets_nothing_and_holds_nobody_up():
    shard, handles = drawing_shard(3, 1, 1, {"left": -1})
    handles.batches[2].left = True
    handles.batches[2].capacity = 0
    shard.step()
    parts = [stream.receive() for stream in handles.batches]
    assert parts[2] is None
    assert [part.parts for part in parts[:2]] == [2, 2]
    assert sum(len(part.index) for part in parts[:2]) == 6


@given(rows=st.integers(1, 40), before=st.integers(1, 6), after=st.integers(1, 6))
def test_shares_of_a_draw_make_the_draw_again_however_it_is_cut(rows: int, before: int, after: int) -> None:
    numbers = np.arange(rows)
    draw = Batch(
        observation={"": np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3)},
        action=numbers,
        reward=numbers.astype(np.float32),
        discount=np.ones(rows, np.float32),
        next_observation={"": np.zeros((rows, 3), np.float32)},
        weight=np.ones(rows, np.float32),
        index=numbers[::-1].copy(),
        generation=numbers,
        next_mask=numbers[:, None] > np.arange(2),
        draw=7,
    )
    shares = [share_of(draw, replica, before) for replica in range(before)]
    again = joined(shares)
    for replica in range(after):
        found, expected = (codec.pack(share_of(one, replica, after)) for one in (again, draw))
        assert found[0] == expected[0]
        for one, other in zip(found[1], expected[1], strict=True):
            np.testing.assert_array_equal(one, other)
