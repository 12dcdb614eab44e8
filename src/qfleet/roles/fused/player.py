"""Acts in tensor-native environments: one tick is observation, values, actions, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qfleet.accel.fusing import fused
from qfleet.algo.exploration import choose_tensors
from qfleet.core.role import State
from qfleet.envs.tensor.cartpole import CartPole
from qfleet.envs.tensor.protocol import GameState, Outcome, TensorEnv, to_arrays
from qfleet.replay.sumtree import use_numba

Values = Callable[[dict[str, Tensor]], Tensor]
"""Returns the values [E, A] of all actions for observation leaves [E, ...]."""

Move = Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Outcome]]
"""Changes the state to the next one; see `Player._moved`."""


@dataclass(frozen=True)
class Ticked:
    """One tick of E environments: where it began, what was done, what came of it."""

    observation: dict[str, Tensor]  # [E, ...] acted on
    mask: Tensor | None  # [E, A]
    q: Tensor  # [E, A] acted on, until the next tick: it may use the same memory
    action: Tensor  # [E]
    outcome: Outcome
    final: Tensor  # [E] bool: `observation` is what an episode ended with, so the action was ignored


class Player:
    """E environments and their random stream. Its tensors keep their place, so that a tick can be captured."""

    def __init__(self, env: TensorEnv, envs: int, generator: torch.Generator, compiled: bool = False) -> None:
        """Begin an episode in every environment; `compiled`, a tick is one call where the device has a compiler."""
        self.env, self.envs, self._generator = env, envs, generator
        self.state: GameState = env.reset(self._uniform(env.draws))
        self.returns = torch.zeros(envs, device=generator.device)
        """Undiscounted rewards of the open episodes."""
        self.finished = torch.zeros(3, dtype=torch.float64, device=generator.device)
        """Episodes that ended, the sum of their returns, the sum of their lengths."""
        self.steps = torch.zeros((), dtype=torch.int64, device=generator.device)
        """Transitions so far: ticks that only began an episode are none."""
        self._observe = env.observe
        self._move: Move = self._moved
        if compiled:
            self._compile()

    def restart(self) -> None:
        """Begin anew in every environment, in the tensors that are there; what was counted stays."""
        for name, value in self.env.reset(self._uniform(self.env.draws)).items():
            self.state[name].copy_(value)
        self.returns.zero_()

    @property
    def observation(self) -> dict[str, Tensor]:
        """What is acted on next [E, ...]."""
        return self._observe(self.state)

    @torch.no_grad()
    def tick(self, values: Values, epsilon: Tensor) -> Ticked:
        """Act once in every environment, at random with probability `epsilon` [E] or scalar."""
        observation, mask, final = self.observation, self.env.mask(self.state), self.state["ended"].clone()
        random, q = self._uniform(self.env.draws + 2), values(observation)
        action, outcome = self._move(q, epsilon, mask, random)
        return Ticked(observation, mask, q, action, outcome, final)

    def _compile(self) -> None:
        """Fuse the game's rules: by torch.compile on a GPU, by numba on a CPU, where only CartPole has such a form."""
        if self.returns.device.type == "cuda":
            self._observe = fused(self.env.observe)
            self._move = fused(self._moved)
        elif type(self.env.game) is CartPole and self.state["physics"].dtype == torch.float32 and use_numba():
            from qfleet.accel.cpu_games import CartPoleMove

            self._move = CartPoleMove(self.env.time_limit, self.state, (self.returns, self.finished, self.steps))

    def _moved(self, q: Tensor, epsilon: Tensor, mask: Tensor | None, random: Tensor) -> tuple[Tensor, Outcome]:
        """Change the state to the next; return the actions [E] chosen by values `q` [E, A], and what they led to."""
        action = choose_tensors(q, epsilon, mask, random[:, :2])
        state, outcome = self.env.step(self.state, action, random[:, 2:])
        self._count(outcome, state["age"])
        for name, value in state.items():
            self.state[name].copy_(value)
        return action, outcome

    def _count(self, outcome: Outcome, age: Tensor) -> None:
        self.returns.add_(outcome.reward)
        self.steps.add_(outcome.valid.sum())
        ended = outcome.terminated | outcome.truncated
        if ended.device.type == "cpu" and not ended.any():  # to look is free here, and most ticks end nothing
            return
        over = ended.double()
        self.finished.add_(torch.stack([over.sum(), over @ self.returns.double(), over @ age.double()]))
        self.returns.masked_fill_(ended, 0.0)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(self.envs, count, generator=self._generator, device=self._generator.device)

    def state_dict(self) -> State:
        """Return the environments and what was counted (the generator belongs to the loop)."""
        counts = {"returns": self.returns, "finished": self.finished, "steps": self.steps}
        return {"state": to_arrays(self.state), "counts": to_arrays(counts)}

    def load_state_dict(self, state: State) -> None:
        """Continue, in the tensors that are there."""
        counts = state["counts"]
        for name, value in self.state.items():
            value.copy_(torch.from_numpy(state["state"][name]))
        for tensor, name in ((self.returns, "returns"), (self.finished, "finished"), (self.steps, "steps")):
            tensor.copy_(torch.from_numpy(counts[name]))
