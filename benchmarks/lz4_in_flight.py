"""Would it pay to compress frames on their way from an actor to the replay? Times both ends on real frames of a game.

    python benchmarks/lz4_in_flight.py [--game pong] [--rows 128] [--seconds 3]

Prints what a frame costs both ends with LZ4 and as a plain copy, and the speed of a link below which LZ4 is faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import lz4.block
import numpy as np
from numpy.typing import NDArray

from qfleet.core.spec import PLAIN
from qfleet.envs import AtariConfig, make_env

ENVS, WARM_UP = 8, 100


def frames(game: str, rows: int) -> NDArray[np.uint8]:
    """Return newest frames [rows, 84, 84] of random play."""
    env, rng, seen = make_env(AtariConfig(game=game, threads=1), ENVS), np.random.default_rng(0), []
    env.reset(list(range(ENVS)))
    for tick in range(WARM_UP + -(-rows // ENVS)):
        observation = env.step(rng.integers(env.spec.actions, size=ENVS)).observation[PLAIN]
        if tick >= WARM_UP:
            seen.append(observation[:, -1])
    env.close()
    return np.concatenate(seen)[:rows]


def seconds_of(work: Callable[[], object], seconds: float) -> float:
    """Return how long a piece of work takes, the median of many."""
    took, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return float(np.median(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="pong")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    message = frames(options.game, options.rows)
    target, size = np.empty_like(message), message.nbytes
    packed = lz4.block.compress(message, store_size=False)
    plain = seconds_of(lambda: np.copyto(target, message), options.seconds)
    packing = seconds_of(lambda: lz4.block.compress(message, store_size=False), options.seconds)
    unpacking = seconds_of(lambda: lz4.block.decompress(packed, uncompressed_size=size), options.seconds)
    saved = (size - len(packed)) / (packing + unpacking - 2 * plain)
    print(f"{options.game}, messages of {options.rows} frames, {size / len(packed):.1f} times smaller with LZ4")
    print("| both ends | GB/s of frames |\n|---|---|")
    print(f"| plain copies | {size / (2 * plain) / 1e9:.1f} |\n| LZ4 | {size / (packing + unpacking) / 1e9:.2f} |")
    print(f"LZ4 pays on links slower than {saved / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
