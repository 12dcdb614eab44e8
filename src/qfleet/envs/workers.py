"""Steps ordinary Gymnasium environments in processes of their own, each episode from a seed of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from qfleet.core.role import State
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.gymvector import GymVector
from qfleet.envs.journal import RESEED_EVERY, Journal
from qfleet.envs.loop import Environment, replay
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import Layout, Misfit
from qfleet.envs.vector import Moment, fault


class Worker(gymnasium.Wrapper[Any, Any, Any, Any]):
    """What Gymnasium's vectors step here: names the environment in every error, and replays a journal on request.

    Observations are copied: Gymnasium's SAME_STEP hands out a final observation whose buffer the reset may overwrite.
    """

    def __init__(self, make: Callable[[], Environment], index: int, layout: Layout) -> None:
        super().__init__(make())
        self._index, self._layout = index, layout
        self._episode, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, with the observation checked before it goes through shared memory."""
        self._episode, self._step = self._episode + 1, 0
        observation, info = self._guard("reset()", lambda: self.env.reset(seed=seed, options=options))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, with the observation checked before it goes through shared memory."""
        observation, reward, ended, stopped, info = self._guard("step()", lambda: self.env.step(action))
        self._step += 1
        return observation, reward, ended, stopped, info

    def replay(self, seeds: list[int], actions: list[list[Any]]) -> tuple[Any, dict[str, Any]]:
        """Return the last (observation, info) of this environment's journal, played again."""
        mine = partial(replay, self.env, seeds[self._index], actions[self._index])
        observation, info = self._guard("replaying its journal", mine)
        return observation, info

    def _guard(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
            self._layout.gather([result[0]])
            return (copy.deepcopy(result[0]), *result[1:])
        except Misfit as misfit:
            raise self._fault(str(misfit)) from None
        except Exception as error:
            raise self._fault(f"{what} raised {type(error).__name__}: {error}") from error

    def _fault(self, what: str) -> Exception:
        return fault(self._layout.spec.name, self._index, what, self._episode, self._step)


def as_workers(factories: Sequence[Callable[[], Environment]], layout: Layout) -> list[Callable[[], Environment]]:
    """Return factories of the same environments as workers."""
    return [partial(Worker, factory, index, layout) for index, factory in enumerate(factories)]


class WorkersEnv(GymVector):
    """Gymnasium's AsyncVectorEnv without autoreset, so that every open episode can be replayed."""

    resume_grade: Literal["exact", "episode"] = "exact"

    def __init__(
        self,
        factories: Sequence[Callable[[], Environment]],
        layout: Layout,
        shaping: RewardShaping,
        frame_stack: int = 1,
    ) -> None:
        makers = as_workers(factories, layout)
        # copy=False: the shared buffer is copied once, when the leaves are taken from it.
        env = AsyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        super().__init__(env, layout, shaping, frame_stack)
        self._journal = Journal(self.num_envs, RESEED_EVERY)

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        count = self.num_envs
        frames = self._layout.empty(count)
        mask = np.empty((count, self.spec.actions), bool) if self.spec.masked else None
        self._reset_some(which, self._new_seeds(which), frames, mask)
        return {name: leaf[which] for name, leaf in frames.items()}, None if mask is None else mask[which]

    def _step(self, action: Ints) -> Moment:
        self._journal.record(action)
        return super()._step(action)

    def _reset_finished(self, done: Bools, frames: Leaves, mask: Bools | None) -> None:
        due = np.array([self._journal.due(index) for index in range(self.num_envs)])
        self._reset_some(done, self._new_seeds(done & due), frames, mask)

    def _new_seeds(self, which: Bools) -> list[int | None]:
        """Return [E] the next seeds of environments `which`, whose journals begin anew, and None for the others."""
        seeds: list[int | None] = [None] * self.num_envs
        for index in np.flatnonzero(which).tolist():
            seed = seeds[index] = self._draw_seed(index)
            self._journal.open(index, seed)
        return seeds

    def _backend_state(self) -> State:
        return self._journal.state_dict()

    def _replay(self, state: State) -> tuple[Leaves, Bools | None]:
        self._journal.load_state_dict(state)
        table = self._layout.table
        actions = [[table[number] for number in log] for log in self._journal.actions]
        last = self._call("replay", lambda: self._env.call("replay", self._journal.seeds, actions))
        frames = self._layout.gather([observation for observation, _ in last])
        if not self.spec.masked:
            return frames, None
        masks = [self._layout.mask(observation, info, (self.spec.actions,)) for observation, info in last]
        return frames, np.array(masks)
