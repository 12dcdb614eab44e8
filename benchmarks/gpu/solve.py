"""Seconds of training to a score on the device, after warm-up; evaluations are not counted.

    python benchmarks/gpu/solve.py GAME [--seeds 1 2 3] [--limit 20] [--peer-rules] [--section.field VALUE ...]

GAME is cartpole or a MinAtar game; `--peer-rules` plays it as the peer of the table does (peer_rules.py). The score
has to be reached by three evaluations in a row. After the warm-up (compilation, recording) the loop is put back to
its very first state, and the clock starts. The warm-up begins after imports, torch's compiler among them, and with a
CUDA context.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import peer_rules
import yaml
from fused import build, cartpole_pqn, synchronise

from qfleet.experiment import Experiment
from qfleet.presets import preset
from qfleet.roles.fused.evaluation import DeviceEvaluation
from qfleet.roles.fused.loop import Loop

SCORES = {"cartpole": 475.0, "breakout": 87.0, "asterix": 71.0, "space_invaders": 159.0}
WARM_UP = 6


def experiment_of(game: str) -> Experiment:
    if game == "cartpole":
        return cartpole_pqn(1024, 32, 2, 8)
    return preset(f"minatar:{game}")


def solve(loop: Loop, score: float, every: int, limit: float) -> dict[str, Any]:
    """Train until three evaluations in a row reach the score; return seconds, steps and the curve."""
    began = time.perf_counter()
    import torch._inductor.compile_fx  # noqa: F401  (takes 2 s, which are not the warm-up's)

    imported = time.perf_counter() - began
    first, began = loop.state_dict(), time.perf_counter()
    for _ in range(WARM_UP):
        loop.advance()
    evaluation = DeviceEvaluation(loop.setup, loop.choices)
    evaluation.play(loop.evaluated)
    loop.load_state_dict(first)
    synchronise()
    warm_up = time.perf_counter() - began
    spent, row, due, curve = 0.0, 0, 0, []
    while spent < limit and row < 3:
        began = time.perf_counter()
        loop.advance()
        synchronise()
        spent += time.perf_counter() - began
        if loop.steps // every > due:
            due = loop.steps // every
            mean = float(evaluation.play(loop.evaluated)[0].mean())
            row = row + 1 if mean >= score else 0
            curve.append((loop.steps, round(spent, 2), round(mean, 1)))
    timed = {"seconds": spent, "compiler_import": imported, "warm_up": warm_up}
    return {"solved": row == 3, **timed, "steps": loop.steps, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=list(SCORES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--score", type=float)
    parser.add_argument("--peer-rules", action="store_true")
    options, rest = parser.parse_known_args()
    changes = {
        name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if options.peer_rules:
        peer_rules.adopt()
        changes = {**peer_rules.CHANGES, **changes}
    experiment = experiment_of(options.game)
    every = options.every or experiment.evaluation.every
    for seed in options.seeds:
        loop = build(experiment, seed=seed, **changes)
        result = solve(loop, options.score or SCORES[options.game], every, options.limit)
        curve = result.pop("curve")
        shown = curve[:: max(len(curve) // 8, 1)]
        print(json.dumps({"game": options.game, "seed": seed, **changes, **result, "curve": shown}), flush=True)


if __name__ == "__main__":
    main()
