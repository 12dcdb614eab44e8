"""An environment's crash, hang or exit costs its own episode: nobody else's, and nothing is invented in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
from fragile_env import FRAGILE_ID, LENGTH, Fragile, fragile_workers, plan, register_fragile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.spec import PLAIN
from qfleet.envs import GymConfig, make_env
from qfleet.envs import crew as crew_module
from qfleet.envs.gym import layout_of
from qfleet.envs.reward import AS_IT_IS
from qfleet.envs.vector import Tick
from qfleet.envs.worker import Maker
from qfleet.envs.workers import WorkersEnv

SUDDEN = ("exception", "exit", "hard exit", "kill", "segfault")


@pytest.fixture
def impatient(monkeypatch):
    """Lost environments come back at once."""
    monkeypatch.setattr(crew_module, "BACK_OFF_S", (0.0, 0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Three environments that all examples of a property share: making them costs more than an example."""
    folder = tmp_path_factory.mktemp("fragile")
    with closing(fragile_workers(folder, 3)) as env:
        yield env, folder


class Streams:
    """Follows the ticks of E environments and checks each against what was seen before."""

    def __init__(self, observation: np.ndarray) -> None:
        self.seen = observation.copy()
        self.open = observation[:, 0] > 0  # zeros are shown for one that is away
        self.tags = [[int(row[0])] if row[0] else [] for row in observation]
        self.rows: list[list[tuple]] = [[] for _ in observation]
        self.cuts = [0] * len(observation)

    def follow(self, envs: np.ndarray, action: np.ndarray, tick: Tick) -> None:
        finals = dict(zip(tick.finished.tolist(), tick.final_observation[PLAIN].tolist(), strict=True))
        for row, env in enumerate(envs.tolist()):
            before, after = self.seen[env].tolist(), tick.observation[PLAIN][row].tolist()
            broken = row in tick.cut
            self.cuts[env] += broken
            if tick.valid[row]:
                assert self.open[env]
                assert not broken
                reached = finals.get(row, after)
                assert reached == [before[0], before[1] + 1]
                assert tick.reward[row] == action[row]
                self.rows[env].append((*before, int(action[row])))
            elif broken:
                assert self.open[env]
            begins = row in finals or (not tick.valid[row] and after[0] > 0)
            if begins:
                assert after[1] == 0
                assert after[0] not in self.tags[env]
                self.tags[env].append(after[0])
            self.open[env] = bool(tick.valid[row]) or begins
            self.seen[env] = after


def play(env: WorkersEnv, actions: np.ndarray, seeds: list[int]) -> Streams:
    """Take joint steps, each environment with a script of its own that only its valid ticks use up."""
    streams = Streams(env.reset(seeds)[0][PLAIN])
    everyone = np.arange(env.num_envs)
    for _ in range(len(actions)):
        action = np.array([actions[len(streams.rows[index]), index] for index in everyone])
        streams.follow(everyone, action, env.step(action))
    return streams


def play_in_parts(env: WorkersEnv, actions: np.ndarray, seeds: list[int], at_least: int) -> Streams:
    """Do the same, acting for whoever is ready."""
    streams = Streams(env.reset(seeds)[0][PLAIN])
    waiting = np.arange(env.num_envs)
    sent = np.zeros(env.num_envs, np.int64)
    for _ in range(2 * len(actions)):
        sent[waiting] = [actions[len(streams.rows[index]) % len(actions), index] for index in waiting]
        env.send(sent[waiting], waiting)
        waiting, tick = env.receive(at_least)
        streams.follow(waiting, sent[waiting], tick)
    return streams


failures = st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 25)), st.sampled_from(SUDDEN), max_size=4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(planned=failures, seed=st.integers(0, 2**30), at_least=st.integers(0, 3))
def test_whoever_fails_whenever_others_go_on_and_no_transition_crosses_the_cut(
    planned, seed, at_least, shared, impatient
):
    env, folder = shared
    actions = np.random.default_rng(seed).integers(0, 3, (40, 3))
    seeds = [seed, seed + 1, seed + 2]
    plan(folder, {})
    healthy = play(env, actions, seeds)
    assert healthy.cuts == [0, 0, 0]
    assert all(len(rows) == 40 for rows in healthy.rows)
    plan(folder, planned)
    streams = play_in_parts(env, actions, seeds, at_least) if at_least else play(env, actions, seeds)
    spared = [index for index in range(3) if not any(index == failing for failing, _ in planned)]
    assert 2 in spared
    for index in range(3):
        shared_rows = min(len(healthy.rows[index]), len(streams.rows[index]))
        if index in spared:
            assert streams.cuts[index] == 0
            assert streams.rows[index][:shared_rows] == healthy.rows[index][:shared_rows]
        else:
            calls = int((folder / f"calls-{index}").read_text())
            reached = sum(failing == index and call < calls for failing, call in planned)
            assert streams.cuts[index] in (reached, reached - 1)  # the last one may not be told yet


@pytest.mark.parametrize("kind", ["exception", "exit", "kill", "segfault", "hang", "deaf hang"])
def test_each_way_to_fail_is_named_and_survived(kind, tmp_path):
    says = {
        "exception": "step() raised ZeroDivisionError: the robot fell over (fragile_env.py, line 29, in raise_error)",
        "exit": "its process exited (3)",
        "kill": "its process was killed by SIGKILL",
        "segfault": "its process was killed by SIGSEGV",
        "hang": "it has not answered for 1 s (env.step_timeout)",
        "deaf hang": "it has not answered for 1 s (env.step_timeout)",
    }
    plan(tmp_path, {(1, 9): kind})
    with closing(fragile_workers(tmp_path, 2, step_timeout=1.0)) as env:
        streams = Streams(env.reset([1, 2])[0][PLAIN])
        told: list[str] = []
        until = time.monotonic() + 15
        while (len(streams.rows[1]) < 15 or not told) and time.monotonic() < until:
            tick = env.step(np.array([1, 2]))
            streams.follow(np.arange(2), np.array([1, 2]), tick)
            told += env.incidents()
        assert streams.cuts == [0, 1]
        assert len(streams.rows[1]) >= 15
        assert told == [
            f"fragile, environment 1: {says[kind]} (episode 1, step 2, both counted from 0); "
            "its episode is cut, it begins anew"
        ]


def test_a_failing_reset_after_an_end_cuts_what_was_not_told(tmp_path, impatient):
    with closing(fragile_workers(tmp_path, 2)) as env:
        streams = Streams(env.reset([1, 2])[0][PLAIN])
        plan(tmp_path, {(0, "reset"): "exception"})
        for number in range(LENGTH + 3):
            streams.follow(np.arange(2), np.zeros(2, np.int64), env.step(np.zeros(2, np.int64)))
            if number == LENGTH:
                plan(tmp_path, {})
        assert streams.cuts == [1, 0]
        assert len(streams.rows[1]) == LENGTH + 3


def test_an_environment_that_always_fails_is_given_up_once_and_the_run_goes_on(tmp_path, impatient):
    plan(tmp_path, {(0, "reset"): "exit"})
    with closing(fragile_workers(tmp_path, 2)) as env:
        env.reset([1, 2])
        told: list[str] = []
        until = time.monotonic() + 15
        while not (told and "goes on without it" in told[-1]) and time.monotonic() < until:
            env.step(np.zeros(2, np.int64))
            told += env.incidents()
        assert len(told) == 5
        assert "the loss number 5 in a row" in told[-1]
        assert "until it is resumed. What to do: mend what fails there; a higher env.step_timeout helps" in told[-1]
        assert sum("goes on without it" in text for text in told) == 1
        for _ in range(20):
            tick = env.step(np.zeros(2, np.int64))
            assert tick.valid.tolist() == [False, True]
            assert len(tick.cut) == 0
        assert env.incidents() == []
        plan(tmp_path, {})
        first, _ = env.reset([1, 2])  # a new beginning gives it a new chance
        until = time.monotonic() + 15
        while not tick.valid.all() and time.monotonic() < until:
            tick = env.step(np.zeros(2, np.int64))
        assert tick.valid.all()
        assert first[PLAIN].shape == (2, 2)


def test_when_all_are_given_up_that_is_one_error_with_the_last_cause(tmp_path, impatient):
    plan(tmp_path, {(0, "reset"): "exception", (1, "reset"): "exception"})
    with (
        closing(fragile_workers(tmp_path, 2)) as env,
        pytest.raises(EnvironmentFault, match=r"fragile: no environment is left.*robot fell over.*env\.step_timeout"),
    ):
        env.reset([1, 2])


class Busy(Fragile):
    """Computes for so many seconds of processor time in each step, and fails as planned."""

    def step(self, action):
        until = time.process_time() + 0.25
        while time.process_time() < until:
            pass
        return super().step(action)


def busy_workers(folder: Path) -> WorkersEnv:
    makers = [Maker(partial(Busy, index, folder)) for index in range(2)]
    return WorkersEnv(makers, layout_of(Busy(-1, folder), "busy"), AS_IT_IS)


def test_the_processor_time_of_environments_is_known_and_stays_when_one_dies(tmp_path, impatient):
    plan(tmp_path, {(0, 2): "exit"})
    with closing(busy_workers(tmp_path)) as env:
        env.reset([1, 2])
        known, cut = [env.helpers_cpu_s()], 0
        while cut == 0 or len(known) < 6:
            cut += len(env.step(np.zeros(2, np.int64)).cut)
            known.append(env.helpers_cpu_s())
    assert known == sorted(known), "what a dead one took is not forgotten"
    assert known[2] - known[0] > 0.9
    assert known[-1] > 0.25 * len(known)


def test_the_processor_time_of_gymnasiums_own_processes_is_known_too(tmp_path):
    plan(tmp_path, {})
    config = GymConfig(id="busy", vectorisation="async", autoreset="next_step")
    with closing(make_env(config, 2, factory=partial(Busy, 0, tmp_path))) as env:
        env.reset([1, 2])
        before = env.helpers_cpu_s()
        env.step(np.zeros(2, np.int64))
        assert env.helpers_cpu_s() - before > 0.4


def test_back_off_grows_and_success_forgives(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_module, "BACK_OFF_S", (0.0, 0.3, 0.6))
    plan(tmp_path, {(0, 0): "exit", (0, 1): "exit", (0, 2): "exit", (0, 3 + LENGTH): "exit"})
    with closing(fragile_workers(tmp_path, 1)) as env:
        env.reset([5])
        away: list[float] = []
        while len(away) < 4:
            tick = env.step(np.zeros(1, np.int64))
            if len(tick.cut):
                began = time.monotonic()
                while not tick.valid[0] and (tick.observation[PLAIN] == 0).all():
                    tick = env.step(np.zeros(1, np.int64))
                away.append(time.monotonic() - began)
    assert away[1] >= 0.25
    assert away[2] >= 0.5
    assert away[3] < 0.5  # an episode had ended in between


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def gone(pids: set[int], seconds: float = 8.0) -> bool:
    """Whether these processes are gone, or only their names are left."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(lives(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def sleepers() -> set[int]:
    return {p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "60"]}


def test_close_leaves_no_process_behind_not_even_a_hung_one_or_what_one_had_started(tmp_path):
    before, older = descendants(), sleepers()
    plan(tmp_path, {(0, 1): "child", (1, 3): "deaf hang"})
    env = fragile_workers(tmp_path, 3)
    env.reset([1, 2, 3])
    everyone = np.arange(3)
    for _ in range(3):
        env.step(np.zeros(3, np.int64))
    env.send(np.zeros(3, np.int64), everyone)
    env.receive(1)
    started = descendants() - before
    assert len(started) >= 3
    env.close()
    assert gone(started)
    assert sleepers() <= older


def test_the_death_of_what_starts_the_processes_is_survived(tmp_path):
    before = descendants()
    with closing(fragile_workers(tmp_path, 2)) as env:
        streams = Streams(env.reset([1, 2])[0][PLAIN])
        (nursery,) = {child.pid for child in psutil.Process().children()} - before
        for number in range(5000):
            if number == 10:
                psutil.Process(nursery).kill()
            streams.follow(np.arange(2), np.ones(2, np.int64), env.step(np.ones(2, np.int64)))
            if all(len(rows) > 20 for rows in streams.rows):
                break
        assert streams.cuts == [1, 1]
        assert all(len(rows) > 20 for rows in streams.rows)


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fragile_env import fragile_workers
import numpy as np, psutil
env = fragile_workers(Path(sys.argv[2]), 2)
env.reset([1, 2])
env.send(np.zeros(2, np.int64), np.arange(2))
time.sleep(0.3)
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
time.sleep(60)
"""


def test_trap_19_environments_end_with_an_actor_that_is_killed(tmp_path):
    plan(tmp_path, {(1, 0): "deaf hang"})
    here = str(Path(__file__).parent)
    actor = subprocess.Popen([sys.executable, "-c", SCRIPT, here, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert actor.stdout is not None
    with actor.stdout:
        pids = {int(word) for word in actor.stdout.readline().split()}
    assert len(pids) == 3
    actor.kill()
    actor.wait()
    assert gone(pids)


class OnlyHere(Fragile):
    """Cannot be made in another process."""

    def __init__(self, folder: Path, home: int) -> None:
        if os.getpid() != home:
            raise OSError("no licence for a second process")
        super().__init__(0, folder)


def test_an_environment_that_cannot_be_made_in_a_child_is_one_error_before_training(tmp_path):
    plan(tmp_path, {})
    config = GymConfig(id="mine", vectorisation="async")
    before = descendants()
    with pytest.raises(ConfigError, match=r"mine.*cannot be made.*OSError: no licence for a second process"):
        make_env(config, 2, factory=partial(OnlyHere, tmp_path, os.getpid()))
    assert gone(descendants() - before)


def test_a_constructor_that_hangs_is_one_error_that_says_how_long_was_waited_for_it(tmp_path, monkeypatch):
    """It named the limit of a step, although constructors may take longer."""
    plan(tmp_path, {})
    monkeypatch.setattr(crew_module, "_START_S", 1.0)
    home = os.getpid()

    def factory() -> gymnasium.Env:
        if os.getpid() != home:
            time.sleep(60)
        return Fragile(0, tmp_path)

    config = GymConfig(id="mine", vectorisation="async", step_timeout=0.2)
    with pytest.raises(ConfigError, match=r"cannot be made.*has not answered for 1 s \(env.step_timeout\)"):
        make_env(config, 1, factory=factory)


def test_a_constructor_that_crashes_in_a_child_is_one_error(tmp_path):
    plan(tmp_path, {})
    home = os.getpid()

    def factory() -> gymnasium.Env:
        if os.getpid() != home:
            os.abort()
        return Fragile(0, tmp_path)

    with pytest.raises(ConfigError, match=r"mine, environment \d, cannot be made.*killed by SIGABRT"):
        make_env(GymConfig(id="mine", vectorisation="async"), 1, factory=factory)


def test_a_factory_that_cannot_be_pickled_is_one_error_with_a_way_out(tmp_path):
    plan(tmp_path, {})
    lock = threading.Lock()

    def factory() -> gymnasium.Env:
        with lock:
            return Fragile(0, tmp_path)

    with pytest.raises(ConfigError, match=r"mine cannot be sent to another process.*lock.*env.vectorisation"):
        make_env(GymConfig(id="mine", vectorisation="async"), 2, factory=factory)


def test_what_was_registered_here_is_known_there(monkeypatch, tmp_path):
    register_fragile(monkeypatch, tmp_path)
    with closing(make_env(GymConfig(id=FRAGILE_ID, vectorisation="async"), 2)) as env:
        env.reset([1, 2])
        assert env.step(np.zeros(2, np.int64)).valid.all()


def test_a_cut_environment_is_cut_by_a_resume_too_and_others_are_not(tmp_path):
    plan(tmp_path, {(0, 5): "exit"})
    with closing(fragile_workers(tmp_path, 2)) as env, closing(fragile_workers(tmp_path, 2)) as resumed:
        env.reset([1, 2])
        tick = env.step(np.zeros(2, np.int64))
        while not len(tick.cut):
            tick = env.step(np.zeros(2, np.int64))
        away = bool((tick.observation[PLAIN][0] == 0).all())
        before = env.current()[0][PLAIN][1].tolist()
        resumed.load_state_dict(env.state_dict())
        assert resumed.cut.tolist() == ([0] if away else [])
        assert resumed.current()[0][PLAIN][1].tolist() == before
        assert resumed.current()[0][PLAIN][0, 1] == 0


@pytest.mark.parametrize("judging", [True, False])
def test_where_seeds_are_judged_a_lost_episode_begins_anew_from_its_own(judging, impatient, tmp_path):
    with closing(fragile_workers(tmp_path, 2, judging=judging)) as env:
        plan(tmp_path, {(0, 2): "exception", (1, 3): "kill"})
        first, _ = env.reset([5, 6])
        begun = {0: [], 1: []}
        for _ in range(200):
            tick = env.step(np.zeros(2, np.int64))
            for index in (0, 1):
                if tick.observation[PLAIN][index, 1] == 0 and tick.observation[PLAIN][index, 0]:
                    begun[index].append(int(tick.observation[PLAIN][index, 0]))
            if begun[0] and begun[1]:
                break
        same = [begun[index][0] == int(first[PLAIN][index, 0]) for index in (0, 1)]
    assert same == [judging, judging]


def test_whoever_was_given_up_is_known_until_the_next_reset(impatient, tmp_path):
    with closing(fragile_workers(tmp_path, 2)) as env:
        plan(tmp_path, {(0, call): "exception" for call in range(1, 40)})
        env.reset([5, 6])
        assert env.given_up() == []
        for _ in range(400):
            env.step(np.zeros(2, np.int64))
            if env.given_up():
                break
        assert env.given_up() == [0]
        assert any("the run goes on without it" in text for text in env.incidents())
