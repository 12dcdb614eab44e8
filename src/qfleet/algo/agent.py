"""What is learned and from what: the settings of the three kinds of agents (replay, rollout, tabular)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qfleet.algo.heads import CategoricalConfig, HeadConfig, ScalarConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.core.config import Config


class MunchausenConfig(Config):
    """Soft targets with a part of the policy's log-probability as reward (Vieillard et al., 2020)."""

    alpha: float = Field(default=0.9, ge=0, le=1)
    """Weight of the log-probability in the reward."""
    temperature: float = Field(default=0.03, gt=0)
    """Temperature of the soft policy, in units of the value."""
    clip: float = Field(default=-1.0, lt=0)
    """Lower bound of temperature times log-probability."""


class HardTargetConfig(Config):
    """The target network is replaced by a copy of the online network now and then."""

    kind: Literal["hard"] = "hard"
    """Selects this rule."""
    period: int = Field(default=1000, gt=0)
    """Gradient steps between two copies."""


class SoftTargetConfig(Config):
    """The target network follows the online network a little after each gradient step."""

    kind: Literal["soft"] = "soft"
    """Selects this rule."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Fraction of the way that it moves at each gradient step."""


TargetConfig = Annotated[HardTargetConfig | SoftTargetConfig, Field(discriminator="kind")]


class ReplayAgent(Config):
    """Learns from replayed transitions with a target network: DQN and its descendants up to Rainbow and M-IQN."""

    kind: Literal["replay"] = "replay"
    """Selects this agent."""
    head: HeadConfig = ScalarConfig()
    """What is predicted for each action."""
    dueling: bool = False
    """Predict the state's value and the actions' advantages apart."""
    noisy: bool = False
    """Explore by learned noise in the head's weights."""
    double: bool = False
    """Choose the next action by the online network and value it by the target network."""
    munchausen: MunchausenConfig | None = None
    """Soft targets in place of the maximum; None for the maximum."""
    memory: MemoryConfig | None = None
    """A recurrent network that learns from sequences; None for one that sees the present observation only."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of one step."""
    n_step: int = Field(default=1, ge=1)
    """Steps whose rewards are summed before the value of the state reached is used."""
    loss: Literal["huber", "mse"] = "huber"
    """How errors of values are counted: quadratic and then linear, or half the square (scalar head only)."""
    huber_threshold: float = Field(default=1.0, gt=0)
    """Error at which the Huber loss becomes linear; the kappa of quantile heads."""
    target: TargetConfig = HardTargetConfig()
    """How the target network follows the online network."""

    @model_validator(mode="after")
    def _check_parts_fit(self) -> ReplayAgent:
        if self.munchausen is not None and self.double:
            raise ValueError("munchausen has no maximum that double could correct; set one of them")
        if self.munchausen is not None and isinstance(self.head, CategoricalConfig):
            raise ValueError("munchausen is not defined for the categorical head; use scalar or a quantile head")
        if self.loss == "mse" and not isinstance(self.head, ScalarConfig):
            raise ValueError(f"loss 'mse' fits the scalar head only; the {self.head.kind} head has its own loss")
        if self.memory is not None and (self.munchausen is not None or not isinstance(self.head, ScalarConfig)):
            raise ValueError("memory (R2D2) is defined for the scalar head without munchausen")
        return self


class RolloutAgent(Config):
    """Learns Q(lambda) from fresh rollouts without replay or target network: PQN (Gallici et al., 2024)."""

    kind: Literal["rollout"] = "rollout"
    """Selects this agent."""
    dueling: bool = False
    """Predict the state's value and the actions' advantages apart."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount of one step."""
    q_lambda: float = Field(default=0.65, ge=0, le=1)
    """How far returns reach beyond one step: 0 uses the next value only, 1 the whole rollout."""
    rollout_length: int = Field(default=32, ge=1)
    """Ticks of every environment in one rollout."""
    epochs: int = Field(default=2, ge=1)
    """How often each rollout is gone through."""
    minibatches: int = Field(default=16, ge=1)
    """Gradient steps in each epoch."""
    loss: Literal["huber", "mse"] = "mse"
    """How errors are counted: quadratic and then linear, or half the square."""
    huber_threshold: float = Field(default=1.0, gt=0)
    """Error at which the Huber loss becomes linear."""


class TabularAgent(Config):
    """Watkins' Q-learning on a table; needs the network 'tabular'."""

    kind: Literal["tabular"] = "tabular"
    """Selects this agent."""
    gamma: float = Field(default=0.9, ge=0, le=1)
    """Discount of one step."""
    alpha: float = Field(default=0.1, gt=0, le=1)
    """Fraction of the error by which an entry moves."""


AgentConfig = Annotated[ReplayAgent | RolloutAgent | TabularAgent, Field(discriminator="kind")]
