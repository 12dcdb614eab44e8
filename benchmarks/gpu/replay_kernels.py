"""Checks the replay's kernels against torch on a GPU with a million frames, and times them.

    PYTHONPATH=src python benchmarks/gpu/replay_kernels.py

Takes 9 GB of GPU memory and less than a minute. Each figure is the median over replays of one CUDA graph with many
launches, each of which draws other rows, so that the frames come from memory and not from the cache.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from qfleet.accel.kernels import replay, tree
from qfleet.accel.kernels.replay import FrameGrid, gather_pairs
from qfleet.accel.kernels.tree import Draw, PriorityRule, Records, descend, empty_draw, replace_rows, write_priorities
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.samplers import PrioritisedConfig

DEVICE = torch.device("cuda")
TICKS, ENVS, SIDE = 62_500, 16, 84
ROWS, PIXELS = TICKS * ENVS, SIDE * SIDE
ROUNDS = {32: 100, 1024: 20, 8192: 6}
"""Launches in one graph, by batch size: together they read more than the cache holds."""
RULE = PrioritisedConfig()


@dataclass
class World:
    """A full grid with a tree of random priorities."""

    grid: FrameGrid
    records: Records
    priorities: DevicePriorities
    rule: PriorityRule
    beta: Tensor


def make_world(n_step: int) -> World:
    torch.manual_seed(1)
    frames = torch.empty(ROWS, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
    for part in frames.split(100_000):
        part.random_(0, 256)
    age = torch.randint(0, 256, (ROWS,), device=DEVICE).to(torch.uint8)
    ahead = torch.randint(1, n_step + 1, (ROWS,), device=DEVICE).float()
    stamp = torch.arange(TICKS, device=DEVICE)
    records = Records(ahead.clone(), torch.randn(ROWS, device=DEVICE), ahead.clone(), stamp, ENVS)
    priorities = DevicePriorities(RULE, ROWS, DEVICE)
    priorities.tree.set(torch.arange(ROWS, device=DEVICE), torch.rand(ROWS, device=DEVICE) + 1e-3)
    scalars = (priorities.highest, priorities.unit, priorities.fresh)
    rule = PriorityRule(
        *scalars, RULE.alpha, RULE.epsilon, RULE.max_decay, torch.tensor(TICKS, device=DEVICE), TICKS - 8
    )
    return World(FrameGrid(frames, age, ahead, ENVS), records, priorities, rule, torch.tensor(0.5, device=DEVICE))


# ---------------------------------------------------------------------- equality


def stacks(grid: FrameGrid, rows: Tensor, padding: str) -> Tensor:
    """Return what `gather_pairs` should write, [2, B, 4, 84, 84], by plain indexing."""
    age = grid.age[rows].long().unsqueeze(1)
    both = []
    for newest in (torch.zeros_like(rows), grid.ahead[rows].long()):
        step = newest.unsqueeze(1) + torch.arange(-3, 1, device=DEVICE)
        frames = grid.frames[(rows.unsqueeze(1) + step.maximum(-age) * ENVS) % ROWS]
        if padding == "zero":
            frames[step < -age] = 0
        both.append(frames)
    return torch.stack(both)


def check_gathers(world: World) -> None:
    items = torch.randint(0, ROWS, (500,), device=DEVICE)
    items[0], items[1] = 0, ROWS - 1
    for padding in ("zero", "repeat"):
        expected = stacks(world.grid, items, padding)
        out = torch.empty(2, 500, 4, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
        assert torch.equal(gather_pairs(world.grid, items, 3, padding, out, False), expected), f"pairs {padding}"
        last = torch.empty(2, 500, SIDE, SIDE, 4, dtype=torch.uint8, device=DEVICE)
        gather_pairs(world.grid, items, 3, padding, last, True)
        assert torch.equal(last.permute(0, 1, 4, 2, 3), expected), f"pairs, channels last, {padding}"


def check_draws(world: World) -> None:
    for size in ROUNDS:
        uniform = torch.rand(size, dtype=torch.float64, device=DEVICE)
        drawn = descend(world.priorities.tree, uniform, world.beta, world.records, empty_draw(size, DEVICE))
        row, value = world.priorities.tree.draw(uniform)
        others = int((drawn.row != row).sum())
        # masses within the rounding of a sum of a border between two leaves may go either way
        assert others <= size // 100 + 1, f"descend: {others} of {size} rows differ"
        same = drawn.row == row
        torch.testing.assert_close(drawn.value[same], value[same], rtol=0.0, atol=0.0)
        weight = (world.priorities.tree.minimum / drawn.value) ** world.beta
        torch.testing.assert_close(drawn.weight, weight, rtol=1e-5, atol=0.0)
        assert torch.equal(drawn.reward, world.records.reward[drawn.row])
        assert torch.equal(drawn.action, world.records.action[drawn.row].long())
        assert torch.equal(drawn.generation, world.records.stamp[drawn.row // ENVS])
        print(f"descend, B = {size}: {others} rows differ from torch's")


def check_writes(world: World) -> None:
    for size in ROUNDS:
        priorities = DevicePriorities(RULE, ROWS, DEVICE)
        priorities.load_state_dict(world.priorities.state_dict())
        index = torch.randint(0, ROWS, (size,), device=DEVICE)
        index[: size // 4] = index[size // 2 : size // 2 + size // 4]
        priority = torch.randn(size, device=DEVICE).exp()
        priority[::17] = torch.nan
        generation = index // ENVS
        write_priorities(world.priorities.tree, index, generation, priority, world.rule)
        priorities.update(index, generation >= world.rule.ticks - world.rule.span, priority)
        start, added = torch.tensor([ROWS - ENVS, 0], device=DEVICE), torch.ones(ENVS, device=DEVICE)
        replace_rows(world.priorities.tree, start, added, world.priorities.fresh)
        priorities.replace_rows(start, added)
        for name in ("highest", "unit", "fresh"):
            torch.testing.assert_close(getattr(world.priorities, name), getattr(priorities, name), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(world.priorities.tree.sums, priorities.tree.sums, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(world.priorities.tree.mins, priorities.tree.mins, rtol=1e-5, atol=0.0)


# ---------------------------------------------------------------------- time


def graph_us(call: Callable[[int], object], rounds: int) -> float:
    """Return the microseconds of one call in a graph of `rounds` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(2):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(rounds):
            call(number)
    return statistics.median(event_us(lambda _: graph.replay(), 1) for _ in range(7)) / rounds


def event_us(call: Callable[[int], object], rounds: int) -> float:
    """Return the microseconds of one call, launched from Python `rounds` times in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for number in range(rounds):
        call(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / rounds


def report(name: str, size: int, bytes_each: float, call: Callable[[int], object]) -> None:
    """Print one row of the table; a call that fails is told of and left out."""
    try:
        eager, us = event_us(call, 3), graph_us(call, ROUNDS[size])
        eager = event_us(call, 20 if size < 8192 else 6)
    except Exception:
        print(f"{name:<46}{size:>6}  failed\n{traceback.format_exc(limit=3)}")
        torch.cuda.synchronize()
        return
    rate = f"{bytes_each * size / us / 1000:>9.0f}" if bytes_each else " " * 9
    print(f"{name:<46}{size:>6}{eager:>10.1f}{us:>10.2f}{rate}{size / us:>12.2f}", flush=True)


def time_gathers(world: World, size: int) -> None:
    grid, rounds = world.grid, ROUNDS[size]
    rows = torch.randint(0, ROWS, (rounds, size, 5), device=DEVICE)
    items = rows[:, :, 0].contiguous()
    five = torch.empty(size, 5, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
    report("torch index_select, 5 frames", size, 10 * PIXELS, lambda i: torch.index_select(
        grid.frames, 0, rows[i].view(-1), out=five.view(-1, SIDE, SIDE)))  # fmt: skip
    pairs = torch.empty(2, size, 4, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
    last = pairs.view(2, size, SIDE, SIDE, 4)
    moved = (4 + float(grid.ahead.mean()) + 8) * PIXELS
    for threads in (128, 64, 256):
        replay.THREADS = threads
        name = f"{threads} threads"
        report(f"gather_pairs, {name}", size, moved, lambda i: gather_pairs(grid, items[i], 3, "zero", pairs, False))
        report(f"gather_pairs, channels last, {name}", size, moved, lambda i: gather_pairs(
            grid, items[i], 3, "zero", last, True))  # fmt: skip
    replay.THREADS = 128


def time_tree(world: World, size: int) -> None:
    held, rounds = world.priorities, ROUNDS[size]
    uniform = torch.rand(rounds, size, dtype=torch.float64, device=DEVICE)
    index = torch.randint(0, ROWS, (rounds, size), device=DEVICE)
    generation, priority = index // ENVS, torch.rand(rounds, size, device=DEVICE)
    draw = empty_draw(size, DEVICE)
    report("torch draw and weights", size, 0, lambda i: held.draw(uniform[i], world.beta))
    for many in (tree.MANY, 0 if size <= tree.MANY else size):
        before, tree.MANY = tree.MANY, many
        name = f"{1 if size <= many else 4} items a program"
        report(f"descend, {name}", size, 0, lambda i: descend(held.tree, uniform[i], world.beta, world.records, draw))
        tree.MANY = before
    report("torch update of priorities", size, 0, lambda i: held.update(index[i], generation[i] >= 0, priority[i]))
    for few in (tree.FEW, 0) if size <= tree.FEW else (tree.FEW,):
        before, tree.FEW = tree.FEW, few
        name = "one program" if size <= few else "a launch a level"
        report(f"write_priorities, {name}", size, 0, lambda i: write_priorities(
            held.tree, index[i], generation[i], priority[i], world.rule))  # fmt: skip
        tree.FEW = before


def time_sampling(world: World, size: int) -> None:
    """Time the whole of prioritised sampling, and with the write-back."""
    held, grid, draw = world.priorities, world.grid, empty_draw(size, DEVICE)
    pairs = torch.empty(2, size, 4, SIDE, SIDE, dtype=torch.uint8, device=DEVICE)
    moved = (4 + float(grid.ahead.mean()) + 8) * PIXELS
    priority = torch.rand(size, device=DEVICE)

    def sample(channels_last: bool) -> Draw:
        descend(held.tree, torch.rand(size, dtype=torch.float64, device=DEVICE), world.beta, world.records, draw)
        gather_pairs(grid, draw.row, 3, "zero", pairs.view(2, size, SIDE, SIDE, 4) if channels_last else pairs,
                     channels_last)  # fmt: skip
        return draw

    def sample_and_write(_: int) -> None:
        sample(True)
        write_priorities(held.tree, draw.row, draw.generation, priority, world.rule)

    report("sample: rand, descend, gather_pairs", size, moved, lambda _: sample(False))
    report("the same, channels last", size, moved, lambda _: sample(True))
    report("the same and write_priorities", size, moved, sample_and_write)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; {ROWS:,} frames")
    world = make_world(n_step=3)
    for check in (check_gathers, check_draws, check_writes):
        try:
            check(world)
            print(f"{check.__name__}: equal")
        except Exception:
            print(f"{check.__name__}: FAILED\n{traceback.format_exc(limit=3)}")
    print(f"\n{'':<46}{'B':>6}{'eager us':>10}{'graph us':>10}{'GB/s':>9}{'M items/s':>12}")
    for size in ROUNDS:
        time_gathers(world, size)
        time_tree(world, size)
        time_sampling(world, size)
    for envs in (16, 1024):
        start, added = torch.tensor([envs, 0], device=DEVICE), torch.ones(envs, device=DEVICE)
        held = world.priorities
        us = graph_us(lambda _: replace_rows(held.tree, start, added, held.fresh), 100)  # noqa: B023
        theirs = graph_us(lambda _: held.replace_rows(start, added), 100)  # noqa: B023
        print(f"replace_rows of {envs} environments: {us:.2f} us in a graph, torch {theirs:.2f}")


if __name__ == "__main__":
    main()
