"""Measures how long checkpoints hold training up, and how many bytes they write.

    python benchmarks/checkpoint_pause.py [--checkpoints 100] [--cases small frames fused] [--placements inline ...]

DQN saves every few thousand steps: on CartPole (rows of 33 bytes, room for a million), on Pong (a frame of 7 kB a row,
prioritised, the Nature network, room for 50,000), and on MinAtar's Breakout in a fused loop (a frame of 400 bytes a
row, prioritised, room for 200,000), which has no placement but inline. "pause" is the time during which no role may
step, by the clock: stopping all of them, copying their states; "computing" is the processor's time of it (inline: all
of it is in one thread), which other programs on the machine do not lengthen much. "round" is the longest round of an
inline run while a checkpoint was being written beside it, and between two (p99 of these): what a thread that writes
costs. Bytes are those of new files: rows in chunks with their parity, and the states of roles, which are written whole.
"of new rows" divides by what the new rows take in memory, for the chunks alone and for everything; a fused loop has a
row more for the end of each episode, which is no step.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from qfleet import api
from qfleet.control.monitor import Callbacks, Monitor
from qfleet.core.saving import Saving
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": (
        "cartpole",
        {
            "env": {"kind": "gym", "id": "CartPole-v1", "reward_scale": 0.005},
            "actor.envs": 16,
            "replay.capacity": 1_000_000,
            "learner.train_period": 16.0,
        },
    ),
    "frames": (
        "atari:pong",
        {
            "actor.envs": 8,
            "replay.capacity": 50_000,
            "replay.sampler": {"kind": "prioritised"},
            "learner.train_period": 200.0,
            "learner.learning_starts": 1000,
        },
    ),
    "fused": (
        "minatar:breakout",
        {
            "topology": "fused",
            "actor.envs": 64,
            "replay.capacity": 200_000,
            "replay.sampler": {"kind": "prioritised"},
            "learner.train_period": 200.0,
            "learner.learning_starts": 1000,
        },
    ),
}
EVERY = {"small": 4000, "frames": 2000, "fused": 20_000}
BESIDE_FRAMES = {"small": 17, "frames": 17, "fused": 16}
"""Bytes that a row takes besides its frame."""
COLUMNS = (
    "rows | placement | checkpoints | new rows | pause, ms: median | p99 | most | computing: median | p99"
    " | written in, ms: median | longest round, ms: writing | else | kB: chunks | states | of new rows: chunks | all"
)


def experiment(case: str, placement: str, every: int, checkpoints: int) -> Experiment:
    name, changes = CASES[case]
    quiet = {"every": 10**9, "episodes": 1, "envs": 1, "test_episodes": 1, "max_episode_steps": 50, "target": None}
    shared = {"env_steps": every * checkpoints, "placement": placement, "actors": 1, "evaluation": quiet}
    chosen = apply(preset(name), "dqn") if case == "fused" else preset(name)  # the game's own agent has no replay
    return with_changes(chosen, {**shared, **changes, "checkpoint.every": every})


@dataclass
class Watched:
    """Times every checkpoint of a run, and weighs what it wrote."""

    pauses: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    """Of the main thread, in each pause."""
    lasted: list[float] = field(default_factory=list)
    rounds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Seconds of the longest round while a checkpoint was being written, for each checkpoint, and between two."""
    written: list[dict[str, int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    _seen: dict[Path, int] = field(default_factory=dict)
    _began: float = 0.0
    _longest: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def watch(self, monitor: Monitor) -> None:
        """Time a monitor's checkpoints and rounds from now on."""
        begin, saved, advance = monitor._begin_saving, monitor._saved, monitor.placement.advance

        def timed_begin() -> Saving:
            self._began, computed = time.perf_counter(), time.thread_time()
            saving = begin()
            self.pauses.append(time.perf_counter() - self._began)
            self.computing.append(time.thread_time() - computed)
            return saving

        def timed_saved(saving: Saving, path: Path) -> None:
            self.lasted.append(time.perf_counter() - self._began)
            self._note(saving, path)
            saved(saving, path)

        def timed_advance() -> None:
            at, writing = time.perf_counter(), monitor.saving is not None
            advance()
            self._longest[writing] = max(self._longest[writing], time.perf_counter() - at)

        monitor._begin_saving, monitor._saved = timed_begin, timed_saved  # type: ignore[method-assign]
        monitor.placement.advance = timed_advance  # type: ignore[method-assign]

    def _note(self, saving: Saving, path: Path) -> None:
        """Keep the bytes of the files that are new, of chunks and of states."""
        files = {file: file.stat().st_mtime_ns for file in path.parent.rglob("*") if file.is_file()}
        new = {"chunks": 0, "states": 0}
        for file, made in files.items():
            if self._seen.get(file) != made:
                new["chunks" if file.parent.name == "chunks" else "states"] += file.stat().st_size
        self._seen = files
        self.written.append(new)
        self.steps.append(saving.env_steps)
        for writing, longest in self._longest.items():
            self.rounds[writing].append(longest)
        self._longest = {True: 0.0, False: 0.0}


def measure(settings: Experiment) -> Watched:
    watched, run = Watched(), Monitor.run

    def watched_run(monitor: Monitor) -> Any:
        watched.watch(monitor)
        return run(monitor)

    Monitor.run = watched_run  # type: ignore[method-assign]
    try:
        with TemporaryDirectory() as directory:
            api.train(settings, run_dir=Path(directory) / "run", callbacks=Callbacks())
    finally:
        Monitor.run = run  # type: ignore[method-assign]
    return watched


def row(case: str, placement: str, settings: Experiment, watched: Watched) -> str:
    """Return a line of the table; the first two checkpoints, which load code, and the last, at rest, do not count."""
    counted = slice(2, -1)
    pauses, lasted = 1000 * np.array(watched.pauses[counted]), 1000 * np.array(watched.lasted[counted])
    writing, other = (1000 * np.array(watched.rounds[kind][counted]) for kind in (True, False))
    frame = sum(leaf.frame_bytes for leaf in env_spec(settings.env).observations.values())
    new = np.diff(watched.steps)[1:-1]
    chunks, states = (np.array([one[kind] for one in watched.written[counted]]) for kind in ("chunks", "states"))
    in_memory = new * float(frame + BESIDE_FRAMES[case])
    rounds = [f"{np.percentile(part, 99):.0f}" if placement == "inline" else "-" for part in (writing, other)]
    ratios = [chunks.sum() / in_memory.sum(), (chunks.sum() + states.sum()) / in_memory.sum()]
    times = [np.median(pauses), np.percentile(pauses, 99), pauses.max()]
    computing = 1000 * np.array(watched.computing[counted])
    if placement == "inline":
        computed = [f"{value:.1f}" for value in (np.median(computing), np.percentile(computing, 99))]
    else:
        computed = ["-", "-"]
    sizes = [np.median(chunks) / 1e3, np.median(states) / 1e3]
    cells = [case, placement, len(pauses), int(np.median(new)), *(f"{value:.1f}" for value in times), *computed]
    cells += [
        f"{np.median(lasted):.0f}",
        *rounds,
        *(f"{value:.0f}" for value in sizes),
        *(f"{value:.2f}" for value in ratios),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument("--every", type=int, help="steps between two; else as each case has them")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--placements", nargs="+", default=["inline", "processes"])
    arguments = parser.parse_args()
    print(f"| {COLUMNS} |\n|" + "---|" * (COLUMNS.count("|") + 1), flush=True)
    for case in arguments.cases:
        for placement in ["inline"] if case == "fused" else arguments.placements:
            every = arguments.every or EVERY[case]
            settings = experiment(case, placement, every, arguments.checkpoints)
            print(row(case, placement, settings, measure(settings)), flush=True)


if __name__ == "__main__":
    main()
