"""What only a real Ray can get wrong: deaths of roles and of their steward, hung roles, two nodes, a node that is lost.

Every steward's forkserver imports torch anew, so that a test has several things happen to one placement.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_process_placement import alive, own_folders, wait_until
from test_restarts import POINTS
from toy_roles import Handles, KeptConsumer, KeptProducer, Settings, kept_pipeline, save

from qfleet.core.errors import ConfigError, RoleFailure
from qfleet.core.protocols import Incident
from qfleet.runtime.ray_cluster import Site, deal

PATIENCE_S = 180.0


def advance_until(placement: Any, condition: Callable[[], bool], what: str) -> None:
    wait_until(lambda: bool(placement.advance() or condition()), what, PATIENCE_S)


def metrics(placement: Any) -> dict[str, dict[str, float]]:
    return {report.kind: report.metrics for report in placement.reports()}


def position(placement: Any, kind: str = "kept_consumer") -> float:
    return metrics(placement)[kind].get("position", 0.0)


def end(placement: Any, count: int) -> list[Incident]:
    """Let a run go to its end; returns its incidents. Nothing may be left of it."""
    try:
        advance_until(placement, lambda: bool(placement.done), "the run ends")
        assert {kind: one["position"] for kind, one in metrics(placement).items()} == {
            "kept_producer": count,
            "kept_consumer": count,
        }
    finally:
        pids = list(placement.pids().values())
        placement.close()
        wait_until(lambda: not any(alive(pid) for pid in pids), "all actors are gone", PATIENCE_S)
        assert own_folders(os.getpid()) == []
    return [one for one in placement.incidents() if isinstance(one, Incident)]


def test_trap_16_actors_that_die_are_begun_anew_and_nothing_is_lost(ray_session: None, tmp_path: Path) -> None:
    """By the system's hand alone, by Ray's all at once, just before a pause; what a dead role had started dies, too."""
    import ray

    from qfleet.runtime.ray import RayPlacement

    placement = RayPlacement(kept_pipeline(300, pace_s=0.01, producer_fault="children"))
    advance_until(placement, lambda: metrics(placement)["kept_producer"].get("helper0", 0) > 0, "it has a child")
    first = placement.pids()
    os.kill(first["kept_producer-0"], signal.SIGKILL)
    advance_until(placement, lambda: metrics(placement)["kept_producer"].get("helper1", 0) > 0, "it lives again")
    assert placement.pids()["kept_consumer-0"] == first["kept_consumer-0"]
    helpers = [int(metrics(placement)["kept_producer"][f"helper{life}"]) for life in (0, 1)]
    ray.kill(placement._lives["kept_consumer-0"].line.steward)
    save(placement, tmp_path)
    incidents = end(placement, 300)
    assert [(one.role, one.life) for one in incidents][:1] == [("kept_producer", 1)]
    assert {(one.role, one.life) for one in incidents[1:]} == {("kept_producer", 2), ("kept_consumer", 1)}
    assert incidents[0].cause.startswith("its process was killed by SIGKILL")
    assert all("killed by `ray.kill`" in one.cause for one in incidents[1:])
    assert len(incidents) == 3
    wait_until(lambda: not any(alive(pid) for pid in (*helpers, *first.values())), "nothing is left")
    again = RayPlacement(kept_pipeline(300, pace_s=0.001))
    again.restore(tmp_path)
    assert end(again, 300) == []


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_death_of_an_actor_at_any_point_loses_no_message(
    point: str, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfleet.runtime.ray import RayPlacement

    monkeypatch.setenv("QFLEET_FAIL", point)
    placement = RayPlacement(kept_pipeline(60))
    dead = {"kept_producer", "kept_consumer"} if "/" not in point else {point.split("-")[0]}
    assert {incident.role for incident in end(placement, 60)} == dead


@pytest.mark.slow
def test_actors_that_hang_or_are_stopped_are_begun_anew(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet.runtime.ray import RayPlacement

    monkeypatch.setenv("QFLEET_FAIL", "kept_consumer-0/worker.step:hang@5")
    placement = RayPlacement(kept_pipeline(300, pace_s=0.01), stall=5.0)
    advance_until(placement, lambda: position(placement) > 20, "the one that hung lives again")
    os.kill(placement.pids()["kept_producer-0"], signal.SIGSTOP)
    causes = [incident.cause for incident in end(placement, 300)]
    assert "it hung: " in causes[0]
    assert "silent for" in causes[1]


@pytest.mark.slow
def test_too_many_deaths_of_a_group_of_actors_are_one_error(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from qfleet.runtime.ray import RayPlacement

    monkeypatch.setenv("QFLEET_FAIL", "kept_producer-1/worker.step:kill@3:always")
    graph = kept_pipeline(1000, pace_s=0.01)
    outlet, _ = graph.stream("other", 1000)
    graph.add(KeptProducer, Settings(count=1000), Handles(outlet=outlet, keep=graph.keep("second")))
    placement = RayPlacement(graph, groups=("kept_producer",), restarts=1)
    with pytest.raises(RoleFailure) as caught:
        advance_until(placement, lambda: False, "the failure")
    assert (caught.value.role, caught.value.index) == ("kept_producer", 1)
    assert "that was death 2 in a row after little or no work" in caught.value.cause


@pytest.mark.slow
def test_edges_between_two_nodes_survive_deaths_and_a_lost_node_is_named(
    second_node: Callable[[], None], tmp_path: Path
) -> None:
    from qfleet.runtime.ray import RayPlacement

    placement = RayPlacement(kept_pipeline(300, pace_s=0.01), anywhere=("kept_producer",))
    homes = {name: site.id for name, site in placement._homes.items()}
    assert homes["kept_producer-0"] != homes["kept_consumer-0"]
    advance_until(placement, lambda: position(placement) > 20, "messages come over")
    os.kill(placement.pids()["kept_producer-0"], signal.SIGKILL)
    advance_until(placement, lambda: position(placement) > 100, "the sender lives again")
    os.kill(placement.pids()["kept_consumer-0"], signal.SIGKILL)
    save(placement, tmp_path)
    assert {incident.role for incident in end(placement, 300)} == {"kept_producer", "kept_consumer"}
    again = RayPlacement(kept_pipeline(300, pace_s=0.001), anywhere=("kept_producer",))
    again.restore(tmp_path)
    assert end(again, 300) == []
    lost = RayPlacement(kept_pipeline(100_000, pace_s=0.01), anywhere=("kept_producer",))
    advance_until(lost, lambda: position(lost) > 1, "it runs")
    second_node()
    with pytest.raises(RoleFailure, match=r"was lost with what its roles kept: `qfleet resume`"):
        advance_until(lost, lambda: False, "the failure")
    assert own_folders(os.getpid()) == []


def site(name: str, cpus: float, store: float = 1e9) -> Site:
    return Site(name, name, cpus, store)


@pytest.mark.parametrize(
    ("cpus", "here", "roles", "expected"),
    [((2, 2), 3, 2, "BB"), ((8, 4), 3, 6, "AABABA"), ((2, 1, 1), 0, 4, "AABC"), ((1,), 5, 3, "AAA")],
)
def test_roles_are_dealt_out_by_the_cpus_that_are_left(
    cpus: tuple[float, ...], here: int, roles: int, expected: str
) -> None:
    nodes = [site(name, count) for name, count in zip("ABC", cpus, strict=False)]
    dealt = "".join(one.name for one in deal(here, roles, nodes))
    assert dealt == expected


def test_more_roles_than_a_cluster_has_cpus_for_are_refused(ray_session: None) -> None:
    import ray

    from qfleet.runtime.ray_cluster import cpu_shares, require_started, sites

    (here,) = sites("")
    assert cpu_shares([here] * 5) == {here: 0.2}
    with pytest.raises(ConfigError, match=r"no CPUs for 1000 roles: node .* has 2, .*; lower --actors or add nodes"):
        cpu_shares([here] * 1000)
    with pytest.raises(ConfigError, match=r"no CPUs for 8 roles: they ask for 3, and .* are free .*; end other work"):
        cpu_shares([here] * 4 + [site("A", 4)] * 4, patience_s=0.1)

    class Waiting:
        def ready(self) -> None:
            pass

    waiting = ray.remote(Waiting).options(num_cpus=3).remote()
    with pytest.raises(ConfigError, match=r"has not started 1 of 1 roles within 1 s \(actor-0\): are there CPUs free"):
        require_started({"actor-0": waiting}, 1.0)
    ray.kill(waiting)


def test_an_object_store_that_is_too_small_is_refused() -> None:
    from qfleet.runtime.ray_cluster import require_store

    require_store([site("B", 2, store=2e6)], 1e6)
    with pytest.raises(ConfigError, match=r"node B is too small: 3.0 MB .* it has 2.0 MB; start Ray there with"):
        require_store([site("B", 2, store=2e6)], 3e6)


def test_a_cluster_that_cannot_be_joined_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Ray: nobody listens; a head does, and Ray says what it says without a token or of other versions."""
    import ray

    from qfleet.runtime import ray_head
    from qfleet.runtime.ray_cluster import connect

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address} .*is its head running"):
            connect(address)
    says = ConnectionError("Failed to connect to Ray cluster")

    def refused(**settings: Any) -> None:
        raise says

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "an old one")
    with answering(ray_head._GREETING[-9:]) as address:
        with pytest.raises(
            ConfigError, match=r"could not join .* want another token \(set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or"
        ):
            connect(address)
        says = RuntimeError("Version mismatch: The cluster was started with: Ray: 2.50.0")
        with pytest.raises(ConfigError, match=r"has other versions: .*Ray: 2.50.0; install the same on every node"):
            connect(address)
    for client in ("ray://somewhere:10001", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
        with pytest.raises(
            ConfigError, match=r"of Ray's client: run qfleet on a node of the cluster, with --address HOST"
        ):
            connect(client)


def test_whoever_waits_for_ray_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from qfleet.core.announcing import heard_by
    from qfleet.runtime import ray_cluster, ray_head

    told: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: told.append("it starts"))
    monkeypatch.setattr(ray_cluster, "start_local", lambda: told.append("it starts"))
    with heard_by(told.append):
        assert ray_cluster.connect(None)
        with answering(ray_head._GREETING[-9:]) as address:
            assert ray_cluster.connect(address)
    first, second = "starting a Ray of this machine", f"joining the Ray cluster at {address}"
    assert told == [first, "it starts", second, "it starts"]


@contextlib.contextmanager
def answering(text: bytes) -> Iterator[str]:
    """Have somebody listen who says this to each who comes, and then nothing; returns the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            lines = []
            with contextlib.suppress(OSError):
                while True:
                    lines.append(listening.accept()[0])
                    lines[-1].sendall(text)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        server.join()


@pytest.mark.parametrize(
    ("text", "trouble"),
    [(b"", "says nothing within 0.2 s"), (b"HTTP/1.0 400 Bad", "does not speak as Ray does"), (b"HT", "says nothing")],
)
def test_somebody_who_is_no_head_is_refused_before_ray_tries_for_minutes(
    text: bytes, trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its address, and by that which a former cluster has left behind for 'auto'."""
    import ray
    from ray._private import services, utils

    from qfleet.runtime import ray_head
    from qfleet.runtime.ray_cluster import connect

    left_behind = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_head, "_GREET_S", 0.2)
    monkeypatch.setattr(services, "find_gcs_addresses", list)
    for module in (utils, ray_head):
        monkeypatch.setattr(module, "get_ray_address_file", lambda folder: str(left_behind))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"auto finds no Ray cluster on this machine: start one \(`ray start --head`"):
        connect("auto")
    with answering(text) as address:
        with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address} \(.*{trouble}.*Leave --address"):
            connect(address)
        left_behind.write_text(address)
        with pytest.raises(ConfigError, match=rf"at {address}, .* auto leads by the file {left_behind} \(.*{trouble}"):
            connect("auto")
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(
            ConfigError, match=rf"at {address}, .* auto leads by the variable RAY_ADDRESS \(.*{trouble}"
        ):
            connect("auto")


def test_a_ray_of_this_machine_lets_nobody_read_metrics_without_a_token(ray_session: None) -> None:
    import psutil
    import ray

    (monitor,) = ray._private.worker._global_node.all_processes["monitor"]
    log = Path(ray._private.worker._global_node.get_logs_dir_path(), "monitor.log")
    wait_until(lambda: log.exists() and "Monitor: Started" in log.read_text(), "it listens if it ever does")
    open_ports = [one.laddr for one in psutil.Process(monitor.process.pid).net_connections() if one.status == "LISTEN"]
    assert open_ports == []


def test_a_head_that_lives_is_found(ray_session: None) -> None:
    import ray

    from qfleet.runtime.ray_head import find_head

    address = ray.get_runtime_context().gcs_address
    assert find_head(address) == address


def test_nodes_that_differ_are_refused(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This node plays the other one."""
    from qfleet.runtime import ray_cluster

    (here,) = ray_cluster.sites("")
    ray_cluster.require_alike([here], [], None)
    with pytest.raises(ConfigError, match=r"cannot play this environment: ModuleNotFoundError: .*no_such_env.*install"):
        ray_cluster.require_alike([here], [], partial(importlib.import_module, "no_such_env"))
    own = ray_cluster.versions()
    monkeypatch.setattr(ray_cluster, "versions", lambda: {**own, "torch": "0.1"})
    with pytest.raises(ConfigError, match=rf"has torch {re.escape(own['torch'])}, here 0.1: install the same versions"):
        ray_cluster.require_alike([here], [], None)


@pytest.mark.slow
def test_roles_follow_nodes_that_join_are_lost_and_are_drained(later_node: Any, tmp_path: Path) -> None:
    """What was sent comes through, whichever node it was sent from; only a keep does not travel."""
    import ray

    from qfleet.runtime.ray import RayPlacement

    graph = kept_pipeline(100_000, pace_s=0.02)
    outlet, inlet = graph.stream("other", 3, views=True)
    settings = Settings(count=100_000, size=100, pace_s=0.02)
    graph.add(KeptProducer, settings, Handles(outlet=outlet, keep=graph.keep("second producer")))
    graph.add(KeptConsumer, settings, Handles(inlet=inlet, keep=graph.keep("second consumer")))
    kind, second = "kept_producer", "kept_producer-1"
    placement = RayPlacement(graph, anywhere=(kind,), away=(second,), expendable=(kind,))

    def taken(more: int) -> Callable[[], bool]:
        """Return whether so many more messages of the second producer have come."""

        def now() -> float:
            reports = {(report.kind, report.index): report for report in placement.reports()}
            return reports["kept_consumer", 1].metrics.get("position", 0.0)

        goal = now() + more
        return lambda: now() >= goal

    here = placement.machines()[0].id
    other = later_node.begin()
    assert placement.come(kind, [1], other)
    assert placement.home(second) == other
    advance_until(placement, taken(20), "messages come over")
    later_node.end()
    advance_until(placement, lambda: placement.present(kind) == [0], "who was there is given up")
    assert [notice.kind for notice in placement.incidents()] == ["node_lost"]
    assert [machine.id for machine in placement.machines()] == [here], "whether Ray knows it already or not"
    assert not placement.come(kind, [1], other)
    save(placement, tmp_path)
    advance_until(placement, lambda: placement.absent(kind) == [1], "its place is free")
    assert placement.come(kind, [1], here)
    advance_until(placement, taken(20), "it goes on elsewhere")
    placement.go(kind, [1])
    advance_until(placement, lambda: placement.absent(kind) == [1], "it has left")

    other = later_node.begin()
    assert placement.come(kind, [1], other)
    advance_until(placement, taken(20), "it is on a node that joined")
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    assert client.drain_node(other, 2, "spot", int(1000 * (time.time() + 300)))[0]
    advance_until(placement, lambda: bool(placement.machines()[-1].draining), "Ray says that it is to go")
    assert "Ray drains it; " in placement.machines()[-1].draining
    placement.go(kind, [1])
    advance_until(placement, lambda: placement.absent(kind) == [1], "all that it sent is used up")
    assert [keepers for keepers in placement._keepers if keepers.abroad] == [], "nothing of the run is there any more"
    assert placement.come(kind, [1], here)
    advance_until(placement, taken(20), "it is back")
    placement.close()
    assert [one for one in placement.incidents() if isinstance(one, Incident)] == [], "nobody died"
    assert own_folders(os.getpid()) == []
