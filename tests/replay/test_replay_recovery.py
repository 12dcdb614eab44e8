"""A replay whose process died in the middle of anything goes on as one that never died, on every tier and sampler."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_replay import History, make_spec
from test_replay_conformance import STORAGE, VARIANTS, assert_tree_matches_leaves, build_replay, cases

import qfleet.replay
from qfleet.core import codec
from qfleet.core.types import Experience, Priorities
from qfleet.replay import MappedConfig, PrioritisedConfig, Replay, ReplayConfig
from qfleet.replay.segments import NONE
from qfleet.replay.storage import remove_files

FOLDER = str(Path(qfleet.replay.__file__).parent)


class Kept:
    """Arrays that outlive a replay, as a role's keep gives them."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        held = self.arrays.setdefault(name, np.zeros(shape, dtype))
        assert held.shape == tuple(shape)
        return held


class Death(BaseException):
    pass


def dies(work: Callable[[], object], line: int) -> bool:
    """Do work until so many lines of the replay's own code were reached; return whether it ended there."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Death
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Death:
        return True
    finally:
        sys.settrace(before)
    return False


def drawn(replay: Replay) -> Any:
    items = replay.sampler.items()
    if not len(items):
        return None
    ones = np.ones(len(items), np.float32)
    return replay.sequences(items, ones) if replay.sequence else replay.transitions(items, ones)


def content(replay: Replay) -> dict[str, Any]:
    """All that counts of a replay: rows that nobody owns do not."""
    rows = np.flatnonzero(replay.chains.filled[:, None] > np.arange(replay.chains.rows))
    frames = {name: column.read(rows) for name, column in replay.store.observations.items()}
    state = {name: part for name, part in replay.state_dict().items() if name != "store"}
    return {**state, "items": drawn(replay), "rows": rows, "frames": frames, "ages": replay.store.read("age", rows)}


def same(one: Any, other: Any) -> None:
    header, arrays = codec.pack(one)
    expected, wanted = codec.pack(other)
    assert header == expected
    for a, b in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def told(replay: Replay) -> set[bytes]:
    """What each item tells, without where it lies."""
    batch = drawn(replay)
    if batch is None:
        return set()
    parts = [*batch.observation.values(), batch.action, batch.reward]
    return {b"".join(part[i].tobytes() for part in parts) for i in range(len(batch.index))}


def priorities(replay: Replay, seed: int) -> Priorities:
    rng, items = np.random.default_rng(seed), replay.sampler.items()
    index = rng.permutation(items)[:4]
    return Priorities(index, replay.chains.generation[index // replay.chains.rows], rng.random(len(index), np.float32))


@pytest.mark.parametrize("storage", list(STORAGE))
@pytest.mark.parametrize(("sampler", "numba"), VARIANTS)
@settings(max_examples=25, deadline=None)
@given(
    case=cases,
    deaths=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 150)), min_size=1, max_size=3),
    later=st.integers(1, 4),
    first=st.booleans(),
)
def test_a_replay_that_died_anywhere_goes_on_as_if_it_had_not(
    sampler: str,
    numba: bool,
    storage: str,
    case: dict[str, Any],
    deaths: list[tuple[int, int]],
    later: int,
    first: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("QFLEET_NO_NUMBA", "0" if numba else "1")
        kept, places = Kept(), [Path(folder) / name for name in ("own", "twin")]

        def born(life: int) -> Replay:
            return build_replay(case, sampler, storage, places[0], allocate=kept.array, life=life)

        replay, twin = born(0), build_replay(case, sampler, storage, places[1])
        unlimited = build_replay({**case, "spare": 500}, sampler, "ram", places[1])
        history = History(twin.spec, case["streams"], case["seed"], case["end"])
        messages = [history.message() for _ in range(case["messages"] + later)]
        for message in messages:
            unlimited.append(message)
        true = told(unlimited)
        for number, message in enumerate(messages[:-later]):
            written = priorities(twin, number)
            for held in (replay, twin):
                held.update_priorities(written)
                held.append(message)
        ledger, written = codec.roundtrip(replay.ledger()), priorities(twin, 1000)

        def go_on(held: Replay) -> None:
            if first:
                held.update_priorities(written)
            for message in messages[-later:]:
                held.append(message)
            if not first:
                held.update_priorities(written)

        for life, (line, line_of_recovery) in enumerate(deaths, 1):
            dies(partial(go_on, replay), line)
            replay = born(life)
            if dies(partial(replay.recover, ledger), line_of_recovery):  # this, too, may be cut short
                replay = born(life)
                replay.recover(ledger)
            assert_tree_matches_leaves(replay)
            assert told(replay) <= true
        was_open = np.asarray(ledger["chains"]["next_row"]) != NONE
        moved = (replay.chains.next_row[was_open] == NONE).any()
        go_on(replay)
        go_on(twin)
        assert_tree_matches_leaves(replay)
        assert told(replay) <= true
        # Where an open segment was the oldest of all, its stream goes on in another one than the twin's; and priorities
        # of what the twin evicts later are dropped.
        if not moved and replay.counts == twin.counts:
            same(content(replay), content(twin))


@pytest.mark.parametrize("sampler", ["uniform", "prioritised"])
@settings(max_examples=60, deadline=None)
@given(case=cases, line=st.integers(100, 900), later=st.integers(1, 6))
def test_what_comes_in_another_order_the_second_time_is_true_too(
    sampler: str, case: dict[str, Any], line: int, later: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QFLEET_NO_NUMBA", "1")
        kept, case = Kept(), {**case, "spare": case["spare"] + case["streams"]}
        replay = build_replay(case, sampler, "ram", Path(), allocate=kept.array)
        unlimited = build_replay({**case, "spare": 800}, sampler, "ram", Path())
        histories = [History(replay.spec, case["streams"], case["seed"] + actor, case["end"]) for actor in (0, 1)]
        sent = [(histories[0].message(), other(histories[1].message())) for _ in range(case["messages"] + later)]
        for one, two in sent:
            unlimited.append(one)
            unlimited.append(two)
        true = told(unlimited)
        for pair in sent[:-later]:
            for message in pair:
                replay.append(message)
        ledger, work = codec.roundtrip(replay.ledger()), sent[-later:]
        dies(lambda: [replay.append(message) for pair in work for message in pair], line)
        replay = build_replay(case, sampler, "ram", Path(), allocate=kept.array, life=1)
        replay.recover(ledger)
        for message in [two for _, two in work] + [one for one, _ in work]:
            replay.append(message)
            assert told(replay) <= true
        assert_tree_matches_leaves(replay)


def other(message: Experience) -> Experience:
    """The same of another actor's streams."""
    return dataclasses.replace(message, source="actor-1", stream=message.stream - 1, cut=message.cut - 1)


def test_mapped_rows_are_found_by_a_later_life_and_removed_in_the_end(tmp_path: Path) -> None:
    config, kept = ReplayConfig(capacity=100, storage=MappedConfig()), Kept()

    def born(life: int) -> Replay:
        rng = np.random.default_rng(0)
        return Replay(
            config, make_spec(), streams=3, n_step=1, gamma=0.9, rng=rng, directory=tmp_path / "replay",
            allocate=kept.array, life=life,
        )  # fmt: skip

    first = born(0)
    for message in messages_without_extras(5):
        first.append(message)
    second = born(1)
    second.recover(codec.roundtrip(first.ledger()))
    assert len(second) > 5
    same(content(first), content(second))
    remove_files(tmp_path / "replay")
    assert not list(tmp_path.iterdir())


def messages_without_extras(count: int) -> list[Any]:
    history = History(make_spec(), 3, 0)
    return [dataclasses.replace(history.message(), extras={}) for _ in range(count)]


def test_a_replay_that_died_before_its_first_commit_begins_empty() -> None:
    kept, rng = Kept(), np.random.default_rng(0)

    def born(life: int) -> Replay:
        return Replay(
            ReplayConfig(capacity=100), make_spec(), streams=3, n_step=1, gamma=0.9, rng=rng,
            allocate=kept.array, life=life,
        )  # fmt: skip

    first = born(0)
    for message in messages_without_extras(5):
        first.append(message)
    assert len(first) > 5
    second = born(1)
    second.recover(second.ledger())
    assert len(second) == 0


def test_late_priorities_of_what_a_death_evicted_are_dropped() -> None:
    kept, rng = Kept(), np.random.default_rng(0)

    def born(life: int) -> Replay:
        config = ReplayConfig(capacity=40, segment=5, sampler=PrioritisedConfig())
        return Replay(
            config, make_spec(), streams=3, n_step=1, gamma=0.9, rng=rng, allocate=kept.array, life=life
        )  # fmt: skip

    first, messages = born(0), messages_without_extras(40)
    for message in messages[:20]:
        first.append(message)
    ledger = codec.roundtrip(first.ledger())
    items = first.sampler.items()
    late = Priorities(items, first.chains.generation[items // 5], np.ones(len(items), np.float32))
    for message in messages[20:]:
        first.append(message)
    second = born(1)
    second.recover(ledger)
    left = second.sampler.items()
    assert len(left) < len(items)
    second.update_priorities(late)
    assert second.sampler.items().tolist() == left.tolist()
    assert_tree_matches_leaves(second)
