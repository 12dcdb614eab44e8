"""Steps ordinary Gymnasium environments in processes of their own; the loss of one costs its episode and no other's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.role import State
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.crew import Crew, Heard
from qfleet.envs.journal import RESEED_EVERY, Journal
from qfleet.envs.loop import rgb_image
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import Layout
from qfleet.envs.vector import Doubles, Moment, Tick, VectorEnv
from qfleet.envs.worker import BROKE, RENDER, REPLAY, RESET, STEP, Maker, read_image

_REMEDY = (
    "mend what fails there; a higher env.step_timeout helps where a step or reset rightly takes so long, fewer"
    " environments (actor.envs) where SIGKILL came since memory ran out"
)
"""What to do about an environment that is lost again and again."""
_LONGEST_REST_S = 1.0
"""How long a step waits for an environment to come back when all are away."""


class Phase(Enum):
    """What an environment's worker is doing, and whether its slot holds something that was not told yet."""

    IDLE = auto()  # waits for an action
    BUSY = auto()  # steps
    DONE = auto()  # has stepped: the slot holds a transition
    BEGINNING = auto()  # resets, or plays its journal
    BEGUN = auto()  # the slot holds an episode's first observation
    AWAY = auto()  # lost, and not back yet
    GONE = auto()  # given up


_NEWS = {Phase.DONE, Phase.BEGUN}
_AT_WORK = {Phase.BUSY, Phase.BEGINNING}


class WorkersEnv(VectorEnv):
    """Environments that may be stepped together, or some at a time by `send` and `receive`.

    One that is lost (an exception, a crash, an exit, no answer in time) is *cut*: its open episode has no end, and
    after a while it goes on with a new one from a seed of its own. Until then its ticks are not valid.
    """

    watched = True
    step_seconds: Doubles

    def __init__(
        self,
        makers: Sequence[Maker],
        layout: Layout,
        shaping: RewardShaping,
        frame_stack: int = 1,
        step_timeout: float = 60.0,
        judging: bool = False,
    ) -> None:
        """Make the environments. `judging` is for scores of given seeds: a lost first episode keeps its own."""
        super().__init__(layout, len(makers), shaping, frame_stack)
        self._judging = judging
        self._journal = Journal(self.num_envs, RESEED_EVERY)
        self._phases = [Phase.AWAY] * self.num_envs
        self._broken = np.zeros(self.num_envs, bool)  # cut, and not told yet
        self._sent: set[int] = set()  # the environments that were given an action and not heard of since
        self._content = b""  # of the newest answer
        self._where = [""] * self.num_envs  # in which episode, and where in it, each environment was lost
        self._last_words = ""
        self.step_seconds = np.zeros(self.num_envs)
        self._asked_at = np.zeros(self.num_envs)
        self._crew = Crew(makers, layout, step_timeout)
        self._slots = self._crew.slots
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        """Wait until every environment is made; one that cannot be is a mistake in the configuration.

        One that somebody kills meanwhile is not: it is made again, some times.
        """
        while Phase.AWAY in self._phases:
            for heard in self._crew.listen():
                if heard.what == "built":
                    self._phases[heard.index] = Phase.IDLE
                elif heard.what == "lost":
                    self._phases[heard.index] = Phase.AWAY
                elif not heard.killed:
                    raise ConfigError(
                        f"{self.spec.name}, environment {heard.index}, cannot be made in a process of its own: "
                        f"{heard.cause}"
                    )

    # ------------------------------------------------------------------ some at a time

    def send(self, action: Ints, envs: Ints) -> None:
        """Let environments `envs` [K] take joint actions [K]; returns at once."""
        for index, number in zip(envs.tolist(), action.tolist(), strict=True):
            self._sent.add(index)
            if self._phases[index] is Phase.IDLE:
                self._slots.action[index] = number
                self._slots.seed[index] = self._next_seed(index) if self._journal.due(index, coming=1) else -1
                self._asked_at[index] = time.perf_counter()
                self._ask(index, STEP, Phase.BUSY)

    def receive(self, at_least: int) -> tuple[Ints, Tick]:
        """Return some of the environments that were sent actions [K], ascending, and their tick.

        Waits for so many of them, or all that are at work. An environment that was lost comes once with its cut, and
        again when it is back; one that was given up comes no more.
        """
        while True:
            ready = [index for index in self._sent if self._has_news(index)]
            if ready and (len(ready) >= at_least or not self._busy()):
                break
            self._listen()
        envs = np.array(sorted(ready), np.int64)
        return envs, self._step_some(self._take(envs), envs)

    def under_way(self) -> bool:
        """Return whether `receive` would soon return: not when all that were sent actions are away."""
        if not self._busy():
            self._listen(0.0)
        return self._busy() or any(self._has_news(index) for index in self._sent)

    # ------------------------------------------------------------------ all together

    def _step(self, action: Ints) -> Moment:
        self.send(action, self._all)
        until = time.monotonic() + _LONGEST_REST_S
        while self._busy() or (not self._any_news() and time.monotonic() < until):
            self._listen()
        return self._take(self._all)

    def render(self) -> NDArray[np.uint8]:
        """Return environment 0 as an RGB image [height, width, 3]."""
        if self._phases[0] is Phase.IDLE:
            self._ask(0, RENDER, Phase.BUSY)
            while self._phases[:1] == [Phase.BUSY]:
                self._listen()
        if self._phases[:1] != [Phase.DONE]:
            raise EnvironmentFault(f"{self.spec.name}, environment 0, cannot be drawn: its process was lost")
        self._phases[0] = Phase.IDLE
        return rgb_image(read_image(self._content), self.spec.name)

    def given_up(self) -> list[int]:
        """Return the environments that failed several times in a row."""
        return [index for index, phase in enumerate(self._phases) if phase is Phase.GONE]

    def helpers_cpu_s(self) -> float:
        """Return what the environments' processes have taken."""
        return self._crew.cpu_s()

    def close(self) -> None:
        """End every process."""
        self._crew.close()

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        chosen = np.flatnonzero(which)
        self._settle(chosen)
        for index in chosen.tolist():
            self._broken[index] = False
            self._sent.discard(index)
            if self._phases[index] is Phase.GONE:
                self._crew.revive(index)
                self._phases[index] = Phase.AWAY
            elif self._phases[index] is not Phase.AWAY:
                self._begin(index)
        while any(self._phases[index] not in (Phase.BEGUN, Phase.GONE) for index in chosen.tolist()):
            self._listen()
        frames, mask = self._look(chosen)
        self._tell(chosen)
        return frames, mask

    def _settle(self, envs: Ints) -> None:
        """Wait until none of the environments is at work."""
        while any(self._phases[index] in _AT_WORK for index in envs.tolist()):
            self._listen()

    # ------------------------------------------------------------------ what the workers say

    def _listen(self, seconds: float = _LONGEST_REST_S) -> None:
        for heard in self._crew.listen(seconds):
            self._note(heard)
        if all(phase is Phase.GONE for phase in self._phases):
            raise EnvironmentFault(
                f"{self.spec.name}: no environment is left, each one failed several times in a row. "
                f"The last one said: {self._last_words}. What to do: {_REMEDY}"
            )

    def _note(self, heard: Heard) -> None:
        index = heard.index
        if heard.what == "built":
            self._begin(index)
        elif heard.what == "answered":
            if heard.code == BROKE:
                raise self._fault(index, heard.content.decode())
            self._content = heard.content
            if self._phases[index] is Phase.BUSY:
                self.step_seconds[index] = time.perf_counter() - self._asked_at[index]
            self._phases[index] = Phase.DONE if self._phases[index] is Phase.BUSY else Phase.BEGUN
        elif heard.what == "lost":
            # Told of an episode that has begun, and not of one that nobody has seen.
            self._broken[index] |= self._phases[index] in (Phase.IDLE, Phase.BUSY, Phase.DONE)
            self._where[index] = f"episode {self._games[index]}, step {self._lengths[index]}, both counted from 0"
            self._phases[index] = Phase.AWAY
            if self._judging:
                self._repeat(index)
        else:
            self._report(index, heard.cause, given_up=heard.what == "given up")

    def _report(self, index: int, cause: str, given_up: bool) -> None:
        what = "its episode is cut, it begins anew"
        if given_up:
            what = f"it is given up, the run goes on without it until it is resumed. What to do: {_REMEDY}"
        self._last_words = cause
        self._incidents.append(f"{self.spec.name}, environment {index}: {cause} ({self._where[index]}); {what}")
        if given_up:
            self._phases[index] = Phase.GONE

    def _begin(self, index: int) -> None:
        """Begin an episode from the environment's next seed."""
        seed = self._slots.seed[index] = self._draw_seed(index)
        self._journal.open(index, int(seed))
        self._ask(index, RESET, Phase.BEGINNING)

    def _ask(self, index: int, code: bytes, phase: Phase, content: bytes = b"", steps: int = 1) -> None:
        self._phases[index] = phase
        self._crew.ask(index, code, content, steps)

    # ------------------------------------------------------------------ from slots to moments

    def _busy(self) -> bool:
        return Phase.BUSY in self._phases

    def _has_news(self, index: int) -> bool:
        return self._phases[index] in _NEWS or bool(self._broken[index])

    def _any_news(self) -> bool:
        return bool(self._broken.any()) or not _NEWS.isdisjoint(self._phases)

    def _take(self, envs: Ints) -> Moment:
        """Return what environments `envs` [K] have to tell; those that have nothing to tell are not valid."""
        slots = self._slots
        valid = np.array([self._phases[index] is Phase.DONE for index in envs.tolist()])
        reward = np.where(valid, slots.reward[envs], 0.0)
        terminated, truncated = slots.terminated[envs] & valid, slots.truncated[envs] & valid
        over = terminated | truncated
        finished = np.flatnonzero(over)
        frames, mask = self._look(envs)
        moment = Moment(
            observation=frames,
            mask=mask,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            fresh=over | ~valid,
            finished=finished,
            final_observation={name: leaf[envs[finished]] for name, leaf in slots.final.items()},
            final_mask=None if slots.final_mask is None else slots.final_mask[envs[finished]],
            scored=finished,
            cut=np.flatnonzero(self._broken[envs]),
        )
        self._write_down(envs[valid].tolist(), envs[finished].tolist())
        self._tell(envs)
        return moment

    def _look(self, envs: Ints) -> tuple[Leaves, Bools | None]:
        """Return what environments `envs` show [K, ...] and allow [K, A]; zeros, and everything, where one is away."""
        slots = self._slots
        away = np.array([self._phases[index] not in _NEWS for index in envs.tolist()])
        frames = {name: leaf[envs] for name, leaf in slots.observation.items()}
        mask = None if slots.mask is None else slots.mask[envs]
        if away.any():
            for leaf in frames.values():
                leaf[away] = 0
            if mask is not None:
                mask[away] = True
        return frames, mask

    def _write_down(self, stepped: Iterable[int], finished: Iterable[int]) -> None:
        """Journal the actions that were taken, and the seeds of episodes that have begun."""
        for index in stepped:
            self._journal.actions[index].append(int(self._slots.action[index]))
        for index in finished:
            self._crew.praise(index)
            if self._slots.seed[index] >= 0:
                self._journal.open(index, self._draw_seed(index))

    def _tell(self, envs: Ints) -> None:
        """Note that the caller knows what these environments had to tell."""
        self._broken[envs] = False
        for index in envs.tolist():
            self._sent.discard(index)
            if self._phases[index] in _NEWS:
                self._phases[index] = Phase.IDLE

    # ------------------------------------------------------------------ resume

    def _backend_state(self) -> State:
        away = [self._phases[index] is not Phase.IDLE or bool(self._broken[index]) for index in self._all.tolist()]
        return {**self._journal.state_dict(), "away": away}

    def _replay(self, state: State) -> tuple[Leaves, Bools | None]:
        self._settle(self._all)
        self._journal.load_state_dict(state)
        self._unplayed = np.array(state.get("away", [False] * self.num_envs), bool)
        for index in np.flatnonzero(~self._unplayed).tolist():
            if self._phases[index] in (Phase.AWAY, Phase.GONE):
                self._unplayed[index] = True
                continue
            log = np.array(self._journal.actions[index], np.int16)
            self._slots.seed[index] = self._journal.seeds[index]
            self._ask(index, REPLAY, Phase.BEGINNING, log.tobytes(), steps=len(log) + 1)
        self._settle(self._all)
        self._unplayed |= np.array([phase is not Phase.BEGUN for phase in self._phases])
        frames, mask = self._look(self._all)
        self._tell(self._all)
        return frames, mask
