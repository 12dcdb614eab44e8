"""One slow environment among many in an actor: steps a second, beside an actor whose environments are all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import EpsilonGreedyConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.bench.table import Row
from qfleet.core import seeding
from qfleet.core.usercode import UserCode
from qfleet.envs import GymConfig, env_spec
from qfleet.roles.actor import Actor, ActorConfig, ActorHandles, ActorSetup

ENVS, SLOW, TIMES_SLOWER = 8, 3, 10
STEP_US = 200.0
GOAL = 0.95
_SEED = 0


class Busy(gymnasium.Env[Any, Any]):
    """Burns CPU time in every step; with the straggler's seed it sleeps instead, so that cores do not bind."""

    def __init__(self, straggler_seed: int | None, times_slower: int = TIMES_SLOWER) -> None:
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._straggler_seed, self._straggles, self._sleep_s = straggler_seed, False, times_slower * STEP_US / 1e6
        self._shown = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the only episode."""
        super().reset(seed=seed)
        self._straggles = seed is not None and seed == self._straggler_seed
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take the time of a step."""
        if self._straggles:
            time.sleep(self._sleep_s)
        else:
            until = time.thread_time() + STEP_US / 1e6
            while time.thread_time() < until:
                pass
        return self._shown, 0.0, False, False, {}


class Nowhere:
    """Every end of an actor's edges: takes all, holds nothing, counts steps."""

    def __init__(self) -> None:
        self.steps = 0

    def waitable(self) -> None:
        """Nothing to wait on."""

    def ready(self) -> bool:
        """Always."""
        return True

    def send(self, message: object) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to close."""

    def sent(self) -> int:
        """Nothing ever was."""
        return 0

    def deserted(self) -> bool:
        """Never."""
        return False

    def latest(self) -> None:
        """There are never new weights."""

    def add(self, amount: int) -> None:
        """Count."""
        self.steps += amount

    def own(self) -> int:
        """Return the count."""
        return self.steps

    def total(self) -> int:
        """Return the count."""
        return self.steps


def measure(seconds: float = 4.0, groups: int = 2) -> list[Row]:
    """Run both actors in turn, for some seconds each, and compare."""
    healthy, slowed = rates(seconds, groups)
    ratio = slowed / healthy
    return [
        Row(
            what=f"one of {ENVS} environments {TIMES_SLOWER} times slower than {STEP_US:.0f} us",
            ours=f"{slowed:,.0f} steps/s",
            peer=f"{healthy:,.0f} steps/s (none slower)",
            ratio=ratio,
            goal=f"at least {GOAL} times the rate without it",
            met=ratio >= GOAL,
        )
    ]


def rates(seconds: float, groups: int, times_slower: int = TIMES_SLOWER) -> tuple[float, float]:
    """Return steps a second without and with a straggler, each the median of turns of half a second."""
    straggler = seeding.episode_seeds(_SEED, "training", ENVS)[SLOW]
    actors = [_actor(partial(Busy, seed, times_slower), groups) for seed in (None, straggler)]
    try:
        turns: list[list[float]] = [[], []]
        for turn in range(max(2, round(seconds / 0.5))):
            for at, (actor, counter) in enumerate(actors):
                rate = actor_rate(actor, counter, 0.5)
                if turn:  # the first one warms up
                    turns[at].append(rate)
        return statistics.median(turns[0]), statistics.median(turns[1])
    finally:
        for actor, _ in actors:
            actor.close()


def actor_rate(actor: Actor, counter: Nowhere, seconds: float) -> float:
    """Return the steps a second of an actor that counts them there."""
    before, began = counter.steps, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        actor.step()
    return (counter.steps - before) / spent


def _actor(factory: Callable[[], Busy], groups: int) -> tuple[Actor, Nowhere]:
    env, agent, counter = GymConfig(id="busy", vectorisation="async"), ReplayAgent(), Nowhere()
    setup = ActorSetup(
        actor=ActorConfig(envs=ENVS, unroll=4, groups=groups),
        env=env,
        spec=env_spec(env, factory),
        network=MlpConfig(hidden=(64,)),
        agent=agent,
        exploration=EpsilonGreedyConfig(),
        seed=_SEED,
        index=0,
        actors=1,
        env_steps=10**15,
        code=UserCode(env=factory),
    )
    return Actor(setup, ActorHandles(experience=Nowhere(), weights=Nowhere(), env_steps=counter)), counter
