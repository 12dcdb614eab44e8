"""Roles that are begun anew: what a second life finds, and what it does not do again."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from role_cases import Edge, Keep, random_batch
from test_actor import make_actor
from test_evaluator import evaluated, make_evaluator, weights
from test_learner import make_learner
from test_replay_shard import experience, make_shard

from qfleet.core.errors import ConfigError, EnvironmentFault, RoleFailure
from qfleet.core.role import DONE, WORKED, Idle
from qfleet.core.types import Version
from qfleet.envs import GymConfig
from qfleet.roles.actor import Actor
from qfleet.roles.evaluator import Evaluator
from qfleet.roles.learner import Learner
from qfleet.roles.replay_shard import ReplayShard


def with_keep(role: Any, handles: Any, keep: Keep) -> Any:
    return type(role)(role._setup, dataclasses.replace(handles, keep=keep))


def next_life(role: Any) -> Any:
    role._handles.keep.life += 1
    return type(role)(role._setup, role._handles)


def shard_with_experience() -> ReplayShard:
    shard, handles = make_shard(train_period=1e6)
    kept: ReplayShard = with_keep(shard, handles, Keep())
    for sequence in range(6):
        handles.experience[0].send(experience(sequence))
        kept.step()
    return kept


def test_a_shard_goes_on_with_what_it_committed() -> None:
    first = shard_with_experience()
    edges = first._handles
    second = next_life(first)
    assert len(second._replay) == len(first._replay) > 0
    assert edges.inserts.total() == 24
    edges.experience[0].send(experience(5))  # committed, but not acknowledged: it comes again
    edges.experience[0].send(experience(6))
    for _ in range(4):
        second.step()
    assert edges.inserts.total() == 28
    assert second.metrics()["replay_duplicates"] == 1


def test_what_a_shard_did_not_commit_is_neither_counted_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = shard_with_experience()
    edges = first._handles

    def die(state: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(edges.keep, "commit", die)
    edges.experience[0].send(experience(6))
    with pytest.raises(KeyboardInterrupt):
        first.step()
    monkeypatch.undo()
    assert edges.inserts.total() == 28
    second = next_life(first)
    assert edges.inserts.total() == 24
    edges.experience[0].send(experience(6))
    second.step()
    assert edges.inserts.total() == 28
    assert second.metrics()["replay_duplicates"] == 0


def test_a_second_life_draws_other_batches() -> None:
    first = shard_with_experience()
    second = next_life(first)
    assert first._replay.rng.random() != second._replay.rng.random()


def test_an_actor_begins_new_episodes_and_cuts_the_old_ones() -> None:
    actor, handles = make_actor()
    first: Actor = with_keep(actor, handles, Keep())
    first.step()
    before = handles.experience.receive()
    handles.experience.capacity = 0
    second: Actor = next_life(first)
    handles.experience.capacity = 2
    second.step()
    after = handles.experience.receive()
    assert before.cut.tolist() == []
    assert after.cut.tolist() == [0, 1, 2, 3]
    assert after.sequence > before.sequence + 2**39
    seen = [next(iter(message.observation.values()))[:4] for message in (before, after)]
    assert not np.array_equal(*seen)
    second.step()
    assert handles.experience.receive().cut.tolist() == []
    third: Actor = next_life(second)
    third.step()
    assert handles.experience.receive().sequence > after.sequence + 2**39


def test_steps_that_died_with_an_actor_are_told() -> None:
    actor, handles = make_actor()
    first: Actor = with_keep(actor, handles, Keep())
    first.step()
    first._act()
    first._tick()
    second: Actor = next_life(first)
    assert handles.env_steps.total() == 12
    assert second.metrics()["lost_steps"] == 4


def learner_after(updates: int, committed_at: int) -> tuple[Learner, dict[str, Edge]]:
    learner, edges = make_learner()
    kept: Learner = with_keep(learner, learner._handles, Keep())
    rng = np.random.default_rng(0)
    for number in range(updates):
        if number == committed_at:
            kept.state_dict()
        edges["batches"].send(random_batch(rng))
        assert kept.step() == WORKED
    return kept, edges


def test_what_an_actor_cannot_make_any_more_is_its_environments_fault_and_what_it_never_could_no_fault_at_all() -> None:
    actor, handles = make_actor()
    first: Actor = with_keep(actor, handles, Keep())
    wrong = dataclasses.replace(first._setup, env=GymConfig(id="NoSuch-v0"))
    with pytest.raises(ConfigError, match="no environment 'NoSuch-v0'"):
        Actor(wrong, first._handles)
    first._handles.keep.life = 1
    with pytest.raises(RoleFailure, match=r"no environment 'NoSuch-v0'.*; that was the second try"):
        Actor(wrong, first._handles)
    first._handles.keep.life = 0
    Actor(first._setup, first._handles).step()
    first._handles.keep.life = 1
    with pytest.raises(EnvironmentFault, match="no environment 'NoSuch-v0'"):
        Actor(wrong, first._handles)


def test_a_learner_begins_with_its_last_commit_under_a_new_epoch() -> None:
    first, edges = learner_after(updates=7, committed_at=4)
    edges["events"].queue.clear()
    counter = first._handles.updates
    assert counter.total() == 7
    second = next_life(first)
    assert "restarted from update 4: 3 updates lost" in edges["events"].queue[-1].text
    assert counter.total() == 4
    assert second.step() == WORKED  # publishes
    assert edges["weights"].queue[-1].version == Version(1, 4)
    assert second.metrics()["updates"] == 4
    third = next_life(second)
    assert third.step() == WORKED
    assert edges["weights"].queue[-1].version == Version(2, 4)
    assert Version(2, 4) > Version(1, 4) > Version(0, 7)


def test_a_learner_without_a_commit_begins_from_the_start() -> None:
    first, edges = learner_after(updates=3, committed_at=-1)
    first._handles.keep.state = None  # type: ignore[union-attr]
    second = next_life(first)
    assert "restarted from update 0: 3 updates lost" in edges["events"].queue[-1].text
    assert second.step() == WORKED
    assert edges["weights"].queue[-1].version == Version(1, 0)


def test_a_learner_that_was_done_says_so_again() -> None:
    first, edges = learner_after(updates=2, committed_at=1)
    edges["batches"].close()
    while first.step() != DONE:
        pass
    sent = len(edges["models"].queue)
    second = next_life(first)
    while second.step() != DONE:
        pass
    assert len(edges["models"].queue) == sent == 1
    assert second.metrics()["updates"] == 2, "its last state is kept"


def test_a_model_under_evaluation_is_evaluated_by_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet.roles import evaluator as module

    monkeypatch.setattr(module, "_TICKS", 3)
    plain, handles = make_evaluator()
    first: Evaluator = with_keep(plain, handles, Keep())
    handles.models.send(weights(3))
    first.step()
    assert not handles.events.queue
    second: Evaluator = next_life(first)
    result = evaluated(second, handles)
    assert result.version == weights(3).version
    assert result.best
    third: Evaluator = next_life(second)
    assert third.step() != WORKED
    assert third.state_dict()["best"] == result.returns.mean()


@pytest.mark.parametrize("told", [False, True], ids=["before its score is told", "after that"])
def test_what_a_former_life_took_and_could_not_acknowledge_is_evaluated_once(told: bool) -> None:
    """A final test that died in its first step was played twice."""
    plain, handles = make_evaluator()
    first: Evaluator = with_keep(plain, handles, Keep())
    model = weights(1)
    handles.models.send(model)
    first.step()
    if told:
        evaluated(first, handles)
    second: Evaluator = next_life(first)
    handles.models.send(model)  # again: it was never acknowledged
    if not told:
        evaluated(second, handles)
    assert isinstance(second.step(), Idle)
    assert not handles.events.queue
    handles.models.send(model)  # which the learner may do: nothing has been learned since
    evaluated(second, handles)
