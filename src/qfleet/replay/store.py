"""All columns of a replay, row by row: observations on their storage tier, everything else in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import Bools, Experience, Ints, Leaves
from qfleet.replay.allocation import Allocate, zeros
from qfleet.replay.chunks import RowChunks, rows_of
from qfleet.replay.memory import ASSUMED_COMPRESSION, available_disk, available_memory, check_fits
from qfleet.replay.records import WORDS, make_records
from qfleet.replay.segments import Chains
from qfleet.replay.storage import Column, Lz4Config, MappedConfig, PlainColumn, StorageConfig, observation_column

OLDEST_AGE = 255
"""Ages in an episode are kept up to this one: enough for any frame stack, in one byte."""
SAMPLER_BYTES = 9.2
"""What a sampler takes for each row, at most: a leaf of the sum tree and its share of the inner nodes."""


class RowStore:
    """Writes rows, reads them back, and rebuilds frame stacks from single frames."""

    def __init__(
        self,
        config: StorageConfig,
        spec: EnvSpec,
        chains: Chains,
        sequences: bool,
        prioritised: bool,
        valued: bool,
        extras: Mapping[str, LeafSpec],
        directory: Path | None,
        allocate: Allocate | None,
        life: int,
    ) -> None:
        """Make columns of zeros for all rows of `chains`, after a check that they fit.

        `valued` says whether rows come with the actor's values, which those of sequences keep.
        In a `life` after the first they have their memory already and hold what the former one left; see `recover`.
        """
        self.config, self.spec, self.chains, self.sequences = config, spec, chains, sequences
        self.capacity = chains.segments * chains.rows
        self.stack = max(leaf.stack for leaf in spec.observations.values())
        self.extras = tuple(extras)
        shapes = _shapes(spec, sequences, valued, extras)
        if life == 0:
            self._check_memory({name: np.dtype((d, s)).itemsize for name, (s, d) in shapes.items()}, directory)
        self.observations: dict[str, Column] = {
            name: observation_column(config, name, leaf, (chains.segments, chains.rows), directory, allocate)
            for name, leaf in spec.observations.items()
        }
        make = allocate or zeros
        self.columns = {
            name: PlainColumn(make(f"column.{name}", (self.capacity, *shape), dtype))
            for name, (shape, dtype) in shapes.items()
        }
        frame_bytes = sum(leaf.frame_bytes for leaf in spec.observations.values())
        column_bytes = sum(np.dtype((dtype, shape)).itemsize for shape, dtype in shapes.values())
        self.chunks = RowChunks(chains, self.snapshot, frame_bytes + column_bytes)
        self.records = make_records(self.columns["record"].array.view(np.int32), chains, prioritised)
        """What is read of a transition; a replay of sequences has empty ones."""
        self._fresh: list[Ints] | None = None
        """The rows that were written since somebody with a copy of them was told; None for nobody."""

    def _check_memory(self, columns: Mapping[str, float], directory: Path | None) -> None:
        frames, advice = {}, ", or set replay.storage.kind to lz4 (compressed) or mapped (on disk)"
        for name, leaf in self.spec.observations.items():
            if isinstance(self.config, Lz4Config) and self.config.compresses(leaf):
                gain = f"(LZ4 taken to gain {ASSUMED_COMPRESSION} to 1)"
                frames[f"observation '{name}' {gain}"] = leaf.frame_bytes / ASSUMED_COMPRESSION
                advice = ", or set replay.storage.kind to mapped (on disk)"
            else:
                frames[f"observation '{name}'"] = leaf.frame_bytes
        if isinstance(self.config, MappedConfig) and directory is not None:
            check_fits(self.capacity, frames, available_disk(directory), f"disk of {directory}", "")
            frames, advice = {}, ""
        needed = {**frames, **columns, "sampler": SAMPLER_BYTES}
        check_fits(self.capacity, needed, available_memory(), "memory", advice)

    def check_message(self, experience: Experience) -> None:
        """Raise ValueError for a message whose arrays do not have the shapes of the spec."""
        rows = len(experience.stream)
        expected = {name: (rows, *leaf.frame_shape) for name, leaf in self.spec.observations.items()}
        got = {name: value.shape for name, value in experience.observation.items()}
        if got != expected:
            raise ValueError(f"experience of {experience.source}: observation shapes {got}, expected {expected}")
        if (experience.mask is not None) != self.spec.masked:
            raise ValueError(f"experience of {experience.source}: a mask must come exactly when the spec is masked")

    def put(self, rows: Ints, age: Ints, experience: Experience, group: slice) -> None:
        """Write the rows `group` of a message, `age` steps into their episodes, to `rows`."""
        for name, column in self.observations.items():
            column.write(rows, experience.observation[name][group])
        if self._fresh is not None:
            self._fresh.append(rows)
        self.write("age", rows, np.minimum(age, OLDEST_AGE))
        if experience.mask is not None:
            self.write("mask", rows, experience.mask[group])
        for name in self.extras:
            self.write(f"extras.{name}", rows, experience.extras[name][group])
        if not self.sequences:
            self.records.write_action(rows, experience.action[group])
        else:
            self.write("action", rows, experience.action[group])
            self.write("reward", rows, experience.reward[group])
            self.write("terminated", rows, experience.terminated[group])
            if experience.value is not None and experience.best is not None:
                self.write("value", rows, experience.value[group])
                self.write("best", rows, experience.best[group])

    def write(self, column: str, rows: Ints, values: NDArray[Any]) -> None:
        """Store `values` [E, ...] at `rows` [E], cast to the column's dtype."""
        self.columns[column].array[rows] = values

    def read(self, column: str, rows: Ints) -> NDArray[Any]:
        """Return the values [*rows.shape, ...] at `rows`."""
        return self.columns[column].array.take(rows, axis=0)

    def read_valid(self, column: str, rows: Ints, valid: Bools) -> NDArray[Any]:
        """Return the values at `rows`, zeros where not `valid`."""
        values = self.read(column, rows)
        values[~valid] = 0
        return values

    def observe(self, rows: Ints) -> Leaves:
        """Return the observations [*rows.shape, ...] at `rows`, frame stacks rebuilt, oldest frame first."""
        observations: Leaves = {}
        for name, where in self.frame_rows(rows).items():
            column, leaf = self.observations[name], self.spec.observations[name]
            if leaf.stack > 1 and leaf.stack_padding == "zero":
                nothing = where < 0
                observations[name] = column.read(np.where(nothing, where[..., -1:], where))
                observations[name][nothing] = 0
            else:
                observations[name] = column.read(where)
        return observations

    def frame_rows(self, rows: Ints) -> dict[str, Ints]:
        """Return where the observations at `rows` lie, by leaf: a row each, or those of a stack [*rows.shape, S].

        Before an episode's first frame stands that one again or, where stacks are padded with zeros, row -1.
        """
        found: dict[str, Ints] = {}
        age = self.read("age", rows)[..., None] if self.stack > 1 else None
        for name, leaf in self.spec.observations.items():
            found[name] = rows
            if leaf.stack > 1 and age is not None:
                back = np.arange(leaf.stack - 1, -1, -1)
                found[name] = self.chains.predecessor(rows[..., None], np.minimum(back, age))
                if leaf.stack_padding == "zero":
                    found[name][back > age] = -1
        return found

    def observe_pairs(self, rows: Ints) -> tuple[Leaves, Leaves]:
        """Return the observations at the first and at the second half of `rows` [2 B], read together.

        For a learner that has a copy they are the rows where these lie; see `Batch.fresh`.
        """
        first, second, size = {}, {}, len(rows) // 2
        for name, value in (self.observe(rows) if self._fresh is None else self.frame_rows(rows)).items():
            first[name], second[name] = value[:size], value[size:]
        return first, second

    def mirror(self) -> None:
        """From now on give the rows of observations instead of these; all rows so far are new to who has the copy."""
        self._fresh = [np.arange(self.chains.used_rows)]

    def take_fresh(self) -> Ints | None:
        """Return the rows that were written since the last call; None if nobody has a copy."""
        if self._fresh is None:
            return None
        fresh, self._fresh = np.concatenate([np.zeros(0, np.int64), *self._fresh]), []
        return fresh

    def frames_present(self, rows: Ints) -> Bools:
        """Return for which of `rows` [M] the whole frame stack is stored."""
        return self.chains.has_predecessors(rows, np.minimum(self.read("age", rows), self.stack - 1))

    def recover(self) -> None:
        """Go on with the rows that a former life left; `chains` says which."""
        for column in self.observations.values():
            column.recover(self.chains.filled)

    def snapshot(self, rows: Ints) -> State:
        """Return what must be saved of `rows` [M]."""
        return {
            "columns": {name: column.snapshot(rows) for name, column in self.columns.items()},
            "observations": {name: column.snapshot(rows) for name, column in self.observations.items()},
        }

    def state_dict(self, pending: Ints) -> State:
        """Return the rows as chunks, of which those that were saved before have a name; see `RowChunks`."""
        return {
            "layout": [self.chains.segments, self.chains.rows],
            "columns": list(self.columns),
            **self.chunks.state_dict(pending),
        }

    def check_state(self, state: State) -> None:
        """Raise CheckpointError for a state of other settings."""
        saved, own = list(state["layout"]), [self.chains.segments, self.chains.rows]
        if saved != own or set(state["columns"]) != set(self.columns):
            raise CheckpointError(
                f"the saved replay has {saved[0]} segments of {saved[1]} rows with columns {sorted(state['columns'])}; "
                f"this run's has {own[0]} of {own[1]} with {sorted(self.columns)}: "
                f"resume with the replay settings that the run began with"
            )

    def load_state_dict(self, state: State, pending: Ints) -> None:
        """Take over the rows of a store with the same settings; `chains` has its state already."""
        for column in self.observations.values():
            column.clear()
        if "chunks" in state:
            self.chunks.load_state_dict(state, pending, self._place)
        else:
            self._place_first_format(state)

    def _place(self, content: State, keep: Bools) -> None:
        """Write those rows of a chunk that `keep` marks."""
        rows = rows_of(content["rows"])
        for name, column in self.columns.items():
            column.restore(rows, keep, content["columns"][name])
        for name, observed in self.observations.items():
            observed.restore(rows, keep, content["observations"][name])

    def _place_first_format(self, state: State) -> None:
        """Write all rows as checkpoints of format 1 have them: arrays of the used rows, or blocks by segment."""
        for column, values in (
            *((column, state["columns"][name]) for name, column in self.columns.items()),
            *((column, state["observations"][name]) for name, column in self.observations.items()),
        ):
            if isinstance(values, dict):
                counts = np.array([len(lengths) for lengths in values["lengths"]], np.int64)
                rows = rows_of(np.stack([np.arange(len(counts)) * self.chains.rows, counts]))
                values = {
                    "lengths": np.concatenate([rows[:0], *values["lengths"]]),
                    "blocks": np.concatenate([np.empty(0, np.uint8), *values["arenas"]]),
                }
            else:
                rows = np.arange(len(values))
            column.restore(rows, np.ones(len(rows), np.bool_), values)


def row_bytes(
    config: StorageConfig, spec: EnvSpec, sequences: bool, valued: bool, extras: Mapping[str, LeafSpec]
) -> float:
    """Return about how many bytes of memory one row takes, its place in the sampler included."""
    shapes = _shapes(spec, sequences, valued, extras)
    total = SAMPLER_BYTES + sum(np.dtype((d, s)).itemsize for s, d in shapes.values())
    for leaf in spec.observations.values():
        if isinstance(config, Lz4Config) and config.compresses(leaf):
            total += leaf.frame_bytes / ASSUMED_COMPRESSION
        elif not isinstance(config, MappedConfig):
            total += leaf.frame_bytes
    return total


def _shapes(
    spec: EnvSpec, sequences: bool, valued: bool, extras: Mapping[str, LeafSpec]
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of every column but the observations."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "age": ((), np.uint8),
        "record": ((0 if sequences else WORDS,), np.int32),
    }
    if sequences:
        action = np.min_scalar_type(spec.actions - 1)
        shapes |= {"action": ((), action), "reward": ((), np.float32)}
        shapes |= {"terminated": ((), np.bool_), "steps": ((), np.int32)}
        if valued:
            shapes |= {"value": ((), np.float32), "best": ((), np.float32)}
    if spec.masked:
        shapes["mask"] = ((spec.actions,), np.bool_)
    return shapes | {f"extras.{name}": (leaf.shape, leaf.dtype) for name, leaf in extras.items()}
