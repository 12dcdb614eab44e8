"""What an actor writes down: rows of streams for a replay, or whole rollouts for a learner without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from qfleet.core.role import State
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Bools, Experience, Floats, Ints, Leaves, Rollout, Version
from qfleet.envs.vector import Tick
from qfleet.roles.acting import Choice


class RowRecorder:
    """Collects ticks as rows: one per transition, and one more for the observation after an episode's end."""

    def __init__(self, spec: EnvSpec, source: str, first_stream: int, sequence: int = 0, valued: bool = False) -> None:
        """Number messages from `sequence`; with `valued` each row carries the values that it was chosen by."""
        self._spec, self._source, self._first_stream, self._valued = spec, source, first_stream, valued
        self._groups: list[dict[str, Any]] = []
        self._cut = np.zeros(0, np.int64)
        self.sequence = sequence

    def cut(self, envs: Ints) -> None:
        """Note environments whose open episode broke off before the next tick."""
        self._cut = np.union1d(self._cut, self._first_stream + envs)

    def add(
        self, observation: Leaves, mask: Bools | None, choice: Choice, tick: Tick, envs: Ints | None = None
    ) -> None:
        """Write down one tick of environments `envs` [E], of all if None: what was seen [E, ...], done, and led to."""
        valid = np.flatnonzero(tick.valid)
        stream = self._first_stream + (np.arange(len(tick.valid)) if envs is None else envs)
        best = _best(choice.q, mask) if self._valued else None
        self._groups.append({
            "stream": stream[valid],
            "observation": {name: leaf[valid] for name, leaf in self._frames(observation).items()},
            "action": choice.action[valid],
            "reward": tick.reward[valid],
            "terminated": tick.terminated[valid],
            "truncated": tick.truncated[valid],
            "final": np.zeros(len(valid), np.bool_),
            "mask": None if mask is None else mask[valid],
            "extras": {name: leaf[valid] for name, leaf in choice.extras.items()},
            "value": None if best is None else choice.q[valid, choice.action[valid]],
            "best": None if best is None else best[valid],
        })  # fmt: skip
        ended = len(tick.finished)
        if ended:
            self._groups.append({
                "stream": stream[tick.finished],
                "observation": self._frames(tick.final_observation),
                "action": np.zeros(ended, np.int64),
                "reward": np.zeros(ended, np.float32),
                "terminated": np.zeros(ended, np.bool_),
                "truncated": np.zeros(ended, np.bool_),
                "final": np.ones(ended, np.bool_),
                "mask": tick.final_mask,
                "extras": {n: np.zeros((ended, *leaf.shape[1:]), leaf.dtype) for n, leaf in choice.extras.items()},
                "value": None if best is None else np.zeros(ended, np.float32),
                # nobody asks for the value after a cut episode's end; the one before its last step is near to it
                "best": None if best is None else best[tick.finished],
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

    def open_rows(self) -> State:
        """Return what was written down since the last message."""
        return {"groups": list(self._groups), "cut": self._cut}

    def reopen(self, state: State) -> None:
        """Continue with what `open_rows` returned."""
        self._groups, self._cut = list(state["groups"]), state["cut"]

    def _frames(self, leaves: Leaves) -> Leaves:
        """Return the newest frame of each stacked leaf; replay rebuilds the stacks."""
        return {n: leaf[:, -1] if self._spec.observations[n].stack > 1 else leaf for n, leaf in leaves.items()}


class RolloutRecorder:
    """Collects ticks as one block [T, E]."""

    def __init__(self) -> None:
        self._ticks: list[tuple[Leaves, Bools | None, Ints, Tick]] = []
        self.sequence = 0

    def add(
        self, observation: Leaves, mask: Bools | None, choice: Choice, tick: Tick, envs: Ints | None = None
    ) -> None:
        """Write down one tick of all environments: what was seen [E, ...] and done [E], and what came of it."""
        self._ticks.append((observation, mask, choice.action, tick))

    def message(self, version: Version) -> Rollout:
        """Return everything since the last message, and what the environments show now."""
        recorded, self._ticks = self._ticks, []
        self.sequence += 1
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


def _best(q: Floats, mask: Bools | None) -> Floats:
    """Return the highest of the values [E, A] that the mask allows [E]."""
    highest: Floats = np.max(q, axis=1) if mask is None else np.max(q, axis=1, initial=-np.inf, where=mask)
    return highest


def _join(parts: list[Any]) -> Any:
    """Concatenate arrays, or dictionaries of arrays, along the rows; None stays None."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in first}
    return np.concatenate(parts)
