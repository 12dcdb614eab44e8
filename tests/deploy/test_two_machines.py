"""The page on several machines, done: its commands in two namespaces that share nothing but the disk."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from machines import Machine, two_machines, why_not

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from pages import DOCS, blocks

HEAD, SECOND = "10.0.0.1", "10.0.0.2"
STATUS, JOIN_S = f"ray status --address {HEAD}:6379", 60.0
"""What shows the nodes, and how long the second one may take to be among them."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # else Ray gives up when other tests keep the machine busy
    "RAY_agent_register_timeout_ms": "120000",
}
SHORT = "--env-steps 240 --evaluation.test_episodes 1 --evaluation.episodes 1 --evaluation.max_episode_steps 40"
SMALL = "--actor.envs 2 --replay.capacity 2000 --learner.learning_starts 100 --learner.batch_size 4 --quiet"


def page() -> tuple[str, str, str]:
    """Return what the page says to type: on the first machine, on the second, and for the run.

    To `ray start` ports are added: a node that has to find them by itself gives up after 15 s of a busy machine.
    """
    first, second, run, *_ = [block.text for block in blocks(DOCS / "cluster.md")]
    named = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
    ports = " ".join(f"--{name}-port={port}" for port, name in enumerate(named, 20_001))
    started = [re.sub(r"^(ray start .*)$", rf"\1 {ports}", text, flags=re.M) for text in (first, second)]
    return f"set -e\n{started[0]}\necho token $RAY_AUTH_TOKEN", f"set -e\n{started[1]}", run


def started(machine: Machine, commands: str) -> str:
    """Type what starts Ray, again when Ray gave up because the machine is busy; returns what it said."""
    for _ in range(8):
        done = machine.run(commands, QUIET)
        if done.returncode == 0:
            return done.stdout
        assert "timed out during startup" in done.stdout, done.stdout
        machine.run("ray stop --force", QUIET)
    raise AssertionError(done.stdout)


class Watch(Thread):
    """Notes which roles run on a machine, until it is stopped."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(daemon=True)
        self._machine, self._going, self.seen = machine, True, set[str]()

    def run(self) -> None:
        while self._going:
            self.seen |= {name for name in self._machine.processes() if re.fullmatch(r"[a-z]+-\d+", name)}
            time.sleep(0.2)

    def stop(self) -> set[str]:
        self._going = False
        self.join()
        return self.seen


def learn_across(first: Machine, second: Machine, known: dict[str, str], folder: Path) -> None:
    """Train with one rank more than the first machine has cores for: it is on the second one, and learns there."""
    ranks = max(0, len(os.sched_getaffinity(0)) - 3) + 2  # of the first machine's cores three roles take one each
    command = (
        f"qfleet train gym:CartPole-v1 --placement ray --address {HEAD}:6379 --actors 1 --learners {ranks}"
        " --parallel.across-nodes True --network.input.normalize False --env-steps 1000 --learner.learning_starts 200"
        f" --evaluation.test_episodes 1 --evaluation.episodes 1 --quiet --run-dir {folder}"
    )
    there = Watch(second)
    there.start()
    done = first.run(command, known, seconds=600)
    seen = there.stop()
    assert done.returncode == 0, done.stdout
    assert f"learner-{ranks - 1}" in seen
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["updates"] > 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (told,) = [event["text"] for event in events if event.get("kind") == "network"]
    assert f"meet at store://{HEAD}:" in told
    assert not [event for event in events if event["event"] == "restart"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_commands_of_the_page_on_two_machines(tmp_path: Path) -> None:
    on_first, on_second, train = page()
    with two_machines((HEAD, SECOND)) as (first, second):
        token = re.findall(r"^token (\w{64})$", started(first, on_first), re.M)[0]
        refused = second.run(on_second.replace("TOKEN=...", f"TOKEN={'0' * 64}"), QUIET)
        assert refused.returncode != 0
        assert "oken" in refused.stdout, refused.stdout
        started(second, on_second.replace("TOKEN=...", f"TOKEN={token}"))
        known = QUIET | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        until = time.monotonic() + JOIN_S
        while len(re.findall(r"^ 1 node_", shown := first.run(STATUS, known).stdout, re.M)) != 2:
            assert time.monotonic() < until, shown
        command = train.strip().replace("--actors 16", "--actors 2").replace("/shared/runs/pong", str(tmp_path / "run"))
        stranger = first.run(
            f"{command} {SHORT} {SMALL}", QUIET | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}
        )
        assert stranger.returncode == 2, stranger.stdout
        assert "token" in stranger.stdout
        here, there = Watch(first), Watch(second)
        here.start()
        there.start()
        done = first.run(f"{command} {SHORT} {SMALL}", known, seconds=600)
        roles: dict[str, Any] = {"here": here.stop(), "there": there.stop()}
        assert done.returncode == 0, done.stdout
        assert roles == {"here": {"replay-0", "learner-0", "evaluator-0", "test-0"}, "there": {"actor-0", "actor-1"}}
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] >= 240
        learn_across(first, second, known, tmp_path / "group")
        for machine in (second, first):
            assert machine.run("ray stop", known).returncode == 0
            assert not {"raylet", "gcs_server"} & set(machine.processes())
