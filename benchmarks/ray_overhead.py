"""What Ray costs on one machine: the same runs in placements `processes` and `ray`, in turns.

    python benchmarks/ray_overhead.py [--rounds 3] [--env-steps 100000] [--actors 1 2] [--sleeping 1 4 16 64]

First the speed of a DQN on CartPole-v1 with small updates, so that edges and hosts count. Each round runs both
placements, and the ratio is that of the round; the table has the median and the range. CPU time is that of all
processes of a run, Ray's own included, between the half and nine tenths of its steps: other load on the machine changes
it little. Ray is started once; the seconds until a run's roles are built are told apart from training.

Then what an actor more costs, with environments that sleep for 20 ms in every step, so that cores do not bind: CPU time
of a thousand steps in the actor itself, and of a second in all processes that are no roles (the supervisor, and Ray's
own), by the number of actors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from sleeping_env import STEP_S

import qfleet.api as api
from qfleet.control.monitor import Callbacks
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.runtime.ray_cluster import start_local, stop_local

PLACEMENTS = ("processes", "ray")
SETTLING_S, WATCHED_S = 3.0, 8.0
"""How long sleeping actors run before they are watched, and then."""


def experiment(placement: str, actors: int, env_steps: int, **changes: Any) -> Experiment:
    settings = {
        "env.kind": "gym",
        "env.id": "CartPole-v1",
        "env.reward_scale": 0.005,
        "placement": placement,
        "actors": actors,
        "env_steps": env_steps,
        "learner.learning_starts": 500,
        "learner.batch_size": 32,
        "learner.train_period": 8.0,
        "evaluation": {"every": 10**9, "episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
        "checkpoint.every": 10**9,
        "balance": "off",
    }
    return with_changes(preset("cartpole"), {**settings, **changes})


@dataclass(frozen=True)
class Look:
    """How far a run was at a moment, and the CPU seconds of each process until then, by number and name."""

    at: float
    env_steps: int
    used: dict[tuple[int, str], float]


def look(env_steps: int) -> Look:
    """Look at this process and all that it has started; takes tens of milliseconds, so that a run bears few of them."""
    used = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process.pid, process.name()] = times.user + times.system
    return Look(time.monotonic(), env_steps, used)


@dataclass(frozen=True)
class Cost:
    """What one run took between two looks."""

    first: Look
    last: Look
    steps_per_s: float
    """In the whole run."""
    around_s: float
    """Seconds before and after training."""

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    @property
    def env_steps(self) -> int:
        return self.last.env_steps - self.first.env_steps

    def cpu_s(self, belongs: Callable[[str], bool] = lambda name: True) -> float:
        """Return the CPU seconds of processes with such names."""
        before = self.first.used
        return sum(used - before[who] for who, used in self.last.used.items() if who in before and belongs(who[1]))


def is_role(name: str) -> bool:
    return name.startswith(("actor-", "replay-", "learner-", "evaluator-"))


def train(run: Experiment, wanted: Callable[[int, float], bool], last: Callable[[Look, int], bool]) -> Cost:
    """Train once; look when the first of these says so, of steps and seconds, and when the second does, and end."""
    looks: list[Look] = []
    began = time.monotonic()
    started: list[float] = []

    def on_step(metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        started.append(time.monotonic())
        steps = metrics["env_steps"]
        if not looks and wanted(steps, started[-1] - started[0]):
            looks.append(look(steps))
        elif len(looks) == 1 and last(looks[0], steps):
            looks.append(look(steps))
            stop()

    with tempfile.TemporaryDirectory() as folder:
        callbacks = Callbacks(on_step=on_step)
        summary = api.train(run, seed=100, run_dir=Path(folder) / "run", callbacks=callbacks).summary
    around_s = time.monotonic() - began - summary["wall_s"]
    return Cost(looks[0], looks[1], summary["env_steps_per_s"], around_s)


def busy(placement: str, actors: int, env_steps: int) -> Cost:
    """Train on CartPole, as fast as it goes."""
    run = experiment(placement, actors, env_steps)
    return train(run, lambda steps, _: steps > 0.5 * env_steps, lambda _, steps: steps > 0.9 * env_steps)


def sleeping(placement: str, actors: int) -> Cost:
    """Train for some seconds with environments that sleep."""
    changes = {"env.id": "sleeping_env:Sleeping-v0", "actor.envs": 1, "learner.train_period": 64.0}
    run = experiment(placement, actors, 10**9, **changes)
    return train(run, lambda _, seconds: seconds > SETTLING_S, lambda first, _: time.monotonic() - first.at > WATCHED_S)


def compare_speed(actors: int, rounds: int, env_steps: int) -> str:
    """Return a line of the first table."""
    pairs = [[busy(placement, actors, env_steps) for placement in PLACEMENTS] for _ in range(rounds)]
    ratios = [ray.steps_per_s / processes.steps_per_s for processes, ray in pairs]
    speeds = [f"{statistics.median(pair[side].steps_per_s for pair in pairs):,.0f}" for side in (0, 1)]
    costs = [statistics.median(1e6 * pair[side].cpu_s() / pair[side].env_steps for pair in pairs) for side in (0, 1)]
    spread = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    started = statistics.median(ray.around_s for _, ray in pairs)
    return f"| {actors} | {' | '.join(speeds)} | {spread} | {costs[0]:.0f} and {costs[1]:.0f} | {started:.1f} |"


def compare_actors(actors: int) -> str:
    """Return a line of the second table."""
    pair = [sleeping(placement, actors) for placement in PLACEMENTS]
    rates = [STEP_S * cost.env_steps / cost.seconds / actors for cost in pair]
    own = [1e6 * cost.cpu_s(lambda name: name.startswith("actor-")) / cost.env_steps for cost in pair]
    others = [1e3 * cost.cpu_s(lambda name: not is_role(name)) / cost.seconds for cost in pair]
    more = (others[1] - others[0]) / actors
    columns = [
        f"{one:{form}} and {other:{form}}" for (one, other), form in ((rates, ".2f"), (own, ".0f"), (others, ".0f"))
    ]
    return f"| {actors} | {' | '.join(columns)} | {more:.1f} | {pair[0].around_s:.0f} and {pair[1].around_s:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-steps", type=int, default=100_000)
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--sleeping", type=int, nargs="*", default=[1, 4, 16, 64], help="numbers of sleeping actors")
    wanted = parser.parse_args()
    start_local()
    if wanted.actors:
        print(
            "| actors | processes, steps/s | ray, steps/s | ratio, median [range] | CPU ms of 1,000 steps | start, s |"
        )
        print("|---|---|---|---|---|---|")
    for actors in wanted.actors:
        print(compare_speed(actors, wanted.rounds, wanted.env_steps), flush=True)
    if wanted.sleeping:
        print("\nprocesses and ray:\n")
        print(
            "| sleeping actors | share of the speed that sleep allows | CPU ms of 1,000 steps in the actor itself |",
            end="",
        )
        print(" CPU ms a second beside the roles | of that more on ray, for each actor | start and end, s |")
        print("|---|---|---|---|---|---|")
    for actors in wanted.sleeping:
        print(compare_actors(actors), flush=True)
    stop_local()


if __name__ == "__main__":
    main()
