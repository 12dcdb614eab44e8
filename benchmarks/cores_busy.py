"""How busy all cores and the GPU are while a run samples as fast as it can, or learns as fast; prints a table.

    python benchmarks/cores_busy.py [PRESET] [--every 200] [--seconds 20] [--turns 3]
        [--ways ACTORS:GROUPS:SIDE[:THREADS] ...]

There is one update for `--every` environment steps: at 200 the learner has little to do, and sampling holds the run
up; at 1 learning does. The first row is the run as it is planned; `--ways` adds other numbers of actors, groups of
environments, who computes for the actors (local, cpu, cuda), and threads that step an actor's games, all else as
planned, each with what the planner's model says of it. The GPU's share is `nvidia-smi`'s, the median of its looks.
Whatever else the machine does counts as busy, so that this is for a quiet one; its share before the run is shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import qfleet
from qfleet.bench.full import watched_gpu
from qfleet.control.cores import Cores
from qfleet.control.plan import Plan
from qfleet.control.prediction import Arrangement, predict
from qfleet.experiment import with_changes
from qfleet.observe.sinks import read_jsonl
from qfleet.presets import preset

SHORT = {"learner.learning_starts": 2000, "replay.capacity": 200_000}
UNSAVED = {"checkpoint.every": 10**9, "checkpoint.unsaved_mb": 1e9}
UNDISTURBED = {**UNSAVED, "evaluation.every": 10**9, "evaluation.test_episodes": 1}
WARM_UP = 10_000
"""Steps before the first turn; updates have begun by then."""


class Look:
    """Watches the cores and the GPU for some turns once a run is at work, then stops it."""

    def __init__(self, seconds: float, turns: int, gpu: list[tuple[float, float]]) -> None:
        """Take what grows by a look at the GPU now and then, and the time of each."""
        self._seconds, self._turns, self._gpu = seconds, turns, gpu
        self._cores = Cores()
        self._began: tuple[float, float] | None = None
        self.shares: list[float] = []
        self.rates: list[float] = []
        self.gpu_shares: list[float] = []

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        """Begin or end a turn, if it is time."""
        now, steps = time.perf_counter(), float(metrics["env_steps"])
        if self._began is None:
            if steps > WARM_UP:
                self._cores.busy()
                self._began = now, steps
            return
        then, had = self._began
        if now - then < self._seconds:
            return
        self.shares.append(self._cores.busy() or 0.0)
        self.rates.append((steps - had) / (now - then))
        if looks := [share for at, share in self._gpu if then <= at <= now]:
            self.gpu_shares.append(statistics.median(looks))
        self._began = now, steps
        if len(self.shares) == self._turns:
            stop()


def planned_way(plan: Plan) -> str:
    """Return a plan's arrangement as it is written for `--ways`."""
    chosen = plan.settings
    kind, begins = chosen.get("inference.kind", "local"), chosen.get("inference.begins", "served")
    side = "local" if "local" in (kind, begins) else chosen["inference.device"]
    return f"{chosen['actors']}:{chosen['actor.groups']}:{side}"


def arranged(plan: Plan, way: str) -> dict[str, Any]:
    """Return a plan's settings with another arrangement, which nobody changes while it runs."""
    actors, groups, side, *threads = way.split(":")
    kept = {name: value for name, value in plan.settings.items() if not name.startswith("inference.")}
    kind = {"inference.kind": "local"} if side == "local" else {"inference.kind": "served", "inference.device": side}
    stepping = {"env.threads": int(threads[0])} if threads else {}
    return {**kept, **kind, **stepping, "actors": int(actors), "actor.groups": int(groups), "spare_actors": 0}


def predicted(name: str, period: Mapping[str, float], plan: Plan, way: str) -> float:
    """Return the environment steps a second that the planner's model expects of an arrangement."""
    actors, groups, side, *_ = way.split(":")
    chosen, measured = plan.settings, plan.measurements
    assert measured is not None
    assert plan.resources is not None
    experiment = with_changes(preset(name), {"placement": "processes", **SHORT, **period})
    drawn = chosen.get("learner.updates_per_draw", experiment.learner.updates_per_draw)
    wanted = (chosen["device"], chosen["threads"], drawn)
    learner = next(one for one in measured.learners if (one.device, one.threads, one.updates_per_draw) == wanted)
    envs, unroll = int(chosen["actor.envs"]), int(chosen["actor.unroll"])
    arrangement = Arrangement(int(actors), envs, unroll, int(groups), learner, side)  # type: ignore[arg-type]
    return predict(experiment, measured, plan.resources.cores, arrangement).rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="atari:pong")
    parser.add_argument("--every", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=[], metavar="ACTORS:GROUPS:SIDE[:THREADS]")
    options = parser.parse_args()
    cores = Cores()
    time.sleep(3.0)
    print(f"before: {cores.busy() or 0.0:.0%} busy\n")
    period = {"learner.train_period": options.every}
    asked = {"placement": "processes", **SHORT, **period, **UNDISTURBED}
    plan = qfleet.plan(options.preset, **asked)
    print(
        "| actors:groups:inference | environments each | cores busy | GPU busy | predicted steps/s | steps/s"
        " | bottleneck |"
    )
    print("|---" * 7 + "|")
    for number, way in enumerate([planned_way(plan), *options.ways]):
        settings = {**asked, **(arranged(plan, way) if number else {"plan": plan})}
        with tempfile.TemporaryDirectory() as folder, watched_gpu() as looks:
            look = Look(options.seconds, options.turns, looks)
            qfleet.train(
                options.preset, run_dir=Path(folder) / "run", env_steps=10**9,
                callbacks=qfleet.Callbacks(on_step=look.on_step), **settings,
            )  # fmt: skip
            holds_up = read_jsonl(Path(folder) / "run" / "metrics.jsonl")[-2]["bottleneck"]
        cores_share, gpu_share = (", ".join(f"{one:.0%}" for one in of) for of in (look.shares, look.gpu_shares))
        print(
            f"| {way}{'' if number else ' (planned)'} | {plan.settings['actor.envs']} | {cores_share} | {gpu_share} |"
            f" {predicted(options.preset, period, plan, way):,.0f} | {statistics.median(look.rates):,.0f}"
            f" | {holds_up} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
