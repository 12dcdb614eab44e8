"""Records one episode of a policy as an animated GIF (extra `media`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from qfleet.algo.policy import Policy
from qfleet.core.errors import ConfigError, MissingExtra, QfleetError
from qfleet.core.seeding import episode_seeds, numpy_stream
from qfleet.envs import EnvConfig, VectorEnv, make_env
from qfleet.roles.acting import Acting

MAX_STEPS = 2000
"""Steps after which a recording is cut, so that an endless episode does not fill the memory."""
_SIDE = 360
"""Longest side of the picture in pixels."""
_SMALL = 160
"""Pictures with a longest side below this are enlarged by a whole factor."""
_FRAME_MS = 30
_FAST_OCTREE = 2
"""Pillow's fastest way to choose a palette."""


@dataclass(frozen=True)
class Recording:
    """What was recorded."""

    score: float
    """Undiscounted return of the episode, as far as it was recorded."""
    steps: int
    complete: bool
    """Whether the episode ended before the recording was cut."""


def check_output(output: Path) -> None:
    """Refuse what `record_episode` could not write, before anything is played."""
    if output.suffix.lower() != ".gif":
        raise ConfigError(f"a recording is a GIF; '{output}' should end in .gif")
    if not output.parent.is_dir():
        raise ConfigError(f"'{output}' cannot be written: there is no directory '{output.parent}'")
    _pillow()


def record_episode(env_config: EnvConfig, policy: Policy, output: Path, seed: int) -> Recording:
    """Play the first episode that `qfleet.evaluate` plays with this seed, and write a picture of every step."""
    check_output(output)
    # Pictures are drawn in memory; without this, SDL looks for a screen and complains where there is none.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    episode = _Episode(policy, seed)
    with closing(make_env(env_config, 1, evaluation=True, render=True)) as env:
        frames = (_picture(frame) for frame in episode.frames(env))
        partial = output.with_name(f".{output.name}.partial")
        try:
            first = next(frames)
            first.save(partial, "GIF", save_all=True, append_images=frames, duration=_FRAME_MS, loop=0)
            os.replace(partial, output)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingExtra("pygame-ce", "media", f"drawing {policy.spec.name}") from error
        except OSError as error:
            raise QfleetError(f"cannot write {output}: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)
    return Recording(episode.score, episode.steps, episode.complete)


class _Episode:
    """Plays one episode and gives out a frame for each step."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._network, self._seed = policy.network.eval(), seed
        self.score, self.steps, self.complete = 0.0, 0, False

    def frames(self, env: VectorEnv) -> Iterator[NDArray[np.uint8]]:
        """Yield RGB images [height, width, 3], from the first observation to the last one before the end."""
        rng, greedy = numpy_stream(self._seed, "recording"), np.zeros(1, np.float32)
        observation, mask = env.reset(episode_seeds(self._seed, "fresh", 1))
        acting = Acting(self._network, 1)
        yield env.render()
        while self.steps < MAX_STEPS and not self.complete:
            tick = env.step(acting.act(observation, mask, greedy, rng).action)
            observation, mask = tick.observation, tick.mask
            self.steps += int(tick.valid[0])
            self.complete = bool(len(tick.scored))
            self.score = float(tick.scores[0]) if self.complete else self.score + float(tick.reward[0])
            if not self.complete:
                yield env.render()


def _picture(frame: NDArray[np.uint8]) -> Any:
    """Return one frame as a small picture with a palette of its own, which is what a GIF is made of."""
    image = _pillow().fromarray(frame)
    longest = max(image.size)
    if longest < _SMALL:
        image = image.resize(tuple(side * (_SIDE // longest) for side in image.size), resample=0)
    image.thumbnail((_SIDE, _SIDE))
    return image.quantize(64, method=_FAST_OCTREE)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", "media", "recording an episode") from error
    return Image
