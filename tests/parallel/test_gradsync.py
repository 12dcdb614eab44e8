"""Gradient groups of real processes."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_threads import as_ranks
from summing_role import Handles, Settings, Summing, gradient

from qfleet.core.errors import ConfigError
from qfleet.parallel import gradsync
from qfleet.parallel.gradsync import GradientGroup, interface
from qfleet.parallel.mesh import Degrees, Mesh
from qfleet.runtime.graph import Graph
from qfleet.runtime.meeting import MeetingPlace
from qfleet.runtime.processes import ProcessPlacement


def run_group(size: int, rendezvous: str, deserter: int = -1) -> list[Any]:
    """Return what each rank sent."""
    graph = Graph()
    inlets: list[Any] = []
    for rank in range(size):
        outlet, inlet = graph.stream(f"results-{rank}", 1)
        inlets.append(inlet)
        graph.add(Summing, Settings(rank, size, rendezvous, deserter), Handles(outlet))
    placement = ProcessPlacement(graph)
    try:
        until = time.monotonic() + 60
        while not placement.done:
            assert time.monotonic() < until, placement.reports()
            placement.advance()
        return [placement.open(inlet).receive() for inlet in inlets]
    finally:
        placement.close()


@pytest.mark.parametrize("size", [2, 3])
def test_group_of_real_processes_sums_in_double_precision(size: int, tmp_path: Path) -> None:
    results = run_group(size, f"file://{tmp_path}/meet")
    expected = torch.stack([gradient(rank) for rank in range(size)]).sum(0)
    for summed in results:
        torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12)
        assert torch.equal(summed, results[0]), "the same bits on every rank"


def test_rank_that_left_is_one_clear_error_not_a_hang(tmp_path: Path) -> None:
    results = run_group(2, f"file://{tmp_path}/meet", deserter=1)
    assert "rank 0 of 2: all-reduce failed, another rank may be gone" in results[0].text
    assert results[1] is None


def test_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of a group of 2"):
        GradientGroup(2, 2, "file:///nowhere", 1.0)


def test_nobody_else_comes_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="rank 0 of 2: meeting"):
        GradientGroup(0, 2, f"file://{tmp_path}/meet", 0.5)


def listening() -> set[str]:
    return {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def addresses() -> list[str]:
    """Return the addresses of this machine, loopback first."""
    own = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    return sorted(own, key=lambda address: not address.startswith("127."))


@pytest.mark.parametrize("which", [0, -1], ids=["loopback", "network"])
def test_ranks_of_several_nodes_meet_at_a_store_and_listen_at_one_address(which: int) -> None:
    before, address = listening(), addresses()[which]
    place = MeetingPlace(address)
    assert listening() - before <= {address}
    assert interface(address)
    for life in range(2):
        with ThreadPoolExecutor(2) as pool:
            where = f"{place.address}/learner-{life}"
            groups = list(pool.map(lambda rank: GradientGroup(rank, 2, where, 20.0), range(2)))  # noqa: B023
            sums = list(pool.map(lambda group: group.all_reduce_(torch.ones(3)), groups))
        assert listening() - before <= {address}, "neither the store nor the ranks listen anywhere else"
        assert all(torch.equal(one, torch.full((3,), 2.0)) for one in sums)
        for group in groups:
            group.close()


def test_a_meeting_place_that_is_given_up_listens_no_more() -> None:
    place = MeetingPlace("127.0.0.1")
    port = int(place.address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), 5.0).close()
    del place
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)


def test_an_address_that_is_not_of_this_node_is_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"cannot meet at 203.0.113.77, .*--node-ip-address, or set parallel.across"):
        MeetingPlace("203.0.113.77")


@pytest.mark.parametrize("name", ["lr=0.1 #2", "what?", "100%", "a%20b", "umläut&;="])
def test_ranks_meet_in_folders_of_any_name(name: str, tmp_path: Path) -> None:
    """Torch reads a path as an address, of which only a part would be left."""
    folder = tmp_path / name
    folder.mkdir()

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: GradientGroup(rank, 2, f"file://{folder}/meet", 20.0), range(2)))
    mesh = Mesh(Degrees(), 0, 1, f"file://{folder}/mesh", "cpu", 10.0)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is written beside it"
    for rank in (*groups, mesh):
        rank.close()


def test_ranks_of_other_versions_are_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(["2.11.0", "2.13.0"])
    monkeypatch.setattr(gradsync, "versions", lambda: {"torch": next(numbers), "ray": "2.60"})
    with pytest.raises(
        ConfigError, match=r"need the same versions: rank 0 has torch 2\.1[13]\.0, rank 1 has torch 2\.1"
    ):
        as_ranks(2, lambda group: None)
