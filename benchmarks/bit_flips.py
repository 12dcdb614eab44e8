"""Flips single bits in real checkpoints, tries to load them, and counts what is noticed.

    python benchmarks/bit_flips.py [--flips 10000] [--seed 1]

Three runs make checkpoints: DQN with prioritised replay inline, PQN, and DQN in processes with three shards. Each flip
hits one file that the newest checkpoint needs, every second time any byte of it, every other time any file, so that
small ones are hit as well. Then the newest good checkpoint is looked for and wholly loaded, as a resume would, and
compared with what was saved. The bit is put back before the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from qfleet import api
from qfleet.core import codec
from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.experiment import Experiment, with_changes
from qfleet.presets import preset
from qfleet.presets.algorithms import apply
from qfleet.runtime import checkpoint

ENV = {"env": {"kind": "gym", "id": "CartPole-v1", "reward_scale": 0.005}}
SHORT: dict[str, Any] = {
    "env_steps": 4000,
    "evaluation": {"every": 2000, "episodes": 2, "envs": 2, "test_episodes": 2, "target": None},
    "checkpoint.every": 1500,
}
REPLAY = {"learner.learning_starts": 500, "replay.capacity": 20_000}
SHARDS = {"placement": "processes", "actors": 3, "replay.shards": 3}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "DQN, prioritised, inline": ("prioritised", REPLAY),
    "PQN, inline": ("pqn", {}),
    "DQN, prioritised, processes, 3 shards": ("prioritised", {**REPLAY, **SHARDS}),
}
COLUMNS = ("noticed", "file named", "previous used", "put right", "none left", "loaded wrong")


@dataclass
class Target:
    """The newest checkpoint of a run, which bits are flipped in, and what loading should give."""

    root: Path
    files: list[Path]
    sizes: np.ndarray[Any, Any]
    right: dict[str, str]
    """By the name of each checkpoint, the hash of all that it holds."""

    @classmethod
    def of(cls, root: Path) -> Target:
        newest = checkpoint.complete(root)[-1]
        chunks = [root / "chunks" / name for name in checkpoint.verify(newest)["chunks"]]
        files = sorted([*newest.iterdir(), *chunks, *(path.with_suffix(".parity") for path in chunks)])
        right = {path.name: loaded(path) for path in checkpoint.complete(root)}
        return cls(root, files, np.array([path.stat().st_size for path in files]), right)

    def flip(self, rng: np.random.Generator, by_file: bool) -> set[str]:
        """Flip one bit, load, put the bit back; returns what of COLUMNS was seen."""
        hit = self.sizes > 0 if by_file else self.sizes
        victim = self.files[rng.choice(len(self.files), p=hit / hit.sum())]
        before = victim.read_bytes()
        place, bit = int(rng.integers(len(before))), 1 << int(rng.integers(8))
        victim.write_bytes(before[:place] + bytes([before[place] ^ bit]) + before[place + 1 :])
        try:
            return self._seen(victim)
        finally:
            victim.write_bytes(before)

    def _seen(self, victim: Path) -> set[str]:
        try:
            found = checkpoint.newest_good(self.root)
        except CheckpointError as error:
            return {"noticed", "none left", *(["file named"] if str(victim) in str(error) else [])}
        seen = set()
        if found.skipped or found.mended:
            seen |= {"noticed", "previous used" if found.skipped else "put right"}
        if any(str(victim) in line for line in [*found.skipped, *found.mended]):
            seen.add("file named")
        if loaded(found.directory) != self.right[found.directory.name]:
            seen.add("loaded wrong")
        return seen


def short(algo: str, changes: dict[str, Any]) -> Experiment:
    """Return a run of seconds that makes at least two checkpoints."""
    return with_changes(apply(with_changes(preset("cartpole"), ENV), algo), {**SHORT, **changes})


def loaded(directory: Path) -> str:
    """Return a hash of all that a checkpoint holds, after loading it."""
    result = hashlib.sha256()
    for name in sorted(path.name.removesuffix(".msgpack") for path in directory.glob("*.msgpack")):
        header, arrays = codec.pack(whole(checkpoint.read_state(directory, name)))
        result.update(header)
        for array in arrays:
            result.update(repr((array.shape, array.dtype)).encode() + array.tobytes())
    return result.hexdigest()


def whole(state: Any) -> Any:
    """Return a state with the content of its chunks in place of them."""
    if isinstance(state, Chunk):
        return whole(state.read())
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, sums = np.random.default_rng(arguments.seed), Counter[str]()
    print(f"| run | files | kB | flips | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 4)}", flush=True)
    with TemporaryDirectory() as directory:
        for number, (name, (algo, changes)) in enumerate(RUNS.items()):
            flips = (arguments.flips - sums["flips"]) // (len(RUNS) - number)
            run = api.train(short(algo, changes), run_dir=Path(directory) / str(number))
            target = Target.of(run.dir / "checkpoints")
            counts = Counter(what for index in range(flips) for what in target.flip(rng, index % 2 == 0))
            cells = [len(target.files), f"{target.sizes.sum() / 1000:.0f}", flips, *(counts[what] for what in COLUMNS)]
            print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
            sums.update({**counts, "flips": flips})
    print(f"| together | | | {sums['flips']} | {' | '.join(str(sums[what]) for what in COLUMNS)} |")


if __name__ == "__main__":
    main()
