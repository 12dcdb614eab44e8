"""The fused rollout loop: its targets are those of the network's values of what each tick led to."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from qfleet.algo.targets import lambda_returns
from qfleet.bench.fused import build_loop, cartpole_pqn
from qfleet.core.spec import PLAIN
from qfleet.experiment import with_changes
from qfleet.presets import preset
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


def test_a_rehearsal_leaves_the_loop_as_it_is() -> None:
    loops = [build_loop(cartpole_pqn(envs=6, ticks=8, epochs=2, minibatches=2, width=16)) for _ in range(2)]
    assert isinstance(loops[0], RolloutLoop)
    loops[0]._rehearse(deepcopy(loops[0].update.online))
    for loop in loops:
        for _ in range(3):
            loop.advance()
    first, second = (loop.update.flat.to_numpy() for loop in loops)
    assert (first == second).all(), "the first has rehearsed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_are_rehearsed_and_the_loop_learns_the_same() -> None:
    settings = {"device": "cuda", "accel.compile": "off", "actor.envs": 64, "env_steps": 100_000}
    loops = [build_loop(with_changes(preset("minatar:breakout"), settings)) for _ in range(2)]
    assert all(isinstance(loop, RolloutLoop) and loop._rehearsal is not None for loop in loops)
    loops[0]._rehearsal.end()
    loops[1]._rehearsal.end()
    loops[1]._rehearse(deepcopy(loops[1].update.online))  # raises what a thread would keep to itself
    for loop in loops:
        loop.advance()
    assert torch.equal(loops[0].update.flat.parameters, loops[1].update.flat.parameters)
