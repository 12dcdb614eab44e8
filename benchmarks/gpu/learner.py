"""Checks and times whole updates of Double DQN with the Nature network and prioritised replay on a GPU.

    PYTHONPATH=src python benchmarks/gpu/learner.py [--batches 32 256 1024 2048] [--seconds 100]

A grid of a million random frames (8 GB) is filled. One update is compared with eager float32, then all are timed: ours
(own kernels, bfloat16, recorded), torch's pieces (tf32, compiled, recorded) and plain eager float32. Then prioritised
draws alone, where an update's time goes, and what a NaN among the rewards does. Less than two minutes: the compilers
work in processes of their own while the grid is filled.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from qfleet.accel.gradients import WrappedGradient
from qfleet.accel.nature import NatureGradient
from qfleet.accel.precision import set_matrix_format
from qfleet.accel.steps import DeviceStep
from qfleet.algo.gradients import EagerGradient, GradientFactory
from qfleet.algo.steps import GradientStep
from qfleet.algo.updates import ReplayUpdate
from qfleet.bench.nature import AGENT, ENVS, LENGTH, OPTIM, Learning, Sampling, build, filled_grid
from qfleet.bench.timing import per_second
from qfleet.replay.grid import REWARD, Grid

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECORDED = DEVICE.type == "cuda"
TORCH: GradientFactory = partial(WrappedGradient, precision="tf32", compiled=True)
BEGAN = time.monotonic()
LEFT_FOR_COMPILED = 12
"""Seconds that a compiled baseline takes, at least: it is traced anew even when its code is cached."""


def say(text: str) -> None:
    print(text, flush=True)


def attempt(what: str, work: Callable[[], object]) -> None:
    """Do one part; say what went wrong in a line, and go on."""
    try:
        work()
    except Exception as problem:
        first = (str(problem).strip().splitlines() or [""])[0]
        say(f"  {what} FAILED: {type(problem).__name__}: {first[:300]}")


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def plain_of(grid: Grid) -> Grid:
    """The same rows and priorities, drawn from by torch's operations: a second grid would take as long to fill."""
    plain = copy.copy(grid)
    plain.__class__ = Grid
    return plain


def at_once(batch: int) -> int:
    return 32 if batch <= 64 else 8


# ---------------------------------------------------------------------------------------------------- compilation


def compile_ahead(gradient: GradientFactory, stepper: Callable[..., DeviceStep], batch: int) -> None:
    """Make two updates from a small grid: their kernels are then in the caches on disk."""
    set_matrix_format("tf32")
    numbers = generator()
    Learning(filled_grid(64, 8, numbers), build(gradient, stepper, numbers), batch, 2, recorded=False)()


def start_compilers(batches: list[int]) -> list[multiprocessing.process.BaseProcess]:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each job is a process already
    context = multiprocessing.get_context("spawn")
    jobs = [(gradient, DeviceStep, batch) for gradient in (NatureGradient, TORCH) for batch in batches]
    started = [context.Process(target=compile_ahead, args=job, daemon=True) for job in jobs]
    for process in started:
        process.start()
    return started


def end_compilers(started: list[multiprocessing.process.BaseProcess], until: float) -> None:
    for process in started:
        process.join(max(until - time.monotonic(), 0.1))
        if process.is_alive():
            process.terminate()
    say(f"compilers: exit codes {[process.exitcode for process in started]}  [{time.monotonic() - BEGAN:.0f} s]")


# ---------------------------------------------------------------------------------------------------- comparison


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def gradient_errors(update: ReplayUpdate, exact: Tensor) -> str:
    """Relative errors of the flat gradient, for each parameter in the network's order."""
    parts = []
    for parameter in update.online.parameters():
        start = parameter.data.storage_offset()
        ours, theirs = (flat[start : start + parameter.numel()] for flat in (update.flat.gradients, exact))
        parts.append(f"{relative(ours, theirs):.1e}")
    return " ".join(parts)


def compare(grid: Grid, batch: int) -> None:
    """Print how one update differs from eager float32 at every stage."""
    set_matrix_format("fp32")
    plain, beta = plain_of(grid), torch.full((), 0.5, device=DEVICE)
    uniform = torch.rand(1, batch, dtype=torch.float64, generator=generator(2), device=DEVICE)
    drawn, theirs = grid.sample_at(uniform, beta), plain.sample_at(uniform, beta)
    rows = int((drawn.index != theirs.index).sum())
    expected = plain.transitions(drawn.index, theirs.batch.weight)
    leaves = zip(drawn.batch.observation.values(), expected.batch.observation.values(), strict=True)
    following = zip(drawn.batch.next_observation.values(), expected.batch.next_observation.values(), strict=True)
    same = all(torch.equal(a, b) for a, b in [*leaves, *following])
    weights = relative(drawn.batch.weight, theirs.batch.weight)
    say(f"  sample: {rows} of {batch} rows differ, frames equal {same}, weights {weights:.1e}")

    update = build(NatureGradient, DeviceStep, generator())
    update.target_flat.parameters.mul_(0.9)  # so that it matters which network is asked
    networks = (AGENT, update.flat, update.online, update.target)
    exact = EagerGradient(*networks).replay(drawn.batch)
    gradients = update.flat.gradients.clone()
    rounded = WrappedGradient(*networks, precision="bf16", compiled=False).replay(drawn.batch)
    say(f"  gradients, bf16 autocast   {gradient_errors(update, gradients)}")
    say(f"  priorities, bf16 autocast  {relative(rounded.priority, exact.priority):.1e}")
    twin = GradientStep(copy.deepcopy(update.online), OPTIM, None, None)
    held = copy.deepcopy(plain.priorities)
    assert held is not None
    assert grid.priorities is not None
    learned = update.learn(drawn.batch)
    say(f"  gradients, ours            {gradient_errors(update, gradients)}")
    say(f"  priorities, ours           {relative(learned.priority, exact.priority):.1e}")
    twin.flat.gradients.copy_(update.flat.gradients)
    twin(learned.metrics["loss"].clone())
    grid.update_priorities(drawn.index, drawn.generation, learned.priority)
    held.update(drawn.index, torch.ones_like(drawn.index, dtype=torch.bool), learned.priority)
    moved = (update.flat.parameters - twin.flat.parameters).abs().max().item()
    tree = relative(grid.priorities.tree.sums, held.tree.sums)
    say(f"  weights after a step: largest difference {moved:.1e}; nodes of the tree {tree:.1e}")


def refuse_nan(grid: Grid, learning: Learning) -> None:
    """Say what updates from NaN rewards change: nothing may."""
    update = learning.update
    assert grid.priorities is not None
    state = [update.flat.parameters, update.target_flat.parameters, grid.priorities.tree.sums, grid.priorities._scalars]
    before, made = [tensor.clone() for tensor in state], update.updates
    rewards = grid.fields[REWARD].clone()
    grid.fields[REWARD].fill_(float("nan"))
    learning()
    grid.fields[REWARD].copy_(rewards)
    _report_unchanged("recorded updates, all rewards NaN", state, before, update.updates - made)
    sample = grid.sample(learning.batch, learning.beta)
    reward = sample.batch.reward.clone()
    reward[learning.batch // 2] = float("nan")
    learned = update.learn(replace(sample.batch, reward=reward))
    grid.update_priorities(sample.index, sample.generation, learned.priority)
    _report_unchanged("one update, one reward NaN", state, before, update.updates - made)
    learning()
    made = update.updates - made
    say(f"  afterwards: {made} of {learning.at_once} updates made, loss {float(learned_loss(learning)):.3g}")


def _report_unchanged(what: str, state: list[Tensor], before: list[Tensor], made: int) -> None:
    names = ("weights", "target", "tree", "maximum")
    changed = [name for name, now, then in zip(names, state, before, strict=True) if not torch.equal(now, then)]
    say(f"  {what}: {'CHANGED ' + ', '.join(changed) if changed or made else 'nothing changed'}, {made} made")


def learned_loss(learning: Learning) -> Tensor:
    return learning.latest.metrics["loss"]


# ---------------------------------------------------------------------------------------------------- times


def show_rate(what: str, batch: int, learning: Learning) -> None:
    rate = per_second(learning, 0.5) * learning.at_once
    figures = f"{1e6 / rate:9.1f} us  {rate:9,.0f} updates/s  {rate * batch / 1e6:7.3f} M transitions/s"
    say(f"  {what:34} batch {batch:5}  {figures}  loss {float(learned_loss(learning)):.3g}")


def time_torch(grid: Grid, batch: int, stop_at: float) -> None:
    if time.monotonic() > stop_at - LEFT_FOR_COMPILED:
        say(f"  torch, tf32 compiled, batch {batch}: left out, no time")
        return
    set_matrix_format("tf32")
    update = build(TORCH, DeviceStep, grid.generator)
    show_rate(
        "torch, tf32, compiled, recorded", batch, Learning(plain_of(grid), update, batch, at_once(batch), RECORDED)
    )


def time_eager(grid: Grid, batch: int) -> None:
    set_matrix_format("fp32")
    update = build(EagerGradient, GradientStep, grid.generator)
    show_rate("torch, fp32, eager", batch, Learning(plain_of(grid), update, batch, 4, recorded=False))


def time_sampling(grid: Grid, batch: int) -> None:
    for what, source in (("ours", grid), ("torch", plain_of(grid))):
        work = Sampling(source, batch, 8, RECORDED)
        rate = per_second(work, 0.3) * work.at_once
        say(f"  {what:6} batch {batch:5}  {1e6 / rate:9.1f} us  {rate * batch / 1e6:7.2f} M transitions/s")


def show_profile(learning: Learning, rows: int = 15) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            learning()
        torch.cuda.synchronize()
    updates = 4 * learning.at_once
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total, count = sum(event.self_device_time_total for event in events), sum(event.count for event in events)
    say(f"  batch {learning.batch}: {total / updates:,.1f} us in {count / updates:.1f} kernels an update")
    for event in events[:rows]:
        share = event.self_device_time_total / updates
        say(f"    {share:8.2f} us {event.count / updates:5.1f} x  {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256, 1024, 2048])
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--envs", type=int, default=ENVS)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    stop_at, started = BEGAN + options.seconds, start_compilers(options.batches) if RECORDED else []
    grid = filled_grid(options.length, options.envs, generator())
    say(
        f"{type(grid).__name__}: {grid.rows:,} rows, {int(grid.count):,} sampleable  [{time.monotonic() - BEGAN:.0f} s]"
    )
    end_compilers(started, BEGAN + 0.6 * options.seconds)
    say("one update against eager float32, relative errors")
    attempt("comparison", lambda: compare(grid, min(256, max(options.batches))))
    say("whole updates")
    ours: dict[int, Learning] = {}

    def time_ours(batch: int) -> None:
        update = build(NatureGradient, DeviceStep, grid.generator)
        ours[batch] = Learning(grid, update, batch, at_once(batch), RECORDED)
        show_rate("ours, bf16, recorded", batch, ours[batch])

    for batch in options.batches:
        attempt(f"ours, batch {batch}", lambda batch=batch: time_ours(batch))
    say("prioritised draws alone, five frames each")
    for batch in (1024, 8192) if RECORDED else (8,):
        attempt(f"draws, batch {batch}", lambda batch=batch: time_sampling(grid, batch))
    say(f"not a number  [{time.monotonic() - BEGAN:.0f} s]")
    if ours:
        attempt("NaN", lambda: refuse_nan(grid, next(iter(ours.values()))))
    say("where the time goes")
    for batch in (32, 1024):
        if batch in ours:
            attempt(f"profile, batch {batch}", lambda batch=batch: show_profile(ours[batch]))
    say(f"baselines  [{time.monotonic() - BEGAN:.0f} s]")
    for batch in options.batches:
        attempt(f"eager, batch {batch}", lambda batch=batch: time_eager(grid, batch))
    for batch in sorted(options.batches, key=lambda batch: batch not in (32, 1024)):
        attempt(f"compiled, batch {batch}", lambda batch=batch: time_torch(grid, batch, stop_at))
    say(f"[{time.monotonic() - BEGAN:.0f} s]")


if __name__ == "__main__":
    main()
