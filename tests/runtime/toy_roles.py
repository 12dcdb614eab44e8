"""Small roles for the placement tests, in a module that child processes can import."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qfleet.core.errors import ConfigError, EnvironmentFault, PartLost
from qfleet.core.protocols import Counter, Keep, Placement, Publisher, Receiver, Sender, Subscriber
from qfleet.core.role import DONE, WORKED, Idle, Role, State, Status
from qfleet.core.saving import Saving
from qfleet.core.types import Priorities, Version, Weights
from qfleet.parallel.gradsync import GradientGroup
from qfleet.runtime.graph import Graph


def item(number: int, size: int) -> Priorities:
    return Priorities(
        index=np.full(size, number, np.int64),
        generation=np.arange(number % 5, dtype=np.int64),
        priority=np.full((size, 2), number, np.float32),
    )


def weights(number: int, size: int) -> Weights:
    flat = np.full(size, number, np.float32)
    return Weights(Version(0, number), flat, zlib.crc32(flat.data))


@dataclass(frozen=True)
class Settings:
    count: int = 0
    size: int = 8
    growth: int = 0
    """How much larger each message is than the one before."""
    pace_s: float = 0.0
    fault: str = ""
    fault_at: int = 0
    rendezvous: str = ""
    rank: int = 0
    ranks: int = 1


@dataclass
class Handles:
    inlet: Receiver[Any] | None = None
    outlet: Sender[Any] | None = None
    publisher: Publisher[Any] | None = None
    subscriber: Subscriber[Any] | None = None
    counter: Counter | None = None
    keep: Keep | None = None


class Toy(Role):
    """Has a position that survives a checkpoint."""

    def __init__(self, settings: Settings, handles: Handles) -> None:
        self.settings, self.handles = settings, handles
        self.position = 0

    def metrics(self) -> dict[str, float]:
        return {"position": float(self.position), "threads": float(torch.get_num_threads())}

    def state_dict(self) -> State:
        return {"position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]


class Producer(Toy):
    """Sends `count` numbered messages, then closes."""

    kind = "producer"

    def step(self) -> Status:
        outlet = self.handles.outlet
        assert outlet is not None
        if self.position == self.settings.count:
            outlet.close()
            return DONE
        if not outlet.ready():
            return Idle("room", (outlet,))
        outlet.send(item(self.position, self.settings.size + self.settings.growth * self.position))
        self.position += 1
        if self.handles.counter is not None:
            self.handles.counter.add(1)
        return Idle("pace", deadline=self.settings.pace_s) if self.settings.pace_s else WORKED


class Relay(Toy):
    """Passes messages on, in order."""

    kind = "relay"

    def step(self) -> Status:
        inlet, outlet = self.handles.inlet, self.handles.outlet
        assert inlet is not None
        assert outlet is not None
        if not outlet.ready():
            return Idle("room", (outlet,))
        message = inlet.receive()
        if message is not None:
            outlet.send(message)
            self.position += 1
            return WORKED
        if inlet.exhausted():
            outlet.close()
            return DONE
        return Idle("input", (inlet,))


class Consumer(Toy):
    """Checks that messages are whole and come in order, each once; ends with the stream."""

    kind = "consumer"

    def step(self) -> Status:
        inlet = self.handles.inlet
        assert inlet is not None
        message = inlet.receive()
        if message is None:
            return DONE if inlet.exhausted() else Idle("input", (inlet,))
        expected = item(self.position, self.settings.size + self.settings.growth * self.position)
        for name in ("index", "generation", "priority"):
            np.testing.assert_array_equal(getattr(message, name), getattr(expected, name))
            assert getattr(message, name).flags.c_contiguous
            assert getattr(message, name).flags.aligned
        self.position += 1
        if self.handles.counter is not None:
            self.handles.counter.add(1)
        return WORKED


class Stuck(Toy):
    """Never takes what is sent to it."""

    kind = "stuck"

    def step(self) -> Status:
        return Idle("nothing", deadline=0.01)


class Blocked(Toy):
    """Stays inside one step for an hour."""

    kind = "blocked"

    def step(self) -> Status:
        self.phase = "thinking"
        time.sleep(3600)
        return WORKED


class Painter(Toy):
    """Publishes `count` values; each is one number all over, so that a torn one shows."""

    kind = "painter"

    def step(self) -> Status:
        assert self.handles.publisher is not None
        if self.position == self.settings.count:
            return DONE
        self.position += 1
        size = self.settings.size + self.settings.growth * self.position
        self.handles.publisher.publish(weights(self.position, size))
        return Idle("pace", deadline=self.settings.pace_s) if self.settings.pace_s else WORKED


class Viewer(Toy):
    """Checks that values are whole and never go back; ends with the last one."""

    kind = "viewer"

    def step(self) -> Status:
        assert self.handles.subscriber is not None
        seen = self.handles.subscriber.latest()
        if seen is None:
            return Idle("news", (self.handles.subscriber,), deadline=0.001)
        assert seen.version.number > self.position, f"{seen.version.number} after {self.position}"
        assert zlib.crc32(seen.flat.data) == seen.checksum, "torn"
        assert (seen.flat == seen.version.number).all(), "torn"
        self.position = seen.version.number
        return DONE if self.position == self.settings.count else WORKED


class Faulty(Toy):
    """Works until `fault_at`, then fails in the way its settings say."""

    kind = "faulty"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        if settings.fault == "build":
            raise ValueError("cannot be made")
        if settings.fault == "settings":
            raise ConfigError("tensor 3 does not divide 64")

    def step(self) -> Status:
        self.position += 1
        if self.position == self.settings.fault_at:
            if self.settings.fault == "raise":
                raise ValueError("boom")
            if self.settings.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.settings.fault == "exit":
                os._exit(7)
        return Idle("pace", deadline=0.001)


class Rank(Toy):
    """Sums numbers with its peers in every step, without end."""

    kind = "rank"

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        self._group: GradientGroup | None = None

    def step(self) -> Status:
        if self._group is None:
            self._group = GradientGroup(self.settings.rank, self.settings.ranks, self.settings.rendezvous, 30.0)
        total = self._group.all_reduce_(torch.ones(1, dtype=torch.float64))
        assert total.item() == self.settings.ranks
        self.position += 1
        return WORKED


class Leader(Stuck):
    """Has begun processes that took so long."""

    kind = "leader"

    def helpers_cpu_s(self) -> float:
        return 1234.0


class Kept(Toy):
    """Has a position that survives its death, and whatever else its settings say."""

    def __init__(self, settings: Settings, handles: Handles) -> None:
        super().__init__(settings, handles)
        assert handles.keep is not None
        self.keep = handles.keep
        self.position = (self.keep.committed() or {"position": 0})["position"]
        self.again = 0
        if settings.fault == "build" and self.keep.life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if settings.fault == "slow build":
            time.sleep(4.0)
        if settings.fault == f"environment in life {self.keep.life}, being built":
            raise EnvironmentFault("the robot cannot stand up.")
        if settings.fault == "segfault":
            ctypes.string_at(0)
        if settings.fault == "exit":
            os._exit(9)
        if settings.fault == "children":
            helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            self.keep.array("helpers", (8,), np.int64)[self.keep.life] = helper.pid

    def metrics(self) -> dict[str, float]:
        helpers = self.keep.array("helpers", (8,), np.int64)
        return {**super().metrics(), "life": self.keep.life, "again": self.again} | {
            f"helper{life}": float(pid) for life, pid in enumerate(helpers)
        }

    def moved(self) -> None:
        if self.position == 5 and self.settings.fault.startswith("environment") and self.keep.life == 0:
            raise EnvironmentFault("the robot fell over.")
        self.position += 1
        self.keep.commit({"position": self.position})

    def state_dict(self) -> State:
        if self.settings.fault == "save" and self.keep.life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().state_dict()

    def load_state_dict(self, state: State) -> None:
        if self.settings.fault == "restore" and self.keep.life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_state_dict(state)
        self.keep.commit(state)


class KeptProducer(Kept):
    """Sends numbered messages; one that it sent and did not note before it died is sent again."""

    kind = "kept_producer"

    def step(self) -> Status:
        outlet = self.handles.outlet
        assert outlet is not None
        if self.position == self.settings.count:
            outlet.close()
            return DONE
        if not outlet.ready():
            return Idle("room", (outlet,))
        outlet.send(item(self.position, self.settings.size))
        self.moved()
        return Idle("pace", deadline=self.settings.pace_s) if self.settings.pace_s else WORKED


class KeptConsumer(Kept):
    """Notes each message once, drops what comes again, and fails when one is missing."""

    kind = "kept_consumer"

    def step(self) -> Status:
        inlet = self.handles.inlet
        assert inlet is not None
        message = inlet.receive()
        if message is None:
            return DONE if inlet.exhausted() else Idle("input", (inlet,))
        number = int(message.index[0])
        np.testing.assert_array_equal(message.priority, item(number, self.settings.size).priority)
        assert number <= self.position, f"{number} came and {self.position} did not"
        if number < self.position:
            self.again += 1
        else:
            self.moved()
        return WORKED


def save(placement: Placement, directory: Path) -> None:
    """Take the states of all roles, and wait until they are written; once more if one dies meanwhile."""
    writing = placement.save(directory)
    saving = Saving(0, lambda: writing.finish() or directory, writing.abandon)
    while not saving.done:
        placement.attend(0.01)
    try:
        saving.path()
    except PartLost:
        save(placement, directory)


def kept_pipeline(count: int, *, pace_s: float = 0.0, producer_fault: str = "", consumer_fault: str = "") -> Graph:
    """Return producer -> consumer, both with a keep."""
    graph = Graph()
    outlet, inlet = graph.stream("only", 3, views=True)
    settings = Settings(count=count, size=100, pace_s=pace_s)
    producer, consumer = (
        dataclasses.replace(settings, fault=producer_fault),
        dataclasses.replace(settings, fault=consumer_fault),
    )
    graph.add(KeptProducer, producer, Handles(outlet=outlet, keep=graph.keep("producer")))
    graph.add(KeptConsumer, consumer, Handles(inlet=inlet, keep=graph.keep("consumer")))
    return graph


def pipeline(count: int, capacity: int = 4, *, size: int = 8, growth: int = 0, pace_s: float = 0.0) -> Graph:
    """Return producer -> relay -> consumer, and a counter that all but the relay add to."""
    graph = Graph()
    first_out, first_in = graph.stream("first", capacity)
    second_out, second_in = graph.stream("second", capacity)
    settings = Settings(count=count, size=size, growth=growth, pace_s=pace_s)
    graph.add(Producer, settings, Handles(outlet=first_out, counter=graph.counter("messages")))
    graph.add(Relay, settings, Handles(inlet=first_in, outlet=second_out))
    graph.add(Consumer, settings, Handles(inlet=second_in, counter=graph.counter("messages")))
    return graph
