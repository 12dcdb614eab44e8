"""The kernels on a real grid: what they draw, read and write is what the grid itself does in many operations."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton")

from qfleet.accel.kernels.replay import FrameGrid, gather_pairs
from qfleet.accel.kernels.tree import PriorityRule, Records, descend, empty_draw, replace_rows, write_priorities
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.replay.grid import ACTION, AHEAD, DISCOUNT, REWARD, Grid
from qfleet.replay.samplers import PrioritisedConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENVS, BATCH, CONFIG = 3, 6, PrioritisedConfig()


def played_grid(ticks: int, padding: str) -> Grid:
    """A grid that has gone round several times, with episodes of 1 to some 10 steps."""
    leaf = LeafSpec(shape=(4, 2, 6), dtype="uint8", stack=4, stack_padding=padding)
    spec = EnvSpec(name="pixels", observations={PLAIN: leaf}, actions=5)
    grid = Grid(spec, 17, ENVS, 3, 0.9, CONFIG, DEVICE, torch.Generator(DEVICE).manual_seed(1))
    numbers = torch.Generator().manual_seed(2)
    final = torch.zeros(ENVS, dtype=torch.bool)
    for _ in range(ticks):
        frames = torch.randint(0, 256, (ENVS, 2, 6), generator=numbers).to(torch.uint8)
        action, reward = torch.randint(0, 5, (ENVS,), generator=numbers), torch.rand(ENVS, generator=numbers)
        terminated, truncated = (torch.rand(2, ENVS, generator=numbers) < 0.15) & ~final
        columns = (action, reward, terminated, final)
        grid.add({PLAIN: frames.to(DEVICE)}, *(column.to(DEVICE) for column in columns), None)
        final = terminated | truncated
    return grid


def rule_of(grid: Grid) -> PriorityRule:
    held = grid.priorities
    assert held is not None
    settings = (CONFIG.alpha, CONFIG.epsilon, CONFIG.max_decay)
    return PriorityRule(held.highest, held.unit, held.fresh, *settings, grid.ticks, grid.most + grid.n_step)


@pytest.mark.parametrize("padding", ["zero", "repeat"])
def test_two_launches_are_a_sample(padding):
    grid = played_grid(60, padding)
    uniform = torch.rand(1, BATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = grid.sample_at(uniform, torch.tensor(0.7, device=DEVICE))
    assert grid.priorities is not None
    assert grid.age is not None
    fields = grid.fields.view(4, -1)
    records = Records(fields[ACTION], fields[REWARD], fields[DISCOUNT], grid.stamp, ENVS)
    drawn = descend(
        grid.priorities.tree, uniform[0], torch.tensor(0.7, device=DEVICE), records, empty_draw(BATCH, DEVICE)
    )
    frames = FrameGrid(grid.frames[PLAIN].flatten(0, 1), grid.age.view(-1), fields[AHEAD], ENVS)
    out = torch.zeros(2, BATCH, 4, 2, 6, dtype=torch.uint8, device=DEVICE)
    gather_pairs(frames, drawn.row, 3, padding, out, channels_last=False)
    assert torch.equal(drawn.row, expected.index)
    assert torch.equal(drawn.generation, expected.generation)
    for name in ("action", "reward", "discount"):
        assert torch.equal(getattr(drawn, name), getattr(expected.batch, name))
    torch.testing.assert_close(drawn.weight, expected.batch.weight, rtol=3e-6, atol=0.0)
    assert torch.equal(out[0], expected.batch.observation[PLAIN])
    assert torch.equal(out[1], expected.batch.next_observation[PLAIN])


def test_one_launch_is_an_update_of_priorities():
    theirs = played_grid(40, "zero")
    ours = copy.deepcopy(theirs)
    drawn = theirs.sample(BATCH, 0.5)
    generation = drawn.generation - torch.arange(BATCH, device=DEVICE) * 3  # the last ones are stale
    priority = torch.arange(1.0, BATCH + 1, device=DEVICE)
    theirs.update_priorities(drawn.index, generation, priority)
    assert ours.priorities is not None
    assert theirs.priorities is not None
    write_priorities(ours.priorities.tree, drawn.index, generation, priority, rule_of(ours))
    start, added = torch.tensor([6, 30], device=DEVICE), torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    theirs.priorities.replace_rows(start, added)
    replace_rows(ours.priorities.tree, start, added, ours.priorities.fresh)
    assert (generation < ours.ticks - rule_of(ours).span).any()
    for name in ("highest", "unit", "fresh"):
        torch.testing.assert_close(getattr(ours.priorities, name), getattr(theirs.priorities, name))
    torch.testing.assert_close(ours.priorities.tree.sums, theirs.priorities.tree.sums)
    torch.testing.assert_close(ours.priorities.tree.mins, theirs.priorities.tree.mins)
