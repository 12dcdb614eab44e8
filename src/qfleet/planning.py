"""Plans a run: measures what it costs on this machine, or remembers it, and lets the planner decide."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from qfleet.ability import require_able
from qfleet.algo.agent import ReplayAgent
from qfleet.control import resources
from qfleet.control.feeding import FeedCost, feed_cost
from qfleet.control.machine import arranged, env_sizes, key_of, measure
from qfleet.control.measurements import KNOWN, Measurements
from qfleet.control.pieces import stored_bytes
from qfleet.control.plan import Plan, PlannedRole
from qfleet.control.planner import make_plan
from qfleet.control.resources import Resources
from qfleet.control.rig import Build, Rig
from qfleet.control.waking import LIGHT, wake_seconds
from qfleet.core.errors import ConfigError
from qfleet.core.shared_memory import shared_memory_root
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.core.versions import versions
from qfleet.crowding import require_processes_fit
from qfleet.envs import env_spec
from qfleet.experiment import Experiment, flattened, with_changes
from qfleet.parallel.plan import ParallelConfig
from qfleet.program import build_program, place
from qfleet.runtime.graph import open_handles
from qfleet.runtime.memory import remove_leftovers
from qfleet.setups import learner_device, learner_setup, mirrored
from qfleet.sharing import lack_of_shared_memory

Say = Callable[[str], object]
STORAGE = "replay.storage.kind"


def plan_run(experiment: Experiment, code: UserCode, fixed: Collection[str], say: Say, fresh: bool = False) -> Plan:
    """Return the plan of an experiment; settings in `fixed` (dotted names) stay as they are, also the placement.

    What was measured before on this machine is used again, unless `fresh` asks for new measurements.
    """
    spec = env_spec(experiment.env, code.env)
    if experiment.fused:
        return _fused(experiment, spec)
    if experiment.device in ("mps", "xpu"):
        raise ConfigError(f"plans are for CPUs and NVIDIA GPUs: device '{experiment.device}' needs --actors N")
    if experiment.placement == "ray":
        raise ConfigError("plans are for one machine: placement 'ray' needs --actors N")
    require_able(experiment, spec, code)
    require_processes_fit(experiment)
    found = _look()
    stored = _stored(experiment, spec, found, fixed)
    values = dict(flattened(experiment.model_dump(mode="json")))
    given = {name: values[name] for name in sorted(fixed) if name in values}
    made: Plan = make_plan(stored, _measured(stored, spec, code, found, say, fresh), found, fixed).replace(given=given)
    if made.placement == "inline":
        return made
    decided = with_changes(stored, {"placement": made.placement, **made.settings})
    if problem := lack_of_shared_memory(decided, spec, code, found.shared_memory):
        made = made.replace(problems=(*made.problems, problem))
    if stored is experiment:
        return made
    kind = stored.replay.storage.kind
    reason = f"{kind} in place of {experiment.replay.storage.kind}: there is room, and the GPU can have a copy of it"
    planned: Plan = made.replace(settings={**made.settings, STORAGE: kind}, reasons={**made.reasons, STORAGE: reason})
    return planned


def _look() -> Resources:
    """Return what this machine has now, without what dead runs have left."""
    remove_leftovers(shared_memory_root())
    return resources.look()


def _stored(experiment: Experiment, spec: EnvSpec, found: Resources, fixed: Collection[str]) -> Experiment:
    """Return the experiment with its rows stored as they are, if a GPU could then have a copy and memory abounds."""
    open_to_us = not any(name.startswith("replay.storage") for name in fixed)
    if not (open_to_us and found.gpu and experiment.replay.storage.kind == "lz4" and experiment.device != "cpu"):
        return experiment
    plain = with_changes(experiment, {STORAGE: "ram", "placement": "processes"})
    row, _ = stored_bytes(spec, batch=1)
    if 2 * row * plain.replay.capacity > min(found.memory, found.shared_memory) or not mirrored(plain, spec):
        return experiment
    return with_changes(experiment, {STORAGE: "ram"})


def apply_plan(experiment: Experiment, plan: Plan, fixed: Collection[str] = ()) -> Experiment:
    """Return the experiment as a plan has it.

    Refuses a plan of another experiment, and one that has other values of the settings in `fixed` (dotted names).
    """
    if (plan.preset, plan.algo) != (experiment.preset, experiment.algo):
        raise ConfigError(
            f"the plan is for {plan.preset} ({plan.algo}), not for {experiment.preset} ({experiment.algo}):"
            f" train {plan.preset} with --algo {plan.algo}, or plan anew"
        )
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    decided = {**plan.given, "placement": plan.placement, **plan.settings}
    given = dict(flattened(experiment.model_dump(mode="json")))
    for name in sorted(decided.keys() & set(fixed)):
        if given[name] != decided[name]:
            raise ConfigError(
                f"{name} {given[name]} contradicts the plan, which has {decided[name]}: leave it out, or plan anew"
            )
    return with_changes(experiment, decided)


def measured_costs(experiment: Experiment, code: UserCode, say: Say, fresh: bool = False) -> Measurements:
    """Return what the pieces of a run cost on this machine, measured or remembered."""
    spec = env_spec(experiment.env, code.env)
    return _measured(experiment, spec, code, _look(), say, fresh)


def _measured(
    experiment: Experiment, spec: EnvSpec, code: UserCode, found: Resources, say: Say, fresh: bool
) -> Measurements:
    key = key_of(experiment, code, found, versions())
    known = None if fresh else KNOWN.find(key)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="qfleet-plan-") as directory:
        rig = partial(_rig, spec=spec, code=code, directory=Path(directory))
        if experiment.placement == "processes":
            _try_children(experiment, rig)
        say("timing messages")
        wake = _wake(Path(directory))
        measured = measure(experiment, spec, code, found, rig, wake, say, _feed(experiment, spec, code))
    if measured.quiet:
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs the next plan its time
            KNOWN.store(key, measured)
    return measured


def _try_children(experiment: Experiment, build: Build) -> None:
    """Begin the roles of a run once, to refuse before anything is measured what they cannot be sent, or make."""
    fewest = 1 if isinstance(experiment.agent, ReplayAgent) else env_sizes(experiment)[0]
    build(arranged(experiment, placement="processes", **{"actor.envs": fewest})).placement.close()


def _feed(experiment: Experiment, spec: EnvSpec, code: UserCode) -> Callable[[int], FeedCost] | None:
    """Return what times a GPU's learner as processes feed it, by updates for each draw.

    None for agents that it does not work ahead for.
    """
    if not isinstance(experiment.agent, ReplayAgent) or experiment.agent.memory is not None:
        return None

    def timed(updates: int) -> FeedCost:
        alone = {"actors": 1, "learners": 1, "parallel": ParallelConfig()}
        drawn = {"learner.updates_per_draw": updates}
        placed = with_changes(experiment, {"placement": "processes", "device": "cuda", **alone, **drawn})
        return feed_cost(learner_setup(placed, spec, code, None), placed.replay, mirrored(placed, spec))

    return timed


def _wake(directory: Path) -> float:
    """Return what a message costs each of its ends besides its content."""
    spec = env_spec(LIGHT.env)
    return wake_seconds(partial(_rig, spec=spec, code=UserCode(), directory=directory), spec)


def _rig(experiment: Experiment, spec: EnvSpec, code: UserCode, directory: Path) -> Rig:
    """Bring an experiment to life, to be timed."""
    program = build_program(experiment, spec, code, directory)
    placement = place(program, experiment)
    handles = open_handles(program.monitor, placement.open)
    return Rig(placement, handles.env_steps, handles.updates)


def _fused(experiment: Experiment, spec: EnvSpec) -> Plan:
    """Return the plan of a run that is one loop, or several that learn as one: there is nothing to place."""
    device, loops = learner_device(experiment, spec), experiment.learners
    what = "one loop" if loops == 1 else f"{loops} loops that learn as one"
    reason = f"{what} on {device}, nothing to place; `qfleet probe {experiment.preset}` finds its fastest settings"
    return Plan(
        preset=experiment.preset,
        algo=experiment.algo,
        placement=experiment.placement,
        settings={},
        roles=(PlannedRole(kind="fused", count=loops, cores=float(loops), busy=1.0, device=device),),
        bottleneck="fused",
        reasons={"topology": reason},
    )
