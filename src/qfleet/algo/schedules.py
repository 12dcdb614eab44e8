"""How numbers change during a run: learning rates over updates, and epsilon or beta over environment steps."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError


class Schedule(Config):
    """A number that goes from `start` to `end` during the first `steps` environment steps of the run, then stays."""

    start: float
    """Value at step 0."""
    end: float | None = None
    """Value from `steps` on; None stays at `start`."""
    steps: int = Field(default=1, gt=0)
    """Environment steps of the whole run (not of one environment) that the change takes."""
    shape: Literal["linear", "exponential"] = "linear"
    """Equal differences or equal ratios in equal times."""

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.shape == "exponential" and self.end is not None and (self.start <= 0 or self.end <= 0):
            raise ValueError(f"an exponential schedule needs start and end above 0, not {self.start} and {self.end}")
        return self

    def at(self, env_steps: int) -> float:
        """Return the value after `env_steps` environment steps of the whole run."""
        if self.end is None:
            return self.start
        done = min(max(env_steps / self.steps, 0.0), 1.0)
        if done in (0.0, 1.0):
            return self.end if done else self.start
        if self.shape == "exponential":
            return float(self.start * (self.end / self.start) ** done)
        return self.start + (self.end - self.start) * done


class _RateConfig(Config):
    """What every learning-rate schedule has: a warm-up in front."""

    warmup: int = Field(default=0, ge=0)
    """Updates during which the rate first rises linearly to its full value; the schedule's own time starts after."""


class ConstantRateConfig(_RateConfig):
    """The learning rate stays."""

    kind: Literal["constant"] = "constant"
    """Selects this schedule."""


class _DecayConfig(_RateConfig):
    updates: int | None = Field(default=None, gt=0)
    """Updates (after the warm-up) until the end is reached; None takes the whole run."""
    end: float = Field(default=0.0, ge=0, le=1)
    """The last rate, as a fraction of the full one."""


class LinearRateConfig(_DecayConfig):
    """The learning rate falls along a line."""

    kind: Literal["linear"] = "linear"
    """Selects this schedule."""


class CosineRateConfig(_DecayConfig):
    """The learning rate falls along half a cosine."""

    kind: Literal["cosine"] = "cosine"
    """Selects this schedule."""


class PlateauRateConfig(_RateConfig):
    """The learning rate is cut whenever the evaluation score stops rising."""

    kind: Literal["plateau"] = "plateau"
    """Selects this schedule."""
    cut: float = Field(default=0.5, gt=0, lt=1)
    """What each cut multiplies the rate by."""
    patience: int = Field(default=5, ge=1)
    """Evaluations in a row without improvement that lead to a cut."""
    cooldown: int = Field(default=0, ge=0)
    """Evaluations after a cut that do not count against the patience."""
    floor: float = Field(default=0.01, ge=0, le=1)
    """The smallest rate, as a fraction of the full one."""
    margin: float = Field(default=0.0, ge=0)
    """By how much (in units of the score) a new best must exceed the old one to count as an improvement."""


RateConfig = Annotated[
    ConstantRateConfig | LinearRateConfig | CosineRateConfig | PlateauRateConfig, Field(discriminator="kind")
]


def decay_updates(config: _DecayConfig, total_updates: int | None) -> int:
    """Return how many updates a linear or cosine decay takes in a run of `total_updates` (None: not known)."""
    updates = config.updates or (total_updates or 0) - config.warmup
    if updates <= 0:
        raise ConfigError(
            "the learning-rate schedule does not know where it ends: set its 'updates', or give the run a length"
            f" of more than the {config.warmup} updates of its warm-up"
        )
    return updates


class LearningRate:
    """The fraction of the full learning rate to use at each update; only a plateau schedule has a memory."""

    def __init__(self, config: RateConfig, total_updates: int | None) -> None:
        """Take the length of the run in updates, or None if it is not known."""
        self._config = config
        self._decay_updates = decay_updates(config, total_updates) if isinstance(config, _DecayConfig) else 0
        self._plateau = Plateau(config) if isinstance(config, PlateauRateConfig) else None

    def fraction(self, update: int) -> float:
        """Return the fraction for the update with this number; the first is 0."""
        warmup = self._config.warmup
        if update < warmup:
            return (update + 1) / warmup * self._main(0)
        return self._main(update - warmup)

    @property
    def steady(self) -> bool:
        """Whether the fraction is the same for all updates between two scores, so that nobody need count them."""
        return self._config.warmup == 0 and not isinstance(self._config, _DecayConfig)

    def replan(self, total_updates: int) -> None:
        """Take a better estimate of the run's length in updates, for a schedule that ends with the run."""
        if isinstance(self._config, _DecayConfig) and self._config.updates is None:
            self._decay_updates = max(total_updates - self._config.warmup, 1)

    def score(self, value: float) -> None:
        """Take the mean return of one evaluation."""
        if self._plateau is not None:
            self._plateau.score(value)

    def state_dict(self) -> dict[str, Any]:
        """Return what the schedule remembers."""
        return {} if self._plateau is None else self._plateau.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if self._plateau is not None:
            self._plateau.load_state_dict(state)

    def _main(self, update: int) -> float:
        config = self._config
        if isinstance(config, _DecayConfig):
            done = min(update / self._decay_updates, 1.0)
            left = 1 - done if config.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
            return config.end + (1 - config.end) * left
        return 1.0 if self._plateau is None else self._plateau.fraction


class Plateau:
    """Cuts a fraction whenever the score has not improved for a while."""

    def __init__(self, config: PlateauRateConfig) -> None:
        self.fraction = 1.0
        self._config = config
        self._best = -math.inf
        self._waited = 0
        self._cooling = 0

    def score(self, value: float) -> None:
        """Take one evaluation's score; NaN counts as no improvement."""
        config = self._config
        if value > self._best + config.margin:
            self._best, self._waited = value, 0
        elif self._cooling == 0:
            self._waited += 1
        self._cooling = max(self._cooling - 1, 0)
        if self._waited >= config.patience:
            self.fraction = max(self.fraction * config.cut, config.floor)
            self._waited, self._cooling = 0, config.cooldown

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain numbers."""
        return {"fraction": self.fraction, "best": self._best, "waited": self._waited, "cooling": self._cooling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.fraction, self._best = state["fraction"], state["best"]
        self._waited, self._cooling = state["waited"], state["cooling"]
