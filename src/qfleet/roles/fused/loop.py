"""What both fused loops are: a bounded piece of acting and learning at a time, and the state that goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qfleet.accel.choices import CHANGED
from qfleet.accel.graphs import Recording
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.exploration import epsilons
from qfleet.algo.flat import FlatParameters
from qfleet.algo.model_io import read_tensors
from qfleet.algo.networks import build_network
from qfleet.algo.schedules import Schedule
from qfleet.algo.updates import DeepUpdate, build_update
from qfleet.algo.warmstart import warm_start
from qfleet.core import seeding
from qfleet.core.errors import CheckpointError
from qfleet.core.role import State
from qfleet.envs.tensor.games import make_tensor_env
from qfleet.roles.fused.choices import choose
from qfleet.roles.fused.player import Player, Ticked
from qfleet.roles.fused.setup import FusedSetup
from qfleet.roles.fused.shares import shared
from qfleet.roles.fused.team import Team


@dataclass(frozen=True)
class Progress:
    """What one piece of a loop came to."""

    steps: int
    updates: int
    batches: int
    """Batches that were drawn or cut from a rollout."""
    skipped: int = 0
    """Updates that were left out because loss or gradient was not finite."""
    streak: int = 0
    """How many of these were the last ones, without one that was made after them, as far as that is known."""


class Loop(ABC):
    """Environments, networks and their update on one device."""

    def __init__(self, setup: FusedSetup, team: Team | None = None) -> None:
        """Take the `team` of a loop that is one of several."""
        self.setup, self.device, self.team = setup, torch.device(setup.device), team
        self.generator = seeding.torch_stream(setup.seed, "fused", setup.rank, "play", device=self.device)
        # The same on all ranks, which learn with the same noise.
        self.learning = seeding.torch_stream(setup.seed, "fused", purpose="update", device=self.device)
        self.steps = 0
        """Transitions of the run so far, as of the last piece's end."""
        self.report = ""
        """What a person should know of how the loop began or was resumed; empty if nothing."""
        self.update = self._build_update()
        settings = self.choices.settings
        compiled = settings.compile if self.device.type == "cuda" else settings.kernels
        self.player = Player(make_tensor_env(setup.env), setup.envs, self.generator, compiled)
        own = setup.rank * setup.envs, setup.envs
        self._epsilon = torch.from_numpy(epsilons(setup.exploration, 0, *own, setup.actor.envs)).to(self.device)
        self._seen = [0.0, 0.0, 0.0]
        """The episodes that were counted when metrics were last read, their returns, their lengths."""
        self._recent: dict[str, float] = {}

    @abstractmethod
    def advance(self) -> Progress:
        """Act and learn for a while."""

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.steps >= self.setup.env_steps

    @property
    @abstractmethod
    def evaluated(self) -> FlatParameters:
        """The weights that are evaluated and kept."""

    def _build_update(self) -> DeepUpdate:
        setup = self.setup
        network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
        if setup.warm_start is not None:
            self.report = str(warm_start(network, read_tensors(setup.warm_start), setup.warm_start_part))
        network = network.to(self.device)
        self.choices = choose(setup, network)
        parts = (setup.agent, network, setup.optim, self.learning, setup.total_updates)
        if self.team is None:
            update = build_update(*parts, gradient=self.choices.gradient, stepper=self.choices.stepper)
        else:
            assert isinstance(setup.agent, ReplayAgent | RolloutAgent)
            gradient = shared(self.choices.gradient, setup.agent, self.team.whole)
            stepper = self.team.joining.stepper or self.choices.stepper
            update = build_update(*parts, self.team.sum_, gradient, stepper)
            self.team.attach(update)
        assert isinstance(update, DeepUpdate)
        self._values = self.choices.values(network)
        return update

    def recording(self, work: Callable[[], object]) -> Recording:
        """Return a piece of work that is recorded where this run's is."""
        return Recording(work, (self.generator, self.learning), enabled=self.choices.recorded)

    def tick(self) -> tuple[Ticked, Tensor]:
        """Act once in every environment; return what happened and the rewards [E] for learning."""
        self.update.online.resample_noise(self.generator)
        ticked, env = self.player.tick(self._values, self._epsilon), self.setup.env
        reward = ticked.outcome.reward
        if env.reward_clip is not None:
            reward = reward.clamp(-env.reward_clip, env.reward_clip)
        return ticked, reward * env.reward_scale

    def set_epsilon(self, further: int = 0) -> None:
        """Bring exploration up to where the run is, or is some steps further; does not wait for the device."""
        if isinstance(self.setup.exploration, Schedule):  # all others stay as they are
            self._epsilon.fill_(self.setup.exploration.at(self.steps + further))

    def count_steps(self) -> int:
        """Return the run's transitions since the last call. Waits for the device, and for the other ranks."""
        before, own = self.steps, int(self.player.steps.item())
        self.steps = own if self.team is None else self.team.total(own)
        return self.steps - before

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers worth watching. Waits for the device."""
        finished = self.player.finished.tolist()
        episodes, returns, lengths = (now - before for now, before in zip(finished, self._seen, strict=True))
        self._seen = finished
        if episodes:
            self._recent = {"episode_return": returns / episodes, "episode_length": lengths / episodes}
        return {"episodes": finished[0], "epsilon": float(self._epsilon.mean()), **self._recent}

    def state_dict(self) -> State:
        """Return everything that the loop's future depends on."""
        state = {
            "player": self.player.state_dict(),
            "update": self.update.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "settings": self.choices.fingerprint,
            "device": self.device.type,
        }
        return state if self.team is None else {**state, "joining": self.team.joining.state_dict()}

    def whole_state(self) -> State:
        """Return the same without chunks, for what has no files."""
        return self.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        if state["device"] != self.device.type:
            raise CheckpointError(
                f"the run was saved on device '{state['device']}' and would go on on '{self.device.type}', whose random"
                f" streams differ: resume it where there is a '{state['device']}' device"
            )
        self.player.load_state_dict(state["player"])
        saved = state["update"]
        self.update.load_state_dict(saved if self.team is None else self.team.joining.adapted(saved))
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]
        if self.team is not None:
            self.team.joining.load_state_dict(state["joining"])
        self.update.prepare()
        self.set_epsilon()
        self._seen, self._recent = self.player.finished.tolist(), {}
        if self.choices.differ_from(state["settings"]):
            self.report = CHANGED
