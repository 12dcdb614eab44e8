"""Times a learner that processes feed with batches of the Nature network's frames, with and without working ahead.

    python benchmarks/gpu/feed.py [--batches 256 512 1024] [--sources 4] [--updates 300] [--profiled 50]

For each batch size, in turns: updates/s, the share of time in which kernels ran (and kernels or copies), and how fast
frames went up. The first two come from different updates, since a profile slows the host. Without a GPU there are no
shares; use `--batches 8 --updates 4` to see that it works.
"""

from __future__ import annotations

import argparse

import torch

from qfleet.bench.feed import Feeding, batch_bytes, measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--profiled", type=int, default=50)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, torch {torch.__version__}")
    print("| batch | learner | updates/s | frames fed, GB/s | kernels run | kernels or copies | copies up, GB/s |")
    print("|---|---|---|---|---|---|---|")
    for batch in options.batches:
        for ahead in (False, True):
            parts = {"warmup": options.warmup, "timed": options.updates, "profiled": options.profiled}
            found = measure(Feeding(DEVICE, batch, ahead, options.sources, **parts))
            rate, shares = found["updates_per_s"], [found.get(name) for name in ("kernels_busy", "device_busy")]
            figures = [f"{rate:,.0f}", f"{rate * batch_bytes(batch) / 1e9:.2f}"]
            figures += ["" if share is None else f"{share:.0%}" for share in shares]
            figures.append(f"{found.get('upload_gb_per_s', 0):.1f}")
            print(f"| {batch} | {'works ahead' if ahead else 'waits'} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
