"""Specs and seeded messages that several tests of the algorithms use."""

from __future__ import annotations

from typing import Any

import numpy as np

from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import Batch, Rollout, Version

VECTOR = EnvSpec(name="vector", observations={PLAIN: LeafSpec(shape=(4,), dtype="float32")}, actions=3)
PIXELS = EnvSpec(name="pixels", observations={PLAIN: LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)}, actions=6)
GRID = EnvSpec(name="grid", observations={PLAIN: LeafSpec(shape=(10, 5), dtype="float32")}, actions=3)
STATES = EnvSpec(name="states", observations={PLAIN: LeafSpec(shape=(), dtype="int64", categories=7)}, actions=2)
MIXED = EnvSpec(
    name="mixed",
    observations={
        "camera.front": LeafSpec(shape=(12, 12, 3), dtype="uint8"),
        "speed": LeafSpec(shape=(2,), dtype="float32"),
        "gear": LeafSpec(shape=(), dtype="int64", categories=5),
    },
    actions=4,
)


def leaves(spec: EnvSpec, rng: np.random.Generator, *batch: int) -> dict[str, Any]:
    """Return random raw observations [*batch, ...]."""
    result: dict[str, Any] = {}
    for name, leaf in spec.observations.items():
        shape = (*batch, *leaf.shape)
        if leaf.categories is not None:
            result[name] = rng.integers(0, leaf.categories, shape)
        elif leaf.dtype == "uint8":
            result[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            result[name] = rng.standard_normal(shape).astype(np.float32)
    return result


def random_masks(rng: np.random.Generator, *shape: int) -> Any:
    """Return masks [*shape] in which every row allows something."""
    masks = rng.random(shape) < 0.6
    masks[..., 0] |= ~masks.any(-1)
    return masks


def make_batch(spec: EnvSpec, rng: np.random.Generator, size: int = 16, masked: bool = False, **changes: Any) -> Batch:
    """Return a batch with some terminal items, 3-step discounts and uneven weights."""
    mask = random_masks(rng, size, spec.actions) if masked else None
    action = rng.integers(0, spec.actions, size)
    if mask is not None:
        action = np.array([rng.choice(np.flatnonzero(row)) for row in mask])
    fields: dict[str, Any] = {
        "observation": leaves(spec, rng, size),
        "action": action,
        "reward": rng.standard_normal(size).astype(np.float32),
        "discount": np.where(rng.random(size) < 0.25, 0, 0.99**3).astype(np.float32),
        "next_observation": leaves(spec, rng, size),
        "weight": rng.uniform(0.1, 1, size).astype(np.float32),
        "index": np.arange(size),
        "generation": np.zeros(size, np.int64),
        "mask": mask,
        "next_mask": random_masks(rng, size, spec.actions) if masked else None,
    }
    return Batch(**{**fields, **changes})


def make_rollout(
    spec: EnvSpec, rng: np.random.Generator, ticks: int = 6, envs: int = 3, masked: bool = False, ends: float = 0.3
) -> Rollout:
    """Return a rollout in the NEXT_STEP style: the tick after an episode's end is only a reset."""
    terminated, truncated = np.zeros((ticks, envs), bool), np.zeros((ticks, envs), bool)
    valid = np.ones((ticks, envs), bool)
    for e in range(envs):
        valid[0, e] = rng.random() < 0.8
        for t in range(ticks):
            if t and (terminated[t - 1, e] or truncated[t - 1, e]):
                valid[t, e] = False
            elif valid[t, e] and rng.random() < ends:
                (terminated if rng.random() < 0.5 else truncated)[t, e] = True
    at = np.argwhere(terminated | truncated)
    return Rollout(
        version=Version(),
        observation=leaves(spec, rng, ticks + 1, envs),
        action=rng.integers(0, spec.actions, (ticks, envs)),
        reward=rng.standard_normal((ticks, envs)).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        final_observation=leaves(spec, rng, len(at)),
        final_at=at,
        mask=random_masks(rng, ticks + 1, envs, spec.actions) if masked else None,
        final_mask=random_masks(rng, len(at), spec.actions) if masked else None,
    )
