"""Measures what an experiment costs on this machine: plays it for seconds and times its own roles."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from qfleet.algo.agent import ReplayAgent
from qfleet.control.feeding import FeedCost
from qfleet.control.measurements import Curve, LearnerCost, Measurements, at
from qfleet.control.pieces import (
    act_seconds,
    batch_seconds,
    copy_rate,
    experience_seconds,
    request_seconds,
    stored_bytes,
    tick_seconds,
)
from qfleet.control.prediction import Arrangement, rows_of_message
from qfleet.control.resources import Resources
from qfleet.control.rig import Build, core_share, play, play_beside, running
from qfleet.core.errors import ConfigError
from qfleet.core.spec import EnvSpec
from qfleet.core.usercode import UserCode
from qfleet.experiment import Experiment, with_changes
from qfleet.parallel.plan import ParallelConfig

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
ROWS = 100_000
"""The replay of a measurement is no larger."""
FOREVER = 2**60


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
    say: Say,
    feed: Feed | None = None,
) -> Measurements:
    """Return what the experiment costs here, after at most about `LIMIT_S` seconds. `build` makes a rig.

    `feed` times a GPU's learner as processes feed it, with so many updates for each draw; None where the run in one
    process is to speak for it.
    """
    began, envs = time.perf_counter(), experiment.actor.envs
    costs: dict[int, Costs] = {}
    for size in sorted({max(1, round(envs * factor)) for factor in SIZES}, key=lambda size: (size != envs, size)):
        if costs and _late(began):
            break
        say(f"playing with {size} environments")
        costs[size] = _timed(build, _arranged(experiment, **{"actor.envs": size}))
    say("timing updates, inference and messages")
    first, sizes = costs[envs], sorted(costs)
    learners = _learners(build, experiment, resources, first, began, feed)
    batch = _rows_of_batch(experiment)
    row_bytes, batch_bytes = stored_bytes(spec, batch)
    measured = Measurements(
        env_tick=tuple((size, tick_seconds(experiment, code, size)) for size in sizes),
        act=_acting(experiment, spec, code, (*sizes, 4 * sizes[-1]), "cpu"),
        act_cuda=_acting(experiment, spec, code, (*sizes, 4 * sizes[-1]), "cuda") if resources.gpu else (),
        request_message=tuple((size, request_seconds(spec, size)) for size in sizes),
        actor_tick=tuple((size, size * costs[size].actor) for size in sizes),
        actor_cpu=tuple((size, size * (costs[size].actor + costs[size].beside)) for size in sizes),
        two_groups=_two_groups(build, experiment, first) if _steps_elsewhere(experiment) else None,
        replay=first.replay,
        learners=learners,
        updates_per_step=first.updates,
        batches_per_step=first.updates if first.replay else 0.0,
        experience_message=tuple((n, experience_seconds(spec, n)) for n in (sizes[0], 16 * sizes[-1])),
        batch_message=batch_seconds(spec, batch) if first.replay else 0.0,
        wake=0.0,
        cpu_share=first.cpu_share,
        core_share=first.core_share,
        row_bytes=row_bytes,
        batch_bytes=batch_bytes,
        copy_bytes_per_s=copy_rate() if resources.gpu else None,
    )
    say("playing in processes")
    made: Measurements = measured.replace(wake=_wake(build, experiment, measured, first))
    return made


def _wake(build: Build, experiment: Experiment, measured: Measurements, alone: Costs) -> float:
    """Return what a message costs each end besides packing: processes take more processor time than playing alone.

    That is shared by both ends of all messages, those of experience and the batches.
    """
    beside = play_beside(build, _arranged(experiment, placement="processes"), PIECE_S)
    # On a busy machine the seconds of playing alone were not all its own.
    own = alone.cpu_share * (beside.steps * (alone.actor + alone.replay) + beside.updates * alone.update)
    way = Arrangement(1, experiment.actor.envs, experiment.actor.unroll, 1, measured.learners[0])
    rows = rows_of_message(experiment, way)
    messages, batches = beside.steps / rows, beside.updates if alone.replay else 0
    packing = messages * at(measured.experience_message, rows) + batches * measured.batch_message
    extra = beside.cpu - own - beside.steps * alone.beside - packing
    return max(0.0, extra) / max(2 * messages + 2 * batches / experiment.learner.updates_per_draw, 1.0)


def key_of(experiment: Experiment, code: UserCode, resources: Resources, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what measurements are found by: the machine, and all that decides about the work."""
    parts = ("env", "network", "agent", "optim", "learner", "replay", "accel", "device", "actor")
    tree = experiment.model_dump(mode="json", include=set(parts))
    del tree["replay"]["capacity"], tree["replay"]["shards"], tree["learner"]["learning_starts"]
    own = [one and f"{one.__module__}:{getattr(one, '__qualname__', '')}" for one in (code.env, code.network)]
    return {
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


def _acting(experiment: Experiment, spec: EnvSpec, code: UserCode, sizes: Sequence[int], device: str) -> Curve:
    return tuple((size, act_seconds(experiment, spec, code, size, device)) for size in sizes)


def _late(began: float) -> bool:
    return time.perf_counter() - began > LIMIT_S


def _arranged(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment as one that is played inline, unless changed, learns at once, and never ends."""
    batch, capacity = experiment.learner.batch_size, experiment.replay.capacity
    return with_changes(
        experiment,
        {
            "topology": "pipeline",
            "placement": "inline",
            "address": None,
            "actors": 1,
            "learners": 1,
            "parallel": ParallelConfig(),
            "threads": 1,
            "device": "cpu",
            "strict": False,
            "inference.kind": "local",
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
            cost = _timed(build, _arranged(experiment, threads=threads))
            found.append(alone.replace(threads=threads, seconds=cost.update * cost.updates))
    if resources.gpu and experiment.device != "cpu":
        found += _on_gpu(build, experiment, first, feed)
    return tuple(found)


def _on_gpu(build: Build, experiment: Experiment, first: Costs, feed: Feed | None) -> Iterator[LearnerCost]:
    """Yield what learning costs on a GPU, for each number of batches that may be drawn at once."""
    drawn = experiment.learner.updates_per_draw
    if feed is None:
        cost = _timed(build, _arranged(experiment, device="cuda"))
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
    cost = _timed(build, _arranged(experiment, **{"actor.groups": 2}))
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
    return Costs(
        actor=min((one.actor / one.steps for one in rounds if one.steps), default=total.actor),
        replay=total.replay / max(total.steps, 1),  # not by rounds: some draw fewer batches for their steps
        update=min(one.learner / max(one.updates, 1) for one in rounds),
        beside=max(0.0, total.cpu - total.wall) / max(total.steps, 1),
        cpu_share=min(1.0, total.cpu / max(total.wall, 1e-9)),
        core_share=min(shares),
        updates=1 / period if isinstance(agent, ReplayAgent) else total.updates / max(total.steps, 1),
    )
