"""Says in a few words why a plan's numbers are what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qfleet.control.measurements import QUIET, LearnerCost, Measurements, at
from qfleet.control.measurements_text import update_of
from qfleet.control.planner_limits import ranks_on_gpus
from qfleet.control.prediction import (
    WIDE,
    Arrangement,
    Prediction,
    Tried,
    message_side,
    predict,
    replaying,
    request_side,
)
from qfleet.control.resources import Resources
from qfleet.experiment import Experiment
from qfleet.parallel.devices import LAST, in_turn, server_turn


def why_placed(placement: str, rates: Mapping[str, float], asked: bool) -> str:
    """Return why the roles live where they do; `rates` are environment steps a second by placement."""
    other = "inline" if placement == "processes" else "processes"
    times = rates[placement] / rates[other]
    if times < 1:
        return f"{placement}, as asked for; {other} would be {1 / times:.2f} times as fast"
    because = ", since messages cost more than they save" if placement == "inline" else ""
    return f"{placement}{', as asked for' if asked else ''}: {times:.2f} times as fast as {other}{because}"


def load(experiment: Experiment, measured: Measurements) -> dict[str, str]:
    """Return a warning where playing took less than its whole time of a core, with the cause; else nothing."""
    if measured.cpu_share >= QUIET:
        return {}
    text = f"measuring got {measured.cpu_share:.0%} of the processor time: "
    if measured.quiet:
        text += "environments sleep (no other program wanted the core)"
    else:
        text += "other programs run here, or environments sleep; predictions are for such a machine"
    if getattr(experiment.env, "vectorisation", "") == "sync":
        text += "; environments that sleep do so at the same time with --env.vectorisation async"
    return {"load": text}


def reasons(
    experiment: Experiment,
    measured: Measurements,
    resources: Resources,
    best: Sequence[Tried],
) -> dict[str, str]:
    """Return why each setting of an arrangement in processes is what it is, by its dotted name.

    A second one in `best` is the other side of inference that the run can be moved to.
    """
    way, prediction = best[0]
    served = next((one for one, _ in best if one.inference != "local"), way)
    limit = {
        "actor": "the actors",
        "inference": f"the inference server{'s' if way.servers > 1 else ''} ({way.inference})",
        "replay": "the replay",
        "learner": f"the learner ({way.learner.device})",
        "cores": f"the {resources.cores:g} cores, which all roles share",
    }[prediction.bottleneck]
    alone = predict(experiment, measured, resources.cores, replace(way, actors=1, servers=1)).rate
    no_more = "cores and memory hold no more of them" if prediction.bottleneck == "actor" else "more would not help"
    gaps = "; cores idle while an actor acts, unless others step" if prediction.leaves_gaps and way.actors > 1 else ""
    more = f"; one actor would give {alone:,.0f}" if way.actors > 1 else f"; {no_more}"
    if prediction.bottleneck == "learner" and way.actors > 1 and replaying(experiment):
        more += f", and without waiting for the learner all would give {prediction.rate * prediction.lead:,.0f}"
    found = {
        "actors": f"{way.actors}: {prediction.rate:,.0f} steps/s, limited by {limit}{more}{gaps}",
        "actor.envs": _tick(measured, way, prediction),
        "actor.groups": _groups(measured, way),
        "inference": _sides(best) + _inference(measured, way, served.servers),
        "device": _device(measured, way),
    }
    if len(resources.gpus) > 1:
        found["GPUs"] = _gpus(experiment, resources, way.learner, served)
    drawn = way.learner.updates_per_draw
    if drawn != experiment.learner.updates_per_draw:
        found["learner.updates_per_draw"] = f"{drawn}: the GPU makes so many updates without waiting in between"
    if experiment.learners > 1:
        found["learners"] = f"{experiment.learners}, as asked for: together taken to be as fast as one"
    if replaying(experiment):
        steps = way.envs * way.unroll
        cost = 1e6 * message_side(measured, steps)
        found["actor.unroll"] = f"{way.unroll}: a message of {steps} steps costs each side {cost:.0f} us"
    return found


def why_stepping(way: Arrangement, prediction: Prediction) -> str:
    """Return why an actor's environments get no more threads than they do."""
    actors = f"{way.actors} actor" + ("" if way.actors == 1 else "s")
    return f"among {actors} and the other roles environments find {prediction.free_cores:.1f} cores"


def why_rounded(measured: Measurements, way: Arrangement, chosen: str) -> str:
    """Return why actors compute in another number format than the experiment's."""
    plain, rounded = (1e3 * at(curve, way.envs) for curve in (measured.act, measured.act_bf16))
    return f"{chosen}: {way.envs} observations take a core {rounded:.2f} ms in bf16, and {plain:.2f} ms in fp32"


def _tick(measured: Measurements, way: Arrangement, prediction: Prediction) -> str:
    env, act = at(measured.env_tick, way.envs), at(measured.act, way.envs)
    tick = max(at(measured.actor_tick, way.envs), env, act)
    among_others = way.envs * prediction.actor
    crowd = f"; {1e3 * among_others:.2f} ms where others want the cores, too" if among_others > WIDE * tick else ""
    return (
        f"{way.envs}: a tick takes {1e3 * tick:.2f} ms, {env / tick:.0%} of it environments"
        f" ({way.envs / env:,.0f} steps/s alone), {act / tick:.0%} inference{crowd}"
    )


def _groups(measured: Measurements, way: Arrangement) -> str:
    if way.groups > 1 and way.inference != "local":
        return "2: while one group waits for the inference server the other steps"
    if measured.two_groups is None:
        return f"{way.groups}: environments step in the actor's own thread"
    if way.groups > 1:
        return f"2: while one group steps the other is acted for; a tick takes {measured.two_groups:.0%} of the time"
    idle = " while nobody else wants the cores" if measured.two_groups < 1 else ""
    return f"1: with 2 a tick takes {measured.two_groups:.0%} of the time{idle}"


def _sides(best: Sequence[Tried]) -> str:
    """Say what speaks for either side of inference that can be moved; empty where it cannot."""
    if len(best) == 1:
        return ""
    rates = " and ".join(f"{prediction.rate:,.0f} steps/s with {way.inference}" for way, prediction in best)
    return f"adaptive: about {rates}, so that the balancer finds out which is faster; "


def _inference(measured: Measurements, way: Arrangement, servers: int) -> str:
    """Say who computes the values, with the figures that decide it."""
    clients = -(-way.actors // servers)
    own, asked = at(measured.act, way.envs), clients * way.envs
    words = f"{way.envs} observations take an actor {1e3 * own:.2f} ms"
    for device, curve in (("cpu", measured.act), ("cuda", measured.act_cuda)):
        if curve:
            whose = "all" if servers == 1 else f"its {clients} actor{'s' if clients > 1 else ''}"
            words += f"; a server ({device}) takes {1e3 * at(curve, asked):.2f} ms for the {asked} of {whose}"
    return f"{way.inference}: {words}; a request costs each side {1e6 * request_side(measured, way.envs):.0f} us"


def _gpus(experiment: Experiment, resources: Resources, learner: LearnerCost, served: Arrangement) -> str:
    """Say of each GPU who computes on it."""
    ranks, evaluating = ranks_on_gpus(experiment, learner), experiment.evaluation.device
    turns = {("learner" if ranks == 1 else f"learner {rank}"): rank for rank in range(ranks)}
    if served.inference == "cuda":
        turns |= {f"inference server {index}": server_turn(index, ranks) for index in range(served.servers)}
    if (learner.device if evaluating == "auto" else evaluating) == "cuda":
        turns["evaluator"] = LAST
    users = [
        [name for name, turn in turns.items() if in_turn(turn, len(resources.gpus)) == number]
        for number in range(len(resources.gpus))
    ]
    return "; ".join(
        f"{number} ({gpu.name}, {gpu.memory / 2**30:.0f} GiB): {', '.join(users[number]) or 'nobody'}"
        for number, gpu in enumerate(resources.gpus)
    )


def _device(measured: Measurements, way: Arrangement) -> str:
    others = [update_of(measured, one) for one in measured.learners if one != way.learner]
    rate = measured.copy_bytes_per_s
    copies = f"; copies to the GPU go at {rate / 1e9:.0f} GB/s" if rate and way.learner.device == "cuda" else ""
    return update_of(measured, way.learner) + (f" ({'; '.join(others)})" if others else "") + copies
