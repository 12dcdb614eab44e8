"""Where a network can be taken apart: between which layers, and which layers by their channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from qfleet.algo.networks import QNetwork
from qfleet.algo.torsos import Torso
from qfleet.core.errors import ConfigError

Named = tuple[str, nn.Module]
"""A layer and its name in the unsplit network."""
ELEMENTWISE = (nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh)
"""What may stand between the two layers of a pair, of which each rank has some channels only."""


@dataclass(frozen=True)
class SplitPoints:
    """How a module of the user's own can be split, by the names that its submodules have in it."""

    parts: tuple[str, ...] = ()
    """Submodules that do all of `forward` when each is called with what the one before it returned; a pipeline is cut
    between them."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Two layers (nn.Linear or nn.Conv2d) of which the second takes what the first gives, with nothing but functions
    of single elements or channels between them. Ranks split the first by its outputs and the second by its inputs."""
    lone: tuple[str, ...] = ()
    """Layers that ranks split by their outputs, which all of them then get; whatever is named nowhere is not split."""


@runtime_checkable
class Splittable(Protocol):
    """A user's network class that can be split has this method besides `forward`."""

    def split_points(self) -> SplitPoints:
        """Return where this module can be split."""


@dataclass
class Widths:
    """The layers to split by channels."""

    pairs: list[tuple[Named, Named]] = field(default_factory=list)
    lone: list[Named] = field(default_factory=list)


@dataclass(frozen=True)
class Chain:
    """The layers of a torso that come one after another, and how to keep only the first ones of them."""

    layers: list[Named]
    trim: Callable[[Sequence[nn.Module]], None]


def chain(network: QNetwork) -> Chain | None:
    """Return the layers between which the torso can be cut; None for one that does not name any."""
    assert isinstance(network.torso, Torso)
    body: Any = network.torso.body
    own = getattr(body, "module", None)
    if own is not None:
        parts = own.split_points().parts if isinstance(own, Splittable) else ()
        named = [(f"torso.body.module.{name}", _submodule(own, name)) for name in parts]
        return Chain(named, partial(_replace, body, "module")) if named else None
    if hasattr(body, "images"):  # several images are joined, so they are no chain
        if len(network.torso.inputs.shapes) > 1:
            return None
        layers = _children("torso.body.images.0", body.images[0])
        return Chain(layers, partial(_replace, body.images, "0"))
    return Chain(_children("torso.body.layers", body.layers), partial(_replace, body, "layers"))


def layers_of(network: QNetwork) -> list[Named]:
    """Return the layers that are called one after another: those of a torso that names them, and those of the head."""
    torso = chain(network)
    return [*(torso.layers if torso else []), *(layer for stream in _streams(network) for layer in stream)]


def widths(network: QNetwork, stages: Sequence[Sequence[Named]]) -> Widths:
    """Return the layers to split by channels, given the torso's layers of each pipeline stage.

    Of a head the hidden layer and the one after it are a pair; without a hidden layer a head is small, and each rank
    has all of it. Noisy layers are never split.
    """
    found = Widths()
    body: Any = cast(Torso, network.torso).body
    if hasattr(body, "module"):
        _add_own(found, body.module, stages)
    elif chain(network) is None:  # several images, all in the first stage
        for index, image in enumerate(body.images):
            _add_in_order(found, _children(f"torso.body.images.{index}", image))
    else:
        for layers in stages:
            _add_in_order(found, layers)
    for layers in _streams(network):
        stream = Widths()
        _add_in_order(stream, layers)
        found.pairs += stream.pairs
        found.lone += [named for named in stream.lone if named != layers[-1]]
    return found


def _streams(network: QNetwork) -> list[list[Named]]:
    """Return the layers of each stream of the head."""
    streams = cast(Any, network.head).streams
    names = ("advantage", "value")
    return [_children(f"head.streams.{name}", getattr(streams, name) or nn.Sequential()) for name in names]


def _add_own(found: Widths, own: nn.Module, stages: Sequence[Sequence[Named]]) -> None:
    points = own.split_points() if isinstance(own, Splittable) else SplitPoints()
    prefix = "torso.body.module."

    def named(name: str) -> Named:
        return prefix + name, _submodule(own, name)

    for first, second in points.pairs:
        if len(stages) > 1 and _stage_of(prefix + first, stages) != _stage_of(prefix + second, stages):
            raise ConfigError(
                f"the layers '{first}' and '{second}' of {type(own).__name__} are split as a pair, so they cannot be in"
                " two pipeline stages: name them in one of its parts, or as lone layers"
            )
        found.pairs.append((named(first), named(second)))
    found.lone += [named(name) for name in points.lone]


def _stage_of(name: str, stages: Sequence[Sequence[Named]]) -> int:
    return next(i for i, layers in enumerate(stages) if any(f"{name}.".startswith(f"{part}.") for part, _ in layers))


def _add_in_order(found: Widths, layers: Sequence[Named]) -> None:
    """Pair layers that follow each other; one that something else follows is split alone."""
    waiting: Named | None = None
    for name, layer in layers:
        if isinstance(layer, nn.Linear | nn.Conv2d) and not is_parametrized(layer):
            if waiting is None:
                waiting = (name, layer)
            else:
                found.pairs.append((waiting, (name, layer)))
                waiting = None
        elif not isinstance(layer, ELEMENTWISE):
            if waiting is not None:
                found.lone.append(waiting)
            waiting = None
            if isinstance(inner := getattr(layer, "layers", None), nn.Sequential):  # a residual block
                _add_in_order(found, _children(f"{name}.layers", inner))
    if waiting is not None:
        found.lone.append(waiting)


def _children(prefix: str, sequence: nn.Module) -> list[Named]:
    return [(f"{prefix}.{key}", layer) for key, layer in sequence.named_children()]


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ConfigError(
            f"{type(module).__name__}.split_points() names '{name}', which it has no submodule of: it has"
            f" {', '.join(key for key, _ in module.named_modules() if key)}"
        ) from None


def _replace(parent: nn.Module, key: str, layers: Sequence[nn.Module]) -> None:
    setattr(parent, key, nn.Sequential(*layers))
