"""What keeps an arrangement of roles from being larger: cores, memory, the run's budget and its replay."""

from __future__ import annotations

from qfleet.control.measurements import LearnerCost, Measurements, at
from qfleet.control.prediction import Arrangement, replaying
from qfleet.control.resources import Resources
from qfleet.experiment import Experiment
from qfleet.replay.memory import ASSUMED_COMPRESSION

PROCESS_BYTES = 150 * 2**20
"""Memory of one role's process that it shares with no other."""
ENVIRONMENT_BYTES = 10 * 2**20
"""Memory of one environment's own process: 5 MiB for CartPole and 7 for LunarLander, of 32 that share what they import,
and room for larger ones."""
OTHERS = 3
"""Processes besides the actors: replay (one shard), learner, evaluator."""
PER_CORE = 4
"""Processes for each core, at most, where actors sleep most of the time."""
ENVIRONMENTS_PER_CORE = 16
"""Environments in processes of their own for each core, at most, where they do not sleep."""
STEPS_OF_EACH = 1000
"""Every environment plays at least so many steps of the budget: more of them would only see beginnings."""


def within(experiment: Experiment, way: Arrangement) -> bool:
    """Return whether the environments all get their share, and what is on its way stays small beside what is stored."""
    total, own = way.actors * way.envs, experiment.actor
    if total > max(own.envs, experiment.env_steps // STEPS_OF_EACH):
        return False
    if not replaying(experiment):
        return True
    memory = getattr(experiment.agent, "memory", None)
    needed = 16 if memory is None else 2 * (memory.burn_in + memory.length + 1)
    on_its_way = total * way.unroll <= max(total, experiment.learner.learning_starts // 4)
    return on_its_way and needed * total <= experiment.replay.capacity


def environment_processes(experiment: Experiment, envs: int) -> int:
    """Return how many processes so many environments have of their own."""
    return envs if getattr(experiment.env, "vectorisation", "") == "async" else 0


def evaluator_processes(experiment: Experiment) -> int:
    """Return how many processes the evaluator's environments have of their own."""
    return environment_processes(experiment, min(experiment.evaluation.envs, experiment.evaluation.episodes))


def most_actors(experiment: Experiment, measured: Measurements, resources: Resources, envs: int) -> int:
    """Return how many actors with so many environments the cores and the memory allow.

    That is one for each core that they keep busy, and always one.
    """
    others = OTHERS + experiment.replay.shards - 1
    taken = others * PROCESS_BYTES + evaluator_processes(experiment) * ENVIRONMENT_BYTES
    spare = resources.memory - replay_bytes(experiment, measured) - taken
    own, cores = experiment.actor.envs, int(resources.cores)
    work = min(1.0, at(measured.actor_cpu, own) / at(measured.actor_tick, own))
    sleepers = min(int(cores / max(work, 1e-3)), PER_CORE * cores - others)
    most, beside = max(cores, sleepers), environment_processes(experiment, envs)
    if beside and sleepers <= cores:  # those that sleep take memory alone
        most = min(most, ENVIRONMENTS_PER_CORE * cores // beside)
    return max(1, min(most, spare // (PROCESS_BYTES + beside * ENVIRONMENT_BYTES)))


def free_gpus(experiment: Experiment, resources: Resources, learner: LearnerCost) -> int:
    """Return how many GPUs no learner rank has."""
    return max(0, len(resources.gpus) - ranks_on_gpus(experiment, learner))


def ranks_on_gpus(experiment: Experiment, learner: LearnerCost) -> int:
    """Return how many learner ranks take GPUs, which they do in turn."""
    return experiment.learners * experiment.parallel.split if learner.device == "cuda" else 0


def replay_bytes(experiment: Experiment, measured: Measurements) -> int:
    """Return the memory that the full replay takes; what is mapped lies on a disk."""
    kind = experiment.replay.storage.kind
    if not replaying(experiment) or kind == "mapped":
        return 0
    return experiment.replay.capacity * measured.row_bytes // (ASSUMED_COMPRESSION if kind == "lz4" else 1)
