"""Chooses the actions of an actor's environments by the values of an inference server; chance and memory stay here.

It has the methods of `roles.local.LocalActing`, but what is asked is answered some time later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.exploration import choose
from qfleet.algo.sequences import stored
from qfleet.core.protocols import Receiver, Sender, Waitable
from qfleet.core.role import State
from qfleet.core.types import Bools, Floats, InferenceReply, InferenceRequest, Ints, Leaves, Version
from qfleet.roles.acting import Choice

_LIFE = 2**40
"""Requests of one life at most: a later life counts from the next multiple, and knows answers to a former one by it."""


@dataclass
class Asked:
    """A request that is away, or answered and not used yet."""

    line: int
    """Which pair of streams it takes."""
    request: InferenceRequest
    mask: Bools | None  # [K, A]
    envs: Ints  # [K]
    sent_at: float | None = None
    """When it was last sent; None while there was no room for it."""
    reply: InferenceReply | None = None


class ServedActing:
    """Acts for parts of the environments, in the order in which they were asked for.

    Each pair of streams to a server and back carries one request at a time.
    """

    def __init__(
        self,
        agent: ReplayAgent,
        envs: int,
        requests: tuple[Sender[InferenceRequest], ...],
        replies: tuple[Receiver[InferenceReply], ...],
        life: int,
        resend_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `envs` environments of an actor in its `life`; ask again what is not answered after `resend_s`."""
        self._requests, self._replies = requests, replies
        self._clock, self._resend_s = clock, resend_s
        self.memory: Floats = np.zeros((envs, 0 if agent.memory is None else 2 * agent.memory.hidden + 1), np.float32)
        """What is remembered [E, S] of the episodes; S is 0 without memory."""
        self._asked: deque[Asked] = deque()
        self._sequence = life * _LIFE
        self.version = Version()
        """The weights behind the last choice."""
        if life:
            self._discard()

    @property
    def room(self) -> bool:
        """Whether one more part can be asked for."""
        return len(self._asked) < len(self._requests)

    @property
    def asked(self) -> Ints:
        """The environments that were asked for and not acted in yet."""
        return np.concatenate([np.zeros(0, np.int64), *(asked.envs for asked in self._asked)])

    @property
    def wake_on(self) -> tuple[Waitable, ...]:
        """What to wait on when nothing is answered."""
        unsent = [self._requests[asked.line] for asked in self._asked if asked.sent_at is None]
        return (*self._replies, *unsent)

    def refresh(self) -> None:
        """Do nothing: the server follows the weights."""

    def ask(self, observation: Leaves, mask: Bools | None, envs: Ints) -> None:
        """Ask for the values of observations [K, ...] of environments `envs` [K]; only allowed while there is room."""
        line = min(set(range(len(self._requests))) - {asked.line for asked in self._asked})
        state = self.memory[envs] if self.memory.shape[1] else None
        request = InferenceRequest(self._sequence, observation, state)
        self._asked.append(Asked(line, request, mask, envs))
        self._sequence += 1
        self._send(self._asked[-1])

    def answered(self) -> Ints | None:
        """Return the environments that were asked for first if their values are here; asks again what is overdue."""
        for asked in self._asked:
            self._look(asked)
        return self._asked[0].envs if self._asked and self._asked[0].reply is not None else None

    def act(self, epsilon: Floats, rng: np.random.Generator) -> Choice:
        """Choose for the environments [K] that `answered` returned."""
        asked = self._asked.popleft()
        assert asked.reply is not None, "act() before answered()"
        reply, self.version = asked.reply, asked.reply.version
        action = choose(reply.q, epsilon, asked.mask, rng)
        if reply.state is None:
            return Choice(action, reply.q, {})
        extras = stored(self.memory[asked.envs])
        self.memory[asked.envs] = reply.state
        self.memory[asked.envs, -1] = action + 1
        return Choice(action, reply.q, extras)

    def forget(self, envs: Ints) -> None:
        """Begin anew in some environments: their episode ended or broke off; what was asked for them counts no more."""
        self.memory[envs] = 0
        self._asked = deque(asked for asked in self._asked if not np.isin(asked.envs, envs).any())

    def close(self) -> None:
        """Tell the server that nothing more will be asked."""
        for stream in self._requests:
            stream.close()

    def _discard(self) -> None:
        """Throw away what was answered to a former life: this one may not ask for long, and the server needs room."""
        for stream in self._replies:
            while stream.receive() is not None:
                pass

    def _look(self, asked: Asked) -> None:
        """Take a request's answer if it has come; other answers are to what a former life or attempt asked."""
        while asked.reply is None and (reply := self._replies[asked.line].receive()) is not None:
            if reply.sequence == asked.request.sequence:
                asked.reply = reply
        if asked.reply is None:
            self._send(asked)

    def _send(self, asked: Asked) -> None:
        """Send a request if it was not sent lately and there is room."""
        now, stream = self._clock(), self._requests[asked.line]
        if (asked.sent_at is None or now >= asked.sent_at + self._resend_s) and stream.ready():
            stream.send(asked.request)
            asked.sent_at = now

    def state_dict(self) -> State:
        """Return what is remembered, and what was asked."""
        asked = [[a.line, a.request, a.mask, a.envs, a.sent_at is not None, a.reply] for a in self._asked]
        served = {"memory": self.memory, "asked": asked, "sequence": self._sequence, "version": self.version}
        return {"served": served}

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
        served, now = state["served"], self._clock()
        self.memory = np.array(served["memory"])
        self._sequence, self.version = max(self._sequence, served["sequence"]), served["version"]
        self._asked = deque(
            Asked(line, request, mask, envs, now if sent else None, reply)
            for line, request, mask, envs, sent, reply in served["asked"]
        )
