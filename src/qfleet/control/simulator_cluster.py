"""A cluster to be simulated: how many of each role, what their pieces of work cost, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import Field, ValidationError

from qfleet.control.measurements import Measurements, at
from qfleet.control.parallel_parts import Compression, Link, Work
from qfleet.control.parallel_traffic import ring_seconds, server_seconds, tree_seconds
from qfleet.control.prediction import message_side, request_side
from qfleet.core.config import Config, describe
from qfleet.core.errors import ConfigError
from qfleet.experiment import Experiment

ROWS_EACH = 32
"""Rows of one learner where the run's own batch has fewer than one for each."""


class SimulateOptions(Config):
    """What `--simulate` takes, as name=value with commas between them."""

    actors: int = Field(1000, gt=0, le=10_000)
    """Actors, each on a core of its own."""
    learners: int = Field(8, gt=0, le=1024)
    """Learner ranks, each on a machine of its own."""
    shards: int = Field(0, ge=0, le=1024)
    """Replay shards; 0 for one for each learner."""
    envs: int = Field(0, ge=0, le=65_536)
    """Environments of an actor; 0 for as many as the experiment has."""
    inference: int = Field(0, ge=0, le=1024)
    """Inference servers; 0 where actors compute for themselves."""
    batch: int = Field(0, ge=0)
    """Rows of all learners together; 0 for the experiment's own batch, or 32 rows each where that is too small."""
    mode: Literal["all_reduce", "server_sync", "server_async"] = "all_reduce"
    """How learners share their gradients."""
    collective: Literal["ring", "tree", "faster"] = "faster"
    """How sums travel: around a ring, up and down a tree, or as the faster of both."""
    servers: int = Field(1, gt=0, le=1024)
    """Parameter servers, in the modes that have them."""
    gbits: float = Field(10.0, gt=0)
    """Of every machine's link, each way, in Gbit/s."""
    latency_us: float = Field(50.0, ge=0)
    """Of one message, in microseconds."""
    value_bytes: float = Field(4.0, gt=0, le=4)
    """Of each gradient value on the wire; below 4 for compressed gradients."""
    fanout: int = Field(16, gt=1)
    """Machines that each one hands the weights on to."""
    spread: float = Field(0.1, ge=0, le=1)
    """Standard deviation of a step's and an update's seconds, as a part of them."""
    failure_h: float = Field(0.0, ge=0)
    """Hours between two failures of one machine; 0 for none."""
    recovery_s: float = Field(30.0, ge=0)
    """Seconds that the group of learners, or an actor, is away after a failure."""


@dataclass(frozen=True)
class Cluster:
    """Everything that a simulation depends on; seconds and bytes."""

    actors: int
    rows: int
    """Environment steps of one actor's message."""
    message: float
    """Seconds in which an actor makes one."""
    served: float
    """Share of that in which its inference server is busy for all actors that it serves; 0 without servers."""
    shards: int
    store: float
    """Seconds of a shard for each step that it stores, drawing for the learners included."""
    learners: int
    batch: int
    compute: float
    """Seconds of one rank's part of an update."""
    step: float
    """Seconds of the optimiser, for a server."""
    mode: Literal["all_reduce", "server_sync", "server_async"]
    collective: Literal["ring", "tree", "faster"]
    servers: int
    steps_per_update: float
    """Environment steps of the whole run for each update of a whole batch."""
    publish_period: int
    parameters: int
    value_bytes: float
    row_bytes: int
    """Of one environment step on its way to a shard."""
    batch_bytes: int
    """Of a whole batch on its way to the learners."""
    link: Link
    fanout: int
    spread: float
    failure_s: float = 0.0
    """Seconds between two failures of one machine; 0 for none."""
    recovery_s: float = 0.0
    raised_from: int = 0
    """The run's own batch, where that had too few rows for so many learners; 0 where it had enough."""

    @cached_property
    def exchange(self) -> float:
        """Seconds in which learners share their gradients once, nobody waiting for a busy server."""
        size = self.parameters * self.value_bytes
        if self.mode != "all_reduce":
            own, busy = self.serving
            return max(own, busy) + self.step / self.servers if self.mode == "server_sync" else own
        ring, tree = (seconds(self.link, self.learners, size) for seconds in (ring_seconds, tree_seconds))
        return {"ring": ring, "tree": tree, "faster": min(ring, tree)}[self.collective]

    @property
    def serving(self) -> tuple[float, float]:
        """Seconds in which a worker pushes and pulls, and in which a server's link is busy for all of them."""
        how = Compression("given", self.value_bytes)
        return server_seconds(self.link, self.learners, self.servers, self.parameters, how)

    @cached_property
    def service(self) -> float:
        """Seconds that each server is busy with one worker's gradient: with its bytes, and a step of its slice."""
        return self.serving[1] / self.learners + self.step / self.servers

    @property
    def taking(self) -> float:
        """Seconds of a shard for each step: it stores while the next arrives, and the slower of both counts."""
        return max(self.store, self.row_bytes / self.link.bandwidth)

    @property
    def feeding(self) -> float:
        """Seconds in which a batch travels from all shards to all learners."""
        return self.batch_bytes / min(self.shards, self.learners) / self.link.bandwidth

    @property
    def used_servers(self) -> int:
        """Parameter servers of the mode."""
        return 0 if self.mode == "all_reduce" else self.servers

    @property
    def hops(self) -> int:
        """Machines that weights pass on their way to the last actor."""
        return max(1, math.ceil(math.log(self.actors, self.fanout)))

    @property
    def sent(self) -> float:
        """Bytes that a learner sends and receives for its gradients in one update."""
        size = self.parameters * self.value_bytes
        if self.mode != "all_reduce":
            return size + self.parameters * 4
        ring = ring_seconds(self.link, self.learners, size) <= self.exchange
        return 4 * size * ((self.learners - 1) / self.learners if ring else 1.0) if self.learners > 1 else 0.0


def parse_options(text: str) -> SimulateOptions:
    """Return the options of a text such as "actors=2000,learners=64"; says what is wrong with others."""
    given: dict[str, str] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, sign, value = word.partition("=")
        if not sign or not value:
            raise ConfigError(f"'--simulate' takes name=value with commas between them, not {word!r}")
        if name in given:
            raise ConfigError(f"'--simulate' has {name} twice")
        given[name] = value
    try:
        return SimulateOptions.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"'--simulate': {describe(error, SimulateOptions)}") from None


def cluster_of(experiment: Experiment, measured: Measurements, work: Work, options: SimulateOptions) -> Cluster:
    """Return the cluster that runs the experiment as the options say, each role as fast as it was measured here."""
    batch = options.batch or work.batch
    if options.learners > batch:
        if options.batch:
            raise ConfigError(f"'--simulate': batch {batch} is too small for {options.learners} learners")
        batch = ROWS_EACH * options.learners
    envs, shards = options.envs or experiment.actor.envs, options.shards or options.learners
    rows, period = envs * experiment.actor.unroll, experiment.learner.train_period
    tick, served = _tick(measured, options, envs)
    side = message_side(measured, rows)
    return Cluster(
        actors=options.actors,
        rows=rows,
        message=experiment.actor.unroll * tick + side,
        served=served / tick,
        shards=shards,
        store=measured.replay + side / rows + measured.batch_message * measured.batches_per_step / 2,
        learners=options.learners,
        batch=batch,
        compute=at(work.update, batch / options.learners) - (0.0 if options.mode == "all_reduce" else work.step),
        step=work.step,
        mode=options.mode,
        collective=options.collective,
        servers=options.servers,
        steps_per_update=period * batch / work.batch,
        publish_period=experiment.learner.publish_period,
        parameters=work.parameters,
        value_bytes=options.value_bytes,
        row_bytes=measured.row_bytes,
        batch_bytes=measured.batch_bytes * batch // work.batch,
        link=Link(options.gbits * 1e9 / 8, options.latency_us * 1e-6),
        fanout=options.fanout,
        spread=options.spread,
        failure_s=3600 * options.failure_h,
        recovery_s=options.recovery_s,
        raised_from=work.batch if batch != (options.batch or work.batch) else 0,
    )


def _tick(measured: Measurements, options: SimulateOptions, envs: int) -> tuple[float, float]:
    """Return the seconds of one step of all environments of an actor, and those of them that a server works."""
    tick = at(measured.actor_tick, envs)
    if not options.inference:
        return tick, 0.0
    each = -(-options.actors // options.inference)
    curve = measured.act_cuda or measured.act
    served = at(curve, each * envs) + each * request_side(measured, envs)
    return max(tick - at(measured.act, envs), 0.0) + request_side(measured, envs) + served, served
