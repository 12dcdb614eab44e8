"""Tensor-native games on the CPU behind the interface of all other environments, for the pipeline and the evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.core.role import State
from qfleet.core.types import Bools, Ints, Leaves
from qfleet.envs.reward import AS_IT_IS, RewardShaping
from qfleet.envs.spaces import Layout, Leaf
from qfleet.envs.tensor.protocol import GameState, TensorEnv, to_arrays, to_state
from qfleet.envs.tensor.streams import stream_keys, uniforms
from qfleet.envs.vector import Moment, VectorEnv

_CPU = torch.device("cpu")


class TensorVector(VectorEnv):
    """E environments with a random stream each, so that none depends on how many others there are."""

    def __init__(
        self,
        env: TensorEnv,
        num_envs: int,
        shaping: RewardShaping = AS_IT_IS,
        protocol: Mapping[str, Any] | None = None,
    ) -> None:
        """`protocol` is what a score has to be stated with, besides the time limit."""
        spec = env.spec
        leaves = [Leaf(name, (name,), np.dtype(leaf.dtype), leaf) for name, leaf in spec.observations.items()]
        super().__init__(Layout(spec, tuple(leaves), np.arange(spec.actions)), num_envs, shaping)
        self._env, self._protocol = env, {**(protocol or {}), "time_limit": env.time_limit}
        self._keys = np.zeros(num_envs, np.uint64)
        self._ticks = np.zeros(num_envs, np.int64)
        self._everyone = np.arange(num_envs)
        self._state: GameState = {}

    @property
    def protocol(self) -> dict[str, Any]:
        """What a score has to be stated with."""
        return self._protocol

    def render(self) -> NDArray[np.uint8]:
        """Return environment 0 as an RGB image [height, width, 3]."""
        return self._env.game.draw(self._state, 0)

    def close(self) -> None:
        """Nothing is held that has to be given back."""

    @torch.inference_mode()
    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        chosen = np.flatnonzero(which)
        self._keys[chosen] = stream_keys([self._draw_seed(index) for index in chosen.tolist()])
        self._ticks[chosen] = 0
        begun = self._env.reset(self._random(chosen))
        if which.all():
            self._state = begun
        else:
            for name, value in begun.items():
                self._state[name][torch.from_numpy(chosen)] = value
        return self._look(begun)

    @torch.inference_mode()
    def _step(self, action: Ints) -> Moment:
        begun = self._state["ended"].numpy()
        self._state, outcome = self._env.step(self._state, torch.from_numpy(action), self._random(self._everyone))
        frames, mask = self._look(self._state)
        finished = np.flatnonzero(self._state["ended"].numpy())
        return Moment(
            observation=frames,
            mask=mask,
            reward=outcome.reward.numpy().astype(np.float64),
            terminated=outcome.terminated.numpy(),
            truncated=outcome.truncated.numpy(),
            valid=outcome.valid.numpy(),
            fresh=begun,
            finished=finished,
            final_observation={name: leaf[finished] for name, leaf in frames.items()},
            final_mask=None if mask is None else mask[finished],
            scored=finished,
        )

    def _backend_state(self) -> State:
        return {"game": to_arrays(self._state), "keys": self._keys.copy(), "ticks": self._ticks.copy()}

    def _replay(self, state: State) -> tuple[Leaves, Bools | None]:
        self._state = to_state(state["game"], _CPU)
        self._keys[:], self._ticks[:] = state["keys"], state["ticks"]
        return self._look(self._state)

    def _random(self, which: Ints) -> torch.Tensor:
        """Return the numbers [W, draws] of W environments for this tick, and go on to their next."""
        numbers = uniforms(self._keys[which], self._ticks[which], self._env.draws)
        self._ticks[which] += 1
        return torch.from_numpy(numbers)

    def _look(self, state: GameState) -> tuple[Leaves, Bools | None]:
        """Return the observations [W, ...] and masks [W, A] of W environments as fresh arrays."""
        observation = {name: leaf.numpy() for name, leaf in self._env.observe(state).items()}
        mask = self._env.mask(state)
        return self._layout.take(observation, len(state["ended"])), None if mask is None else mask.numpy().copy()
