"""Ranks that learn apart and meet every few updates."""

from __future__ import annotations

import numpy as np
import torch
from rank_threads import BUILDING, as_ranks

from qfleet.algo.agent import ReplayAgent
from qfleet.algo.networks import build_network
from qfleet.algo.optim import SgdConfig
from qfleet.algo.torsos import MlpConfig
from qfleet.core.spec import PLAIN, EnvSpec, LeafSpec
from qfleet.parallel.local import LocalConfig, LocalStep

SPEC = EnvSpec(name="vectors", observations={PLAIN: LeafSpec(shape=(3,), dtype="float32")}, actions=2)


def make_step(group, **settings):
    with BUILDING:
        network = build_network(MlpConfig(hidden=(4,)), ReplayAgent(), SPEC, seed=0)
    optim = SgdConfig(lr=0.1)
    return LocalStep(network, optim, 100, group.all_reduce_, config=LocalConfig(**settings), ranks=group.size)


def gradient(rank: int, number: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + number))


def advance(step, rank: int, numbers) -> list[torch.Tensor]:
    """The weights after each update; losses are shares of the whole batch's."""
    seen = []
    for number in numbers:
        step.flat.gradients.copy_(gradient(rank, number, step.flat.gradients.numel()) / 2)
        step(torch.zeros(()))
        seen.append(step.flat.parameters.clone())
    return seen


def test_ranks_differ_between_meetings_and_agree_after_each():
    first, second = as_ranks(2, lambda group: advance(make_step(group, period=3), group.rank, range(9)))
    for number in range(9):
        assert torch.equal(first[number], second[number]) == (number % 3 == 2)


def test_without_momentum_a_meeting_is_the_mean():
    def work(group):
        step = make_step(group, period=2, outer_lr=1.0, outer_momentum=0.0)
        return step.flat.parameters.clone(), advance(step, group.rank, range(2))[-1]

    (begin, found), _ = as_ranks(2, work)
    ways = [0.1 * (gradient(rank, 0, len(begin)) + gradient(rank, 1, len(begin))) for rank in range(2)]
    torch.testing.assert_close(found, begin - (ways[0] + ways[1]) / 2, rtol=1e-5, atol=1e-6)


def test_momentum_is_that_of_torchs_own_optimiser():
    """Torch's SGD with Nesterov momentum, given the mean ways as gradients, is the oracle."""

    def work(group):
        step = make_step(group, period=2, outer_lr=0.7, outer_momentum=0.9)
        return step.flat.parameters.clone(), advance(step, group.rank, range(8))[1::2]

    (begin, met), _ = as_ranks(2, work)
    outer = begin.clone()
    optimiser = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for meeting in range(4):
        ways = [0.1 * sum(gradient(rank, 2 * meeting + at, len(begin)) for at in range(2)) for rank in range(2)]
        outer.grad = (ways[0] + ways[1]) / 2
        optimiser.step()
        torch.testing.assert_close(met[meeting], outer, rtol=1e-4, atol=1e-5)


def test_a_saved_step_goes_on_bit_by_bit_between_two_meetings():
    def uncut(group):
        return advance(make_step(group, period=4), group.rank, range(10))[-1]

    def cut(group):
        step = make_step(group, period=4)
        advance(step, group.rank, range(6))
        resumed = make_step(group, period=4)
        resumed.load_state_dict(step.state_dict())
        return advance(resumed, group.rank, range(6, 10))[-1]

    for whole, parts in zip(as_ranks(2, uncut), as_ranks(2, cut), strict=True):
        assert torch.equal(whole, parts)


def test_a_step_that_is_not_finite_is_left_out_on_its_rank_and_all_still_meet():
    def work(group):
        step = make_step(group, period=2)
        advance(step, group.rank, range(1))
        step.flat.gradients.fill_(np.nan if group.rank == 1 else 0.1)
        made, _ = step(torch.zeros(()))
        return made, step.flat.parameters.clone()

    (first, weights), (second, others) = as_ranks(2, work)
    assert (first, second) == (True, False)
    assert torch.equal(weights, others)
    assert weights.isfinite().all()
