"""Kills processes of a run, roles and environments, at moments and in an order that a seed says."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import psutil

ROLES = ("actor-0", "actor-1", "replay-0", "learner-0", "evaluator-0")
ENVIRONMENTS = ("actor-0/environment", "actor-1/environment")
"""Of the processes that an actor has for its environments, any: one for each, and one that starts them."""
ENVS = 3
"""How many environments each actor has."""
ALL_KINDS = (*ROLES, "inference-0", *ENVIRONMENTS)
_STEWARD = 2
"""Of so many deaths on Ray, one is that of the steward of all roles."""


class Killer:
    """Kills the next one each time the run has come a random way further; all have their turn before one has another.

    The death of a process of an environment is not one of a role: it is told otherwise, and counted apart.
    """

    def __init__(self, kills: int, seed: int, pause: int, roles: tuple[str, ...] = ROLES) -> None:
        self._rng, self._pause, self.left = np.random.default_rng(seed), pause, kills
        self.roles = roles
        self._turns: list[str] = []
        self._next = int(self._rng.integers(1, pause))
        self._killed: set[int] = set()
        self.deaths = self.perhaps = 0
        """How many roles have died of it, and how many more may have: begun anew by a steward that was just killed."""
        self.killed: Counter[str] = Counter()
        """How often each kind of process was killed."""
        self.cuts: Counter[str] = Counter()
        """How many environments each actor has lost in its present life, and will tell of."""
        self.perhaps_cuts = 0
        """How many more may be told of: nobody knows what the dead had told."""
        self.whole: set[str] = set()
        """The actors that were seen with all processes of their environments after the last kill."""
        self.placement: Any = None
        self.seen: set[int] = set()
        """The process numbers of all lives."""

    def on_step(self, metrics: dict[str, Any], stop: Any) -> None:
        pids = self.placement.pids()
        self.seen |= {pid for pid in pids.values() if pid}
        if self.left and metrics["env_steps"] >= self._next and self._kill_one(pids):
            self.left -= 1
            self._next = metrics["env_steps"] + int(self._rng.integers(1, self._pause))
        actors = {name.partition("/")[0] for name in self.roles if "/" in name}
        if not self.left and (missing := actors - self.whole):
            self.whole |= {actor for actor in missing if len(self._below(pids.get(actor, 0))) == 1 + ENVS}

    def _kill_one(self, pids: dict[str, int]) -> bool:
        """Kill whose turn it is, or the first after it that lives; returns whether there was one.

        Some may have left for good: when none of those whose turn is to come lives, all have another.
        """
        again = [str(name) for name in self._rng.permutation(self.roles)]
        for victim in [*self._turns, *again]:
            role, _, below = victim.partition("/")
            pid = pids.get(role)
            if not pid or pid in self._killed:  # the last one may not be buried yet
                continue
            if below and not self._kill_environment(role, pid):
                continue
            if not below:
                self._kill(victim, pid)
                self.perhaps_cuts += self.cuts.pop(role, 0)
            self.killed[below or role.partition("-")[0]] += 1
            self._turns = self._turns if victim in self._turns else again
            self._turns.remove(victim)
            return True
        return False

    def _kill(self, victim: str, pid: int) -> None:
        dying = [pid]
        if self.placement.name == "ray" and self.left % _STEWARD == 0:
            import ray

            pids = [life.pid for life in self.placement._lives.values()]
            dying = [pid for pid in pids if pid not in self._killed]  # all die with their steward
            self.perhaps += len(self.placement._due)
            ray.kill(self.placement._lives[victim].line.steward)
        else:
            os.kill(pid, signal.SIGKILL)
        self._killed |= {pid for pid in dying if pid}  # one that is just being begun has none yet
        self.deaths += len(dying)

    def _kill_environment(self, role: str, actor: int) -> bool:
        """Kill a process that an actor has for its environments; returns whether there was one."""
        if not (below := self._below(actor)):
            return False
        victim = below[int(self._rng.integers(len(below)))]
        try:
            children = [child.pid for child in victim.children() if child.pid not in self._killed]
            starts_others = victim.ppid() == actor
            victim.kill()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            return False
        self._killed |= {victim.pid, *children}
        lost, most = (len(children), ENVS) if starts_others else (1, 1)
        ready = any(member.name == role and member.ready_at is not None for member in self.placement.crew)
        self.cuts[role] += lost if ready else 0  # one that is being begun has no episodes yet
        self.perhaps_cuts += most - (lost if ready else 0)
        return True

    def _below(self, actor: int) -> list[psutil.Process]:
        """Return the processes that an actor has for its environments, without those that were killed."""
        try:
            below = psutil.Process(actor).children(recursive=True) if actor else []
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if process.pid not in self._killed]
