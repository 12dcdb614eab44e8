"""An actor that acts for its environments in parts: streams stay whole, cuts are named, a checkpoint loses nothing."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from role_cases import Edge

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.codec import roundtrip
from qfleet.core.spec import PLAIN
from qfleet.core.types import Experience
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, crew, env_spec
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup

sys.path.append(str(Path(__file__).parents[1] / "envs"))
from fragile_env import FRAGILE_ID, plan, register_fragile

LOOP = GymConfig(id="CartPole-v1")


def make_actor(env: GymConfig, groups: int, envs: int = 4, unroll: int = 3, agent=None) -> tuple[Actor, ActorHandles]:
    setup = ActorSetup(
        actor=ActorConfig(envs=envs, unroll=unroll, groups=groups),
        env=env,
        spec=env_spec(env),
        network=MlpConfig(hidden=(8,)),
        agent=agent or ReplayAgent(),
        exploration=EpsilonGreedyConfig(start=1.0, end=1.0),
        seed=0,
        index=0,
        actors=1,
        env_steps=100_000,
        code=UserCode(),
    )
    handles = ActorHandles(experience=Edge(), weights=Edge(), env_steps=Edge(), events=Edge())
    return Actor(setup, handles), handles


def messages(actor: Actor, handles: ActorHandles, count: int) -> list[Experience]:
    got: list[Experience] = []
    while len(got) < count:
        actor.step()
        while (message := handles.experience.receive()) is not None:
            got.append(message)
    return got


def rows_of(sent: list[Experience], stream: int) -> list[tuple]:
    """Return a stream's rows as (observation, action, reward, final), with None where it was cut."""
    rows: list = []
    for message in sent:
        if stream in message.cut:
            rows.append(None)
        for at in np.flatnonzero(message.stream == stream).tolist():
            seen = tuple(message.observation[PLAIN][at].tolist())
            rows.append((seen, int(message.action[at]), float(message.reward[at]), bool(message.final[at])))
    return rows


def test_groups_are_recorded_in_turn_and_an_actor_restored_in_between_goes_on_to_the_byte():
    actor, handles = make_actor(LOOP, groups=2)
    with closing(actor):
        first = messages(actor, handles, 5)
        assert [len(message.stream) for message in first[:1]] == [3 * 4]
        again, again_handles = make_actor(LOOP, groups=2)
        with closing(again):
            again.load_state_dict(roundtrip(actor.state_dict()))
            for mine, theirs in zip(messages(actor, handles, 20), messages(again, again_handles, 20), strict=True):
                assert mine.sequence == theirs.sequence
                assert mine.offsets.tolist() == theirs.offsets.tolist()
                for name in ("stream", "action", "reward", "terminated", "final"):
                    assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
                assert np.array_equal(mine.observation[PLAIN], theirs.observation[PLAIN])


def check_chain(rows: list) -> int:
    """Check that rows go on one by one within an episode, and that only a final row or a cut ends one; count cuts."""
    before = None
    for row in rows:
        if row is None:
            before = None
            continue
        (tag, step), _, _, final = row
        if before is not None:
            assert (tag, step) == (before[0], before[1] + 1)
        else:
            assert step == 0
        before = None if final else (tag, step)
    return sum(row is None for row in rows)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_lost_environment_is_named_before_its_next_episode_and_told_of(groups, tmp_path, monkeypatch):
    register_fragile(monkeypatch, tmp_path)
    plan(tmp_path, {(0, 5): "exit", (0, 40): "exception"})
    config = GymConfig(id=FRAGILE_ID, vectorisation="async")
    actor, handles = make_actor(config, groups=groups, envs=3)
    with closing(actor):
        sent = messages(actor, handles, 60)
        while len(handles.events.queue) < actor.metrics()["cut_episodes"]:
            sent += messages(actor, handles, 1)
    cuts = [check_chain(rows_of(sent, stream)) for stream in range(3)]
    assert sum(cuts) == actor.metrics()["cut_episodes"] >= 2
    assert handles.env_steps.count == sum(int(np.count_nonzero(~message.final)) for message in sent)
    told = "\n".join(notice.text for notice in handles.events.queue)
    assert "the robot fell over" in told
    assert "its process exited (3)" in told


@pytest.mark.parametrize("groups", [1, 2])
def test_an_environment_that_is_given_up_is_no_more_counted_as_acting(groups, tmp_path, monkeypatch):
    """It was counted for ever, and its actor taken for a straggler."""
    monkeypatch.setattr(crew, "BACK_OFF_S", (0.0, 0.0, 0.0, 0.0))
    register_fragile(monkeypatch, tmp_path)
    actor, handles = make_actor(GymConfig(id=FRAGILE_ID, vectorisation="async"), groups=groups, envs=3)
    actor._handles = replace(handles, orders=Edge())
    with closing(actor):
        messages(actor, handles, 3)
        assert actor.metrics()["acting_envs"] == 3
        assert "given_up_envs" not in actor.metrics()
        assert actor.helpers_cpu_s() > 0
        (vector,) = actor._env._vectors
        for _ in range(200):
            if actor.metrics().get("given_up_envs"):
                break
            vector._crew._nursery.end(1)
            messages(actor, handles, 1)
        assert actor.metrics()["given_up_envs"] == 1
        assert actor.metrics()["acting_envs"] == 2
        steps = handles.env_steps.count
        messages(actor, handles, 5)
        assert handles.env_steps.count > steps
        actor.load_state_dict(roundtrip(actor.state_dict()))
        assert actor.metrics()["acting_envs"] == 3, "a resumed run begins it anew"
