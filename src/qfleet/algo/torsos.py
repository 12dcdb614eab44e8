"""The middle stage of a network: from prepared observations to a vector of features, for vectors, pixels and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from qfleet.algo.inputs import InputConfig, Inputs
from qfleet.algo.layers import Activation, Dropout, NoisyLinear, activation_layer
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec


class _LayersConfig(Config):
    input: InputConfig = InputConfig()
    """What happens to observations before the first layer."""
    activation: Activation = "relu"
    """The function after each hidden layer."""
    layer_norm: bool = False
    """Normalise each hidden layer before its activation (convolutions: over channels and positions)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each dense hidden layer that is zeroed while learning."""


class MlpConfig(_LayersConfig):
    """Dense layers over the flattened observation."""

    kind: Literal["mlp"] = "mlp"
    """Selects this network."""
    hidden: tuple[Annotated[int, Field(gt=0)], ...] = (128, 128)
    """Widths of the hidden layers. The last one belongs to the head: a dueling head has it once for each stream."""
    spectral_norm: bool = False
    """Bound the spectral norm of the torso's layers (all hidden ones but the last) by 1."""

    @property
    def dense(self) -> int:
        """Width of the head's hidden layer, 0 for none."""
        return self.hidden[-1] if self.hidden else 0


class NatureConfig(_LayersConfig):
    """Three convolutions and a dense layer, made for 84x84 pixels (Mnih et al., 2015)."""

    kind: Literal["nature"] = "nature"
    """Selects this network."""
    dense: int = Field(default=512, ge=0)
    """Width of the hidden layer after the convolutions (of each stream of a dueling head), 0 for none."""
    spectral_norm: bool = False
    """Bound the spectral norm of the convolutions by 1."""
    initialisation: Literal["torch", "glorot"] = "torch"
    """How weights begin: as torch makes them, or as Glorot and Bengio (2010) with biases of 0, which makes those of
    dense layers about twice as large."""
    padding: Literal["valid", "same"] = "valid"
    """Whether convolutions stay inside the image, as published (7x7 positions remain of 84x84 pixels), or go beyond
    its edges so that one position in `stride` remains (11x11), as in Dopamine: 2.5 times the dense layer's weights."""


class ImpalaConfig(_LayersConfig):
    """Three blocks of convolution, pooling and residual layers (Espeholt et al., 2018)."""

    kind: Literal["impala"] = "impala"
    """Selects this network."""
    channels: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(16, 32, 32), min_length=1)
    """Channels of each block before `width` multiplies them."""
    width: int = Field(default=1, gt=0)
    """Multiplier of the channels."""
    pool: int = Field(default=0, ge=0)
    """Side to which an adaptive max-pool brings the last image (6 makes 6x6), 0 for no pooling."""
    dense: int = Field(default=256, ge=0)
    """Width of the hidden layer after the convolutions (of each stream of a dueling head), 0 for none."""
    spectral_norm: bool = False
    """Bound the spectral norm of the residual convolutions by 1."""


class SmallCnnConfig(_LayersConfig):
    """Padded 3x3 convolutions for small grids, such as MinAtar's 10x10."""

    kind: Literal["small_cnn"] = "small_cnn"
    """Selects this network."""
    channels: tuple[Annotated[int, Field(gt=0)], ...] = Field(default=(16,), min_length=1)
    """Channels of each convolution."""
    dense: int = Field(default=128, ge=0)
    """Width of the hidden layer after the convolutions (of each stream of a dueling head), 0 for none."""
    spectral_norm: bool = False
    """Bound the spectral norm of the convolutions by 1."""


class TabularConfig(Config):
    """One number for each state and action; the observation must be one Discrete value."""

    kind: Literal["tabular"] = "tabular"
    """Selects this network."""
    initial: float = 0.0
    """What every entry of the table starts with; above what can be reached, it makes the agent explore."""


class CustomConfig(_LayersConfig):
    """A module class of the user's own as the torso; every head and algorithm works with it.

    The class is called with the `EnvSpec` alone. Its `forward` gets the prepared observation (float32 of the leaf's
    shape, pixels in 0..1, categories as vectors): one tensor [B, ...], or a dict of them for a Dict observation.
    It returns features [B, F] of any width F. Parameters are float32. Random layers should be qfleet's
    (`algo.layers.Dropout`), whose random numbers resume exactly.
    """

    kind: Literal["custom"] = "custom"
    """Selects this network."""
    dense: int = Field(default=0, ge=0)
    """Width of a hidden layer that the head adds after the features, 0 for none."""


TorsoFactory = Callable[[EnvSpec], nn.Module]
"""A user's module class (or function) for the network 'custom'; see `CustomConfig` for what it must do."""
DeepConfig = MlpConfig | NatureConfig | ImpalaConfig | SmallCnnConfig | CustomConfig
NetworkConfig = Annotated[DeepConfig | TabularConfig, Field(discriminator="kind")]


def hidden_layer(config: DeepConfig, inputs: int, outputs: int, noisy: bool = False) -> list[nn.Module]:
    """Return the layers of one dense hidden layer; none if `outputs` is 0."""
    if outputs == 0:
        return []
    layers: list[nn.Module] = [NoisyLinear(inputs, outputs) if noisy else nn.Linear(inputs, outputs)]
    if config.layer_norm:
        layers.append(nn.LayerNorm(outputs))
    layers.append(activation_layer(config.activation))
    if config.dropout:
        layers.append(Dropout(config.dropout))
    return layers


class Torso(nn.Module):
    """From raw observations to features: the input stage and a body that depends on the network's kind."""

    features: int

    def __init__(self, config: DeepConfig, spec: EnvSpec, custom: TorsoFactory | None) -> None:
        super().__init__()
        self.inputs = Inputs(config.input, spec)
        self.body = _build_body(config, spec, self.inputs.shapes, custom)
        self.features = self._probe(config, spec)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Map raw leaves [B, ...] to features [B, F]."""
        return cast(Tensor, self.body(self.inputs(observation)))

    @torch.no_grad()
    def _probe(self, config: DeepConfig, spec: EnvSpec) -> int:
        """Return the number of features, by passing two empty observations through."""
        prepared = {name: torch.zeros(2, *shape) for name, shape in self.inputs.shapes.items()}
        name = type(self.body.module).__name__ if isinstance(self.body, _CustomBody) else config.kind
        self.body.eval()
        try:
            features = self.body(prepared)
        except Exception as cause:  # whatever a user's own class may raise
            raise ConfigError(
                f"the network '{name}' cannot take the observations of {spec.name}"
                f" ({_describe(self.inputs.shapes)}): {cause}"
            ) from cause
        self.body.train()
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(
                f"the network '{name}' must return features of shape (batch, F); for a batch of 2: {found}"
            )
        return int(features.shape[1])


class CategoryIndex(nn.Module):
    """The torso of a table: the number of the observed category."""

    features: int

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        leaf = spec.observations.get(PLAIN)
        if not spec.plain or leaf is None or leaf.categories is None:
            raise ConfigError(
                f"the network 'tabular' needs a single Discrete observation; {spec.name} has"
                f" {_describe({name: leaf.shape for name, leaf in spec.observations.items()})}. Use 'mlp'."
            )
        self.features = leaf.categories

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the categories [B] as int64."""
        return observation[PLAIN].long()


class _CustomBody(nn.Module):
    def __init__(self, module: nn.Module, plain: bool) -> None:
        super().__init__()
        self.module = module
        self._plain = plain

    def forward(self, prepared: dict[str, Tensor]) -> Tensor:
        return cast(Tensor, self.module(prepared[PLAIN] if self._plain else prepared))


class _MlpBody(nn.Module):
    def __init__(self, config: MlpConfig, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = sum(math.prod(shape) for shape in shapes.values())
        for outputs in config.hidden[:-1]:
            block = hidden_layer(config, width, outputs)
            if config.spectral_norm:
                block[0] = spectral_norm(block[0])
            layers += block
            width = outputs
        self.layers = nn.Sequential(*layers)

    def forward(self, prepared: dict[str, Tensor]) -> Tensor:
        return cast(Tensor, self.layers(_join([leaf.flatten(1) for leaf in prepared.values()])))


class _ConvBody(nn.Module):
    """One stack of convolutions for each image leaf; its flattened result is joined with the other leaves."""

    def __init__(
        self, spec: EnvSpec, shapes: dict[str, tuple[int, ...]], build: Callable[[tuple[int, int, int]], nn.Module]
    ) -> None:
        """Take what builds the layers for images of so many channels, rows and columns."""
        super().__init__()
        self._leaves = {name: spec.observations[name] for name, shape in shapes.items() if len(shape) > 1}
        self._others = [name for name in shapes if name not in self._leaves]
        if not self._leaves:
            raise ConfigError(
                f"a convolutional network needs an image; {spec.name} has {_describe(shapes)}. Use 'mlp'."
            )
        probes = [_to_image(torch.zeros(1, *shapes[name]), leaf) for name, leaf in self._leaves.items()]
        self.images = nn.ModuleList(build((probe.shape[1], probe.shape[2], probe.shape[3])) for probe in probes)

    def forward(self, prepared: dict[str, Tensor]) -> Tensor:
        parts = [
            convolutions(_to_image(prepared[name], leaf)).flatten(1)
            for (name, leaf), convolutions in zip(self._leaves.items(), self.images, strict=True)
        ]
        return _join(parts + [prepared[name].flatten(1) for name in self._others])


class _Residual(nn.Module):
    def __init__(self, config: ImpalaConfig, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            activation_layer(config.activation),
            *_convolution(config, channels, channels, 3, padding=1),
            activation_layer(config.activation),
            *_convolution(config, channels, channels, 3, padding=1),
        )

    def forward(self, image: Tensor) -> Tensor:
        return image + cast(Tensor, self.layers(image))


def _build_body(
    config: DeepConfig, spec: EnvSpec, shapes: dict[str, tuple[int, ...]], custom: TorsoFactory | None
) -> nn.Module:
    match config:
        case MlpConfig():
            return _MlpBody(config, shapes)
        case NatureConfig():
            return _ConvBody(spec, shapes, lambda image: _nature(config, *image))
        case ImpalaConfig():
            return _ConvBody(spec, shapes, lambda image: _impala(config, image[0]))
        case SmallCnnConfig():
            return _ConvBody(spec, shapes, lambda image: _small(config, image[0]))
        case CustomConfig():
            if custom is None:
                raise ConfigError("the network 'custom' needs your module class: pass network=MyNet")
            return _CustomBody(_build_custom(custom, spec), spec.plain)


def _build_custom(custom: TorsoFactory, spec: EnvSpec) -> nn.Module:
    try:
        return custom(spec)
    except Exception as cause:
        name, problem = getattr(custom, "__name__", "custom"), f"{type(cause).__name__}: {cause}"
        raise ConfigError(f"the network '{name}' could not be built for {spec.name}: {problem}") from cause


def _convolution(
    config: NatureConfig | ImpalaConfig | SmallCnnConfig,
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    layers: list[nn.Module] = [spectral_norm(layer) if config.spectral_norm else layer]
    if config.layer_norm:
        layers.append(nn.GroupNorm(1, outputs))
    return layers


def _nature(config: NatureConfig, channels: int, height: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        padding = (0, 0)
        if config.padding == "same":
            padding = _to_keep(height, kernel, stride), _to_keep(width, kernel, stride)
            height, width = math.ceil(height / stride), math.ceil(width / stride)
        layers += _convolution(config, channels, outputs, kernel, stride, padding)
        layers.append(activation_layer(config.activation))
        channels = outputs
    return nn.Sequential(*layers)


def _to_keep(size: int, kernel: int, stride: int) -> int:
    """Return the rows to add at each edge so that a convolution keeps one position of every `stride`.

    Where an odd number of rows is missing, the first edge gets one more that is used than the last, which TensorFlow
    does the other way round.
    """
    whole = (math.ceil(size / stride) - 1) * stride + kernel
    return math.ceil(max(whole - size, 0) / 2)


def _impala(config: ImpalaConfig, channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for block in config.channels:
        outputs = block * config.width
        # As in the original, only residual convolutions are normalised: the first of a block sets the scale.
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [_Residual(config, outputs), _Residual(config, outputs)]
        channels = outputs
    layers.append(activation_layer(config.activation))
    if config.pool:
        layers.append(nn.AdaptiveMaxPool2d(config.pool))
    return nn.Sequential(*layers)


def _small(config: SmallCnnConfig, channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for outputs in config.channels:
        layers += [*_convolution(config, channels, outputs, 3, padding=1), activation_layer(config.activation)]
        channels = outputs
    return nn.Sequential(*layers)


def _to_image(leaf: Tensor, spec: LeafSpec) -> Tensor:
    """Bring [B, *shape] to [B, channels, height, width]; a stack of frames becomes channels.

    A frame is height x width, channels first, or channels last if its last axis is the smaller one (Gymnasium's RGB).
    """
    frame = leaf.shape[2:] if spec.stack > 1 else leaf.shape[1:]
    if len(frame) == 3 and frame[2] < frame[0]:
        leaf = leaf.movedim(-1, -3)
    return leaf.unsqueeze(1) if leaf.ndim == 3 else leaf.flatten(1, -3)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _describe(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} of shape {tuple(shape)}" for name, shape in shapes.items())
