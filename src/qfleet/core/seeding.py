"""Independent random streams: one run seed, one stream for each (role, index, purpose)."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch


def sequence(seed: int, role: str, index: int = 0, purpose: str = "") -> np.random.SeedSequence:
    """Return the seed sequence that belongs to one purpose of one role; no two purposes share a stream."""
    return np.random.SeedSequence(
        entropy=seed, spawn_key=(zlib.crc32(role.encode()), index, zlib.crc32(purpose.encode()))
    )


def numpy_stream(seed: int, role: str, index: int = 0, purpose: str = "") -> np.random.Generator:
    """Return a NumPy generator for one purpose of one role."""
    return np.random.Generator(np.random.PCG64(sequence(seed, role, index, purpose)))


def torch_stream(
    seed: int, role: str, index: int = 0, purpose: str = "", device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a torch generator for one purpose of one role."""
    generator = torch.Generator(device=device)
    return generator.manual_seed(int(sequence(seed, role, index, purpose).generate_state(1, np.uint64)[0] >> 1))


def of_life(purpose: str, life: int) -> str:
    """Return a purpose's name in one life of a role: one that is begun anew must not repeat what it did before."""
    return f"{purpose}/{life}" if life else purpose


def numpy_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return the state of a generator as plain numbers and strings (for checkpoints)."""
    return dict(generator.bit_generator.state)


def restore_numpy(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Put a generator back into a state that `numpy_state` returned."""
    generator.bit_generator.state = state


_SPLITS = {
    "training": (0, 2**30),
    "validation": (2**30, 2**29),
    "test": (2**30 + 2**29, 2**28),
    "fresh": (2**30 + 2**29 + 2**28, 2**28),
}
"""First seed and number of seeds of each use; "fresh" is for evaluations after the run."""


def episode_seeds(seed: int, split: str, count: int, first: int = 0) -> list[int]:
    """Return seeds of episodes; those of two splits can never coincide.

    `first` skips that many, so that several actors take disjoint parts of one sequence.
    """
    start, size = _SPLITS[split]
    drawn = numpy_stream(seed, "episodes", purpose=split).integers(size, size=first + count)
    return [start + int(value) for value in drawn[first:]]
