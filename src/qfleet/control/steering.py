"""Joins the balancer to a run: reports go in, orders to the roles and events for people come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qfleet.control.balancer import Balancer, Decision, Fleet
from qfleet.control.resources import usable_cores
from qfleet.core.protocols import Publisher, Report
from qfleet.core.types import Orders
from qfleet.experiment import Experiment
from qfleet.roles.inference_server import AdaptiveInference, ServedInference


class Steering:
    """The balancer of one run, and the edge on which its orders go out; None where it can only watch."""

    def __init__(self, experiment: Experiment, edge: Publisher[Orders] | None) -> None:
        inference = experiment.inference
        self._edge = edge
        self._fleet = Fleet(
            cores=usable_cores(),
            actors=experiment.actors,
            spare=experiment.spare_actors,
            vacant=experiment.seats - experiment.all_actors,
            envs=experiment.actor.envs,
            deadlines_ms=_deadlines_ms(experiment),
            begins=inference.begins if isinstance(inference, AdaptiveInference) else None,
            fixed=edge is None,
        )
        self._balancer = Balancer(self._fleet)

    def begin(self, envs: Sequence[int], deadlines_ms: Sequence[float]) -> None:
        """Give the first orders: those in force when the run was saved, or those that a new run begins with."""
        former = Orders(tuple(envs), tuple(deadlines_ms)) if envs else None
        self._balancer = Balancer(self._fleet, former)
        self._publish()

    def look(self, now: float, env_steps: int, reports: Sequence[Report]) -> list[dict[str, Any]]:
        """Let the balancer look; returns events of what it decided, which is already ordered."""
        orders = self._balancer.orders
        found = self._balancer.observe(now, env_steps, reports)
        if self._balancer.orders != orders:
            self._publish()
        return [_event(decision) for decision in found]

    def regrouped(self, now: float) -> list[dict[str, Any]]:
        """Note that roles came or went; returns events of what the balancer makes of it."""
        return [_event(decision) for decision in self._balancer.regrouped(now)]

    def paused(self) -> tuple[list[int], list[float]]:
        """Return the orders in force, to be saved with a run that stands still."""
        orders = self._balancer.orders
        return list(orders.envs), list(orders.deadlines_ms)

    def stood_still(self) -> None:
        """Note that the run stood still for long."""
        self._balancer.stood_still()

    def _publish(self) -> None:
        if self._edge is not None:
            self._edge.publish(self._balancer.orders)


def _deadlines_ms(experiment: Experiment) -> tuple[float, ...]:
    """Return how long each inference server waits at first; nothing where there is none."""
    inference = experiment.inference
    return (inference.deadline_ms,) * inference.servers if isinstance(inference, ServedInference) else ()


def _event(decision: Decision) -> dict[str, Any]:
    event = {"event": "balance", "decision": decision.kind, "role": decision.role, "index": decision.index}
    event |= {"text": decision.reason, "applied": decision.applied}
    known: dict[str, Any] = {"before": decision.before, "after": decision.after}
    known |= {"because": decision.because or None, "inference": decision.inference or None}
    return event | {name: value for name, value in known.items() if value is not None}
