"""A compiled tick of CartPole: Gymnasium's physics, and what the player does with tensors."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from qfleet.accel.cpu_games import CartPoleMove
from qfleet.envs.tensor.games import TensorConfig, make_tensor_env
from qfleet.roles.fused.player import Player


def player(envs: int, limit: int, compiled: bool, seed: int = 1) -> Player:
    env = make_tensor_env(TensorConfig(game="cartpole", time_limit=limit))
    found = Player(env, envs, torch.Generator().manual_seed(seed), compiled)
    assert isinstance(found._move, CartPoleMove) == compiled
    return found


def test_the_physics_are_gymnasiums():
    ours, rng = player(64, 500, compiled=True), np.random.default_rng(0)
    theirs = gymnasium.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    ends = 0
    for _ in range(40):
        physics = (rng.uniform(-1, 1, (64, 4)) * (2.5, 3, 0.22, 3)).astype(np.float32)
        values = torch.from_numpy(rng.standard_normal((64, 2)).astype(np.float32))
        ours.state["physics"].copy_(torch.from_numpy(physics))
        ours.state["ended"].fill_(False)
        ticked = ours.tick(lambda _, values=values: values, torch.zeros(()))
        assert torch.equal(ticked.action, values.argmax(1))
        for e in range(64):
            theirs.state, theirs.steps_beyond_terminated = physics[e].astype(np.float64), None
            expected, reward, terminated, _, _ = theirs.step(int(ticked.action[e]))
            np.testing.assert_allclose(ours.state["physics"][e].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert ticked.outcome.reward[e] == reward
            assert bool(ticked.outcome.terminated[e]) == terminated
            ends += terminated
    assert 100 < ends < 2000


@pytest.mark.parametrize("epsilon", [torch.tensor(0.5), torch.linspace(0, 1, 9)])
def test_ticks_equal_those_of_tensors(epsilon):
    """Both play from the same state with the same random numbers; a limit of 12 cuts many episodes."""
    fast, plain = (player(9, 12, compiled) for compiled in (True, False))
    values = torch.Generator().manual_seed(2)
    for _ in range(300):
        q = torch.randn(9, 2, generator=values)
        found, expected = (each.tick(lambda _, q=q: q, epsilon) for each in (fast, plain))
        for name in ("action", "final", "observation"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
        for name in ("reward", "terminated", "truncated", "valid"):
            assert torch.equal(getattr(found.outcome, name), getattr(expected.outcome, name)), name
        for name, value in plain.state.items():
            torch.testing.assert_close(fast.state[name], value, rtol=1e-5, atol=1e-6)
            fast.state[name].copy_(value)  # or rounding would grow
    assert fast.finished.tolist() == plain.finished.tolist()
    assert fast.finished[0] > 100
    assert int(fast.steps) == int(plain.steps)
    assert torch.equal(fast.returns, plain.returns)


def test_a_resumed_player_goes_on_to_the_bit():
    whole, cut = player(5, 20, compiled=True), player(5, 20, compiled=True, seed=9)
    always = torch.ones(())
    for _ in range(30):
        whole.tick(lambda _: torch.zeros(5, 2), always)
    cut.load_state_dict(whole.state_dict())
    cut._generator.set_state(whole._generator.get_state())
    for _ in range(30):
        first, second = (each.tick(lambda _: torch.zeros(5, 2), always) for each in (whole, cut))
        assert all(torch.equal(first.observation[name], second.observation[name]) for name in first.observation)
    assert whole.finished.tolist() == cut.finished.tolist()
