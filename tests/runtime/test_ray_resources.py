"""What roles ask of a Ray cluster: parts of GPUs, nodes with what actors need, and room from an autoscaler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfleet.core.errors import ConfigError

pytest.importorskip("ray")

from qfleet.runtime import ray_cluster, ray_stewards
from qfleet.runtime.answers import Answer
from qfleet.runtime.children import Birth
from qfleet.runtime.ray_cluster import Site, deal, gpu_shares
from qfleet.runtime.ray_life import RoleLife
from qfleet.runtime.ray_places import rank_site
from qfleet.runtime.ray_stewards import Stewards

ON_GPUS = """
import json, os, signal, time
import ray
ray.init(address="local", num_cpus=4, num_gpus=GPUS, include_dashboard=False, _node_ip_address="127.0.0.1",
         log_to_driver=False)
from qfleet.runtime.ray import RayPlacement
from toy_roles import kept_pipeline

names = ["kept_producer-0", "kept_consumer-0"]
placement = RayPlacement(kept_pipeline(400, pace_s=0.01), on_gpus=names)
free = [ray.available_resources().get("GPU", 0.0)]
os.kill(placement.pids()[names[1]], signal.SIGKILL)
until = time.monotonic() + 120
while not placement.done and time.monotonic() < until:
    placement.advance()
deaths = len(placement.incidents())
done = placement.done
placement.close()
print(json.dumps({"free": free, "done": done, "deaths": deaths}))
"""


def site(name: str, gpus: float = 0.0, **custom: float) -> Site:
    return Site(name, name, 4.0, 1e9, gpus, frozenset(custom.items()))


@pytest.mark.parametrize(
    ("gpus", "roles", "share"), [(1, 1, 1.0), (4, 2, 1.0), (1, 2, 0.5), (2, 3, 0.5), (2, 4, 0.5), (2, 5, 1 / 3)]
)
def test_roles_get_a_gpu_each_or_share_equally_what_there_is(gpus: int, roles: int, share: float) -> None:
    names = [f"learner-{rank}" for rank in range(roles)]
    shares = gpu_shares({name: site("A", gpus) for name in names})
    assert shares == dict.fromkeys(names, share)
    assert roles <= gpus * int(1 / share + 1e-9), "so many fit, none of them on two GPUs"


def test_a_gpu_that_ray_does_not_know_of_is_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"learner-0 computes on a GPU, .* none on node A: start Ray there with"):
        gpu_shares({"learner-0": site("A")})


def test_actors_are_only_where_there_is_what_they_need() -> None:
    nodes = [site("A"), site("B", emulator=1.0), site("C", emulator=8.0)]
    dealt = [one.name for one in deal(0, 9, nodes, {"emulator": 1.0})]
    assert (dealt.count("B"), dealt.count("C")) == (1, 8), "no more than there is"
    assert {one.name for one in deal(0, 4, nodes, {"emulator": 2.0})} == {"C"}
    with pytest.raises(ConfigError, match=r"5 actors need 2 emulator each .* room for 4: .*--resources"):
        deal(0, 5, nodes, {"emulator": 2.0})
    with pytest.raises(ConfigError, match=r"1 actors need 2 emulator, 1 disk each .* room for 0"):
        deal(0, 1, nodes, {"emulator": 2.0, "disk": 1.0})


@pytest.mark.parametrize(
    ("cpus", "gpus", "ranks", "on_gpu", "expected"),
    [
        ((8, 8), (0, 0), 4, False, "AAAA"),  # the driver's node has room
        ((4, 8, 6), (0, 0, 0), 6, False, "ABBBCB"),  # then where most CPUs are left
        ((2, 1), (0, 0), 3, False, "B--"),  # then nowhere
        ((8, 8, 8), (2, 1, 2), 5, True, "ACBC-"),  # the first rank has one of the driver's GPUs
    ],
)
def test_ranks_go_where_a_gpu_or_a_cpu_is_left(
    cpus: tuple[int, ...], gpus: tuple[int, ...], ranks: int, on_gpu: bool, expected: str
) -> None:
    """Three roles are on the first node, one of them the first rank."""
    nodes = [Site(name, name, cpu, 1e9, gpu) for name, cpu, gpu in zip("ABC", cpus, gpus, strict=False)]
    roles, beside, found = Counter({nodes[0]: 3}), Counter({nodes[0]: 1}), ""
    for _ in range(ranks):
        site = rank_site(nodes, roles, beside, on_gpu)
        found += "-" if site is None else site.name
        if site is not None:
            roles[site] += 1
            beside[site] += 1
    assert found == expected


def test_actors_go_where_ranks_leave_cpus() -> None:
    a, b, c = Site("A", "A", 4.0, 1e9), Site("B", "B", 4.0, 1e9), Site("C", "C", 4.0, 1e9)
    assert "".join(one.name for one in deal(3, 4, [a, b, c], settled=[b, b])) == "CCBC"


def test_an_autoscaler_reads_what_the_run_asks_for(ray_session: None) -> None:
    from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get  # where Ray's own autoscaler looks

    def asked() -> list[dict[str, float]]:
        found: list[dict[str, float]] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL))
        return found

    ray_cluster.ask_for([{"CPU": 1.0, "emulator": 1.0}] * 2)
    assert asked() == [{"CPU": 1.0, "emulator": 1.0}] * 2
    ray_cluster.ask_for([])
    assert asked() == []


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "free"), [(1, 0.0), (3, 1.0)])
def test_roles_on_gpus_hold_them_and_get_them_again_after_a_death(gpus: int, free: float, tmp_path: Path) -> None:
    """With GPUs that Ray only believes in; a Ray of its own, since this one has none."""
    script = tmp_path / "on_gpus.py"
    script.write_text(ON_GPUS.replace("GPUS", str(gpus)))
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path]), "RAY_AUTH_TOKEN": "x" * 64}
    said = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(next(line for line in said.stdout.splitlines() if line.startswith("{"))) == {
        "free": [free],
        "done": True,
        "deaths": 1,
    }


class Made:
    """What pretends to be Ray's: the actors that were asked for, with what they asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.killed: list[Any] = []
        monkeypatch.setattr(ray_stewards, "make_actor", self._make)
        monkeypatch.setattr(ray_cluster, "require_started", lambda actors: None)
        monkeypatch.setattr(ray_stewards.ray, "kill", lambda actor: self.killed.append(actor.name))
        monkeypatch.setattr(ray_stewards.ray, "wait", self._wait)
        self.left: list[str] = []

    def _make(self, cls: Any, name: str, namespace: str, home: Site, **resources: Any) -> Any:
        self.asked.append({"node": home.name, **resources})
        leave = SimpleNamespace(remote=lambda: name)
        return SimpleNamespace(remote=lambda *told: SimpleNamespace(name=name, leave=leave))

    def _wait(self, calls: list[str], num_returns: int, timeout: float) -> None:
        assert not self.killed, "nobody leaves who is dead"
        self.left += calls


def test_the_roles_of_a_node_have_one_steward_with_what_they_ask_for_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made, here, there = Made(monkeypatch), site("A", 1.0), site("B")
    stewards = Stewards([], lambda home, pid: None)
    homes = {"learner-0": here, "replay-0": here, "actor-0": there, "actor-1": there, "actor-2": there}
    needs = {f"actor-{index}": {"emulator": 0.5} for index in range(3)}
    stewards.hire(homes, {here: 0.3, there: 1.0}, {"learner-0": 1.0}, needs)
    assert made.asked == [
        {"node": "A", "num_cpus": 0.3, "num_gpus": 1.0, "resources": {}},
        {"node": "A", "num_cpus": 0.3, "num_gpus": 0.0, "resources": {}},
        {"node": "B", "num_cpus": 3.0, "num_gpus": 0.0, "resources": {"emulator": 1.0}},  # whole numbers beyond one
    ]
    assert stewards.line("actor-0", there) is stewards.line("actor-2", there)
    assert stewards.line("learner-0", here) is not stewards.line("replay-0", here)


def test_a_steward_is_made_anew_when_it_is_dead_and_takes_its_gpu_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, here = Made(monkeypatch), site("A", 1.0)
    stewards = Stewards([], lambda home, pid: None)
    stewards.hire({"learner-0": here}, {here: 0.5}, {"learner-0": 0.5}, {})
    first = stewards.line("learner-0", here)
    first.end(Answer("died"))
    assert stewards.line("learner-0", here) is not first
    assert made.asked[-1] == {"node": "A", "num_cpus": 0.0, "num_gpus": 0.5, "resources": {}}


def test_who_lived_on_a_node_that_is_forgotten_is_dead_and_its_steward_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, there = Made(monkeypatch), site("B")
    stewards = Stewards([], lambda home, pid: None)
    stewards.hire({"actor-0": there}, {there: 1.0}, {}, {})
    life = RoleLife(stewards.line("actor-0", there), Birth("actor-0", "forkserver", Path("nowhere"), b""))
    life.condemn("B was lost")
    stewards.forget(there)
    assert (made.left, made.killed, stewards.lines()) == (["steward-1"], ["steward-1"], [])
    assert life.hear() == [Answer("died", "B was lost")]
