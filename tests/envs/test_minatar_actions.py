"""The MinAtar games offer the actions that do something in them, as the `minatar` package's version 1 does."""

from __future__ import annotations

import minatar
import pytest
import torch

from qfleet.core.spec import PLAIN
from qfleet.envs.tensor.games import make_game
from qfleet.envs.tensor.protocol import TensorEnv

GAMES = ["breakout", "asterix", "freeway", "seaquest", "space_invaders"]


@pytest.mark.parametrize("game", GAMES)
def test_the_actions_are_the_packages_minimal_ones(game):
    wanted = minatar.Environment(game).minimal_action_set()

    assert list(type(make_game(f"minatar-{game}")).moves) == wanted
    assert make_game(f"minatar-{game}").spec.actions == len(wanted)
    assert make_game(f"minatar-{game}", all_actions=True).spec.actions == 6


@pytest.mark.parametrize("game", GAMES)
def test_an_action_is_played_as_the_one_that_its_number_stands_for(game):
    few, all_of_them = make_game(f"minatar-{game}"), make_game(f"minatar-{game}", all_actions=True)
    env, other_env, moves = TensorEnv(few), TensorEnv(all_of_them), torch.tensor(few.moves)
    generator = torch.Generator().manual_seed(5)
    state = other = env.reset(torch.rand(32, env.draws, generator=generator))

    for _ in range(40):
        action = torch.randint(len(moves), (32,), generator=generator)
        random = torch.rand(32, env.draws, generator=generator)
        state, outcome = env.step(state, action, random)
        other, other_outcome = other_env.step(other, moves[action], random)
        assert torch.equal(env.observe(state)[PLAIN], other_env.observe(other)[PLAIN])
        assert torch.equal(outcome.reward, other_outcome.reward)
        assert torch.equal(outcome.terminated, other_outcome.terminated)
