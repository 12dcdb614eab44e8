"""What an actor writes down: rows of streams for a replay, or whole rollouts for a learner without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from qfleet.core.spec import EnvSpec
from qfleet.core.types import Bools, Experience, Ints, Leaves, Rollout, Version
from qfleet.envs.vector import Tick


class RowRecorder:
    """Collects ticks as rows: one per transition, and one more for the observation after an episode's end."""

    def __init__(self, spec: EnvSpec, source: str, first_stream: int) -> None:
        self._spec, self._source, self._first_stream = spec, source, first_stream
        self._groups: list[dict[str, Any]] = []
        self._cut = np.zeros(0, np.int64)
        self.sequence = 0

    def cut(self, envs: Ints) -> None:
        """Note environments whose open episode broke off before the next tick."""
        self._cut = self._first_stream + envs

    def add(self, observation: Leaves, mask: Bools | None, action: Ints, tick: Tick) -> None:
        """Write down one tick: what was seen [E, ...] and done [E], and what came of it."""
        valid = np.flatnonzero(tick.valid)
        self._groups.append({
            "stream": self._first_stream + valid,
            "observation": self._frames({name: leaf[valid] for name, leaf in observation.items()}),
            "action": action[valid],
            "reward": tick.reward[valid],
            "terminated": tick.terminated[valid],
            "truncated": tick.truncated[valid],
            "final": np.zeros(len(valid), np.bool_),
            "mask": None if mask is None else mask[valid],
        })  # fmt: skip
        ended = len(tick.finished)
        if ended:
            self._groups.append({
                "stream": self._first_stream + tick.finished,
                "observation": self._frames(tick.final_observation),
                "action": np.zeros(ended, np.int64),
                "reward": np.zeros(ended, np.float32),
                "terminated": np.zeros(ended, np.bool_),
                "truncated": np.zeros(ended, np.bool_),
                "final": np.ones(ended, np.bool_),
                "mask": tick.final_mask,
            })  # fmt: skip

    def message(self, version: Version) -> Experience:
        """Return everything since the last message."""
        groups, self._groups = self._groups, []
        cut, self._cut = self._cut, np.zeros(0, np.int64)
        self.sequence += 1
        joined = {key: _join([group[key] for group in groups]) for key in groups[0]}
        offsets = np.cumsum([0, *(len(group["stream"]) for group in groups)], dtype=np.int64)
        return Experience(
            source=self._source, sequence=self.sequence - 1, version=version, offsets=offsets, cut=cut, **joined
        )

    def _frames(self, leaves: Leaves) -> Leaves:
        """Return the newest frame of each stacked leaf; replay rebuilds the stacks."""
        return {n: leaf[:, -1] if self._spec.observations[n].stack > 1 else leaf for n, leaf in leaves.items()}


class RolloutRecorder:
    """Collects ticks as one block [T, E]."""

    def __init__(self) -> None:
        self._ticks: list[tuple[Leaves, Bools | None, Ints, Tick]] = []

    def add(self, observation: Leaves, mask: Bools | None, action: Ints, tick: Tick) -> None:
        """Write down one tick: what was seen [E, ...] and done [E], and what came of it."""
        self._ticks.append((observation, mask, action, tick))

    def message(self, version: Version) -> Rollout:
        """Return everything since the last message, and what the environments show now."""
        recorded, self._ticks = self._ticks, []
        ticks = [tick for *_, tick in recorded]
        last = ticks[-1]
        seen = [observation for observation, *_ in recorded]
        masks = [mask for _, mask, *_ in recorded if mask is not None]
        at = [np.stack([np.full_like(tick.finished, t), tick.finished], axis=1) for t, tick in enumerate(ticks)]
        return Rollout(
            version=version,
            observation={name: np.stack([*(s[name] for s in seen), leaf]) for name, leaf in last.observation.items()},
            action=np.stack([action for _, _, action, _ in recorded]),
            reward=np.stack([tick.reward for tick in ticks]),
            terminated=np.stack([tick.terminated for tick in ticks]),
            truncated=np.stack([tick.truncated for tick in ticks]),
            valid=np.stack([tick.valid for tick in ticks]),
            final_observation=_join([tick.final_observation for tick in ticks]),
            final_at=np.concatenate(at),
            mask=None if last.mask is None else np.stack([*masks, last.mask]),
            final_mask=_join([tick.final_mask for tick in ticks]),
        )


def _join(parts: list[Any]) -> Any:
    """Concatenate arrays, or dictionaries of arrays, along the rows; None stays None."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in first}
    return np.concatenate(parts)
