"""The checker of histories finds what it is there to find."""

from __future__ import annotations

import dataclasses

import history
import numpy as np
import pytest
from history import check
from numbered_env import Place, Step, length, reward, shown, terminates

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Experience, Version
from qfleet.replay import Replay, ReplayConfig

SEEDS = (70_000, 70_001, 70_004)
SPEC = EnvSpec(name="numbered", observations={PLAIN: LeafSpec(shape=(5,), dtype="uint8")}, actions=3)


def played() -> tuple[list[Experience], list[list[Step]]]:
    """Whole episodes of one environment, one row a message, and its journal."""
    messages, journal = [], []
    for seed in SEEDS:
        for step in range(length(seed) + 1):
            place, final = Place(seed, step), step == length(seed)
            last = step == length(seed) - 1
            if not final:
                journal.append(Step(0, place, step % 3))
            messages.append(row(len(messages), place, final, last))
    journal.append(Step(0, Place(80_000, 0), 0))  # taken, and perhaps not sent
    return messages, [journal]


def row(sequence: int, place: Place, final: bool, last: bool) -> Experience:
    action = 0 if final else place.step % 3
    return Experience(
        source="actor-0", sequence=sequence, version=Version(), offsets=np.array([0, 1]), stream=np.zeros(1, np.int64),
        observation={PLAIN: shown(place)[None]},
        action=np.array([action]), reward=np.array([0.0 if final else reward(place, action)], np.float32),
        terminated=np.array([last and terminates(place.seed)]), final=np.array([final]),
        truncated=np.array([last and not terminates(place.seed)]),
    )  # fmt: skip


def stored(messages: list[Experience], capacity: int = 400) -> Replay:
    config, rng = ReplayConfig(capacity=capacity, segment=4), np.random.default_rng(0)
    replay = Replay(config, SPEC, streams=1, n_step=2, gamma=0.9, rng=rng)
    for message in messages:
        replay.append(message)
    return replay


def test_a_true_history_passes() -> None:
    messages, lives = played()
    found = check([stored(messages)], lives, evicting=False)
    assert found.sent == found.stored == sum(length(seed) for seed in SEEDS)
    assert found.broken == 0
    assert check([stored(messages, capacity=12)], lives, evicting=True).stored < found.sent


def test_a_lost_step_is_found() -> None:
    messages, lives = played()
    at = length(SEEDS[0]) // 2
    broken = [*messages[:at], dataclasses.replace(messages[at + 1], cut=np.zeros(1, np.int64)), *messages[at + 2 :]]
    for evicting in (False, True):
        with pytest.raises(AssertionError, match="lost"):
            check([stored(broken)], lives, evicting)


def test_a_step_stored_twice_is_found() -> None:
    messages, lives = played()
    again = dataclasses.replace(messages[1], sequence=10**6, stream=np.ones(1, np.int64))
    with pytest.raises(AssertionError, match="twice"):
        check([stored([*messages, again])], lives, evicting=False)


def test_a_successor_across_a_gap_is_found() -> None:
    messages, lives = played()
    gap = [*messages[:1], *messages[2:]]  # nobody said that the stream was cut
    with pytest.raises(AssertionError, match="is followed by"):
        check([stored(gap)], [[step for step in lives[0] if step.place != Place(SEEDS[0], 1)]], evicting=False)


def test_a_step_that_never_happened_is_found() -> None:
    messages, lives = played()
    with pytest.raises(AssertionError, match="never happened"):
        check([stored(messages)], [lives[0][length(SEEDS[0]) :]], evicting=False)


def test_an_episode_that_broke_off_is_counted_and_one_that_did_not_must_be_drawn_from_whole() -> None:
    messages, lives = played()
    found = check([stored(messages[:-2])], [lives[0][:-1]], evicting=False)  # without its last step and its end
    assert (found.broken, found.items) == (1, found.stored - 2)
    cut = [*messages[:2], dataclasses.replace(messages[2], cut=np.zeros(1, np.int64)), *messages[3:]]
    with pytest.raises(AssertionError, match="not to be drawn"):
        check([stored(cut)], lives, evicting=False)


def test_what_is_drawn_although_its_end_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, lives = played()
    replay = stored(messages)
    known = history.all_rows(replay)
    last = Place(SEEDS[1], length(SEEDS[1]))
    monkeypatch.setattr(history, "all_rows", lambda replay: [place for place in known if place != last])
    with pytest.raises(AssertionError, match="to be drawn, although"):
        check([replay], lives, evicting=False)


def test_with_a_lost_machine_goes_the_end_of_a_life_and_nothing_before_it() -> None:
    messages, lives = played()
    cut = messages[: length(SEEDS[0]) + 3]  # two steps of the second episode, and not the rest
    with pytest.raises(AssertionError, match="lost"):
        check([stored(cut)], lives, evicting=False)
    found = check([stored(cut)], lives, evicting=False, machine_lost=True)
    assert found.sent == found.stored == length(SEEDS[0]) + 2
    gap = [*messages[:1], dataclasses.replace(messages[2], cut=np.zeros(1, np.int64)), *messages[3:]]
    with pytest.raises(AssertionError, match="lost"):
        check([stored(gap)], lives, evicting=False, machine_lost=True)
