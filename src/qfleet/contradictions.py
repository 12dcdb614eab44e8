"""The rules between an experiment's sections: what would be wrong with a run, and what keeps it from being fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.algo.recurrent import MemoryConfig
from qfleet.roles.inference_server import ServedInference

if TYPE_CHECKING:
    from qfleet.experiment import Experiment

Rules = list[tuple[bool, str]]
"""What could be wrong, as whether it is and what is said then."""


def contradictions(experiment: Experiment) -> Rules:
    """Return what could be wrong between sections, each with whether it is; of several the first is told."""
    topics = (_plans, _agent, _learning, _learners, _shards, _placement, _lockstep, _acting, _samples, _topology)
    return [rule for topic in topics for rule in topic(experiment)]


def why_not_fused(experiment: Experiment) -> str:
    """Return what keeps a run from being one loop on one device, or several that learn as one; empty if nothing."""
    elastic, parallel = experiment.elastic, experiment.parallel
    inference, replay = experiment.inference, experiment.replay
    placement, actors, several = experiment.placement, experiment.actors, experiment.learners
    kind, envs, groups = experiment.agent.kind, experiment.actor.envs, experiment.actor.groups
    batch = experiment.learner.batch_size
    reasons = {
        f"needs a tensor-native environment (env.kind 'tensor', as in the preset 'cartpole' or with"
        f" --env.kind tensor --env.game maze), not env.kind '{experiment.env.kind}'": experiment.env.kind != "tensor",
        f"has no placement '{placement}' for one learner: it is one loop in this process":
            several == 1 and placement != "inline",
        f"needs placement 'processes' or 'inline' for learners {several}, not 'ray'": placement == "ray",
        f"has one loop for each learner that also acts: actors {actors} is for a pipeline": actors > 1,
        "has no parameter servers": experiment.serving is not None,
        "has a fixed number of loops: elastic.max_actors, max_learners and max_shards are for a pipeline":
            max(elastic.max_actors - actors, elastic.max_learners - several) > 0 or elastic.max_shards > 1,
        "has whole networks, which parallel.tensor, parallel.pipeline and parallel.update.kind 'sharded' divide":
            parallel.in_pieces,
        "keeps all of its loops: parallel.after_death 'fewer' is for a pipeline": parallel.after_death == "fewer",
        f"has equal shares: actor.envs {envs} is not a multiple of learners {several}": envs % several != 0,
        f"has equal shares: learner.batch_size {batch} is not a multiple of learners {several}":
            batch % several != 0 and kind == "replay",
        f"has one replay, not replay.shards {replay.shards}": replay.shards > 1,
        "has no table: use agent.kind 'replay' or 'rollout'": kind == "tabular",
        "has no replay of sequences, which agent.memory learns from": _memory(experiment) is not None,
        "cannot normalise rewards; set env.reward_scale": experiment.normalise_rewards,
        "computes in float64 in places, which device 'mps' does not have": experiment.device == "mps",
        f"keeps its replay on the device, not in replay.storage.kind '{replay.storage.kind}'":
            replay.storage.kind != "ram",
        "sends no messages that strict could check": experiment.strict,
        "acts on its own device: inference.kind 'served' is for a pipeline": inference.kind == "served",
        f"acts in accel.precision: inference.precision '{inference.precision}' is for a pipeline":
            inference.precision != "fp32",
        "gives new items the maximum: replay.sampler.initial 'actor' is for a pipeline": experiment.values_by_actors,
        f"acts for all environments at once, not in actor.groups {groups}": groups > 1,
    }  # fmt: skip
    return next((reason for reason, true in reasons.items() if true), "")


def _plans(experiment: Experiment) -> Rules:
    """How many roles there may be, and how learners share an update."""
    learners, batch, shards = experiment.learners, experiment.learner.batch_size, experiment.replay.shards
    actors, all_actors = experiment.actors, experiment.all_actors
    scalable, regroupable = experiment.scalable, experiment.regroupable
    transitions = _replaying(experiment) and not _memory(experiment)
    return [
        *experiment.elastic.contradictions(actors, all_actors, learners, shards, batch, scalable, regroupable),
        *experiment.parallel.contradictions(learners, batch, transitions),
    ]


def _agent(experiment: Experiment) -> Rules:
    """What each kind of agent needs."""
    agent, network = experiment.agent.kind, experiment.network.kind
    replaying = _replaying(experiment)
    return [
        (agent == "tabular" and network != "tabular",
         f"agent.kind 'tabular' needs network.kind 'tabular', not '{network}'"),
        (agent != "tabular" and network == "tabular",
         f"network.kind 'tabular' needs agent.kind 'tabular', not '{agent}'"),
        (experiment.replay.sampler.kind == "prioritised" and not replaying,
         f"replay.sampler.kind 'prioritised' needs agent.kind 'replay'; '{agent}' has no replay"),
        (experiment.normalise_rewards and not replaying,
         f"normalise_rewards needs agent.kind 'replay', not '{agent}'"),
        (experiment.learner.evaluated == "target" and not replaying,
         f"learner.evaluated 'target' needs agent.kind 'replay': '{agent}' has no target network"),
    ]  # fmt: skip


def _learning(experiment: Experiment) -> Rules:
    """What is drawn from a replay, and when: something must be learned."""
    agent, learner = experiment.agent, experiment.learner
    capacity, env_steps = experiment.replay.capacity, experiment.env_steps
    batch, drawn = learner.batch_size, learner.updates_per_draw
    starts, period = learner.learning_starts, learner.train_period
    times = "" if drawn == 1 else f" times learner.updates_per_draw {drawn}"
    replaying = _replaying(experiment)
    noisy = isinstance(agent, ReplayAgent) and agent.noisy
    return [
        (replaying and batch > capacity,
         f"learner.batch_size {batch} exceeds replay.capacity {capacity}"),
        (drawn > 1 and (not replaying or _memory(experiment) is not None),
         f"learner.updates_per_draw {drawn} is for agents that learn from transitions of a replay: set it to 1"),
        (drawn > 1 and experiment.serving is not None,
         f"learner.updates_per_draw {drawn} is for learners, not for parallel.update.kind 'server': set it to 1"),
        (drawn > 1 and batch % experiment.learners != 0,
         f"learner.updates_per_draw {drawn} needs a learner.batch_size that is a multiple of learners"
         f" {experiment.learners}, not {batch}"),
        (drawn > 1 and experiment.parallel.after_death == "fewer",
         f"learner.updates_per_draw {drawn} needs equal parts, which parallel.after_death 'fewer' may not leave:"
         " set one of them to its default"),
        (replaying and starts > capacity,
         f"learner.learning_starts {starts} exceeds replay.capacity {capacity}: learning would never start"),
        (replaying and starts >= env_steps,
         f"learner.learning_starts {starts} is not below env_steps {env_steps}: nothing would be learned;"
         " lower the one or raise the other"),
        (replaying and 0 < env_steps - starts < drawn * period,
         f"learner.train_period {period}{times} exceeds the {env_steps - starts} steps that env_steps leaves after"
         " learner.learning_starts: nothing would be learned"),
        (replaying and experiment.exploration.kind == "none" and not noisy,
         "exploration.kind 'none' needs agent.noisy True: nothing else would make the agent explore"),
    ]  # fmt: skip


def _learners(experiment: Experiment) -> Rules:
    """What several learners cannot do."""
    learners, batch, agent = experiment.learners, experiment.learner.batch_size, experiment.agent.kind
    replaying = _replaying(experiment)
    return [
        (learners > 1 and not replaying and not experiment.fused,
         f"learners {learners} of agent.kind '{agent}' need the fused topology, which"
         f" {experiment.why_not_fused or 'topology pipeline rules out'}"),
        (learners > 1 and experiment.inputs_normalized,
         "network.input.normalize needs one learner: ranks would see other statistics; set"
         " --network.input.normalize False, and --network.input.scale where inputs are large"),
        (experiment.ranks > 1 and experiment.optim.schedule.kind == "plateau",
         "optim.schedule.kind 'plateau' needs one learner: ranks would hear of a score at different updates"),
        (replaying and learners > batch,
         f"learners {learners} exceeds learner.batch_size {batch}: some would have no work"),
    ]  # fmt: skip


def _shards(experiment: Experiment) -> Rules:
    """What several replay shards cannot do."""
    shards, parts, actors = experiment.replay.shards, experiment.replay_parts, experiment.actors
    return [
        (shards > 1 and not _replaying(experiment),
         f"replay.shards {shards} needs agent.kind 'replay'; '{experiment.agent.kind}' has no replay"),
        (shards > actors,
         f"replay.shards {shards} exceeds actors {actors}: some would have no work"),
        (parts > 1 and experiment.normalise_rewards,
         f"normalise_rewards needs one replay shard, not {parts}"
         f" ({'elastic.max_shards' if parts > shards else 'replay.shards'}): shards would see other"
         " statistics; set --normalise_rewards False (presets of gym: set it to True), and --env.reward_scale where"
         " rewards are large or small"),
    ]  # fmt: skip


def _placement(experiment: Experiment) -> Rules:
    """What belongs to one placement only."""
    placement, missing = experiment.placement, _missing_across_nodes(experiment)
    return [
        (experiment.strict and placement != "inline",
         f"strict is for placement 'inline': '{placement}' sends every message through the serialiser anyway"),
        (experiment.address is not None and placement != "ray",
         f"address needs placement 'ray', not '{placement}'"),
        (bool(experiment.actor_resources) and placement != "ray",
         f"actor_resources needs placement 'ray', not '{placement}'"),
        (experiment.parallel.across_nodes and bool(missing),
         f"parallel.across_nodes needs {' and '.join(missing)}"),
    ]  # fmt: skip


def _lockstep(experiment: Experiment) -> Rules:
    """What cannot step one at a time in processes of its own."""
    ordered = experiment.lockstep and experiment.placement != "inline"
    ranks, groups = experiment.ranks, experiment.actor.groups
    return [
        (ordered and ranks > 1,
         f"lockstep needs one learner, not {ranks}: the ranks of a group step together"),
        (ordered and _servers(experiment) > 0,
         "lockstep needs inference.kind 'local': a server's batches depend on the time"),
        (ordered and groups > 1,
         f"lockstep needs actor.groups 1, not {groups}: environments must step in a fixed order"),
    ]  # fmt: skip


def _acting(experiment: Experiment) -> Rules:
    """Who acts, in what groups, and who computes the values for it."""
    agent, envs, groups = experiment.agent.kind, experiment.actor.envs, experiment.actor.groups
    actors, spare, servers = experiment.actors, experiment.spare_actors, _servers(experiment)
    precision, replaying = experiment.inference.precision, _replaying(experiment)
    return [
        (servers > 0 and not replaying,
         f"inference.kind 'served' needs agent.kind 'replay', not '{agent}'"),
        (groups > 1 and not replaying,
         f"actor.groups {groups} needs agent.kind 'replay', not '{agent}'"),
        (groups > envs,
         f"actor.groups {groups} exceeds actor.envs {envs}: some would have no environments"),
        (precision != "fp32" and _memory(experiment) is not None,
         f"inference.precision '{precision}' is for networks without memory, not with agent.memory"),
        (spare > 0 and not experiment.balanced,
         f"spare_actors {spare} needs a balancer to wake them: balance 'on', agent.kind 'replay', and"
         " placement 'processes' or 'ray' without lockstep"),
        (servers > actors,
         f"inference.servers {servers} exceeds actors {actors}: some would have no work"),
    ]  # fmt: skip


def _samples(experiment: Experiment) -> Rules:
    """What the environments must yield to learn from: parts of rollouts, windows, sequences."""
    agent, memory = experiment.agent, _memory(experiment)
    envs, env_steps, capacity = experiment.actor.envs, experiment.env_steps, experiment.replay.capacity
    minibatches = agent.minibatches if isinstance(agent, RolloutAgent) else 0
    rollout = envs // experiment.learners * (agent.rollout_length if isinstance(agent, RolloutAgent) else 1)
    n_step = agent.n_step if isinstance(agent, ReplayAgent) else 1
    # Twice a sequence for each environment, since whole segments of rows are dropped.
    sequences = 2 * (memory.burn_in + memory.length + 1) * experiment.seats * envs if memory else 0
    return [
        (rollout < minibatches,
         f"agent.minibatches {minibatches} exceeds the {rollout} samples of a"
         " learner's rollout (actor.envs times agent.rollout_length): some would be empty"),
        (_replaying(experiment) and experiment.fused and env_steps <= envs * (n_step + 2),
         f"env_steps {env_steps} ends before the environments (actor.envs {envs}) have made their"
         f" first windows of agent.n_step {n_step}: nothing would be learned"),
        (capacity < sequences,
         f"replay.capacity {capacity} is too small for the sequences of agent.memory: its length and"
         f" burn_in need {sequences} rows or more for {experiment.seats * envs} environments"),
    ]  # fmt: skip


def _topology(experiment: Experiment) -> Rules:
    """Whether a fused loop is possible where one is asked for."""
    reason = experiment.why_not_fused
    return [(experiment.topology == "fused" and bool(reason), f"topology 'fused' {reason}")]


def _missing_across_nodes(experiment: Experiment) -> list[str]:
    """Return what keeps learner ranks from being on several nodes, as what would let them."""
    parallel, kind = experiment.parallel, experiment.parallel.update.kind
    missing = {
        f"--placement ray (not '{experiment.placement}')": experiment.placement != "ray",
        "--learners 2 or more, or --elastic.max_learners 2 or more": experiment.rank_seats == 1,
        "--topology pipeline (not 'fused')": experiment.topology == "fused",
        f"whole networks (--parallel.tensor 1, not {parallel.tensor})": parallel.tensor > 1,
        f"whole networks (--parallel.pipeline 1, not {parallel.pipeline})": parallel.pipeline > 1,
        f"ranks with whole networks (parallel.update.kind 'allreduce' or 'local', not '{kind}')":
            kind in ("sharded", "server"),
    }  # fmt: skip
    return [what for what, lacking in missing.items() if lacking]


def _replaying(experiment: Experiment) -> bool:
    return isinstance(experiment.agent, ReplayAgent)


def _memory(experiment: Experiment) -> MemoryConfig | None:
    """Return the memory of a recurrent agent."""
    return experiment.agent.memory if isinstance(experiment.agent, ReplayAgent) else None


def _servers(experiment: Experiment) -> int:
    """Return how many inference servers there are."""
    return experiment.inference.servers if isinstance(experiment.inference, ServedInference) else 0
