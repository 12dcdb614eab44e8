"""THE MAP: which roles a run has, which edges join them, and what each is built from.

Follow one transition: Actor -> (experience) -> ReplayShard -> (batches) -> Learner -> (weights) -> Actor.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.control.resources import usable_cores
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Counter, Placement, Publisher, Receiver, Sender, Subscriber
from qfleet.core.spec import EnvSpec
from qfleet.core.types import (
    Batch,
    Evaluated,
    InferenceReply,
    InferenceRequest,
    Notice,
    Orders,
    Priorities,
    Rollout,
    SequenceBatch,
    Standing,
)
from qfleet.core.usercode import UserCode
from qfleet.crowding import tell_crowd
from qfleet.envs import env_spec
from qfleet.experiment import Experiment
from qfleet.roles.actor import Actor, ActorHandles
from qfleet.roles.evaluator import Evaluator, EvaluatorHandles
from qfleet.roles.fused import Fused, FusedHandles
from qfleet.roles.gradient_worker import GradientWorker, WorkerHandles
from qfleet.roles.inference_server import AdaptiveInference, InferenceHandles, InferenceServer, ServedInference
from qfleet.roles.learner import Learner, LearnerHandles
from qfleet.roles.learner_setup import GroupConfig
from qfleet.roles.parameter_server import ParameterServer, ServerHandles
from qfleet.roles.replay_shard import ReplayShard, ShardHandles, ShardSetup
from qfleet.roles.twin import FusedTwin, LearnerTwin, Twin, TwinHandles
from qfleet.runtime.graph import Graph, Node
from qfleet.runtime.reviving import Revival
from qfleet.runtime.rundir import MEETING
from qfleet.setups import (
    actor_setup,
    check_inference,
    evaluator_setup,
    fused_setup,
    inference_setup,
    learner_setup,
    mirrored,
    serving_setup,
    shard_setup,
)

PREFETCH = 3
"""Messages on their way between roles that step side by side."""
ASKED = 2
"""Requests on their way to an inference server for each part of an actor's environments, and as many replies."""
SPAWNED: tuple[str, ...] = ()
"""Kinds of roles whose process is started afresh instead of forked from the preloaded server."""


@dataclass(frozen=True)
class MonitorHandles:
    """What the run's monitor sees."""

    events: tuple[Receiver[Evaluated | Notice], ...]
    env_steps: Counter
    updates: Counter
    samples: Counter
    orders: Publisher[Orders] | None = None
    """None where nothing can be balanced."""


@dataclass(frozen=True)
class Program:
    """A run as drawn: its roles and edges, and the ends that its monitor holds."""

    graph: Graph
    monitor: MonitorHandles
    rehearsal: Callable[[], Any] | None = None
    """What a machine must be able to do before it gets actors."""


@dataclass(frozen=True)
class Feed:
    """Where one learner rank gets its batches, and where the priorities that it finds go: a stream for each shard."""

    batches: tuple[Receiver[Batch | SequenceBatch | Rollout], ...]
    priorities: tuple[Sender[Priorities], ...] = ()


@dataclass(frozen=True)
class Served:
    """One actor's ends of the streams to and from its inference server."""

    requests: tuple[Sender[InferenceRequest], ...]
    replies: tuple[Receiver[InferenceReply], ...]


def prefetch(experiment: Experiment) -> int:
    """Return how many batches are on their way to a learner: roles that take turns draw each one after the last was
    learned from, as Algorithm 1 does."""
    return 1 if experiment.in_turns else PREFETCH


def build_program(experiment: Experiment, spec: EnvSpec, code: UserCode, directory: Path) -> Program:
    """Draw the graph of a run. `directory` is for files that end with the run; nothing is started or written here."""
    check_inference(experiment)
    if experiment.fused:
        return _fused_program(experiment, spec, code, directory)
    graph = Graph()
    models_in, models_out = graph.stream("models", capacity=1)
    evaluated_in, evaluated_out = graph.stream("evaluated", capacity=64)
    notices_in, notices_out = graph.stream("notices", capacity=64, aside=True)

    experience, incidents = _add_actors(graph, experiment, spec, code)
    if isinstance(experiment.agent, ReplayAgent):
        feeds = _add_replay(graph, experiment, spec, directory, experience)
    else:
        feeds = [Feed(batches=experience)]
    if experiment.serving is not None:
        incidents += _add_serving(graph, experiment, spec, code, feeds, models_in)
    else:
        _add_learners(graph, experiment, spec, code, directory, feeds, models_in, notices_in)
    evaluator = EvaluatorHandles(
        models=models_out, events=evaluated_in, score=graph.publisher("score"), keep=graph.keep("evaluator-0")
    )
    graph.add(Evaluator, evaluator_setup(experiment, spec, code), evaluator)

    monitor = MonitorHandles(
        events=(evaluated_out, notices_out, *incidents),
        env_steps=graph.counter("env_steps"),
        updates=graph.counter("updates"),
        samples=graph.counter("samples"),
        orders=graph.publisher("orders", optional=True) if experiment.balanced else None,
    )
    return Program(graph, monitor, partial(env_spec, experiment.env, code.env))


def _fused_program(experiment: Experiment, spec: EnvSpec, code: UserCode, directory: Path) -> Program:
    """Draw the graph of a run that is one loop, a single role, or several that learn as one."""
    graph, ranks = Graph(), experiment.learners
    events_in, events_out = graph.stream("evaluated", capacity=64)
    names, rendezvous = ("env_steps", "updates", "samples"), _rendezvous(directory)
    loops = []
    for rank in range(ranks):
        first = rank == 0  # one rank speaks for the group
        handles = FusedHandles(
            events=events_in if first else None,
            **{name: graph.counter(name) if first else None for name in names},
            keep=graph.keep(f"fused-{rank}") if outlived(experiment) else None,
        )
        group = GroupConfig(rank, ranks, rendezvous) if ranks > 1 else None
        loops.append((fused_setup(experiment, spec, code, group), handles))
    _add_ranks(graph, experiment, FusedTwin, loops)
    watched = {name: graph.counter(name) for name in names}
    return Program(graph, MonitorHandles(events=(events_out,), orders=None, **watched))


def _add_ranks(graph: Graph, experiment: Experiment, twin: type[Twin], ranks: list[tuple[Any, Any]]) -> None:
    """Add the ranks of a group, given what each is built from and its handles; inline as one role that plays them."""
    if experiment.placement == "inline" and len(ranks) > 1:
        setups, handles = zip(*ranks, strict=True)
        graph.add(twin, setups, TwinHandles(handles))
        return
    for setup, own in ranks:
        graph.add(twin.member, setup, own)


def outlived(experiment: Experiment) -> bool:
    """Return whether fused loops keep their states for a next life.

    A replay is too large to be kept every while: such a run goes back to its last checkpoint when one of them dies.
    """
    return experiment.learners > 1 and not isinstance(experiment.agent, ReplayAgent)


def _rendezvous(directory: Path) -> str:
    """Return a place where the ranks of a group meet; the path is not quoted."""
    return f"file://{directory.resolve()}/{MEETING}{uuid.uuid4().hex}"


def _add_actors(
    graph: Graph, experiment: Experiment, spec: EnvSpec, code: UserCode
) -> tuple[tuple[Receiver[Any], ...], tuple[Receiver[Notice], ...]]:
    """Add every actor with streams of its own; returns the other ends of those for experience and for notices."""
    receivers, incidents = [], []
    served, inference = None, experiment.inference
    if isinstance(inference, ServedInference):
        served = _add_inference(graph, experiment, spec, code, inference.servers)
    own_network = served is None or isinstance(inference, AdaptiveInference)
    for index in range(experiment.seats):
        sender, receiver = graph.stream(f"experience-{index}", prefetch(experiment), views=True, setting="actor.envs")
        notices_in, notices_out = graph.stream(f"notices-{index}", capacity=16, optional=True, aside=True)
        handles = ActorHandles(
            experience=sender,
            events=notices_in,
            weights=graph.subscriber("weights", views=True) if own_network else None,
            env_steps=graph.counter("env_steps"),
            requests=() if served is None else served[index].requests,
            replies=() if served is None else served[index].replies,
            keep=graph.keep(f"actor-{index}"),
            orders=_orders(graph, experiment),
            keyframes=_keyframes_seen(graph, experiment) if own_network else None,
        )
        graph.add(Actor, actor_setup(experiment, spec, code, index), handles)
        receivers.append(receiver)
        incidents.append(notices_out)
    return tuple(receivers), tuple(incidents)


def _orders(graph: Graph, experiment: Experiment) -> Subscriber[Orders] | None:
    """Return an end on which the balancer's orders come, where there are such."""
    return graph.subscriber("orders", optional=True) if experiment.balanced else None


def _keyframes_seen(graph: Graph, experiment: Experiment) -> Subscriber[PackedWeights] | None:
    """Return an end on which keyframes of the weights come, where weights are published as deltas.

    They come on an edge of their own, since most publications need no other one.
    """
    return graph.subscriber("keyframes") if experiment.learner.weights.kind == "delta" else None


def _keyframes_shown(graph: Graph, experiment: Experiment) -> Publisher[PackedWeights] | None:
    """Return the end that keyframes go to, where there are such."""
    return graph.publisher("keyframes") if experiment.learner.weights.kind == "delta" else None


def _add_inference(graph: Graph, experiment: Experiment, spec: EnvSpec, code: UserCode, servers: int) -> list[Served]:
    """Add the inference servers, among which the actors are dealt out; returns each actor's ends."""
    lines = range(experiment.actor.groups)
    asked = [
        [graph.stream(f"requests-{a}-{line}", capacity=ASKED, views=True, asking=True) for line in lines]
        for a in range(experiment.seats)
    ]
    told = [
        [graph.stream(f"replies-{a}-{line}", capacity=ASKED, asking=True) for line in lines]
        for a in range(experiment.seats)
    ]
    for server in range(servers):
        handles = InferenceHandles(
            requests=tuple(receiver for ends in asked[server::servers] for _, receiver in ends),
            replies=tuple(sender for ends in told[server::servers] for sender, _ in ends),
            weights=graph.subscriber("weights", views=True),
            keep=graph.keep(f"inference-{server}"),
            orders=_orders(graph, experiment),
            keyframes=_keyframes_seen(graph, experiment),
        )
        graph.add(InferenceServer, inference_setup(experiment, spec, code, server), handles)
    return [
        Served(tuple(sender for sender, _ in requests), tuple(receiver for _, receiver in replies))
        for requests, replies in zip(asked, told, strict=True)
    ]


def _add_replay(
    graph: Graph, experiment: Experiment, spec: EnvSpec, directory: Path, experience: tuple[Receiver[Any], ...]
) -> list[Feed]:
    """Add the parts of the replay between the actors and the learner ranks; returns a feed for each rank."""
    count = experiment.replay_parts
    parts = [
        _add_shard(graph, experiment, shard_setup(experiment, spec, directory, part), experience[part::count])
        for part in range(count)
    ]
    return [
        Feed(
            batches=tuple(stream for part in parts for stream in part[rank].batches),
            priorities=tuple(stream for part in parts for stream in part[rank].priorities),
        )
        for rank in range(experiment.rank_seats)
    ]


def _add_shard(
    graph: Graph, experiment: Experiment, setup: ShardSetup, experience: tuple[Receiver[Any], ...]
) -> list[Feed]:
    """Add one replay shard, or what one may be; returns its part of the feed of each rank."""
    several = experiment.replay_parts > 1
    ahead, prioritised = prefetch(experiment), experiment.replay.sampler.kind == "prioritised"
    names = [f"{setup.index}-{rank}" if several else f"{rank}" for rank in range(experiment.rank_seats)]
    drawn = [graph.stream(f"batches-{name}", ahead, views=True, setting="learner.batch_size") for name in names]
    # The ranks of a replica find the same priorities: its first one tells them.
    written = {
        rank: graph.stream(f"priorities-{name}", ahead + 2, views=True)
        for rank, name in enumerate(names)
        if prioritised and rank % setup.split == 0
    }
    handles = ShardHandles(
        experience=experience,
        priorities=tuple(receiver for _, receiver in written.values()),
        batches=tuple(sender for sender, _ in drawn),
        env_steps=graph.counter("env_steps"),
        inserts=graph.counter("inserts"),
        samples=graph.counter("samples"),
        standing=graph.publisher(f"standing-{setup.index}") if several else None,
        others=_others(graph, setup.index, experiment.replay_parts) if several else (),
        keep=graph.keep(f"replay-{setup.index}", setting="replay.capacity"),
    )
    graph.add(ReplayShard, setup, handles)
    return [
        Feed(
            batches=(receiver,),
            priorities=(written[rank][0],) if rank in written else (),
        )
        for rank, (_, receiver) in enumerate(drawn)
    ]


def _others(graph: Graph, index: int, shards: int) -> tuple[Subscriber[Standing] | None, ...]:
    """Return the ends on which a shard hears how the others stand, None in its own place."""
    numbers = range(shards)
    return tuple(None if one == index else graph.subscriber(f"standing-{one}", optional=True) for one in numbers)


def _add_learners(
    graph: Graph,
    experiment: Experiment,
    spec: EnvSpec,
    code: UserCode,
    directory: Path,
    feeds: list[Feed],
    models: Sender[Any],
    notices: Sender[Any],
) -> None:
    """Add one learner for each feed; several are the ranks of a group."""
    rendezvous, ranks = _rendezvous(directory), []
    for rank, feed in enumerate(feeds):
        first = rank == 0  # one rank speaks for the group
        learner = LearnerHandles(
            rows=graph.kept("replay-0") if mirrored(experiment, spec) else None,
            batches=feed.batches,
            priorities=feed.priorities,
            weights=graph.publisher("weights") if first else None,
            models=models if first else None,
            events=notices if first else None,
            score=graph.subscriber("score"),
            env_steps=graph.counter("env_steps"),
            updates=graph.counter("updates"),
            keep=graph.keep(f"learner-{rank}"),
            keyframes=_keyframes_shown(graph, experiment) if first else None,
        )
        group = GroupConfig(rank, len(feeds), rendezvous) if len(feeds) > 1 else None
        ranks.append((learner_setup(experiment, spec, code, group), learner))
    _add_ranks(graph, experiment, LearnerTwin, ranks)


def _add_serving(
    graph: Graph, experiment: Experiment, spec: EnvSpec, code: UserCode, feeds: list[Feed], models: Sender[Any]
) -> tuple[Receiver[Notice], ...]:
    """Add workers and parameter servers in place of learners; returns the ends for their notices."""
    assert experiment.serving is not None
    servers, workers, notices = range(experiment.serving.servers), range(len(feeds)), []
    pushes = {(w, s): graph.stream(f"gradients-{w}-{s}", capacity=2, views=True) for w in workers for s in servers}
    for worker, feed in enumerate(feeds):
        told, heard = graph.stream(f"notices-worker-{worker}", capacity=16, aside=True)
        notices.append(heard)
        handles = WorkerHandles(
            batches=feed.batches,
            priorities=feed.priorities,
            gradients=tuple(pushes[worker, server][0] for server in servers),
            slices=tuple(graph.subscriber(f"slice-{server}", views=True) for server in servers),
            weights=graph.publisher("weights") if worker == 0 else None,
            models=models if worker == 0 else None,
            events=told,
            score=graph.subscriber("score"),
            env_steps=graph.counter("env_steps"),
            updates=graph.counter("updates"),
            keep=graph.keep(f"worker-{worker}"),
            keyframes=_keyframes_shown(graph, experiment) if worker == 0 else None,
        )
        graph.add(GradientWorker, serving_setup(experiment, spec, code, worker), handles)
    for server in servers:
        told, heard = graph.stream(f"notices-server-{server}", capacity=16, aside=True)
        notices.append(heard)
        serving = ServerHandles(
            gradients=tuple(pushes[worker, server][1] for worker in workers),
            slices=graph.publisher(f"slice-{server}"),
            events=told,
            score=graph.subscriber("score"),
            keep=graph.keep(f"server-{server}"),
        )
        graph.add(ParameterServer, serving_setup(experiment, spec, code, server), serving)
    return tuple(notices)


def absent(experiment: Experiment, actors: Collection[int], learners: int) -> list[str]:
    """Return the names of the roles that are drawn but not there, when these actors and so many learner ranks are."""
    away = [f"{Actor.kind}-{index}" for index in range(experiment.seats) if index not in actors]
    return away + [f"{Learner.kind}-{rank}" for rank in range(learners, experiment.rank_seats)]


def place(
    program: Program,
    experiment: Experiment,
    in_flight: float = 0.0,
    away: Collection[str] | None = None,
    shards: int = 0,
) -> Placement:
    """Bring a program to life where the experiment says; so many bytes may be on their way between machines.

    `away` names the roles that are not begun, `shards` is in how many processes the parts of the replay are; by default
    these are the numbers that the experiment begins with.
    """
    if away is None:
        away = absent(experiment, range(experiment.all_actors), experiment.ranks)
    threads = {Learner.kind: experiment.threads, GradientWorker.kind: experiment.threads}
    if experiment.in_turns:  # only one role computes at a time; sums depend on the number of threads
        threads = {node.kind: experiment.threads for node in program.graph.nodes}
        torch.set_num_threads(experiment.threads)
    if experiment.placement != "ray":
        tell_crowd(experiment, usable_cores())
    if experiment.placement == "inline":
        from qfleet.runtime.inline import InlinePlacement

        return InlinePlacement(program.graph, strict=experiment.strict)
    revival = Revival(
        groups=(Learner.kind, Fused.kind) if outlived(experiment) else (Learner.kind,),
        dwindling=(Learner.kind,) if experiment.parallel.after_death == "fewer" else (),
        brief=(Actor.kind, Evaluator.kind),
        restarts=experiment.survival.restarts,
        stall=experiment.survival.stall_s,
        lockstep=experiment.lockstep,
    )
    behind = (Actor.kind,)  # they take what cores there are; all others wait for each other
    shared = {ReplayShard.kind: shards or experiment.replay.shards}
    spawned = _spawned(experiment)
    if experiment.placement == "processes":
        from qfleet.runtime.processes import ProcessPlacement

        return ProcessPlacement(
            program.graph, spawn=spawned, threads=threads, background=behind, away=away, shared=shared, **revival
        )
    from qfleet.runtime.ray import RayPlacement

    return RayPlacement(
        program.graph,
        address=experiment.address,
        spawn=spawned,
        threads=threads,
        background=behind,
        anywhere=() if experiment.lockstep else (Actor.kind,),
        rehearsal=program.rehearsal,
        in_flight=in_flight,
        away=away,
        shared=shared,
        expendable=(Actor.kind,) if experiment.scalable else (),
        on_gpus=[node.name for node in program.graph.nodes if _on_gpu(node)],
        needs=experiment.actor_resources,
        across=(Learner.kind,) if experiment.parallel.across_nodes else (),
        wanted=experiment.seats if experiment.elastic.automatic == "on" else experiment.actors,
        tell_cpus=partial(tell_crowd, experiment),
        **revival,
    )


def _on_gpu(node: Node) -> bool:
    """Return whether a role computes on a CUDA device."""
    setup = node.config.learner if node.kind == GradientWorker.kind else node.config
    return bool(getattr(setup, "device", "cpu") == "cuda")


def _spawned(experiment: Experiment) -> tuple[str, ...]:
    """Return the kinds of roles that use CUDA, which a forked process cannot."""
    if not torch.cuda.is_available():
        return SPAWNED
    devices: dict[str, str] = dict.fromkeys((Learner.kind, Fused.kind, GradientWorker.kind), experiment.device)
    devices[Evaluator.kind] = (
        experiment.device if experiment.evaluation.device == "auto" else experiment.evaluation.device
    )
    if isinstance(experiment.inference, ServedInference):
        devices[InferenceServer.kind] = experiment.inference.device
    return (*SPAWNED, *(kind for kind, device in devices.items() if device != "cpu"))
