"""The replay shard: its rate, how a batch is shared among ranks, and when it ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import SPEC, Edge

from qfleet.algo.schedules import Schedule
from qfleet.core.role import DONE, Idle
from qfleet.core.spec import PLAIN
from qfleet.core.types import Experience, Version
from qfleet.replay import PrioritisedConfig, ReplayConfig
from qfleet.roles.replay_shard import ReplayShard, ShardHandles, ShardSetup


def experience(sequence: int, streams: int = 4, source: str = "actor-0") -> Experience:
    rows = streams
    return Experience(
        source=source,
        sequence=sequence,
        version=Version(0, sequence),
        offsets=np.array([0, rows]),
        stream=np.arange(rows),
        observation={PLAIN: np.full((rows, 3), sequence, np.float32)},
        action=np.zeros(rows, np.int64),
        reward=np.ones(rows, np.float32),
        terminated=np.zeros(rows, bool),
        truncated=np.zeros(rows, bool),
        final=np.zeros(rows, bool),
    )


def make_shard(
    ranks: int = 1, train_period: float = 4.0, learning_starts: int = 8, batch_size: int = 6, updates_per_draw: int = 1
) -> tuple[ReplayShard, ShardHandles]:
    setup = ShardSetup(
        replay=ReplayConfig(capacity=1000, sampler=PrioritisedConfig()),
        spec=SPEC,
        streams=4,
        n_step=1,
        gamma=0.9,
        normalise_rewards=False,
        batch_size=batch_size,
        train_period=train_period,
        learning_starts=learning_starts,
        beta=Schedule(start=0.5),
        seed=0,
        index=0,
        directory=None,
        updates_per_draw=updates_per_draw,
    )
    handles = ShardHandles(
        experience=(Edge(),),
        priorities=(Edge(),),
        batches=tuple(Edge(capacity=1) for _ in range(ranks)),
        env_steps=Edge(),
        inserts=Edge(),
        samples=Edge(),
    )
    return ReplayShard(setup, handles), handles


@settings(deadline=None, max_examples=30)
@given(period=st.sampled_from([0.5, 1.0, 3.0, 4.0, 10.0]), starts=st.integers(1, 40), messages=st.integers(1, 40))
def test_updates_per_env_step_are_the_train_period_whatever_the_order(period, starts, messages):
    shard, handles = make_shard(train_period=period, learning_starts=starts)
    for sequence in range(messages):
        handles.experience[0].send(experience(sequence))
    handles.experience[0].close()
    drawn = 0
    while shard.step() != DONE:
        drawn += handles.batches[0].receive() is not None
    inserted = handles.inserts.count
    assert inserted == 4 * messages
    owed = max(0.0, inserted - starts) / period
    assert drawn == handles.samples.count
    assert abs(drawn - owed) <= 1 or inserted <= starts + 4


def test_trap_13_updates_owed_before_the_first_window_is_complete_do_not_stop_the_filling():
    shard, handles = make_shard(train_period=0.5, learning_starts=1)
    for sequence in range(2):
        handles.experience[0].send(experience(sequence))
    for _ in range(5):
        shard.step()
    assert handles.inserts.count == 8
    assert handles.samples.count == 1


def test_trap_14_a_shard_never_draws_ahead_of_a_full_stream():
    shard, handles = make_shard()
    for sequence in range(20):
        handles.experience[0].send(experience(sequence))
    for _ in range(50):
        status = shard.step()
    assert isinstance(status, Idle)
    assert status.reason == "the learner has not taken its batch"
    assert handles.samples.count == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_one_draw_without_gap_or_overlap(ranks):
    alone, alone_handles = make_shard()
    shared, shared_handles = make_shard(ranks=ranks)
    for shard, handles in ((alone, alone_handles), (shared, shared_handles)):
        for sequence in range(4):
            handles.experience[0].send(experience(sequence))
            shard.step()
    whole = alone_handles.batches[0].receive()
    parts = [edge.receive() for edge in shared_handles.batches]
    assert sorted(np.concatenate([part.index for part in parts])) == sorted(whole.index)
    assert all(part.global_size == len(whole.index) == 6 for part in parts)
    assert max(len(p.index) for p in parts) - min(len(p.index) for p in parts) <= 1
    for rank, part in enumerate(parts):
        assert np.array_equal(part.weight, whole.weight[rank::ranks])
        assert np.array_equal(part.observation[PLAIN], whole.observation[PLAIN][rank::ranks])


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_drawn_at_once_each_get_their_share_of_every_part_of_the_draw(ranks):
    """All priorities are equal, so a draw of 12 from 12 items has them all, in order; 3 updates of 4 are dealt them."""
    shard, handles = make_shard(ranks=ranks, batch_size=4, updates_per_draw=3, train_period=1.0, learning_starts=12)
    for sequence in range(4):
        handles.experience[0].send(experience(sequence))
        shard.step()
    assert handles.samples.total() == 3
    parts = [edge.receive() for edge in handles.batches]
    items = np.sort(np.concatenate([part.index for part in parts]))
    assert len(items) == 12
    for part in parts:
        assert (part.updates, part.global_size, len(part.index)) == (3, 12, 12 // ranks)
    for update in range(3):
        own = np.concatenate([np.split(part.index, 3)[update] for part in parts])
        assert np.array_equal(np.sort(np.searchsorted(items, own)) // 3, np.arange(4)), "one of every three in a row"


def test_actors_take_turns_when_the_limiter_is_tight():
    shard, handles = make_shard()
    handles = dataclasses.replace(handles, experience=(Edge(), Edge()))
    shard = ReplayShard(shard._setup, handles)
    sent = [0, 0]
    for _ in range(60):
        for number, edge in enumerate(handles.experience):
            if not edge.queue:
                edge.send(experience(sent[number], source=f"actor-{number}"))
                sent[number] += 1
        shard.step()
        handles.batches[0].receive()
    assert abs(sent[0] - sent[1]) <= 1
    assert min(sent) > 10


def test_a_message_sent_twice_is_stored_once():
    shard, handles = make_shard()
    handles.experience[0].send(experience(0))
    handles.experience[0].send(experience(0))
    shard.step()
    shard.step()
    assert handles.inserts.count == 4


def test_batches_name_the_newest_weights_that_fed_the_shard():
    shard, handles = make_shard()
    for sequence in range(3):
        handles.experience[0].send(experience(sequence))
        shard.step()
    assert handles.batches[0].receive().version == Version(0, 2)


def test_whole_batches_are_dealt_to_whoever_has_room():
    plain, handles = make_shard(ranks=3, train_period=1.0)
    shard = ReplayShard(dataclasses.replace(plain._setup, dealt=True), handles)
    for sequence in range(12):
        handles.experience[0].send(experience(sequence))
    got = [0, 0, 0]
    for step in range(60):
        shard.step()
        for rank in (0, 1) if step % 2 else (0,):  # the second is slow, the third takes nothing
            message = handles.batches[rank].receive()
            if message is not None:
                assert len(message.action) == message.global_size == 6
                got[rank] += 1
    assert got[0] > got[1] > 0
    assert len(handles.batches[2].queue) == 1
    assert handles.samples.count == sum(got) + 1 + len(handles.batches[1].queue) + len(handles.batches[0].queue)
