"""One optimiser step on the flat parameters: gradient norm, clipping, regularisation, learning rate, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from qfleet.algo.flat import FlatParameters
from qfleet.algo.schedules import ConstantRateConfig, LearningRate, RateConfig
from qfleet.core.config import Config
from qfleet.core.errors import CheckpointError

_TINY = 1e-6
"""Keeps the clipped norm just below its limit, as torch's own clipping does."""

Decay = Annotated[float, Field(ge=0, lt=1)]
"""A decay rate of a running average."""


class _OptimConfig(Config):
    """What every optimiser has."""

    lr: float = Field(default=1e-3, gt=0)
    """The full learning rate, which the schedule scales."""
    schedule: RateConfig = ConstantRateConfig()
    """How the learning rate changes during the run."""
    max_grad_norm: float | None = Field(default=10.0, gt=0)
    """Gradients with a larger global norm are scaled down to it; None leaves them."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Strength of the pull of all parameters to zero (L2; decoupled from the gradient's scaling in AdamW)."""
    l1: float = Field(default=0.0, ge=0)
    """Strength of the L1 penalty on all parameters; like weight decay it is added after clipping."""


class SgdConfig(_OptimConfig):
    """Stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    """Selects this optimiser."""
    momentum: Decay = 0.0
    """Share of the previous direction that is kept."""


class AdagradConfig(_OptimConfig):
    """AdaGrad: rates that fall with the sum of squared gradients."""

    kind: Literal["adagrad"] = "adagrad"
    """Selects this optimiser."""
    eps: float = Field(default=1e-10, gt=0)
    """Added to the denominator."""


class RmspropConfig(_OptimConfig):
    """RMSprop; its defaults are those of the first DQN papers, but for their eps of 0.01."""

    kind: Literal["rmsprop"] = "rmsprop"
    """Selects this optimiser."""
    alpha: Decay = 0.95
    """Decay rate of the averages of gradients and squared gradients."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to the averages before the root is taken."""
    momentum: Decay = 0.0
    """Share of the previous direction that is kept."""
    centered: bool = True
    """Divide by the standard deviation of the gradients instead of their root mean square."""


class AdamConfig(_OptimConfig):
    """Adam."""

    kind: Literal["adam"] = "adam"
    """Selects this optimiser."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the averages of gradients and of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator; value learning often likes a larger one, such as 1.5e-4."""


class AdamWConfig(_OptimConfig):
    """Adam with decoupled weight decay."""

    kind: Literal["adamw"] = "adamw"
    """Selects this optimiser."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the averages of gradients and of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Share of each parameter, times the learning rate, that is taken away at each update."""


OptimConfig = Annotated[
    SgdConfig | AdagradConfig | RmspropConfig | AdamConfig | AdamWConfig, Field(discriminator="kind")
]


class Optim:
    """Applies the gradients in a `FlatParameters` to its parameters."""

    def __init__(self, config: OptimConfig, flat: FlatParameters, total_updates: int | None) -> None:
        """Take the run's length in updates, or None if it is not known (then linear and cosine need their own)."""
        self._config, self._flat = config, flat
        self._rate = LearningRate(config.schedule, total_updates)
        self._max_norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
        self._update = 0
        self._parameter = nn.Parameter(flat.parameters)
        self._parameter.grad = flat.gradients
        self._torch = _build(config, self._parameter)
        self._kernel = _kernel(self._torch) if flat.parameters.device.type == "cpu" else None
        # Fused kernels on a GPU skip an update by themselves when told to by a flag that is on the device too.
        self._skips_on_device = flat.parameters.is_cuda and bool(self._torch.defaults.get("fused"))

    @property
    def learning_rate(self) -> float:
        """The rate of the latest update, with what has been scored since."""
        return self._config.lr * self._rate.fraction(self._update)

    def step(self, update_number: int) -> Tensor:
        """Apply the gradients as update `update_number` (the first is 0) and return their global norm, a scalar.

        The norm is that before clipping. If it is not finite, neither the parameters nor the averages change; the
        caller sees it by the norm. `gradients` are clipped in place and stay until they are zeroed.
        """
        self._update = update_number
        gradients = self._flat.gradients
        norm: Tensor = torch.linalg.vector_norm(gradients)
        if self._skips_on_device:
            setattr(self._torch, "found_inf", (~torch.isfinite(norm)).float())  # noqa: B010  (torch looks for it)
            gradients.mul_((self._max_norm / (norm + _TINY)).clamp_(max=1.0))
        else:
            value = norm.item()  # free on a CPU; on a GPU, RMSprop and AdaGrad wait for the device here
            if not math.isfinite(value):
                return norm
            if value > self._max_norm:
                gradients.mul_(self._max_norm / (value + _TINY))
        if self._config.l1 > 0:
            gradients.add_(self._flat.parameters.sign(), alpha=self._config.l1)
        self._apply()
        return norm

    def _apply(self) -> None:
        """Let torch's optimiser make its step."""
        group, state = self._torch.param_groups[0], self._torch.state[self._parameter]
        group["lr"] = self.learning_rate
        if self._kernel is None or self._skips_on_device or not state:  # torch makes the state at its first step
            self._torch.step()
            return
        state["step"].add_(1)
        moments: tuple[list[Tensor], ...] = ([state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]])
        keys = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
        beta1, beta2 = group["betas"]
        values = {key: group[key] for key in keys}
        self._kernel([self._flat.parameters], [self._flat.gradients], *moments, beta1=beta1, beta2=beta2, **values)

    def replan(self, total_updates: int) -> None:
        """Take a better estimate of the run's length in updates."""
        self._rate.replan(total_updates)

    def score(self, value: float) -> None:
        """Tell the schedule the mean return of one evaluation."""
        self._rate.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that later steps depend on, apart from the parameters."""
        return {
            "kind": self._config.kind,
            "update": self._update,
            "schedule": self._rate.state_dict(),
            "moments": _copies(self._torch.state[self._parameter]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        sizes = {value.numel() for value in state["moments"].values() if isinstance(value, Tensor)} - {1}
        if state["kind"] != self._config.kind or not sizes <= {self._parameter.numel()}:
            raise CheckpointError(
                f"a saved {state['kind']} state of size {max(sizes, default=0)} does not fit the optimiser"
                f" {self._config.kind} of size {self._parameter.numel()}: resume with the settings of the saved run"
            )
        self._update = state["update"]
        self._rate.load_state_dict(state["schedule"])
        groups = self._torch.state_dict()["param_groups"]
        self._torch.load_state_dict({"state": {0: _copies(state["moments"])}, "param_groups": groups})


def each_vector(moments: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return an optimiser's moments with its vectors [P] changed; counters, which have no dimension, stay."""
    return {name: change(value) if is_vector(value) else value for name, value in moments.items()}


def is_vector(value: Any) -> bool:
    """Return whether one of an optimiser's moments has an entry for each parameter."""
    return isinstance(value, Tensor) and value.ndim == 1


def _build(config: OptimConfig, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Return torch's optimiser, in its single-kernel form where there is one."""
    device = parameter.device.type
    fused = device in ("cpu", "cuda")
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    match config:
        case SgdConfig():
            sgd = torch.optim.SGD([parameter], momentum=config.momentum, fused=fused, **common)
            if config.momentum > 0:  # torch's own first buffer has no content when that step is skipped on the device
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd
        case AdagradConfig():
            return torch.optim.Adagrad([parameter], eps=config.eps, fused=device == "cpu", **common)
        case RmspropConfig():
            return _Rmsprop(parameter, config)
        case AdamConfig():
            return torch.optim.Adam([parameter], betas=config.betas, eps=config.eps, fused=fused, **common)
        case AdamWConfig():
            return torch.optim.AdamW([parameter], betas=config.betas, eps=config.eps, fused=fused, **common)


def _kernel(optimizer: torch.optim.Optimizer) -> Callable[..., object] | None:
    """Return what Adam's fused step comes down to. On a CPU, torch takes far longer to find it than it takes itself."""
    names: dict[type, str] = {torch.optim.Adam: "_fused_adam_", torch.optim.AdamW: "_fused_adamw_"}
    return getattr(torch, names.get(type(optimizer), ""), None)


class _Rmsprop(torch.optim.Optimizer):
    """RMSprop with eps under the root, as published for DQN.

    torch's own takes the root first, which for a nearly constant gradient is that of a negative rounding error: NaN.
    """

    def __init__(self, parameter: nn.Parameter, config: RmspropConfig) -> None:
        super().__init__([parameter], {"lr": config.lr})
        self._parameter, self._config = parameter, config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradient once."""
        config, parameter, state = self._config, self._parameter, self.state[self._parameter]
        assert parameter.grad is not None
        gradient = parameter.grad.add(parameter, alpha=config.weight_decay) if config.weight_decay else parameter.grad
        if not state:
            names = ("square", *(["mean"] if config.centered else []), *(["direction"] if config.momentum else []))
            state.update({name: torch.zeros_like(parameter) for name in names})
        state["square"].mul_(config.alpha).addcmul_(gradient, gradient, value=1 - config.alpha)
        variance = state["square"]
        if config.centered:
            state["mean"].lerp_(gradient, 1 - config.alpha)
            variance = torch.addcmul(variance, state["mean"], state["mean"], value=-1).clamp_(min=0)
        direction = gradient * variance.add(config.eps).rsqrt_()
        if config.momentum:
            direction = state["direction"].mul_(config.momentum).add_(direction)
        parameter.sub_(direction, alpha=self.param_groups[0]["lr"])


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
