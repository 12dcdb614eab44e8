"""Compares what a plan predicts with what the run does: environment steps a second, inline and in processes.

    python benchmarks/plan_accuracy.py [--seconds 8]

Each run is planned anew, trained for some seconds after a warm-up without evaluations, and stopped. The ratio is
measured by predicted. Other programs on the machine, or more of them at one of the two times, spoil it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import qfleet.api as api
from qfleet.bench.stragglers import Busy
from qfleet.control.monitor import Callbacks

WARM_S = 4.0
ENDLESS = {"env_steps": 10**9, "evaluation.every": 10**9, "checkpoint.every": 10**9}
"""Neither evaluated nor ended by itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    seconds = parser.parse_args().seconds
    print("| environment | placement | actors x envs | predicted steps/s | measured steps/s | ratio | limited by |")
    print("|---" * 7 + "|")
    for name, env in {"CartPole-v1": "CartPole-v1", "200 us a step": partial(Busy, None)}.items():
        for placement in ("inline", "processes"):
            print(_row(name, {"env": env, "placement": placement, **ENDLESS}, seconds), flush=True)


def _row(name: str, run: dict[str, Any], seconds: float) -> str:
    plan = api.plan(fresh=True, **run)
    measured, predicted = _rate({**run, "plan": plan}, seconds), plan.env_steps_per_s or 0.0
    shape = f"{plan.settings.get('actors', 1)} x {plan.settings.get('actor.envs', 'as it is')}"
    figures = [f"{predicted:,.0f}", f"{measured:,.0f}", f"{measured / predicted:.2f}"]
    return f"| {' | '.join([name, plan.placement, shape, *figures, plan.bottleneck])} |"


def _rate(run: dict[str, Any], seconds: float) -> float:
    """Return the environment steps a second of a run, after its warm-up."""
    seen: list[tuple[float, int]] = []

    def watch(metrics: dict[str, Any], stop: Callable[[], None]) -> None:
        seen.append((time.perf_counter(), metrics["env_steps"]))
        if metrics["env_steps"] and seen[-1][0] - next(at for at, steps in seen if steps) > WARM_S + seconds:
            stop()

    with tempfile.TemporaryDirectory() as directory:
        api.train(run_dir=Path(directory) / "run", callbacks=Callbacks(on_step=watch), **run)
    began = next(at for at, steps in seen if steps)
    first = next((at, steps) for at, steps in seen if at - began > WARM_S)
    last = seen[-1]
    return (last[1] - first[1]) / (last[0] - first[0])


if __name__ == "__main__":
    main()
