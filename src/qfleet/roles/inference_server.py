"""Values observations for many actors at once, so that one large batch takes the place of many small ones.

Receives: InferenceRequests from groups of environments of its actors; Weights and Orders (latest values).
Sends: InferenceReplies, each to the group that asked.
Waits for: requests; a short while for more of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from qfleet.accel.choices import Job, choose
from qfleet.accel.choose import workload
from qfleet.accel.config import AccelConfig
from qfleet.accel.onednn import compute_by_onednn
from qfleet.accel.rounded import Rounded
from qfleet.accel.serving import BatchedValues, Values
from qfleet.algo.agent import ReplayAgent
from qfleet.algo.flat import FlatParameters
from qfleet.algo.networks import NetworkConfig, QNetwork, build_network
from qfleet.algo.optim import OptimConfig
from qfleet.core import seeding
from qfleet.core.config import Config
from qfleet.core.packed import PackedWeights
from qfleet.core.protocols import Keep, Receiver, Sender, Subscriber, Waitable
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.spec import EnvSpec
from qfleet.core.types import InferenceReply, InferenceRequest, Orders, Weights
from qfleet.core.usercode import UserCode
from qfleet.parallel.devices import own_device
from qfleet.roles.batching import Batcher
from qfleet.roles.weight_store import WeightReader

FOR_MORE = "waits for more requests"
"""What a server waits for, as its reports say: the balancer reads it."""


class _ActingConfig(Config):
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of acting's products on a CPU: bf16 is twice as fast for pixels on processors that multiply in it,
    and slower for small networks and on other processors. A GPU follows accel.precision."""


class LocalInference(_ActingConfig):
    """Each actor has a network of its own."""

    kind: Literal["local"] = "local"
    """Selects this inference."""


class ServedInference(_ActingConfig):
    """Servers compute for all actors, which pays where a GPU values many large observations at once."""

    kind: Literal["served"] = "served"
    """Selects this inference."""
    servers: int = Field(default=1, gt=0, le=1024)
    """How many servers share the actors."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where servers compute; auto takes a GPU for pixels if there is one."""
    batch: int = Field(default=256, gt=0, le=1_048_576)
    """Observations that a server computes without waiting for more."""
    deadline_ms: float = Field(default=2.0, ge=0, le=10_000)
    """Milliseconds that an observation waits for others at most, while some actors have not asked."""
    resend_s: float = Field(default=5.0, gt=0)
    """Seconds after which an actor asks again, because a server may have died over its request."""


class AdaptiveInference(ServedInference):
    """Actors have networks of their own and servers as well; the balancer moves all of them to what makes the run
    faster, agents with memory included. Needs agent.kind 'replay', and processes or ray with balance on."""

    kind: Literal["adaptive"] = "adaptive"  # type: ignore[assignment]  # a server's settings, under another name
    """Selects this inference."""
    begins: Literal["local", "served"] = "local"
    """Who computes at first."""


InferenceConfig = Annotated[LocalInference | ServedInference | AdaptiveInference, Field(discriminator="kind")]


@dataclass(frozen=True)
class InferenceSetup:
    """Everything a server is built from, besides its handles."""

    inference: ServedInference
    spec: EnvSpec
    network: NetworkConfig
    agent: ReplayAgent
    optim: OptimConfig
    accel: AccelConfig
    seed: int
    index: int
    rows: int
    """Environments that can ask at the same time."""
    device: str
    code: UserCode
    turn: int | None = None
    """Whose turn it is when the machine's GPUs are dealt out; None where it has the one that others have, too."""


@dataclass(frozen=True)
class InferenceHandles:
    """What a server sees of the run; requests and replies in the same order, one for each group of environments."""

    requests: tuple[Receiver[InferenceRequest], ...]
    replies: tuple[Sender[InferenceReply], ...]
    weights: Subscriber[Weights | PackedWeights]
    keep: Keep | None = None
    """Only tells which life this is: actors ask again what a former one took with it."""
    orders: Subscriber[Orders] | None = None
    """None where nobody balances the run."""
    keyframes: Subscriber[PackedWeights] | None = None
    """What weights are measured from; None where they stand for themselves."""


class InferenceServer(Role):
    """A copy of the network that computes for others."""

    kind = "inference"

    def __init__(self, setup: InferenceSetup, handles: InferenceHandles) -> None:
        self._setup, self._handles = setup, handles
        device = torch.device(own_device(setup.device, setup.turn))
        network = build_network(setup.network, setup.agent, setup.spec, seed=setup.seed, custom=setup.code.network).to(
            device
        )
        network.explore()
        purpose = seeding.of_life("noise", 0 if handles.keep is None else handles.keep.life)
        self._noise = seeding.torch_stream(setup.seed, self.kind, setup.index, purpose, device)
        self._rounded: Rounded | None = None
        """How a network on a CPU is computed."""
        self._weights = WeightReader(FlatParameters(network), handles.weights, handles.keyframes)
        self._compute = BatchedValues(
            network,
            setup.spec.observations,
            setup.spec.actions,
            setup.rows,
            self._noise,
            values=self._fast_values(network, device),
            recorded=device.type == "cuda" and setup.accel.graphs != "off",
        )
        self._batcher = Batcher(setup.inference.batch, setup.inference.deadline_ms / 1000)
        self._answered = [-1] * len(handles.requests)
        self._expected = set(range(len(handles.requests)))
        """The clients that are worth waiting for: not those of environments that rest."""
        self._batches = self._requests = self._rows = 0
        self._waited_s = 0.0

    def _fast_values(self, network: QNetwork, device: torch.device) -> Values | None:
        """Return what values actions in fewer bits: the learner's on a GPU; None where it is the network itself."""
        setup = self._setup
        if device.type == "cpu":
            foreign = setup.code.network is not None
            compute_by_onednn(network, setup.accel, foreign)
            self._rounded = Rounded(network, setup.inference.precision, foreign)
            return self._rounded.values
        if network.recurrent:
            return None
        work = workload(setup.agent, setup.network, setup.optim, setup.spec, setup.code)
        return choose(Job(setup.accel, setup.agent, setup.optim, device, work), network).values(network)

    def step(self) -> Status:
        """Compute what waits, once it is worth while."""
        self._obey()
        self._collect()
        present = [client for client, stream in enumerate(self._handles.requests) if not stream.exhausted()]
        if not len(self._batcher):
            return Idle("no requests", wake_on=self._awaited()) if present else DONE
        seconds = self._batcher.seconds_left(time.monotonic(), self._expected.intersection(present))
        if seconds > 0:
            return Idle(FOR_MORE, wake_on=self._awaited(), deadline=seconds)
        self._answer()
        return WORKED

    def _awaited(self) -> tuple[Waitable, ...]:
        """Return what can bring work: requests, and room for the reply of those whose requests are not looked at."""
        full = [replies for replies in self._handles.replies if not replies.ready()]
        return (*self._handles.requests, *full)

    def _obey(self) -> None:
        """Follow new orders: another deadline, and other environments that rest."""
        orders = None if self._handles.orders is None else self._handles.orders.latest()
        if orders is None:
            return
        if not orders.served:
            self._expected = set()  # who still waits for an answer gets it at once
            return
        setup = self._setup
        self._batcher.deadline_s = orders.deadlines_ms[setup.index] / 1000
        awake = orders.envs[setup.index :: setup.inference.servers]  # as the actors were dealt out
        lines, envs = len(self._answered) // len(awake), setup.rows // len(awake)
        self._expected = {
            actor * lines + line for actor, count in enumerate(awake) for line in range(-(-lines * count // envs))
        }

    def _collect(self) -> None:
        """Take the next request of every client that does not wait already and has room for its answer."""
        for client, stream in enumerate(self._handles.requests):
            while client not in self._batcher and self._handles.replies[client].ready():
                request = stream.receive()
                if request is None:
                    break
                if request.sequence != self._answered[client]:
                    self._lay(client, request)

    def _lay(self, client: int, request: InferenceRequest) -> None:
        """Copy a request into the batch: the message may lie in memory that is used again after this step."""
        rows = len(next(iter(request.observation.values())))
        part = self._batcher.add(client, request.sequence, rows, time.monotonic())
        for name, leaf in request.observation.items():
            self._compute.inputs[name][part] = leaf
        if request.state is not None:
            self._compute.states[part] = request.state

    def _answer(self) -> None:
        """Compute everything that waits with the newest weights."""
        if self._weights.refresh():
            self._renew()
        q, states = self._compute(self._batcher.rows)
        self._batches, self._rows = self._batches + 1, self._rows + self._batcher.rows
        for asked in self._batcher.take():
            state = states[asked.part].copy() if states.shape[1] else None
            reply = InferenceReply(asked.sequence, self._weights.version, q[asked.part].copy(), state)
            self._handles.replies[asked.client].send(reply)
            self._answered[asked.client] = asked.sequence
            self._requests += 1
            self._waited_s += time.monotonic() - asked.since

    def _renew(self) -> None:
        """Compute with the weights as they are now."""
        if self._rounded is not None:
            self._rounded.renew()

    def metrics(self) -> Mapping[str, float]:
        """Return how well requests come together, and how long they take from their arrival to their answer."""
        return {
            "inference_requests": float(self._requests),
            "inference_batches": float(self._batches),
            "inference_rows": float(self._rows),
            "inference_batch": self._rows / max(self._batches, 1),
            "inference_wait_ms": 1000 * self._waited_s / max(self._requests, 1),
        }

    def state_dict(self) -> State:
        """Return the weights, the noise, and what waits; not how long anything took, which differs from run to run."""
        waiting = []
        for asked in self._batcher.waiting:
            observation = {name: leaf[asked.part].copy() for name, leaf in self._compute.inputs.items()}
            state = self._compute.states[asked.part].copy()
            waiting.append([asked.client, InferenceRequest(asked.sequence, observation, state)])
        return {
            "weights": self._weights.state_dict(),
            "noise": self._noise.get_state(),
            "waiting": waiting,
            "answered": list(self._answered),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue."""
        self._weights.load_state_dict(state["weights"])
        self._renew()
        self._noise.set_state(state["noise"])
        for client, request in state["waiting"]:
            self._lay(client, request)
        self._answered = list(state["answered"])
