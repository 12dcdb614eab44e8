"""CartPole to 475: seconds of training to the third evaluation in a row at the score, beside Stable-Baselines3.

Each seed is one run of the whole command in a process of its own, in turn with the peer's run of the same seed.
Evaluations (20 episodes every 1,000 steps) count on neither side; the model kept then plays 100 unseen episodes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfleet.bench.peers import peer_python, run_peer
from qfleet.bench.table import Row

TARGET = 475.0
Result = dict[str, Any]


def measure(peers: Path | None, seeds: Sequence[int]) -> list[Row]:
    """Solve CartPole once for each seed on both sides."""
    python = peer_python(peers)
    ours: list[Result] = []
    theirs: list[Result] = []
    for seed in seeds:
        ours.append(_ours(seed))
        if python is not None:
            theirs.append(run_peer(python, "sb3_cartpole.py", "--seed", str(seed)))
        print(json.dumps({"seed": seed, "ours": ours[-1], "peer": theirs[-1] if theirs else None}), file=sys.stderr)
    kept = sum(result["solved"] and result["final_mean"] >= TARGET for result in ours)
    median, peer_median = _median(ours), _median(theirs)
    ratio = peer_median / median if median and peer_median else None
    return [
        Row(
            what=f"seconds of training to {TARGET:.0f}, median of {len(seeds)} seeds",
            ours=_figure(median, "s"),
            peer=_figure(peer_median, "s (Stable-Baselines3)"),
            ratio=ratio,
            goal="ratio 30",
            met=None if ratio is None else ratio >= 30,
        ),
        Row(
            what="environment steps to it, median",
            ours=_figure(_median(ours, "env_steps"), "steps"),
            peer=_figure(_median(theirs, "env_steps"), "steps"),
        ),
        Row(
            what=f"seeds whose kept model scores {TARGET:.0f} or more over 100 unseen episodes",
            ours=f"{kept} of {len(seeds)}",
            peer=f"{sum(r['solved'] and r['final_mean'] >= TARGET for r in theirs)} of {len(theirs)}" if theirs else "",
            goal="10 of 10",
            met=kept == len(seeds),
        ),
    ]


def _ours(seed: int) -> Result:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "qfleet", "train", "cartpole", "--seed", str(seed), "--run-dir", str(run_dir)]
        subprocess.run([*command, "--quiet"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "seed": seed,
        "seconds": summary["wall_s_to_target"],
        "env_steps": summary["env_steps_to_target"],
        "solved": summary["solved"],
        "final_mean": summary["eval"]["mean"],
    }


def _median(results: Sequence[Result], key: str = "seconds") -> float | None:
    """Return the median over the seeds; one that did not solve counts as infinitely slow."""
    if not results:
        return None
    middle = statistics.median(result[key] if result["solved"] else float("inf") for result in results)
    return middle if middle != float("inf") else None


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.2f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
