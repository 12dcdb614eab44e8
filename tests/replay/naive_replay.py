"""A replay that is slow and obviously right (plain lists of episodes), and random histories to compare with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Experience, Version
from qfleet.replay import SequenceWindow


@dataclass
class Row:
    observation: dict[str, Any]
    action: int
    reward: float
    terminated: bool
    final: bool
    mask: Any
    extra: Any
    index: int = -1
    evicted: bool = False


@dataclass
class Episode:
    rows: list[Row] = field(default_factory=list)
    closed: bool = False


class NaiveReplay:
    """Follows the contract row by row; computes everything from scratch when asked."""

    def __init__(
        self, spec: EnvSpec, segments: int, rows: int, n_step: int, gamma: float, window: SequenceWindow | None
    ) -> None:
        self.spec, self.segments, self.rows = spec, segments, rows
        self.n_step, self.gamma, self.window = n_step, gamma, window
        self.episodes: list[Episode] = []
        self.open: dict[int, Episode] = {}
        self.live: list[tuple[int, int, list[Row]]] = []  # (stream, slot, rows), oldest first
        self.handed_out = 0
        self.seen: set[tuple[str, int]] = set()
        self.stack = max(leaf.stack for leaf in spec.observations.values())

    def append(self, x: Experience) -> int:
        if (x.source, x.sequence) in self.seen:
            return 0
        self.seen.add((x.source, x.sequence))
        for stream in x.cut:
            self.open.pop(int(stream), None)
        for first, last in zip(x.offsets, x.offsets[1:], strict=False):
            self._append_group(x, range(first, last))
        return int((~x.final).sum())

    def _append_group(self, x: Experience, group: range) -> None:
        # segments are handed out before any row of the group is written; one that loses its own takes another
        waiting = list(group)
        while True:
            needy = [i for i in waiting if self._room(int(x.stream[i])) is None]
            if not needy:
                break
            while len(self.live) + len(needy) > self.segments:
                for row in self.live.pop(0)[2]:
                    row.evicted = True
            for i in needy:
                self.live.append((int(x.stream[i]), self.handed_out % self.segments, []))
                self.handed_out += 1
        for i in waiting:
            stream = int(x.stream[i])
            room = self._room(stream)
            assert room is not None
            row = Row(
                {name: value[i].copy() for name, value in x.observation.items()},
                int(x.action[i]), float(x.reward[i]), bool(x.terminated[i]), bool(x.final[i]),
                None if x.mask is None else x.mask[i].copy(), x.extras["hidden"][i].copy(),
            )  # fmt: skip
            row.index = room[1] * self.rows + len(room[2])
            room[2].append(row)
            if stream not in self.open:
                self.open[stream] = Episode()
                self.episodes.append(self.open[stream])
            self.open[stream].rows.append(row)
            if row.final:
                self.open.pop(stream).closed = True

    def _room(self, stream: int) -> tuple[int, int, list[Row]] | None:
        mine = [segment for segment in self.live if segment[0] == stream]
        return mine[-1] if mine and len(mine[-1][2]) < self.rows else None

    def stacked(self, episode: Episode, t: int) -> dict[str, Any]:
        result = {}
        for name, leaf in self.spec.observations.items():
            if leaf.stack == 1:
                result[name] = episode.rows[t].observation[name]
                continue
            frames = []
            for back in range(leaf.stack - 1, -1, -1):
                frame = episode.rows[max(t - back, 0)].observation[name]
                frames.append(np.zeros_like(frame) if t < back and leaf.stack_padding == "zero" else frame)
            result[name] = np.stack(frames)
        return result

    def items(self) -> dict[int, dict[str, Any]]:
        """Everything sampleable by row, with the content that a batch must have."""
        items = {}
        for episode in self.episodes:
            for t, row in enumerate(episode.rows):
                steps = self._steps(episode, t)
                if row.final or steps is None:
                    continue
                needed = episode.rows[max(t - self.stack + 1, 0) : t + steps + 1]
                if any(r.evicted for r in needed):
                    continue
                make = self._sequence if self.window else self._transition
                items[row.index] = make(episode, t, steps)
        return items

    def _steps(self, episode: Episode, t: int) -> int | None:
        last = len(episode.rows) - 1
        length = self.window.length if self.window else self.n_step
        if self.window and t % self.window.period:
            return None
        if t + length <= last:
            return length
        if not episode.closed or (self.window and t and last - t <= self.window.burn_in):
            return None
        return last - t

    def _transition(self, episode: Episode, t: int, steps: int) -> dict[str, Any]:
        rows = episode.rows[t : t + steps]
        return {
            "observation": self.stacked(episode, t), "next_observation": self.stacked(episode, t + steps),
            "action": rows[0].action, "mask": rows[0].mask, "next_mask": episode.rows[t + steps].mask,
            "reward": sum(self.gamma**k * row.reward for k, row in enumerate(rows)),
            "discount": 0.0 if rows[-1].terminated else self.gamma**steps,
        }  # fmt: skip

    def _sequence(self, episode: Episode, t: int, steps: int) -> dict[str, Any]:
        assert self.window is not None
        rows, missing = episode.rows[t : t + steps], self.window.length - steps
        observed = [self.stacked(episode, t + min(k, steps)) for k in range(self.window.length + 1)]
        masks = [episode.rows[t + min(k, steps)].mask for k in range(self.window.length + 1)]
        return {
            "observation": {name: np.stack([o[name] for o in observed]) for name in observed[0]},
            "action": [row.action for row in rows] + [0] * missing,
            "reward": [row.reward for row in rows] + [0.0] * missing,
            "terminated": [row.terminated for row in rows] + [False] * missing,
            "valid": [True] * steps + [False] * missing,
            "hidden": rows[0].extra,
            "mask": None if masks[0] is None else np.stack(masks),
        }


def make_spec(stack: int = 1, padding: str = "repeat", masked: bool = False, frame: tuple[int, ...] = (3,)) -> EnvSpec:
    """Two leaves (a dict observation) when stacked, one otherwise; every frame is unlike any other."""
    shape = (stack, *frame) if stack > 1 else frame
    leaves = {"pixels": LeafSpec(shape=shape, dtype="uint8", stack=stack, stack_padding=padding)}  # type: ignore[arg-type]
    if stack != 1 or masked:
        leaves["vector"] = LeafSpec(shape=(2,), dtype="float32")
    return EnvSpec(name="random", observations=leaves, actions=4, masked=masked)


class History:
    """Random experience of several streams: short episodes, both kinds of end, crashes, idle streams."""

    def __init__(self, spec: EnvSpec, streams: int, seed: int, end: float = 0.25, cut: float = 0.03):
        self.spec, self.streams, self.end, self.cut = spec, np.arange(streams) * 2 + 1, end, cut
        self.rng = np.random.default_rng(seed)
        self.ended = dict.fromkeys(self.streams.tolist(), False)
        self.idle = dict.fromkeys(self.ended, 0)
        self.sequence = 0

    def message(self) -> Experience:
        rng = self.rng
        cut = [s for s in self.ended if rng.random() < self.cut]
        for s in cut:
            self.ended[s] = False
        groups = [self._group() for _ in range(int(rng.integers(1, 4)))]
        rows = [row for group in groups for row in group]
        streams, final = np.array([r[0] for r in rows], np.int64), np.array([r[3] for r in rows], np.bool_)
        count = len(rows)
        observation = {
            name: (rng.integers(256, size=(count, *leaf.frame_shape)) if leaf.dtype == "uint8"
                   else rng.standard_normal((count, *leaf.frame_shape))).astype(leaf.dtype)
            for name, leaf in self.spec.observations.items()
        }  # fmt: skip
        mask = rng.random((count, self.spec.actions)) < 0.7 if self.spec.masked else None
        self.sequence += 1
        return Experience(
            source="actor-0", sequence=self.sequence - 1, version=Version(0, self.sequence),
            offsets=np.cumsum([0, *(len(group) for group in groups)]), stream=streams, observation=observation,
            action=rng.integers(self.spec.actions, size=count), reward=rng.standard_normal(count).astype(np.float32),
            terminated=np.array([r[1] for r in rows], np.bool_), truncated=np.array([r[2] for r in rows], np.bool_),
            final=final, mask=mask, cut=np.array(cut, np.int64),
            extras={"hidden": rng.standard_normal((count, 2)).astype(np.float32)},
        )  # fmt: skip

    def _group(self) -> list[tuple[int, bool, bool, bool]]:
        rows = []
        for s in self.rng.permutation(self.streams).tolist():
            self.idle[s] -= 1
            if self.rng.random() < 0.02:
                self.idle[s] = 40  # long enough for its open segment to be evicted
            if self.idle[s] > 0:
                continue
            if self.ended[s]:
                rows.append((s, False, False, True))
                self.ended[s] = False
                continue
            kind = self.rng.random() / self.end
            terminated, truncated = kind < 0.6, 0.5 < kind < 1.0  # between 0.5 and 0.6 both
            rows.append((s, terminated, truncated, False))
            self.ended[s] = terminated or truncated
        return rows


def again(message: Experience) -> Experience:
    """The same message, delivered a second time."""
    return dataclasses.replace(message)
