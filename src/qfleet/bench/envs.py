"""The tensor-native games alone: random steps a second of one or many environments, beside the game's own package.

Our steps are valid transitions; observations are made at every one, as the peers make theirs.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, get_args

import gymnasium
import numpy as np
import torch

from qfleet.accel.graphs import Recording
from qfleet.bench.table import Row
from qfleet.bench.timing import per_second
from qfleet.envs.tensor.games import TensorConfig, make_tensor_env
from qfleet.roles.fused.player import Player

GAMES: tuple[str, ...] = get_args(TensorConfig.model_fields["game"].annotation)
COUNTS = (1, 128, 4096)
TICKS = 16
"""Ticks in one piece of work."""
_GYMNASIUM = {"cartpole": "CartPole-v1", "acrobot": "Acrobot-v1"}
_MINATAR = "minatar"


def measure(games: Sequence[str] = GAMES, counts: Sequence[int] = COUNTS, seconds: float = 0.5) -> list[Row]:
    """Step each game with each number of environments for some seconds, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for game in games:
        peer = peer_of(game)
        theirs = None if peer is None else _peer_rate(peer[1], seconds)
        for envs in counts:
            ours = game_rate(game, envs, device, seconds)
            rows.append(
                Row(
                    what=f"{game}, {envs:,} environments, {device.type}",
                    ours=f"{ours:,.0f} steps/s",
                    peer=f"{theirs:,.0f} steps/s ({peer[0]}, one environment)" if peer and theirs else "",
                    ratio=ours / theirs if theirs else None,
                )
            )
    return rows


def game_rate(game: str, envs: int, device: torch.device, seconds: float) -> float:
    """Return transitions a second of E environments under random actions."""
    env = make_tensor_env(TensorConfig.model_validate({"game": game}))
    generator = torch.Generator(device).manual_seed(1)
    player = Player(env, envs, generator, compiled=device.type == "cpu")
    values, always = torch.zeros(envs, env.spec.actions, device=device), torch.ones((), device=device)

    def some_ticks() -> None:
        for _ in range(TICKS):
            player.tick(lambda _: values, always)

    playing = Recording(some_ticks, (generator,), enabled=device.type == "cuda")
    rate = per_second(playing, seconds) * TICKS
    return rate * _valid_share(player)


def _valid_share(player: Player) -> float:
    """Return which part of all ticks are transitions: the tick after an episode's end only begins the next one."""
    steps, episodes = float(player.steps), float(player.finished[0])
    return player.envs * steps / (steps + episodes)


def peer_of(game: str) -> tuple[str, Callable[[], Callable[[], None]]] | None:
    """Return the name of another package that has the game, and what makes one random step after the other in it."""
    if game in _GYMNASIUM:
        return "Gymnasium", lambda: _gymnasium_stepper(_GYMNASIUM[game])
    name = game.removeprefix("minatar-")
    if name != game and find_spec(_MINATAR) is not None:
        return _MINATAR, lambda: _minatar_stepper(name)
    return None


def _gymnasium_stepper(name: str) -> Callable[[], None]:
    env: Any = gymnasium.make(name)
    env.reset(seed=1)
    rng = np.random.default_rng(1)

    def step() -> None:
        _, _, terminated, truncated, _ = env.step(int(rng.integers(env.action_space.n)))
        if terminated or truncated:
            env.reset()

    return step


def _minatar_stepper(name: str) -> Callable[[], None]:
    env = importlib.import_module(_MINATAR).Environment(name)
    rng, actions = np.random.default_rng(1), env.num_actions()

    def step() -> None:
        _, terminated = env.act(int(rng.integers(actions)))
        env.state()
        if terminated:
            env.reset()

    return step


def _peer_rate(make: Callable[[], Callable[[], None]], seconds: float) -> float:
    step = make()
    began, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds or not steps:
        for _ in range(20):
            step()
        steps += 20
    return steps / spent
