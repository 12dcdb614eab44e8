"""Real runs whose inference moves between actors and servers: to the faster side, through deaths and checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_kills
from history import check
from killer import Killer
from numbered_env import journals
from program_cases import short, stop_at
from sleepy_network import SleepyActor, SleepyServer
from test_balance import Watch

import qfleet.api as api
from qfleet.control import steering
from qfleet.control.balancer import Balancer, Decision
from qfleet.control.monitor import Callbacks
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment
from qfleet.observe.sinks import read_jsonl
from qfleet.runtime import checkpoint

pytestmark = pytest.mark.xdist_group("ray")  # beside Ray's processes two cores have no room for these


def adaptive(begins: str, **changes: Any) -> Experiment:
    """Two actors that play and do not learn."""
    settings = {
        "placement": "processes",
        "actors": 2,
        "actor.envs": 4,
        "inference.kind": "adaptive",
        "inference.begins": begins,
        "learner.learning_starts": 10**6,
        "replay.capacity": 10**6,
        "checkpoint.every": 10**7,
    }
    return short(env_steps=10**7, **{**settings, **changes})


@pytest.mark.parametrize(
    ("begins", "network"), [("served", SleepyServer), pytest.param("local", SleepyActor, marks=pytest.mark.slow)]
)
def test_inference_moves_to_the_faster_side_and_a_resumed_run_begins_there(begins, network, tmp_path):
    watch = Watch(until="kept", seconds=40)
    api.train(
        adaptive(begins, **{"network.kind": "custom"}),
        run_dir=tmp_path / "run",
        network=network,
        sinks=[watch],
        callbacks=Callbacks(on_step=watch.on_step),
    )
    move, kept = (event for event in watch.found if event["role"] == "inference")
    assert (move["decision"], kept["decision"]) == ("move", "kept")
    assert ("of the time for servers" in move["text"]) == (begins == "served")
    assert move["wall_s"] < 15
    assert kept["after"] > 1.5 * kept["before"]
    (last,) = checkpoint.complete(tmp_path / "run" / "checkpoints")
    assert checkpoint.verify(last)["standing"]["deadlines_ms"] == ([] if begins == "served" else [2.0])

    api.resume(tmp_path / "run", network=network, callbacks=Callbacks(on_step=Watch(seconds=3).on_step))
    record = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert record["actor.0.rate"] > 0
    assert record["inference.0.idle"] == "no requests" or begins == "local"
    assert (record["inference.0.busy"] < 0.01) == (begins == "served"), "a server that nobody asks costs nothing"


class Flipping(Balancer):
    """Moves inference back and forth each time the run has come some steps further."""

    every = 100
    flips = flipped_at = 0

    def observe(self, now: float, env_steps: int, reports: Any) -> list[Decision]:
        if env_steps >= Flipping.flipped_at + self.every:
            Flipping.flips, Flipping.flipped_at = Flipping.flips + 1, env_steps
            self.orders = type(self.orders)(self.orders.envs, () if self.orders.served else (1.0,))
        return []


@pytest.fixture
def flipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flipping, "flips", 0)
    monkeypatch.setattr(Flipping, "flipped_at", 0)
    monkeypatch.setattr(steering, "Balancer", Flipping)


class KillsAtChanges(Killer):
    """Kills the server, an actor or both at the moment of some changes."""

    def __init__(self, kills: int, seed: int) -> None:
        super().__init__(kills, seed, pause=2)
        self._seen = 0

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        if not self.left or Flipping.flips < self._seen + 2:
            return
        self._seen = Flipping.flips
        pids = self.placement.pids()
        for name in ("inference-0", "actor-0", "actor-1")[: 1 + int(self._rng.integers(3))]:
            if self.left and name in pids and pids[name] not in self._killed:
                os.kill(pids[name], signal.SIGKILL)
                self._killed.add(pids[name])
                self.left -= 1


def numbered(folder: Path, env_steps: int, **changes: Any) -> Experiment:
    settings = {"inference.kind": "adaptive", "inference.resend_s": 0.3}
    return test_kills.experiment(folder, env_steps, **{**settings, **changes})


@pytest.mark.usefixtures("flipping")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_lost_when_server_and_actors_are_killed_at_the_change(seed, tmp_path, monkeypatch):
    killer = KillsAtChanges(kills=5, seed=seed)
    found, deaths = test_kills.survive(numbered(tmp_path, 16_000), tmp_path, monkeypatch, killer)
    assert (killer.left, test_kills.lives(deaths)) == (0, 5)
    assert Flipping.flips > 6
    assert found.sent > 15_000
    assert found.stored == found.sent


@pytest.mark.usefixtures("flipping")
@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
def test_nothing_is_lost_by_a_checkpoint_among_changes(groups, tmp_path):
    run = numbered(tmp_path, 10_000, **{"actor.groups": groups, "checkpoint.every": 1000})
    api.train(run, run_dir=tmp_path / "run", callbacks=stop_at(4900))
    done = api.resume(tmp_path / "run")
    assert done.summary["env_steps"] >= 10_000
    found = check([test_kills.stored(run, tmp_path / "run", 0)], journals(tmp_path / "journal"), evicting=False)
    assert found.stored == found.sent > 9000
    assert Flipping.flips > 4


@pytest.mark.usefixtures("flipping")
@pytest.mark.slow
def test_an_agent_with_memory_learns_while_it_is_moved(tmp_path):
    run = short("r2d2", env_steps=6000, placement="processes", actors=2, **{"inference.kind": "adaptive"})
    done = api.train(run, run_dir=tmp_path / "run")
    assert 6000 <= done.summary["env_steps"] < 6300
    assert done.summary["updates"] > 100
    assert np.isfinite(done.summary["eval"]["mean"])
    assert Flipping.flips > 3


@pytest.mark.parametrize("changes", [{"placement": "inline"}, {"balance": "off"}])
def test_without_a_balancer_it_is_refused(changes, tmp_path):
    with pytest.raises(ConfigError, match="needs a balancer to move it"):
        api.train(adaptive("local", **changes), run_dir=tmp_path / "run")


def test_in_lock_step_it_is_refused():
    with pytest.raises(ConfigError, match=r"lockstep needs inference\.kind 'local'"):
        adaptive("local", lockstep=True)
