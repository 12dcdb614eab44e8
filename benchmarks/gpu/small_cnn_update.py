"""Times PQN's update of MinAtar's network on a GPU: our kernels in each number format, and torch.compile beside them.

    PYTHONPATH=src python benchmarks/gpu/small_cnn_update.py [--batches 128 512 1024] [--no-sweep] [--no-baseline]

For each batch size: relative errors of the gradients against eager float32, parameter by parameter; the time of one of
64 recorded updates with the optimiser's step; the kernels it goes to; other block sizes, one changed at a time. At the
end the time to value observations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from nature_update import attempt, microseconds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from qfleet.accel.convolutions import compute_by_products
from qfleet.accel.gradients import WrappedGradient
from qfleet.accel.kernels.conv import Tile
from qfleet.accel.precision import Precision, autocast, set_matrix_format
from qfleet.accel.small_cnn import SmallCnnForward, SmallCnnGradient
from qfleet.accel.small_cnn_layout import shape_of
from qfleet.accel.small_cnn_tiles import SmallCnnTiles, tiles_for
from qfleet.accel.steps import DeviceStep
from qfleet.algo.agent import RolloutAgent
from qfleet.algo.gradients import EagerGradient
from qfleet.algo.networks import QNetwork, build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.rollouts import RolloutTensors
from qfleet.algo.torsos import SmallCnnConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec

UPDATES = 64
AGENT = RolloutAgent()
SPEC = EnvSpec(name="breakout", observations={PLAIN: LeafSpec(shape=(4, 10, 10), dtype="bool")}, actions=3)
FORMATS: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
Minibatch = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Setup:
    """A network with its optimiser, and a rollout in minibatches."""

    network: QNetwork
    step: DeviceStep
    data: RolloutTensors
    minibatches: list[Tensor]

    @classmethod
    def make(cls, batch: int) -> Setup:
        network = build_network(SmallCnnConfig(layer_norm=True), AGENT, SPEC, 1).cuda()
        step = DeviceStep(network, AdamConfig(lr=5e-4, max_grad_norm=10.0), None, None)
        generator, rows = torch.Generator("cuda").manual_seed(0), batch * UPDATES
        data = RolloutTensors(
            observation={PLAIN: torch.rand(rows, 4, 10, 10, generator=generator, device="cuda") < 0.1},
            action=torch.randint(0, 3, (rows,), generator=generator, device="cuda"),
            goal=torch.randn(rows, generator=generator, device="cuda"),
            weight=(torch.rand(rows, generator=generator, device="cuda") < 0.95).float(),
        )
        order = torch.randperm(rows, generator=generator, device="cuda")
        return cls(network, step, data, list(order.tensor_split(UPDATES)))

    def ours(self, precision: Precision, tiles: SmallCnnTiles | None = None) -> Minibatch:
        fast = SmallCnnGradient(AGENT, self.step.flat, self.network, None, precision, tiles)
        return lambda chosen: fast.regression_of(self.data, chosen)

    def copied(self, gradient: EagerGradient) -> Minibatch:
        data = self.data
        assert data.weight is not None
        tensors = (data.action, data.goal, data.weight)
        return lambda chosen: gradient.regression(
            {PLAIN: data.observation[PLAIN].index_select(0, chosen)},
            *(tensor.index_select(0, chosen) for tensor in tensors),
        )

    def time(self, minibatch: Minibatch, steps: bool = True) -> float:
        """Return the microseconds of one update inside a recording of all."""

        def work() -> None:
            for chosen in self.minibatches:
                loss, _ = minibatch(chosen)
                if steps:
                    self.step(loss)

        return microseconds(work, repeats=1) / UPDATES


def print_errors(setup: Setup) -> None:
    """Print how far each parameter's gradient is from eager float32, relative to its norm."""
    flat, chosen = setup.step.flat, setup.minibatches[0]
    set_matrix_format("fp32")
    eager = setup.copied(EagerGradient(AGENT, flat, setup.network, None))
    loss, value = eager(chosen)
    exact = flat.gradients.clone()
    rounded = setup.copied(WrappedGradient(AGENT, flat, setup.network, None, "bf16", compiled=False))
    works: dict[str, Minibatch] = {name: setup.ours(name) for name in FORMATS}
    for name, minibatch in {**works, "bf16 autocast": rounded}.items():
        flat.gradients.fill_(7.0)
        found = minibatch(chosen)
        again = flat.gradients.clone()
        minibatch(chosen)
        parts = []
        for parameter in setup.network.parameters():
            start = parameter.data.storage_offset() - flat.parameters.storage_offset()
            ours, theirs = (tensor[start : start + parameter.numel()] for tensor in (flat.gradients, exact))
            parts.append(float((ours - theirs).norm() / theirs.norm()))
        scalars = f"loss {float(found[0] - loss):+.1e}, value {float(found[1] - value):+.1e}"
        same = "same bits again" if torch.equal(again, flat.gradients) else "OTHER BITS AGAIN"
        print(f"  {name:13s} " + " ".join(f"{part:.1e}" for part in parts) + f"; {scalars}; {same}", flush=True)


def print_time(what: str, batch: int, us: float) -> None:
    print(f"  {what:30s} {us:7.1f} us  {1e6 / us:8,.0f} updates/s  {batch / us:6.2f} M samples/s", flush=True)


def print_kernels(setup: Setup) -> None:
    """Print the kernels of an update and what each takes."""
    minibatch = setup.ours("bf16")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for chosen in setup.minibatches:
            setup.step(minibatch(chosen)[0])
        torch.cuda.synchronize()
    for event in sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total):
        if event.self_device_time_total > 0:
            us, count = event.self_device_time_total / UPDATES, event.count / UPDATES
            print(f"    {us:6.2f} us {count:4.1f} x  {event.key[:90]}")


def candidates(tiles: SmallCnnTiles) -> dict[str, list[dict[str, Any]]]:
    """Return other block sizes: those of one launch at a time."""
    dense = [
        {"dense": Tile(rows, tiles.dense.columns, depth, warps, 3), "dense_splits": splits}
        for rows in (16, 32, 64)
        for depth, splits in ((32, 5), (32, 10), (64, 1), (64, 5), (64, 25))
        for warps in (4, 8)
    ]
    back = [
        {"weight": Tile(rows, columns, depth, warps, 2), "input": Tile(wide, 64, 64, warps, 2)}
        for rows, columns in ((64, 32), (64, 64), (128, 32))
        for depth in (64, 128)
        for wide in (32, 64, 128)
        for warps in (4, 8)
    ]
    front = [{"front_samples": samples, "front_warps": warps} for samples in (1, 2, 4) for warps in (2, 4, 8)]
    conv = [{"conv_programs": most, "conv_warps": warps} for most in (128, 256, 512) for warps in (4, 8)]
    return {"front": front, "dense": dense, "back": back, "conv": conv}


def sweep(setup: Setup, batch: int) -> None:
    """Print the times of whole gradients with the best blocks of each launch; each launch keeps its best."""
    best = tiles_for(batch, shape_of(setup.network))
    for name, changes in candidates(best).items():
        times: list[tuple[float, dict[str, Any]]] = []
        for change in [{}, *changes]:
            tiles = replace(best, **change)
            us = attempt(f"{name} {change}", lambda tiles=tiles: setup.time(setup.ours("bf16", tiles), steps=False))
            if us is not None:
                times.append((us, change))
        times.sort(key=lambda pair: pair[0])
        print(f"  {name:6s} " + "; ".join(f"{us:.1f} {change or 'now'}" for us, change in times[:4]), flush=True)
        best = replace(best, **times[0][1]) if times else best
    print_time("with the best blocks", batch, setup.time(setup.ours("bf16", best)))
    print(f"  {best!r}")


def baseline(batch: int) -> float:
    """Return the time of the same updates by torch.compile in bfloat16."""
    setup = Setup.make(batch)
    set_matrix_format("bf16")
    compute_by_products(setup.network)
    compiled = WrappedGradient(AGENT, setup.step.flat, setup.network, None, "bf16", compiled=True)
    return setup.time(setup.copied(compiled))


def print_values(rows: int) -> None:
    """Print how long it takes to value many observations: our kernels, and torch's in bfloat16."""
    setup = Setup.make(128)
    observation = {PLAIN: torch.rand(rows, 4, 10, 10, device="cuda") < 0.1}

    @torch.no_grad()
    def rounded() -> Tensor:
        with autocast("bf16", torch.device("cuda")):
            return setup.network.q(observation)

    ours = SmallCnnForward(setup.network, "bf16")
    error = float((ours.q(observation) - setup.network.q(observation).detach()).abs().max())
    us = [microseconds(work) for work in (lambda: ours.q(observation), rounded)]
    print(
        f"  {rows:7d} observations {us[0]:8.1f} us, torch {us[1]:8.1f} us; largest difference {error:.1e}", flush=True
    )


def study(batch: int, sweeping: bool, compared: bool) -> None:
    setup = Setup.make(batch)
    print(f"batch {batch}: relative errors of the gradients, of", end=" ")
    print(", ".join(name.removeprefix("torso.body.") for name, _ in setup.network.named_parameters()), flush=True)
    attempt("the comparison", lambda: print_errors(setup))
    for precision in FORMATS:
        work = setup.ours(precision)
        attempt(precision, lambda work=work, name=precision: print_time(f"kernels, {name}", batch, setup.time(work)))
    attempt("without steps", lambda: print_time("without steps", batch, setup.time(setup.ours("bf16"), steps=False)))
    attempt("the profile", lambda: print_kernels(setup))
    if sweeping:
        attempt("the sweep", lambda: sweep(setup, batch))
    if compared:
        attempt("torch.compile", lambda: print_time("torch.compile, bf16", batch, baseline(batch)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--no-baseline", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    for batch in options.batches:
        study(batch, sweeping=not options.no_sweep and batch == 512, compared=not options.no_baseline)
    for rows in (1024, 4096, 131072):
        attempt("values", lambda rows=rows: print_values(rows))


if __name__ == "__main__":
    main()
