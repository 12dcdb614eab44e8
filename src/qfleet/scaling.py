"""Plans several learners of a run: the table of ways to share an update here, and the simulation of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch

from qfleet.algo.agent import ReplayAgent
from qfleet.control import resources
from qfleet.control.machine import key_of
from qfleet.control.parallel_coding import measure_compressions
from qfleet.control.parallel_measured import plan_learners
from qfleet.control.parallel_parts import Work
from qfleet.control.parallel_table import candidates_table
from qfleet.control.parallel_ways import Choice
from qfleet.control.simulator import simulate
from qfleet.control.simulator_cluster import cluster_of, parse_options
from qfleet.control.simulator_text import simulated_text
from qfleet.core.errors import ConfigError
from qfleet.core.usercode import UserCode
from qfleet.core.versions import versions
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, flattened, with_changes
from qfleet.parallel.plan import ParallelConfig
from qfleet.planning import Say, measured_costs
from qfleet.setups import learner_setup


def learners_text(experiment: Experiment, code: UserCode, say: Say, fresh: bool = False) -> str:
    """Return how learners on this machine would best share an update, beside all other ways, and the flags for it."""
    experiment = _alone(experiment)
    choice, _ = _choice(experiment, code, say, fresh)
    usual = dict(flattened(experiment.model_dump(mode="json")))
    wanted = {name: value for name, value in choice.best.way.settings.items() if usual[name] != value}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in wanted.items())
    return f"{candidates_table(choice)}\nflags: {flags or 'none'}"


def simulation_text(experiment: Experiment, code: UserCode, options: str, say: Say, fresh: bool = False) -> str:
    """Return what a cluster would do with the run, each role as fast as it is here, and all that is assumed."""
    wanted, alone = parse_options(options), _alone(experiment)
    _, work = _choice(alone, code, say, fresh)
    cluster = cluster_of(alone, measured_costs(alone, code, say, fresh), work, wanted)
    return simulated_text(cluster, simulate(cluster))


def _alone(experiment: Experiment) -> Experiment:
    """Return the run in processes with one learner; what several of them cost is computed from that."""
    agent = experiment.agent
    if not isinstance(agent, ReplayAgent) or agent.memory is not None:
        raise ConfigError(
            "plans for several learners are for agents that learn from single transitions of a replay:"
            f" not for {experiment.algo}; use --algo dqn, say"
        )
    changes = {"topology": "pipeline", "placement": "processes", "learners": 1, "parallel": ParallelConfig()}
    return with_changes(experiment, changes)


def _choice(experiment: Experiment, code: UserCode, say: Say, fresh: bool) -> tuple[Choice, Work]:
    found, spec = resources.look(), env_spec(experiment.env, code.env)
    setup = learner_setup(experiment, spec, code, None)
    with _one_thread():
        key, forms = key_of(experiment, code, found, versions()), partial(measure_compressions, device=setup.device)
        return plan_learners(setup, key, found, say, fresh, forms)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as each rank on shared cores does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
