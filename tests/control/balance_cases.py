"""A run that does not exist, on a clock of its own, for tests of the balancer: a few formulas in place of processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qfleet.control.balancer import Balancer, Decision, Fleet
from qfleet.core.protocols import Report
from qfleet.roles.actor import NO_ROOM, UNANSWERED
from qfleet.roles.resting import Waiting

TICK_S = 0.5


@dataclass
class Machine:
    """Actors whose parts step in turn, so that the slowest one that is awake sets the pace; a learner with a limit."""

    fleet: Fleet
    units: int = 1
    """Parts of an actor's environments that rest apart."""
    learner: float = 1e9
    """Environment steps a second that it can follow."""
    crowding: float = 0.0
    """Share of the whole run's speed that each actor that is awake beyond the cores costs."""
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """By actor and environment, where a step does not take 10 ms."""
    evaluator: float = 0.0
    """Share of the time that it works."""
    network_s: float = 0.0
    """Seconds of each step that an actor's own network takes,"""
    server_s: float = 0.0
    """and that it waits for a server instead."""
    now: float = 0.0

    def __post_init__(self) -> None:
        count, envs = self.fleet.actors + self.fleet.spare, self.fleet.envs
        self.balancer = Balancer(self.fleet)
        parts = np.array_split(np.arange(envs), self.units)
        self.lines = [Waiting(parts, parts) for _ in range(count)]
        self._last: object = None  # the orders and seconds that the following are of
        self.steps, self.busy, self.waited = np.zeros(count), np.zeros(count), np.zeros(count)
        self.thought, self.asked = np.zeros(count), np.zeros(count)
        self.learned_s = self.evaluated_s = 0.0

    def pace(self, actor: int) -> np.ndarray:
        more = self.server_s if self.balancer.orders.served else self.network_s
        return more + np.array([self.seconds.get((actor, env), 0.01) for env in range(self.fleet.envs)])

    def potential(self) -> np.ndarray:
        awake = [line.awake for line in self.lines]
        rates = [one.sum() / self.pace(i)[one].max() if one.any() else 0.0 for i, one in enumerate(awake)]
        crowd = max(0.0, sum(one.any() for one in awake) - self.fleet.cores)
        return np.array(rates) * max(0.1, 1 - self.crowding * crowd)

    def rate(self) -> float:
        return float(min(self.potential().sum(), self.learner))

    def _tick(self) -> None:
        state = (self.balancer.orders, dict(self.seconds), self.network_s, self.server_s)
        if state != self._last:
            self._last = state
            for index, line in enumerate(self.lines):
                line.order(self.balancer.orders.envs[index], self.pace(index))
            self._rates = self.potential()
            self._loads = [line.load(self.pace(index)) for index, line in enumerate(self.lines)]
        rates, total = self._rates, float(self._rates.sum())
        share = min(1.0, self.learner / total)
        awake = rates > 0
        self.now += TICK_S
        self.steps += rates * share * TICK_S
        slowest = np.array([self.pace(index).max() for index in range(len(self.lines))])
        served = self.balancer.orders.served
        waits = awake * share * TICK_S * (self.server_s / slowest if served else 0.0)
        self.asked += waits
        self.thought += awake * share * TICK_S * (0.0 if served else self.network_s / slowest)
        self.busy += awake * share * TICK_S - waits
        self.waited += awake * (1 - share) * TICK_S
        self.learned_s += min(1.0, total / self.learner) * TICK_S
        self.evaluated_s += self.evaluator * TICK_S

    def reports(self) -> list[Report]:
        found = [
            Report("learner", 0, "running", {}, self.learned_s, {}),
            Report("evaluator", 0, "running", {}, self.evaluated_s, {}),
        ]
        for index, load in enumerate(self._loads):
            metrics = {"env_steps": float(self.steps[index]), "network_s": float(self.thought[index]), **load}
            idle = {NO_ROOM: float(self.waited[index]), UNANSWERED: float(self.asked[index])}
            found.append(
                Report("actor", index, "running", metrics, float(self.busy[index]), idle, "its stream is full")
            )
        return found

    def go(self, seconds: float) -> list[tuple[float, Decision]]:
        """Let time pass; returns what was decided, and when."""
        said = []
        for _ in range(round(seconds / TICK_S)):
            self._tick()
            found = self.balancer.observe(self.now, int(self.steps.sum()), self.reports())
            said += [(self.now, decision) for decision in found]
            envs = self.balancer.orders.envs
            assert all(0 <= count <= self.fleet.envs for count in envs), "no more than there are"
            assert sum(envs) > 0, "somebody acts"
        return said


def kinds(said: list[tuple[float, Decision]]) -> list[str]:
    return [decision.kind for _, decision in said]
