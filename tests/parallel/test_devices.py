"""Ranks on GPUs: each has its own as long as there are enough, and gradients go by NCCL only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import as_ranks
from torch import distributed

from qfleet.parallel import devices, gradsync
from qfleet.parallel.devices import LAST, NAME_BYTES, all_have_their_own, in_turn, own_device, server_turn, sharers
from qfleet.parallel.gradsync import GradientGroup


@pytest.mark.parametrize(("gpus", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_gpus_are_dealt_out_in_turn(gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [own_device("cuda", rank) for rank in range(4)] == [f"cuda:{number}" for number in expected]
    assert chosen == expected, "and each process is on its own"


def test_other_devices_stay_as_they_are() -> None:
    assert own_device("cpu", 3) == "cpu"
    assert own_device("cuda", None) == "cuda", "it shares its process with others"
    assert devices.device_name(torch.device("cpu")) == bytes(NAME_BYTES)


@given(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10))
def test_servers_and_the_evaluator_are_where_no_learner_is_as_long_as_there_is_such_a_gpu(
    gpus: int, learners: int, servers: int
) -> None:
    ranks = [in_turn(rank, gpus) for rank in range(learners)]
    serving = [in_turn(server_turn(index, learners), gpus) for index in range(servers)]
    free = sorted(set(range(gpus)) - set(ranks))
    assert serving[: len(free)] == free[:servers], "the free ones first"
    shared = [(ranks + serving).count(gpu) for gpu in range(gpus)]
    assert max(shared) - min(shared) <= 1, "then in turn"
    assert in_turn(LAST, gpus) == (free or range(gpus))[-1]


@given(st.integers(1, 8), st.integers(1, 10))
def test_the_memory_of_a_gpu_is_shared_by_the_ranks_that_have_it(gpus: int, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "device_count", lambda: gpus)
        patched.setattr(torch.cuda, "set_device", lambda number: None)
        own = [own_device("cuda", rank) for rank in range(ranks)]
        assert [sharers(device, ranks) for device in own] == [own.count(device) for device in own]
        assert sharers("cuda", ranks) == sharers("cpu", ranks) == ranks, "of one process, or of one memory"


@given(st.lists(st.sampled_from([bytes(NAME_BYTES), b"a" * NAME_BYTES, b"b" * NAME_BYTES, b"c" * NAME_BYTES])))
def test_nccl_needs_a_gpu_for_each_rank(names: list[bytes]) -> None:
    on_gpus = all(any(name) for name in names)
    assert all_have_their_own(names) == (on_gpus and all(names.count(name) == 1 for name in names))


@pytest.mark.parametrize(("own", "transport"), [([0, 1], "NCCL"), ([0, 0], "gloo"), ([0, None], "gloo")])
def test_all_ranks_choose_the_same_transport(
    own: list[int | None], transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another gloo group stands in for NCCL's, which needs GPUs; what is on the host goes by gloo in any case."""

    def named(device: torch.device) -> bytes:
        number = own[device.index or 0]
        return bytes(NAME_BYTES) if number is None else bytes([number + 1]) * NAME_BYTES

    def joined(store: Any, rank: int, size: int, timeout: Any) -> Any:
        gloo: Any = distributed.ProcessGroupGloo
        return gloo(distributed.PrefixStore("stand-in", store), rank, size, timeout)

    monkeypatch.setattr(gradsync, "device_name", named)
    monkeypatch.setattr(gradsync, "join_by_nccl", joined)

    def work(group: GradientGroup) -> tuple[str, float, float]:
        host = group.all_reduce_(torch.tensor([1.0 + group.rank]))
        device = GradientGroup._carrier(group, _OnGpu()).allreduce  # type: ignore[arg-type]
        vector = torch.tensor([10.0 + group.rank])
        device([vector]).wait()
        return group.transport, host.item(), vector.item()

    assert as_ranks(2, work, [f"cuda:{rank}" for rank in range(2)]) == [(transport, 3.0, 21.0)] * 2


class _OnGpu:
    """All that is asked of a tensor to find its carrier."""

    is_cuda = True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_sums_by_nccl_on_a_gpu(tmp_path: Path) -> None:
    device = own_device("cuda", 0)
    group = GradientGroup(0, 1, f"file://{tmp_path}/meet", 60.0, device)
    try:
        assert group.transport == "NCCL"
        vector = torch.arange(1000.0, device=device)
        assert torch.equal(group.all_reduce_(vector.clone()), vector)
        assert torch.equal(group.all_gather(vector)[0], vector)
        assert torch.equal(group.all_reduce_(torch.tensor([3])), torch.tensor([3])), "what is on the host goes by gloo"
    finally:
        group.close()
