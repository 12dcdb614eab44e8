"""Cuts a network into the stages of a pipeline: which layers each has, and the module that runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.errors import ConfigError
from qfleet.parallel.points import Named, chain

_PROBE = 2
"""Observations that are passed through a network to see shapes and costs."""


@dataclass(frozen=True)
class Cut:
    """The torso's layers of each stage; the head is in the last stage, whose own list may be empty."""

    stages: list[list[Named]]
    shapes: list[tuple[int, ...]]
    """What enters the first of each stage's layers, for one observation; of the first stage it is not used."""
    features: int
    dtype: torch.dtype
    """Of what passes between stages."""


def plan_cut(network: QNetwork, degree: int) -> Cut:
    """Divide the torso's layers and the head into `degree` stages, the costliest of which is as cheap as can be."""
    torso = cast(Torso, network.torso)
    found = chain(network)
    layers: list[Named] = [("torso", torso)] if found is None else found.layers
    dtype = next(network.parameters()).dtype
    if degree == 1:
        return Cut([layers], [()], torso.features, dtype)
    starts = [i for i, (_, layer) in enumerate(layers) if any(p.ndim > 1 for p in layer.parameters())]
    if degree > len(starts) + 1:
        raise ConfigError(
            f"pipeline {degree} needs {degree - 1} places to cut, and the network names {len(starts)}: pipeline"
            f" {' or '.join(map(str, range(1, len(starts) + 2)))} would work; a network of your own can name more"
            " parts by split_points() (see qfleet.parallel.points.SplitPoints)"
        )
    costs, shapes = _probe(network, layers)
    # The first layers belong to the first stage, whatever they are; the last stage may be the head alone.
    choices = itertools.combinations([*starts[1:], len(layers)], degree - 1)
    cuts = min(choices, key=lambda cuts: max(sum(costs[a:b]) for a, b in _spans(cuts, len(layers) + 1)))
    spans = _spans(cuts, len(layers))
    entering = [shapes[a] for a, _ in spans]
    return Cut([layers[a:b] for a, b in spans], entering, torso.features, dtype)


def _spans(cuts: tuple[int, ...], end: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *cuts, end)))


@torch.no_grad()
def _probe(network: QNetwork, layers: Sequence[Named]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the operations of each layer and of the head, and the shape of what enters each."""
    torso, generator = cast(Torso, network.torso), torch.Generator().manual_seed(0)
    shapes = {name: (_PROBE, *shape) for name, shape in torso.inputs.shapes.items()}
    weight = next(network.parameters())
    prepared = {name: torch.rand(shape, generator=generator).to(weight) for name, shape in shapes.items()}
    if layers[0][1] is torso:
        modules, passing, features = [torso.body], cast(Any, prepared), torso.body(prepared)
    else:
        first = getattr(torso.body, "module", layers[0][1])  # a user's own parts are given what all of it is given
        modules, (features, passing) = [layer for _, layer in layers], _entering(torso, first, prepared)
    costs, entering = [], []
    try:
        for module in modules:
            entering.append(_shape(passing))
            cost, passing = _counted(module, passing)
            costs.append(cost)
        same = torch.allclose(passing.flatten(1), features, rtol=1e-3, atol=1e-5)
    except RuntimeError:  # one part cannot take what another returned
        same = False
    if not same:
        raise ConfigError(
            "the parts that split_points() names do not do what forward() does when each is called with what the one"
            " before it returned: put everything that forward() does into parts, in their order"
        )
    return [*costs, _counted(network.head, features)[0]], [*entering, _shape(features)]


def _entering(torso: Torso, first: nn.Module, prepared: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """Return a torso's features, and what its first module was given for them."""
    entered: list[Any] = []
    hook = first.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    features = torso.body(prepared)
    hook.remove()
    return features, entered[0]


def _counted(module: nn.Module, given: Any) -> tuple[int, Any]:
    """Return the operations of a module's call, and what it returned."""
    with FlopCounterMode(display=False) as counter:
        result = module(given)
    return counter.get_total_flops(), result


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given.shape[1:]) if isinstance(given, Tensor) else ()


class FirstStage(nn.Module):
    """Maps raw leaves [B, ...], in the order of the inputs, to what the next stage takes: [B, N]."""

    def __init__(self, torso: Torso) -> None:
        """Take a torso that has lost the layers of the other stages."""
        super().__init__()
        self.torso = torso
        self.leaves = tuple(torso.inputs.shapes)

    def forward(self, *leaves: Tensor) -> Tensor:
        """Map raw leaves to the first layers' output."""
        return cast(Tensor, self.torso(dict(zip(self.leaves, leaves, strict=True)))).flatten(1)


class LaterStage(nn.Module):
    """Maps what the stage before gave [B, N] to what the next one takes, or to the features [B, F]."""

    def __init__(self, layers: Sequence[nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self._shape = nn.Sequential(*layers), shape

    def forward(self, given: Tensor) -> Tensor:
        """Map [B, N] to the last layer's output."""
        return cast(Tensor, self.layers(given.view(len(given), *self._shape))).flatten(1)


class Told(nn.Module):
    """Stands for the torso where other ranks have run it: looks its features up by who they belong to."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Return the features [B, F] of this network."""
        return features[self._who]


def take_stage(network: QNetwork, cut: Cut, index: int, who: str) -> FirstStage | LaterStage:
    """Return what runs one stage's layers, and leave in the network nothing but the head, if it is the last stage.

    There its torso is given the features, by the key `who`. Parameters keep their identity.
    """
    torso, holder = cast(Torso, network.torso), cast(Any, network)
    found, last = chain(network), index == len(cut.stages) - 1
    stage: FirstStage | LaterStage
    layers = [network.get_submodule(name) for name, _ in cut.stages[index]]
    if index == 0:
        if found is not None:
            found.trim(layers)
        stage = FirstStage(torso)
    else:
        stage = LaterStage(layers, cut.shapes[index])
    holder.torso = Told(who)
    if not last:
        holder.head = nn.Identity()
    return stage


def widths_between(cut: Cut) -> list[int]:
    """Return the numbers per observation that pass from each stage to the next, and the features at the end."""
    return [*(math.prod(shape) for shape in cut.shapes[1:]), cut.features]
