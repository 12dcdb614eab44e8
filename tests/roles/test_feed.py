"""What a learner takes from several shards: from which how often, with what weights, and that no wait is for ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_cases import SPEC, Edge, random_batch
from test_replay_shard import experience, make_shard

from qfleet.core.role import DONE
from qfleet.core.types import Priorities, Standing
from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig, UniformConfig
from qfleet.roles.feed import Company, Feed
from qfleet.roles.replay_shard import ReplayShard, ShardHandles
from qfleet.runtime.inline import LocalCells, LocalCounter, LocalLatest, LocalSubscriber

ALPHA, EPSILON, DECAY = 0.6, 1e-6, 0.9


def batch(shard: int = 0, **fields: Any) -> Any:
    return dataclasses.replace(random_batch(np.random.default_rng(shard), size=4), shard=shard, **fields)


def standings(masses: list[float]) -> tuple[Standing, ...]:
    return tuple(Standing(mass, 1.0) for mass in masses)


class Source(Edge):
    """A batch stream that is never empty; its batches tell the masses of all."""

    def __init__(self, shard: int, masses: list[float]) -> None:
        super().__init__()
        self.shard, self.masses, self.taken = shard, masses, 0

    def receive(self) -> Any:
        self.taken += 1
        return batch(self.shard, standings=standings(self.masses))


def feed_of(masses: list[float], streams: list[Edge] | None = None) -> tuple[Feed, list[Any]]:
    sources: list[Any] = streams or [Source(shard, masses) for shard in range(len(masses))]
    feed = Feed(tuple(sources), tuple(Edge() for _ in masses), len(masses), DECAY)
    feed._known = list(standings(masses))
    return feed, sources


@settings(max_examples=50, deadline=None)
@given(masses=st.lists(st.floats(1e-3, 1e6), min_size=2, max_size=6), turns=st.integers(1, 300))
def test_no_shard_is_ever_ahead_or_behind_by_more_than_the_number_of_shards(masses, turns):
    feed, sources = feed_of(masses)
    for turn in range(1, turns + 1):
        assert feed.receive() is not None
        behind = [turn * mass / sum(masses) - source.taken for mass, source in zip(masses, sources, strict=True)]
        assert max(behind) <= len(masses) - 1
        assert min(behind) >= -1


def test_a_shard_that_grows_gets_its_share_at_once():
    masses = [1000.0, 1.0]
    feed, sources = feed_of(masses)
    for _ in range(50):
        feed.receive()
    before = sources[1].taken
    masses[1] = 1000.0
    for _ in range(100):
        feed.receive()
    assert sources[1].taken - before == pytest.approx(50, abs=2)


def test_the_shard_whose_turn_it_is_is_waited_for():
    told = standings([1.0, 1.0])
    streams = [Edge([batch(0, standings=told) for _ in range(9)]), Edge([batch(1, standings=told)])]
    feed, _ = feed_of([1.0, 1.0], streams)
    assert sorted(feed.receive().shard for _ in range(2)) == [0, 1]
    assert feed.receive().shard == 0
    assert feed.receive() is None
    assert feed.awaited == (streams[1],)
    streams[1].send(batch(1))
    assert feed.receive().shard == 1


def test_what_is_left_is_taken_when_the_others_have_ended_whatever_they_had_earned():
    masses = [1.0, 8.0, 0.0]
    counts = (5, 1, 3)
    streams = [Edge([batch(s, standings=standings(masses)) for _ in range(count)]) for s, count in enumerate(counts)]
    feed, _ = feed_of(masses, streams)
    for stream in streams:
        stream.close()
    taken = [feed.receive().shard for _ in range(9)]
    assert tuple(taken.count(shard) for shard in range(3)) == counts
    assert feed.receive() is None
    assert feed.exhausted()


def test_one_shard_or_none_is_taken_from_as_it_comes():
    message = batch()
    feed = Feed((Edge(), Edge([message])))
    assert feed.receive() is message
    assert feed.receive() is None
    assert not feed.exhausted()


def test_priorities_go_to_the_shard_that_drew_them_with_the_decayed_maximum_of_all():
    feed, _ = feed_of([1.0, 1.0])
    index = np.zeros(2, np.int64)
    for shard, priorities in ((1, [4.0, 1.0]), (0, [np.nan, 1.0]), (0, [8.0, np.inf])):
        feed.write_back(Priorities(index, index, np.array(priorities, np.float32), shard))
    sent = [[message.highest for message in edge.queue] for edge in feed._priorities]
    assert sent == [[pytest.approx(4 * DECAY), 8.0], [4.0]]
    assert feed.full() == ()
    feed._priorities[1].capacity = 1
    assert feed.full() == (feed._priorities[1],)
    assert (feed.has_room(0), feed.has_room(1)) == (True, False)


def test_a_restored_feed_goes_on_as_the_first_one_would():
    first, _ = feed_of([3.0, 2.0, 1.7])
    for _ in range(7):
        first.receive()
    second, _ = feed_of([3.0, 2.0, 1.7])
    second.load_state_dict(first.state_dict())
    assert [second.receive().shard for _ in range(40)] == [first.receive().shard for _ in range(40)]


# ---------------------------------------------------------------------- several ranks


def rank_of(draws: list[int], newest: Any, ended: bool = False, parts: int = 2) -> Feed:
    stream = Edge([batch(0, draw=draw, parts=parts) for draw in draws])
    stream.closed = ended
    feed = Feed((stream,), company=Company(2, newest))
    feed.realign()
    return feed


def test_ranks_that_begin_anew_leave_out_what_one_of_them_has_behind_it():
    asked: list[int] = []
    feed = rank_of([4, 5, 6], lambda draw: asked.append(draw) or max(draw, 5))
    assert [feed.receive().draw for _ in range(2)] == [5, 6]
    assert asked == [4], "they ask each other once"


def test_a_rank_whose_stream_has_ended_says_so_and_the_others_leave_the_rest_out():
    ended = rank_of([], lambda draw: draw, ended=True)
    assert ended.receive() is None
    (asked,) = (ended._since[0],)
    feed = rank_of([7], lambda draw: max(draw, asked), ended=True)
    assert feed.receive() is None
    assert feed.exhausted()


def test_draws_that_were_cut_for_another_number_of_ranks_are_left_out_unasked():
    def refuse(draw: int) -> int:
        raise AssertionError("the others may have no such draw to ask about")

    assert rank_of([4, 5], refuse, parts=3).receive() is None


# ---------------------------------------------------------------------- with real replays


def filled(items: int, seed: int, sampler: Any) -> Replay:
    """A replay of that many items, with random priorities."""
    rng = np.random.default_rng(seed)
    replay = Replay(ReplayConfig(capacity=2000, sampler=sampler), SPEC, streams=4, n_step=1, gamma=0.9, rng=rng)
    for sequence in range(items // 4 + 1):
        replay.append(experience(sequence))
    rows = replay.sampler.items()
    assert len(rows) == items
    generation = replay.transitions(rows, np.ones(items, np.float32)).generation
    replay.update_priorities(Priorities(rows, generation, rng.exponential(1.0 + seed, items).astype(np.float32)))
    return replay


class Drawing(Edge):
    """A batch stream that is drawn when it is taken from."""

    def __init__(self, replays: list[Replay], shard: int, size: int, beta: float) -> None:
        super().__init__()
        self.replays, self.shard, self.size, self.beta = replays, shard, size, beta

    def receive(self) -> Any:
        replay, told = self.replays[self.shard], tuple(replay.standing for replay in self.replays)
        least, drawn = replay.sampler.least, replay.sample(self.size, self.beta)
        return dataclasses.replace(drawn, shard=self.shard, least=least, beta=self.beta, standings=told)


def drawing_feed(replays: list[Replay], size: int, beta: float) -> Feed:
    return Feed(tuple(Drawing(replays, shard, size, beta) for shard in range(len(replays))), shards=len(replays))


@pytest.mark.parametrize("sampler", [UniformConfig(), PrioritisedConfig(alpha=ALPHA, epsilon=EPSILON)])
def test_items_of_unlike_shards_are_drawn_in_proportion_to_their_priorities(sampler):
    replays = [filled(300, 0, sampler), filled(60, 1, sampler)]
    batches, size = 2000, 16
    feed, counts = drawing_feed(replays, size, 0.5), [np.zeros(2000), np.zeros(2000)]
    for _ in range(batches):
        message = feed.receive()
        np.add.at(counts[message.shard], message.index, 1)
    rows = [replay.sampler.items() for replay in replays]
    values = [np.ones(len(r)) for r in rows]
    if sampler.kind == "prioritised":
        values = [replay.sampler.tree.get(r) for replay, r in zip(replays, rows, strict=True)]
    share = np.concatenate(values) / np.concatenate(values).sum()
    found = np.concatenate([count[r] for count, r in zip(counts, rows, strict=True)])
    assert found.sum() == batches * size

    def statistic(observed: Any) -> Any:
        return ((observed - batches * size * share) ** 2 / (batches * size * share)).sum(axis=-1)

    chance = statistic(np.random.default_rng(0).multinomial(batches * size, share, size=400))
    assert statistic(found) < np.quantile(chance, 0.999)


def test_weights_are_those_of_one_shard_with_the_same_content():
    sampler = PrioritisedConfig(alpha=ALPHA, epsilon=EPSILON)
    replays = [filled(200, 3, sampler), filled(80, 4, sampler)]
    values = [replay.sampler.tree.leaves for replay in replays]
    everything = np.concatenate([value[value > 0] for value in values])
    beta = 0.7
    feed, seen = drawing_feed(replays, 32, beta), set()
    for _ in range(12):
        message = feed.receive()
        share = values[message.shard][message.index] / everything.sum()
        largest = (len(everything) * everything.min() / everything.sum()) ** -beta
        expected = (len(everything) * share) ** -beta / largest
        np.testing.assert_allclose(message.weight, expected, rtol=1e-5)
        seen.add(message.shard)
    assert seen == {0, 1}


def test_a_weight_never_exceeds_one_whatever_others_tell():
    told = (Standing(1.0, 0.5), Standing(1.0, 0.2))
    feed, _ = feed_of([1.0, 1.0], [Edge([batch(0, least=0.1, beta=1.0, standings=told)]), Edge()])
    assert np.array_equal(feed.receive().weight, batch(0).weight)


def test_new_items_get_the_maximum_of_all_shards():
    replay = filled(40, 0, PrioritisedConfig(alpha=ALPHA))
    rows = replay.sampler.items()[:1]
    generation = replay.transitions(rows, np.ones(1, np.float32)).generation
    replay.update_priorities(Priorities(rows, generation, np.ones(1, np.float32), 0, 1234.0))
    assert replay.metrics()["replay_priority_max"] == 1234.0
    before = set(replay.sampler.items())
    replay.append(experience(100))
    added = [row for row in replay.sampler.items() if row not in before]
    assert replay.sampler.tree.get(np.array(added)) == pytest.approx((1234.0 + EPSILON) ** ALPHA)


# ---------------------------------------------------------------------- nobody waits for ever


class Run:
    """Actors, real shards and a feed that are stepped one by one, in any order."""

    def __init__(
        self, messages: list[int], period: float, starts: int, room: int, prioritised: bool, ranks: int = 1
    ) -> None:
        self.left, self.sent, shards = list(messages), [0] * len(messages), len(messages)
        self.inserts, self.samples = LocalCells(), LocalCells()
        self.handles = [
            ShardHandles(
                experience=(Edge(capacity=room),),
                priorities=tuple(Edge() for _ in range(ranks)) if prioritised else (),
                batches=tuple(Edge(capacity=room) for _ in range(ranks)),
                env_steps=Edge(),
                inserts=LocalCounter(self.inserts, shard),
                samples=LocalCounter(self.samples, shard),
                standing=LocalLatest(lambda message: message),
            )
            for shard in range(shards)
        ]
        told = [handles.standing for handles in self.handles]
        self.handles = [
            dataclasses.replace(
                handles,
                others=tuple(None if one is handles.standing else LocalSubscriber(one) for one in told),
            )
            for handles in self.handles
        ]
        setup = make_shard(train_period=period, learning_starts=starts, batch_size=2)[0]._setup
        if not prioritised:
            setup = dataclasses.replace(setup, replay=ReplayConfig(capacity=1000))
        self.shards = [
            ReplayShard(dataclasses.replace(setup, index=shard), handles) for shard, handles in enumerate(self.handles)
        ]
        self.done = [False] * shards
        self.feeds = [
            Feed(
                tuple(handles.batches[rank] for handles in self.handles),
                tuple(handles.priorities[rank] for handles in self.handles if prioritised),
                shards,
            )
            for rank in range(ranks)
        ]
        self.learned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        """Which draws of which shards each rank has learned from."""

    def act(self, actor: int) -> None:
        stream = self.handles[actor].experience[0]
        if not self.left[actor]:
            stream.close()
        elif stream.ready():
            stream.send(experience(self.sent[actor]))
            self.left[actor], self.sent[actor] = self.left[actor] - 1, self.sent[actor] + 1

    def store(self, shard: int) -> None:
        self.done[shard] = self.done[shard] or self.shards[shard].step() == DONE

    def learn(self, rank: int) -> None:
        feed, learned = self.feeds[rank % len(self.feeds)], self.learned[rank % len(self.feeds)]
        message = feed.receive()
        if message is not None:
            learned.append((message.shard, message.draw))
            assert np.all(message.weight <= 1.0)
            if feed._priorities:
                found = np.arange(len(message.index), dtype=np.float32) + len(learned) % 7
                feed.write_back(Priorities(message.index, message.generation, found, message.shard))


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(st.integers(0, 25), min_size=2, max_size=4),
    period=st.sampled_from([0.5, 1.0, 4.0, 13.0]),
    starts=st.integers(1, 40),
    room=st.integers(1, 3),
    prioritised=st.booleans(),
    ranks=st.integers(1, 2),
    order=st.lists(st.tuples(st.sampled_from(["act", "store", "learn"]), st.integers(0, 3)), max_size=120),
)
def test_every_run_comes_to_its_end_and_keeps_its_rate(messages, period, starts, room, prioritised, ranks, order):
    run, shards = Run(messages, period, starts, room, prioritised, ranks), len(messages)
    rounds = [(what, who) for what in ("act", "store", "learn") for who in range(shards)]
    # first as it comes, so that any of them may be far behind; then all in turn, which must end
    for what, who in [*order, *rounds * 400]:
        getattr(run, what)(who % shards)
    assert all(run.done)
    assert all(feed.exhausted() for feed in run.feeds)
    learned = len(run.learned[0])
    assert learned == run.samples.total
    assert all(others == run.learned[0] for others in run.learned), "all ranks take the same draws in one order"
    inserted = run.inserts.total
    assert inserted == 4 * sum(messages)
    owed = max(0.0, inserted - starts) / period
    if all(count > 1 for count in messages):  # every shard has something to draw
        assert owed - 1 <= learned <= max(owed, 0.0) + 1e-9
