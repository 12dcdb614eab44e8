"""Ranks that take turns in one process: always in one order, and with the sums of a real group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import BUILDING, as_ranks
from torch import nn

from qfleet.core.errors import Deadlock, QfleetError
from qfleet.parallel.buckets import BucketedSum
from qfleet.parallel.group import Group
from qfleet.parallel.turns import TurnGroup, Turns

Result = TypeVar("Result")


def in_turns(size: int, work: Callable[[Group], Result]) -> list[Result]:
    turns = Turns(size)
    return turns.together(lambda rank: work(TurnGroup(rank, turns)))


def vector(rank: int, dtype: torch.dtype, size: int = 1001) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_sums_are_those_of_a_real_group(size: int, dtype: torch.dtype, tolerance: float) -> None:
    def summed(group: Group) -> torch.Tensor:
        return group.all_reduce_(vector(group.rank, dtype))

    found, real = in_turns(size, summed), as_ranks(size, summed)[0]
    assert all(torch.equal(one, found[0]) for one in found), "the same bits on every rank"
    assert (found[0] - real).norm() <= tolerance * real.norm()
    if size == 2:
        assert torch.equal(found[0], real), "there is one order only"


@pytest.mark.parametrize("size", [2, 3])
def test_updates_in_double_precision_are_those_of_a_real_group(size: int) -> None:
    """Sums in pieces, during the backward pass, then the norm's limit and the optimiser: to 1e-12."""
    whole = vector(9, torch.float64, 34).view(17, 2)

    def learned(group: Group) -> torch.Tensor:
        with BUILDING:
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 1)).double()
        gradients, begin = torch.zeros(37, dtype=torch.float64), 0
        for parameter in network.parameters():
            parameter.grad = gradients[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        buckets, optimiser = BucketedSum(group), torch.optim.Adam(network.parameters(), lr=0.01)
        buckets.attach(network, gradients, bucket_bytes=80)
        for _ in range(10):
            gradients.zero_()
            loss = network(whole[group.rank :: group.size]).sub(1).square().sum() / len(whole)
            loss.backward()
            buckets(gradients)
            nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            optimiser.step()
        return nn.utils.parameters_to_vector(network.parameters()).detach()

    found, real = in_turns(size, learned), as_ranks(size, learned)
    assert real[0].dtype == torch.float64
    for ours, theirs in zip(found, real, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_what_is_gathered_and_shared_is_that_of_a_real_group() -> None:
    def told(group: Group) -> tuple[list[list[int]], bytes]:
        return [one.tolist() for one in group.all_gather(torch.tensor([group.rank, 7]))], group.share(b"of rank 0")

    assert in_turns(3, told) == as_ranks(3, told) == [([[0, 7], [1, 7], [2, 7]], b"of rank 0")] * 3


def test_a_rank_with_other_weights_is_named() -> None:
    with pytest.raises(QfleetError, match="the weights of rank 2 differ"):
        in_turns(3, lambda group: group.require_same(group.rank // 2, "the weights"))


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 4), calls=st.lists(st.sampled_from(["sum", "gather", "pieces"]), max_size=6))
def test_one_rank_runs_at_a_time_in_the_order_of_ranks(size: int, calls: list[str]) -> None:
    """Between two meetings each rank runs once, whole; what it gave away may change afterwards."""
    seen: list[tuple[int, int]] = []

    def work(group: Group) -> list[Any]:
        results: list[Any] = []
        for number, call in enumerate([*calls, "end"]):
            seen.append((number, group.rank))
            mine = torch.tensor([group.rank + 10.0 * number])
            if call == "sum":
                results.append(float(group.all_reduce_(mine)))
            elif call == "gather":
                results.append([float(one) for one in group.all_gather(mine)])
                mine.zero_()
            elif call == "pieces":
                both = torch.cat([mine, 2 * mine])
                for end in [group.begin_all_reduce(both[:1]), group.begin_all_reduce(both[1:])]:
                    end()
                results.append(both.tolist())
        return results

    def expected(number: int, call: str) -> Any:
        brought = [rank + 10.0 * number for rank in range(size)]
        return {"sum": sum(brought), "gather": brought, "pieces": [sum(brought), 2 * sum(brought)]}[call]

    assert in_turns(size, work) == [[expected(*call) for call in enumerate(calls)]] * size
    assert seen == [(number, rank) for number in range(len(calls) + 1) for rank in range(size)]
    assert not running()


def test_an_error_of_one_rank_is_raised_and_ends_the_others() -> None:
    ended = []

    def work(group: Group) -> None:
        try:
            if group.rank == 1:
                raise ValueError("of rank 1")
            group.all_reduce_(torch.zeros(1))
        finally:
            ended.append(group.rank)

    with pytest.raises(ValueError, match="of rank 1"):
        in_turns(3, work)
    assert sorted(ended) == [0, 1], "the third one never began"
    assert not running()


def test_a_rank_that_others_wait_for_is_called_again_if_it_may() -> None:
    turns, calls = Turns(2), [0, 0]

    def work(rank: int) -> str:
        calls[rank] += 1
        if rank == 0 and calls[0] < 3:
            return "something else"
        return f"met {TurnGroup(rank, turns).all_reduce_(torch.ones(1)).item():.0f}"

    assert turns.together(work, again=lambda result: result == "something else") == ["met 2", "met 2"]
    assert calls == [3, 1]
    calls[:] = [0, 0]
    with pytest.raises(Deadlock, match="rank 0 has ended its turn with something else; others wait for it"):
        turns.together(work)
    assert not running()
