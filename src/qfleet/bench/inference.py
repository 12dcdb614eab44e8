"""Where acting is fastest on this machine: by each actor's own network or by a server, in 32 bits or in 16.

Dynamic int8 is not offered: in torch 2.13 it is deprecated, does nothing for convolutions, and slows small layers down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.rounded import Rounded
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import NetworkConfig, build_network
from qfleet.algo.optim import AdamConfig
from qfleet.algo.torsos import MlpConfig, NatureConfig
from qfleet.bench.table import Row
from qfleet.bench.timing import per_second
from qfleet.core.protocols import Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.core.types import InferenceReply, InferenceRequest, Weights
from qfleet.core.usercode import UserCode
from qfleet.roles.inference_server import InferenceHandles, InferenceServer, InferenceSetup, ServedInference
from qfleet.roles.local import LocalActing
from qfleet.roles.served import ServedActing
from qfleet.runtime.graph import Graph
from qfleet.runtime.processes import ProcessPlacement

ACTORS, ENVS = (1, 2, 4), (4, 16, 64)
AGENT = ReplayAgent()


@dataclass(frozen=True)
class Work:
    """What is computed for each observation."""

    name: str
    network: NetworkConfig
    spec: EnvSpec


def _spec(leaf: LeafSpec) -> EnvSpec:
    return EnvSpec(name="bench", observations={PLAIN: leaf}, actions=6)


VECTORS = Work(
    "vectors of 8, two layers of 256", MlpConfig(hidden=(256, 256)), _spec(LeafSpec(shape=(8,), dtype="float32"))
)
PIXELS = Work("84 x 84 x 4 pixels, Nature", NatureConfig(), _spec(LeafSpec(shape=(4, 84, 84), dtype="uint8", stack=4)))


def measure(seconds: float = 2.0) -> list[Row]:
    """Time acting in both number formats, then by local networks and by one server on each device there is."""
    return [*_formats(seconds / 4), *_crossover(seconds)]


def _formats(seconds: float) -> Iterator[Row]:
    for work in (VECTORS, PIXELS):
        for rows in ENVS:
            plain, short = (1000 * values_seconds(work, rows, form, seconds) for form in ("fp32", "bf16"))
            what = f"{work.name}: values of {rows} observations on one core, in bf16 beside fp32"
            yield Row(what, f"{short:.2f} ms", f"{plain:.2f} ms (fp32)", plain / short)


def _crossover(seconds: float) -> Iterator[Row]:
    devices: list[Literal["cpu", "cuda"]] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for work in (VECTORS, PIXELS):
        for actors in ACTORS:
            for envs in ENVS:
                local = actions_per_second(work, actors, envs, "local", seconds)
                for device in devices:
                    rate = actions_per_second(work, actors, envs, device, seconds)
                    what = f"{work.name}: {actors} actors of {envs} environments, served on {device} beside local"
                    yield Row(what, f"{rate:,.0f} actions/s", f"{local:,.0f} actions/s (local)", rate / local)


def values_seconds(work: Work, rows: int, precision: Literal["fp32", "bf16"], seconds: float) -> float:
    """Return the time in which one core values so many observations."""
    network = build_network(work.network, AGENT, work.spec, seed=0).explore()
    values = Rounded(network, precision, foreign=False).values
    observation = {name: torch.from_numpy(leaf) for name, leaf in _observations(work, rows).items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return 1 / per_second(lambda: values(observation), seconds)
    finally:
        torch.set_num_threads(threads)


def actions_per_second(
    work: Work, actors: int, envs: int, where: Literal["local", "cpu", "cuda"], seconds: float
) -> float:
    """Return how often actors in processes of their own choose, by their own networks or by one server on a device.

    Their environments cost nothing, so this is the most that any can be given.
    """
    graph, served = Graph(), where != "local"
    requests = [graph.stream(f"requests-{index}", capacity=2, views=True) for index in range(actors if served else 0)]
    replies = [graph.stream(f"replies-{index}", capacity=2) for index in range(actors if served else 0)]
    graph.publisher("weights")
    if served:
        setup = InferenceSetup(
            ServedInference(),
            work.spec,
            work.network,
            AGENT,
            AdamConfig(),
            AccelConfig(),
            0,
            0,
            actors * envs,
            where,
            UserCode(),
        )
        inlets, outlets = tuple(receiver for _, receiver in requests), tuple(sender for sender, _ in replies)
        graph.add(InferenceServer, setup, InferenceHandles(inlets, outlets, graph.subscriber("weights")))
    for index in range(actors):
        asking = AskerHandles(
            graph.subscriber("weights"),
            (requests[index][0],) if served else (),
            (replies[index][1],) if served else (),
        )
        graph.add(Asker, AskerSetup(work, envs, seconds), asking)
    placement = ProcessPlacement(graph, spawn=(InferenceServer.kind,) if where == "cuda" else ())
    try:
        while not placement.done:
            placement.advance()
        return sum(report.metrics.get("actions_per_s", 0.0) for report in placement.reports())
    finally:
        placement.close()


@dataclass(frozen=True)
class AskerSetup:
    """What an asker is built from."""

    work: Work
    envs: int
    seconds: float


@dataclass(frozen=True)
class AskerHandles:
    """What an asker sees: a server's streams, or none."""

    weights: Subscriber[Weights]
    requests: tuple[Sender[InferenceRequest], ...]
    replies: tuple[Receiver[InferenceReply], ...]


class Asker(Role):
    """Chooses actions for the same observations again and again, as an actor would whose environments take no time."""

    kind = "asker"

    def __init__(self, setup: AskerSetup, handles: AskerHandles) -> None:
        self._setup = setup
        self._acting: LocalActing | ServedActing
        if handles.requests:
            self._acting = ServedActing(AGENT, setup.envs, handles.requests, handles.replies, life=0, resend_s=60.0)
        else:
            network = build_network(setup.work.network, AGENT, setup.work.spec, seed=0)
            compute_by_onednn(network, AccelConfig(), foreign=False)
            rounded = Rounded(network, "fp32", foreign=False)
            self._acting = LocalActing(network, setup.envs, torch.Generator(), handles.weights, rounded)
        self._observation = _observations(setup.work, setup.envs)
        self._envs, self._epsilon = np.arange(setup.envs), np.zeros(setup.envs, np.float32)
        self._rng = np.random.default_rng(0)
        self._began: float | None = None
        self._actions = 0
        self._rate = 0.0

    def step(self) -> Status:
        """Ask, or choose what was asked for."""
        if not len(self._acting.asked):
            self._acting.ask(self._observation, None, self._envs)
        if self._acting.answered() is None:
            return Idle("the inference server has not answered", wake_on=self._acting.wake_on)
        self._acting.act(self._epsilon, self._rng)
        now = time.perf_counter()
        if self._began is None:  # from here on everybody is at work
            self._began = now
            return WORKED
        self._actions += self._setup.envs
        if now < self._began + self._setup.seconds:
            return WORKED
        self._rate = self._actions / (now - self._began)
        self._acting.close()
        return DONE

    def metrics(self) -> dict[str, float]:
        """Return the rate, once it is known."""
        return {"actions_per_s": self._rate}

    def state_dict(self) -> State:
        """Return nothing: a benchmark is not saved."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Do nothing."""


def _observations(work: Work, rows: int) -> dict[str, np.ndarray]:
    leaf = work.spec.observations[PLAIN]
    values = np.random.default_rng(0).integers(256, size=(rows, *leaf.shape))
    return {PLAIN: values.astype(leaf.dtype)}
