"""Says before a run begins that its processes are more than the cores can serve; refuses what no memory could hold."""

from __future__ import annotations

from qfleet.algo.agent import ReplayAgent
from qfleet.control.planner_limits import PROCESS_BYTES
from qfleet.control.resources import usable_cores
from qfleet.core.announcing import announce
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment, flattened
from qfleet.replay.memory import available_memory
from qfleet.roles.inference_server import ServedInference

_CROWDED = 4
"""Processes for each core from which on a person is told."""
_SWARMING = 16
"""Processes for each core from which on it matters whether memory holds them: idle ones may be many, where it does."""
_EVALUATOR = ""
"""What has no setting."""


def processes(experiment: Experiment) -> dict[str, int]:
    """Return how many processes of roles a run begins with, by the setting that says so."""
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


def tell_crowd(experiment: Experiment, cores: float) -> None:
    """Announce that a run has more processes than so many cores serve well, if it has."""
    total = sum(processes(experiment).values())
    if total > _CROWDED * cores:
        share = f"{total:,} processes share {cores:g} core{'' if cores == 1 else 's'}"
        announce(f"{share}: they will wait for each other; a lower {_most(experiment)} may be faster")


def require_processes_fit(experiment: Experiment) -> None:
    """Raise ConfigError for more processes than this machine holds; what a cluster holds is not known here."""
    if experiment.placement == "inline" or experiment.address is not None:
        return
    total, cores, free = sum(processes(experiment).values()), usable_cores(), available_memory()
    if total > _SWARMING * cores and total * PROCESS_BYTES > free:
        raise ConfigError(
            f"{total:,} processes are more than this machine holds: at about {PROCESS_BYTES / 2**20:.0f} MiB each they"
            f" take {total * PROCESS_BYTES / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free; each of"
            f" its {cores:g} cores would have {total / cores:,.0f} of them. Lower {_most(experiment)}"
        )


def _most(experiment: Experiment) -> str:
    """Return, with its value, the flag that most of a run's processes follow from."""
    counted = {name: count for name, count in processes(experiment).items() if name != _EVALUATOR}
    name = max(counted, key=counted.__getitem__)
    value = dict(flattened(experiment.model_dump()))[name]  # of which a learner that is split makes several
    return f"--{name.replace('_', '-')} (now {value:,})"
