"""Adapts Gymnasium's own vector environments, in each of their three autoreset modes, to one meaning of episode end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import psutil
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from qfleet.core.errors import ConfigError
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.loop import rgb_image
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import MASK_KEY, Layout, Misfit
from qfleet.envs.vector import Moment, VectorEnv, episode_seed


class GymVector(VectorEnv):
    """Any object with the interface of `gymnasium.vector.VectorEnv`; open episodes are cut by a resume."""

    resume_grade: Literal["exact", "episode"] = "episode"

    def __init__(self, env: Any, layout: Layout, shaping: RewardShaping, frame_stack: int = 1) -> None:
        super().__init__(layout, env.num_envs, shaping, frame_stack)
        self._env = env
        self._mode = read_autoreset_mode(env, layout.spec.name)
        self._pending = np.zeros(self.num_envs, bool)
        self._everyone = np.ones(self.num_envs, bool)

    def render(self) -> NDArray[np.uint8]:
        """Return environment 0 as an RGB image [height, width, 3]."""
        images = self._env.render()
        return rgb_image(images[0] if images is not None else None, self.spec.name)

    def helpers_cpu_s(self) -> float:
        """Return what the processes of Gymnasium's own asynchronous vector have taken."""
        total = 0.0
        vector = getattr(self._env, "unwrapped", None)
        for process in vector.processes if isinstance(vector, AsyncVectorEnv) else ():
            with contextlib.suppress(psutil.Error):  # it has ended
                times = psutil.Process(process.pid).cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """Close the vector environment."""
        self._env.close()

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        assert which.all(), "a vector environment without replay is only ever restarted as a whole"
        self._pending[:] = False
        seeds = [self._draw_seed(index) for index in range(self.num_envs)]
        # Only these two take a seed for each environment; others document a single one.
        each = isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        seed = seeds if each else episode_seed(seeds[0], self.num_envs)
        observation, infos = self._call("reset()", lambda: self._env.reset(seed=seed))
        return self._take(observation), self._take_mask(observation, infos)

    def _step(self, action: Ints) -> Moment:
        given = self._layout.table[action]
        observation, reward, ended, stopped, infos = self._call("step()", lambda: self._env.step(given))
        # During a NEXT_STEP reset an environment reports nothing of its own.
        valid = ~self._pending
        terminated, truncated = np.array(ended, bool) & valid, np.array(stopped, bool) & valid
        done = terminated | truncated
        finished = np.flatnonzero(done)
        frames, mask = self._take(observation), self._take_mask(observation, infos)
        fresh = done
        if self._mode is AutoresetMode.SAME_STEP:
            final_frames, final_mask = self._take_finals(infos, finished)
        else:
            final_frames = {name: leaf[finished] for name, leaf in frames.items()}
            final_mask = None if mask is None else mask[finished]
        if self._mode is AutoresetMode.NEXT_STEP:
            fresh, self._pending = self._pending, done
        elif self._mode is AutoresetMode.DISABLED and len(finished):
            self._reset_finished(done, frames, mask)
        return Moment(
            observation=frames,
            mask=mask,
            reward=np.where(valid, np.asarray(reward, np.float64), 0.0),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            fresh=fresh,
            finished=finished,
            final_observation=final_frames,
            final_mask=final_mask,
            scored=finished,
        )

    def _reset_finished(self, done: Bools, frames: Leaves, mask: Bools | None) -> None:
        """Begin new episodes where `done` and put their first observations into `frames` and `mask`."""
        options = {"reset_mask": done.copy()}
        observation, infos = self._call("reset()", lambda: self._env.reset(options=options))
        first = self._take(observation)
        for name, leaf in frames.items():
            leaf[done] = first[name][done]
        if mask is not None:
            first_mask = self._take_mask(observation, infos)
            assert first_mask is not None
            mask[done] = first_mask[done]

    def _take(self, observation: Any) -> Leaves:
        try:
            return self._layout.take(observation, self.num_envs)
        except Misfit as misfit:
            raise self._whole_fault(str(misfit)) from None

    def _take_mask(self, observation: Any, infos: Mapping[str, Any]) -> Bools | None:
        try:
            return self._layout.mask(observation, infos, (self.num_envs, self.spec.actions))
        except Misfit as misfit:
            raise self._whole_fault(str(misfit)) from None

    def _take_finals(self, infos: Mapping[str, Any], finished: Ints) -> tuple[Leaves, Bools | None]:
        """Return the final observations and masks that SAME_STEP hides in `infos`."""
        nothing = np.empty((0, self.spec.actions), bool) if self.spec.masked else None
        if not len(finished):
            return self._layout.empty(0), nothing
        if "final_obs" not in infos:
            raise self._fault(int(finished[0]), "an episode ended in mode SAME_STEP, but infos has no 'final_obs'")
        finals = [_of_one(infos["final_obs"], index) for index in finished.tolist()]
        try:
            frames = self._layout.gather(finals)
            if nothing is None:
                return frames, None
            final_infos = {key: value for key, value in infos.get("final_info", {}).items() if key == MASK_KEY}
            masks = [
                self._layout.mask(final, _of_one(final_infos, index), (self.spec.actions,))
                for final, index in zip(finals, finished.tolist(), strict=True)
            ]
            return frames, np.array(masks)
        except Misfit as misfit:
            raise self._whole_fault(f"in the final observations, {misfit}") from None


def read_autoreset_mode(env: Any, name: str) -> AutoresetMode:
    """Return how a vector environment resets itself; refuses one that does not say."""
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(f"AutoresetMode.{known.name}" for known in AutoresetMode)
        raise ConfigError(
            f"{name}: metadata['autoreset_mode'] is {mode!r}; a vector environment has to say how it resets, "
            f"as one of {known}"
        ) from None


def _of_one(batched: Any, index: int) -> Any:
    """Return one environment's part of a batched observation, whichever way it is batched."""
    if isinstance(batched, Mapping):
        return {key: _of_one(value, index) for key, value in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_of_one(value, index) for value in batched)
    return batched[index]
