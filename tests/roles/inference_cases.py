"""Small servers and actors for the tests of inference, with a clock that is set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from role_cases import SPEC, Edge

from qfleet.accel.config import AccelConfig
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.recurrent import MemoryConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN, EnvSpec
from qfleet.core.types import InferenceRequest, Version, Weights
from qfleet.core.usercode import UserCode
from qfleet.roles.inference_server import InferenceHandles, InferenceServer, InferenceSetup, ServedInference
from qfleet.roles.weight_store import snapshot

NETWORK = MlpConfig(hidden=(8,), activation="tanh")
PLAIN_AGENT = ReplayAgent()
RECURRENT = ReplayAgent(memory=MemoryConfig(hidden=4, length=4, burn_in=2, period=2))


@dataclass
class Clock:
    """Stands in for the module `time`."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Wires:
    """The edges of one server."""

    requests: list[Edge] = field(default_factory=list)
    replies: list[Edge] = field(default_factory=list)
    weights: Edge = field(default_factory=Edge)
    orders: Edge = field(default_factory=Edge)


def wires(clients: int, capacity: int = 2) -> Wires:
    return Wires([Edge(capacity=capacity) for _ in range(clients)], [Edge(capacity=capacity) for _ in range(clients)])


def server(
    edges: Wires, rows: int, agent: ReplayAgent = PLAIN_AGENT, spec: EnvSpec = SPEC, **inference: Any
) -> InferenceServer:
    setup = InferenceSetup(
        inference=ServedInference(**inference),
        spec=spec,
        network=NETWORK,
        agent=agent,
        optim=AdamConfig(),
        accel=AccelConfig(),
        seed=0,
        index=0,
        rows=rows,
        device="cpu",
        code=UserCode(),
    )
    handles = InferenceHandles(tuple(edges.requests), tuple(edges.replies), edges.weights, orders=edges.orders)
    return InferenceServer(setup, handles)


def request(sequence: int, rng: np.random.Generator, rows: int = 3) -> InferenceRequest:
    return InferenceRequest(sequence, {PLAIN: rng.normal(size=(rows, 3)).astype(np.float32)})


def weights_of(seed: int, number: int, agent=PLAIN_AGENT, spec: EnvSpec = SPEC) -> Weights:
    return snapshot(FlatParameters(build_network(NETWORK, agent, spec, seed=seed)), Version(0, number), 0)
