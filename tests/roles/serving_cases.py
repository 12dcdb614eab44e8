"""Servers and workers joined by the edges of placement inline, for tests that step them in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from role_cases import SPEC, Edge
from test_lives import Keep

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.gradients import GradientPush
from qfleet.core.role import DONE, Idle
from qfleet.core.types import Batch
from qfleet.core.usercode import UserCode
from qfleet.parallel.compression.config import NoCompressionConfig
from qfleet.parallel.serving import ServerConfig
from qfleet.roles.gradient_worker import GradientWorker, WorkerHandles
from qfleet.roles.learner_setup import LearnerConfig, LearnerSetup
from qfleet.roles.parameter_server import ParameterServer, ServerHandles
from qfleet.roles.serving_setup import ServingSetup, first_network
from qfleet.runtime.inline import LocalLatest, LocalStream, LocalSubscriber


def learner_setup(**changes: Any) -> LearnerSetup:
    setup = LearnerSetup(
        learner=LearnerConfig(),
        network=MlpConfig(hidden=(8,)),
        agent=ReplayAgent(),
        optim=AdamConfig(),
        spec=SPEC,
        seed=0,
        total_updates=100,
        evaluate_every=1000,
        env_steps=10_000,
        device="cpu",
        group=None,
        warm_start=None,
        warm_start_part="all",
        code=UserCode(),
        accel=AccelConfig(kernels="off"),  # the others' steps are rounded in another way than the servers'
    )
    return dataclasses.replace(setup, **changes)


def first_parameters(setup: LearnerSetup) -> np.ndarray:
    return FlatParameters(first_network(setup)[0]).parameters.numpy().copy()


def same(message: Any) -> Any:
    return message


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """What one of several ranks gets of a batch."""

    def part(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: leaf[rank::ranks] for name, leaf in value.items()}
        return value[rank::ranks] if isinstance(value, np.ndarray) else value

    return dataclasses.replace(batch, **{f.name: part(getattr(batch, f.name)) for f in dataclasses.fields(batch)})


class Fleet:
    """S servers and W workers, of which each has a stream of batches, or several in `feeds`."""

    def __init__(
        self,
        workers: int = 1,
        servers: int = 1,
        keeps: bool = False,
        compression: Any = None,
        stream: Callable[[int], LocalStream] = lambda worker: LocalStream(2, same),
        learner: LearnerSetup | None = None,
        feeds: list[list[LocalStream]] | None = None,
        **serving: Any,
    ) -> None:
        self.learner = learner or learner_setup()
        self.config = ServerConfig(servers=servers, **serving)
        self._feeds = feeds or [[LocalStream(1000, same)] for _ in range(workers)]
        self.batches = [streams[0] for streams in self._feeds]
        self.pushes = [[stream(worker) for _ in range(servers)] for worker in range(workers)]
        self.latest = [LocalLatest(same) for _ in range(servers)]
        names = ("weights", "models", "events", "env_steps", "updates", "priorities", "server_events")
        self.edges = {name: Edge(capacity=10_000) for name in names}
        self._compression = compression or NoCompressionConfig()
        self._keeps = keeps
        self.servers = [self._server(index) for index in range(servers)]
        self.workers = [self._worker(index) for index in range(workers)]

    def _setup(self, index: int) -> ServingSetup:
        return ServingSetup(self.config, self.learner, index, len(self.batches), self._compression)

    def _server(self, index: int) -> ParameterServer:
        handles = ServerHandles(
            gradients=tuple(streams[index] for streams in self.pushes),
            slices=self.latest[index],
            events=self.edges["server_events"],
            score=Edge(),
            keep=Keep() if self._keeps else None,
        )
        return ParameterServer(self._setup(index), handles)

    def _worker(self, index: int) -> GradientWorker:
        first = index == 0
        handles = WorkerHandles(
            batches=tuple(self._feeds[index]),
            priorities=tuple(self.edges["priorities"] for _ in self._feeds[index]),
            gradients=tuple(self.pushes[index]),
            slices=tuple(LocalSubscriber(value) for value in self.latest),
            weights=self.edges["weights"] if first else None,
            models=self.edges["models"] if first else None,
            events=self.edges["events"],
            score=Edge(),
            env_steps=self.edges["env_steps"],
            updates=self.edges["updates"] if first else Edge(),
            keep=Keep() if self._keeps else None,
        )
        return GradientWorker(self._setup(index), handles)

    @property
    def roles(self) -> list[Any]:
        return [*self.workers, *self.servers]

    def run(self, most: int = 1000) -> None:
        """Step all in turn until none can go on."""
        for _ in range(most):
            statuses = [role.step() for role in self.roles]
            if all(isinstance(status, Idle) for status in statuses):
                return
        raise AssertionError("they never came to rest")

    def finish(self, most: int = 1000) -> None:
        """Close the batches and step all until each is done."""
        for stream in self.batches:
            stream.close()
        left = list(self.roles)
        for _ in range(most):
            left = [role for role in left if role.step() != DONE]
            if not left:
                return
        raise AssertionError(f"{[role.step() for role in left]} were not done")

    def restart_server(self, index: int) -> None:
        old = self.servers[index]
        old._handles.keep.life += 1
        self.servers[index] = ParameterServer(old._setup, old._handles)

    def restart_worker(self, index: int) -> None:
        old = self.workers[index]
        old._handles.keep.life += 1
        fresh = tuple(LocalSubscriber(value) for value in self.latest)  # a new process has seen nothing
        self.workers[index] = GradientWorker(old._setup, dataclasses.replace(old._handles, slices=fresh))

    @property
    def parameters(self) -> np.ndarray:
        return np.concatenate([server._parameters.numpy() for server in self.servers])

    @property
    def versions(self) -> list[int]:
        return [server._books.version for server in self.servers]


def feed(fleet: Fleet, batches: Iterable[Batch]) -> None:
    """Give every worker its part of each batch, as a replay shard does in mode sync."""
    for batch in batches:
        drawn = dataclasses.replace(batch, draw=fleet.batches[0].sent() + 1)
        for rank, stream in enumerate(fleet.batches):
            stream.send(part_of(drawn, rank, len(fleet.batches)))


def push(worker: int, sequence: int, values: np.ndarray, version: int = 0) -> GradientPush:
    return GradientPush(worker, sequence, version, [torch.from_numpy(np.asarray(values, np.float32))])
