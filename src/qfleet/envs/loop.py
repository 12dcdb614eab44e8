"""Steps ordinary Gymnasium environments one after the other in this process, each episode from a seed of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError, EnvironmentFault
from qfleet.core.role import State
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.faults import raised
from qfleet.envs.journal import RESEED_EVERY, Journal
from qfleet.envs.mending import LOSSES, Still
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import Layout, MaskMisfit, Misfit
from qfleet.envs.vector import Doubles, Moment, VectorEnv

Environment = gymnasium.Env[Any, Any]


class LoopEnv(VectorEnv):
    """Every value is checked, every error names its environment, and every open episode can be replayed."""

    step_seconds: Doubles

    def __init__(
        self,
        envs: list[Environment],
        layout: Layout,
        shaping: RewardShaping,
        frame_stack: int = 1,
        makers: Sequence[Callable[[], Environment]] = (),
        judging: bool = False,
    ) -> None:
        """Take what makes each environment anew that raises an exception, which then costs its episode only.

        Without `makers` it is raised. When `judging`, a first game that is lost is begun anew from its own seed, once.
        """
        super().__init__(layout, len(envs), shaping, frame_stack)
        self._envs, self._makers, self._judging = envs, makers, judging
        self._losses = [0] * len(envs)
        """Of each environment, in a row."""
        self._still = np.zeros(len(envs), bool)
        """Environments that were given up."""
        # NumPy scalars, as Gymnasium's own vectors pass them: checking a Python int costs Discrete much more.
        self._table: list[Any] = list(layout.table)
        self._journal = Journal(len(envs), RESEED_EVERY)
        self._nothing = layout.empty(0)
        self.step_seconds = np.zeros(len(envs))

    def render(self) -> NDArray[np.uint8]:
        """Return environment 0 as an RGB image [height, width, 3]."""
        return rgb_image(self._envs[0].render(), self.spec.name)

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            close_quietly(env)

    def given_up(self) -> Sequence[int]:
        """Return the environments that were lost again and again."""
        return np.flatnonzero(self._still).tolist()

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        chosen = np.flatnonzero(which).tolist()
        self._take_back(which)
        begun = [self._begun(index) for index in chosen]
        return self._arrays([first for first, _ in begun], [info for _, info in begun], chosen)

    def _step(self, action: Ints) -> Moment:
        count = self.num_envs
        observations: list[Any] = [None] * count
        infos: list[dict[str, Any]] = [{}] * count
        rewards, terminated, truncated = [0.0] * count, np.zeros(count, bool), np.zeros(count, bool)
        finished: list[int] = []
        finals: list[Leaves] = []
        final_masks: list[Bools | None] = []
        valid, lost, live = ~self._still, [], (~self._still).tolist()
        table, logs = self._table, self._journal.actions
        timing, seconds, began = self.timing, self.step_seconds, 0.0
        for index, (env, number) in enumerate(zip(self._envs, action.tolist(), strict=True)):
            try:
                if timing:
                    began = time.perf_counter()
                observations[index], reward, ended, stopped, infos[index] = env.step(table[number])
                if timing:
                    seconds[index] = time.perf_counter() - began
                rewards[index] = float(reward)
                if live[index]:
                    logs[index].append(number)
                if ended or stopped:
                    terminated[index], truncated[index] = ended, stopped
                    # Copied before the reset: many environments write every observation into one buffer.
                    final, mask = self._arrays([observations[index]], [infos[index]], [index])
                    finished.append(index)
                    finals.append(final)
                    final_masks.append(mask)
                    self._losses[index] = 0
                    observations[index], infos[index] = self._begin(index, self._journal.due(index))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # sys.exit() in an environment must not end the run without a word
                observations[index], infos[index] = self._mended(index, self._raised(index, "step()", error))
                if finished[-1:] != [index]:  # else its episode was over, and could be kept
                    rewards[index], terminated[index], truncated[index], valid[index] = 0.0, False, False, False
                    lost.append(index)
        frames, mask = self._arrays(observations, infos, None)
        done = np.array(finished, np.int64)
        return Moment(
            observation=frames,
            mask=mask,
            reward=np.array(rewards),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            fresh=terminated | truncated | ~valid,
            finished=done,
            final_observation=self._joined(finals),
            final_mask=self._joined_masks(final_masks),
            scored=done,
            cut=np.array(lost, np.int64),
        )

    def _take_back(self, which: Bools) -> None:
        """Try again with those of them that were given up."""
        for index in np.flatnonzero(which & self._still).tolist():
            still = self._envs[index]
            assert isinstance(still, Still)
            self._envs[index], self._still[index], self._losses[index] = still.env, False, 0

    def _begun(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of environment `index` from its next seed; return its first pair."""
        try:
            return self._begin(index, seeded=True)
        except EnvironmentFault as fault:
            return self._mended(index, fault)

    def _mended(self, index: int, fault: EnvironmentFault) -> tuple[Any, dict[str, Any]]:
        """Return the first pair of a new environment in place of one that was lost; raises the fault where there may be
        none."""
        if not self._makers:
            raise fault from fault.__cause__
        first, found = None, fault
        while first is None:
            self._losses[index] += 1
            given_up = self._losses[index] >= LOSSES
            what = "The run goes on without it" if given_up else "Its episode is cut, and it begins anew"
            self._incidents.append(f"{found} {what}.")
            try:
                first = self._replaced(index)
            except EnvironmentFault as another:
                if given_up:
                    raise fault from fault.__cause__
                found = another
        if given_up:
            self._envs[index], self._still[index] = Still(self._envs[index], first), True
            self.last_words = fault
        return first

    def _replaced(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Make environment `index` anew and begin an episode; return its first pair."""
        self.making = True
        try:
            close_quietly(self._envs[index])
            self._envs[index] = self._makers[index]()
            if self._judging:
                self._repeat(index)
            return self._begin(index, seeded=True)
        except (EnvironmentFault, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._raised(index, "its constructor", error) from error
        finally:
            self.making = False

    def _backend_state(self) -> State:
        return {**self._journal.state_dict(), "losses": list(self._losses), "still": self._still.tolist()}

    def _replay(self, state: State) -> tuple[Leaves, Bools | None]:
        self._journal.load_state_dict(state)
        self._take_back(self._still)
        nobody = [0] * self.num_envs  # in checkpoints of former versions
        self._losses = [int(count) for count in state.get("losses", nobody)]
        self._unplayed[:] = False
        last = [self._returned(index, bool(state.get("still", nobody)[index])) for index in self._all.tolist()]
        return self._arrays([observation for observation, _ in last], [info for _, info in last], None)

    def _returned(self, index: int, still: bool) -> tuple[Any, dict[str, Any]]:
        """Bring environment `index` back to where it was; return its last pair."""
        actions = [self._table[number] for number in self._journal.actions[index]]
        try:
            pair = replay(self._envs[index], self._journal.seeds[index], actions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fault = self._fault(index, raised("replaying its journal", error))
            if not self._makers:
                raise fault from error
            fault.__cause__, self._unplayed[index] = error, True
            return self._mended(index, fault)
        if still:
            self._envs[index], self._still[index] = Still(self._envs[index], pair), True
        return pair

    def _begin(self, index: int, seeded: bool) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of environment `index`, from its next seed if `seeded`; return its first pair."""
        seed = self._draw_seed(index) if seeded else None
        try:
            first = self._envs[index].reset(seed=seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._raised(index, "reset()", error) from error
        if seed is not None:
            self._journal.open(index, seed)
        return first

    def _raised(self, index: int, what: str, error: BaseException) -> EnvironmentFault:
        """Return the fault of an environment that raised an exception; what is one already stays as it is."""
        if isinstance(error, EnvironmentFault):
            return error
        fault = self._fault(index, raised(what, error))
        fault.__cause__ = error
        return fault

    def _arrays(
        self, observations: list[Any], infos: list[dict[str, Any]], rows: list[int] | None
    ) -> tuple[Leaves, Bools | None]:
        """Return observations and masks of environments `rows` (None for all) as arrays, or the fault among them."""
        row = 0
        try:
            frames = self._layout.gather(observations)
            if not self.spec.masked:
                return frames, None
            mask = np.empty((len(observations), self.spec.actions), bool)
            for row, (observation, info) in enumerate(zip(observations, infos, strict=True)):
                mask[row] = self._layout.mask(observation, info, (self.spec.actions,))
            return frames, mask
        except MaskMisfit as misfit:
            culprit, what = row, str(misfit)
        except Misfit:
            culprit, what = self._layout.first_misfit(observations)
        raise self._fault(culprit if rows is None else rows[culprit], what)

    def _joined(self, finals: list[Leaves]) -> Leaves:
        if not finals:
            return self._nothing
        return {name: np.concatenate([final[name] for final in finals]) for name in self._nothing}

    def _joined_masks(self, masks: list[Bools | None]) -> Bools | None:
        if not self.spec.masked:
            return None
        return np.concatenate([np.empty((0, self.spec.actions), bool), *[mask for mask in masks if mask is not None]])


def replay(env: Environment, seed: int, actions: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Reset with `seed`, take the environment's own `actions`, and return the last (observation, info).

    Episodes that end on the way are followed by a reset without a seed, as when they were first played.
    """
    observation, info = env.reset(seed=seed)
    for action in actions:
        observation, _, ended, stopped, info = env.step(action)
        if ended or stopped:
            observation, info = env.reset()
    return observation, info


def rgb_image(image: Any, name: str) -> NDArray[np.uint8]:
    """Return what `render()` gave if it is an RGB image, or say what is missing."""
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        raise ConfigError(
            f"{name} gave no RGB image: make it with render=True, and it must support render_mode 'rgb_array'"
        )
    return image.astype(np.uint8)


def build_all(factories: Sequence[Callable[[], Environment]]) -> list[Environment]:
    """Return one environment of each factory; those already made are closed when a later one fails."""
    made: list[Environment] = []
    try:
        for factory in factories:
            made.append(factory())
    except BaseException:
        for env in made:
            close_quietly(env)
        raise
    return made


def close_quietly(env: Environment) -> None:
    """Close an environment; what it raises then costs nobody anything."""
    with contextlib.suppress(Exception, SystemExit):
        env.close()
