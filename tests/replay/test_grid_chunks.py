"""The replay of a fused loop in chunks: only new ticks are written, and what is loaded is the grid as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qfleet.core import codec
from qfleet.core.chunks import Chunk
from qfleet.core.errors import CheckpointError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.replay.grid import Grid
from qfleet.replay.grid_chunks import TickChunks
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig
from qfleet.runtime import chunkfiles

ENVS, LENGTH, N_STEP, WIDTH = 3, 40, 3, 9000
SPEC = EnvSpec(name="wide", observations={PLAIN: LeafSpec(shape=(WIDTH,), dtype="uint8")}, actions=4)


class Disk:
    """Keeps chunks as files would be kept, and counts their bytes."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.written = 0

    def save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Write what has no name yet; return the state as it would be read."""
        for chunk in state["chunks"]:
            if chunk.name is None:
                content = codec.roundtrip(chunk.read())
                chunk.name = f"{len(self.files)}"
                self.files[chunk.name] = content
                self.written += sum(column.nbytes for column in content["columns"].values())
        saved = [Chunk(lambda name=chunk.name: self.files[name], chunk.name) for chunk in state["chunks"]]
        return {**codec.roundtrip({**state, "chunks": []}), "chunks": saved}


def empty(prioritised: bool) -> Grid:
    sampler = PrioritisedConfig() if prioritised else UniformConfig()
    return Grid(SPEC, LENGTH, ENVS, N_STEP, 0.9, sampler, torch.device("cpu"), torch.Generator().manual_seed(1))


def play(grid: Grid, ticks: int, rng: np.random.Generator) -> None:
    for _ in range(ticks):
        final = torch.from_numpy(rng.random(ENVS) < 0.1)
        frames = torch.from_numpy(rng.integers(0, 256, (ENVS, WIDTH), np.uint8))
        action, reward = torch.from_numpy(rng.integers(0, 4, ENVS)), torch.from_numpy(rng.random(ENVS)).float()
        grid.add({PLAIN: frames}, action, reward, torch.zeros(ENVS, dtype=torch.bool), final, None)
        if grid.priorities is not None and int(grid.ticks) > N_STEP + 1:
            sample = grid.sample(8, 0.5)
            grid.update_priorities(sample.index, sample.generation, torch.from_numpy(rng.random(8)).float())


def same(one: Any, other: Any) -> bool:
    (head, arrays), (other_head, others) = codec.pack(one), codec.pack(other)
    return head == other_head and all(np.array_equal(a, b) for a, b in zip(arrays, others, strict=True))


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("pauses", [(1, 1, 1), (2, 50, 3, 90), (30, 30, 30, 30), (7,) * 12])
def test_a_grid_that_is_loaded_is_the_one_that_was_saved_wherever_its_ring_stands(pauses, prioritised):
    rng, grid, disk = np.random.default_rng(3), empty(prioritised), Disk()
    chunks, other = TickChunks(grid), empty(prioritised)
    for ticks in pauses:
        play(grid, ticks, rng)
        saved = disk.save(chunks.state_dict())
        TickChunks(other).load_state_dict(saved)
        assert same(other.state_dict(), grid.state_dict())
    play(grid, 20, np.random.default_rng(4))
    play(other, 20, np.random.default_rng(4))
    assert same(other.state_dict(), grid.state_dict()), "and it goes on alike"


def test_only_new_ticks_are_written():
    rng, grid, disk = np.random.default_rng(3), empty(prioritised=False), Disk()
    chunks = TickChunks(grid)
    for _ in range(20):
        play(grid, 7, rng)
        disk.save(chunks.state_dict())
    assert disk.written <= 1.2 * 140 * grid.tick_bytes
    assert disk.written >= (140 - N_STEP) * grid.tick_bytes


def test_a_grid_that_was_loaded_writes_only_what_is_newer():
    rng, grid, disk = np.random.default_rng(3), empty(prioritised=False), Disk()
    play(grid, 30, rng)
    saved = disk.save(TickChunks(grid).state_dict())
    other, before = empty(prioritised=False), disk.written
    chunks = TickChunks(other)
    chunks.load_state_dict(saved)
    play(other, 5, rng)
    disk.save(chunks.state_dict())
    assert disk.written - before == 5 * grid.tick_bytes


def test_chunks_hold_what_was_there_when_they_were_taken_though_the_ring_goes_on():
    rng, grid, disk = np.random.default_rng(3), empty(prioritised=True), Disk()
    play(grid, 25, rng)
    whole, state = codec.roundtrip(grid.state_dict()), TickChunks(grid).state_dict()
    state |= codec.roundtrip({name: part for name, part in state.items() if name != "chunks"})
    play(grid, 2 * LENGTH, rng)
    other = empty(prioritised=True)
    TickChunks(other).load_state_dict(disk.save(state))
    assert same(other.state_dict(), whole)


def test_what_could_not_be_written_and_what_was_deleted_is_taken_again(tmp_path):
    rng, grid, disk = np.random.default_rng(3), empty(prioritised=False), Disk()
    chunks, other = TickChunks(grid), empty(prioritised=False)
    play(grid, 20, rng)
    for chunk in chunks.state_dict()["chunks"]:
        chunk.read()  # and the disk is full
    play(grid, 5, rng)
    disk.save(chunks.state_dict())
    play(grid, 5, rng)
    state = chunks.state_dict()
    found: list[Chunk] = []
    chunkfiles.numbered(tmp_path, state, found)  # where nothing is
    assert [chunk.name for chunk in found] == [None] * len(state["chunks"])
    TickChunks(other).load_state_dict(disk.save(state))
    assert same(other.state_dict(), grid.state_dict())


def test_an_older_chunk_whose_file_was_lost_is_taken_again_until_it_is_written(tmp_path):
    rng, grid, disk = np.random.default_rng(4), empty(prioritised=False), Disk()
    chunks, other = TickChunks(grid), empty(prioritised=False)
    play(grid, 20, rng)
    disk.save(chunks.state_dict())
    play(grid, 20, rng)
    state = chunks.state_dict()
    state["chunks"][0].name = None  # its file was deleted
    state["chunks"][0].retake()
    state["chunks"][0].read()  # and the disk is full
    play(grid, 1, rng)
    TickChunks(other).load_state_dict(disk.save(chunks.state_dict()))
    assert same(other.state_dict(), grid.state_dict())


def test_the_state_of_versions_without_chunks_is_loaded_and_another_grid_is_refused():
    grid, other = empty(prioritised=True), empty(prioritised=True)
    play(grid, 50, np.random.default_rng(3))
    TickChunks(other).load_state_dict(codec.roundtrip(grid.state_dict()))
    assert same(other.state_dict(), grid.state_dict())
    with pytest.raises(CheckpointError, match="resume with the settings"):
        TickChunks(empty(prioritised=False)).load_state_dict(Disk().save(TickChunks(grid).state_dict()))
