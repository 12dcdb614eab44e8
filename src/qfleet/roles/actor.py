"""Acts in environments and sends what happens: where every transition begins.

Receives: Weights (latest value), or InferenceReplies where a server computes the values; Orders (latest value).
Sends: Experience to its replay shard, or Rollouts to the learner when there is no replay; InferenceRequests.
Waits for: room in that stream; without a replay also for the weights that its last rollout led to; for replies; for
other orders while all its environments rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.rounded import Rounded
from qfleet.algo.agent import AgentConfig, ReplayAgent
from qfleet.algo.exploration import ExplorationConfig, epsilons
from qfleet.algo.networks import NetworkConfig, build_network
from qfleet.core import seeding
from qfleet.core.config import Config
from qfleet.core.metrics import Window
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Counter, Keep, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec
from qfleet.core.types import (
    Experience,
    InferenceReply,
    InferenceRequest,
    Ints,
    Notice,
    Orders,
    Rollout,
    Version,
    Weights,
)
from qfleet.core.usercode import UserCode
from qfleet.envs import EnvConfig, Tick
from qfleet.envs.stepping import make_stepping
from qfleet.roles.failing import faults_told
from qfleet.roles.inference_server import AdaptiveInference, InferenceConfig, LocalInference, ServedInference
from qfleet.roles.local import LocalActing
from qfleet.roles.moving import MovingActing
from qfleet.roles.pending import Pending
from qfleet.roles.progress import Progress
from qfleet.roles.recorder import RolloutRecorder, RowRecorder
from qfleet.roles.resting import Waiting
from qfleet.roles.served import ServedActing
from qfleet.roles.telling import Telling

NO_ROOM = "what was sent is not used up yet"
UNANSWERED = "the inference server has not answered"
MAKING = "making"
"""The phase of an actor one of whose environments is made anew."""
IN_ENVS = "waiting for environments"
"""What an actor waits for, as its reports say: the balancer reads these."""
_ORDERS_S = 0.1
"""Seconds between two looks for other orders, of an actor that rests."""


class ActorConfig(Config):
    """How much one actor does at a time."""

    envs: int = Field(8, gt=0, le=65_536)
    """Environments of each actor."""
    unroll: int = Field(1, gt=0, le=4096)
    """Ticks of all environments between two messages."""
    groups: int = Field(1, ge=1, le=64)
    """Parts in which environments are acted for in turn, so that the others step meanwhile; 1 acts for all at once, as
    runs that shall give the same numbers must. Environments in processes of their own (env.vectorisation "async") come
    back in the order in which they are ready, so that a slow one does not hold up the others."""


@dataclass(frozen=True)
class ActorSetup:
    """Everything an actor is built from, besides its handles."""

    actor: ActorConfig
    env: EnvConfig
    spec: EnvSpec
    network: NetworkConfig
    agent: AgentConfig
    exploration: ExplorationConfig
    seed: int
    index: int
    actors: int
    """How many there may be at most."""
    env_steps: int
    """Budget of the whole run."""
    code: UserCode
    inference: InferenceConfig = field(default_factory=LocalInference)
    begun: int = 0
    """How many the run begins with, all where 0: those that join later explore as these do."""
    accel: AccelConfig = field(default_factory=AccelConfig)
    valued: bool = False
    """Whether replay makes the first priorities of the values that the actor acted by."""


@dataclass(frozen=True)
class ActorHandles:
    """What an actor sees of the run."""

    experience: Sender[Experience | Rollout]
    weights: Subscriber[Weights | PackedWeights] | None
    """None where only a server computes the values."""
    env_steps: Counter
    events: Sender[Notice] | None = None
    requests: tuple[Sender[InferenceRequest], ...] = ()
    """To the inference server, one for each part of the environments that may wait at a time."""
    replies: tuple[Receiver[InferenceReply], ...] = ()
    """From the inference server, in the same order."""
    keep: Keep | None = None
    orders: Subscriber[Orders] | None = None
    """None where nobody balances the run."""
    keyframes: Subscriber[PackedWeights] | None = None
    """What weights are measured from; None where they stand for themselves."""


class Actor(Role):
    """A vector of environments, and what chooses their actions: a copy of the network, or a server's."""

    kind = "actor"

    def __init__(self, setup: ActorSetup, handles: ActorHandles) -> None:
        self._setup, self._handles, self._phase = setup, handles, "running"
        envs = setup.actor.envs
        self._first_env, self._total_envs = setup.index * envs, setup.actors * envs
        self._progress = Progress(handles.keep)
        life = self._progress.life
        self._rng = seeding.numpy_stream(setup.seed, self.kind, setup.index, seeding.of_life("actions", life))
        self._acting = _acting(setup, handles)
        first_seed = self._first_env + life * self._total_envs
        seeds = seeding.episode_seeds(setup.seed, "training", envs, first=first_seed)
        with faults_told(self.kind, setup.index, self._progress):
            mends = handles.keep is not None  # inline a person wants to see where it was
            self._env = make_stepping(setup.env, envs, setup.actor.groups, setup.code.env, mends)
            self._pending = Pending(*self._env.reset(seeds))
        self._waiting, self._telling = Waiting(self._env.units, self._env.parts), Telling()
        # cut since the last message, to be named by the next one: the episodes of a former life are
        self._broken: Ints = np.arange(envs if life else 0)
        self._recorder: RowRecorder | RolloutRecorder = (
            RowRecorder(
                setup.spec, f"{self.kind}-{setup.index}", self._first_env, self._progress.sequence, setup.valued
            )
            if setup.agent.kind == "replay"
            else RolloutRecorder()
        )
        self._acted_with: Version | None = None
        self._ticks = 0  # of the message that is being written
        self._returns, self._lengths, self._episodes, self._cuts = Window(100), Window(100), 0, 0
        self._return_sum = 0.0

    @property
    def phase(self) -> str:
        """What the actor is doing now: a vector that makes an environment anew does not ask it before."""
        return MAKING if self._env.making else self._phase

    @phase.setter
    def phase(self, now: str) -> None:
        self._phase = now

    def step(self) -> Status:
        """Act for a few ticks and send what happened."""
        over = self._handles.env_steps.total() >= self._setup.env_steps
        if over and not self._ticks:
            self._handles.experience.close()
            self._acting.close()
            return DONE
        if not self._handles.experience.ready():
            return Idle(NO_ROOM, wake_on=(self._handles.experience,))
        self._obey()
        if not self._ticks and self._rests():
            return Idle("not needed now", deadline=_ORDERS_S)
        self._acting.refresh()
        if isinstance(self._recorder, RolloutRecorder) and self._acting.version == self._acted_with:
            return Idle("no newer weights yet", wake_on=self._acting.wake_on, deadline=0.01)
        self._acted_with = self._acting.version
        with faults_told(self.kind, self._setup.index, self._progress):
            if not over and (unfinished := self._play()) is not None:
                return unfinished
        self._ticks = 0
        self._handles.experience.send(self._recorder.message(self._acting.version))
        self._progress.sent(self._recorder.sequence)
        self._tell_incidents()
        return WORKED

    def _obey(self) -> None:
        """Follow new orders: some environments rest from now on, others go on where they were."""
        orders = None if self._handles.orders is None else self._handles.orders.latest()
        if orders is not None:
            self._waiting.order(orders.envs[self._setup.index], self._env.seconds, self._env.given_up())
            self._env.expect(int(np.count_nonzero(self._waiting.awake)))
            if isinstance(self._acting, MovingActing):
                self._acting.order(orders.served)

    def _rests(self) -> bool:
        """Return whether nothing happens until there are other orders."""
        return not (self._waiting.awake.any() or self._env.under_way() or len(self._acting.asked))

    def _play(self) -> Status | None:
        """Act for as many ticks as one message holds; fewer for a replay when an episode was cut, which the next names.

        Returns a status where the values to act on are not there yet: the message is then written on later.
        """
        rows = isinstance(self._recorder, RowRecorder)
        if isinstance(self._recorder, RowRecorder) and len(self._broken) and not self._ticks:
            self._recorder.cut(self._broken)
            self._broken = self._broken[:0]
        while self._ticks < self._setup.actor.unroll * self._setup.actor.groups:
            if rows and self._ticks and len(self._broken):
                break
            asked = self._act()
            if not self._env.under_way():
                if self._ticks and self._rests():
                    break
                return WORKED if asked else self._waits()
            self._tick()
            self._ticks += 1
        return None

    def _waits(self) -> Idle:
        if not len(self._acting.asked):
            return Idle("its environments are being begun anew", deadline=0.05)
        assert isinstance(self._setup.inference, ServedInference)
        seconds = self._setup.inference.resend_s
        return Idle(UNANSWERED, wake_on=self._acting.wake_on, deadline=seconds)

    def _act(self) -> bool:
        """Ask for the environments that wait, and act in those whose values are there; returns whether it asked."""
        asked = False
        while self._waiting and self._acting.room:
            envs = self._waiting.pop()
            self._acting.ask(*self._pending.seen(envs), envs)
            asked = True
        self._act_on_answers()
        return asked

    def _act_on_answers(self) -> None:
        while (answered := self._acting.answered()) is not None:
            choice = self._acting.act(self._epsilons()[answered], self._rng)
            self._pending.choose(answered, choice)
            self._env.send(choice.action, answered)

    def _tick(self) -> None:
        """Write down what the next environments did."""
        self.phase = IN_ENVS if self._env.watched else "running"
        while not self._env.ready():
            self._env.wait(self._acting.wake_on)
            self._act_on_answers()
        envs, tick = self._env.receive()
        self.phase = "running"
        self._act_on_answers()  # so that others step while this is written down
        self._recorder.add(*self._pending.seen(envs), self._pending.chosen(envs), tick, envs)
        self._acting.forget(envs[tick.terminated | tick.truncated | ~tick.valid])
        self._pending.see(envs, tick)
        self._waiting.join(envs)
        self._broken = envs[tick.cut]
        self._count(tick)

    def _count(self, tick: Tick) -> None:
        self._cuts += len(tick.cut)
        steps = int(np.count_nonzero(tick.valid))
        self._handles.env_steps.add(steps)
        self._progress.count(steps)
        for score, length in zip(tick.scores, tick.score_lengths, strict=True):
            self._returns.add(float(score))
            self._return_sum += float(score)
            self._lengths.add(float(length))
            self._episodes += 1

    def _tell_incidents(self) -> None:
        for text in self._telling.of(self._env.incidents()):
            if self._handles.events is not None and self._handles.events.ready():
                self._handles.events.send(Notice(self.kind, self._setup.index, "environment", text))

    def _epsilons(self) -> Any:
        step, envs = self._handles.env_steps.total(), self._setup.actor.envs
        begun = self._setup.begun * envs or self._total_envs
        return epsilons(self._setup.exploration, step, self._first_env % begun, envs, begun)

    def metrics(self) -> Mapping[str, float]:
        """Return episode statistics and the present exploration."""
        values = {"episodes": float(self._episodes), "epsilon": float(self._epsilons().mean())}
        values["env_steps"] = float(self._progress.counted)
        given_up = self._env.given_up()
        if self._handles.orders is not None:
            values |= self._waiting.load(self._env.seconds, given_up)
        if given_up:
            values["given_up_envs"] = float(len(given_up))
        if isinstance(self._acting, MovingActing):
            values["network_s"] = self._acting.network_s
        if self._episodes:
            values |= {"episode_return": self._returns.mean(), "episode_length": self._lengths.mean()}
            values["return_sum"] = self._return_sum
        if self._cuts:
            values["cut_episodes"] = float(self._cuts)
        if self._progress.lost:
            values["lost_steps"] = float(self._progress.lost)
        return values

    def helpers_cpu_s(self) -> float:
        """Return what environments in processes of their own have taken."""
        return self._env.helpers_cpu_s()

    def state_dict(self) -> State:
        """Return environments, random streams, weights and statistics."""
        return {
            "env": self._env.state_dict(),
            "pending": None if self._setup.actor.groups == 1 else self._pending.state_dict(),
            "broken": self._broken,
            "rng": seeding.numpy_state(self._rng),
            **self._acting.state_dict(),
            "written": [self._ticks, self._recorder.open_rows() if isinstance(self._recorder, RowRecorder) else None],
            "acted_with": self._acted_with,
            "sequence": self._recorder.sequence,
            "statistics": [self._returns.state_dict(), self._lengths.state_dict(), self._episodes, self._return_sum],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue; environments that cannot be restored begin new episodes, and their streams are cut."""
        waiting = self._env.load_state_dict(state["env"])
        self._pending = Pending(*self._env.current())
        if state.get("pending") is not None:
            under_way = np.setdiff1d(np.arange(self._env.num_envs), np.concatenate([[], *waiting]))
            self._pending.load_state_dict(state["pending"], under_way)
        self._broken = np.union1d(self._env.cut, state.get("broken", self._env.cut))
        seeding.restore_numpy(self._rng, state["rng"])
        self._acting.load_state_dict(state)
        self._acting.forget(self._env.cut)
        unasked = (np.setdiff1d(envs, self._acting.asked) for envs in waiting)
        self._waiting.begin([envs for envs in unasked if len(envs)])
        self._acted_with = state["acted_with"]
        self._recorder.sequence = state["sequence"]
        self._progress.sent(self._recorder.sequence)
        if isinstance(self._recorder, RowRecorder) and "written" in state:  # version 0.1 wrote a message in one step
            self._ticks, rows = state["written"]
            self._recorder.reopen(rows)
        returns, lengths, self._episodes, *summed = state["statistics"]
        self._return_sum = summed[0] if summed else 0.0  # earlier ones kept no sum
        self._returns.load_state_dict(returns)
        self._lengths.load_state_dict(lengths)

    def close(self) -> None:
        """Close the environments."""
        self._env.close()


def _acting(setup: ActorSetup, handles: ActorHandles) -> LocalActing | ServedActing | MovingActing:
    """Return what chooses actions."""
    inference = setup.inference
    if isinstance(inference, AdaptiveInference):
        return MovingActing(_local(setup, handles), _served(setup, handles, inference), inference.begins)
    return _served(setup, handles, inference) if isinstance(inference, ServedInference) else _local(setup, handles)


def _served(setup: ActorSetup, handles: ActorHandles, inference: ServedInference) -> ServedActing:
    assert isinstance(setup.agent, ReplayAgent)
    life = 0 if handles.keep is None else handles.keep.life
    return ServedActing(setup.agent, setup.actor.envs, handles.requests, handles.replies, life, inference.resend_s)


def _local(setup: ActorSetup, handles: ActorHandles) -> LocalActing:
    assert handles.weights is not None
    network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network)
    foreign = setup.code.network is not None
    compute_by_onednn(network, setup.accel, foreign)
    rounded = Rounded(network, setup.inference.precision, foreign)
    purpose = seeding.of_life("noise", 0 if handles.keep is None else handles.keep.life)
    noise = seeding.torch_stream(setup.seed, Actor.kind, setup.index, purpose)
    return LocalActing(network, setup.actor.envs, noise, handles.weights, rounded, handles.keyframes)
