"""The replay on a device: rows of a [time, environment] grid, drawn from without ever waiting for the device."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qfleet.core.errors import CheckpointError, ConfigError
from qfleet.core.role import State
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.tensors import TensorBatch, split
from qfleet.replay.device_priorities import DevicePriorities
from qfleet.replay.device_tree import TREE_BYTES, tree_bytes
from qfleet.replay.samplers import PrioritisedConfig, UniformConfig
from qfleet.replay.store import OLDEST_AGE

REWARD, DISCOUNT, AHEAD, ACTION, FIELDS = range(5)
"""The numbers of an item, kept as float32, which is exact for actions below 2^24; a row that is no item has AHEAD 0."""
TERMINATED, START = DISCOUNT, AHEAD
"""What stands in the places of the two while a window is open."""
TRIES = 8
"""Rows that a uniform draw looks at until one is an item; where a share f of rows is final, f^8 of draws find none."""


@dataclass(frozen=True)
class GridSample:
    """A batch and where its priorities belong."""

    batch: TensorBatch
    index: Tensor  # [B] int64: slot in time * E + environment
    generation: Tensor  # [B] int64: the tick of the row, counted from the grid's beginning


class Grid:
    """`length` ticks of E environments: single frames, and n-step transitions that are drawn as batches.

    Row t of an environment holds its observation at tick t and what was done there. The tick after an episode's end is
    the final row: it holds the observation that the episode ended with, and is never drawn. An item becomes sampleable
    n ticks after its own, also where its episode ended sooner. It stops being so `stack` - 1 ticks before its own row
    is overwritten, whether or not its frames reach back that far: so nothing but the position in time decides.

    All positions are tensors: no method waits for the device but those of the state, and each can be compiled or
    captured. Tensors keep their place. The same generator and the same calls give the same batches, to the bit.
    """

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        envs: int,
        n_step: int,
        gamma: float,
        sampler: UniformConfig | PrioritisedConfig,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Make an empty grid for `envs` environments of `spec`."""
        self.spec, self.length, self.envs, self.n_step, self.gamma = spec, length, envs, n_step, gamma
        self.stack = max(leaf.stack for leaf in spec.observations.values())
        self.rows, self.generator = length * envs, generator
        self.most = length - n_step - self.stack + 1
        """Ticks that are sampleable when the grid is full."""
        if self.most < 1:
            raise ConfigError(
                f"replay.capacity of {self.rows:,} rows holds {length} ticks of {envs} environments, but a window of "
                f"{n_step} steps and {self.stack} frames needs {n_step + self.stack}: "
                f"raise replay.capacity to {(n_step + self.stack) * envs:,} or more"
            )
        self.priorities = (
            DevicePriorities(sampler, self.rows, device) if isinstance(sampler, PrioritisedConfig) else None
        )
        self._make_columns(device)
        self._make_positions(device)

    def _make_columns(self, device: torch.device) -> None:
        """Make room for all rows and for the open windows."""
        spec, shape = self.spec, (self.length, self.envs)
        self.frames = {
            name: torch.zeros(*shape, *leaf.frame_shape, dtype=_dtype(leaf), device=device)
            for name, leaf in spec.observations.items()
        }
        self.fields = torch.zeros(FIELDS, *shape, device=device)
        self.stamp = torch.full((self.length,), -1, device=device)
        """The tick of each row, -1 for none."""
        self.mask = torch.zeros(*shape, spec.actions, dtype=torch.bool, device=device) if spec.masked else None
        self.age = torch.zeros(*shape, dtype=torch.uint8, device=device) if self.stack > 1 else None
        """Ticks since the episode's first, up to 255; only a frame stack asks."""
        self._age = torch.zeros(self.envs, dtype=torch.uint8, device=device)
        self._window = torch.zeros(self.n_step, FIELDS, self.envs, device=device)
        """The last n ticks, oldest first; zeros are no starts."""
        self._newest = self._window[-1].unbind()
        self._factors = window_factors(self.n_step, self.gamma).to(device)

    def _make_positions(self, device: torch.device) -> None:
        """Make the positions that each tick moves on: by `steps`, back to 0 at `wraps`, at most to `limits`."""
        rows, envs, endless = self.rows, self.envs, 2**62
        completed, leaving = -self.n_step % self.length, self.stack - 1
        moves = [
            (0, 1, endless, endless),
            (0, 1, self.length, endless),
            (completed, 1, self.length, endless),
            (completed * envs, envs, rows, endless),
            (leaving * envs, envs, rows, endless),
            ((completed * envs - 1) % rows, envs, rows, endless),
            (-self.n_step * envs, envs, endless, self.most * envs),
        ]
        self._positions, self._steps, self._wraps, self._limits = (
            torch.tensor(moves, device=device).t().contiguous().unbind()
        )
        self.ticks = self._positions[0]
        """Ticks so far."""
        self._tick, self._slot, self._completed = (self._positions[i : i + 1] for i in range(3))
        self._changing = self._positions[3:5]
        """The first row of the tick that the next one completes, and of the tick that it makes unsampleable."""
        self._last, self._complete_rows = self._positions[5], self._positions[6]
        """The last row that is complete, and how many are and may be drawn, those of no item included."""

    # ------------------------------------------------------------------ experience in

    def add(
        self,
        frames: dict[str, Tensor],
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        final: Tensor,
        mask: Tensor | None,
    ) -> None:
        """Store one tick of E environments: single frames [E, ...], what was done there and what came of it, each [E].

        `final` marks rows that only hold the observation an episode ended with: they follow every end
        of an episode, by rule or limit, which is how a window knows its end. `mask` [E, A] comes exactly when the spec
        is masked.
        """
        for name, frame in frames.items():
            self.frames[name].index_copy_(0, self._slot, frame.unsqueeze(0))
        self.stamp.index_copy_(0, self._slot, self._tick)
        if self.mask is not None and mask is not None:
            self.mask.index_copy_(0, self._slot, mask.unsqueeze(0))
        self._note_age(final)
        self._complete()
        self._open(action, reward, terminated, final)
        self._positions.add_(self._steps).fmod_(self._wraps).clamp_(max=self._limits)

    def _note_age(self, final: Tensor) -> None:
        """Keep how old the episodes are, and let them grow older but for those that `final` [E] begins anew."""
        if self.age is not None:
            self.age.index_copy_(0, self._slot, self._age.unsqueeze(0))
            self._age.copy_((self._age.clamp(max=OLDEST_AGE - 1) + 1) * ~final)

    def _complete(self) -> None:
        """Keep what the oldest open windows came to, and make their rows sampleable; take the next rows to go out."""
        fields = close_windows(self._window, self._factors, self.gamma)
        self.fields.index_copy_(1, self._completed, fields.unsqueeze(1))
        if self.priorities is not None:
            self.priorities.replace_rows(self._changing, self._window[0, START])

    def _open(self, action: Tensor, reward: Tensor, terminated: Tensor, final: Tensor) -> None:
        """Let the tick into all open windows and open its own."""
        if self.n_step > 1:
            self._window.copy_(self._window.roll(-1, 0))
        self._newest[REWARD].copy_(reward)
        self._newest[TERMINATED].copy_(terminated)
        self._newest[START].copy_(~final)
        self._newest[ACTION].copy_(action)

    # ------------------------------------------------------------------ batches out

    def sample(self, batch: int, beta: Tensor | float) -> GridSample:
        """Return `batch` transitions; `beta` is the exponent of the importance weights.

        A uniform draw that finds no item in `TRIES` rows has weight 0 (final rows are at most half of all, so with
        probability 2^-8 at worst, below 10^-10 for episodes of 20 steps); the others stay exactly uniform.
        """
        tries = TRIES if self.priorities is None else 1
        device = self.generator.device
        uniform = torch.rand(tries, batch, dtype=torch.float64, generator=self.generator, device=device)
        return self.sample_at(uniform, beta)

    def sample_at(self, uniform: Tensor, beta: Tensor | float) -> GridSample:
        """Return the transitions that `uniform` [tries, B] float64 in [0, 1) stands for."""
        if self.priorities is not None:
            return self.transitions(*self.priorities.draw(uniform[0], beta))
        return self.transitions(*self._draw(uniform))

    def _draw(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first row [B] of `uniform` [tries, B] that is an item, and weights [B]: 0 where none is."""
        row = (self._last - (uniform * self._complete_rows).long()) % self.rows
        starts = self.fields[AHEAD].view(-1).index_select(0, row.view(-1)).view_as(row) > 0.0
        found, attempt = starts.max(0)
        return row.gather(0, attempt.unsqueeze(0)).squeeze(0), found.float()

    def transitions(self, index: Tensor, weight: Tensor) -> GridSample:
        """Return the items at `index` [B], which must be sampleable, as a batch with importance weights [B]."""
        reward, discount, ahead, action = self.fields.view(FIELDS, -1).index_select(1, index).unbind()
        both = torch.cat((index, (index + (ahead * self.envs).long()) % self.rows))
        generation = self.stamp.index_select(0, index // self.envs)
        return GridSample(self._batch(both, action.long(), reward, discount, weight), index, generation)

    def _batch(self, both: Tensor, action: Tensor, reward: Tensor, discount: Tensor, weight: Tensor) -> TensorBatch:
        """Return a batch; `both` [2 * B] are its rows, then those that they bootstrap from: they are read together."""
        size = len(action)
        observations = {name: self._observe(name, both) for name in self.spec.observations}
        masks = None if self.mask is None else self.mask.flatten(0, 1).index_select(0, both)
        return TensorBatch(
            observation={name: value[:size] for name, value in observations.items()},
            action=action,
            reward=reward,
            discount=discount,
            next_observation={name: value[size:] for name, value in observations.items()},
            weight=weight,
            mask=None if masks is None else masks[:size],
            next_mask=None if masks is None else masks[size:],
            size=size,
        )

    def _observe(self, name: str, rows: Tensor) -> Tensor:
        """Return one leaf of the observations [M, ...] at `rows` [M], its frame stack rebuilt, oldest frame first."""
        leaf, frames = self.spec.observations[name], self.frames[name].flatten(0, 1)
        if leaf.stack == 1 or self.age is None:
            return frames.index_select(0, rows)
        age = self.age.view(-1).index_select(0, rows)
        source, before = stack_rows(rows, age, leaf.stack, self.envs, self.rows)
        stacked = frames.index_select(0, source.view(-1)).view(len(rows), *leaf.shape)
        if leaf.stack_padding == "zero":
            stacked.masked_fill_(before.view(*before.shape, *[1] * len(leaf.frame_shape)), 0)
        return stacked

    def update_priorities(self, index: Tensor, generation: Tensor, priority: Tensor) -> None:
        """Write the finite priorities [B] of sampled items that are still sampleable; a uniform grid has none."""
        if self.priorities is not None:
            oldest = self.ticks - (self.most + self.n_step)
            self.priorities.update(index, generation >= oldest, priority)

    # ------------------------------------------------------------------ numbers and state

    @property
    def sampleable(self) -> Tensor:
        """Which rows [length, E] are items that may be drawn now."""
        back = self.ticks - 1 - self.stamp
        complete = (self.stamp >= 0) & (back >= self.n_step) & (back < self.n_step + self.most)
        return complete.unsqueeze(1) & (self.fields[AHEAD] > 0.0)

    @property
    def count(self) -> Tensor:
        """The number of sampleable items, a scalar; looks at all rows."""
        return self.sampleable.sum()

    def _columns(self) -> dict[str, Tensor]:
        """Return what is kept of each row, by name, time first."""
        columns = {f"frames.{name}": frames for name, frames in self.frames.items()}
        columns |= {"fields": self.fields.transpose(0, 1), "stamp": self.stamp}
        if self.mask is not None:
            columns["mask"] = self.mask
        if self.age is not None:
            columns["age"] = self.age
        return columns

    def _layout(self) -> list[int]:
        return [self.length, self.envs, self.n_step, int(self.priorities is not None)]

    def state_dict(self) -> State:
        """Return everything that the future depends on, on the CPU. Waits for the device."""
        used = min(int(self.ticks), self.length)
        columns = {name: column[:used].to("cpu", copy=True) for name, column in self._columns().items()}
        return {**self.positions_dict(), "columns": columns}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` of a grid with the same settings returned, in the tensors that are there."""
        self.require_alike(state)
        self.clear_rows()
        for name, column in self._columns().items():
            column[: len(state["columns"][name])].copy_(state["columns"][name])
        self.load_positions(state)

    def positions_dict(self) -> State:
        """Return all but what is kept of each row, on the CPU. Waits for the device."""
        return {
            "layout": self._layout(),
            "positions": self._positions.to("cpu", copy=True),
            "window": self._window.to("cpu", copy=True),
            "age": self._age.to("cpu", copy=True),
            "priorities": self.priorities.state_dict() if self.priorities else None,
            "generator": self.generator.get_state(),
        }

    def load_positions(self, state: State) -> None:
        """Continue from `positions_dict`; the rows are there already."""
        self._positions.copy_(state["positions"])
        self._window.copy_(state["window"])
        self._age.copy_(state["age"])
        if self.priorities:
            self.priorities.load_state_dict(state["priorities"])
        self.generator.set_state(state["generator"])

    def require_alike(self, state: State) -> None:
        """Raise CheckpointError unless a saved state is that of a grid with these settings."""
        if list(state["layout"]) != self._layout() or set(state["columns"]) != set(self._columns()):
            raise CheckpointError(
                f"the saved replay has length, environments, n_step, prioritised {list(state['layout'])} with columns "
                f"{sorted(state['columns'])}; this run's has {self._layout()} with {sorted(self._columns())}: "
                f"resume with the settings that the run began with"
            )

    # ------------------------------------------------------------------ ticks, which are saved apart

    @property
    def tick_bytes(self) -> int:
        """The bytes of all that is kept of one tick."""
        return sum(column.element_size() * column[0].numel() for column in self._columns().values())

    def kept(self, ticks: int) -> tuple[int, int]:
        """Return the oldest tick that is there after so many, and the first one whose rows may still change."""
        oldest = max(ticks - self.length, 0)
        return oldest, max(ticks - self.n_step, oldest)

    def read_ticks(self, first: int, end: int) -> dict[str, Tensor]:
        """Return what is kept of the ticks from `first` to before `end`, on the CPU, by name. Waits for the device."""
        columns = self._columns().items()
        slot, count = first % self.length, end - first
        if slot + count <= self.length:
            return {name: column[slot : slot + count].to("cpu", copy=True) for name, column in columns}
        around = slot + count - self.length
        return {name: torch.cat((column[slot:], column[:around])).cpu() for name, column in columns}

    def write_ticks(self, first: int, since: int, columns: dict[str, Tensor]) -> None:
        """Take back what `read_ticks` returned of the ticks from `first` on, those from `since` on."""
        for name, column in self._columns().items():
            saved = torch.as_tensor(columns[name])[since - first :]
            slots = torch.arange(since, since + len(saved), device=column.device) % self.length
            column[slots] = saved.to(column.device)

    def clear_rows(self) -> None:
        """Have no ticks."""
        for name, column in self._columns().items():
            column.fill_(-1 if name == "stamp" else 0)


def split_sample(sample: GridSample, count: int) -> list[GridSample]:
    """Return `count` equally large samples in place of one."""
    parts = sample.batch.split(count), split(sample.index, count), split(sample.generation, count)
    return [GridSample(*part) for part in zip(*parts, strict=True)]


def window_factors(n_step: int, gamma: float) -> Tensor:
    """Return how much each tick of a window counts towards each of its fields [n, FIELDS, 1]."""
    factors = torch.ones(n_step, FIELDS, 1, dtype=torch.float64)
    factors[:, REWARD, 0] = gamma ** torch.arange(n_step, dtype=torch.float64)
    factors[1:, ACTION] = 0.0
    return factors.float()


def close_windows(window: Tensor, factors: Tensor, gamma: float) -> Tensor:
    """Return the fields [FIELDS, E] of the items whose windows are the ticks `window` [n, FIELDS, E].

    A window reaches to the tick before the first that is no start; one that begins with such a tick is no item.
    """
    inside = window[:, START].cumprod(0)
    fields = (window * factors * inside.unsqueeze(1)).sum(0)
    power = torch.pow(gamma, fields[AHEAD])
    # only the last tick of a window can have terminated: then there is nothing to bootstrap from
    fields[DISCOUNT] = power - power * fields[TERMINATED]
    return fields


def stack_rows(rows: Tensor, age: Tensor, stack: int, envs: int, total: int) -> tuple[Tensor, Tensor]:
    """Return which of `total` rows the frame stacks at `rows` [M] are made of, and what is before the episode's first.

    Both are [M, stack], oldest frame first; before the first frame stands the first one. `age` [M] is that of `rows`.
    """
    back, age = torch.arange(stack - 1, -1, -1, device=rows.device), age.unsqueeze(1)
    return (rows.unsqueeze(1) - torch.minimum(back, age) * envs) % total, back > age


def row_bytes(spec: EnvSpec, sampler: UniformConfig | PrioritisedConfig) -> dict[str, float]:
    """Return the bytes that a grid takes for each row, by what they are for."""
    columns: dict[str, float] = {f"observation '{name}'": leaf.frame_bytes for name, leaf in spec.observations.items()}
    columns["fields"] = 4 * FIELDS
    if spec.masked:
        columns["mask"] = spec.actions
    if any(leaf.stack > 1 for leaf in spec.observations.values()):
        columns["age"] = 1
    if isinstance(sampler, PrioritisedConfig):
        columns["sampler"] = TREE_BYTES
    return columns


def grid_bytes(spec: EnvSpec, length: int, envs: int, n_step: int, sampler: UniformConfig | PrioritisedConfig) -> int:
    """Return the bytes of a grid's tensors, but for a few scalars."""
    columns = row_bytes(spec, sampler)
    tree = tree_bytes(length * envs) if columns.pop("sampler", None) else 0
    return int(length * envs * sum(columns.values())) + 8 * length + (4 * FIELDS * n_step + 1) * envs + tree


def largest_length(
    spec: EnvSpec, envs: int, n_step: int, sampler: UniformConfig | PrioritisedConfig, available: int
) -> int:
    """Return how many ticks of `envs` environments fit `available` bytes."""
    lengths = range(1, available // envs + 1)  # a row takes more than a byte
    return bisect_right(lengths, available, key=lambda length: grid_bytes(spec, length, envs, n_step, sampler))


def _dtype(leaf: LeafSpec) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
