"""What the process of one environment does: waits for its bell, steps or resets, fills its slot, and rings."""

from __future__ import annotations

import importlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import QfleetError
from qfleet.core.types import Bools, Leaves
from qfleet.envs.faults import raised
from qfleet.envs.loop import Environment, replay
from qfleet.envs.slots import Slots
from qfleet.envs.spaces import Layout, Misfit

STEP, RESET, REPLAY, RENDER = b"s", b"r", b"p", b"v"
"""What a worker is asked: to take the action in its slot; to begin an episode from the seed there; to play a journal
(the seed in the slot, the actions in the message); to draw its environment."""
BUILT, DONE, RAISED, BROKE = b"b", b"d", b"x", b"f"
"""What it says: the environment is made; the slot, or the message, holds the result; the environment raised (and the
process ends); the environment broke its contract."""

_HEAD = struct.Struct("<cI")
_SHAPE = struct.Struct("<3I")
_NOTED_S = 0.2
"""How old the processor time in the slot of a working environment may get."""


def tell(bell: socket.socket, code: bytes, content: bytes = b"") -> None:
    """Send one message."""
    bell.sendall(_HEAD.pack(code, len(content)) + content)


def hear(bell: socket.socket) -> tuple[bytes, bytes] | None:
    """Return the next message as (code, content), or None when the other side is gone."""
    head = _exactly(bell, _HEAD.size)
    if head is None:
        return None
    code, length = _HEAD.unpack(head)
    content = _exactly(bell, length) if length else b""
    return None if content is None else (code, content)


def read_image(content: bytes) -> NDArray[np.uint8] | None:
    """Return the image [height, width, 3] that a worker sent, if it had one."""
    if not content:
        return None
    return np.frombuffer(content, np.uint8, offset=_SHAPE.size).reshape(_SHAPE.unpack_from(content)).copy()


def work(bell: socket.socket, index: int, make: Callable[[], Environment], slots: Slots, layout: Layout) -> None:
    """Be environment `index` until the bell is closed; whatever the environment raises is said, and ends this."""
    worker: Worker | None = None
    doing = "its constructor"
    try:
        worker = Worker(make(), index, slots, layout)
        tell(bell, BUILT)
        while (heard := hear(bell)) is not None:
            doing = {STEP: "step()", RESET: "reset()", REPLAY: "replaying its journal", RENDER: "render()"}[heard[0]]
            tell(bell, *worker.obey(*heard))
    except QfleetError as error:
        tell(bell, RAISED, str(error).encode())
    except Exception as error:
        tell(bell, RAISED, raised(doing, error).encode())
    finally:
        if worker is not None:
            worker.env.close()


class Worker:
    """One environment and its slot."""

    def __init__(self, env: Environment, index: int, slots: Slots, layout: Layout) -> None:
        self.env = env
        self._index, self._slots, self._layout = index, slots, layout
        self._table: list[Any] = list(layout.table)
        self._note_due = 0.0

    def obey(self, code: bytes, content: bytes) -> tuple[bytes, bytes]:
        """Do what is asked; returns what to say."""
        answer = self._answer(code, content)
        now = time.monotonic()
        if now >= self._note_due:
            self._note_due = now + _NOTED_S
            self._slots.cpu_s[self._index] = time.process_time()
        return answer

    def _answer(self, code: bytes, content: bytes) -> tuple[bytes, bytes]:
        try:
            if code == STEP:
                self._step()
            elif code == RESET:
                self._observe(*self._begin())
            elif code == REPLAY:
                actions = [self._table[number] for number in np.frombuffer(content, np.int16).tolist()]
                self._observe(*replay(self.env, int(self._slots.seed[self._index]), actions))
            else:
                image: Any = self.env.render()
                drawn = isinstance(image, np.ndarray) and image.ndim == 3
                return DONE, _SHAPE.pack(*image.shape) + image.astype(np.uint8).tobytes() if drawn else b""
        except Misfit as misfit:
            return BROKE, str(misfit).encode()
        return DONE, b""

    def _step(self) -> None:
        slots, index = self._slots, self._index
        observation, reward, ended, stopped, info = self.env.step(self._table[slots.action[index]])
        slots.reward[index] = float(reward)
        slots.terminated[index], slots.truncated[index] = ended, stopped
        if ended or stopped:
            # Kept before the reset: many environments write every observation into one buffer.
            self._put(slots.final, slots.final_mask, observation, info)
            observation, info = self._begin()
        self._observe(observation, info)

    def _begin(self) -> tuple[Any, dict[str, Any]]:
        seed = int(self._slots.seed[self._index])
        return self.env.reset(seed=seed if seed >= 0 else None)

    def _observe(self, observation: Any, info: dict[str, Any]) -> None:
        self._put(self._slots.observation, self._slots.mask, observation, info)

    def _put(self, leaves: Leaves, masks: Bools | None, observation: Any, info: dict[str, Any]) -> None:
        for name, value in self._layout.gather([observation]).items():
            leaves[name][self._index] = value[0]
        if masks is not None:
            masks[self._index] = self._layout.mask(observation, info, (self._layout.spec.actions,))


class Maker:
    """A factory with what another process must be told: which module registers an id, or what was registered here."""

    def __init__(self, make: Callable[[], Environment], env_id: str = "") -> None:
        self._make = make
        self._module, _, name = env_id.rpartition(":")
        self._spec = None if self._module else gymnasium.registry.get(name)

    def prepare(self) -> None:
        """Import the environment's modules: what forks many of them does that once for all."""
        if self._module:
            importlib.import_module(self._module)
        if self._spec is not None:
            gymnasium.registry.setdefault(self._spec.id, self._spec)
            if isinstance(self._spec.entry_point, str):
                importlib.import_module(self._spec.entry_point.partition(":")[0])

    def __call__(self) -> Environment:
        """Make the environment."""
        if self._spec is not None:
            gymnasium.registry.setdefault(self._spec.id, self._spec)
        return self._make()


def _exactly(bell: socket.socket, length: int) -> bytes | None:
    """Return so many bytes; None when the other side is gone before."""
    data = bytearray()
    while len(data) < length:
        try:
            more = bell.recv(length - len(data))
        except ConnectionResetError:
            return None
        if not more:
            return None
        data += more
    return bytes(data)
