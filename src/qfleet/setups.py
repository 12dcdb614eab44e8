"""What each role is built from, read off the experiment."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from pathlib import Path

import torch

from qfleet.accel.hardware import why_no_device
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.schedules import Schedule
from qfleet.algo.sequences import LAST_ACTION, STATE
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec, LeafSpec
from qfleet.core.usercode import UserCode
from qfleet.envs import TensorConfig
from qfleet.experiment import Experiment
from qfleet.parallel.devices import LAST, gpu_memory, server_turn
from qfleet.replay import SequenceWindow
from qfleet.replay.storage import Lz4Config, RamConfig
from qfleet.roles.actor import ActorSetup
from qfleet.roles.evaluator import EvaluatorSetup
from qfleet.roles.fused import FusedSetup
from qfleet.roles.fused.replay_loop import learning_begins
from qfleet.roles.inference_server import AdaptiveInference, InferenceSetup, ServedInference
from qfleet.roles.learner_setup import GroupConfig, LearnerSetup
from qfleet.roles.replay_shard import ShardSetup
from qfleet.roles.serving_setup import ServingSetup

MIRROR_LAG = 16
"""Batches, with what is stored between two of them, after which a row may be replaced at the earliest."""
EVALUATING_S = 1.0
"""A step of an evaluation beside others begins no further tick after this: where ticks take long, a watchdog sees that
it goes on, and a pause need not wait."""
LOOK_AGAIN_S = 0.01
"""How long one of several replay shards waits before it looks what the others have made due."""

SAVED_COMPRESSION = 4
"""How many times smaller compressed rows are, at the least but for a few games; less than is assumed for memory, which
must only be large enough."""


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
        actors=experiment.seats,
        begun=experiment.all_actors,
        env_steps=experiment.env_steps,
        code=code,
        inference=experiment.inference,
        accel=experiment.accel,
        valued=experiment.values_by_actors,
    )


def check_inference(experiment: Experiment) -> None:
    """Refuse inference that shall move in a run where nobody would move it."""
    if isinstance(experiment.inference, AdaptiveInference) and not experiment.balanced:
        raise ConfigError(
            "inference.kind 'adaptive' needs a balancer to move it: balance 'on', agent.kind 'replay', and placement"
            " 'processes' or 'ray' without lockstep; else use inference.kind 'local' or 'served'"
        )


def server_device(experiment: Experiment, spec: EnvSpec) -> str:
    """Return the torch device of the inference servers, or that which they would have."""
    inference = experiment.inference
    wanted = inference.device if isinstance(inference, ServedInference) else "auto"
    return _device(wanted, "inference.device", spec)


def inference_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, index: int) -> InferenceSetup:
    """Return what inference server `index` is built from."""
    inference = experiment.inference
    assert isinstance(experiment.agent, ReplayAgent)
    assert isinstance(inference, ServedInference)
    actors = len(range(index, experiment.seats, inference.servers))
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
        device=server_device(experiment, spec),
        code=code,
        turn=_turn(experiment, server_turn(index, _learners_on_gpus(experiment, spec))),
    )


def shard_setup(experiment: Experiment, spec: EnvSpec, directory: Path, index: int = 0) -> ShardSetup:
    """Return what replay shard `index` is built from."""
    agent, parts = experiment.agent, experiment.replay_parts
    assert isinstance(agent, ReplayAgent)
    actors = len(range(index, experiment.seats, parts))
    return ShardSetup(
        replay=experiment.replay,
        spec=spec,
        streams=actors * experiment.actor.envs,
        part=Fraction(actors, experiment.seats),
        n_step=agent.n_step,
        gamma=agent.gamma,
        normalise_rewards=experiment.normalise_rewards,
        batch_size=experiment.learner.batch_size,
        updates_per_draw=experiment.learner.updates_per_draw,
        split=experiment.split,
        dealt=experiment.serving is not None and experiment.serving.mode != "sync",
        train_period=experiment.learner.train_period,
        learning_starts=experiment.learner.learning_starts,
        beta=_beta(experiment),
        seed=experiment.seed,
        index=index,
        directory=directory / ("replay" if parts == 1 else f"replay-{index}"),
        look_again_s=LOOK_AGAIN_S if parts > 1 and not experiment.in_turns else None,
        sequence=_sequence(agent),
        judged_by=agent if agent.memory is not None and experiment.values_by_actors else None,
        extras=_extras(agent),
        mirrored=mirrored(experiment, spec),
    )


def saved_row_bytes(experiment: Experiment, spec: EnvSpec) -> float:
    """Return about how many bytes of the replay a checkpoint holds for each environment step; 0 without a shard."""
    if experiment.fused or not isinstance(experiment.agent, ReplayAgent):
        return 0.0
    shard = shard_setup(experiment, spec, Path())
    plain = shard.row_bytes(RamConfig())  # mapped rows are saved, too
    return plain / SAVED_COMPRESSION if isinstance(experiment.replay.storage, Lz4Config) else plain


def mirrored(experiment: Experiment, spec: EnvSpec) -> bool:
    """Return whether the learner has a copy of the replay's observations in its device's memory."""
    if experiment.replay.mirror == "off" or not isinstance(experiment.agent, ReplayAgent):
        return False
    device = learner_device(experiment, spec)
    obstacle = _why_not_mirrored(experiment, spec, device)
    if experiment.replay.mirror == "on" and obstacle:
        raise ConfigError(f"replay.mirror 'on': {obstacle}; or use replay.mirror 'off'")
    return not obstacle and (experiment.replay.mirror == "on" or device == "cuda")


def _why_not_mirrored(experiment: Experiment, spec: EnvSpec, device: str) -> str:
    replay = experiment.replay
    if experiment.placement != "processes":
        return "the learner sees the shard's memory in placement 'processes' only"
    if isinstance(experiment.agent, ReplayAgent) and experiment.agent.memory is not None:
        return "agents with memory learn from sequences, which are not gathered on the device"
    if experiment.replay_parts > 1 or experiment.rank_seats > 1 or experiment.serving is not None:
        return "it is for one shard and one learner: set replay.shards and learners to 1, and leave elastic.max_* at 0"
    if replay.storage.kind != "ram":
        return f"the rows are stored as '{replay.storage.kind}': set replay.storage.kind to 'ram'"
    message = experiment.actor.envs * experiment.actor.unroll * experiment.actor.groups
    drawn = experiment.learner.updates_per_draw * experiment.learner.train_period
    under_way = MIRROR_LAG * (drawn + experiment.seats * message)
    if replay.capacity < under_way:
        return f"rows could be replaced before the learner has copied them: raise replay.capacity to {under_way:,.0f}"
    needed = replay.capacity * sum(leaf.frame_bytes for leaf in spec.observations.values())
    room = gpu_memory(0) // 2 if device == "cuda" else needed  # of the one learner, which is the first rank
    if needed > room:
        return f"{needed / 2**30:.1f} GiB of observations are more than half of the GPU's memory: lower replay.capacity"
    return ""


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
    parallel, whole = experiment.parallel, None
    if experiment.placement == "inline" and parallel.in_pieces:
        parallel, whole = parallel.assembled, parallel
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
        parallel=parallel,
        whole=whole,
        ahead=not experiment.in_turns,
        shards=experiment.replay_parts if isinstance(experiment.agent, ReplayAgent) else 1,
        max_decay=_max_decay(experiment),
    )


def serving_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, index: int) -> ServingSetup:
    """Return what parameter server `index`, or gradient worker `index`, is built from."""
    assert experiment.serving is not None
    learner = learner_setup(experiment, spec, code, None)
    return ServingSetup(experiment.serving, learner, index, experiment.learners, experiment.parallel.compression)


def fused_setup(experiment: Experiment, spec: EnvSpec, code: UserCode, group: GroupConfig | None = None) -> FusedSetup:
    """Return what a fused loop is built from; `group` is its place among several."""
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
        group=group,
        parallel=experiment.parallel,
    )


def _max_decay(experiment: Experiment) -> float:
    """Return the factor on the maximum priority at each write-back."""
    sampler = experiment.replay.sampler
    return sampler.max_decay if sampler.kind == "prioritised" else 1.0


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
        device=_evaluation_device(experiment, spec),
        turn=_turn(experiment, LAST),
        longest_step_s=None if experiment.in_turns else EVALUATING_S,
    )


def test_setup(experiment: Experiment, spec: EnvSpec, code: UserCode) -> EvaluatorSetup:
    """Return what the evaluator of a final test is built from: unseen seeds, on the CPU."""
    config = experiment.evaluation.replace(episodes=experiment.evaluation.test_episodes)
    alone = evaluator_setup(experiment, spec, code)  # nobody takes turns with it
    return dataclasses.replace(alone, evaluation=config, device="cpu", split="test", longest_step_s=EVALUATING_S)


def _evaluation_device(experiment: Experiment, spec: EnvSpec) -> str:
    if experiment.evaluation.device != "auto":
        return _device(experiment.evaluation.device, "evaluation.device", spec)
    return "cuda" if learner_device(experiment, spec) == "cuda" else "cpu"


def _turn(experiment: Experiment, turn: int) -> int | None:
    """Return whose turn it is when GPUs are dealt out; None inline, where all roles have the process's."""
    return None if experiment.placement == "inline" else turn


def _learners_on_gpus(experiment: Experiment, spec: EnvSpec) -> int:
    return experiment.ranks if learner_device(experiment, spec) == "cuda" else 0


def total_updates(experiment: Experiment) -> int:
    """Return how many gradient steps the whole run makes."""
    agent = experiment.agent
    if isinstance(agent, ReplayAgent):
        begins = experiment.learner.learning_starts
        if experiment.fused:
            begins = learning_begins(experiment.learner, agent, experiment.actor.envs)
        learning = experiment.env_steps - begins
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
    if wanted != "auto":
        if wanted != "cpu" and (reason := why_no_device(wanted)):
            raise ConfigError(f"{setting} '{wanted}': {reason}; use {setting} 'cpu' or 'auto'")
        return wanted
    images = any(len(leaf.shape) == 3 for leaf in spec.observations.values())
    return "cuda" if (images or fused) and torch.cuda.is_available() else "cpu"
