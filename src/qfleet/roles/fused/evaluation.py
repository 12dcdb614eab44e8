"""Plays whole episodes greedily on the device, all at once, on random numbers that training never sees."""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.accel.choices import Choices
from qfleet.accel.graphs import Recording
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.core import seeding
from qfleet.core.types import Ints
from qfleet.envs.tensor.games import make_tensor_env
from qfleet.roles.evaluator import Doubles
from qfleet.roles.fused.player import Player
from qfleet.roles.fused.setup import FusedSetup

TICKS = 25
"""Ticks between two looks at whether all episodes are over: to look means to wait for the device."""


class DeviceEvaluation:
    """A network of its own and as many environments as an evaluation has episodes."""

    def __init__(self, setup: FusedSetup, choices: Choices) -> None:
        """Build the network and the environments; ticks are recorded, or one compiled call on a CPU, as chosen."""
        self._setup, device = setup, torch.device(setup.device)
        network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
        self._network = network.to(device).eval()
        self._flat = FlatParameters(self._network)
        self._layers, self._games = torch.Generator(device), torch.Generator(device)
        self._network.set_generator(self._layers)
        episodes = setup.evaluation.episodes
        # To compile for a GPU takes seconds, and recorded ticks are fast enough without.
        compiled = choices.settings.kernels and device.type == "cpu"
        self._player = Player(make_tensor_env(setup.env, evaluation=True), episodes, self._games, compiled)
        self._epsilon = torch.full((episodes,), setup.evaluation.epsilon, device=device)
        self._score = torch.zeros(episodes, dtype=torch.float64, device=device)
        self._length = torch.zeros(episodes, dtype=torch.int64, device=device)
        self._going = torch.ones(episodes, dtype=torch.bool, device=device)
        self._playing = Recording(self._play_some, (self._layers, self._games), enabled=choices.recorded)

    @torch.no_grad()
    def play(self, weights: FlatParameters) -> tuple[Doubles, Ints]:
        """Return the scores [N] and lengths [N] of the episodes; the same weights always play the same."""
        self._flat.copy_from(weights)
        for generator, purpose in ((self._layers, "layers"), (self._games, "validation")):
            generator.manual_seed(seeding.torch_stream(self._setup.seed, "evaluator", purpose=purpose).initial_seed())
        self._player.restart()
        self._score.zero_()
        self._length.zero_()
        self._going.fill_(True)
        for _ in range(0, self._setup.evaluation.max_episode_steps, TICKS):
            self._playing()
            if not bool(self._going.any()):
                break
        # Copies on a CPU too: the next evaluation plays in the same memory.
        return self._score.cpu().numpy().copy(), self._length.cpu().numpy().copy()

    def _play_some(self) -> None:
        for _ in range(TICKS):
            outcome = self._player.tick(self._values, self._epsilon).outcome
            self._score.add_(torch.where(self._going, outcome.reward, 0.0))
            self._length.add_(self._going)
            self._going.logical_and_(~(outcome.terminated | outcome.truncated))
            self._going.logical_and_(self._length < self._setup.evaluation.max_episode_steps)

    def _values(self, observation: dict[str, Tensor]) -> Tensor:
        return self._network.q(observation)
