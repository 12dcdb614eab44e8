"""Times cpprb's prioritised replay and prints its speed in batches a second as one JSON line.

usage: .peers/bin/python benchmarks/peers/cpprb_replay.py [--items 1000000]

One round is what one update of a prioritised learner asks of its replay: draw the items, compute their importance
weights, gather their contents, write their new priorities back. Items are small (4 + 4 floats of observation). The
workload and the best-of-rounds rule are those of `benchmarks/replay_micro.py`, which takes turns with this peer.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from cpprb import PrioritizedReplayBuffer

BATCH_SIZES = (32, 512)
ALPHA, BETA = 0.6, 0.4
ROUNDS, ROUND_S = 5, 0.4
OBSERVATION = 4
CHUNK = 10_000


def filled_buffer(items: int, rng: np.random.Generator) -> PrioritizedReplayBuffer:
    """A full buffer whose priorities all differ."""
    wide = {"shape": OBSERVATION}
    columns = {"observation": wide, "action": {}, "reward": {}, "discount": {}, "next_observation": wide}
    buffer = PrioritizedReplayBuffer(items, columns, alpha=ALPHA)
    for begin in range(0, items, CHUNK):
        rows = min(CHUNK, items - begin)
        observation, zeros = rng.standard_normal((rows, OBSERVATION), np.float32), np.zeros(rows, np.float32)
        buffer.add(
            observation=observation,
            action=zeros,
            reward=zeros,
            discount=zeros,
            next_observation=observation,
            priorities=rng.random(rows),
        )
    return buffer


def batches_per_second(buffer: PrioritizedReplayBuffer, batch_size: int, rng: np.random.Generator) -> float:
    """The best of several rounds: other load on the machine can only slow a round down."""
    best = 0.0
    for _ in range(ROUNDS):
        batches, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < ROUND_S:
            batch = buffer.sample(batch_size, beta=BETA)
            buffer.update_priorities(batch["indexes"], rng.random(batch_size))
            batches += 1
        best = max(best, batches / elapsed)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="cpprb prioritised replay: sample + weights + gather + write-back")
    parser.add_argument("--items", type=int, default=1_000_000)
    items = parser.parse_args().items
    rng = np.random.default_rng(0)
    buffer = filled_buffer(items, rng)
    speeds = {str(size): round(batches_per_second(buffer, size, rng), 1) for size in BATCH_SIZES}
    print(json.dumps({"peer": "cpprb", "items": items, "batches_per_s": speeds}))


if __name__ == "__main__":
    main()
