"""Decides how a run is placed on a machine, from what its work costs there: a pure function of both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

from qfleet.control.measurements import LearnerCost, Measurements
from qfleet.control.plan import Plan, PlannedRole
from qfleet.control.planner_leeway import ALIKE, adaptive_asked, balanced, sides, spare_actors
from qfleet.control.planner_limits import free_gpus, most_actors, replay_bytes, within
from qfleet.control.prediction import Arrangement, Prediction, Side, Tried, inline, predict, replaying, single_threaded
from qfleet.control.reasons import load, reasons, why_placed, why_rounded, why_stepping
from qfleet.control.resources import Resources
from qfleet.control.rounding import PRECISION, acting_precision, in_bf16
from qfleet.experiment import Experiment
from qfleet.roles.inference_server import ServedInference

LEAD = 1.3
"""A learner that holds a run up never waits where all others could go on so many times as fast: what they bring comes
unevenly, and predictions err by a seventh."""
UNROLLS = (1, 2, 4, 8, 16, 32, 64)
DRAWN, STEPPING = "learner.updates_per_draw", "env.threads"
GUSTS = 2
"""Threads that step environments for each core that these find free on average, since at times more are free."""
ENVS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Environments of an actor that are considered, as multiples of the experiment's."""


def make_plan(
    experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str] = ()
) -> Plan:
    """Return the fastest plan for the experiment's placement; for the faster of both if "placement" is not fixed.

    Settings named in `fixed` stay as the experiment has them.
    """
    known, precision = measured, acting_precision(experiment, measured, fixed)
    measured = in_bf16(known) if precision == "bf16" else known
    best = _best(experiment, measured, resources, fixed)
    alone = inline(experiment, in_bf16(known) if experiment.inference.precision == "bf16" else known)
    rates = {"inline": alone.rate, "processes": best[0][1].rate}
    # Inline has nobody who would move inference, and its learners would only take turns.
    beside, placement = adaptive_asked(experiment, fixed) or experiment.learners > 1, max(rates, key=rates.__getitem__)
    if "placement" in fixed:
        placement = experiment.placement
    elif beside:
        placement = "processes"
    asked = beside or "placement" in fixed
    if placement == "inline":
        plan = _inline_plan(experiment, alone)
    else:
        plan = _processes_plan(experiment, measured, resources, best, fixed)
        if precision != experiment.inference.precision and any(way.inference != "cuda" for way, _ in best):
            why = why_rounded(known, best[0][0], precision)
            plan = plan.replace(
                settings={**plan.settings, PRECISION: precision}, reasons={**plan.reasons, PRECISION: why}
            )
    made: Plan = plan.replace(
        updates_per_s=(plan.env_steps_per_s or 0.0) * measured.updates_per_step,
        placements=rates,
        reasons={"placement": why_placed(placement, rates, asked), **plan.reasons, **load(experiment, measured)},
        resources=resources,
        measurements=known,
    )
    return made


def _best(experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str]) -> list[Tried]:
    """Return the most modest of the fastest arrangements; of those with two sides of inference, if any, both sides."""
    tried = [
        (way, predict(experiment, measured, resources.cores, way))
        for way in _ways(experiment, measured, resources, fixed)
    ]
    fastest = max((prediction for _, prediction in tried), key=lambda prediction: prediction.rate)
    alike = [(way, prediction) for way, prediction in tried if prediction.rate >= (1 - ALIKE) * fastest.rate]
    alike.sort(key=lambda one: _modesty(experiment, one[0], fastest.leaves_gaps))
    if fastest.bottleneck == "learner" and replaying(experiment):
        alike = _leading(alike)
    asked = adaptive_asked(experiment, fixed)
    for one in alike:
        served = _served(experiment, measured, resources, one[0], fixed)
        both = sides(experiment, measured, resources.cores, one, served, asked)
        if len(both) > 1:
            return both
    return alike[:1]


def _leading(alike: list[Tried]) -> list[Tried]:
    """Return those that keep the learner at work, of the ways that differ from the first in the number of actors alone.

    Where none of them leads by enough, those that lead by most.
    """
    modest = alike[0][0]
    near = [one for one in alike if replace(one[0], actors=modest.actors) == modest]
    enough = min(LEAD, max(prediction.lead for _, prediction in near))
    return [one for one in near if one[1].lead >= (1 - ALIKE) * enough]


def _modesty(experiment: Experiment, way: Arrangement, gaps: bool) -> tuple[float, ...]:
    """Return what orders arrangements of about the same speed: fewer roles first, then what changes a run least.

    Where even the fastest leaves `gaps`, in which cores idle, to save actors saves nothing: the most come first.
    """
    envs = abs(math.log(way.envs / experiment.actor.envs))
    drawn, threads = way.learner.updates_per_draw, way.learner.threads
    served, actors = (way.inference != "local", way.servers), -way.actors if gaps else way.actors
    return (drawn, *served, actors, envs, way.unroll, threads, way.groups)


def _ways(
    experiment: Experiment, measured: Measurements, resources: Resources, fixed: Collection[str]
) -> Iterator[Arrangement]:
    """Yield every arrangement worth a thought; at least the experiment's own with one actor."""
    own, least = experiment.actor, max(experiment.replay.shards, _wanted_servers(experiment, fixed) or 1)
    envs = [own.envs] if "actor.envs" in fixed else sorted({max(1, round(own.envs * factor)) for factor in ENVS})
    most = {size: max(least, most_actors(experiment, measured, resources, size)) for size in envs}
    actors = [experiment.actors] if "actors" in fixed else range(least, max(most.values()) + 1)
    unrolls = [own.unroll] if "actor.unroll" in fixed or not replaying(experiment) else UNROLLS
    groups = [own.groups] if "actor.groups" in fixed else [1] if measured.two_groups is None else [1, 2]
    choices = product(actors, envs, unrolls, groups, _learners(experiment, measured, fixed))
    for way in (Arrangement(*choice) for choice in choices):
        count, size, unroll, parts = way.actors, way.envs, way.unroll, way.groups
        if "actors" not in fixed and count > most[size]:
            continue
        smallest = count == min(actors) and size == min(envs, key=lambda one: abs(one - own.envs))
        if parts <= size and (within(experiment, way) or (smallest and unroll == min(unrolls))):
            yield from _served(experiment, measured, resources, way, fixed)


def _learners(experiment: Experiment, measured: Measurements, fixed: Collection[str]) -> list[LearnerCost]:
    """Return the ways to learn that the user left open."""
    drawn = experiment.learner.updates_per_draw
    known = [one for one in measured.learners if one.updates_per_draw == drawn or DRAWN not in fixed]
    if "threads" not in fixed:
        return known
    same = [one for one in known if one.threads == experiment.threads]
    return same or [single_threaded(measured).replace(threads=experiment.threads)]


def _inference(experiment: Experiment, measured: Measurements, fixed: Collection[str]) -> Sequence[Side]:
    """Return who may compute the values that actors act on."""
    inference = experiment.inference
    if not replaying(experiment) or ("inference.kind" in fixed and inference.kind == "local"):
        return ["local"]
    devices: list[Side] = ["cuda", "cpu"] if measured.act_cuda else ["cpu"]
    if "inference.device" in fixed and isinstance(inference, ServedInference) and inference.device != "auto":
        devices = [inference.device]
    return devices if "inference.kind" in fixed and inference.kind == "served" else ["local", *devices]


def _served(
    experiment: Experiment, measured: Measurements, resources: Resources, way: Arrangement, fixed: Collection[str]
) -> list[Arrangement]:
    """Return an arrangement with each of those who may compute for its actors.

    There is one server, unless the user wants several or further GPUs are free.
    """
    wanted, found = _wanted_servers(experiment, fixed), []
    for side in _inference(experiment, measured, fixed):
        most = min(free_gpus(experiment, resources, way.learner), way.actors) if side == "cuda" else 1
        counts = range(1, max(1, most) + 1) if wanted is None else [wanted]
        found += [replace(way, inference=side, servers=servers) for servers in counts]
    return found


def _wanted_servers(experiment: Experiment, fixed: Collection[str]) -> int | None:
    """Return how many inference servers the user wants; None where that is left open."""
    inference = experiment.inference
    return inference.servers if "inference.servers" in fixed and isinstance(inference, ServedInference) else None


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
    experiment: Experiment,
    measured: Measurements,
    resources: Resources,
    best: Sequence[Tried],
    fixed: Collection[str],
) -> Plan:
    """Return the plan of an arrangement; `best` has another side of inference too where the run is to find out."""
    way, prediction = best[0]
    settings: dict[str, int | float | str] = {
        "actors": way.actors,
        "actor.envs": way.envs,
        "actor.groups": way.groups,
        "threads": way.learner.threads,
        "device": way.learner.device,
    }
    if replaying(experiment):
        settings["actor.unroll"] = way.unroll
    if way.learner.updates_per_draw != experiment.learner.updates_per_draw:
        settings[DRAWN] = way.learner.updates_per_draw
    why = reasons(experiment, measured, resources, best)
    if STEPPING not in fixed and getattr(experiment.env, "threads", None) == 0 and prediction.leaves_gaps:
        stepped = math.ceil(way.envs / way.groups)
        threads = math.ceil(GUSTS * prediction.free_cores / way.groups)
        settings[STEPPING] = max(1, min(threads, stepped, int(resources.cores)))
        why[STEPPING] = f"{settings[STEPPING]}: {why_stepping(way, prediction)}"
    roles = _roles(experiment, best)
    if balanced(experiment) and not {"actors", "spare_actors"} & set(fixed):
        busy = sum(role.cores for role in roles)
        settings["spare_actors"], why["spare_actors"] = spare_actors(experiment, measured, resources, way, busy)
    return Plan(
        preset=experiment.preset,
        algo=experiment.algo,
        placement="processes",
        settings=settings | _inference_settings(experiment, best, fixed),
        roles=roles,
        env_steps_per_s=prediction.rate,
        bottleneck=prediction.bottleneck,
        reasons={**why, "memory": _memory(experiment, measured, resources)},
        problems=_problems(experiment, measured, resources),
    )


def _inference_settings(
    experiment: Experiment, best: Sequence[Tried], fixed: Collection[str]
) -> dict[str, int | float | str]:
    """Return the settings of those who compute for the actors, where they are not the experiment's own."""
    present, chosen = experiment.inference, [way.inference for way, _ in best]
    if chosen == ["local"]:
        return {} if present.kind == "local" else {"inference.kind": "local", "inference.precision": present.precision}
    served = present if isinstance(present, ServedInference) else ServedInference(precision=present.precision)
    way = next(way for way, _ in best if way.inference != "local")
    values = served.replace(servers=way.servers, device=way.inference).model_dump(exclude={"kind", "begins"})
    values["kind"] = "served" if len(chosen) == 1 else "adaptive"
    if len(chosen) > 1 and "inference.begins" not in fixed:
        values["begins"] = "local" if chosen[0] == "local" else "served"
    return {f"inference.{name}": value for name, value in values.items()}


def _roles(experiment: Experiment, best: Sequence[Tried]) -> tuple[PlannedRole, ...]:
    way, prediction = best[0]
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
    served = next((one for one, _ in best if one.inference != "local"), None)
    if served is not None:
        busy, servers, device = rate * prediction.inference, served.servers, served.inference
        roles.insert(1, PlannedRole(kind="inference", count=servers, cores=busy, busy=busy / servers, device=device))
    return tuple(roles)


def _memory(experiment: Experiment, measured: Measurements, resources: Resources) -> str:
    size = replay_bytes(experiment, measured)
    return f"the full replay takes {_in_units(size)}, {resources.memory / 2**30:.1f} GiB are free"


def _in_units(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def _problems(experiment: Experiment, measured: Measurements, resources: Resources) -> tuple[str, ...]:
    size, room = replay_bytes(experiment, measured), resources.memory
    if size <= room:
        return ()
    fitting = experiment.replay.capacity * room // size
    return (
        f"replay.capacity {experiment.replay.capacity:,} takes {size / 2**30:.2f} GiB of memory, but only"
        f" {room / 2**30:.2f} GiB are free: lower it to {fitting:,} or use replay.storage.kind 'mapped'",
    )
