"""Times the replay alone: prioritised cycles beside cpprb, growth with the size, appends, LZ4 on real Pong frames.

    python benchmarks/replay_micro.py [--json FILE] [--peer PYTHON_WITH_CPPRB] [--parts cycle growth small lz4]

Each figure is the best of several rounds in CPU time (all of this is one thread, and other load must not count); the
peer takes turns with us, in the same minutes on the same machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

BATCHES = (32, 512)
ROUND_S = 0.4


def rate(work: Callable[[], object]) -> float:
    """Calls in a second of CPU time, over one round."""
    work()
    start, calls = time.process_time(), 0
    while (spent := time.process_time() - start) < ROUND_S:
        for _ in range(10):
            work()
        calls += 10
    return calls / spent


def cpprb_cycle(items: int) -> dict[int, Callable[[], object]]:
    """Prioritised sample, weights, gather and write-back of cpprb on `items` small transitions."""
    from cpprb import PrioritizedReplayBuffer

    shapes = {"obs": {"shape": 4}, "act": {}, "rew": {}, "next_obs": {"shape": 4}, "done": {}}
    buffer = PrioritizedReplayBuffer(items, shapes, alpha=0.6)
    rng = np.random.default_rng(0)
    for _ in range(items // 10_000):
        obs, one = rng.standard_normal((10_000, 4), np.float32), np.zeros(10_000, np.float32)
        buffer.add(obs=obs, act=one, rew=one, next_obs=obs, done=one, priorities=rng.random(10_000))

    def cycle(batch: int) -> None:
        sample = buffer.sample(batch, beta=0.4)
        buffer.update_priorities(sample["indexes"], rng.random(batch))

    return {batch: (lambda batch=batch: cycle(batch)) for batch in BATCHES}


def filled(items: int, streams: int = 16, kind: str = "prioritised") -> Any:
    """A replay of `items` CartPole-like rows from `streams` environments."""
    from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
    from qfleet.core.types import Priorities
    from qfleet.replay import PrioritisedConfig, Replay, ReplayConfig, UniformConfig

    spec = EnvSpec(name="small", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=2)
    sampler = PrioritisedConfig() if kind == "prioritised" else UniformConfig()
    rng = np.random.default_rng(0)
    replay = Replay(ReplayConfig(capacity=items, sampler=sampler), spec, streams=streams, n_step=3, gamma=0.99, rng=rng)
    ticks = 20_000 // streams
    for sequence in range(items // (ticks * streams) + 1):
        replay.append(message(rng, streams, ticks, sequence))
    rows = replay.sampler.items()
    generation = replay.chains.generation[rows // replay.chains.rows]
    replay.update_priorities(Priorities(rows, generation, rng.random(len(rows), np.float32)))
    return replay


def message(rng: np.random.Generator, streams: int, ticks: int, sequence: int) -> Any:
    """`ticks` groups of experience of `streams` environments, without episode ends."""
    from qfleet.core.spec import PLAIN
    from qfleet.core.types import Experience, Version

    rows = streams * ticks
    no = np.zeros(rows, np.bool_)
    return Experience(
        source="bench", sequence=sequence, version=Version(), offsets=np.arange(0, rows + 1, streams),
        stream=np.tile(np.arange(streams), ticks), observation={PLAIN: rng.standard_normal((rows, 4), np.float32)},
        action=np.zeros(rows, np.int64), reward=np.ones(rows, np.float32), terminated=no, truncated=no, final=no,
    )  # fmt: skip


def qfleet_cycle(items: int) -> dict[int, Callable[[], object]]:
    """The same of our replay: 3-step transitions with exact weights and a checked write-back."""
    from qfleet.core.types import Priorities

    replay, rng = filled(items), np.random.default_rng(1)

    def cycle(batch: int) -> None:
        sample = replay.sample(batch, 0.4)
        replay.update_priorities(Priorities(sample.index, sample.generation, rng.random(batch, np.float32)))

    return {batch: (lambda batch=batch: cycle(batch)) for batch in BATCHES}


MAKERS = {"cpprb": cpprb_cycle, "numba": qfleet_cycle, "numpy": qfleet_cycle}


def serve(name: str, items: int) -> None:
    """Child: time one round of every batch size for each line read."""
    cycles = MAKERS[name](items)
    for _ in sys.stdin:
        print(json.dumps({batch: rate(cycle) for batch, cycle in cycles.items()}), flush=True)


class Child:
    """One implementation in a process of its own."""

    def __init__(self, python: str, name: str, items: int) -> None:
        environment = {**os.environ, "QFLEET_NO_NUMBA": "1" if name == "numpy" else "0"}
        command = [python, __file__, "--serve", name, "--items", str(items)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)

    def round(self) -> dict[int, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return {int(batch): value for batch, value in json.loads(self.process.stdout.readline()).items()}

    def close(self) -> None:
        self.process.communicate()


def contest(children: dict[str, Child], rounds: int = 5) -> dict[str, dict[int, float]]:
    """Best round of each child, taking turns."""
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(BATCHES, 0.0) for name in children}
    for _ in range(rounds):
        for name, child in children.items():
            for batch, value in child.round().items():
                best[name][batch] = max(best[name][batch], value)
    for child in children.values():
        child.close()
    return best


def cycle_part(peer: str | None) -> dict[str, Any]:
    """Prioritised cycles at 1M items."""
    children = {name: Child(sys.executable, name, 1_000_000) for name in ("numba", "numpy")}
    if peer:
        children["cpprb"] = Child(peer, "cpprb", 1_000_000)
    best = contest(children)
    for batch in BATCHES:
        for name, rates in best.items():
            ratio = f"  {rates[batch] / best['cpprb'][batch]:5.2f} x cpprb" if peer else ""
            print(f"1M items, batch {batch:3}, {name:5}: {rates[batch]:9,.0f} batches/s{ratio}")
    return best


def growth_part() -> dict[str, Any]:
    """Cost of a cycle from 100k to 10M items."""
    results: dict[str, Any] = {}
    for name in ("numba", "numpy"):
        sizes = {items: contest({name: Child(sys.executable, name, items)}, 3)[name] for items in (10**5, 10**6, 10**7)}
        results[name] = sizes
        for batch in BATCHES:
            costs = ", ".join(f"{items:,}: {1e6 / rates[batch]:.1f} us" for items, rates in sizes.items())
            growth = sizes[10**5][batch] / sizes[10**7][batch]
            print(f"{name}, batch {batch:3}: {costs}; 100k to 10M costs {growth:.2f} times")
    return results


def small_part() -> dict[str, float]:
    """One group of 16 environments in, one uniform batch of 128 out, 3-step, CartPole-sized, on a full replay."""
    replay, rng = filled(100_000, kind="uniform"), np.random.default_rng(2)
    messages = iter([message(rng, 16, 1, 10**6 + i) for i in range(60_000)])
    append = max(rate(lambda: replay.append(next(messages))) for _ in range(3))
    sample = max(rate(lambda: replay.sample(128)) for _ in range(3))
    print(f"append of 16 rows: {1e6 / append:.1f} us; uniform sample of 128: {1e6 / sample:.1f} us")
    return {"append_us": 1e6 / append, "sample_us": 1e6 / sample}


def lz4_part(frames: int = 20_000) -> dict[str, float] | None:
    """Bytes and decoding speed of real Pong frames."""
    if importlib.util.find_spec("ale_py") is None:
        print("lz4: ale_py is not installed, no Pong frames")
        return None
    from ale_py.vector_env import AtariVectorEnv

    from qfleet.replay.compression import CompressedColumn

    streams, rows = 8, 1024
    envs, rng = AtariVectorEnv("pong", num_envs=streams, stack_num=1), np.random.default_rng(0)
    ticks = frames // streams // rows * rows
    column = CompressedColumn(ticks // rows * streams, rows, (84, 84))
    observation, _ = envs.reset(seed=1)
    spent = 0.0
    for tick in range(ticks):
        start = time.process_time()
        column.write((tick // rows * streams + np.arange(streams)) * rows + tick % rows, np.asarray(observation)[:, 0])
        spent += time.process_time() - start
        observation, *_ = envs.step(rng.integers(6, size=streams))
    envs.close()
    stored = ticks * streams
    decoded = max(rate(lambda: column.read(rng.choice(stored, 256, replace=False))) for _ in range(3)) * 256
    result = {"gb_per_million": column.nbytes / stored / 1e3, "encoded_per_s": stored / spent, "decoded_per_s": decoded}
    print(
        f"lz4, {stored:,} Pong frames: {result['gb_per_million']:.3f} GB for each million, "
        f"{result['encoded_per_s']:,.0f} frames/s encoded, {decoded:,.0f} decoded"
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", default=sys.executable if importlib.util.find_spec("cpprb") else None)
    parser.add_argument("--parts", nargs="+", default=["cycle", "growth", "small", "lz4"])
    parser.add_argument("--serve", choices=list(MAKERS))
    parser.add_argument("--items", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.items)
        return
    parts: dict[str, Callable[[], Any]] = {
        "cycle": lambda: cycle_part(options.peer), "growth": growth_part, "small": small_part, "lz4": lz4_part,
    }  # fmt: skip
    results = {name: parts[name]() for name in options.parts}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
