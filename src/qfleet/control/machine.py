"""Measures what an experiment costs on this machine: plays it for seconds and times its own roles."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from qfleet.accel.precision import Precision
from qfleet.algo.agent import ReplayAgent, RolloutAgent
from qfleet.control.feeding import FeedCost
from qfleet.control.measurements import Curve, LearnerCost, Measurements
from qfleet.control.pieces import (
    act_seconds,
    batch_seconds,
    copy_rate,
    experience_seconds,
    request_seconds,
    stored_bytes,
    tick_seconds,
)
from qfleet.control.resources import Resources
from qfleet.control.rig import Build, core_share, play, running
from qfleet.control.rounding import may_round
from qfleet.control.waking import FOREVER
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.parallel.plan import ParallelConfig
from qfleet.roles.inference_server import LocalInference
from qfleet.roles.seats import ElasticConfig

LIMIT_S = 30.0
"""No further piece is begun after this; one that is begun is finished."""
PIECE_S = 1.2
"""How long each arrangement is timed."""
ROUNDS = 4
"""Parts of that time; the quietest one counts for each role, since other programs only ever add to it."""
LOOK_S = 0.025
"""Before each of them it is looked for so long whether other programs want the core."""
SIZES = (1.0, 0.25, 4.0)
"""Numbers of environments that are timed, as multiples of the experiment's; the likeliest first."""
THREADS_PAY_S = 1e-3
"""Updates shorter than this are not shared among threads: handing the work out takes as long."""
AT_ONCE = 16
"""Updates whose batches may be drawn at once for a GPU."""
SLEEPS = 0.2
"""The least part of an actor's time in which it wants no core that is no accident of timing."""
MEANING = 4
"""Raised whenever something else is measured than before, so that what is remembered is measured anew."""
ROWS = 100_000
"""The replay of a measurement is no larger."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the quietest rounds, and what all rounds say of processor time."""

    actor: float
    """For each environment step."""
    replay: float
    """For each environment step."""
    update: float
    """For each update, publishing included."""
    beside: float
    """Processor time for each environment step in threads and processes of the environments' own."""
    slept: float
    """Seconds of an environment step in which its actor waited and wanted no core; 0 where those are few."""
    cpu_share: float
    """Processor time as a part of the seconds, 1 at most."""
    core_share: float
    """Share of a core that was there for the taking when it was least."""
    updates: float
    """Updates for each environment step."""


Say = Callable[[str], object]
Feed = Callable[[int], FeedCost]


def measure(
    experiment: Experiment,
    spec: EnvSpec,
    code: UserCode,
    resources: Resources,
    build: Build,
    wake: float,
    say: Say,
    feed: Feed | None = None,
) -> Measurements:
    """Return what the experiment costs here, after at most about `LIMIT_S` seconds. `build` makes a rig.

    A message costs each of its ends `wake` seconds besides its content. `feed` times a GPU's learner as processes feed
    it, with so many updates for each draw; None where the run in one process is to speak for it.
    """
    began, envs = time.perf_counter(), experiment.actor.envs
    costs: dict[int, Costs] = {}
    for size in sorted(env_sizes(experiment), key=lambda size: (size != envs, size)):
        if costs and _late(began):
            break
        say(f"playing with {size} environment{'s' if size > 1 else ''}")
        costs[size] = _timed(build, arranged(experiment, **{"actor.envs": size}))
    say("timing updates and inference")
    first, sizes = costs[envs], sorted(costs)
    learners = _learners(build, experiment, resources, first, began, feed)
    batch = _rows_of_batch(experiment)
    row_bytes, batch_bytes = stored_bytes(spec, batch)
    return Measurements(
        env_tick=tuple((size, tick_seconds(experiment, code, size)) for size in sizes),
        act=_acting(experiment, spec, code, (*sizes, 4 * sizes[-1]), "cpu"),
        act_bf16=_acting(experiment, spec, code, (*sizes, 4 * sizes[-1]), "cpu", "bf16")
        if may_round(experiment, code)
        else (),
        act_cuda=_acting(experiment, spec, code, (*sizes, 4 * sizes[-1]), "cuda") if resources.gpu else (),
        request_message=tuple((size, request_seconds(spec, size)) for size in sizes),
        actor_tick=tuple((size, size * costs[size].actor) for size in sizes),
        actor_cpu=tuple(
            (size, size * max(one.actor + one.beside - one.slept, 0.0)) for size, one in sorted(costs.items())
        ),
        two_groups=_two_groups(build, experiment, first) if _steps_elsewhere(experiment) else None,
        replay=first.replay,
        learners=learners,
        updates_per_step=first.updates,
        batches_per_step=first.updates if first.replay else 0.0,
        experience_message=tuple((n, experience_seconds(spec, n)) for n in (sizes[0], 16 * sizes[-1])),
        batch_message=batch_seconds(spec, batch) if first.replay else 0.0,
        wake=wake,
        cpu_share=first.cpu_share,
        core_share=first.core_share,
        row_bytes=row_bytes,
        batch_bytes=batch_bytes,
        copy_bytes_per_s=copy_rate() if resources.gpu else None,
    )


def env_sizes(experiment: Experiment) -> list[int]:
    """Return with how many environments an actor is timed, ascending: a rollout must fill its minibatches."""
    agent, envs = experiment.agent, experiment.actor.envs
    least = math.ceil(agent.minibatches / agent.rollout_length) if isinstance(agent, RolloutAgent) else 1
    return sorted({envs, *(max(least, round(envs * factor)) for factor in SIZES)})


def key_of(experiment: Experiment, code: UserCode, resources: Resources, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what measurements are found by: the machine, and all that decides about the work."""
    parts = ("env", "network", "agent", "optim", "learner", "replay", "accel", "device", "actor")
    tree = experiment.model_dump(mode="json", include=set(parts))
    del tree["replay"]["capacity"], tree["replay"]["shards"], tree["learner"]["learning_starts"]
    own = [one and f"{one.__module__}:{getattr(one, '__qualname__', '')}" for one in (code.env, code.network)]
    return {
        "meaning": MEANING,
        "machine": [resources.cpu, resources.cores, resources.gpu],
        "experiment": tree,
        "code": own,
        "versions": dict(versions),
    }


def _rows_of_batch(experiment: Experiment) -> int:
    """Return the transitions whose batch is as large as the run's, which may be made of sequences."""
    batch, agent = experiment.learner.batch_size, experiment.agent
    memory = agent.memory if isinstance(agent, ReplayAgent) else None
    # A transition comes with two observations, a sequence with one for each step.
    return batch if memory is None else batch * (memory.burn_in + memory.length + 1) // 2


def _acting(
    experiment: Experiment,
    spec: EnvSpec,
    code: UserCode,
    sizes: Sequence[int],
    device: str,
    precision: Precision = "fp32",
) -> Curve:
    return tuple((size, act_seconds(experiment, spec, code, size, device, precision)) for size in sizes)


def _late(began: float) -> bool:
    return time.perf_counter() - began > LIMIT_S


def arranged(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment as one that is played inline, unless changed, learns at once, and never ends."""
    batch, capacity = experiment.learner.batch_size, experiment.replay.capacity
    return with_changes(
        experiment,
        {
            "topology": "pipeline",
            "placement": "inline",
            "address": None,
            "actors": 1,
            "spare_actors": 0,
            "elastic": ElasticConfig(),
            "learners": 1,
            "parallel": ParallelConfig(),
            "threads": 1,
            "device": "cpu",
            "strict": False,
            "inference": LocalInference(),
            "actor.groups": 1,
            "env_steps": FOREVER,
            "evaluation.every": FOREVER,
            "evaluation.target": None,
            "learner.learning_starts": min(experiment.learner.learning_starts, capacity, max(batch, 64)),
            "replay.capacity": min(capacity, max(ROWS, batch)),
            "replay.shards": 1,
            "warm_start": None,
            **changes,
        },
    )


def _learners(
    build: Build,
    experiment: Experiment,
    resources: Resources,
    first: Costs,
    began: float,
    feed: Feed | None,
) -> tuple[LearnerCost, ...]:
    """Return what learning costs with each device and number of threads that may pay."""
    found, drawn = [], experiment.learner.updates_per_draw
    if experiment.device != "cuda":
        alone = LearnerCost(device="cpu", threads=1, updates_per_draw=drawn, seconds=first.update * first.updates)
        found.append(alone)
        doubled = takewhile(lambda threads: threads <= resources.cores, (2**power for power in range(1, 16)))
        for threads in sorted({*doubled, experiment.threads} - {1}):
            if first.update <= THREADS_PAY_S or _late(began):
                break
            cost = _timed(build, arranged(experiment, threads=threads))
            found.append(alone.replace(threads=threads, seconds=cost.update * cost.updates))
    if resources.gpu and experiment.device != "cpu":
        found += _on_gpu(build, experiment, first, feed)
    return tuple(found)


def _on_gpu(build: Build, experiment: Experiment, first: Costs, feed: Feed | None) -> Iterator[LearnerCost]:
    """Yield what learning costs on a GPU, for each number of batches that may be drawn at once."""
    drawn = experiment.learner.updates_per_draw
    if feed is None:
        cost = _timed(build, arranged(experiment, device="cuda"))
        yield LearnerCost(device="cuda", threads=1, updates_per_draw=drawn, seconds=cost.update * cost.updates)
        return
    for updates in (drawn, AT_ONCE) if drawn < AT_ONCE and _may_draw_at_once(experiment) else (drawn,):
        fed = feed(updates)
        yield LearnerCost(
            device="cuda",
            threads=1,
            updates_per_draw=updates,
            seconds=fed.update * first.updates,
            replay=fed.store + fed.draw * first.updates,
            batch_message=fed.message,
        )


def _may_draw_at_once(experiment: Experiment) -> bool:
    """Return whether several batches at once are allowed, and change nothing but when they are drawn."""
    if experiment.replay.sampler.kind != "uniform":
        return False  # priorities would be written back later
    try:
        with_changes(experiment, {"learner.updates_per_draw": AT_ONCE})
    except ConfigError:
        return False
    return True


def _steps_elsewhere(experiment: Experiment) -> bool:
    """Return whether environments step outside the actor's own thread, so that a second group can be acted for."""
    env = experiment.env
    if not isinstance(experiment.agent, ReplayAgent) or experiment.actor.envs == 1:
        return False  # rollouts are of all environments at once
    return env.kind in ("atari", "envpool") or getattr(env, "vectorisation", "sync") != "sync"


def _two_groups(build: Build, experiment: Experiment, first: Costs) -> float:
    """Return the length of an actor's tick with two groups of environments, as a part of that with one."""
    cost = _timed(build, arranged(experiment, **{"actor.groups": 2}))
    return cost.actor / first.actor


def _timed(build: Build, experiment: Experiment) -> Costs:
    """Return what the experiment costs inline."""
    with running(build, experiment) as rig:
        on_gpu, rounds, shares = experiment.device == "cuda", [], []
        for _ in range(ROUNDS):
            shares.append(core_share(LOOK_S))
            rounds.append(play(rig, PIECE_S / ROUNDS, on_gpu))
    total = functools.reduce(operator.add, rounds)
    agent, period = experiment.agent, experiment.learner.train_period
    slept = 0.0 if on_gpu else min(shares) * total.wall - total.cpu
    return Costs(
        actor=min((one.actor / one.steps for one in rounds if one.steps), default=total.actor),
        slept=slept / max(total.steps, 1) if slept > SLEEPS * total.actor else 0.0,
        replay=total.replay / max(total.steps, 1),  # not by rounds: some draw fewer batches for their steps
        update=min(one.learner / max(one.updates, 1) for one in rounds),
        beside=max(0.0, total.cpu - total.wall) / max(total.steps, 1),
        cpu_share=min(1.0, total.cpu / max(total.wall, 1e-9)),
        core_share=min(shares),
        updates=1 / period if isinstance(agent, ReplayAgent) else total.updates / max(total.steps, 1),
    )
