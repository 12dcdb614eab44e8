"""How long a run with a large replay takes to end after SIGTERM, its last checkpoint included; prints a table.

    python benchmarks/soon_ended.py [--gigabytes 2] [--unsaved-mb 512 1000000]

Each run is a real one in processes whose environment shows 100 kB of noise; it is told to end when so many gigabytes
have come, of which by `checkpoint.unsaved_mb` more or less are saved by then. The script's folder must be on the disk
that is meant (`--folder`).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from qfleet.observe.sinks import read_jsonl

PIXELS = 100_000
SETTINGS = {
    "placement": "processes", "plan": "None", "actors": "1", "actor.envs": "4", "env-steps": "1000000000",
    "network.hidden": "8", "learner.learning-starts": "1000", "learner.train-period": "1000",
    "replay.storage.kind": "ram", "checkpoint.every": "1000000000", "evaluation.every": "1000000000",
    "evaluation.max-episode-steps": "20", "track.every-s": "0.1",
}  # fmt: skip


class NoiseEnv(gym.Env):  # type: ignore[type-arg]
    """Shows noise for a hundred steps."""

    observation_space = gym.spaces.Box(0, 255, (PIXELS,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._noise = 0, self.np_random.integers(0, 256, 2 * PIXELS, np.uint8)
        return self._noise[:PIXELS], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        begin = int(self.np_random.integers(PIXELS))
        return self._noise[begin : begin + PIXELS], 0.0, self._step == 100, False, {}


gym.register("Noise-v0", entry_point=NoiseEnv)


def ended_after(unsaved_mb: float, gigabytes: float, run: Path) -> tuple[float, int, int]:
    """Return the seconds from the signal to the end, the exit code, and the checkpoints before."""
    rows = int(1e9 * gigabytes / PIXELS)
    settings = {**SETTINGS, "replay.capacity": str(2 * rows), "checkpoint.unsaved-mb": str(unsaved_mb)}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "qfleet", "train", "gym:soon_ended:Noise-v0", "--run-dir", str(run), "--quiet"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([*command, *words], env={**os.environ, "PYTHONPATH": path})
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and any(line.get("env_steps", 0) >= rows for line in read_jsonl(metrics)[-1:])):
        if process.poll() is not None:
            raise SystemExit("the run ended by itself")
        time.sleep(0.05)
    saved = sum(event["event"] == "checkpoint" for event in read_jsonl(run / "events.jsonl"))
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    return time.monotonic() - began, code, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--unsaved-mb", type=float, nargs="+", default=[512.0, 1e6])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print("| checkpoint.unsaved_mb | checkpoints before | ended after | exit code |")
    print("|---" * 4 + "|")
    for unsaved_mb in options.unsaved_mb:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            seconds, code, saved = ended_after(unsaved_mb, options.gigabytes, Path(folder) / "run")
        print(f"| {unsaved_mb:,.0f} | {saved} | {seconds:.1f} s | {code} |", flush=True)


if __name__ == "__main__":
    main()
