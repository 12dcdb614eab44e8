"""Decides how a run is placed on a machine, from what its work costs there: a pure function of both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Literal

from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.plan import Plan, PlannedRole
from qfleet.control.prediction import Arrangement, Prediction, inline, predict, replaying, single_threaded
from qfleet.control.reasons import load, reasons, why_placed
from qfleet.control.resources import Resources
from qfleet.experiment import Experiment
from qfleet.replay.memory import ASSUMED_COMPRESSION
from qfleet.roles.inference_server import ServedInference

ALIKE = 0.03
"""Of arrangements that are slower than the fastest by less, the most modest is taken."""
PROCESS_BYTES = 150 * 2**20
"""Memory of one role's process that it shares with no other."""
OTHERS = 3
"""Processes besides the actors: replay (one shard), learner, evaluator."""
STEPS_OF_EACH = 1000
"""Every environment plays at least so many steps of the budget: more of them would only see beginnings."""
UNROLLS = (1, 2, 4, 8, 16, 32, 64)
ENVS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Environments of an actor that are considered, as multiples of the experiment's."""


def make_plan(
    experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str] = ()
) -> Plan:
    """Return the fastest plan for the experiment's placement; for the faster of both if "placement" is not fixed.

    Settings named in `fixed` stay as the experiment has them.
    """
    best, prediction = _best(experiment, measured, resources, fixed)
    alone = inline(experiment, measured)
    rates = {"inline": alone.rate, "processes": prediction.rate}
    asked = "placement" in fixed
    placement = experiment.placement if asked else max(rates, key=lambda name: rates[name])
    if placement == "inline":
        plan = _inline_plan(experiment, alone)
    else:
        plan = _processes_plan(experiment, measured, resources, best, prediction)
    made: Plan = plan.replace(
        updates_per_s=(plan.env_steps_per_s or 0.0) * measured.updates_per_step,
        placements=rates,
        reasons={"placement": why_placed(placement, rates, asked), **plan.reasons, **load(experiment, measured)},
        resources=resources,
        measurements=measured,
    )
    return made


def _best(
    experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str]
) -> tuple[Arrangement, Prediction]:
    """Return the most modest of the fastest arrangements."""
    tried = [
        (way, predict(experiment, measured, resources.cores, way))
        for way in _ways(experiment, measured, resources, fixed)
    ]
    fastest = max(prediction.rate for _, prediction in tried)
    alike = [(way, prediction) for way, prediction in tried if prediction.rate >= (1 - ALIKE) * fastest]
    return min(alike, key=lambda one: _modesty(experiment, one[0]))


def _modesty(experiment: Experiment, way: Arrangement) -> tuple[float, ...]:
    """Return what orders arrangements of about the same speed: fewer roles first, then what changes a run least."""
    envs = abs(math.log(way.envs / experiment.actor.envs))
    return (way.inference != "local", way.actors, envs, way.unroll, way.learner.threads, way.groups)


def _ways(
    experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str]
) -> Iterator[Arrangement]:
    """Yield every arrangement worth a thought; at least the experiment's own with one actor."""
    most, own = most_actors(experiment, measured, resources), experiment.actor
    least = experiment.replay.shards
    actors = [experiment.actors] if "actors" in fixed else range(least, max(least, most) + 1)
    envs = [own.envs] if "actor.envs" in fixed else sorted({max(1, round(own.envs * factor)) for factor in ENVS})
    unrolls = [own.unroll] if "actor.unroll" in fixed or not replaying(experiment) else UNROLLS
    groups = [own.groups] if "actor.groups" in fixed else [1] if measured.two_groups is None else [1, 2]
    learners, served = _learners(experiment, measured, fixed), _inference(experiment, measured, fixed)
    choices = product(actors, envs, unrolls, groups, learners, served)
    for way in (Arrangement(*choice) for choice in choices):
        count, size, unroll, parts = way.actors, way.envs, way.unroll, way.groups
        smallest = count == min(actors) and size == min(envs, key=lambda one: abs(one - own.envs))
        if parts <= size and (_within(experiment, way) or (smallest and unroll == min(unrolls))):
            yield way


def _learners(experiment: Experiment, measured: Measurements, fixed: Collection[str]) -> list[LearnerCost]:
    """Return the ways to learn that the user left open."""
    if "threads" not in fixed:
        return list(measured.learners)
    same = [one for one in measured.learners if one.threads == experiment.threads]
    return same or [single_threaded(measured).replace(threads=experiment.threads)]


def _inference(
    experiment: Experiment, measured: Measurements, fixed: Collection[str]
) -> Sequence[Literal["local", "cpu", "cuda"]]:
    """Return who may compute the values that actors act on."""
    inference = experiment.inference
    if not replaying(experiment) or ("inference.kind" in fixed and inference.kind == "local"):
        return ["local"]
    devices: list[Literal["local", "cpu", "cuda"]] = ["cuda", "cpu"] if measured.act_cuda else ["cpu"]
    if "inference.device" in fixed and isinstance(inference, ServedInference) and inference.device != "auto":
        devices = [inference.device]
    return devices if "inference.kind" in fixed else ["local", *devices]


def _within(experiment: Experiment, way: Arrangement) -> bool:
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


def most_actors(experiment: Experiment, measured: Measurements, resources: Resources) -> int:
    """Return how many actors the cores and the memory allow: one for each core at most, and always one."""
    others = OTHERS + experiment.replay.shards - 1
    spare = resources.memory - replay_bytes(experiment, measured) - others * PROCESS_BYTES
    return max(1, min(int(resources.cores), spare // PROCESS_BYTES))


def replay_bytes(experiment: Experiment, measured: Measurements) -> int:
    """Return the memory that the full replay takes; what is mapped lies on a disk."""
    kind = experiment.replay.storage.kind
    if not replaying(experiment) or kind == "mapped":
        return 0
    return experiment.replay.capacity * measured.row_bytes // (ASSUMED_COMPRESSION if kind == "lz4" else 1)


def _inline_plan(experiment: Experiment, alone: Prediction) -> Plan:
    shares = {"actor": alone.actor, "replay": alone.replay, "learner": alone.learner}
    roles = tuple(
        PlannedRole(kind=kind, count=1, cores=alone.rate * seconds, busy=alone.rate * seconds)
        for kind, seconds in shares.items()
        if seconds > 0
    )
    return Plan(
        preset=experiment.preset,
        algo=experiment.algo,
        placement="inline",
        settings={},
        roles=roles,
        env_steps_per_s=alone.rate,
        bottleneck=alone.bottleneck,
        reasons={"actors": "one: inline, roles take turns in one process, and the run's numbers can be repeated"},
    )


def _processes_plan(
    experiment: Experiment, measured: Measurements, resources: Resources, way: Arrangement, prediction: Prediction
) -> Plan:
    settings: dict[str, int | float | str] = {
        "actors": way.actors,
        "actor.envs": way.envs,
        "actor.groups": way.groups,
        "threads": way.learner.threads,
        "device": way.learner.device,
    }
    if replaying(experiment):
        settings["actor.unroll"] = way.unroll
    if way.inference != "local":
        present = experiment.inference
        served = present if isinstance(present, ServedInference) else ServedInference(precision=present.precision)
        served = served.replace(servers=1, device=way.inference)
        settings |= {f"inference.{name}": value for name, value in served.model_dump().items()}
    return Plan(
        preset=experiment.preset,
        algo=experiment.algo,
        placement="processes",
        settings=settings,
        roles=_roles(experiment, way, prediction),
        env_steps_per_s=prediction.rate,
        bottleneck=prediction.bottleneck,
        reasons={
            **reasons(experiment, measured, resources, way, prediction),
            "memory": _memory(experiment, measured, resources),
        },
        problems=_problems(experiment, measured, resources),
    )


def _roles(experiment: Experiment, way: Arrangement, prediction: Prediction) -> tuple[PlannedRole, ...]:
    rate, learner = prediction.rate, way.learner
    roles = [
        PlannedRole(
            kind="actor",
            count=way.actors,
            cores=rate * prediction.actor_cpu,
            busy=rate * prediction.actor / way.actors,
        ),
        PlannedRole(
            kind="learner",
            count=experiment.learners,
            cores=rate * prediction.learner * learner.threads,
            busy=rate * prediction.learner,
            device=learner.device,
        ),
    ]
    if prediction.replay:
        busy = rate * prediction.replay
        shards = experiment.replay.shards
        roles.insert(1, PlannedRole(kind="replay", count=shards, cores=busy, busy=busy / shards))
    if way.inference != "local":
        busy = rate * prediction.inference
        roles.insert(1, PlannedRole(kind="inference", count=1, cores=busy, busy=busy, device=way.inference))
    return tuple(roles)


def _memory(experiment: Experiment, measured: Measurements, resources: Resources) -> str:
    size = replay_bytes(experiment, measured)
    return f"the full replay takes {size / 2**30:.2f} GiB, {resources.memory / 2**30:.1f} GiB are free"


def _problems(experiment: Experiment, measured: Measurements, resources: Resources) -> tuple[str, ...]:
    size = replay_bytes(experiment, measured)
    room = min(resources.memory, resources.shared_memory)
    if size <= room:
        return ()
    fitting = experiment.replay.capacity * room // size
    return (
        f"replay.capacity {experiment.replay.capacity:,} takes {size / 2**30:.2f} GiB of shared memory, but only"
        f" {room / 2**30:.2f} GiB are free: lower it to {fitting:,} or use replay.storage.kind 'mapped'",
    )
