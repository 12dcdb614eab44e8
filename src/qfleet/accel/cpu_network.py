"""Small dense networks on a CPU by compiled loops: what `accel.mlp` does with torch's operations, in a few calls.

Equal but for rounding. Importing this loads what numba compiled, or compiles it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.accel import cpu_loops, dense
from qfleet.accel.cpu_loops import FEW, FIELDS, NORMAL, OUTPUTS, RATES, SLOPE, VALUES, Library, Network
from qfleet.accel.mlp import Prepare, Ways, sequences, split
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.gradients import DeepAgent
from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.tensors import TensorBatch
from qfleet.core.types import Floats


@cache
def library() -> Library | None:
    """Return the matrix product that torch itself uses, or None where its library does not show it."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            address = ctypes.cast(ctypes.CDLL(str(path)).sgemm_, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        words = np.zeros(9, np.int64)
        words[0] = address or 0
        return words, np.array((1, 0), np.float32)
    return None


class CompiledNetwork:
    """A network as a plan for the loops, on the network's own weights, with memory that is used again."""

    def __init__(self, network: QNetwork) -> None:
        assert isinstance(network.torso, Torso)
        found = library()
        assert found is not None
        self._prepare, self._library = Prepare(network.torso.inputs), found
        trunk, *heads = (split(modules) for modules in sequences(network))
        self._plan = np.array(_plan(trunk, heads), np.int64)
        self._eps = np.array([_eps(block) for blocks in (trunk, *heads) for block in blocks], np.float32)
        weight = heads[0][-1][0].weight
        assert isinstance(weight, Tensor)
        assert weight.grad is not None, "the network has no FlatParameters"
        self._arrays = _whole(weight), _whole(weight.grad)
        last = len(self._plan) - 1
        self._ends = (last, -1) if len(heads) == 1 else (last - len(heads[1]), last)
        self._arrange(0)

    def _arrange(self, rows: int) -> None:
        """Make memory for so many rows."""
        plan, place = self._plan, FEW * int(self._plan[:, OUTPUTS].max())
        for layer in plan:
            for field in (VALUES, NORMAL, SLOPE, RATES):
                layer[field] = place
                place += rows * (1 if field == RATES else int(layer[OUTPUTS]))
        memory = torch.zeros(place)
        self._rows, self._memory = rows, memory
        self._network: Network = (plan, *self._arrays, memory.numpy(), self._ends)
        self._views: dict[tuple[int, int], Tensor] = {}

    def forward(self, *observations: dict[str, Tensor]) -> Tensor:
        """Return the values [N, A] of equally long batches of raw leaves, one batch after the other."""
        rows = self._prepare(observations)
        if rows > self._rows:
            self._arrange(rows)
        cpu_loops.forward(self._network, self._prepare.rows(rows).array, self._eps, self._library)
        return self.values(rows)

    def backward(self, rows: int) -> None:
        """Fill all gradients for the `slope` of the values of the first rows."""
        cpu_loops.backward(self._network, self._prepare.rows(rows).array, self._library)

    def values(self, rows: int) -> Tensor:
        """Return the values [rows, A] of the first rows."""
        return self._view(VALUES, rows)

    def slope(self, rows: int) -> Tensor:
        """Return where the slope [rows, A] of the values of the first rows goes."""
        return self._view(SLOPE, rows)

    def _view(self, field: int, rows: int) -> Tensor:
        view = self._views.get((field, rows))
        if view is None:
            layer = self._plan[self._ends[0]]
            start, actions = int(layer[field]), int(layer[OUTPUTS])
            view = self._memory[start : start + rows * actions].view(rows, actions)
            self._views[field, rows] = view
        return view


def _plan(trunk: list[list[nn.Module]], heads: list[list[list[nn.Module]]]) -> list[list[int]]:
    """Return the rows of the plan but for places in memory: the trunk's layers, then those of the streams after it."""
    plan: list[list[int]] = []
    for blocks in (trunk, *heads):
        source = len(trunk) - 1 if plan else -1
        for linear, *others in blocks:
            assert isinstance(linear, nn.Linear)
            norm = next((module for module in others if isinstance(module, nn.LayerNorm)), None)
            flags = [len(others) > 0, norm is not None]
            tensors = [linear.weight, linear.bias, *((norm.weight, norm.bias) if norm else ())]
            places = [tensor.storage_offset() for tensor in tensors]
            row = [linear.in_features, linear.out_features, source, *flags, *places]
            source = len(plan)
            plan.append(row + [0] * (FIELDS - len(row)))
    return plan


def _eps(block: Sequence[nn.Module]) -> float:
    return next((module.eps for module in block if isinstance(module, nn.LayerNorm)), 0.0)


def _whole(part: Tensor) -> Floats:
    """Return all of the memory that a tensor is a part of."""
    whole: Floats = torch.empty(0).set_(part.detach().untyped_storage()).numpy()
    return whole


def replay_slope(
    agent: ReplayAgent, values: Tensor, choice: Tensor, following: Tensor, batch: TensorBatch, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `dense.replay_slope` does."""
    if batch.next_mask is not None:
        return dense.replay_slope(agent, values, choice, following, batch, slope)
    rows = len(batch.action)
    priority, sums = np.empty(rows, np.float32), np.empty(2, np.float32)
    cpu_loops.replay_loss(
        values.numpy(),
        choice.numpy()[-rows:],
        following.numpy(),
        _line(batch.action),
        _line(batch.reward),
        _line(batch.discount),
        _line(batch.weight),
        batch.size,
        _threshold(agent),
        slope.numpy(),
        priority,
        sums,
    )
    total, mean = torch.from_numpy(sums).unbind()
    return total, torch.from_numpy(priority), mean


def regression_slope(
    agent: DeepAgent, values: Tensor, action: Tensor, goal: Tensor, weight: Tensor | None, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `dense.regression_slope` does."""
    weights = np.ones(len(action), np.float32) if weight is None else _line(weight)
    sums = np.empty(2, np.float32)
    cpu_loops.regression_loss(
        values.numpy(), _line(action), _line(goal), weights, _threshold(agent), slope.numpy(), sums
    )
    total, mean = torch.from_numpy(sums).unbind()
    return total, mean


def _threshold(agent: DeepAgent) -> float:
    return agent.huber_threshold if agent.loss == "huber" else math.inf


def _line(values: Tensor) -> Any:
    """Return a tensor [B] as an array without gaps."""
    return values.contiguous().numpy()


COMPILED = Ways(CompiledNetwork, replay_slope, regression_slope)
