"""THE MAP: which roles a run has, which edges join them, and what each is built from.

Follow one transition: Actor -> (experience) -> ReplayShard -> (batches) -> Learner -> (weights) -> Actor.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.schedules import Schedule
from qfleet.core.errors import ConfigError
from qfleet.core.protocols import Counter, Placement, Receiver, Sender
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Evaluated, Notice, Priorities
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment
from qfleet.roles.actor import Actor, ActorHandles, ActorSetup
from qfleet.roles.evaluator import Evaluator, EvaluatorHandles, EvaluatorSetup
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


def build_program(experiment: Experiment, spec: EnvSpec, code: UserCode, directory: Path) -> Program:
    """Draw the graph of a run. `directory` is the run's own; nothing is started or written here."""
    graph = Graph()
    prefetch = PREFETCH[experiment.placement]
    actors, ranks = range(experiment.actors), range(experiment.learners)
    experience = [graph.stream(f"experience-{i}", capacity=prefetch) for i in actors]
    models_in, models_out = graph.stream("models", capacity=1)
    evaluated_in, evaluated_out = graph.stream("evaluated", capacity=64)
    notices_in, notices_out = graph.stream("notices", capacity=64)

    for i in actors:
        handles = ActorHandles(
            experience=experience[i][0], weights=graph.subscriber("weights"), env_steps=graph.counter("env_steps")
        )
        graph.add(Actor, actor_setup(experiment, spec, code, i), handles)

    incoming = [receiver for _, receiver in experience]
    batches = [tuple(incoming)]
    priorities: list[Sender[Priorities] | None] = [None for _ in ranks]
    if isinstance(experiment.agent, ReplayAgent):
        drawn = [graph.stream(f"batches-{r}", capacity=prefetch) for r in ranks]
        written = (
            [graph.stream(f"priorities-{r}", capacity=prefetch + 2) for r in ranks] if _prioritised(experiment) else []
        )
        batches = [(receiver,) for _, receiver in drawn]
        priorities = [*(sender for sender, _ in written)] or priorities
        shard = ShardHandles(
            experience=tuple(incoming),
            priorities=tuple(receiver for _, receiver in written),
            batches=tuple(sender for sender, _ in drawn),
            env_steps=graph.counter("env_steps"),
            inserts=graph.counter("inserts"),
            samples=graph.counter("samples"),
        )
        graph.add(ReplayShard, shard_setup(experiment, spec, directory), shard)

    rendezvous = f"file://{directory.resolve()}/.rendezvous-{uuid.uuid4().hex}"
    for r in ranks:
        first = r == 0  # one rank speaks for the group
        learner = LearnerHandles(
            batches=batches[r],
            priorities=priorities[r],
            weights=graph.publisher("weights") if first else None,
            models=models_in if first else None,
            events=notices_in if first else None,
            score=graph.subscriber("score"),
            env_steps=graph.counter("env_steps"),
            updates=graph.counter("updates"),
        )
        group = GroupConfig(r, experiment.learners, rendezvous) if experiment.learners > 1 else None
        graph.add(Learner, learner_setup(experiment, spec, code, group), learner)

    evaluator = EvaluatorHandles(models=models_out, events=evaluated_in, score=graph.publisher("score"))
    graph.add(Evaluator, evaluator_setup(experiment, spec, code), evaluator)

    monitor = MonitorHandles(
        events=(evaluated_out, notices_out),
        env_steps=graph.counter("env_steps"),
        updates=graph.counter("updates"),
        samples=graph.counter("samples"),
    )
    return Program(graph, monitor)


def place(program: Program, experiment: Experiment) -> Placement:
    """Bring a program to life where the experiment says."""
    if experiment.placement == "inline":
        from qfleet.runtime.inline import InlinePlacement

        torch.set_num_threads(experiment.threads)
        return InlinePlacement(program.graph, strict=experiment.strict)
    threads = {Learner.kind: experiment.threads}
    if experiment.placement == "processes":
        from qfleet.runtime.processes import ProcessPlacement

        return ProcessPlacement(program.graph, spawn=_spawned(experiment), threads=threads)
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
    )


def shard_setup(experiment: Experiment, spec: EnvSpec, directory: Path) -> ShardSetup:
    """Return what the replay shard is built from."""
    agent, sampler = experiment.agent, experiment.replay.sampler
    assert isinstance(agent, ReplayAgent)
    beta = Schedule(start=0.0)
    if sampler.kind == "prioritised":
        beta = Schedule(start=sampler.beta_start, end=sampler.beta_end, steps=experiment.env_steps)
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
        beta=beta,
        seed=experiment.seed,
        index=0,
        directory=directory / "replay",
    )


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
        device=learner_device(experiment, spec),
        group=group,
        warm_start=Path(experiment.warm_start) if experiment.warm_start else None,
        warm_start_part=experiment.warm_start_part,
        code=code,
    )


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
    agent, envs = experiment.agent, experiment.actors * experiment.actor.envs
    if isinstance(agent, ReplayAgent):
        learning = experiment.env_steps - experiment.learner.learning_starts
        return max(1, int(learning / experiment.learner.train_period))
    if isinstance(agent, RolloutAgent):
        return max(1, experiment.env_steps // (agent.rollout_length * envs) * agent.epochs * agent.minibatches)
    return max(1, experiment.env_steps // envs)


def learner_device(experiment: Experiment, spec: EnvSpec) -> str:
    """Return the torch device of the learner: a GPU pays for images, not for small vectors."""
    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch sees no CUDA device here; use device 'cpu' or 'auto'")
    if experiment.device != "auto":
        return experiment.device
    images = any(len(leaf.shape) == 3 for leaf in spec.observations.values())
    return "cuda" if images and torch.cuda.is_available() else "cpu"


def _spawned(experiment: Experiment) -> tuple[str, ...]:
    """Return the kinds of roles that use CUDA, which a forked process cannot."""
    return (*SPAWNED, Learner.kind) if experiment.device != "cpu" and torch.cuda.is_available() else SPAWNED


def _prioritised(experiment: Experiment) -> bool:
    return experiment.replay.sampler.kind == "prioritised"
