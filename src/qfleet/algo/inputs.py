"""The first stage of a network: turns raw observations into scaled float tensors, so that acting takes raw ones."""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec, LeafSpec


class InputConfig(Config):
    """What happens to observations before the first layer. Pixels (uint8) are always divided by 255."""

    scale: tuple[float, ...] = ()
    """Multipliers of the number leaves' elements (flattened, in the order of the observation's leaves): one for each
    element, or a single one for all. Empty leaves them as they are."""
    normalize: bool = False
    """Shift and scale each element of the number leaves by the running mean and deviation of what was learned from."""
    clip: float = Field(default=10.0, gt=0)
    """Bound of the normalised elements, in standard deviations."""
    embedding: int = Field(default=0, ge=0)
    """Size of a learned vector for each category of a Discrete leaf; 0 encodes categories as one-hot vectors."""

    @model_validator(mode="after")
    def _check_one_scaling(self) -> InputConfig:
        if self.scale and self.normalize:
            raise ValueError("set either 'scale' or 'normalize', not both: normalisation undoes a fixed scale")
        return self


class Inputs(nn.Module):
    """Prepares the leaves of a batch of observations: floats of the leaf's shape, categories as vectors.

    `shapes` tells the shape of each prepared leaf, without the batch axis.
    """

    shapes: dict[str, tuple[int, ...]]

    def __init__(self, config: InputConfig, spec: EnvSpec) -> None:
        super().__init__()
        self._leaves = dict(spec.observations)
        # Module names may not hold the dots of nested leaves, so sub-modules are numbered in the spec's order.
        scales = _split_scale(config.scale, self._leaves)
        stages = [_stage(config, leaf, scales.get(name)) for name, leaf in self._leaves.items()]
        self.stages = nn.ModuleList(stages)
        self._staged = list(zip(self._leaves, stages, strict=True))
        self.shapes = {name: _prepared_shape(config, leaf) for name, leaf in self._leaves.items()}

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the prepared leaves [B, *shapes[name]] in float32."""
        return {name: stage(observation[name]) for name, stage in self._staged}

    def observe(self, observation: dict[str, Tensor]) -> None:
        """Let the running statistics take a batch of raw observations in; nothing happens without `normalize`."""
        for name, stage in self._staged:
            if isinstance(stage, _Normalize):
                stage.observe(observation[name])


class _Pixels(nn.Module):
    def forward(self, leaf: Tensor) -> Tensor:
        return leaf.float().div_(255)


class _Numbers(nn.Module):
    def forward(self, leaf: Tensor) -> Tensor:
        return leaf.float()


class _Scale(nn.Module):
    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        # A setting, not a state: it is built again from the config.
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, leaf: Tensor) -> Tensor:
        return leaf.float() * self.scale


class _Normalize(nn.Module):
    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float) -> None:
        super().__init__()
        self._clip = clip
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, leaf: Tensor) -> Tensor:
        return ((leaf.float() - self.mean) * (self.variance + 1e-8).rsqrt()).clamp_(-self._clip, self._clip)

    @torch.no_grad()
    def observe(self, leaf: Tensor) -> None:
        """Merge a batch's moments into the running ones (Chan et al., 1979); the first batch sets them."""
        leaf = leaf.float()
        total = self.count + len(leaf)
        share = len(leaf) / total
        variance, mean = torch.var_mean(leaf, dim=0, correction=0)
        difference = mean - self.mean
        self.variance.mul_(1 - share).add_(share * variance + share * (1 - share) * difference.square())
        self.mean.add_(share * difference)
        self.count.copy_(total)


class _OneHot(nn.Module):
    def __init__(self, categories: int) -> None:
        super().__init__()
        self._categories = categories

    def forward(self, leaf: Tensor) -> Tensor:
        return nn.functional.one_hot(leaf.long(), self._categories).float()


class _Embedding(nn.Embedding):
    def forward(self, leaf: Tensor) -> Tensor:
        return super().forward(leaf.long())


def _is_number(leaf: LeafSpec) -> bool:
    return leaf.categories is None and leaf.dtype not in ("uint8", "bool")


def _stage(config: InputConfig, leaf: LeafSpec, scale: Tensor | None) -> nn.Module:
    if leaf.categories is not None:
        return _Embedding(leaf.categories, config.embedding) if config.embedding else _OneHot(leaf.categories)
    if leaf.dtype == "uint8":
        return _Pixels()
    if not _is_number(leaf):
        return _Numbers()
    if config.normalize:
        return _Normalize(leaf.shape, config.clip)
    return _Numbers() if scale is None else _Scale(scale)


def _prepared_shape(config: InputConfig, leaf: LeafSpec) -> tuple[int, ...]:
    if leaf.categories is not None:
        return (config.embedding or leaf.categories,)
    return leaf.shape


def _split_scale(scale: tuple[float, ...], leaves: dict[str, LeafSpec]) -> dict[str, Tensor]:
    """Return the part of the scaling vector that belongs to each number leaf, in the leaf's shape."""
    if not scale:
        return {}
    sizes = {name: math.prod(leaf.shape) for name, leaf in leaves.items() if _is_number(leaf)}
    total = sum(sizes.values())
    if len(scale) not in (1, total):
        raise ConfigError(
            f"network.input.scale has {len(scale)} entries, but the observation has {total} numbers:"
            f" give {total} multipliers, or one for all of them"
        )
    values = torch.tensor(scale if len(scale) == total else scale * total, dtype=torch.float32)
    parts = torch.split(values, list(sizes.values()))
    return {name: part.reshape(leaves[name].shape).clone() for name, part in zip(sizes, parts, strict=True)}
