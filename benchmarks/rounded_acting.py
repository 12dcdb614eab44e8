"""Values of the Nature network in bf16 on one CPU core: weights rounded at each call, or once; prints a table.

    python benchmarks/rounded_acting.py [--observations 1 4 16 64] [--rounds 15]

Beside them is float32, as actors compute it. What is timed takes turns, so that other work on the machine meets all
alike; the median of the rounds counts. The last column is how far the two forms of bf16 are apart at most.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.precision import autocast
from qfleet.accel.rounded import Rounded
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.torsos import NatureConfig
from qfleet.bench.timing import per_second
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec

SPEC = EnvSpec(name="frames", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=6)
SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observations", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, exact, network = (build_network(NatureConfig(), ReplayAgent(), SPEC, seed=0).explore() for _ in range(3))
    compute_by_onednn(exact, AccelConfig(), foreign=False)
    rounded = Rounded(network, "bf16", foreign=False)

    def at_each_call(observation: dict[str, Tensor]) -> Tensor:
        with autocast("bf16", torch.device("cpu")):
            return plain.q(observation)

    forms = {"fp32": exact.q, "at each call": at_each_call, "once": rounded.values}
    print("| observations | fp32, us each | bf16, rounded at each call | rounded once | once / at each call | apart |")
    print("|---" * 6 + "|")
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        for rows in options.observations:
            seen = {PLAIN: torch.from_numpy(rng.integers(256, size=(rows, 4, 84, 84), dtype=np.uint8))}
            apart = float((at_each_call(seen) - rounded.values(seen)).abs().max())
            times: dict[str, list[float]] = {name: [] for name in forms}
            for _ in range(options.rounds):
                for name, form in forms.items():
                    times[name].append(1e6 / per_second(partial(form, seen), SECONDS) / rows)
            us = {name: statistics.median(found) for name, found in times.items()}
            ratio = statistics.median(np.divide(times["once"], times["at each call"]))
            shown = " | ".join(f"{us[name]:.0f}" for name in forms)
            print(f"| {rows} | {shown} | {ratio:.2f} | {apart:.4f} |", flush=True)


if __name__ == "__main__":
    main()
