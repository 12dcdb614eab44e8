"""What an actor sees of its environments: one tick at a time, with one meaning of episode end for all kinds of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qfleet.core.errors import CheckpointError, EnvironmentFault
from qfleet.core.role import State
from qfleet.core.spec import EnvSpec
from qfleet.core.types import Bools, Floats, Ints, Leaves
from qfleet.envs.faults import describe_bad_rows, raised
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import Layout
from qfleet.envs.stack import FrameStack

Doubles = NDArray[np.float64]
_WORD = 2**64 - 1


def _none() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Tick:
    """What one step of E environments brought; the arrays are fresh and belong to the receiver.

    Where E are some of all environments, those named below are counted among these E.
    """

    observation: Leaves  # [E, ...] to act on next, frame stacks included
    mask: Bools | None  # [E, A] allowed actions
    reward: Floats  # [E] for learning: clipped and scaled as configured
    terminated: Bools  # [E]
    truncated: Bools  # [E]
    valid: Bools  # [E] false where this tick only reset the environment: not a transition, the action was ignored
    final_observation: Leaves  # [F, ...] after the last action of the episodes that ended in this tick
    final_mask: Bools | None  # [F, A]
    finished: Ints  # [F] their environments, ascending: those with terminated or truncated
    scores: Doubles  # [G] undiscounted, unclipped returns of the games that ended (the loss of a life ends no game)
    score_lengths: Ints  # [G] steps of those games
    scored: Ints  # [G] their environments
    cut: Ints = field(
        default_factory=_none
    )  # [C] environments whose open episode broke off before this tick; it led nowhere


@dataclass
class Moment:
    """What a backend reports of one step: single frames and raw rewards, fresh arrays."""

    observation: Leaves  # [E, ...] to act on next
    mask: Bools | None  # [E, A]
    reward: Doubles  # [E]
    terminated: Bools  # [E]
    truncated: Bools  # [E]
    valid: Bools  # [E]
    fresh: Bools  # [E] `observation` is the first one of an episode
    finished: Ints  # [F]
    final_observation: Leaves  # [F, ...]
    final_mask: Bools | None  # [F, A]
    scored: Ints  # [G] environments whose game ended
    cut: Ints = field(default_factory=_none)  # [C] environments whose open episode broke off


class VectorEnv(ABC):
    """E environments stepped together. Subclasses say how to restart, step and replay them; the rest is here."""

    resume_grade: Literal["exact", "episode"] = "exact"
    """Whether `load_state_dict` continues open episodes to the byte, or cuts them."""
    watched: bool = False
    """Whether an environment that hangs is noticed here; otherwise only its role's supervisor can."""
    timing: bool = False
    """Whether the next step is to be timed, where that takes time itself."""
    step_seconds: Doubles | None = None
    """How long each environment [E] took for the last step that was timed; None where nobody can tell."""

    def __init__(self, layout: Layout, num_envs: int, shaping: RewardShaping, frame_stack: int = 1) -> None:
        self._stack = FrameStack(layout.spec.observations, frame_stack)
        self.spec: EnvSpec = layout.spec.replace(observations=self._stack.specs)
        self.num_envs = num_envs
        self.cut: Ints = _none()
        """After `load_state_dict`: environments whose open episode could not be continued and was begun anew."""
        self._layout, self._shaping = layout, shaping
        self._seeds: list[int] = []
        self._all = np.arange(num_envs)
        self._draws = np.zeros(num_envs, np.int64)
        self._repeated = np.zeros(num_envs, bool)  # environments whose first game was begun anew from its own seed
        self._games = np.zeros(num_envs, np.int64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs, np.float64)
        self._observation: Leaves = {}
        self._mask: Bools | None = None
        self._incidents: list[str] = []
        self.making = False
        """Whether one of them is being made anew, which may take as long as to make it the first time."""
        self.last_words: EnvironmentFault | None = None
        """Of the one that was given up last."""
        self._unplayed = np.zeros(num_envs, bool)  # after `_replay`: environments that it could not bring back

    def reset(self, seeds: Sequence[int]) -> tuple[Leaves, Bools | None]:
        """Begin anew; all that follows is a function of the seeds (one for each environment) and the actions.

        Returns the observations [E, ...] and, for environments with masks, the allowed actions [E, A].
        """
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
        self._seeds = [int(seed) for seed in seeds]
        for counter in (self._draws, self._games, self._lengths, self._returns, self._repeated):
            counter[:] = 0
        everyone = np.ones(self.num_envs, bool)
        frames, mask = self._restart(everyone)
        self._inspect(frames, mask)
        self._observation, self._mask = self._stack.start(frames), mask
        return self.current()

    def begin(self, action: Ints) -> Callable[[], None] | None:
        """Begin a step that `step` with the same actions finishes; None if it cannot be begun.

        Returns at once what waits for the step's end, in any thread, and lets others use Python meanwhile.
        """
        return None

    def step(self, action: Ints) -> Tick:
        """Take joint actions [E] (numbers from 0 to A - 1) and return what came of them."""
        moment = self._step(action)
        before = self._observation
        final = self._follow(moment, self._all, before)
        self._observation = self._stack.push(before, moment.observation, moment.fresh)
        self._mask = moment.mask
        observation, mask = self.current()
        return self._tick(moment, self._all, observation, mask, final)

    def _step_some(self, moment: Moment, envs: Ints) -> Tick:
        """Return the tick of a moment of some environments [E]."""
        before = {name: leaf[envs] for name, leaf in self._observation.items()}
        final = self._follow(moment, envs, before)
        observation = self._stack.push(before, moment.observation, moment.fresh)
        for name, leaf in observation.items():
            self._observation[name][envs] = leaf
        if self._mask is not None:
            self._mask[envs] = moment.mask
        return self._tick(moment, envs, observation, moment.mask, final)

    def _follow(self, moment: Moment, envs: Ints, before: Leaves) -> Leaves:
        """Check and count a moment of environments `envs`, seen `before`; returns its final observations, stacked."""
        self._inspect(moment.observation, moment.mask, moment.reward, rows=envs)
        if len(moment.finished):
            self._inspect(moment.final_observation, moment.final_mask, rows=envs[moment.finished])
        self._returns[envs] += moment.reward
        self._lengths[envs] += moment.valid
        return self._stack.finals(before, moment.final_observation, moment.finished)

    def _tick(self, moment: Moment, envs: Ints, observation: Leaves, mask: Bools | None, final: Leaves) -> Tick:
        """Return the tick that a moment of environments `envs` makes; the games that ended are counted."""
        scored = envs[moment.scored]
        scores, score_lengths = self._returns[scored], self._lengths[scored]
        over = np.concatenate([scored, envs[moment.cut]]) if len(moment.cut) else scored
        if len(over):
            self._games[over] += 1
            self._returns[over] = 0.0
            self._lengths[over] = 0
        return Tick(
            observation=observation,
            mask=mask,
            reward=self._shaping.apply(moment.reward),
            terminated=moment.terminated,
            truncated=moment.truncated,
            valid=moment.valid,
            final_observation=final,
            final_mask=moment.final_mask,
            finished=moment.finished,
            scores=scores,
            score_lengths=score_lengths,
            scored=moment.scored,
            cut=moment.cut,
        )

    def current(self) -> tuple[Leaves, Bools | None]:
        """Return copies of the observations [E, ...] and masks [E, A] to act on next."""
        return {name: leaf.copy() for name, leaf in self._observation.items()}, _copied(self._mask)

    def state_dict(self) -> State:
        """Return everything the future of these environments depends on."""
        return {
            "seeds": list(self._seeds),
            "draws": self._draws.copy(),
            "games": self._games.copy(),
            "lengths": self._lengths.copy(),
            "returns": self._returns.copy(),
            "observation": {name: leaf.copy() for name, leaf in self._observation.items()},
            "backend": self._backend_state(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict`; `cut` then names the environments whose open episode had to be begun anew."""
        if len(state["seeds"]) != self.num_envs:
            raise CheckpointError(f"the checkpoint has {len(state['seeds'])} environments, this run {self.num_envs}")
        self._seeds = [int(seed) for seed in state["seeds"]]
        self._draws[:], self._games[:] = state["draws"], state["games"]
        self._lengths[:], self._returns[:] = state["lengths"], state["returns"]
        replayed = self._replay(state["backend"])
        lost = np.ones(self.num_envs, bool)
        if replayed is not None:
            frames, self._mask = replayed
            self._observation = {name: np.array(leaf) for name, leaf in state["observation"].items()}
            lost = self._stack.differing(self._observation, frames) | self._unplayed
        if lost.any():
            self._begin_anew(lost)
        self.cut = np.flatnonzero(lost)

    def given_up(self) -> Sequence[int]:
        """Return the environments that were lost and come back no more, unless all are reset."""
        return ()

    def helpers_cpu_s(self) -> float:
        """Return the processor time so far of the processes that its environments have of their own."""
        return 0.0

    def incidents(self) -> list[str]:
        """Return what has happened to environments since the last call and a person should know."""
        told, self._incidents = self._incidents, []
        return told

    @abstractmethod
    def render(self) -> NDArray[np.uint8]:
        """Return environment 0 as an RGB image [height, width, 3]; needs `render=True` when it was made."""

    @abstractmethod
    def close(self) -> None:
        """Give the environments back."""

    @property
    def protocol(self) -> dict[str, Any]:
        """What a score of these environments has to be stated with, as plain values."""
        return {}

    @abstractmethod
    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        """Begin a new seeded game in W environments; return their first frames [W, ...] and masks [W, A]."""

    @abstractmethod
    def _step(self, action: Ints) -> Moment:
        """Step every environment once."""

    def _backend_state(self) -> State:
        """Return what `_replay` needs."""
        return {}

    def _replay(self, state: State) -> tuple[Leaves, Bools | None] | None:
        """Bring every environment back to where it was; return frames and masks [E, ...], or None if that cannot be."""
        return None

    def _draw_seed(self, index: int) -> int:
        """Return the seed of environment `index`'s next seeded game, and go on to the one after it."""
        seed = self._next_seed(index)
        self._draws[index] += 1
        return seed

    def _repeat(self, index: int) -> None:
        """Have environment `index`, which was lost in the game that it is judged by, play it once more.

        Where that is lost, too, something in it may break the environment each time: it is judged by the next one.
        """
        if self._draws[index] == 1 and not self._repeated[index]:
            self._draws[index], self._repeated[index] = 0, True

    def _next_seed(self, index: int) -> int:
        """Return the seed that `_draw_seed` will return."""
        return episode_seed(self._seeds[index], int(self._draws[index]))

    def _fault(self, index: int, what: str) -> EnvironmentFault:
        """Return the error that says what environment `index` did wrong, and when."""
        return fault(self.spec.name, index, what, int(self._games[index]), int(self._lengths[index]))

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what a call of a vector environment returns, or raise the one error for its exception."""
        try:
            return call()
        except EnvironmentFault:
            raise
        except Exception as error:
            raise self._whole_fault(raised(what, error)) from error

    def _whole_fault(self, what: str) -> EnvironmentFault:
        """Return the error for what no single environment of a vector can be blamed for."""
        episodes, steps = self._games.tolist(), self._lengths.tolist()
        return EnvironmentFault(
            f"{self.spec.name}, a vector environment of {self.num_envs}: {what} (its environments were in episodes "
            f"{episodes}, steps {steps}, counted from 0)."
        )

    def _inspect(
        self, frames: Leaves, mask: Bools | None, reward: Doubles | None = None, rows: Ints | None = None
    ) -> None:
        """Raise for the first environment that reports what no learner can use."""
        bad = describe_bad_rows(self._layout.spec, frames, mask, reward)
        if bad is not None:
            row, what = bad
            raise self._fault(row if rows is None else int(rows[row]), what)

    def _begin_anew(self, lost: Bools) -> None:
        """Replace open episodes that could not be continued by new ones."""
        self.resume_grade = "episode"
        self._returns[lost] = 0.0
        self._lengths[lost] = 0
        frames, mask = self._restart(lost)
        self._inspect(frames, mask, rows=np.flatnonzero(lost))
        started = self._stack.start(frames)
        if lost.all():
            self._observation, self._mask = started, mask
            return
        for name, leaf in self._observation.items():
            leaf[lost] = started[name]
        if self._mask is not None:
            self._mask[lost] = mask


def episode_seed(seed: int, draw: int) -> int:
    """Return the seed of an environment's `draw`-th seeded game: the given one first, then 30-bit numbers from it.

    Those lie in training's part of the seeds (`core.seeding`), so that no episode repeats one of an evaluation.

    The finaliser of SplitMix64 over (seed, draw): a generator without state, ten times cheaper than a SeedSequence.
    """
    if draw == 0:
        return seed
    word = (seed * 0xD1342543DE82EF95 + draw * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 34


def fault(name: str, index: int, what: str, episode: int, step: int) -> EnvironmentFault:
    """Return the one error for whatever an environment does wrong."""
    return EnvironmentFault(
        f"{name}, environment {index}: {what} (episode {episode}, step {step}, both counted from 0). "
        "The environment breaks Gymnasium's contract; gymnasium.utils.env_checker.check_env may show where."
    )


def _copied(mask: Bools | None) -> Bools | None:
    return None if mask is None else mask.copy()
