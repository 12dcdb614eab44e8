"""Says before a run begins that its processes are more than the cores can serve; refuses what no memory could hold."""

from __future__ import annotations

from collections.abc import Mapping

from qfleet.algo.agent import ReplayAgent
from qfleet.control.planner_limits import (
    ENVIRONMENT_BYTES,
    ENVIRONMENTS_PER_CORE,
    PROCESS_BYTES,
    environment_processes,
    evaluator_processes,
)
from qfleet.control.resources import usable_cores
from qfleet.core.announcing import announce
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, flattened
from qfleet.replay.memory import available_memory
from qfleet.roles.inference_server import ServedInference

_CROWDED = 4
"""Processes of roles for each core from which on a person is told."""
_SWARMING = 16
"""Processes for each core from which on it matters whether memory holds them: idle ones may be many, where it does."""
_EVALUATOR = ""
"""What has no setting."""
ACTING, JUDGING = "actor.envs", "evaluation.envs"
"""Whose value says how many environments there are."""


def processes(experiment: Experiment) -> dict[str, int]:
    """Return how many processes of roles a run begins with, by the setting that says so."""
    if experiment.placement == "inline":
        return {}
    if experiment.fused:
        return {"learners": experiment.learners}
    counted = {"actors": experiment.actors, "spare_actors": experiment.spare_actors, "learners": experiment.ranks}
    if isinstance(experiment.agent, ReplayAgent):
        counted["replay.shards"] = experiment.replay.shards
    if isinstance(experiment.inference, ServedInference):
        counted["inference.servers"] = experiment.inference.servers
    if experiment.serving is not None:
        counted["parallel.update.servers"] = experiment.serving.servers
    return {**counted, _EVALUATOR: 1}


def environments(experiment: Experiment) -> dict[str, int]:
    """Return how many processes of environments it begins with, by the setting that says so."""
    acting = environment_processes(experiment, (experiment.actors + experiment.spare_actors) * experiment.actor.envs)
    return {ACTING: acting, JUDGING: evaluator_processes(experiment)}


def tell_crowd(experiment: Experiment, cores: float) -> None:
    """Announce that a run has more processes than so many cores serve well, if it has."""
    roles, envs = processes(experiment), environments(experiment)
    many = roles if sum(roles.values()) > _CROWDED * cores else {}
    many = many | {name: count for name, count in envs.items() if count > ENVIRONMENTS_PER_CORE * cores}
    if many:
        total = sum(roles.values()) + sum(envs.values())
        share = f"{total:,} processes share {cores:g} core{'' if cores == 1 else 's'}"
        lower, instead = _most(experiment, many)
        faster = f"a lower {lower} may be faster" + (f", or {instead}" if instead else "")
        announce(f"{share}: they will wait for each other; {faster}")


def require_processes_fit(experiment: Experiment) -> None:
    """Raise ConfigError for more processes than this machine holds; what a cluster holds is not known here."""
    if experiment.address is not None:
        return
    roles, envs, cores, free = processes(experiment), environments(experiment), usable_cores(), available_memory()
    total = sum(roles.values()) + sum(envs.values())
    sizes = {name: count * PROCESS_BYTES for name, count in roles.items()}
    sizes |= {name: count * ENVIRONMENT_BYTES for name, count in envs.items()}
    needed = sum(sizes.values())
    if total > _SWARMING * cores and needed > free:
        each = f"{PROCESS_BYTES / 2**20:.0f} MiB each"
        if any(envs.values()):
            each += f", and {ENVIRONMENT_BYTES / 2**20:.0f} MiB for each environment's own,"
        lower, instead = _most(experiment, sizes)
        raise ConfigError(
            f"{total:,} processes are more than this machine holds: at about {each} they take"
            f" {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; each of its {cores:g} cores"
            f" would have {total / cores:,.0f} of them. Lower {lower}" + (f", or set {instead}" if instead else "")
        )


def _most(experiment: Experiment, sizes: Mapping[str, int]) -> tuple[str, str]:
    """Return, with their values, the flags that most of a run's processes follow from, and one that has none of them.

    The last is empty for processes of roles.
    """
    values = dict(flattened(experiment.model_dump()))  # by which a learner that is split makes several

    def now(name: str) -> str:
        return f"--{name.replace('_', '-')} (now {values[name]:,})"

    name = max((name for name in sizes if name != _EVALUATOR), key=sizes.__getitem__)
    if name not in (ACTING, JUDGING):
        return now(name), ""
    lower = f"{now(name)} or {now('actors')}" if name == ACTING and experiment.actors > 1 else now(name)
    return lower, "--env.vectorisation sync (now async)"
