"""Times forward and backward of Double DQN with the Nature network on a GPU, and finds the best block sizes.

    PYTHONPATH=src python benchmarks/gpu/nature_update.py [--batches 32 256 1024] [--no-tuning] [--no-baseline]
        [--padding same] [--precision tf32]

For each batch size: relative errors of the gradients against eager float32 (those of bfloat16 autocast beside them),
the time of every launch with every candidate (one that fails is printed and left out), the best table, ready for
`qfleet/accel/nature_tiles.py`, and the time of the whole by it; at the end the same work by torch.compile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from qfleet.accel import nature
from qfleet.accel.kernels.conv import Tile
from qfleet.accel.nature import NatureGradient
from qfleet.accel.nature_tiles import NatureTiles, for_float32, tiles_for
from qfleet.accel.precision import Precision, autocast, set_matrix_format
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.losses import compute_loss
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.torsos import NatureConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch

ACTIONS = 18
AGENT = ReplayAgent(double=True)
LAUNCHES = (
    "pack", "conv1", "conv2", "conv3", "dense", "head", "loss", "head_backward", "dense_weight", "dense_input",
    "conv3_weight", "conv3_input", "conv2_weight", "conv2_input", "conv1_weight", "fold",
)  # fmt: skip
WRAPPERS = (
    "pack", "frames_forward", "conv_forward", "conv_partials", "head_forward", "scalar_gradient", "head_backward",
    "conv_backward_weight", "conv_backward_input", "frames_backward_weight", "fold",
)  # fmt: skip
BASELINE_SECONDS = 35
"""A compilation by torch.compile takes about as long; none is begun with less time left."""
Change = dict[str, Any]
Work = Callable[[], Any]


@dataclass(frozen=True)
class Kind:
    """Which network is timed, in which format."""

    padding: Literal["valid", "same"]
    precision: Precision

    def networks(self) -> list[QNetwork]:
        leaf = LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)
        spec = EnvSpec(name="frames", observations={PLAIN: leaf}, actions=ACTIONS)
        return [build_network(NatureConfig(padding=self.padding), AGENT, spec, seed).cuda() for seed in (1, 2)]

    def tiles(self, size: int) -> NatureTiles:
        return tiles_for(size, torch.bfloat16 if self.precision == "bf16" else torch.float32)


Job = tuple[Kind, int, str, Change]


def make_batch(size: int, channels_last: bool = False) -> TensorBatch:
    generator = torch.Generator("cuda").manual_seed(0)
    frames = torch.randint(0, 256, (2, size, 4, 84, 84), generator=generator, dtype=torch.uint8, device="cuda")
    if channels_last:
        frames = frames.permute(0, 1, 3, 4, 2).contiguous()
    return TensorBatch(
        observation={PLAIN: frames[0]},
        next_observation={PLAIN: frames[1]},
        action=torch.randint(0, ACTIONS, (size,), generator=generator, device="cuda"),
        reward=torch.randn(size, generator=generator, device="cuda"),
        discount=torch.full((size,), 0.99, device="cuda"),
        weight=torch.rand(size, generator=generator, device="cuda"),
        mask=None,
        next_mask=None,
        size=size,
    )


@dataclass
class Setup:
    """Two networks in flat memory, and the same batch in both layouts."""

    kind: Kind
    networks: list[QNetwork]
    flats: list[FlatParameters]
    planes: TensorBatch
    last: TensorBatch

    @classmethod
    def make(cls, kind: Kind, size: int) -> Setup:
        networks = kind.networks()
        flats = [FlatParameters(network) for network in networks]
        return cls(kind, networks, flats, make_batch(size), make_batch(size, channels_last=True))

    def gradient(
        self, tiles: NatureTiles, last: bool = False, precision: Precision | None = None, streams: int = 2
    ) -> Work:
        """Return a whole update but for sampling and optimiser."""
        used = precision or self.kind.precision
        fast = NatureGradient(AGENT, self.flats[0], *self.networks, used, last, tiles)
        if streams == 1:
            fast._side = None
        return lambda: fast.replay(self.last if last else self.planes)


def recorded(work: Work) -> dict[str, Work]:
    """Return the launches of the work by name, each to be made alone; nothing is launched here."""
    calls: list[Work] = []
    plain = {name: getattr(nature, name) for name in WRAPPERS}

    def noting(wrapper: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: calls.append(lambda: wrapper(*args, **options))

    for name, wrapper in plain.items():
        setattr(nature, name, noting(wrapper))
    try:
        work()
    finally:
        for name, wrapper in plain.items():
            setattr(nature, name, wrapper)
    return dict(zip(LAUNCHES, calls, strict=True))


def microseconds(work: Work, repeats: int = 10, replays: int = 9) -> float:
    """Return the median time of one call inside a CUDA graph of several."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(times)[len(times) // 2]


def candidates(kind: Kind, size: int) -> dict[str, list[Change]]:
    """Return what to try for each launch; shapes that do not fit the layer fail and are left out."""
    tried = bfloat16_candidates(size)
    if kind.precision == "bf16":
        return tried
    return {name: [{**change, **widened(change)} for change in changes] for name, changes in tried.items()}


def widened(change: Change) -> Change:
    """Return the blocks among a change, for float32."""
    return {name: for_float32(tile) for name, tile in change.items() if isinstance(tile, Tile)}


def bfloat16_candidates(size: int) -> dict[str, list[Change]]:

    def tiles(
        name: str, rows: Iterable[int], columns: Iterable[int], depths: Iterable[int], stages: Iterable[int]
    ) -> list[Change]:
        sides = product(rows, columns, depths, stages)
        return [{name: Tile(r, c, d, 8 if r * max(c, 64) > 8192 else 4, s)} for r, c, d, s in sides]

    def splits(name: str, changes: list[Change], counts: Iterable[int]) -> list[Change]:
        return [{**change, f"{name}_splits": count} for change in changes for count in counts]

    if size <= 128:
        return {
            "conv1": [*tiles("conv1", (64, 128), (32,), (64,), (1, 3, 4)), {"conv1": Tile(128, 32, 64, 8, 3)}],
            "conv2": tiles("conv2", (32, 64, 128), (32, 64), (64,), (4,))
            + tiles("conv2", (64,), (64,), (128,), (3, 4)),
            "conv3": tiles("conv3", (32, 64), (32, 64), (64,), (3, 5)),
            "dense": splits("dense", tiles("dense", (32, 64), (32, 64, 128), (64,), (4, 7)), (7,)),
            "head": [{"head_together": together} for together in (False, True)],
            "head_backward": [{"head_splits": count} for count in (2, 4, 8, 16)],
            "dense_weight": tiles("dense_weight", (64,), (64, 128, 256), (32,), (1,)),
            "dense_input": tiles("dense_input", (32, 64), (32, 64), (64, 128), (3,)),
            "conv3_weight": splits("conv3", tiles("conv3_weight", (64,), (32, 64), (64, 128), (2,)), (8, 16)),
            "conv3_input": tiles("conv3_input", (32, 64), (32, 64), (64,), (3, 5)),
            "conv2_weight": splits("conv2", tiles("conv2_weight", (64, 128), (64,), (64, 128), (3,)), (16, 32)),
            "conv2_input": tiles("conv2_input", (32, 64, 128), (32, 64, 128), (64,), (4,)),
            "conv1_weight": splits("conv1", tiles("conv1_weight", (64, 128), (64,), (64,), (1, 3)), (32, 64, 128)),
        }
    return {
        "conv1": [*tiles("conv1", (128, 256), (32,), (64,), (1, 2, 3)), {"conv1": Tile(128, 32, 64, 8, 3)}],
        "conv2": tiles("conv2", (64, 128, 256), (64,), (64, 128), (1, 3)),
        "conv3": tiles("conv3", (64, 128, 256), (64,), (64,), (1, 2, 3, 4)),
        "dense": splits("dense", tiles("dense", (128,), (64, 128, 256), (64,), (3, 4)), (1, 7) if size < 512 else (1,)),
        "head": [{"head_together": together} for together in (False, True)],
        "head_backward": [{"head_splits": count} for count in (8, 16, 32, 64)],
        "dense_weight": tiles("dense_weight", (64,), (64, 128, 256), (64, 128), (2, 3)),
        "dense_input": tiles("dense_input", (64, 128, 256), (64,), (64, 128), (3,)),
        "conv3_weight": splits("conv3", tiles("conv3_weight", (64,), (64,), (64, 128), (1, 3)), (16, 32, 64)),
        "conv3_input": tiles("conv3_input", (64, 128, 256), (64,), (64,), (1, 2, 3, 4)),
        "conv2_weight": splits("conv2", tiles("conv2_weight", (64, 128, 256), (64,), (64,), (1, 3)), (32, 64)),
        "conv2_input": tiles("conv2_input", (64, 128, 256), (64, 128), (64,), (1, 3)),
        "conv1_weight": splits("conv1", tiles("conv1_weight", (64, 128), (64,), (64,), (1, 2, 3)), (128, 256)),
    }


def compile_some(jobs: list[Job]) -> int:
    """Compile candidates into Triton's cache on disk; return how many could be."""
    done = 0
    setups: dict[int, Setup] = {}
    for kind, size, name, change in jobs:
        try:
            setup = setups.get(size) or Setup.make(kind, size)
            setups[size] = setup
            recorded(setup.gradient(replace(kind.tiles(size), **change)))[name]()
            done += 1
        except Exception:  # the process that times it will say what is wrong
            continue
    return done


def compile_all(kind: Kind, sizes: list[int], workers: int) -> None:
    """Compile all candidates at once, in processes of their own."""
    begin = time.monotonic()
    jobs = [
        (kind, size, name, change)
        for size in sizes
        for name, found in candidates(kind, size).items()
        for change in found
    ]
    shares = [jobs[number::workers] for number in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = sum(pool.map(compile_some, shares))
    print(f"compiled {done} of {len(jobs)} candidates in {time.monotonic() - begin:.0f} s", flush=True)


def tune(setup: Setup, size: int, stop_at: float) -> NatureTiles:
    """Print the times of the best candidates of each launch; return the best."""
    best = setup.kind.tiles(size)
    for name, changes in candidates(setup.kind, size).items():
        times: list[tuple[float, Change]] = []
        for change in [{}, *changes]:
            if time.monotonic() > stop_at:
                print("  out of time: the rest keeps its block sizes")
                return best
            try:
                times.append((microseconds(recorded(setup.gradient(replace(best, **change)))[name]), change))
            except Exception as problem:  # one bad candidate must not cost the others
                print(f"  {name} {describe(change)}: {type(problem).__name__}: {str(problem)[:100]}")
        times.sort(key=lambda pair: pair[0])
        best = replace(best, **times[0][1]) if times else best
        print(f"  {name:13s} " + ", ".join(f"{us:.1f} {describe(change)}" for us, change in times[:5]), flush=True)
    return best


def describe(change: Change) -> str:
    return " ".join(str(tuple(value)) if isinstance(value, Tile) else f"x{value}" for value in change.values()) or "now"


def print_errors(setup: Setup, tiles: NatureTiles) -> None:
    """Print how far the gradients are from eager float32, layer by layer: ours and autocast's."""
    flat = setup.flats[0]
    eager = EagerGradient(AGENT, flat, *setup.networks)
    eager.replay(setup.planes)
    exact = flat.gradients.clone()

    def rounded() -> None:
        with autocast("bf16", torch.device("cuda")):
            eager.replay(setup.planes)

    works = {
        "fp32 kernels": setup.gradient(tiles_for(32, torch.float32), precision="fp32"),
        f"{setup.kind.precision} kernels": setup.gradient(tiles),
        "channels last": setup.gradient(tiles, last=True),
        "bf16 autocast": rounded,
    }
    print("  relative errors of the gradients:")
    for label, work in works.items():
        flat.gradients.fill_(7.0)
        attempt(label, work)
        parts = []
        for parameter in setup.networks[0].parameters():
            start = parameter.data.storage_offset()
            ours, theirs = (tensor[start : start + parameter.numel()] for tensor in (flat.gradients, exact))
            parts.append(float((ours - theirs).norm() / theirs.norm()))
        print(f"    {label:18s} " + " ".join(f"{part:.1e}" for part in parts), flush=True)


def print_launches(setup: Setup, tiles: NatureTiles) -> None:
    times = {name: microseconds(call) for name, call in recorded(setup.gradient(tiles)).items()}
    print("  each alone, us: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
    print(f"  their sum {sum(times.values()):.1f} us")
    last = recorded(setup.gradient(tiles, last=True))
    parts = [f"{name} {microseconds(last[name]):.1f}" for name in ("conv1", "conv1_weight")]
    print("  channels last: " + ", ".join(parts), flush=True)


def print_whole(label: str, work: Work, size: int) -> None:
    us = microseconds(work, repeats=8)
    print(f"  {label:28s} {us:8.1f} us  {1e6 / us:8.0f} updates/s  {size / us:6.2f} M transitions/s", flush=True)


def baseline(kind: Kind, size: int) -> Work:
    """Return the same work by torch.compile: channels-last autograd in the same format."""
    online, target = (network.to(memory_format=torch.channels_last) for network in kind.networks())
    batch = make_batch(size)
    set_matrix_format(kind.precision)

    def loss() -> Tensor:
        with autocast(kind.precision, torch.device("cuda")):
            found = compute_loss(AGENT, online, target, batch)
        return torch.dot(found.per_sample.float(), batch.weight) / batch.size

    compiled = torch.compile(loss)

    def work() -> None:
        for parameter in online.parameters():
            parameter.grad = None
        compiled().backward()

    return work


def attempt(what: str, work: Work) -> Any:
    """Do a part of the benchmark; print what goes wrong and go on."""
    try:
        return work()
    except Exception as problem:
        print(f"  {what} failed: {type(problem).__name__}: {str(problem)[:400]}", flush=True)
        return None


def study(kind: Kind, size: int, tuning: bool, stop_at: float) -> None:
    """Print everything about one batch size but the baseline."""
    setup, tiles = Setup.make(kind, size), kind.tiles(size)
    print(f"batch {size}", flush=True)
    attempt("the comparison", lambda: print_errors(setup, tiles))
    attempt("the whole", lambda: print_whole("as shipped", setup.gradient(tiles), size))
    if tuning:
        tiles = attempt("tuning", lambda: tune(setup, size, stop_at)) or tiles
        print(f"  {tiles!r}")
        attempt("the tuned", lambda: print_whole("tuned", setup.gradient(tiles), size))
    attempt("one stream", lambda: print_whole("on one stream", setup.gradient(tiles, streams=1), size))
    attempt("channels last", lambda: print_whole("channels last", setup.gradient(tiles, last=True), size))
    attempt("single launches", lambda: print_launches(setup, tiles))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--no-tuning", action="store_true")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--padding", choices=["valid", "same"], default="valid")
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=145)
    options = parser.parse_args()
    begin, kind = time.monotonic(), Kind(options.padding, options.precision)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if not options.no_tuning:
        attempt("compilation", lambda: compile_all(kind, options.batches, options.workers))
    for size in options.batches:
        study(kind, size, not options.no_tuning, stop_at=begin + 0.7 * options.seconds)
        print(f"  [{time.monotonic() - begin:.0f} s]", flush=True)
    for size in [] if options.no_baseline else options.batches[:1] + options.batches[1:][-1:]:
        if begin + options.seconds - time.monotonic() > BASELINE_SECONDS:
            label = f"torch.compile, {size}"
            attempt(label, lambda size=size, label=label: print_whole(label, baseline(kind, size), size))


if __name__ == "__main__":
    main()
