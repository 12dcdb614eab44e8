"""THE MAP: which roles a run has, which edges join them, and what each is built from.

Follow one transition: Actor -> (experience) -> ReplayShard -> (batches) -> Learner -> (weights) -> Actor.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.schedules import Schedule
from qfleet.algo.sequences import LAST_ACTION, STATE
from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Counter, Placement, Receiver, Sender
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.types import (
    Batch,
    Evaluated,
    InferenceReply,
    InferenceRequest,
    Notice,
    Priorities,
    Rollout,
    SequenceBatch,
)
from qfleet.core.usercode import UserCode
from qfleet.envs import TensorConfig
from qfleet.experiment import Experiment
from qfleet.replay import SequenceWindow
from qfleet.roles.actor import Actor, ActorHandles, ActorSetup
from qfleet.roles.evaluator import Evaluator, EvaluatorHandles, EvaluatorSetup
from qfleet.roles.fused import Fused, FusedHandles, FusedSetup
from qfleet.roles.inference_server import InferenceHandles, InferenceServer, InferenceSetup, ServedInference
from qfleet.roles.learner import GroupConfig, Learner, LearnerHandles, LearnerSetup
from qfleet.roles.replay_shard import ReplayShard, ShardHandles, ShardSetup
from qfleet.runtime.graph import Graph

PREFETCH = {"inline": 1, "processes": 3, "ray": 3}
"""Batches on their way to a learner: inline draws each one after the last was learned from, as Algorithm 1 does."""
SPAWNED: tuple[str, ...] = ()
"""Kinds of roles whose process is started afresh instead of forked from the preloaded server."""


@dataclass(frozen=True)
class MonitorHandles:
    """What the run's monitor sees."""

    events: tuple[Receiver[Evaluated | Notice], ...]
    env_steps: Counter
    updates: Counter
    samples: Counter


@dataclass(frozen=True)
class Program:
    """A run as drawn: its roles and edges, and the ends that its monitor holds."""

    graph: Graph
    monitor: MonitorHandles


@dataclass(frozen=True)
class Feed:
    """Where one learner rank gets its batches, and where the priorities that it finds go."""

    batches: tuple[Receiver[Batch | SequenceBatch | Rollout], ...]
    priorities: Sender[Priorities] | None = None


@dataclass(frozen=True)
class Served:
    """One actor's ends of the streams to and from its inference server."""

    requests: tuple[Sender[InferenceRequest], ...]
    replies: tuple[Receiver[InferenceReply], ...]


def build_program(experiment: Experiment, spec: EnvSpec, code: UserCode, directory: Path) -> Program:
    """Draw the graph of a run. `directory` is the run's own; nothing is started or written here."""
    if experiment.fused:
        if _valued(experiment):
            raise ConfigError(
                "replay.sampler.initial 'actor' needs topology 'pipeline': in a fused loop new items get the maximum"
            )
        return _fused_program(experiment, spec, code)
    graph = Graph()
    models_in, models_out = graph.stream("models", capacity=1)
    evaluated_in, evaluated_out = graph.stream("evaluated", capacity=64)
    notices_in, notices_out = graph.stream("notices", capacity=64)

    experience, incidents = _add_actors(graph, experiment, spec, code)
    if isinstance(experiment.agent, ReplayAgent):
        feeds = _add_replay(graph, experiment, spec, directory, experience)
    else:
        feeds = [Feed(batches=experience)]
    rendezvous = f"file://{directory.resolve()}/.rendezvous-{uuid.uuid4().hex}"
    for rank, feed in enumerate(feeds):
        first = rank == 0  # one rank speaks for the group
        learner = LearnerHandles(
            batches=feed.batches,
            priorities=feed.priorities,
            weights=graph.publisher("weights") if first else None,
            models=models_in if first else None,
            events=notices_in if first else None,
            score=graph.subscriber("score"),
            env_steps=graph.counter("env_steps"),
            updates=graph.counter("updates"),
            keep=graph.keep("learner-0") if len(feeds) == 1 else None,  # a group dies as a whole
        )
        group = GroupConfig(rank, len(feeds), rendezvous) if len(feeds) > 1 else None
        graph.add(Learner, learner_setup(experiment, spec, code, group), learner)
    evaluator = EvaluatorHandles(
        models=models_out, events=evaluated_in, score=graph.publisher("score"), keep=graph.keep("evaluator-0")
    )
    graph.add(Evaluator, evaluator_setup(experiment, spec, code), evaluator)

    monitor = MonitorHandles(
        events=(evaluated_out, notices_out, *incidents),
        env_steps=graph.counter("env_steps"),
        updates=graph.counter("updates"),
        samples=graph.counter("samples"),
    )
    return Program(graph, monitor)


def _fused_program(experiment: Experiment, spec: EnvSpec, code: UserCode) -> Program:
    """Draw the graph of a run that is one loop: a single role."""
    graph = Graph()
    events_in, events_out = graph.stream("evaluated", capacity=64)
    counters = {name: graph.counter(name) for name in ("env_steps", "updates", "samples")}
    graph.add(Fused, fused_setup(experiment, spec, code), FusedHandles(events=events_in, **counters))
    watched = {name: graph.counter(name) for name in counters}
    return Program(graph, MonitorHandles(events=(events_out,), **watched))


def _add_actors(
    graph: Graph, experiment: Experiment, spec: EnvSpec, code: UserCode
) -> tuple[tuple[Receiver[Any], ...], tuple[Receiver[Notice], ...]]:
    """Add every actor with streams of its own; returns the other ends of those for experience and for notices."""
    receivers, incidents = [], []
    served = None
    if isinstance(experiment.inference, ServedInference):
        served = _add_inference(graph, experiment, spec, code, experiment.inference.servers)
    for index in range(experiment.actors):
        sender, receiver = graph.stream(
            f"experience-{index}", PREFETCH[experiment.placement], views=True, setting="actor.envs"
        )
        notices_in, notices_out = graph.stream(f"notices-{index}", capacity=16, optional=True)
        handles = ActorHandles(
            experience=sender,
            events=notices_in,
            weights=graph.subscriber("weights", views=True) if served is None else None,
            env_steps=graph.counter("env_steps"),
            requests=() if served is None else served[index].requests,
            replies=() if served is None else served[index].replies,
            keep=graph.keep(f"actor-{index}"),
        )
        graph.add(Actor, actor_setup(experiment, spec, code, index), handles)
        receivers.append(receiver)
        incidents.append(notices_out)
    return tuple(receivers), tuple(incidents)


def _add_inference(graph: Graph, experiment: Experiment, spec: EnvSpec, code: UserCode, servers: int) -> list[Served]:
    """Add the inference servers, among which the actors are dealt out; returns each actor's ends."""
    lines = range(experiment.actor.groups)
    asked = [
        [graph.stream(f"requests-{a}-{line}", capacity=2, views=True, asking=True) for line in lines]
        for a in range(experiment.actors)
    ]
    told = [
        [graph.stream(f"replies-{a}-{line}", capacity=2, asking=True) for line in lines]
        for a in range(experiment.actors)
    ]
    for server in range(servers):
        handles = InferenceHandles(
            requests=tuple(receiver for ends in asked[server::servers] for _, receiver in ends),
            replies=tuple(sender for ends in told[server::servers] for sender, _ in ends),
            weights=graph.subscriber("weights", views=True),
            keep=graph.keep(f"inference-{server}"),
        )
        graph.add(InferenceServer, inference_setup(experiment, spec, code, server), handles)
    return [
        Served(tuple(sender for sender, _ in requests), tuple(receiver for _, receiver in replies))
        for requests, replies in zip(asked, told, strict=True)
    ]


def _add_replay(
    graph: Graph, experiment: Experiment, spec: EnvSpec, directory: Path, experience: tuple[Receiver[Any], ...]
) -> list[Feed]:
    """Add the replay shard between the actors and the learner ranks; returns a feed for each rank."""
    prefetch, ranks = PREFETCH[experiment.placement], range(experiment.learners)
    drawn = [graph.stream(f"batches-{rank}", prefetch, views=True, setting="learner.batch_size") for rank in ranks]
    prioritised = experiment.replay.sampler.kind == "prioritised"
    written = [graph.stream(f"priorities-{rank}", prefetch + 2, views=True) for rank in ranks if prioritised]
    handles = ShardHandles(
        experience=experience,
        priorities=tuple(receiver for _, receiver in written),
        batches=tuple(sender for sender, _ in drawn),
        env_steps=graph.counter("env_steps"),
        inserts=graph.counter("inserts"),
        samples=graph.counter("samples"),
        keep=graph.keep("replay-0", setting="replay.capacity"),
    )
    graph.add(ReplayShard, shard_setup(experiment, spec, directory), handles)
    return [Feed((drawn[rank][1],), written[rank][0] if prioritised else None) for rank in ranks]


def place(program: Program, experiment: Experiment) -> Placement:
    """Bring a program to life where the experiment says."""
    if experiment.placement == "inline":
        from qfleet.runtime.inline import InlinePlacement

        torch.set_num_threads(experiment.threads)
        return InlinePlacement(program.graph, strict=experiment.strict)
    threads = {Learner.kind: experiment.threads}
    if experiment.placement == "processes":
        from qfleet.runtime.processes import ProcessPlacement

        return ProcessPlacement(program.graph, spawn=_spawned(experiment), threads=threads, groups=(Learner.kind,))
    from qfleet.runtime.ray import RayPlacement

    return RayPlacement(program.graph, address=experiment.address, threads=threads)


def actor_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, index: int) -> ActorSetup:
    """Return what actor `index` is built from."""
    actor, agent = experiment.actor, experiment.agent
    if not isinstance(agent, ReplayAgent):
        actor = actor.replace(unroll=agent.rollout_length if isinstance(agent, RolloutAgent) else 1)
    return ActorSetup(
        actor=actor,
        env=experiment.env,
        spec=spec,
        network=experiment.network,
        agent=agent,
        exploration=experiment.exploration,
        seed=experiment.seed,
        index=index,
        actors=experiment.actors,
        env_steps=experiment.env_steps,
        code=code,
        inference=experiment.inference,
        valued=_valued(experiment),
    )


def inference_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, index: int) -> InferenceSetup:
    """Return what inference server `index` is built from."""
    inference = experiment.inference
    assert isinstance(experiment.agent, ReplayAgent)
    assert isinstance(inference, ServedInference)
    actors = len(range(index, experiment.actors, inference.servers))
    if experiment.placement == "inline":
        inference = inference.replace(deadline_ms=0.0)  # nobody else can ask while the server waits
    return InferenceSetup(
        inference=inference,
        spec=spec,
        network=experiment.network,
        agent=experiment.agent,
        optim=experiment.optim,
        accel=experiment.accel,
        seed=experiment.seed,
        index=index,
        rows=actors * experiment.actor.envs,
        device=_device(inference.device, "inference.device", spec),
        code=code,
    )


def shard_setup(experiment: Experiment, spec: EnvSpec, directory: Path) -> ShardSetup:
    """Return what the replay shard is built from."""
    agent = experiment.agent
    assert isinstance(agent, ReplayAgent)
    return ShardSetup(
        replay=experiment.replay,
        spec=spec,
        streams=experiment.actors * experiment.actor.envs,
        n_step=agent.n_step,
        gamma=agent.gamma,
        normalise_rewards=experiment.normalise_rewards,
        batch_size=experiment.learner.batch_size,
        train_period=experiment.learner.train_period,
        learning_starts=experiment.learner.learning_starts,
        beta=_beta(experiment),
        seed=experiment.seed,
        index=0,
        directory=directory / "replay",
        sequence=_sequence(agent),
        extras=_extras(agent),
    )


def _sequence(agent: ReplayAgent) -> SequenceWindow | None:
    """Return how episodes are cut into sequences, for an agent with memory."""
    memory = agent.memory
    if memory is None:
        return None
    return SequenceWindow(length=memory.burn_in + memory.length, burn_in=memory.burn_in, period=memory.period)


def _extras(agent: ReplayAgent) -> dict[str, LeafSpec]:
    """Return what each row holds besides the transition: the memory before it."""
    if agent.memory is None:
        return {}
    return {
        STATE: LeafSpec(shape=(2 * agent.memory.hidden,), dtype="float16"),
        LAST_ACTION: LeafSpec(shape=(), dtype="int32"),
    }


def learner_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, group: GroupConfig | None) -> LearnerSetup:
    """Return what a learner rank is built from."""
    return LearnerSetup(
        learner=experiment.learner,
        network=experiment.network,
        agent=experiment.agent,
        optim=experiment.optim,
        spec=spec,
        seed=experiment.seed,
        total_updates=total_updates(experiment),
        evaluate_every=experiment.evaluation.every,
        env_steps=experiment.env_steps,
        device=learner_device(experiment, spec),
        group=group,
        warm_start=_model_of(experiment.warm_start),
        warm_start_part=experiment.warm_start_part,
        code=code,
        accel=experiment.accel,
    )


def fused_setup(experiment: Experiment, spec: EnvSpec, code: UserCode) -> FusedSetup:
    """Return what a fused loop is built from."""
    assert isinstance(experiment.env, TensorConfig)
    return FusedSetup(
        env=experiment.env,
        spec=spec,
        network=experiment.network,
        agent=experiment.agent,
        exploration=experiment.exploration,
        actor=experiment.actor,
        replay=experiment.replay,
        beta=_beta(experiment),
        learner=experiment.learner,
        optim=experiment.optim,
        evaluation=experiment.evaluation,
        accel=experiment.accel,
        seed=experiment.seed,
        env_steps=experiment.env_steps,
        total_updates=total_updates(experiment),
        device=learner_device(experiment, spec),
        warm_start=_model_of(experiment.warm_start),
        warm_start_part=experiment.warm_start_part,
        code=code,
    )


def _valued(experiment: Experiment) -> bool:
    """Return whether new items get their priorities from the actors' values."""
    sampler = experiment.replay.sampler
    return isinstance(experiment.agent, ReplayAgent) and sampler.kind == "prioritised" and sampler.initial == "actor"


def _beta(experiment: Experiment) -> Schedule:
    """Return how the exponent of the importance weights changes during the run."""
    sampler = experiment.replay.sampler
    if sampler.kind != "prioritised":
        return Schedule(start=0.0)
    return Schedule(start=sampler.beta_start, end=sampler.beta_end, steps=experiment.env_steps)


def _model_of(path: str | None) -> Path | None:
    """Return the model directory of a run directory, or the path itself."""
    if path is None:
        return None
    inside = Path(path) / "model"
    return inside if inside.is_dir() else Path(path)


def evaluator_setup(experiment: Experiment, spec: EnvSpec, code: UserCode) -> EvaluatorSetup:
    """Return what the evaluator is built from."""
    return EvaluatorSetup(
        evaluation=experiment.evaluation,
        env=experiment.env,
        spec=spec,
        network=experiment.network,
        agent=experiment.agent,
        seed=experiment.seed,
        code=code,
    )


def total_updates(experiment: Experiment) -> int:
    """Return how many gradient steps the whole run makes."""
    agent = experiment.agent
    if isinstance(agent, ReplayAgent):
        learning = experiment.env_steps - experiment.learner.learning_starts
        return max(1, int(learning / experiment.learner.train_period))
    if isinstance(agent, RolloutAgent):
        rollouts = math.ceil(experiment.env_steps / (agent.rollout_length * experiment.actor.envs))
        return max(1, rollouts * agent.epochs * agent.minibatches)
    return max(1, experiment.env_steps)


def learner_device(experiment: Experiment, spec: EnvSpec) -> str:
    """Return the torch device of the learner: a GPU pays for images and fused loops, not for small vectors."""
    return _device(experiment.device, "device", spec, experiment.fused)


def _device(wanted: str, setting: str, spec: EnvSpec, fused: bool = False) -> str:
    """Return the torch device that a setting asks for or, where it leaves the choice, the one that pays."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{setting} 'cuda': torch sees no CUDA device here; use {setting} 'cpu' or 'auto'")
    if wanted != "auto":
        return wanted
    images = any(len(leaf.shape) == 3 for leaf in spec.observations.values())
    return "cuda" if (images or fused) and torch.cuda.is_available() else "cpu"


def _spawned(experiment: Experiment) -> tuple[str, ...]:
    """Return the kinds of roles that use CUDA, which a forked process cannot."""
    if not torch.cuda.is_available():
        return SPAWNED
    devices = {Learner.kind: experiment.device}
    if isinstance(experiment.inference, ServedInference):
        devices[InferenceServer.kind] = experiment.inference.device
    return (*SPAWNED, *(kind for kind, device in devices.items() if device != "cpu"))
