"""What a plan leaves to the balancer: actors that sleep until they are needed, and who computes for the actors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from qfleet.control.levers import LEARNING, WAITING
from qfleet.control.measurements import Measurements, at
from qfleet.control.planner_limits import most_actors, within
from qfleet.control.prediction import EFFICIENCY, Arrangement, Prediction, Tried, predict
from qfleet.control.resources import Resources
from qfleet.experiment import Experiment
from qfleet.roles.inference_server import AdaptiveInference

ALIKE = 0.03
"""Of arrangements that are slower than the fastest by less, the most modest is taken."""
CLOSE = 0.2
"""Where one side of inference is predicted to be slower than the other by less, the run finds out which is faster."""
NETWORK = WAITING / 2
"""Where the network takes less of an actor's time it stays where it is: no balancer would come to move it."""
AWAKE_FOR_EACH = 4
"""So many actors that are awake have one that sleeps."""


def balanced(experiment: Experiment) -> bool:
    """Return whether a balancer may change the run once it is in processes."""
    return experiment.model_copy(update={"placement": "processes"}).balanced


def adaptive_asked(experiment: Experiment, fixed: Collection[str]) -> bool:
    """Return whether the user wants inference that can be moved."""
    return "inference.kind" in fixed and isinstance(experiment.inference, AdaptiveInference)


def sides(
    experiment: Experiment,
    measured: Measurements,
    cores: float,
    chosen: Tried,
    served: Sequence[Arrangement],
    asked: bool,
) -> list[Tried]:
    """Return the chosen arrangement or, where it is left open who computes for the actors, both sides of it.

    `served` is the arrangement with each of those who may compute, few servers first. The faster side comes first.
    Both are left open where that is `asked` for, or they are close and acting is what counts.
    """
    way, here = chosen
    others = [one for one in served if (one.inference == "local") != (way.inference == "local")]
    if not others or not (asked or (balanced(experiment) and _movable(experiment, measured, way, here))):
        return [chosen]
    tried = [(one, predict(experiment, measured, cores, one)) for one in others]
    fastest = max(tried, key=_rate)
    same = [one for one in tried if one[0].inference == fastest[0].inference]
    both = [chosen, next(one for one in same if _rate(one) >= (1 - ALIKE) * _rate(fastest))]
    both.sort(key=_rate, reverse=True)
    return both if asked or _rate(both[1]) >= (1 - CLOSE) * _rate(both[0]) else [chosen]


def _rate(tried: Tried) -> float:
    return tried[1].rate


def _movable(experiment: Experiment, measured: Measurements, way: Arrangement, prediction: Prediction) -> bool:
    """Return whether acting holds the run up, and the network takes much of its time."""
    waited_for = max(prediction.learner, prediction.replay / experiment.replay.shards)
    network = at(measured.act, way.envs) >= NETWORK * at(measured.actor_tick, way.envs)
    return network and prediction.sampling and prediction.rate * waited_for <= LEARNING


def spare_actors(
    experiment: Experiment, measured: Measurements, resources: Resources, way: Arrangement, busy: float
) -> tuple[int, str]:
    """Return how many actors sleep at first where roles keep `busy` cores busy, and why."""
    if experiment.exploration.kind == "ladder":
        return 0, "0: each environment explores in its own way, and the greediest would sleep"
    free = int(EFFICIENCY * resources.cores - busy)
    if free < 1:
        return 0, "0: no core would be free for one more actor"
    memory = most_actors(experiment, measured, resources, way.envs) - way.actors
    if memory < 1:
        return 0, "0: cores and memory hold no further actor"
    wanted = min(max(1, way.actors // AWAKE_FOR_EACH), free, memory)
    fitting = (count for count in range(wanted, 0, -1) if within(experiment, replace(way, actors=way.actors + count)))
    count = next(fitting, 0)
    if not count:
        return 0, "0: budget and replay hold no further environments"
    return count, f"{count}: asleep, to be woken where actors turn out to be too few"
