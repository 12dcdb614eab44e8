"""The Ray that a run uses: started here or joined, looked over before training, its nodes dealt out to the roles."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from qfleet.core.announcing import announce
from qfleet.core.errors import ConfigError, MissingExtra
from qfleet.core.versions import versions

try:
    import ray
    from ray import cloudpickle
    from ray.autoscaler.sdk import request_resources
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise MissingExtra("ray", "ray", "the placement 'ray'") from error

from qfleet.runtime.ray_head import find_head

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LOOK_S = 120.0
"""How long a node may take to say what it has: it imports torch for that."""
_SAME = ("qfleet", "python", "torch", "numpy", "ray")
"""What must be the same on every node."""


@dataclass(frozen=True)
class Site:
    """A node of the cluster, as far as roles are placed there."""

    id: str
    name: str
    cpus: float
    object_store: float
    """Bytes."""
    gpus: float = 0.0
    custom: frozenset[tuple[str, float]] = frozenset()
    """What a person said that it has besides, by name (`ray start --resources`)."""
    address: str = ""
    """By which other nodes reach it."""

    def room(self, needs: Mapping[str, float]) -> float:
        """Return how many roles with such needs fit here, whatever CPUs there are."""
        custom = dict(self.custom)
        return min((custom.get(name, 0.0) // amount for name, amount in needs.items()), default=math.inf)


def start_local() -> None:
    """Start a Ray of this machine alone: quiet, on loopback, with a token, because Ray listens on all addresses."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by Ray's choice: anything else on the machine would go first
    os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")  # else Ray gives up on a busy machine
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
    os.environ.setdefault("AUTOSCALER_METRIC_PORT", "-1")  # none: else anybody may read its metrics, without the token
    ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **_QUIET)


def stop_local() -> None:
    """Leave Ray, and end it if it was started here."""
    ray.shutdown()


def dead_part() -> str:
    """Return which process of a Ray that was started here has died, without which it cannot go on; empty if none has.

    Ray itself says nothing of it for half a minute, and ends this process some time after that.
    """
    node: Any = ray._private.worker._global_node
    dead = [kind for kind, _ in node.dead_processes()] if node else []
    return next((kind for kind in ("gcs_server", "raylet") if kind in dead), "")


def helpers() -> list[psutil.Process]:
    """Return what the raylet of a Ray that was started here has started; agents outlive it by a minute."""
    node: Any = ray._private.worker._global_node
    raylets = node.all_processes.get("raylet", []) if node else []
    return [child for raylet in raylets for child in psutil.Process(raylet.process.pid).children()]


def bury_local(left: Sequence[psutil.Process]) -> None:
    """End what is left of a Ray that was started here and has lost a part: to leave it in order would wait for that.

    That is, besides its own processes, those of its helpers that were noted as long as it lived.
    """
    node: Any = ray._private.worker._global_node
    if node:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    for helper in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()
    ray.shutdown()


def connect(address: str | None) -> bool:
    """Make sure that there is a Ray to use; returns whether it is this run's to leave."""
    if ray.is_initialized():
        return False
    if address is None:
        announce("starting a Ray of this machine")
        start_local()
        return True
    head = find_head(address)
    announce(f"joining the Ray cluster at {head}")
    try:
        ray.init(address=head, **_QUIET)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(_told(head, str(error))) from error
    return True


def _told(address: str, text: str) -> str:
    """Return what a person should do who could not join a cluster that answers."""
    brief = " ".join(text.split())[:300]
    if "ersion mismatch" in text:
        return f"the Ray cluster at {address} has other versions: {brief}; install the same on every node"
    known = any(name in os.environ for name in _TOKENS) or Path("~/.ray/auth_token").expanduser().is_file()
    return (
        f"could not join the Ray cluster at {address} ({brief}): is there a node of it on this machine"
        f" (`ray start --address HEAD:PORT`), and does it want {'another' if known else 'a'} token (set"
        f" RAY_AUTH_MODE=token, and {_TOKENS[0]} or {_TOKENS[1]} to that of its head)?"
    )


def here() -> str:
    """Return the id of the driver's node."""
    return str(ray.get_runtime_context().get_node_id())


def sites(first: str) -> list[Site]:
    """Return the nodes that live, the one with this id first. Never starts a Ray where there is none any more."""
    found = [
        Site(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})",
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("object_store_memory", 0.0),
            node["Resources"].get("GPU", 0.0),
            frozenset((name, float(amount)) for name, amount in node["Resources"].items() if _is_custom(name)),
            node["NodeManagerAddress"],
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(found, key=lambda site: (site.id != first, site.id))


def _is_custom(name: str) -> bool:
    """Return whether a resource is none of those that Ray finds out by itself."""
    return name not in ("CPU", "GPU", "memory", "object_store_memory") and not name.startswith(("node:", "accelerator"))


def ask_for(bundles: Sequence[Mapping[str, float]]) -> None:
    """Tell the cluster's autoscaler, if it has one, that there should be room for these all at once; until asked anew.

    It takes what runs already as part of that.
    """
    request_resources(bundles=[dict(bundle) for bundle in bundles])


def draining() -> dict[str, str]:
    """Return the ids of nodes that are to go, each with why; nothing where this Ray does not tell.

    Ray knows it from `ray drain-node`, from its autoscalers, and from a node whose `ray start` got a SIGTERM.
    """
    try:
        found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    except (AttributeError, RayError):  # no part of what Ray promises
        return {}
    now = time.time()
    return {
        node: f"Ray drains it; {max(0.0, at / 1e3 - now):.0f} s are left" if 0 < at < 2**62 else "Ray drains it"
        for node, at in found.items()
    }


def cpu_shares(homes: Collection[Site], patience_s: float = 10.0) -> dict[Site, float]:
    """Return the CPUs that each role on a node asks for, given the node of every role; raises ConfigError without room.

    That is one, or so little that two such runs fit. What another run has just left may take some seconds to be free.
    """
    roles = Counter(homes)
    shares = {site: min(1.0, math.floor(100 * site.cpus / (2 * count)) / 100) for site, count in roles.items()}
    for site, share in shares.items():
        if share == 0.0:
            raise ConfigError(
                f"no CPUs for {roles[site]} roles: node {site.name} has {site.cpus:g}, less than a hundredth for"
                " each and as much again; lower --actors or add nodes"
            )
    wanted = sum(share * roles[site] for site, share in shares.items())
    until = time.monotonic() + patience_s
    while (free := _free_cpus()) < wanted - 1e-6 and time.monotonic() < until:
        time.sleep(0.1)
    if free < wanted - 1e-6:
        raise ConfigError(
            f"no CPUs for {roles.total()} roles: they ask for {wanted:g}, and {free:g} are free in the Ray cluster;"
            " end other work there, lower --actors, or add nodes"
        )
    return shares


def gpu_shares(homes: Mapping[str, Site]) -> dict[str, float]:
    """Return the part of a GPU that each role asks for, given the nodes of those that compute on one.

    A whole one as long as there are enough; else equally many share each.
    """
    shares = {}
    for name, site in homes.items():
        if not site.gpus:
            raise ConfigError(
                f"{name} computes on a GPU, and Ray knows of none on node {site.name}: start Ray there with"
                " --num-gpus N, or use device 'cpu'"
            )
        roles = list(homes.values()).count(site)
        shares[name] = 1.0 / math.ceil(roles / int(max(site.gpus, 1)))
    return shares


def _free_cpus() -> float:
    free: float = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    return free


def require_started(actors: Mapping[str, Any], patience_s: float = 300.0) -> None:
    """Raise ConfigError when Ray has not started all actors in time: it waits for ever for CPUs that others have."""
    calls = {actor.ready.remote(): name for name, actor in actors.items()}
    _, missing = ray.wait(list(calls), num_returns=len(calls), timeout=patience_s)
    if missing:
        names = ", ".join(sorted(calls[call] for call in missing)[:5])
        raise ConfigError(
            f"Ray has not started {len(missing)} of {len(calls)} roles within {patience_s:g} s ({names}): are there"
            " CPUs free on their nodes (`ray status`)? End other work there, or lower --actors"
        )


def deal(
    here: int,
    anywhere: int,
    nodes: Sequence[Site],
    needs: Mapping[str, float] | None = None,
    settled: Sequence[Site] = (),
) -> list[Site]:
    """Return a node for each of so many roles that may be anywhere, when so many others are on the first node.

    The next one goes to the node that has most CPUs left, of those that still have what it needs. Further roles are on
    the nodes of `settled`.
    """
    room = [site.room(needs or {}) for site in nodes]
    if sum(room) < anywhere:
        raise ConfigError(
            f"{anywhere} actors need {_listed(needs or {})} each (actor_resources), and the Ray cluster has room for"
            f" {sum(room):g}: start Ray on more nodes with --resources '{json.dumps(dict(needs or {}))}', or lower"
            " --actors"
        )
    left = [site.cpus - (here if number == 0 else 0) - settled.count(site) for number, site in enumerate(nodes)]
    dealt = []
    for _ in range(anywhere):
        number = max((number for number in range(len(nodes)) if room[number] >= 1), key=lambda number: left[number])
        left[number] -= 1
        room[number] -= 1
        dealt.append(nodes[number])
    return dealt


def _listed(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def on(site: Site) -> NodeAffinitySchedulingStrategy:
    """Return what makes Ray put something on a node and nowhere else."""
    return NodeAffinitySchedulingStrategy(site.id, soft=False)


def require_alike(others: Sequence[Site], search_path: Sequence[str], rehearsal: Callable[[], Any] | None) -> None:
    """Raise ConfigError unless all other nodes have what this one has, and what `rehearsal` needs can be had there."""

    packed: bytes = cloudpickle.dumps(rehearsal)  # type: ignore[no-untyped-call]

    def look() -> tuple[dict[str, str], str]:
        """Runs there; defined here, so that it is sent as it is, whatever is installed there."""
        import sys

        from ray import cloudpickle

        sys.path += [folder for folder in search_path if folder not in sys.path]
        try:
            from qfleet.core.versions import versions
        except ImportError as error:
            return {}, f"qfleet cannot be imported there ({error})"
        try:
            if (rehearse := cloudpickle.loads(packed)) is not None:
                rehearse()
        except Exception as error:
            return versions(), f"{type(error).__name__}: {error}"
        return versions(), ""

    looking = {site: ray.remote(look).options(num_cpus=0, scheduling_strategy=on(site)).remote() for site in others}
    own = versions()
    for site, answer in looking.items():
        try:
            theirs, trouble = ray.get(answer, timeout=_LOOK_S)
        except (RayTaskError, RayError) as error:
            raise ConfigError(f"node {site.name} cannot run qfleet: {' '.join(str(error).split())[-300:]}") from error
        other = [
            f"{name} {theirs.get(name)}, here {own.get(name)}" for name in _SAME if theirs.get(name) != own.get(name)
        ]
        if theirs and other:
            raise ConfigError(f"node {site.name} has {'; '.join(other)}: install the same versions on every node")
        if trouble:
            raise ConfigError(
                f"node {site.name} cannot play this environment: {trouble}; install there what is missing"
            )


def require_store(others: Sequence[Site], in_flight: float) -> None:
    """Raise ConfigError where a node's object store is too small for the bytes that may be on their way at once."""
    for site in others:
        if in_flight > site.object_store:
            raise ConfigError(
                f"the object store of node {site.name} is too small: {in_flight / 1e6:,.1f} MB may be on their way to"
                f" or from it, and it has {site.object_store / 1e6:,.1f} MB; start Ray there with"
                " --object-store-memory BYTES, or lower actor.envs or actor.unroll"
            )
