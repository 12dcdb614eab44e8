"""Acting for some environments while others step: the same streams, in whatever parts they come, and exact resume."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from env_cases import Counting, Sleepy
from env_streams import transitions
from fragile_env import fragile_workers, plan
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.core.codec import roundtrip
from qfleet.core.spec import PLAIN
from qfleet.envs import AtariConfig, GymConfig, make_env
from qfleet.envs.stepping import Grouped, ReadyFirst, Stepping, Whole, make_stepping

LOOP = GymConfig(id="counting", frame_stack=2)
PROCESSES = LOOP.replace(vectorisation="async")


class Player:
    """Acts in a stepping by each environment's own script, and keeps each one's transitions."""

    def __init__(self, env: Stepping, script: np.ndarray) -> None:
        self.env, self.script = env, script
        self.taken = np.zeros(env.num_envs, np.int64)
        self.sent = np.zeros(env.num_envs, np.int64)
        self.streams: list[list] = [[] for _ in range(env.num_envs)]
        self.waiting: list[np.ndarray] = env.parts

    def begin(self, seeds: list[int]) -> None:
        self.seen, self.mask = self.env.reset(seeds)

    def part(self) -> np.ndarray:
        for envs in self.waiting:
            self.sent[envs] = self.script[self.taken[envs], envs]
            self.env.send(self.sent[envs], envs)
        envs, tick = self.env.receive()
        finals = dict(zip(tick.finished.tolist(), range(len(tick.finished)), strict=True))
        for row, env in enumerate(envs.tolist()):
            ended = row in finals
            after = tick.final_observation[PLAIN][finals[row]] if ended else tick.observation[PLAIN][row]
            allowed = None if tick.mask is None else (tick.final_mask if ended else tick.mask)
            self.streams[env].append((
                {PLAIN: self.seen[PLAIN][env].tobytes()},
                None if self.mask is None else self.mask[env].tolist(),
                int(self.sent[env]),
                float(tick.reward[row]),
                bool(tick.terminated[row]),
                bool(tick.truncated[row]),
                {PLAIN: after.tobytes()},
                None if allowed is None else allowed[finals.get(row, row)].tolist(),
            ))  # fmt: skip
        self.seen[PLAIN][envs] = tick.observation[PLAIN]
        if self.mask is not None:
            self.mask[envs] = tick.mask
        self.taken[envs] += 1
        self.waiting = [envs]
        return envs


def as_played(config: GymConfig, factory, seeds: list[int], script: np.ndarray) -> list[list]:
    with closing(make_env(config.replace(vectorisation="sync"), len(seeds), factory=factory)) as env:
        return transitions(env, seeds, script)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("config", "groups", "kind"),
    [(LOOP, 1, Whole), (LOOP, 2, Grouped), (LOOP, 3, Grouped), (PROCESSES, 1, Whole), (PROCESSES, 2, ReadyFirst)],
)
def test_every_way_to_step_gives_each_environment_the_same_stream(config, groups, kind, masked):
    factory = partial(Counting, masked=masked)
    seeds, script = [3, 1, 4, 1, 5], np.random.default_rng(0).integers(0, 3, (300, 5))
    with closing(make_stepping(config, 5, groups, factory)) as env:
        assert type(env) is kind
        player = Player(env, script)
        player.begin(seeds)
        while min(len(stream) for stream in player.streams) < 30:
            player.part()
    for mine, theirs in zip(player.streams, as_played(config, factory, seeds, script), strict=True):
        assert mine == theirs[: len(mine)]


def test_atari_games_play_the_same_in_groups():
    pytest.importorskip("ale_py")
    config, streams = AtariConfig(game="pong", max_frames=80, threads=1), []
    for groups in (1, 2):
        with closing(make_stepping(config, 3, groups)) as env:
            player = Player(env, np.random.default_rng(0).integers(0, 6, (40, 3)))
            player.begin([1, 2, 3])
            for _ in range(30 * groups):
                player.part()
            streams.append(player.streams)
    assert streams[0] == streams[1]
    assert any(row[5] for row in streams[0][0])


def test_groups_come_in_the_order_in_which_they_were_sent():
    with closing(make_stepping(LOOP, 5, 2, Counting)) as env:
        player = Player(env, np.zeros((20, 5), np.int64))
        player.begin([1, 2, 3, 4, 5])
        assert [player.part().tolist() for _ in range(4)] == [[0, 1, 2], [3, 4]] * 2


class Gated(Counting):
    """Steps when it is let."""

    gate = threading.Event()

    def step(self, action):
        assert self.gate.wait(30)
        return super().step(action)


def test_a_wait_ends_when_others_have_news_or_the_first_group_has_stepped():
    ours, theirs = socket.socketpair()
    news = SimpleNamespace(waitable=lambda: news, fileno=ours.fileno, silence=lambda: ours.recv(1))
    deaf = SimpleNamespace(waitable=lambda: None)
    Gated.gate.clear()
    with closing(make_stepping(LOOP, 2, 2, Gated)) as env:
        env.reset([1, 2])
        for envs in env.parts:
            env.send(np.zeros(1, np.int64), envs)
        theirs.send(b"!")
        env.wait([deaf, news])
        assert not env.ready()
        Gated.gate.set()
        while not env.ready():
            env.wait([deaf, news])
        assert env.receive().envs.tolist() == [0]
        env.receive()
        for _ in range(2000):  # rings that nobody waits for
            env.send(np.zeros(1, np.int64), env.parts[0])
            env.receive()


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(0, 60), groups=st.integers(1, 4), seed=st.integers(0, 2**30))
def test_groups_that_are_cut_while_under_way_resume_to_the_byte(cut, groups, seed):
    script = np.random.default_rng(seed).integers(0, 3, (200, 4))
    with closing(make_stepping(LOOP, 4, groups, Counting)) as env:
        whole = Player(env, script)
        whole.begin([seed, seed + 1, seed + 2, seed + 3])
        for _ in range(cut):
            whole.part()
        with closing(make_stepping(LOOP, 4, groups, Counting)) as again:
            resumed = Player(again, script)
            resumed.waiting = again.load_state_dict(roundtrip(env.state_dict()))
            assert sorted(np.concatenate(resumed.waiting).tolist()) == sorted(np.concatenate(whole.waiting).tolist())
            resumed.seen = {name: leaf.copy() for name, leaf in whole.seen.items()}
            resumed.mask, resumed.sent, resumed.taken = whole.mask, whole.sent.copy(), whole.taken.copy()
            before = [len(stream) for stream in whole.streams]
            for _ in range(20):
                assert whole.part().tolist() == resumed.part().tolist()
            assert [stream[n:] for stream, n in zip(whole.streams, before, strict=True)] == resumed.streams


def test_processes_that_are_cut_while_under_way_go_on_with_their_streams():
    factory, seeds = Counting, [1, 2, 3]
    script = np.random.default_rng(0).integers(0, 3, (200, 3))
    with (
        closing(make_stepping(PROCESSES, 3, 3, factory)) as env,
        closing(make_stepping(PROCESSES, 3, 3, factory)) as again,
    ):
        first = Player(env, script)
        first.begin(seeds)
        for _ in range(40):
            first.part()
        second = Player(again, script)
        second.waiting = again.load_state_dict(roundtrip(env.state_dict()))
        assert again.cut.tolist() == []
        second.seen, second.mask, second.sent, second.taken = first.seen, first.mask, first.sent, first.taken
        second.streams = first.streams
        for _ in range(60):
            second.part()
    for mine, theirs in zip(second.streams, as_played(LOOP, factory, seeds, script), strict=True):
        assert mine == theirs[: len(mine)]
        assert len(mine) > 20


def test_a_slow_environment_holds_up_nobody_and_joins_when_it_is_ready():
    with closing(make_stepping(PROCESSES, 4, 4, Sleepy)) as env:
        player = Player(env, np.zeros((100_000, 4), np.int64))
        player.begin([1, 7, 2, 3])
        began = time.monotonic()
        while not player.streams[1] and time.monotonic() - began < 20:
            player.part()
        steps = [len(stream) for stream in player.streams]
    assert steps[1] == 1
    assert min(steps[0], steps[2], steps[3]) > 20


def test_a_lost_environment_comes_once_with_its_cut_and_again_when_it_is_back(tmp_path):
    plan(tmp_path, {(1, 3): "kill"})
    env = ReadyFirst(fragile_workers(tmp_path, 3), groups=3)
    with closing(env):
        env.reset([1, 2, 3])
        waiting, news = [np.arange(3)], []
        for _ in range(400):
            for envs in waiting:
                env.send(np.zeros(len(envs), np.int64), envs)
            envs, tick = env.receive()
            waiting = [envs]
            for row in np.flatnonzero(~tick.valid).tolist():
                news.append((int(envs[row]), row in tick.cut, int(tick.observation[PLAIN][row, 0]) > 0))
        assert [env for env, _, _ in news] == [1] * len(news)
        assert news in ([(1, True, False), (1, False, True)], [(1, True, True)])
        assert len(env.incidents()) == 1
