"""Decides whether a run lost, doubled or invented anything: its replay against what its environments wrote down."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numbered_env import Place, Step, length, place_of, reward, terminates

from qfleet.core.spec import PLAIN
from qfleet.replay import Replay


@dataclass(frozen=True)
class Found:
    """What a check of a whole history came to."""

    sent: int
    """Steps that an actor had certainly sent."""
    stored: int
    """Of those, how many are in the replay; the others were evicted."""
    items: int
    """Transitions that can be sampled."""
    broken: int
    """Episodes of which the end is missing: they broke off, and their last rows are no starts."""


def check(
    shards: list[Replay], lives: list[list[Step]], evicting: bool, unsent: int = 1, machine_lost: bool = False
) -> Found:
    """Raise AssertionError unless a run's shards and journals agree; `evicting` says whether the oldest may be missing.

    An actor sends the step of every environment before it takes the next one: what an environment did before its last
    step was sent, so it must be there, once, in order. Its last step may or may not have been sent; one that acts for
    its environments in groups, or sends seldom, may have more such steps of each. With a lost machine goes what it had
    sent and nobody had acknowledged: the last steps of a life may be missing then, and nothing before them.
    """
    everything = {place for replay in shards for place in all_rows(replay)}
    stored = [place for replay in shards for place in rows(replay)]
    doubled = [place for place, count in Counter(stored).items() if count > 1]
    assert not doubled, f"stored twice: {doubled[:5]}"
    known, there, sent = {step.place for life in lives for step in life}, set(stored), 0
    kept = 0
    for life in lives:
        for env in {step.env for step in life}:
            places = [step.place for step in life if step.env == env][:-unsent]
            present = [place in there for place in places]
            while machine_lost and present and not present[-1]:
                present.pop()
            places = places[: len(present)]
            sent, kept = sent + len(places), kept + sum(present)
            assert evicting or all(present), f"lost: {[p for p, i in zip(places, present, strict=True) if not i][:5]}"
            assert present == sorted(present), f"lost between others: environment {env} of one life"
    invented = there - known
    assert not invented, f"never happened: {sorted(invented)[:5]}"
    actions = {step.place: step.action for life in lives for step in life}
    for replay in shards:
        check_items(replay, actions)
    broken = {place.seed for place in there} - {place.seed for place in everything - there}
    return Found(sent, kept, sum(len(replay) for replay in shards), len(broken))


def rows(replay: Replay) -> list[Place]:
    """Return the place of every stored row that is not final."""
    return [place for place in all_rows(replay) if place.step < length(place.seed)]


def all_rows(replay: Replay) -> list[Place]:
    """Return the place of every stored row."""
    filled = replay.chains.filled[:, None] > np.arange(replay.chains.rows)
    column = replay.store.observations[PLAIN]
    return [place_of(observation) for observation in column.read(np.flatnonzero(filled))]


def whole(replay: Replay) -> set[Place]:
    """Return where transitions can start: where all that follows is stored, as it is not where an episode broke off."""
    there, n_step = set(all_rows(replay)), len(replay.powers) - 1
    return {place for place in there if place.step < length(place.seed) and there.issuperset(window(place, n_step))}


def window(first: Place, n_step: int) -> list[Place]:
    """Return the places that a transition from `first` passes, up to its bootstrap."""
    last = min(first.step + n_step, length(first.seed))
    return [Place(first.seed, step) for step in range(first.step, last + 1)]


def check_items(replay: Replay, actions: dict[Place, int]) -> None:
    """Raise AssertionError unless every item follows the environment's rules from its first row to its bootstrap.

    All that can be items must be, and nothing else: of an episode that broke off the last rows are not.
    """
    items = replay.sampler.items()
    batch = replay.transitions(items, np.ones(len(items), np.float32))
    n_step, gamma = len(replay.powers) - 1, float(replay.powers[1])
    starts = {place_of(observation) for observation in batch.observation[PLAIN]}
    assert len(starts) == len(items)
    may_start = whole(replay)
    missing, wrong = may_start - starts, starts - may_start
    assert not missing, f"not to be drawn: {sorted(missing)[:5]}"
    for i in range(len(items)):
        first, after = place_of(batch.observation[PLAIN][i]), place_of(batch.next_observation[PLAIN][i])
        steps = min(n_step, length(first.seed) - first.step)
        assert after == Place(first.seed, first.step + steps), f"{first} is followed by {after}"
        over = after.step == length(first.seed) and terminates(first.seed)
        assert np.isclose(batch.discount[i], 0.0 if over else gamma**steps)
        assert batch.action[i] == actions[first]
        *passed, _ = window(first, n_step)
        expected = sum(gamma**k * reward(place, actions[place]) for k, place in enumerate(passed))
        assert np.isclose(batch.reward[i], expected, rtol=1e-5), f"{first}: {batch.reward[i]}, not {expected}"
    assert not wrong, f"to be drawn, although what follows is not there: {sorted(wrong)[:5]}"
