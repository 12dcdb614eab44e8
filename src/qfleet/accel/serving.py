"""Values of batches that differ in size, on any device: staged in memory that stays put, computed in few shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from qfleet.accel.graphs import Recording
from qfleet.algo.networks import QNetwork
from qfleet.core.spec import LeafSpec
from qfleet.core.types import Floats, Leaves

SMALLEST = 16
"""Rows of the smallest batch on a GPU; larger ones are padded to the next power of two, so that few are recorded."""

Values = Callable[[dict[str, Tensor]], Tensor]


class BatchedValues:
    """A network that values up to `capacity` rows, which are written into `inputs` and `states` beforehand.

    On a CPU the rows are computed as they are. On a GPU they are copied up and down in pinned memory, padded with
    whatever an older batch left behind, and each of the few sizes can be recorded as a CUDA graph.
    """

    inputs: Leaves
    """[capacity, ...] where the observations' rows are written."""
    states: Floats
    """[capacity, S] where the memories before them are written; S is 0 without memory."""

    def __init__(
        self,
        network: QNetwork,
        observations: Mapping[str, LeafSpec],
        actions: int,
        capacity: int,
        generator: torch.Generator,
        values: Values | None = None,
        recorded: bool = False,
    ) -> None:
        """Take a network on its device, and what values actions in its place (not those with memory)."""
        self._network, self._generator, self._actions = network, generator, actions
        self._values = values or network.q
        self._device = generator.device
        self._recorded = recorded
        self._runs: dict[int, Callable[[], object]] = {}
        memory = network.initial_state(0).shape[1]
        staged = {name: self._host((capacity, *leaf.shape), leaf.dtype) for name, leaf in observations.items()}
        state, results = self._host((capacity, memory)), self._host((capacity, actions + memory))
        self.inputs = {name: tensor.numpy() for name, tensor in staged.items()}
        self.states = state.numpy()
        self._staged, self._state, self._results = staged, state, results
        self._on_device = {name: self._twin(tensor) for name, tensor in staged.items()}
        self._state_on_device, self._results_on_device = self._twin(state), self._twin(results)

    def __call__(self, rows: int) -> tuple[Floats, Floats]:
        """Return the values [rows, A] and the memories after [rows, S]. They are valid until the next call.

        On a GPU this waits for the device: the results are wanted now.
        """
        if self._device.type == "cpu":
            with torch.inference_mode():
                self._compute(rows)
        else:
            self._compute_on_device(rows)
        results = self._results[:rows].numpy()
        return results[:, : self._actions], results[:, self._actions :]

    def _compute_on_device(self, rows: int) -> None:
        size = min(max(SMALLEST, 2 ** math.ceil(math.log2(rows))), len(self._results))
        if size not in self._runs:
            self._runs[size] = Recording(lambda: self._compute(size), (self._generator,), self._recorded)
        with torch.no_grad():
            for name, tensor in self._staged.items():
                self._on_device[name][:rows].copy_(tensor[:rows], non_blocking=True)
            self._state_on_device[:rows].copy_(self._state[:rows], non_blocking=True)
            self._runs[size]()
            self._results[:rows].copy_(self._results_on_device[:rows], non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def _compute(self, rows: int) -> None:
        """Value the first rows, with weight noise of their own."""
        self._network.resample_noise(self._generator)
        observation = {name: tensor[:rows] for name, tensor in self._on_device.items()}
        results = self._results_on_device[:rows]
        if not self._network.recurrent:
            results.copy_(self._values(observation))
            return
        q, after = self._network.recall(observation, self._state_on_device[:rows])
        results.copy_(torch.cat([q, after], dim=1))

    def _host(self, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        """Return zeros from which copies to the device need not wait."""
        zeros = torch.from_numpy(np.zeros(shape, dtype))
        return zeros if self._device.type == "cpu" else zeros.pin_memory()

    def _twin(self, tensor: Tensor) -> Tensor:
        """Return the tensor's like on the device; on a CPU itself."""
        return tensor.to(self._device)
