"""Shows that runs of several learners learn as well as one: every form of gradients and every way to agree, by seeds.

    python benchmarks/parallel_learning.py [--games cartpole breakout] [--ways int8 topk ...] [--seeds 5]

Every run has the same settings but for the way. Runs that the JSON file beside the table has are not made again, so
that a benchmark that was cut goes on. The score of a run is that of its kept model over 100 unseen episodes. A way is
good if its mean over the seeds is not below the 95 % interval (Student's t) of the runs with one learner.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scipy.stats import t as student
from unlike_workers import Unlike

import qfleet.api as api

TABLE = Path(__file__).with_suffix(".md")
RUNS = Path(__file__).with_suffix(".json")
ALONE, SLOW = "one learner", "server async, one of four slow"
BESIDE = {"placement": "processes", "actors": 1, "topology": "pipeline"}
TWO = {"learners": 2}
SERVER = {"learners": 3, "parallel.update.kind": "server", "parallel.update.servers": 2}
FORMS = ("fp16", "bf16", "int8", "sign", "topk", "powersgd")
WAYS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "data parallel": TWO,
    **{form: {**TWO, "parallel.compression.kind": form} for form in FORMS},
    "local": {**TWO, "parallel.update.kind": "local"},
    **{f"server {mode}": {**SERVER, "parallel.update.mode": mode} for mode in ("sync", "async", "stale")},
    "server async, top-k": {**SERVER, "parallel.update.mode": "async", "parallel.compression.kind": "topk"},
    SLOW: {**SERVER, "learners": 4, "parallel.update.mode": "async"},
    "sharded": {**TWO, "parallel.update.kind": "sharded"},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    **{f"weights {form}": {"learner.weights.kind": form} for form in ("bf16", "int8", "delta")},
}
SERVERS = ("server sync", "server async", "server stale", "server async, top-k")
COLLECTIVE = (ALONE, "data parallel", *FORMS, "local")
GAMES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cartpole": ({"preset": "cartpole", "env_steps": 60_000, **BESIDE}, tuple(WAYS)),
    "breakout": ({"preset": "minatar:breakout", "env_steps": 300_000, "evaluation.every": 75_000}, COLLECTIVE),
    "breakout, DQN": (
        {
            "preset": "minatar:breakout",
            "algo": "dqn",
            "env_steps": 60_000,
            "exploration.steps": 20_000,
            "evaluation.every": 20_000,
            **BESIDE,
        },
        (ALONE, *SERVERS, "weights delta"),
    ),
}
"""Settings of each game, and the ways that it is played in: fused loops have no servers and no splits. Splits, which
change nothing but the last digits, are played on CartPole alone."""
SEEDS = 5
COMMON = {"threads": 1, "evaluation.test_episodes": 100}
Runs = dict[str, dict[str, dict[str, dict[str, float | None]]]]
"""What came of each run: by game, way and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", choices=list(GAMES), default=list(GAMES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=100)
    options = parser.parse_args()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for game in options.games:
            for way in (way for way in GAMES[game][1] if way in options.ways):
                if str(seed) not in _read().get(game, {}).get(way, {}):
                    _keep(game, way, seed, _train(game, way, seed))
    TABLE.write_text(_page(_read()))
    print(TABLE.read_text())


def _train(game: str, way: str, seed: int) -> dict[str, float | None]:
    """Return the score of one run, and the steps and bytes that it took."""
    settings = {**GAMES[game][0], **COMMON, **WAYS[way]}
    with tempfile.TemporaryDirectory() as directory:
        torso = partial(Unlike, Path(directory) / "first") if way == SLOW else None
        run = api.train(**settings, network=torso, seed=seed, run_dir=Path(directory) / "run")
        rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    sent = [row["gradient_bytes"] for row in rows if row.get("gradient_bytes")]
    return {
        "score": run.summary["eval"]["mean"],
        "env_steps": run.summary["env_steps"],
        "steps_to_target": run.summary.get("env_steps_to_target"),
        "updates": run.summary["updates"],
        "gradient_bytes": sent[-1] if sent else None,
    }


def _read() -> Runs:
    return json.loads(RUNS.read_text()) if RUNS.exists() else {}


def _keep(game: str, way: str, seed: int, result: dict[str, float | None]) -> None:
    runs = _read()
    runs.setdefault(game, {}).setdefault(way, {})[str(seed)] = result
    RUNS.write_text(json.dumps(runs, indent=1) + "\n")
    print(game, way, seed, result, flush=True)


def _page(runs: Runs) -> str:
    lines = ["# Several learners learn as one does", "", f"Written by `python benchmarks/{Path(__file__).name}`."]
    for game, ways in runs.items():
        if fewest := _unfinished(ways):
            lines += ["", f"## {game}", "", f"Not finished: {fewest} of {SEEDS} seeds of every way."]
            continue
        low, high = _interval(_scores(ways[ALONE].values()))
        lines += [
            "",
            f"## {game}",
            "",
            f"Settings: `{_words(GAMES[game][0] | COMMON)}`; seeds {', '.join(ways[ALONE])}."
            f" Interval of one learner: {low:.1f} to {high:.1f}.",
            "",
            "| way | settings | mean score | its interval | not below | median steps to the target |",
            "|---|---|---|---|---|---|",
            *(_row(way, list(ways[way].values()), low) for way in WAYS if way in ways),
        ]
    return "\n".join([*lines, ""])


def _unfinished(ways: dict[str, dict[str, dict[str, float | None]]]) -> str:
    """Return how many seeds every way of a game has, if too few for an interval."""
    fewest = min(len(ways.get(way, {})) for way in (ALONE, *ways))
    return str(fewest) if fewest < SEEDS else ""


def _row(way: str, results: list[dict[str, float | None]], low: float) -> str:
    scores = _scores(results)
    mean, (below, above) = statistics.mean(scores), _interval(scores)
    solved = [steps for result in results if (steps := result["steps_to_target"]) is not None]
    steps = f"{statistics.median(solved):,.0f} ({len(solved)} of {len(results)})" if solved else ""
    verdict = "yes" if mean >= low else "**no**"
    return f"| {way} | `{_words(WAYS[way])}` | {mean:.1f} | {below:.1f} to {above:.1f} | {verdict} | {steps} |"


def _scores(results: Iterable[dict[str, float | None]]) -> list[float]:
    return [score for result in results if (score := result["score"]) is not None]


def _interval(scores: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean."""
    if len(scores) < 2:
        return float("nan"), float("nan")
    half = student.ppf(0.975, len(scores) - 1) * statistics.stdev(scores) / len(scores) ** 0.5
    return statistics.mean(scores) - half, statistics.mean(scores) + half


def _words(settings: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in settings.items())


if __name__ == "__main__":
    main()
