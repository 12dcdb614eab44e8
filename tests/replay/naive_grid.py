"""A grid that is slow and obviously right (plain lists of rows), and random ticks to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qfleet.core.spec import EnvSpec
from qfleet.replay import PrioritisedConfig

Item = tuple[int, int]
"""Tick and environment."""


@dataclass(frozen=True)
class Tick:
    """What `Grid.add` takes, as arrays."""

    frames: dict[str, Any]
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    final: Any
    mask: Any

    def tensors(self, device: torch.device) -> tuple[Any, ...]:
        frames = {name: torch.from_numpy(frame).to(device) for name, frame in self.frames.items()}
        rest = (self.action, self.reward, self.terminated, self.final, self.mask)
        return frames, *(None if array is None else torch.from_numpy(array).to(device) for array in rest)


class Ticks:
    """Random episodes of several environments: each begins anew after its final row."""

    def __init__(self, spec: EnvSpec, envs: int, seed: int, end: float) -> None:
        self.spec, self.envs, self.end = spec, envs, end
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros(envs, np.bool_)

    def tick(self) -> Tick:
        rng, final = self.rng, self.ended
        frames = {
            name: (rng.integers(256, size=(self.envs, *leaf.frame_shape)) if leaf.dtype == "uint8"
                   else rng.standard_normal((self.envs, *leaf.frame_shape))).astype(leaf.dtype)
            for name, leaf in self.spec.observations.items()
        }  # fmt: skip
        kind = rng.random(self.envs) / self.end
        terminated, truncated = (kind < 0.6) & ~final, (kind > 0.5) & (kind < 1.0) & ~final  # sometimes both
        self.ended = terminated | truncated
        action = rng.integers(self.spec.actions, size=self.envs)
        reward = rng.standard_normal(self.envs).astype(np.float32)
        mask = rng.random((self.envs, self.spec.actions)) < 0.7 if self.spec.masked else None
        return Tick(frames, action, reward, terminated, truncated, final, mask)


class NaiveGrid:
    """Keeps every row for ever; computes everything from scratch when asked."""

    def __init__(self, spec: EnvSpec, length: int, envs: int, n_step: int, gamma: float) -> None:
        self.spec, self.length, self.envs, self.n_step, self.gamma = spec, length, envs, n_step, gamma
        self.stack = max(leaf.stack for leaf in spec.observations.values())
        self.ticks: list[Tick] = []

    def index(self, item: Item) -> int:
        return item[0] % self.length * self.envs + item[1]

    def items(self) -> list[Item]:
        """Everything sampleable: not final, n rows after it, and no row overwritten that a stack may reach."""
        newest = len(self.ticks) - 1
        oldest = max(newest - self.length + 1 + self.stack - 1, 0)
        ticks = range(oldest, newest - self.n_step + 1)
        return [(t, e) for t in ticks for e in range(self.envs) if not self.ticks[t].final[e]]

    def stacked(self, t: int, e: int) -> dict[str, Any]:
        first = t
        while first > 0 and not self.ticks[first - 1].final[e]:
            first -= 1
        result = {}
        for name, leaf in self.spec.observations.items():
            if leaf.stack == 1:
                result[name] = self.ticks[t].frames[name][e]
                continue
            frames = []
            for back in range(leaf.stack - 1, -1, -1):
                frame = self.ticks[max(t - back, first)].frames[name][e]
                frames.append(np.zeros_like(frame) if t - back < first and leaf.stack_padding == "zero" else frame)
            result[name] = np.stack(frames)
        return result

    def content(self, item: Item) -> dict[str, Any]:
        t, e = item
        steps, reward = 0, 0.0
        while True:
            row = self.ticks[t + steps]
            reward += self.gamma**steps * float(row.reward[e])
            steps += 1
            if row.terminated[e] or row.truncated[e] or steps == self.n_step:
                break
        after, mask = self.ticks[t + steps], self.ticks[t].mask
        return {
            "observation": self.stacked(t, e), "next_observation": self.stacked(t + steps, e),
            "action": self.ticks[t].action[e], "reward": reward,
            "discount": 0.0 if row.terminated[e] else self.gamma**steps,
            "mask": None if mask is None else mask[e], "next_mask": None if mask is None else after.mask[e],
        }  # fmt: skip


class NaivePriorities:
    """The priority of every item by tick and environment; None until one is known."""

    def __init__(self, config: PrioritisedConfig) -> None:
        self.config = config
        self.given: dict[Item, float | None] = {}
        self.highest: float | None = None

    def follow(self, items: list[Item]) -> None:
        """Let go what is no longer sampleable; new items get the maximum."""
        self.given = {item: self.given.get(item, self.highest) for item in items}

    def update(self, written: list[tuple[Item, float]]) -> None:
        """Write what is finite and still there, the largest where an item comes twice."""
        good = [(item, p) for item, p in written if item in self.given and math.isfinite(p)]
        if not good:
            return
        self.highest = max(*(p for _, p in good), (self.highest or 0.0) * self.config.max_decay)
        self.given = {item: self.highest if p is None else p for item, p in self.given.items()}
        for item, _ in good:
            self.given[item] = max(p for other, p in good if other == item)

    def value(self, item: Item) -> float:
        priority = self.given[item]
        return float(((1.0 if priority is None else priority) + self.config.epsilon) ** self.config.alpha)

    def weights(self, beta: float) -> dict[Item, float]:
        """(N P)^-beta over the largest such weight, of every item."""
        values = {item: self.value(item) for item in self.given}
        total = sum(values.values())
        weights = {item: (len(values) * value / total) ** -beta for item, value in values.items()}
        return {item: weight / max(weights.values()) for item, weight in weights.items()}
