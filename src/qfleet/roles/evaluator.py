"""Plays whole episodes with the agent's greedy policy, on seeds that training never sees.

Receives: Weights to evaluate.
Sends: Evaluated, to the run's monitor and (latest value) to the learner, whose rate may follow the score.
Waits for: the next weights to evaluate.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from qfleet.algo.agent import AgentConfig
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import NetworkConfig, QNetwork, build_network
from qfleet.core import seeding
from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.protocols import Keep, Publisher, Receiver, Sender
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Bools, Evaluated, Ints, Notice, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.envs import EnvConfig, VectorEnv, make_env
from qfleet.parallel.devices import own_device
from qfleet.roles.acting import Acting

Doubles = NDArray[np.float64]
Playing = Generator[int | None, None, tuple[Doubles, Ints]]
"""An evaluation under way: before each tick how many episodes are over if those of one step have been made, else None;
in the end scores [N] and lengths [N]."""
_TICKS = 100
"""Ticks of all environments in one step."""


class EvaluationConfig(Config):
    """When and how the agent is judged."""

    every: int = Field(1000, gt=0)
    """Environment steps between two evaluations on the validation seeds."""
    episodes: int = Field(20, gt=0, le=100_000)
    """Episodes of each evaluation."""
    test_episodes: int = Field(100, gt=0, le=100_000)
    """Episodes of the final test, on seeds that are used for nothing else."""
    envs: int = Field(20, gt=0, le=4096)
    """Environments played side by side."""
    max_episode_steps: int = Field(27_000, gt=0)
    """An episode longer than this is judged by what it has brought so far."""
    patience: int | None = Field(None, gt=0)
    """Stop the run after this many evaluations without a better one; None never stops."""
    target: float | None = None
    """Stop the run when `in_a_row` evaluations have a mean return of at least this."""
    in_a_row: int = Field(3, gt=0)
    """How many consecutive evaluations must reach the target; one alone may be luck."""
    stop_at_target: bool = True
    """Whether the target ends the run; `qfleet resume --env-steps` switches that off for a run that has reached it."""
    epsilon: float = Field(0.0, ge=0.0, le=1.0)
    """Chance of a random action (the Atari protocol uses 0.001 to 0.05)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the network is during evaluations; "auto" is a CUDA device if the learner is on one, the machine's last, or
    else the CPU. The final test is always played on the CPU."""


@dataclass(frozen=True)
class EvaluatorSetup:
    """Everything an evaluator is built from, besides its handles."""

    evaluation: EvaluationConfig
    env: EnvConfig
    spec: EnvSpec
    network: NetworkConfig
    agent: AgentConfig
    seed: int
    code: UserCode
    device: str = "cpu"
    split: str = "validation"
    """Which seeds are played."""
    longest_step_s: float | None = None
    """Seconds after which a step ends between two ticks, however few it has made; None where only their number counts,
    so that it does not depend on the clock when others have their turn."""
    turn: int | None = None
    """Whose turn it is when the machine's GPUs are dealt out; None where it has the one that others have, too."""


@dataclass(frozen=True)
class EvaluatorHandles:
    """What an evaluator sees of the run."""

    models: Receiver[Weights]
    events: Sender[Evaluated | Notice]
    score: Publisher[Evaluated]
    keep: Keep | None = None
    """Where the model under evaluation outlives the evaluator; None where nothing does."""


class Evaluator(Role):
    """A network of its own, environments of its own, seeds of its own."""

    kind = "evaluator"

    def __init__(self, setup: EvaluatorSetup, handles: EvaluatorHandles) -> None:
        self._setup, self._handles = setup, handles
        self._device = own_device(setup.device, setup.turn)
        self._network = build_network(
            setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network
        ).to(self._device)
        self._flat = FlatParameters(self._network)
        self._env: VectorEnv | None = None
        self._best = -np.inf
        self._weights: Weights | None = None
        self._playing: Playing | None = None
        self._seconds, self._over = 0.0, 0
        self._taken: tuple[Version, int] | None = None
        """Which model was taken last."""
        self._doubtful = False
        """Whether the next one may be that again: a former life took it, and perhaps could not acknowledge it."""
        kept = handles.keep.committed() if handles.keep and handles.keep.life else None
        if kept is not None:
            self._taken, self._doubtful = kept["taken"] and (kept["taken"][0], int(kept["taken"][1])), True
            self.load_state_dict(kept)

    def step(self) -> Status:
        """Play a few ticks of the present evaluation, or begin the next one."""
        if not self._handles.events.ready():
            return Idle("results are not read", wake_on=(self._handles.events,))
        self._weights = self._weights or self._received()
        if self._weights is None:
            if self._handles.models.exhausted():
                return DONE
            return Idle("no new model to evaluate", wake_on=(self._handles.models,))
        began = time.perf_counter()
        self._playing = self._playing or self._begin(self._weights)
        try:
            while (over := next(self._playing)) is None and not self._late(began):
                pass
            self._over = self._over if over is None else over
            self._seconds += time.perf_counter() - began
        except StopIteration as end:
            self._seconds += time.perf_counter() - began
            self._finish(*end.value)
        return WORKED

    def _received(self) -> Weights | None:
        """Return the next model, if one has come; none that a former life has evaluated."""
        while (model := self._handles.models.receive()) is not None:
            this, former, doubtful = (model.version, model.env_steps), self._taken, self._doubtful
            self._taken, self._doubtful = this, False
            if not (doubtful and this == former):
                break
        return model

    def _late(self, began: float) -> bool:
        longest_s = self._setup.longest_step_s
        return longest_s is not None and time.perf_counter() - began > longest_s

    def _begin(self, weights: Weights) -> Playing:
        self.phase, self._seconds, self._over = "evaluating", 0.0, 0
        self._commit()
        self._flat.load_numpy(weights.flat)
        config = self._setup.evaluation
        if self._env is None:
            envs = min(config.envs, config.episodes)
            self._env = self._made(envs)
        setup = self._setup
        return playing(self._network, self._env, config, setup.seed, setup.split, config.episodes, self._device)

    def _made(self, envs: int) -> VectorEnv:
        try:
            mends = self._handles.keep is not None  # inline a person wants to see where it was
            return make_env(self._setup.env, envs, evaluation=True, factory=self._setup.code.env, mends=mends)
        except ConfigError as error:
            if self._handles.keep is None or not self._handles.keep.life:
                raise
            raise EnvironmentFault(str(error)) from error  # a former life could make it: no setting is wrong

    def _finish(self, returns: Doubles, lengths: Ints) -> None:
        weights, self._weights, self._playing, self.phase = self._weights, None, None, "running"
        assert weights is not None
        best = self._is_best(float(returns.mean()))
        self._best = max(self._best, float(returns.mean()))
        result = Evaluated(
            weights.version, weights.env_steps, returns, lengths, self._seconds, best, weights if best else None
        )
        # The score is part of a checkpoint: without the weights, which are elsewhere, and the seconds, which vary.
        self._handles.score.publish(dataclasses.replace(result, weights=None, seconds=0.0))
        self._handles.events.send(result)
        self._commit()
        for text in self._env.incidents() if self._env is not None else ():
            if self._handles.events.ready():
                self._handles.events.send(Notice(self.kind, 0, "environment", text))

    def _is_best(self, mean: float) -> bool:
        """Return whether a model is to be kept; of equal scores the later one: it has seen more."""
        return mean >= self._best

    def _commit(self) -> None:
        """Make the model under evaluation outlive this process, which evaluates it anew if it must."""
        if self._handles.keep is not None:
            self._handles.keep.commit({**self.state_dict(), "taken": self._taken})

    def metrics(self) -> Mapping[str, float]:
        """Return how many episodes of the evaluation under way are over."""
        return {"played": float(self._over)}

    def helpers_cpu_s(self) -> float:
        """Return what environments in processes of their own have taken."""
        return 0.0 if self._env is None else self._env.helpers_cpu_s()

    def state_dict(self) -> State:
        """Return the best mean so far, and the weights of an unfinished evaluation, which begins anew."""
        return {"best": self._best, "weights": self._weights}

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._best, self._weights, self._playing = state["best"], state["weights"], None
        self._commit()

    def close(self) -> None:
        """Close the environments."""
        if self._env is not None:
            self._env.close()


class FinalTest(Evaluator):
    """The evaluator of the one model that the run has kept already."""

    kind = "test"

    def _is_best(self, mean: float) -> bool:
        return False


def play(
    network: QNetwork,
    env: VectorEnv,
    config: EvaluationConfig,
    seed: int,
    split: str,
    episodes: int,
    tell: Callable[[int | None], object] = lambda over: None,
) -> tuple[Doubles, Ints]:
    """Play episodes on the seeds of a split; returns true scores [N] and lengths [N] in the seeds' order.

    `tell` is told before each tick, and now and then how many are over.
    """
    game = playing(network, env, config, seed, split, episodes)
    while True:
        try:
            tell(next(game))
        except StopIteration as end:
            scores, lengths = end.value
            return scores, lengths


def playing(
    network: QNetwork,
    env: VectorEnv,
    config: EvaluationConfig,
    seed: int,
    split: str,
    episodes: int,
    device: str = "cpu",
) -> Playing:
    """Do what `play` does, a tick at a time, with a network that is on a device."""
    seeds = seeding.episode_seeds(seed, split, episodes)
    rng = seeding.numpy_stream(seed, "evaluator", purpose=split)
    network.eval()
    network.set_generator(seeding.torch_stream(seed, "evaluator", purpose=split, device=device))
    acting = Acting(network, env.num_envs, device)
    scores, lengths = [], []
    for at in range(0, episodes, env.num_envs):
        if at:
            yield at
        score, length = yield from _wave(acting, env, seeds[at : at + env.num_envs], at, config, rng)
        scores.append(score)
        lengths.append(length)
    return np.concatenate(scores), np.concatenate(lengths)


def _wave(
    acting: Acting,
    env: VectorEnv,
    seeds: Sequence[int],
    before: int,
    config: EvaluationConfig,
    rng: np.random.Generator,
) -> Playing:
    """Play one episode in each of the first `len(seeds)` environments; surplus environments are stepped and ignored.

    So many episodes were over `before`.
    """
    padded = [*seeds, *[seeds[-1]] * (env.num_envs - len(seeds))]
    observation, mask = env.reset(padded)
    acting.forget(np.arange(env.num_envs))
    epsilon = np.full(env.num_envs, config.epsilon, np.float32)
    score, length = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
    going = np.arange(env.num_envs) < len(seeds)
    for number in range(config.max_episode_steps):
        yield before + len(seeds) - int(going.sum()) if number % _TICKS == _TICKS - 1 else None
        tick = env.step(acting.act(observation, mask, epsilon, rng).action)
        _require_all(env, going)
        acting.forget(tick.terminated | tick.truncated | ~tick.valid)
        lost = tick.cut[going[tick.cut]]
        score[lost], length[lost] = 0.0, 0  # its environment was lost; the episode begins anew
        counted = going & tick.valid
        score[counted] += tick.reward[counted]
        length[counted] += 1
        ended = np.intersect1d(tick.scored, np.flatnonzero(going))
        score[ended] = tick.scores[np.isin(tick.scored, ended)]
        going[ended] = False
        if not going.any():
            break
        observation, mask = tick.observation, tick.mask
    return score[: len(seeds)], length[: len(seeds)]


def _require_all(env: VectorEnv, going: Bools) -> None:
    """Raise where an episode that is not over will never be: a score of 0 would be none."""
    for index in env.given_up():
        if going[index]:
            said = "".join(f" It was told last: {text}" for text in env.incidents()[-1:])
            raise EnvironmentFault(
                f"{env.spec.name}, environment {index}: its episode of this evaluation has no score, since it failed"
                f" several times in a row and was given up.{said}"
            )
