"""THE MAP: which roles a run has, which edges join them, and what each is built from.

Follow one transition: Actor -> (experience) -> ReplayShard -> (batches) -> Learner -> (weights) -> Actor.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.core.protocols import Counter, Placement, Receiver, Sender
from qfleet.core.spec import EnvSpec
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
from qfleet.experiment import Experiment
from qfleet.roles.actor import Actor, ActorHandles
from qfleet.roles.evaluator import Evaluator, EvaluatorHandles
from qfleet.roles.fused import Fused, FusedHandles
from qfleet.roles.inference_server import InferenceHandles, InferenceServer, ServedInference
from qfleet.roles.learner import GroupConfig, Learner, LearnerHandles
from qfleet.roles.replay_shard import ReplayShard, ShardHandles
from qfleet.runtime.graph import Graph
from qfleet.setups import (
    actor_setup,
    evaluator_setup,
    fused_setup,
    inference_setup,
    learner_setup,
    shard_setup,
)

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


def _spawned(experiment: Experiment) -> tuple[str, ...]:
    """Return the kinds of roles that use CUDA, which a forked process cannot."""
    if not torch.cuda.is_available():
        return SPAWNED
    devices = {Learner.kind: experiment.device}
    if isinstance(experiment.inference, ServedInference):
        devices[InferenceServer.kind] = experiment.inference.device
    return (*SPAWNED, *(kind for kind, device in devices.items() if device != "cpu"))
