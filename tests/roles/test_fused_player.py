"""A game whose rules torch.compile fused on the device is the game that it was."""

from __future__ import annotations

import pytest
import torch

from qfleet.envs.tensor.games import TensorConfig, make_tensor_env
from qfleet.roles.fused.player import Player

GAMES = [f"minatar-{game}" for game in ("breakout", "asterix", "freeway", "seaquest", "space_invaders")]
ENVS, TICKS = 64, 300


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="games are only compiled on a CUDA device")
@pytest.mark.parametrize("game", [*GAMES, "catch", "maze"])
def test_a_compiled_game_equals_the_plain_one_tick_by_tick(game):
    torch._dynamo.reset()  # each game is compiled anew: more than a few would exceed the compiler's limit
    env = make_tensor_env(TensorConfig(game=game))
    plain, fused = (Player(env, ENVS, torch.Generator("cuda").manual_seed(1), compiled=c) for c in (False, True))
    numbers, epsilon = torch.Generator("cuda").manual_seed(3), torch.full((ENVS,), 0.5, device="cuda")

    for _ in range(TICKS):
        q = torch.rand(ENVS, env.game.spec.actions, generator=numbers, device="cuda")
        one, other = (player.tick(lambda _, q=q: q, epsilon) for player in (plain, fused))
        assert torch.equal(one.action, other.action)
        assert torch.equal(one.outcome.reward, other.outcome.reward)
        assert all(torch.equal(one.observation[name], other.observation[name]) for name in one.observation)
        assert all(torch.equal(plain.state[name], fused.state[name]) for name in plain.state)
    assert torch.equal(plain.finished, fused.finished)
    assert torch.equal(plain.steps, fused.steps)
