"""The fused rollout loop: its targets are those of the network's values of what each tick led to."""

from __future__ import annotations

import torch

from qfleet.algo.targets import lambda_returns
from qfleet.bench.fused import build_loop, cartpole_pqn
from qfleet.core.spec import PLAIN
from qfleet.roles.fused.rollout_loop import RolloutLoop


def test_targets_are_the_values_of_what_follows() -> None:
    loop = build_loop(cartpole_pqn(envs=6, ticks=40, epochs=1, minibatches=2, width=16))
    assert isinstance(loop, RolloutLoop)
    ticks, tick = [], loop.tick

    def noted() -> object:
        ticks.append(tick())
        return ticks[-1]

    loop.tick = noted  # type: ignore[method-assign]
    loop.set_epsilon()
    data = loop._play()
    observations = [ticked.observation[PLAIN] for ticked, _ in ticks]
    following = torch.stack([*observations[1:], loop.player.observation[PLAIN]])
    with torch.no_grad():
        next_value = loop.update.online.q({PLAIN: following.flatten(0, 1)}).amax(1).view(40, 6)
    terminated = torch.stack([ticked.outcome.terminated for ticked, _ in ticks])
    continues = ~(terminated | torch.stack([ticked.outcome.truncated for ticked, _ in ticks]))
    continues[-1] = False
    reward, agent = torch.stack([reward for _, reward in ticks]), loop.setup.agent
    goal = lambda_returns(reward, agent.gamma * (~terminated).float(), next_value, continues, agent.q_lambda)
    torch.testing.assert_close(data.goal, goal.flatten(), rtol=1e-5, atol=1e-6)
    assert torch.equal(data.observation[PLAIN], torch.cat(observations))
    assert terminated.any()
    assert data.weight is not None
    assert 0 < data.weight.sum() < 240
