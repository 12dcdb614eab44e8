"""The Q-network: torso and head, built deterministically from settings and an environment's spec."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.parametrize import is_parametrized

from qfleet.algo.agent import AgentConfig, ReplayAgent, RolloutAgent, TabularAgent
from qfleet.algo.heads import (
    CategoricalConfig,
    CategoricalHead,
    Head,
    ImplicitQuantileConfig,
    ImplicitQuantileHead,
    QuantileConfig,
    QuantileHead,
    ScalarConfig,
    ScalarHead,
    Streams,
    TableHead,
)
from qfleet.algo.layers import Dropout, NoisyLinear
from qfleet.algo.recurrent import Memory, unscaled
from qfleet.algo.torsos import (
    CategoryIndex,
    DeepConfig,
    NatureConfig,
    NetworkConfig,
    TabularConfig,
    Torso,
    TorsoFactory,
)
from qfleet.core.errors import ConfigError
from qfleet.core.seeding import sequence, torch_stream
from qfleet.core.spec import EnvSpec

__all__ = ["NetworkConfig", "QNetwork", "build_network", "foreign_randomness"]


class QNetwork(nn.Module):
    """Values of all actions from raw observations (uint8 pixels, unscaled vectors, integer categories).

    Make one with `build_network`. Three modes: `train()` for the network that learns, `explore()` for one that acts
    or is a target (weight noise, nothing else), `eval()` for greedy play (no noise at all).
    """

    def __init__(
        self, config: NetworkConfig, agent: AgentConfig, spec: EnvSpec, custom: TorsoFactory | None = None
    ) -> None:
        super().__init__()
        self.torso: Torso | CategoryIndex
        self.head: Head
        self.memory: Memory | None = None
        if isinstance(config, TabularConfig) != isinstance(agent, TabularAgent):
            raise ConfigError(
                f"agent '{agent.kind}' and network '{config.kind}' do not fit:"
                " the tabular agent and the tabular network need each other"
            )
        if isinstance(config, TabularConfig):
            self.torso = CategoryIndex(spec)
            self.head = TableHead(self.torso.features, spec.actions, config.initial)
        else:
            self.torso = Torso(config, spec, custom)
            features = self.torso.features
            if isinstance(agent, ReplayAgent) and agent.memory is not None:
                self.memory = Memory(agent.memory, features, spec.actions)
                features = self.memory.features
            self.head = _build_head(config, agent, features, spec.actions)
        self.generator = torch.Generator()
        self._noisy = [module for module in self.modules() if isinstance(module, NoisyLinear)]
        self._dropouts = [module for module in self.modules() if isinstance(module, Dropout)]

    def forward(self, observation: dict[str, Tensor], taus: Tensor | None = None) -> Tensor:
        """Map leaves [B, ...] to values [B, A], logits [B, A, atoms] or quantiles [B, A, N].

        Fractions `taus` [B, N] are for implicit quantiles only, which use evenly spaced ones without them.
        """
        if self.memory is not None:
            raise TypeError("a network with memory needs its state: call recall() or unroll()")
        features = self.torso(observation)
        output = self.head(features) if taus is None else self.head(features, taus)
        return cast(Tensor, output).float()  # computed in fewer bits where the learner says so

    def q(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the expected values [B, A]."""
        return self.head.expectation(self(observation))

    def q_without_dropout(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the expected values [B, A] as `q` does, but with dropout off for this call; weight noise stays."""
        modes = [layer.training for layer in self._dropouts]
        for layer in self._dropouts:
            layer.training = False
        values = self.q(observation)
        for layer, mode in zip(self._dropouts, modes, strict=True):
            layer.training = mode
        return values

    @property
    def recurrent(self) -> bool:
        """Whether values depend on what was seen before, so that `recall` and `unroll` take the place of `q`."""
        return self.memory is not None

    def initial_state(self, count: int) -> Tensor:
        """Return the memory [count, S] of episodes that begin: zeros; S is 0 for networks without memory.

        It holds the LSTM's state [2 H] and the last action, counted from 1.
        """
        return torch.zeros(count, 0 if self.memory is None else 2 * self.memory.features + 1)

    def recall(self, observation: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [E, A] of one tick, and the memory [E, S] after it, whose last action is still to be set.

        The values are returns in the reward's own unit.
        """
        assert self.memory is not None
        hidden, last_action = state[:, :-1], state[:, -1]
        hidden = self.memory.tick(self.torso(observation), last_action.long(), hidden)
        values = self.head.expectation(self.head(hidden[:, : self.memory.features]).float())
        return unscaled(values), torch.cat([hidden, torch.zeros_like(last_action).unsqueeze(1)], dim=1)

    def unroll(
        self, observation: dict[str, Tensor], last_action: Tensor, hidden: Tensor, burn_in: int, warm: Tensor
    ) -> Tensor:
        """Return the rescaled values [B, T, A] of sequences: leaves [B, T, ...], actions [B, T], LSTM states [B, 2 H].

        No gradient flows from later steps into the first `burn_in` ones, but where `warm` [B] says that there is
        nothing to burn in.
        """
        assert self.memory is not None
        flat = {name: leaf.flatten(0, 1) for name, leaf in observation.items()}
        features = self.torso(flat).unflatten(0, last_action.shape)
        outputs = []
        if burn_in:
            output, hidden = self.memory(features[:, :burn_in], last_action[:, :burn_in], hidden)
            outputs.append(output)
            hidden = torch.where(warm.unsqueeze(1), hidden, hidden.detach())
        output, _ = self.memory(features[:, burn_in:], last_action[:, burn_in:], hidden)
        values: Tensor = self.head(torch.cat([*outputs, output], dim=1))
        return values.float()

    @property
    def has_dropout(self) -> bool:
        """Whether some layer drops a part of its inputs while learning."""
        return bool(self._dropouts)

    def observe(self, observation: dict[str, Tensor]) -> None:
        """Let running input statistics take in a batch of raw leaves: [B, ...], or [B, T, ...] with memory."""
        if self.recurrent:
            observation = {name: leaf.flatten(0, 1) for name, leaf in observation.items()}
        if isinstance(self.torso, Torso):
            self.torso.inputs.observe(observation)

    def resample_noise(self, generator: torch.Generator) -> None:
        """Draw new weight noise for every noisy layer."""
        for layer in self._noisy:
            layer.resample(generator)

    def set_generator(self, generator: torch.Generator) -> None:
        """Make every random layer, and the fractions of implicit quantiles, draw from this one from now on."""
        self.generator = generator
        for layer in self._dropouts:
            layer.generator = generator

    def explore(self) -> QNetwork:
        """Switch weight noise on and everything else that belongs to learning off; return self."""
        self.eval()
        for layer in self._noisy:
            layer.train()
        return self


def build_network(
    config: NetworkConfig, agent: AgentConfig, spec: EnvSpec, seed: int, custom: TorsoFactory | None = None
) -> QNetwork:
    """Return a network whose parameters are a function of the arguments; torch's global random state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(sequence(seed, "network").generate_state(1)[0]))
        network = QNetwork(config, agent, spec, custom)
        if isinstance(config, NatureConfig) and config.initialisation == "glorot":
            network.apply(_begin_as_glorot)
    network.set_generator(torch_stream(seed, "network", purpose="layers"))
    return network


def foreign_randomness(network: nn.Module) -> str:
    """Return a warning of layers that draw from torch's global stream, which no checkpoint has; empty without any."""
    kinds = {type(module).__name__ for module in network.modules() if isinstance(module, _DropoutNd | nn.RReLU)}
    if not kinds:
        return ""
    return (
        f"the network has torch's own {', '.join(sorted(kinds))}, whose random numbers are not the run's: it will not"
        " repeat or resume to the byte; qfleet.algo.layers.Dropout would"
    )


def _begin_as_glorot(module: nn.Module) -> None:
    if not isinstance(module, nn.Linear | nn.Conv2d) or is_parametrized(module, "weight"):
        return  # noisy layers have a beginning of their own; a bound on the norm takes any scale away
    nn.init.xavier_uniform_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _build_head(config: DeepConfig, agent: AgentConfig, features: int, actions: int) -> Head:
    if isinstance(agent, RolloutAgent):
        return ScalarHead(Streams(config, features, (actions,), agent.dueling, noisy=False))
    assert isinstance(agent, ReplayAgent)

    def streams(*entries: int) -> Streams:
        return Streams(config, features, (actions, *entries), agent.dueling, agent.noisy)

    match agent.head:
        case ScalarConfig():
            return ScalarHead(streams())
        case CategoricalConfig() as head:
            return CategoricalHead(streams(head.atoms), head)
        case QuantileConfig() as head:
            return QuantileHead(streams(head.quantiles), head)
        case ImplicitQuantileConfig() as head:
            return ImplicitQuantileHead(streams(), head, features)
