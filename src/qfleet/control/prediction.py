"""Predicts how fast an arrangement of roles in processes is, from what each piece of the work costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.control.measurements import LearnerCost, Measurements, at
from qfleet.experiment import Experiment

EFFICIENCY = 0.9
"""Share of the cores that roles can use together: the system and their waiting for each other take the rest."""
WIDE = 1.1
"""An actor whose processor time exceeds its length by this factor has environments that step beside it; less is noise.
"""
_NOTHING = 1e-12
"""Seconds that stand for none, where one divides by them."""

Side = Literal["local", "cpu", "cuda"]
"""Who computes for the actors: they themselves, or servers on that device."""


@dataclass(frozen=True)
class Arrangement:
    """One way to share the work among processes."""

    actors: int
    envs: int
    unroll: int
    groups: int
    learner: LearnerCost
    inference: Side = "local"
    servers: int = 1
    """How many share the actors, if any."""


@dataclass(frozen=True)
class Prediction:
    """Seconds for each environment step by who works, and the rate that comes of them."""

    actor: float
    """Of one actor, what it waits for inside a tick included."""
    actor_cpu: float
    """Processor time of an actor."""
    inference: float
    """Of the inference server that computes for it; 0 without one."""
    replay: float
    learner: float
    rate: float
    """Environment steps a second."""
    bottleneck: str
    """The kind of role, or "cores", that limits the rate."""
    sampling: bool = False
    """Whether it is limited by what actors do, or wait for: not by a learner, or one that takes the cores."""
    lead: float = math.inf
    """How many times as fast as the learner all others could go on."""
    free_cores: float = math.inf
    """Cores that one actor's environments find free while they step in threads; inf where those are enough, or where
    sampling does not limit the rate."""

    @property
    def leaves_gaps(self) -> bool:
        """Whether environments step in threads and are short of cores then, while some idle as long as actors act."""
        return math.isfinite(self.free_cores)


Tried = tuple[Arrangement, Prediction]
"""A way, and what it would do."""


@dataclass(frozen=True)
class Tick:
    """One tick of an actor that has the machine to itself, in seconds."""

    length: float
    """What it waits for included."""
    cpu: float
    """Processor time of all its threads and processes."""
    rest: float
    """What comes before and after the environments' steps."""
    burst: float
    """Processor time of environments that step in threads or processes of their own; 0 where they do not."""


def inline(experiment: Experiment, measured: Measurements) -> Prediction:
    """Return what the experiment does in one process, where roles take turns."""
    actor = at(measured.actor_tick, experiment.actor.envs) / experiment.actor.envs
    costs = {"actor": actor, "replay": measured.replay, "learner": single_threaded(measured).seconds}
    worst = max(costs, key=lambda name: costs[name])
    rate = 1 / max(sum(costs.values()), _NOTHING)
    return Prediction(actor, actor, 0.0, costs["replay"], costs["learner"], rate, worst)


def predict(experiment: Experiment, measured: Measurements, cores: float, way: Arrangement) -> Prediction:
    """Return what an arrangement in processes does: limited by its slowest kind of role, or by the cores."""
    rows = rows_of_message(experiment, way)
    message = message_side(measured, rows) / rows
    sent = measured.batch_message if way.learner.batch_message is None else way.learner.batch_message
    batch = (measured.wake / way.learner.updates_per_draw + sent / 2) * measured.batches_per_step
    tick, inference = _acting(measured, way)
    kept = measured.replay if way.learner.replay is None else way.learner.replay
    replay, learner = kept + batch + message, way.learner.seconds + batch
    if not replaying(experiment):
        replay, learner = 0.0, way.learner.seconds + message
    learning = way.learner.threads * learner
    beside = inference + replay + learning
    cpu = tick.cpu / way.envs + message
    apart = message if replaying(experiment) else message + learner  # rollouts wait for the weights of the one before
    among_others = crowded(tick, cores, way.actors, way.envs * beside)
    alone, actor = (length / way.envs + apart for length in (tick.length, among_others))
    limits = {
        "actor": way.actors / max(actor, _NOTHING),
        "inference": way.servers / max(inference, _NOTHING),
        "replay": experiment.replay.shards / max(replay, _NOTHING),
        "learner": 1 / max(learner, _NOTHING),
        "cores": EFFICIENCY * cores / max(cpu + beside, _NOTHING),
    }
    slowest = min(limits, key=lambda name: limits[name])
    if slowest != "actor":
        actor = alone  # at a slower pace they crowd each other less
    sampling = slowest in ("actor", "inference") or (slowest == "cores" and cpu + inference > replay + learning)
    crowd = sampling and slowest != "inference" and among_others > tick.length
    free = tick.burst / (among_others - tick.rest) if crowd else math.inf
    lead = min(limit for kind, limit in limits.items() if kind != "learner") / limits["learner"]
    return Prediction(actor, cpu, inference, replay, learner, limits[slowest], slowest, sampling, lead, free)


def _acting(measured: Measurements, way: Arrangement) -> tuple[Tick, float]:
    """Return an actor's tick, and a server's seconds for each environment step."""
    tick, cpu = at(measured.actor_tick, way.envs), at(measured.actor_cpu, way.envs)
    stepping = min(at(measured.env_tick, way.envs), tick)
    burst = cpu - tick + stepping if cpu > WIDE * tick else 0.0
    if way.inference == "local":
        length = tick * ((measured.two_groups or 1.0) if way.groups > 1 else 1.0)
        return Tick(length, cpu, tick - stepping, burst), 0.0
    size = max(1, way.envs // way.groups)
    act, request = at(measured.act, way.envs), way.groups * request_side(measured, size)
    own = max(tick - act, 0.0) + request
    curve = measured.act if way.inference == "cpu" else measured.act_cuda
    clients = way.actors / way.servers
    asked = clients * size
    served = at(curve, asked) + clients * request_side(measured, size)
    if way.groups > 1:
        waited, rest = max(own, served), own
    else:  # it waits for its own values, and for those of others as often as the server is at work for them
        alone = at(curve, size) + request_side(measured, size)
        waited = rest = own + alone + max(served - alone, 0.0) * served / max(own + served, _NOTHING)
    found = Tick(waited, max(cpu - act, 0.0) + request, max(rest - stepping, 0.0), burst)
    return found, served / max(asked, 1)


def crowded(tick: Tick, cores: float, actors: int, beside: float) -> float:
    """Return how long a tick is where all roles share the cores; `beside` is what others compute for one, in seconds.

    Environments that step in several threads want several cores for a moment, and find those that are not taken:
    length = rest + burst / (cores - taken / length), where taken is the processor time of all others. Two groups of
    environments do not change that: what one of them gains, the other lacks.
    """
    if not tick.burst:
        return tick.length
    cores, taken = EFFICIENCY * cores, (actors - 1) * tick.cpu + actors * beside
    half = (taken + tick.rest * cores + tick.burst) / 2
    return max(tick.length, (half + math.sqrt(max(half**2 - cores * tick.rest * taken, 0.0))) / cores)


def request_side(measured: Measurements, rows: int) -> float:
    """Return the seconds that asking a server for the values of so many observations costs one of the two ends."""
    return 2 * measured.wake + at(measured.request_message, rows) / 2


def rows_of_message(experiment: Experiment, way: Arrangement) -> int:
    """Return the environment steps of one message from an actor: those of a whole rollout without a replay."""
    agent = experiment.agent
    return way.envs * (agent.rollout_length if isinstance(agent, RolloutAgent) else way.unroll)


def message_side(measured: Measurements, rows: int) -> float:
    """Return the seconds that a message of so many rows costs one of its two ends."""
    return measured.wake + at(measured.experience_message, rows) / 2


def single_threaded(measured: Measurements) -> LearnerCost:
    """Return the fastest way to learn with one thread and the fewest batches at once, or the first that was tried."""
    single = [one for one in measured.learners if one.threads == 1]
    return min(single or measured.learners[:1], key=lambda one: (one.updates_per_draw, one.seconds))


def replaying(experiment: Experiment) -> bool:
    """Return whether actors and learner are joined by a replay, and so need not wait for each other."""
    return isinstance(experiment.agent, ReplayAgent)
