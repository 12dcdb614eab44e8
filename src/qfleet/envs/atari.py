"""Atari games through ale-py's vector environment, with the DQN protocol stated in full and bit-exact resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import Field

from qfleet.core.config import Config
from qfleet.core.errors import ConfigError, MissingExtra, did_you_mean
from qfleet.core.role import State
from qfleet.core.spec import PLAIN, LeafSpec
from qfleet.core.types import Array, Bools, Ints, Leaves
from qfleet.envs.journal import Journal
from qfleet.envs.reward import RewardShaping
from qfleet.envs.spaces import Layout, Leaf, read_layout
from qfleet.envs.vector import Moment, VectorEnv

FRAME_SKIP, STACK, SIDE = 4, 4, 84
_SEED_RANGE = 2**31


class AtariConfig(Config):
    """An Atari 2600 game: 84x84 grey, 4 stacked frames, each action held for 4 frames, the last two max-pooled."""

    kind: Literal["atari"] = "atari"
    game: str
    """The ROM's name in snake case, such as "pong" or "space_invaders"."""
    sticky_actions: float = Field(0.0, ge=0, lt=1)
    """Probability that the console repeats the previous action: 0 as in the DQN paper, 0.25 as in Machado et al."""
    noop_max: int = Field(30, ge=0)
    """A game begins with up to this many frames without action."""
    fire_reset: bool = True
    """Press fire at the start of games that wait for it."""
    life_loss: bool = False
    """A lost life ends an episode for learning; the game and its score go on, and evaluation never does this."""
    full_action_set: bool = False
    """All 18 actions of the console instead of those that the game uses."""
    reward_clip: float | None = Field(1.0, gt=0)
    """Rewards for learning are limited to plus or minus this; scores never are."""
    max_frames: int = Field(108_000, ge=1)
    """Frames (4 for each step) after which a game is truncated; 108,000 are 30 minutes of play."""
    threads: int = Field(0, ge=0)
    """Threads that step an actor's games; 0 for as many as there are cores, which evaluations always have: the
    run may wait for their score. Results do not depend on it."""
    reseed_every: int = Field(20_000, ge=1)
    """A game's first end after this many steps of its environment is followed by a seeded reset (about 0.1 s).

    A resume replays at most this many steps and one game; a smaller number resumes sooner and plays more slowly.
    """


class AtariEnv(VectorEnv):
    """Games that reset themselves on the step after their end, and now and then from a seed.

    A seeded reset costs 0.1 s, so that seeding every game would cost more than playing it. Since it happens at
    places that depend only on the steps taken, and the actions since are kept, any moment can be replayed.
    """

    def __init__(self, config: AtariConfig, num_envs: int, evaluation: bool = False) -> None:
        self._env: Any = _build(config, num_envs, threads=0 if evaluation else config.threads)
        layout = _stacked_layout(config.game, self._env)
        super().__init__(layout, num_envs, RewardShaping(clip=None if evaluation else config.reward_clip))
        self._config = config
        self._life_loss = config.life_loss and not evaluation
        self._journal = Journal(num_envs, config.reseed_every)
        self._pending = np.zeros(num_envs, bool)
        self._lives = np.zeros(num_envs, np.int32)
        self._age = np.zeros(num_envs, np.int64)
        self._powered_on = self._begun = False
        self._received: tuple[Any, ...] | None = None

    @property
    def protocol(self) -> dict[str, Any]:
        """What a score has to be stated with."""
        fixed = {"frame_skip": FRAME_SKIP, "frame_stack": STACK, "size": SIDE, "grey": True, "max_pool": True}
        return {**fixed, **self._config.model_dump(exclude={"kind", "threads", "reseed_every"})}

    def render(self) -> NDArray[np.uint8]:
        """Return what the agent of environment 0 sees: its newest frame [84, 84, 3], grey."""
        newest = self._observation[PLAIN][0, -1].astype(np.uint8)
        return np.repeat(newest[:, :, None], 3, axis=2)

    def close(self) -> None:
        """Close the games and let go of them: ale-py complains aloud of those that are there when a process ends."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def begin(self, action: Ints) -> Callable[[], None]:
        """Let the games' own threads step them."""
        self._call("step()", lambda: self._env.send(action))
        self._begun = True
        return self._receive

    def _receive(self) -> None:
        self._received = self._call("step()", self._env.recv)

    def _restart(self, which: Bools) -> tuple[Leaves, Bools | None]:
        chosen = np.flatnonzero(which)
        seeds = [self._draw_seed(index) % _SEED_RANGE for index in chosen.tolist()]
        for index, seed in zip(chosen.tolist(), seeds, strict=True):
            self._journal.open(index, seed)
        return {PLAIN: self._seeded_reset(which, seeds)[which]}, None

    def _step(self, action: Ints) -> Moment:
        moment = self._advance(action)
        self._journal.record(action)
        due = [index for index in moment.scored.tolist() if self._journal.due(index)]
        if due:
            which = np.zeros(self.num_envs, bool)
            which[due] = True
            first, _ = self._restart(which)
            moment.observation[PLAIN][which] = first[PLAIN]
            moment.fresh[which] = True
        return moment

    def _advance(self, action: Ints) -> Moment:
        """Step every game, with the loss of a life turned into an episode's end where that is asked for."""
        if not self._begun:
            self.begin(action)
        if self._received is None:
            self._receive()
        assert self._received is not None
        frames, reward, ended, stopped, info = self._received
        self._received, self._begun = None, False
        begun, valid = self._pending, ~self._pending
        terminated, truncated = ended & valid, stopped & valid
        over = terminated | truncated
        fresh = begun.copy()
        lives = info["lives"]
        self._age = np.where(begun, 0, self._age + 1)
        if self._life_loss:
            died = valid & ~over & (lives < self._lives)
            terminated |= died
            _hide_older_frames(frames, self._age)
        finished = np.flatnonzero(terminated | truncated)
        final = frames[finished]
        if self._life_loss and died.any():
            self._age[died] = 0
            fresh |= died
            _hide_older_frames(frames, self._age)
        self._pending, self._lives = over, lives
        return Moment(
            observation={PLAIN: frames},
            mask=None,
            reward=reward.astype(np.float64),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            fresh=fresh,
            finished=finished,
            final_observation={PLAIN: final},
            final_mask=None,
            scored=np.flatnonzero(over),
        )

    def _seeded_reset(self, which: Bools, seeds: list[int]) -> Array:
        """Reset some games, each from its seed; return the stacks [E, 4, 84, 84] of all."""
        if not self._powered_on:
            self._call("reset()", self._env.reset)  # a reset of some games is only allowed after one of all
            self._powered_on = True
        chosen = {"seed": np.array(seeds, np.int64), "options": {"reset_mask": which}}
        frames, info = self._call("reset()", lambda: self._env.reset(**chosen))
        self._pending = self._pending & ~which
        self._lives = np.where(which, info["lives"], self._lives)
        self._age = np.where(which, 0, self._age)
        return np.array(frames)

    def _backend_state(self) -> State:
        return self._journal.state_dict()

    def _replay(self, state: State) -> tuple[Leaves, Bools | None]:
        """Play every game's log so that all logs end together; before its seeded reset a game plays anything."""
        self._journal.load_state_dict(state)
        lengths = np.array([len(log) for log in self._journal.actions])
        longest = int(lengths.max())
        script = np.zeros((longest, self.num_envs), np.int64)
        for index, log in enumerate(self._journal.actions):
            script[longest - len(log) :, index] = log
        frames: Array = np.empty(0)
        for tick in range(longest + 1):
            starting = lengths == longest - tick
            if starting.any():
                seeds = [seed for seed, starts in zip(self._journal.seeds, starting, strict=True) if starts]
                stacks = self._seeded_reset(starting, seeds)
                frames = np.where(starting[:, None, None, None], stacks, frames) if tick else stacks
            if tick < longest:
                frames = self._advance(script[tick]).observation[PLAIN]
        return {PLAIN: frames}, None


def _hide_older_frames(stacks: Array, age: Ints) -> None:
    """Blank what lies before an episode's first frame, in place: stacks [E, 4, 84, 84], age in frames [E]."""
    for index in np.flatnonzero(age < STACK - 1).tolist():
        stacks[index, : STACK - 1 - age[index]] = 0


def _build(config: AtariConfig, num_envs: int, threads: int) -> Any:
    try:
        from ale_py import roms
        from ale_py.vector_env import AtariVectorEnv
    except ImportError:
        raise MissingExtra("ale-py", "atari", f"the Atari game '{config.game}'") from None
    games = roms.get_all_rom_ids()
    if config.game not in games:
        raise ConfigError(f"no Atari game '{config.game}'; names are in snake case.{did_you_mean(config.game, games)}")
    try:
        return AtariVectorEnv(
            config.game,
            num_envs,
            num_threads=threads,
            max_num_frames_per_episode=config.max_frames,
            repeat_action_probability=config.sticky_actions,
            full_action_space=config.full_action_set,
            img_height=SIDE,
            img_width=SIDE,
            stack_num=STACK,
            frameskip=FRAME_SKIP,
            noop_max=config.noop_max,
            use_fire_reset=config.fire_reset,
            reward_clipping=False,  # it would hide the score; the adapter clips
            episodic_life=False,  # it resets the whole game; the adapter watches the lives
        )
    except Exception as error:
        raise ConfigError(f"atari:{config.game} cannot be made: {type(error).__name__}: {error}") from error


def _stacked_layout(game: str, env: Any) -> Layout:
    """Return the layout with the leading axis marked as a stack that ale-py fills with zeros."""
    assert isinstance(env.single_observation_space, spaces.Box)
    plain = read_layout(f"atari:{game}", env.single_observation_space, env.single_action_space, {})
    leaf = LeafSpec(shape=(STACK, SIDE, SIDE), dtype="uint8", stack=STACK, stack_padding="zero")
    spec = plain.spec.replace(observations={PLAIN: leaf})
    return Layout(spec, (Leaf(PLAIN, (), np.dtype(np.uint8), leaf),), plain.table)
